"""``steelman evaluate`` and ``transfer``: measure models, print the result, and keep it in a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from steelman import data as datasets
from steelman.attacks import ATTACKS
from steelman.bounded import read_json
from steelman.cli.subjects import (
    attack_from_text,
    free_name,
    model_at,
    models_named,
    subject,
    threat_agreed,
    threat_from,
)
from steelman.data.source import first
from steelman.errors import UserError
from steelman.evaluation.checks import check_radius
from steelman.evaluation.evaluate import evaluate, versions
from steelman.evaluation.result import Evaluation, seconds_of
from steelman.evaluation.stages import Suite
from steelman.evaluation.suites import suite_of
from steelman.evaluation.transfer import Transfer, transfer
from steelman.evidence.bundle import finished, read_bundle, weights_digest
from steelman.evidence.ledger import tidy
from steelman.evidence.verify import verify
from steelman.files import sweep
from steelman.progress import showing
from steelman.report import Entry, html, tables, text
from steelman.settings import name_and_options, options_of


def measure(
    target: str,
    *,
    data: str | None,
    root: Path | None,
    norm: str | None,
    eps: str | None,
    suite: str | None = None,
    attacks: list[str],
    minutes: float | None = None,
    weights: Path | None,
    layout: str | None,
    head: str,
    options: list[str],
    samples: int | None,
    batch_size: int,
    seed: int,
    precision: str = "auto",
    more_outputs: bool = False,
    tiny_eps: bool = False,
    workers: int,
    out: Path | None,
    allow_import: Collection[str] = (),
    console: Console,
) -> Evaluation:
    """Evaluate a run or a model, print the verdict, and write the evidence and report.html."""
    if suite is not None and attacks:
        raise UserError("--suite and --attack: expected one of them; a suite has its own attacks")
    given = dict(attack_from_text(text) for text in attacks)
    asked = subject(
        target,
        data=data,
        root=root,
        weights=weights,
        layout=layout,
        head=head,
        options=options,
        allow_import=allow_import,
    )
    threat = threat_from(asked.described.get("threat"), norm, eps)
    check_radius(threat, tiny_eps=tiny_eps)
    chosen = suite_of(
        given or suite or "standard", threat, precision=precision, more_outputs=more_outputs, tiny_eps=tiny_eps
    )
    model, dataset = asked.load()
    source = first(dataset.test, samples)
    source.workers = workers
    settings: dict[str, Any] = {
        "model": asked.name,
        "data": source.name,
        "total": len(source),
        "seed": seed,
        "batch_size": batch_size,
        "threat": dataclasses.asdict(threat),
        "weights": weights_digest(model),
        "versions": versions(),
    }
    base = (Path(target) if asked.described else Path("runs")) / "evaluations" / f"{threat.norm}-{threat.eps:.4g}"
    place = _place(out, base, settings, chosen)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if finished(place):
            before = "finished before, without its report"
            console.print(f"evidence: {place} ({before})", highlight=False, soft_wrap=True)
            tidy(place)
            verify(place)
            found = Evaluation.load(place)
        else:
            with showing(console, notes=True):
                found = evaluate(
                    model.to(device),
                    source,
                    None,
                    threat,
                    chosen,
                    out=place,
                    name=asked.name,
                    seed=seed,
                    minutes=minutes,
                    batch_size=batch_size,
                )
    except KeyboardInterrupt:
        console.print(f"the finished part is kept in {place}; the same command goes on from there", soft_wrap=True)
        raise
    entry = Entry(name=found.model, evaluation=found)
    console.print(tables.scores_table([entry]))
    console.print(tables.verdict_text(found))
    console.print(stages_table(found))
    sweep(place, ["report.html"])
    html.write(place / "report.html", [entry], title=f"{found.model} on {found.data}")
    console.print(f"report: {place / 'report.html'}", highlight=False, soft_wrap=True)
    console.print(f"evidence: {place}, seal {read_bundle(place).seal}", highlight=False, soft_wrap=True)
    return found


def stages_table(found: Evaluation) -> Table:
    """A table of the stages: how many samples each broke, and its passes and seconds."""
    caption = (
        'F, B: forward and backward passes per attacked sample; in the row "all", per sample. The self-test is not '
        "counted."
    )
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    table.add_column("stage", overflow="fold")
    for column in ("attacked", "broke", "left", "F", "B", "seconds"):
        table.add_column(column, justify="right")

    def row(
        name: str, counts: Sequence[int | str], n: int, forwards: int, backwards: int, seconds: float | None
    ) -> None:
        passes = (f"{count / n:,.1f}" if n else "-" for count in (forwards, backwards))
        table.add_row(Text(name), *map(str, counts), *passes, text.seconds(seconds))

    for one in found.stages:
        counts = (one.attacked, one.broken, one.left)
        row(one.name, counts, one.attacked, one.forwards, one.backwards, one.seconds)
    if found.stages:
        table.add_section()
        forwards, backwards = (sum(getattr(one, key) for one in found.stages) for key in ("forwards", "backwards"))
        clean, worst = found.score("clean"), found.score("worst case")
        row(
            "all",
            (clean.correct, clean.correct - worst.correct, worst.correct),
            found.total,
            forwards,
            backwards,
            seconds_of(found.stages),
        )
    return table


def _place(out: Path | None, base: Path, settings: Mapping[str, Any], chosen: Suite) -> Path:
    """The folder of the evidence: `out`, or that of an interrupted evaluation of these settings, or a new one."""
    if out is not None:
        taken = [name for name in ("report.html", "evidence.json") if (out / name).exists()]
        if taken and not (out / "work").exists() and not _begun(out, settings, chosen):
            raise UserError(f"--out: {out} already holds a report ({taken[0]}); choose another folder, or delete it")
        return out
    free, places = base, []
    while free.exists():
        places.append(free)
        free = base.with_name(f"{base.name}-{len(places) + 1}")
    return next((place for place in reversed(places) if _begun(place, settings, chosen)), free)


def _begun(place: Path, settings: Mapping[str, Any], chosen: Suite) -> bool:
    """Whether `place` holds an interrupted evaluation of these settings; its report may be all that is missing.

    This check is quick. The evaluation itself compares all settings when it goes on.
    """
    done = finished(place)
    if done and (place / "report.html").exists():
        return False
    try:
        kept = read_json(place / ("evidence.json" if done else "work/run.json"), most_bytes=1 << 28)
        stages = [stage["name"] for stage in kept["suite"]["stages"]]
    except (OSError, UserError, LookupError, TypeError):
        return False
    return stages == [stage.name for stage in chosen.stages] and all(kept.get(key) == settings[key] for key in settings)


def cross(
    models: Sequence[str],
    target: Sequence[str] | None,
    *,
    data: str | None,
    root: Path | None,
    norm: str | None,
    eps: str | None,
    attack: str,
    samples: int | None,
    batch_size: int,
    seed: int,
    workers: int,
    out: Path | None,
    allow_import: Collection[str] = (),
    console: Console,
) -> Transfer:
    """Attack each model, score its adversarial images on every target, print the table and write transfer.json."""
    _, chosen = attack_from_text(_to_the_last_step(attack))
    if out is not None and (out / "transfer.json").exists():
        raise UserError(f"--out: {out} already holds a transfer; choose another folder, or delete it")
    sources = models_named(models)
    targets = models_named(target) if target else sources
    for name in sources.keys() & targets.keys():
        if Path(sources[name]).resolve() != Path(targets[name]).resolve():
            raise UserError(f"a source and a target have the name {name!r}; rename one, as in NAME={targets[name]}")
    loaded = {name: model_at(place, allow_import) for name, place in {**sources, **targets}.items()}
    runs = [described for _, described in loaded.values() if described]
    threat = threat_from(threat_agreed([run["threat"] for run in runs], norm, eps), norm, eps)
    dataset = dataset_of(runs, data, root)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = first(dataset.test, samples)
    source.workers = workers
    with showing(console):
        found = transfer(
            {name: loaded[name][0].to(device) for name in sources},
            {name: loaded[name][0].to(device) for name in targets},
            source,
            threat,
            chosen,
            batch_size=batch_size,
            seed=seed,
        )
    place = out or free_name(Path("runs") / "transfers" / f"{threat.norm}-{threat.eps:.4g}")
    found.save(place)
    console.print(found.table())
    console.print(f"transfer: {place / 'transfer.json'}", highlight=False, soft_wrap=True)
    return found


def dataset_of(runs: Sequence[Mapping[str, Any]], data: str | None, root: Path | None) -> datasets.Dataset:
    """The dataset that the command line names, or else the one of all runs. `runs` are their descriptions."""
    own = [run["data"] for run in runs]
    if data is None and (not own or any(one != own[0] for one in own)):
        reason = "the runs' own differ; name one" if own else "expected a dataset, because none of the models is a run"
        raise UserError(f"--data: {reason}; choices: {', '.join(datasets.DATASETS)}")
    name, where = name_and_options(data) if data else (own[0]["name"], {})
    kept = [one["options"] for one in own if one["name"] == name]
    where = {**(kept[0] if kept and all(one == kept[0] for one in kept) else {}), **where}
    return datasets.load(name, **{**where, **({"root": root} if root else {})})


def _to_the_last_step(attack: str) -> str:
    """An attack's text, with keep=last if it has that option. Images of a first success transfer badly."""
    name, options = name_and_options(attack)
    keep = options_of(ATTACKS[name]).get("keep") if name in ATTACKS else None
    if keep is None or keep.default != "best" or "keep" in options:
        return attack
    return f"{attack},keep=last" if options else f"{name}:keep=last"
