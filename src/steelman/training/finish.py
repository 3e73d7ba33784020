"""The end of a run: the kept model is measured, the report is written, and the run is marked as finished."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.text import Text
from torch import nn

from steelman.attacks import Attack
from steelman.corruptions.accuracy import CorruptionAccuracy
from steelman.corruptions.measure import claims_of, digest_of, measure
from steelman.corruptions.plan import CorruptionsSpec
from steelman.corruptions.published import published_row
from steelman.corruptions.record import differs
from steelman.data.source import Source, first, workers_of
from steelman.evaluation.evaluate import evaluate
from steelman.evaluation.result import Evaluation
from steelman.evaluation.stages import Suite
from steelman.evaluation.suites import suite_of
from steelman.evidence.bundle import GIVEN, OWN, finished, read_bundle, weights_digest
from steelman.files import write_atomic
from steelman.report import Entry, html, tables
from steelman.report import corruptions as corruption_page
from steelman.threat import ThreatModel
from steelman.training.folder import CORRUPTED, Run
from steelman.training.guard import blind
from steelman.training.records import Trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """How a finished model is measured: images, threat model, suite and attacks."""

    source: Source
    threat: ThreatModel
    suite: str | Suite | None
    attacks: Mapping[str, Attack]
    batch_size: int
    seed: int
    corruptions: CorruptionsSpec | None = None
    clean: Source | None = None  # all test images, for the corruptions
    published: tuple[str, ...] = ()  # the rows of published tables on corrupted images


def finish(
    folder: Path,
    model: nn.Module,
    trained: Trained,
    measured: Measured,
    *,
    name: str,
    adversarial: bool,
    console: Console,
    started: float,
    show: bool = True,
    keep: bool = True,
) -> Run:
    """Measure the kept model, write the report, and mark the run as finished.

    `keep` False is for a temporary folder: the run then has no `path`.
    """
    if trained.stopped:
        console.print(
            f"stopped early: {trained.stopped}; keeping epoch {trained.epoch}", style="yellow", highlight=False
        )
    warning = blind(trained.history) if adversarial else None
    if warning:
        console.print(f"warning: {warning}", style="yellow", highlight=False)
    found = []
    for place, suite in ((OWN, measured.suite), (GIVEN, dict(measured.attacks))):
        if not suite:
            continue
        if finished(folder / place):  # an earlier process finished it, and was killed before the end of the run
            if _still(folder / place, model, measured, suite):
                found.append(Evaluation.load(folder / place))
                continue
            (folder / place).rename(folder / f"{place}-{time.time_ns()}")  # its model or its settings are others
        found.append(
            evaluate(
                model,
                measured.source,
                None,
                measured.threat,
                suite,
                name=name,
                batch_size=measured.batch_size,
                seed=measured.seed,
                out=folder / place,
            )
        )
    run = Run(
        path=folder if keep else None,
        history=trained.history,
        evaluation=found[0],
        attacked=found[1] if len(found) > 1 else None,
        corrupted=_corrupted(folder, model, measured, name),
        kept=model,
    )
    write_report(run, console if show else Console(quiet=True))
    record = {
        "status": "stopped early" if trained.stopped else "finished",
        "message": trained.stopped,
        "kept_epoch": trained.epoch,
        "training_seconds": sum(epoch["seconds"] for epoch in trained.history),
        "session_seconds": time.monotonic() - started,
        "history": trained.history,
    }
    write_atomic(folder / "run.json", json.dumps(record, indent=1).encode())  # last, because it marks a finished run
    return run


def _corrupted(folder: Path, model: nn.Module, measured: Measured, name: str) -> CorruptionAccuracy | None:
    """The accuracy on corrupted images, if it is asked for, with its page."""
    asked = measured.corruptions
    if asked is None or measured.clean is None:
        return None
    source, place = first(measured.clean, asked.samples), folder / CORRUPTED
    source.workers = workers_of(measured.source)
    # What an earlier process left is of no use if the recipe or a library has changed since.
    if place.exists() and differs(place, claims_of(name, model, source, asked, None, digest_of(source))):
        place.rename(folder / f"{CORRUPTED}-{time.time_ns()}")
    found = measure({name: model}, source, asked, places={name: place}, batch_size=measured.batch_size)[name]
    corruption_page.write(place / "report.html", [found])
    if measured.published:
        beside = [(0, corruption_page.beside_published(published_row(row))) for row in measured.published]
        corruption_page.write(place / "comparison.html", [found], beside=beside)
    return found


def _still(folder: Path, model: nn.Module, measured: Measured, suite: str | Suite | dict[str, Attack]) -> bool:
    """Whether finished evidence is of the same model, images, threat model and attacks."""
    record = read_bundle(folder).record
    asked = suite_of(suite, measured.threat)
    stages = [stage.name for stage in asked.stages]
    attacks = [stage["attack"] for stage in record["suite"]["stages"]]
    # For a cascade, the names are enough: a name always means the same stage.
    if asked.protocol and attacks != [stage.described() for stage in asked.stages]:
        return False
    return [stage["name"] for stage in record["suite"]["stages"]] == stages and all(
        record[key] == value
        for key, value in {
            "total": len(measured.source),
            "seed": measured.seed,
            "batch_size": measured.batch_size,
            "weights": weights_digest(model),
            "threat": dataclasses.asdict(measured.threat),
        }.items()
    )


def entries_of(run: Run, name: str) -> list[Entry]:
    """The entries of a run in a report: its verdict, and its attacks that ran one by one."""
    found = [Entry(name=name, evaluation=run.evaluation, history=run.history)]
    if run.attacked is not None:
        found.append(Entry(name=f"{name}, attack by attack", evaluation=run.attacked))
    return found


def write_report(run: Run, console: Console) -> None:
    """Print the table and the verdict, write the report, and print its path."""
    entries = entries_of(run, run.evaluation.model)
    console.print(tables.scores_table(entries))
    console.print(tables.verdict_text(run.evaluation))
    if run.corrupted is not None:
        console.print(Text(str(run.corrupted)), soft_wrap=True)
        if run.path is not None:
            console.print(f"corruptions: {run.path / CORRUPTED / 'report.html'}", highlight=False, soft_wrap=True)
    if run.report is not None:
        html.write(run.report, entries, title=f"{run.evaluation.model} on {run.evaluation.data}")
        console.print(f"report: {run.report}", highlight=False, soft_wrap=True)
