"""``steelman corruptions``: the accuracy of models on corrupted images."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from steelman.cli.listing import AllowImport, complete_corruption, complete_dataset, console
from steelman.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from steelman.corruptions.accuracy import CorruptionAccuracy
    from steelman.data import Dataset

app = typer.Typer()


@app.command()
def corruptions(
    models: Annotated[
        list[str],
        typer.Argument(help="Folders of runs, or package.module:factory. NAME=MODEL gives one a name."),
    ],
    data: Annotated[
        str | None,
        typer.Option(
            help="Dataset, such as cifar10; by default the runs' own. Its test set is used.",
            autocompletion=complete_dataset,
        ),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Where the dataset is, for 'folder' and 'arrays'.")] = None,
    samples: Annotated[int | None, typer.Option(help="Only the first that many test images.")] = None,
    corruption: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this corruption. Repeat for more. By default the 15 of the benchmark.",
            autocompletion=complete_corruption,
        ),
    ] = None,
    severity: Annotated[list[int] | None, typer.Option(help="Only this severity, 1 to 5. Repeat for more.")] = None,
    family: Annotated[
        str, typer.Option(help="Whose constants: cifar, imagenet, or auto: imagenet from 64 pixels on.")
    ] = "auto",
    frost: Annotated[str | None, typer.Option(help="A folder with frost1.png to frost5.jpg, or 'generated'.")] = None,
    baseline: Annotated[
        str | None, typer.Option(help="A model, as NAME=MODEL or a run's folder. The mCE is the error against its.")
    ] = None,
    official: Annotated[
        Path | None, typer.Option(help="A folder with CIFAR-10-C, CIFAR-100-C or ImageNet-C, measured too.")
    ] = None,
    published: Annotated[
        str | None, typer.Option(help="A published row to show beside the first model, such as PGD-AT+HE.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 256,
    seed: Annotated[int, typer.Option(help="Seed of the noise.")] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read the images of a folder.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the evidence; by default in runs/corruptions.")] = None,
    allow_import: AllowImport = None,
) -> None:
    """Measure models on corrupted images: 15 corruptions, 5 severities, on any data of 28 pixels or more.

    The images are generated with the constants of CIFAR-10-C or ImageNet-C. An interrupted call goes on where it
    stopped.

    Example: steelman corruptions runs/standard runs/robust --samples 1000 --baseline runs/standard
    """
    import torch

    from steelman.arguments import model_of
    from steelman.cli.measure import dataset_of
    from steelman.cli.subjects import model_at, models_named
    from steelman.corruptions import SEVERITIES, STANDARD
    from steelman.corruptions.measure import claims_of, digest_of, measure
    from steelman.corruptions.official import open_official
    from steelman.corruptions.plan import Plan
    from steelman.corruptions.published import published_row
    from steelman.data.source import first
    from steelman.progress import showing
    from steelman.report import corruptions as page

    row = None if published is None else published_row(published)
    plan = Plan(
        corruptions=tuple(corruption or STANDARD),
        severities=tuple(severity or SEVERITIES),
        family=family,  # type: ignore[arg-type]  # Plan refuses others
        frost=frost,
        seed=seed,
    )
    places = models_named(models)
    base = _baseline(baseline, places)
    loaded = {name: model_at(place, allow_import or ()) for name, place in {**places, **base}.items()}
    dataset = dataset_of([described for _, described in loaded.values() if described], data, root)
    source = first(dataset.test, samples)
    source.workers = workers
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    nets = {name: model_of(name, model).to(device) for name, (model, _) in loaded.items()}
    stored = None if official is None else open_official(official, source)
    if stored is not None and not set(plan.corruptions) & set(stored.corruptions):
        there = ", ".join(stored.corruptions)
        raise UserError(f"--official: {stored.name} there has none of the asked corruptions, only {there}")
    digest = digest_of(source)
    place = out or _default({name: claims_of(name, model, source, plan, None, digest) for name, model in nets.items()})
    homes = _homes(place, list(nets))
    try:
        with showing(console, notes=True):
            found = measure(nets, source, plan, places=homes, batch_size=batch_size)
            others = {}
            if stored is not None:
                within = {name: home / "official" for name, home in homes.items()}
                others = measure(nets, source, plan, official=stored, places=within, batch_size=batch_size)
    except KeyboardInterrupt:
        console.print(
            Text(f"the finished part is kept in {place}; the same command goes on from there"), soft_wrap=True
        )
        raise
    shown = [found[name] for name in places]
    against = found[next(iter(base))] if base else None
    _print(shown, against, others)
    for name, home in homes.items():
        page.write(home / "report.html", [found[name]])
    beside = [(0, page.beside_published(row))] if row is not None else []
    beside += [(at, page.beside_official(others[one.model])) for at, one in enumerate(shown) if one.model in others]
    whole = place / ("report.html" if len(nets) > 1 or not (beside or against) else "comparison.html")
    page.write(whole, shown, baseline=against, beside=beside)
    console.print(Text(f"report: {whole}"), soft_wrap=True)
    for home in (*homes.values(), *(home / "official" for home in homes.values() if others)):
        console.print(Text(f"evidence: {home}, seal {_seal(home)}"), soft_wrap=True)


def checked(
    place: Path,
    net: nn.Module | None,
    dataset: Dataset | None,
    official: Path | None,
    frost: str | None,
    seal: str | None,
) -> tuple[str, str]:
    """Check evidence on corrupted images, and say what was checked."""
    from steelman.corruptions.check import verify_corruptions
    from steelman.corruptions.official import open_official
    from steelman.corruptions.record import read_record
    from steelman.data.source import first
    from steelman.progress import showing

    record = read_record(place).record
    source = None if dataset is None or net is None else first(dataset.test, record["clean_total"])
    stored = None if official is None or source is None else open_official(official, source)
    with showing(console):
        found = verify_corruptions(place, model=net, source=source, official=stored, frost=frost, seal=seal)
    return f"accepted: {place}, seal {found.seal}", f"  {found.text}"


def _baseline(text: str | None, places: Mapping[str, str]) -> dict[str, str]:
    """The baseline by name. It may be one of the models."""
    from steelman.cli.subjects import models_named

    if text is None:
        return {}
    if text in places:
        return {text: places[text]}
    found = models_named([text])
    (name, place), *_ = found.items()
    if name in places and Path(places[name]).resolve() != Path(place).resolve():
        raise UserError(f"--baseline: a model has the name {name!r} already; rename it, as in NAME={place}")
    return found


def _homes(place: Path, names: Sequence[str]) -> dict[str, Path]:
    """A folder for each model: the given one for a single model, else one inside it."""
    from steelman.cli.subjects import folder_name

    if len(names) == 1:
        return {names[0]: place}
    if (place / "corruptions.json").exists():
        raise UserError(f"--out: {place} holds the evidence of a single model; choose another folder")
    homes = {name: place / (folder_name(name) or "model") for name in names}
    for name, home in homes.items():
        if twin := next((other for other in names if other != name and homes[other] == home), None):
            raise UserError(f"the models {name!r} and {twin!r} would have the same folder, {home.name}; rename one")
    return homes


def _default(claims: Mapping[str, Mapping[str, Any]]) -> Path:
    """A folder for these settings. The same settings have the same folder, so an interrupted call is found again."""
    from steelman.cli.subjects import folder_name

    text = json.dumps(claims, sort_keys=True).encode()
    name = folder_name("-".join(claims))[:60] or "model"
    return Path("runs") / "corruptions" / f"{name}-{hashlib.sha256(text).hexdigest()[:8]}"


def _seal(folder: Path) -> str:
    from steelman.corruptions.record import read_record

    return read_record(folder).seal


def _print(
    found: Sequence[CorruptionAccuracy],
    baseline: CorruptionAccuracy | None,
    official: Mapping[str, CorruptionAccuracy],
) -> None:
    """Print the means of each model, the cells of a single one, and the differences."""
    console.print(_means(found, baseline))
    if len(found) == 1:
        console.print(_cells(found[0]))
    for at, one in enumerate(found):
        for other in found[at + 1 :]:
            console.print(Text(one.against(other).text), soft_wrap=True)
    for one in found:
        if one.model in official:
            console.print(_against_official(one, official[one.model]))


def _means(found: Sequence[CorruptionAccuracy], baseline: CorruptionAccuracy | None) -> Table:
    from steelman.corruptions.accuracy import percent
    from steelman.evaluation.result import share_of
    from steelman.report.corruptions import error_names, error_texts

    first = found[0]
    frost = f" Frost: {first.frost}." if first.frost else ""
    caption = (
        f"{first.data}, n = {first.total}, images: {first.source}, seed {first.seed}. Brackets: 95% interval over the "
        f"samples.{frost}"
    )
    table = Table(box=box.SIMPLE_HEAD, caption=Text(caption), caption_justify="left")
    table.add_column("model", overflow="fold")
    names = [
        "clean",
        *first.kinds(),
        "mCA" if first.standard else "mean",
        *(error_names(first) if baseline else ()),
    ]
    for name in names:
        table.add_column(name, justify="right")
    for one in found:
        cells = [share_of(int(one.clean.sum()), len(one.clean))]
        cells += [percent(mean) for mean in (*one.kinds().values(), one.mean)]
        if baseline is not None:
            cells += error_texts(one, baseline)
        table.add_row(Text(one.model), *map(Text, cells))
    return table


def _against_official(one: CorruptionAccuracy, other: CorruptionAccuracy) -> Table:
    """A cell for each corruption and severity of a published set: generated, published, and the difference."""
    from steelman.corruptions.accuracy import percent

    caption = f"{one.model}: generated images, {other.source}, and the difference in points."
    table = Table(box=box.SIMPLE_HEAD, caption=Text(caption), caption_justify="left")
    table.add_column("corruption")
    for severity in other.severities:
        table.add_column(str(severity), justify="right")
    for name in other.corruptions:
        pairs = [
            (100 * one.accuracy(name, severity), 100 * other.accuracy(name, severity)) for severity in other.severities
        ]
        table.add_row(name, *(f"{ours:.1f} {theirs:.1f} {ours - theirs:+.1f}" for ours, theirs in pairs))
    ours, theirs = one.over(other.corruptions, other.severities), other.over(other.corruptions)
    means = f"Means over these cells: {percent(ours)} generated, {percent(theirs)} {other.source}."
    table.caption = Text(f"{caption}\n{means}")
    return table


def _cells(one: CorruptionAccuracy) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("corruption")
    for severity in one.severities:
        table.add_column(str(severity), justify="right")
    table.add_column("mean", justify="right")
    from steelman.corruptions.accuracy import percent

    for name in one.corruptions:
        cells = [f"{100 * one.accuracy(name, severity):.1f}" for severity in one.severities]
        table.add_row(name, *cells, Text(percent(one.over((name,)))))
    return table
