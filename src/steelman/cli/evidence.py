"""The commands that read evidence: verify, compare and gate. They attack nothing, except in an audit."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from steelman.cli.listing import complete_dataset, complete_suite, console, print_table
from steelman.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from steelman.data import Dataset
    from steelman.evidence.compare import Comparison
    from steelman.evidence.verify import Checked

app = typer.Typer()


def _refuse(word: str, reason: str) -> typer.Exit:
    """Print the reason of a refusal, and give exit code 1. A mistake in the command gives 2."""
    Console(stderr=True, soft_wrap=True).print(Text.assemble((f"{word}: ", "bold red"), reason))
    return typer.Exit(1)


def _say(text: str) -> None:
    console.print(Text(text), soft_wrap=True)


@app.command()
def verify(
    bundle: Annotated[Path, typer.Argument(help="The folder of an evaluation, or of a run with a verdict.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="The model: a run's folder; or a name or package.module:factory, with --weights. By default it is the "
            "model of the given run."
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Dataset, such as mnist; by default the run's own. Its test set is used.",
            autocompletion=complete_dataset,
        ),
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Where the dataset is, for 'folder' and 'arrays'.")] = None,
    weights: Annotated[Path | None, typer.Option(help="A safetensors file, or a plain state dict of torch.")] = None,
    layout: Annotated[str | None, typer.Option(help="Layout of published weights, such as trades-smallcnn.")] = None,
    head: Annotated[str, typer.Option(help="Head of a model given by name, such as he or he:scale=10.")] = "linear",
    option: Annotated[
        list[str] | None, typer.Option(help="An option of a model given by name: width=16. Repeat for more.")
    ] = None,
    seal: Annotated[
        str | None, typer.Option(help="The published seal, or at least its first 32 digits. Another seal is rejected.")
    ] = None,
    reattack: Annotated[
        int | None, typer.Option(help="Audit: attack so many of the samples that are claimed to be robust.")
    ] = None,
    suite: Annotated[
        str | None, typer.Option(help="Audit: the suite; by default standard.", autocompletion=complete_suite)
    ] = None,
    salt: Annotated[
        str | None, typer.Option(help="Audit: a text that decides the draw with the seal; by default random.")
    ] = None,
    official: Annotated[
        Path | None, typer.Option(help="For evidence on CIFAR-10-C, CIFAR-100-C or ImageNet-C: the folder of the set.")
    ] = None,
    frost: Annotated[
        str | None, typer.Option(help="For evidence on corrupted images: a folder with pictures of frost.")
    ] = None,
) -> None:
    """Check the evidence of a verdict. Given the model and the data, the model classifies every image again.

    Evidence on corrupted images is checked too: the images are made again.

    Nothing is attacked, except with --reattack. The exit code is 0 for accepted, 1 for rejected, and 2 for a mistake in
    the command.

    Example: steelman verify runs/mine/evaluations/linf-0.3 --model runs/mine --reattack 100
    """
    import torch

    from steelman.cli.corruptions import checked
    from steelman.cli.subjects import subject
    from steelman.evidence.bundle import DamagedError, bundle_at
    from steelman.evidence.verify import verify as check
    from steelman.progress import showing

    if model is None and (weights or layout or option or head != "linear"):
        raise UserError("--weights, --layout, --head and --option: expected --model with them")
    if reattack is None and (suite is not None or salt is not None):
        raise UserError("--suite and --salt: expected --reattack with them")
    corrupted = (bundle / "corruptions.json").is_file()
    if corrupted and (reattack is not None):
        raise UserError("--reattack: expected evidence of a verdict; this is evidence on corrupted images")
    if not corrupted and (official or frost):
        raise UserError("--official and --frost: expected evidence on corrupted images")
    place = bundle if corrupted else bundle_at(bundle)
    net: nn.Module | None = None
    dataset: Dataset | None = None
    if model is None and (bundle / "model.json").is_file():
        net, dataset = _own(bundle, data, root)
    elif model is None:
        dataset = _dataset(data, root)
    else:
        asked = subject(model, data=data, root=root, weights=weights, layout=layout, head=head, options=option or [])
        net, dataset = asked.load()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if reattack is not None and (net is None or dataset is None):
        raise UserError("--reattack: expected the model and the data with it")
    try:
        if corrupted:
            told = checked(bundle, net.to(device) if net is not None else None, dataset, official, frost, seal)
            _say("\n".join(told))
            return
        with showing(console):
            found = check(
                bundle,
                model=net.to(device) if net is not None else None,
                source=dataset.test if dataset is not None else None,
                device=device,
                seal=seal,
                reattack=reattack,
                suite=suite or "standard",
                salt=salt,
            )
    except DamagedError as error:
        raise _refuse("rejected", str(error)) from None
    _print_checked(found, place, published=seal is not None)
    if note := _other_threat(bundle if model is None else Path(model), place):
        _say(f"  note: {note}")


def _print_checked(found: Checked, place: Path, *, published: bool) -> None:
    """Print what was checked, and what was not."""
    done = [
        f"the evidence has not changed since it was sealed, and its counts of {found.samples} samples are right",
        f"each of the {found.broken} broken samples has an adversarial image, inside the range of pixels",
    ]
    if published:
        done.append("the seal is the published one")
    left = []
    if found.audit is None:
        left.append(f"no other attack breaks one of the {found.robust} robust samples: only an audit can show that")
        left.append("the pilot measured its signs and the curve as it is written: only an audit can show that")
    (done if found.data else left).append(
        "the data are those of the evaluation, and each adversarial image is within the radius"
        + ("" if found.data else ": give --data")
    )
    (done if found.model else left).append(
        "the weights are those of the evaluation, and the model answers each image as recorded"
        + ("" if found.model else ": give --model")
    )
    if found.page:
        left.append(f"report.html: {found.page}")
    _say(f"accepted: {place}, seal {found.seal}")
    for word, what in (("checked", done), ("not checked", left)):
        for one in what:
            _say(f"  {word}: {one}")
    for note in (found.stranger, found.version):
        if note:
            _say(f"  note: {note}")
    if found.unmeasured:
        _say(f"  note: these signs were not measured: {', '.join(sorted(found.unmeasured))}")
    if found.unknown:
        _say(f"  note: these files are no part of the evidence: {', '.join(found.unknown)}")
    if found.audit is not None:
        _say(f"  audit: {found.audit.text}")
    if found.rounded is not None:
        _say(f"  {found.rounded} of the {found.broken} samples stay broken when their images are rounded to 8 bits")


def _other_threat(run: Path, place: Path) -> str:
    """A sentence if the model of a run was trained for another threat model than that of the evidence."""
    from steelman.cli.subjects import is_folder
    from steelman.evidence.bundle import read_bundle
    from steelman.training.described import model_file

    if not is_folder(str(run)) or not (run / "model.json").is_file():
        return ""
    own, its = model_file(run / "model.json")["threat"], read_bundle(place).record["threat"]
    if own == its:
        return ""
    first, second = (f"{one['norm']}, eps {one['eps']:.4g} in {one['low']:g} .. {one['high']:g}" for one in (own, its))
    return f"the run's model.json says {first}, and the evidence is for {second}"


def _own(run: Path, data: str | None, root: Path | None) -> tuple[nn.Module, Dataset]:
    """A run's model and data. If they cannot be had, the run cannot be checked, and the error says what can be."""
    from steelman.cli.subjects import subject
    from steelman.evidence.bundle import bundle_at

    try:
        asked = subject(str(run), data=data, root=root, weights=None, layout=None, head="linear", options=[])
        return asked.load()
    except UserError as error:
        raise UserError(
            f"the run's own model and data are needed: {error}. To check the evidence alone: steelman verify "
            f"{shlex.quote(str(bundle_at(run)))}"
        ) from None


