"""``steelman distance``: how far the nearest adversarial points of the model that the command line names are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from steelman.cli.subjects import attack_from_text, subject, threat_from
from steelman.errors import UserError
from steelman.evaluation.distance import Distances, distance


def measure_distance(
    target: str,
    *,
    attack: str,
    data: str | None,
    root: Path | None,
    norm: str | None,
    eps: str | None,
    weights: Path | None,
    layout: str | None,
    head: str,
    options: Sequence[str],
    samples: int | None,
    batch_size: int,
    seed: int,
    workers: int,
    out: Path | None,
    console: Console,
) -> Distances:
    """Measure the distances, print mean and median, and write distances.json where `out` says so."""
    _, chosen = attack_from_text(attack)
    if out is not None and (out / "distances.json").exists():
        raise UserError(f"--out: {out} already holds distances; choose another folder, or delete it")
    asked = subject(target, data=data, root=root, weights=weights, layout=layout, head=head, options=options)
    threat = threat_from(asked.described.get("threat"), norm, eps)
    model, dataset = asked.load()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = distance(
        model.to(device),
        dataset.test,
        None,
        threat,
        chosen,
        name=asked.name,
        data_name=f"{dataset.name} test",
        samples=samples,
        batch_size=batch_size,
        seed=seed,
        workers=workers,
        device=device,
        console=console,
    )
    console.print(found.table())
    if out is not None:
        found.save(out)
        console.print(f"distances: {out / 'distances.json'}", highlight=False, soft_wrap=True)
    return found
