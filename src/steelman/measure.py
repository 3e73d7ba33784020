"""``steelman evaluate``: find the model, the data and the threat that the command line names, and measure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console
from torch import nn

from steelman import data as datasets
from steelman.config import attack_from_text, name_and_options, options_from_texts
from steelman.errors import UserError, unknown
from steelman.evaluation import Evaluation, evaluate
from steelman.models import PUBLISHED_LAYOUTS
from steelman.models.classifier import build_classifier, load_state, load_weights
from steelman.run import load_model, write_report
from steelman.settings import SettingsError
from steelman.threat import ThreatModel


def measure(
    target: str,
    *,
    data: str | None,
    root: Path | None,
    norm: str | None,
    eps: str | None,
    attacks: list[str],
    weights: Path | None,
    layout: str | None,
    head: str,
    options: list[str],
    samples: int | None,
    batch_size: int,
    seed: int,
    workers: int,
    out: Path | None,
    console: Console,
) -> Evaluation:
    """Evaluate a run or a model, print the table, and write evaluation.json and report.html."""
    chosen = dict(attack_from_text(text) for text in attacks) or None
    folder = Path(target)
    model: nn.Module
    described: dict[str, Any] = {}
    if folder.is_dir():
        model, described = load_model(folder)
    if described and (weights or layout or options or head != "linear"):
        raise UserError("--weights, --layout, --head and --option are for a model given by name; a run has its own")
    if not folder.is_dir() and ("/" in target or (":" not in target and folder.suffix)):
        raise UserError(f"no run at {target}; expected a run's folder, a model's name or package.module:factory")
    own = described.get("data", {"name": None, "options": {}})
    name, where = name_and_options(data) if data else (own["name"], {})
    where = {**(own["options"] if name == own["name"] else {}), **where, **({"root": root} if root else {})}
    if name is None:
        raise UserError(
            f"--data: expected a dataset for a model given by name; choices: {', '.join(datasets.DATASETS)}"
        )
    if out is not None and ((out / "evaluation.json").exists() or (out / "report.html").exists()):
        raise UserError(f"--out: {out} already holds a report; choose another folder, or delete it")
    threat = _threat(described.get("threat"), norm, eps)
    dataset = datasets.load(name, **where)
    if not folder.is_dir():
        model = _named(target, dataset, head, options_from_texts(options), weights, layout)
    elif tuple(described["input_shape"]) != dataset.shape:
        raise UserError(
            f"the model takes images of shape {tuple(described['input_shape'])}, and {name} has {dataset.shape}"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    label = described.get("recipe", target)
    found = evaluate(
        model.to(device),
        dataset.test,
        threat,
        chosen,
        name=label,
        data_name=f"{dataset.name} test",
        samples=samples,
        batch_size=batch_size,
        seed=seed,
        workers=workers,
        device=device,
        console=console,
    )
    place = out or _free(
        (folder if folder.is_dir() else Path("runs")) / "evaluations" / f"{threat.norm}-{threat.eps:.4g}"
    )
    found.save(place)
    write_report(place, found, console)
    return found


def _threat(own: dict[str, Any] | None, norm: str | None, eps: str | None) -> ThreatModel:
    if own is None and eps is None:
        raise UserError("--eps: expected a radius, such as 8/255, for a model that is not a run")
    given: dict[str, Any] = {**(own or {}), **({"norm": norm} if norm else {}), **({"eps": eps} if eps else {})}
    if own is not None and norm not in (None, own["norm"]) and eps is None:
        raise UserError(f"--eps: expected a radius for norm {norm}; the run's own is for {own['norm']}")
    try:
        return ThreatModel(**given)
    except ValidationError as error:
        raise UserError(f"threat model: {SettingsError.of(error, ThreatModel)}") from None


def _named(
    target: str, dataset: Any, head: str, options: dict[str, Any], weights: Path | None, layout: str | None
) -> nn.Module:
    """A model by registry name or import path, with weights from a file."""
    head_name, head_options = name_and_options(head)
    model = build_classifier(
        target,
        input_shape=dataset.shape,
        num_classes=dataset.num_classes,
        head=head_name,
        head_options=head_options,
        **options,
    )
    if weights is None:
        if layout is not None:
            raise UserError(f"--layout {layout}: expected --weights with it, the file of that layout")
        if ":" not in target:
            raise UserError(
                f"--weights: expected a file of trained weights for {target}; untrained ones measure nothing"
            )
        return model
    state = load_state(weights)
    if layout is not None:
        if layout not in PUBLISHED_LAYOUTS:
            raise unknown("layout", layout, PUBLISHED_LAYOUTS)
        state = PUBLISHED_LAYOUTS[layout](state)
    own = model.state_dict()
    # Published weights seldom carry the input normalisation; here it is part of the model, and by default none.
    state = {**{key: own[key] for key in ("mean", "std") if key in own}, **state}
    load_weights(model, state, str(weights))
    return model


def _free(folder: Path) -> Path:
    """`folder`, or the first numbered name beside it that is not taken: an evaluation is never overwritten."""
    place, count = folder, 1
    while place.exists():
        count += 1
        place = folder.with_name(f"{folder.name}-{count}")
    return place