def _dataset(data: str | None, root: Path | None) -> Dataset | None:
    from steelman import data as datasets
    from steelman.settings import name_and_options

    if data is None:
        if root is not None:
            raise UserError("--root: expected --data with it")
        return None
    name, where = name_and_options(data)
    return datasets.load(name, **{**where, **({"root": root} if root else {})})


@app.command()
def compare(
    bundles: Annotated[
        list[str],
        typer.Argument(help="Folders of evaluations, or of runs with a verdict. NAME=FOLDER gives one a name."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="A .html file, or a folder for report.html; by default in runs/comparisons.")
    ] = None,
) -> None:
    """Compare verdicts: accuracies with 95% intervals, and a paired test for each two models.

    The test is McNemar's exact test on the samples that both have. With several pairs, Holm's method corrects p.

    Example: steelman compare pgd=runs/mine trades=runs/theirs
    """
    from steelman.cli.subjects import free_name
    from steelman.evaluation.result import Evaluation
    from steelman.evidence.compare import compare as compared
    from steelman.report import Entry, html

    page = out if out is None or out.suffix == ".html" else out / "report.html"
    if page is not None and page.exists():
        raise UserError(f"--out: {page} exists already; choose another name, or delete it")
    folders = _named(bundles)
    found = compared(folders)
    if page is None:
        page = free_name(Path("runs") / "comparisons" / f"{found.threat.norm}-{found.threat.eps:.4g}") / "report.html"
    _print_comparison(found)
    sentences = [*(pair.text for pair in found.pairs), *found.notes]
    html.write(
        page,
        [Entry(name=name, evaluation=Evaluation.load(folder)) for name, folder in folders.items()],
        title=" and ".join(folders) if len(folders) == 2 else f"{len(folders)} models compared",
        intro="\n\n".join(f"{text[:1].upper()}{text[1:]}." for text in sentences),
    )
    _say(f"report: {page}")


