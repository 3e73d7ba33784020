"""``steelman distance``: the distances of a model's nearest adversarial points."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steelman.cli.listing import AllowImport, complete_dataset, complete_nearest, console
from steelman.errors import UserError

app = typer.Typer()


@app.command()
def distance(
    target: Annotated[
        str, typer.Argument(help="A run's folder; or a model's name or package.module:factory, with --weights.")
    ],
    attack: Annotated[
        str,
        typer.Option(
            help="An attack with options that looks for the nearest point: rays (linf), deepfool (linf, l2), fab, "
            "cw (l2). With rays the mean is ADBD.",
            autocompletion=complete_nearest,
        ),
    ] = "rays",
    data: Annotated[
        str | None,
        typer.Option(
            help="Dataset, such as mnist; by default the run's own. Its test set is used.",
            autocompletion=complete_dataset,
        ),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Where the dataset is, for 'folder' and 'arrays'.")] = None,
    norm: Annotated[str | None, typer.Option(help="linf, l2 or l1; by default the run's own.")] = None,
    eps: Annotated[
        str | None, typer.Option(help="Radius that distances are compared with; by default the run's own.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="safetensors, or a state dict torch can read safely.")] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Measure what a factory makes even if its weights are random.")
    ] = False,
    layout: Annotated[str | None, typer.Option(help="Layout of published weights, such as trades-smallcnn.")] = None,
    head: Annotated[str, typer.Option(help="Head of a model given by name, such as he or he:scale=10.")] = "linear",
    option: Annotated[
        list[str] | None, typer.Option(help="An option of a model given by name: width=16. Repeat for more.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Only the first that many test images.")] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the attack's random starts.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read the images of a folder.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for distances.json.")] = None,
    allow_import: AllowImport = None,
) -> None:
    """Measure how far the nearest adversarial points are: the mean and the median distance with 95% intervals.

    Example: steelman distance runs/mine --attack rays:queries=10000 --samples 100
    """
    import torch

    from steelman.cli import subjects
    from steelman.data.source import first
    from steelman.evaluation.distance import distance as measure
    from steelman.progress import showing

    options = option or []
    untrained = subjects.random_weights(target, options, weights, allowed=random_weights)
    _, chosen = subjects.attack_from_text(attack)
    if out is not None and (out / "distances.json").exists():
        raise UserError(f"--out: {out} already holds distances; choose another folder, or delete it")
    asked = subjects.subject(
        target,
        data=data,
        root=root,
        weights=weights,
        layout=layout,
        head=head,
        options=options,
        allow_import=allow_import or (),
    )
    threat = subjects.threat_from(asked.described.get("threat"), norm, eps)
    model, dataset = asked.load()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = first(dataset.test, samples)
    source.workers = workers
    with showing(console):
        found = measure(
            model.to(device), source, None, threat, chosen, name=asked.name, batch_size=batch_size, seed=seed
        )
    console.print(found.table())
    if out is not None:
        found.save(out)
        console.print(f"distances: {out / 'distances.json'}", highlight=False, soft_wrap=True)
    say_if(untrained)


def say_if(untrained: bool) -> None:
    """Print a warning if the model is untrained."""
    if untrained:
        console.print("The weights are random: these are the numbers of an untrained model.", style="yellow")