def _named(texts: Sequence[str]) -> dict[str, Path]:
    """The folders by name: the given name, or the model's name. Models with the same name get their folder's path."""
    from steelman.evidence.bundle import read_bundle

    given: list[tuple[str, Path]] = []
    for text in texts:
        name, equals, place = text.partition("=")
        if not equals or Path(text).is_dir():
            name, place = "", text
        elif not name or not place:
            raise UserError(f"expected an evaluation as NAME=FOLDER, got {text!r}")
        given.append((name, Path(place)))
    own = [name or str(read_bundle(folder).record["model"]) for name, folder in given]
    found: dict[str, Path] = {}
    for (name, folder), model in zip(given, own, strict=True):
        label = name or (model if own.count(model) == 1 else str(folder))
        if label in found:
            raise UserError(f"two evaluations have the name {label!r}; give another name, as in NAME={folder}")
        found[label] = folder
    return found


def _print_comparison(found: Comparison) -> None:
    from steelman.report.text import accuracy

    print_table(
        ("model", "clean [95% interval]", "robust [95% interval]", "n", "trust", "suite"),
        [
            (
                model.name,
                accuracy(model.clean),
                accuracy(model.robust),
                str(model.robust.total),
                model.word,
                model.suite,
            )
            for model in found.models
        ],
    )
    console.print()
    corrected = ("corrected p",) if len(found.pairs) > 1 else ()
    print_table(
        ("pair", "in common", "only the first", "only the second", "both", "p", *corrected),
        [
            (
                f"{pair.first}, {pair.second}",
                *map(str, (pair.common, pair.only_first, pair.only_second, pair.both)),
                f"{pair.p:.3g}",
                *([f"{pair.corrected:.3g}"] if corrected else []),
            )
            for pair in found.pairs
        ],
    )
    console.print()
    for text in (*(pair.text for pair in found.pairs), *(f"note: {note}" for note in found.notes)):
        _say(text)


@app.command()
def gate(
    bundle: Annotated[Path, typer.Argument(help="The folder of an evaluation, or of a run with a verdict.")],
    min_robust: Annotated[
        float, typer.Option(help="The least value of the lower end of robust accuracy's 95% interval, 0 .. 1.")
    ],
    min_clean: Annotated[float, typer.Option(help="The same for clean accuracy.")] = 0.0,
    allow_suspect: Annotated[
        bool,
        typer.Option("--allow-suspect", help="Also pass a suspect verdict, or one without a suite of steelman's."),
    ] = False,
    seal: Annotated[
        str | None, typer.Option(help="The published seal, or at least its first 32 digits. Another seal fails.")
    ] = None,
) -> None:
    """Pass or fail a verdict, for a CI job: it must be high enough, complete and sound.

    The exit code is 0 for a pass, 1 for a fail, and 2 if the evidence cannot be read or was changed.

    Example: steelman gate runs/mine/evaluations/linf-0.3 --min-robust 0.45
    """
    from steelman.evaluation.result import interval
    from steelman.evidence.bundle import read_bundle
    from steelman.evidence.verify import SealError
    from steelman.evidence.verify import verify as check

    for name, least in (("--min-robust", min_robust), ("--min-clean", min_clean)):
        if not 0 <= least <= 1:
            raise UserError(f"{name}: expected a share of the samples, 0 .. 1, got {least:g}")
    try:
        found = check(bundle, seal=seal)
    except SealError as error:
        raise _refuse("failed", str(error)) from None
    record = read_bundle(bundle).record
    verdict = record["verdict"]
    reasons = []
    for what, least in (("robust", min_robust), ("clean", min_clean)):
        low, high = interval(record[f"{what}_correct"], record["total"])
        share = record[f"{what}_correct"] / record["total"]
        measured = f"{what} accuracy {share:.2%}, 95% interval {low:.2%} .. {high:.2%}, n = {record['total']}"
        if low < least:
            reasons.append(f"{measured}: the lower end is below {least:.2%}")
        elif what == "robust":
            passed = f"{measured}: the lower end is at least {least:.2%}"
    if verdict["trust"] not in (("sound", "suspect") if allow_suspect else ("sound",)):
        reasons.append(f"the verdict is {verdict['trust']} ({'; '.join(verdict['reasons'])})")
    if record["suite"]["protocol"] and not allow_suspect:
        reasons.append("only given attacks were run, and nothing checked for gradient masking: evaluate with a suite")
    elif found.stranger and not allow_suspect:
        reasons.append(f"{found.stranger}, so nobody knows what it tries: evaluate with a suite of steelman's")
    if not verdict["complete"]:
        reasons.append("the evaluation is not complete")
    if reasons:
        raise _refuse("failed", "; ".join(reasons))
    _say("; ".join([f"passed: {passed}", f"trust: {verdict['trust']}", *verdict["reasons"]]))
    if found.version:
        _say(f"note: {found.version}; its sentences were not checked")
