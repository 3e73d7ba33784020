"""The verdict beside AutoAttack: robust accuracy, wall time, passes, and the samples that only one of them broke.

    python benchmarks/verdict.py                         # both models; interrupted, it goes on at the next part
    python benchmarks/verdict.py --quick                 # 10 images each: does it work?
    python benchmarks/verdict.py --all                   # and MNIST's 10,000 test images with `standard`
    python benchmarks/verdict.py --cases mnist:1000:fast # one model, so many images (from 0, or mnist:1000:fast:500),
                                                         # these suites alone

AutoAttack is torchattacks' port with its official budgets; `--official full` takes this package's `full`, which has the
same components and budgets. The MNIST model is the one published with TRADES; the one of CIFAR-10 is trained
first, unless it is there already, by the recipe cifar10-pgd-at-small in fewer epochs. `fast` and `standard` run with
five seeds. Times are wall seconds of the whole call, with self-test, flags, sentinel and curve. Writes
docs/verdict-autoattack.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attacks import Case, judge, trades, trained
from torch import Tensor

from steelman.evaluation.evaluate import evaluate, versions
from steelman.evaluation.result import interval
from steelman.evaluation.suites import suite_named
from steelman.evidence.bundle import read_bundle
from steelman.threat import ThreatModel

SEEDS = range(5)
AGAIN = range(1, 6)  # further seeds of AutoAttack, for the samples that only one of them broke
# The test images of CIFAR-10 before number 7,800 were looked at while the suites were made; these were not, and are as
# many as an hour allows AutoAttack. Suites that change after this need others.
CASES = ["cifar:1400:fast,standard:7800", "mnist:1000:fast,standard:0"]
EPOCHS = 8  # of the recipe's 15, for the model of CIFAR-10
AIM = {"fast": 50, "standard": 20}  # the part of AutoAttack's time that each should take


def kept(
    path: Path, compute: Callable[..., dict[str, Any]], *arguments: Any, settings: object = None
) -> dict[str, Any]:
    """What is in a file already, or is computed now and put there; and when that was. What was computed with other
    `settings` is computed again."""
    if not path.exists() or json.loads(path.read_text()).get("settings") != settings:
        path.write_text(json.dumps({**compute(*arguments), "settings": settings}))
    record: dict[str, Any] = json.loads(path.read_text())
    finished = datetime.datetime.fromtimestamp(path.stat().st_mtime, datetime.UTC)
    return {**record, "finished": f"{finished:%Y-%m-%d %H:%M}"}


def ours(
    case: Case, suite: str, seed: int, folder: Path, batch_size: int, minutes: float | None = None
) -> dict[str, Any]:
    """One verdict of this package; which samples it broke, from its evidence."""
    threat = ThreatModel(eps=case.eps["linf"])
    shutil.rmtree(folder, ignore_errors=True)  # what an interrupted call left would make this one look quicker
    started = time.perf_counter()
    found = evaluate(
        case.model,
        case.x,
        case.y,
        threat,
        suite,
        name=case.label,
        seed=seed,
        batch_size=batch_size,
        minutes=minutes,
        out=folder,
    )
    seconds = time.perf_counter() - started
    samples = read_bundle(folder).samples
    assert found.verdict is not None
    return {
        "robust": found.verdict.correct,
        "seconds": seconds,
        "forwards": int(samples["forwards"].sum()) / len(case.x),
        "backwards": int(samples["backwards"].sum()) / len(case.x),
        "left": (samples["broken_by"] == -1).nonzero()[:, 0].tolist(),
        "trust": found.verdict.trust,
        "reasons": list(found.verdict.reasons),
        "escalated": found.verdict.escalated,
        "complete": found.verdict.complete,
        "stages": {stage.name: stage.seconds for stage in found.stages},
        "reduced": [stage.name for stage in found.stages if stage.settings.get("precision", "full") != "full"],
    }


def plan_of(suite: str, case: Case) -> list[list[Any]]:
    """A suite's stages as plain values: what another version of the package may have otherwise."""
    stages = suite_named(suite, ThreatModel(eps=case.eps["linf"])).stages
    return [[stage.name, stage.share, stage.described()] for stage in stages]


def port(case: Case, batch_size: int, seed: int = 0) -> dict[str, Any]:
    """torchattacks' AutoAttack, standard version, with its passes counted.

    Its own default is 10 steps for APGD-CE, APGD-T and FAB-T, a tenth of what AutoAttack has, and a Square that shrinks
    sooner; here they are as in AutoAttack.
    """
    count = {"forwards": 0, "backwards": 0}
    handle = case.model.register_forward_hook(lambda _, inputs, logits: _count(count, inputs[0], logits))
    library = importlib.import_module("torchattacks")
    threat = ThreatModel(eps=case.eps["linf"])
    points = []
    started = time.perf_counter()
    with torch.no_grad():
        right = torch.cat([case.model(part).argmax(dim=1) for part in torch.split(case.x, batch_size)]) == case.y
    attack = library.AutoAttack(case.model, norm="Linf", eps=threat.eps, version="standard", n_classes=10, seed=seed)
    for part in attack._autoattack.attacks:
        if hasattr(part, "steps"):
            part.steps = 100
        if hasattr(part, "rescale_schedule"):
            part.rescale_schedule = False
    for x, y, keep in zip(*(torch.split(all_of, batch_size) for all_of in (case.x, case.y, right)), strict=True):
        part = x.clone()
        if keep.any():
            part[keep] = attack(x[keep], y[keep])
        points.append(part.detach())
    seconds = time.perf_counter() - started
    handle.remove()
    broken = judge(case, threat, torch.cat(points), case.model)
    left = (right & ~broken).nonzero()[:, 0].tolist()
    passes = {name: passed / len(case.x) for name, passed in count.items()}
    return {"robust": len(left), "seconds": seconds, **passes, "left": left}


def again(case: Case, disputed: list[int], batch_size: int) -> dict[str, Any]:
    """AutoAttack on these samples alone, with further seeds: in how many of them it breaks each."""
    if not disputed:
        return {"broken": {}}
    few = dataclasses.replace(case, x=case.x[disputed], y=case.y[disputed])
    left = Counter(row for seed in AGAIN for row in port(few, batch_size, seed)["left"])
    return {"broken": {str(sample): len(AGAIN) - left[row] for row, sample in enumerate(disputed)}}


def _count(count: dict[str, int], x: Tensor, logits: Tensor) -> None:
    """A forward of each image in `x`, and a backward whenever a gradient comes back through the logits."""
    count["forwards"] += len(x)
    if logits.requires_grad:

        def counted(gradient: Tensor) -> None:
            count.update(backwards=count["backwards"] + len(gradient))

        logits.register_hook(counted)  # type: ignore[no-untyped-call]


def disputes(official: dict[str, Any], runs: dict[str, list[dict[str, Any]]]) -> list[int]:
    """The samples that AutoAttack broke and some verdict did not, or the other way round."""
    lefts = [set(record["left"]) for records in runs.values() for record in records]
    return sorted({sample for left in lefts for sample in left ^ set(official["left"])})


def table(
    case: Case,
    official: dict[str, dict[str, Any]],
    runs: dict[str, list[dict[str, Any]]],
    retried: dict[str, int],
) -> list[str]:
    """A model's table, as Markdown; `retried` has how often AutoAttack, asked again, broke the disputed samples."""
    n = len(case.x)
    lines = [
        f"## {case.label}, {n:,} images",
        "",
        f"Test images {case.first:,} to {case.first + n - 1:,}, linf eps {case.eps['linf']:.4g}. "
        f"Finished (UTC): AutoAttack {_when([*official.values()])}, "
        f"ours {_when([record for records in runs.values() for record in records])}.",
        "",
        "| verdict | seed | robust | 95% interval | F | B | seconds | only it / only AutoAttack | time ratio | trust |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = next(iter(official.values()))
    for name, record in official.items():
        lines.append(
            f"| {name} | 0 | {record['robust'] / n:.2%} | {_interval(record['robust'], n)} | {record['forwards']:.0f} "
            f"| {record['backwards']:.0f} | {record['seconds']:.0f} | | 1/"
            f"{base['seconds'] / record['seconds']:.1f} | |"
        )
    for suite, records in runs.items():
        for seed, record in enumerate(records):
            theirs, mine = set(base["left"]), set(record["left"])
            lines.append(
                f"| {suite} | {seed} | {record['robust'] / n:.2%} | {_interval(record['robust'], n)} "
                f"| {record['forwards']:.0f} | {record['backwards']:.0f} | {record['seconds']:.1f} "
                f"| {len(theirs - mine)} / {len(mine - theirs)} | 1/{base['seconds'] / record['seconds']:.0f} "
                f"| {record['trust']}{', escalated' if record['escalated'] else ''} |"
            )
    theirs = set(base["left"])
    for suite, records in runs.items():
        lines += ["", _summary(suite, records, base)]
        lefts = [set(record["left"]) for record in records]
        for who, only in (
            ("AutoAttack", [left - theirs for left in lefts]),
            (f"`{suite}`", [theirs - left for left in lefts]),
        ):
            times = Counter(sample for samples in only for sample in samples)
            told = ", ".join(f"{case.first + sample} ({times[sample]})" for sample in sorted(times)) or "none"
            lines += ["", f"Samples that {who} broke and {_other(who, suite)} did not (in how many seeds): {told}."]
    if retried:
        told = ", ".join(f"{case.first + int(sample)} ({times})" for sample, times in retried.items())
        lines += [
            "",
            f"AutoAttack was asked again about the disputed samples, with {len(AGAIN)} further seeds. In how many it "
            f"broke each: {told}.",
        ]
    return [*lines, ""]


def _summary(suite: str, records: list[dict[str, Any]], base: dict[str, Any]) -> str:
    """Strength and cost of a suite's seeds in a sentence, with the time that was aimed at."""
    low = sum(record["robust"] <= base["robust"] for record in records)
    times = sorted(base["seconds"] / record["seconds"] for record in records)
    passes = sorted(_passes(base) / _passes(record) for record in records)
    middle = len(records) // 2
    reduced = sorted({stage for record in records for stage in record["reduced"]})
    aim = f" The aim is 1/{AIM[suite]}." if suite in AIM else ""
    return (
        f"`{suite}` is at or below AutoAttack in {low} of {len(records)} seeds. In the median it takes "
        f"1/{times[middle]:.1f} of AutoAttack's time and 1/{passes[middle]:.0f} of its F + B. The slowest seed took "
        f"1/{times[0]:.1f} of the time, the quickest 1/{times[-1]:.1f}.{aim} Of its own time the pilot takes "
        f"{_share(records, 'pilot'):.0%} and the sentinel {_share(records, 'sentinel'):.0%}. "
        f"{1 - _share(records, ''):.0%} is spent outside the stages (self-test, checks, evidence). "
        f"Stages searched in bfloat16: {', '.join(reduced) or 'none'}."
    )


def _share(records: list[dict[str, Any]], name: str) -> float:
    """The part of the time that the stages take whose names begin so."""
    spent = sum(seconds for record in records for stage, seconds in record["stages"].items() if stage.startswith(name))
    return float(spent / sum(record["seconds"] for record in records))


def _when(records: list[dict[str, Any]]) -> str:
    """When the first and the last of some parts were finished."""
    times = sorted(record["finished"] for record in records)
    return times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1][-5:]}"


def _passes(record: dict[str, Any]) -> float:
    return float(record["forwards"] + record["backwards"])


def _other(who: str, suite: str) -> str:
    return f"`{suite}`" if who == "AutoAttack" else "AutoAttack"


def _interval(correct: int, n: int) -> str:
    low, high = interval(correct, n)
    return f"{low:.1%} .. {high:.1%}"


def load(which: str, samples: int, first: int, options: argparse.Namespace) -> Case:
    """A model and some test images."""
    if which == "mnist":
        return trades(options.trades, samples, first)
    return trained(
        options.models / f"cifar10-pgd-at-small-{EPOCHS}",
        [f"training.epochs={EPOCHS}", "evaluation.samples=500"],
        samples,
        f"CIFAR-10, PreActResNet-18 of width 16, PGD-AT with one step for {EPOCHS} epochs",
        first,
    )


def check_there(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Whatever is missing, better known now than in an hour."""
    if "torchattacks" in options.official:
        importlib.import_module("torchattacks")
    if not options.trades.is_file() and (options.all or any(case.startswith("mnist") for case in options.cases)):
        parser.error(
            f"--trades: expected the MNIST model that was published with TRADES, and {options.trades} is no file; "
            "without --all, and with --cases of cifar alone, it is not needed"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="10 images each; prints the page only")
    parser.add_argument("--cases", nargs="*", default=CASES, help="model:images:suite,suite:first image")
    parser.add_argument("--batch-size", type=int, default=250)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--trades", type=Path, default=Path("../shared/models/trades_mnist_smallcnn.pt"))
    parser.add_argument("--models", type=Path, default=Path("runs/bench-models"), help="where the CIFAR-10 model is")
    parser.add_argument("--work", type=Path, default=Path("runs/bench-verdict"))
    parser.add_argument("--out", type=Path, default=Path("docs/verdict-autoattack.md"))
    parser.add_argument("--official", nargs="*", default=["torchattacks"], help="or `full`, or both")
    parser.add_argument("--all", action="store_true", help="the MNIST model on all 10,000 images with `standard`")
    parser.add_argument("--minutes", type=float, default=60, help="of these 10,000; an escalation would take hours")
    options = parser.parse_args()
    check_there(options, parser)
    parts = [[*case.split(":"), "0"][:4] for case in options.cases]
    few = 100 if options.quick else 1
    plan = [(which, int(samples) // few, suites, int(begin)) for which, samples, suites, begin in parts]
    size = 10 if options.quick else options.batch_size
    lines = [
        "# The verdict beside AutoAttack",
        "",
        "Here you see how `fast` and `standard` compare with AutoAttack, in strength and in time. This command writes",
        "the page; parts that are there already are kept:",
        "",
        "```",
        "make bench-verdict",
        "```",
        "",
        f"All get the same images, in batches of {size}, on {torch.get_num_threads()} threads.",
        "",
        "- AutoAttack is torchattacks' port in float32, with AutoAttack's own budgets. APGD-CE, APGD-T and FAB-T have",
        "  100 steps, where the port's default is 10. Square does not rescale its schedule, where the port's default",
        "  does.",
        "- A sample is broken if its point is in the threat model and the model, in full precision, is wrong. No",
        "  attack is believed.",
        "- *F* and *B* are the forwards and the backwards that a sample took on average. They are those of the",
        "  attacks; the seconds include the self-test too.",
        "- *time ratio* is a row's time over the time of the first row. Pilot, sentinel and self-test of `fast` take",
        "  about as long on 1,000 images as on 1,400. So the ratio of `fast` is better with more images.",
        "",
        "The stages were chosen on training images. MNIST's test images were looked at on the way, CIFAR-10's below",
        "were not. [Another page](how-the-suites-were-chosen.md) says how the stages were chosen.",
        "",
    ]
    for which, samples, suites, begin in plan:
        case = load(which, samples, begin, options)
        folder = options.work / f"{which}-{begin}-{samples}"
        folder.mkdir(parents=True, exist_ok=True)
        runs = {
            suite: [
                kept(
                    folder / f"{suite}-{seed}.json",
                    ours,
                    case,
                    suite,
                    seed,
                    folder / f"{suite}-{seed}",
                    size,
                    settings=plan_of(suite, case),
                )
                for seed in range(options.seeds)
            ]
            for suite in suites.split(",")
        }
        official = {}
        if "torchattacks" in options.official:
            official["AutoAttack (torchattacks)"] = kept(folder / "torchattacks.json", port, case, size)
        if "full" in options.official:
            official["full"] = kept(
                folder / "full.json", ours, case, "full", 0, folder / "full", size, settings=plan_of("full", case)
            )
        retried = {}
        if "torchattacks" in options.official:
            base = official["AutoAttack (torchattacks)"]
            disputed = disputes(base, runs)
            retried = kept(folder / "again.json", again, case, disputed, size, settings=disputed)["broken"]
        lines += table(case, official, runs, retried)
        print("\n".join(lines), flush=True)
    if options.all:
        case = trades(options.trades, 10_000)
        folder = options.work / "mnist-10000"
        folder.mkdir(parents=True, exist_ok=True)
        place = folder / "standard"
        path, plan_there = folder / "standard.json", plan_of("standard", case)
        record = kept(path, ours, case, "standard", 0, place, size, options.minutes, settings=plan_there)
        lines += [
            "## All 10,000 images of MNIST",
            "",
            f"`standard`, seed 0: {record['robust'] / 10_000:.2%} robust in {record['seconds']:.0f} s, trust "
            f"{record['trust']}"
            f"{', escalated' if record['escalated'] else ''}"
            f"{'' if record['complete'] else ', stopped before it was through, for want of time'}. "
            "AutoAttack, as published for this model: 92.81%.",
            "",
        ]
    lines += [f"Versions: {', '.join(f'{name} {value}' for name, value in versions().items())}.", ""]
    text = "\n".join(lines)
    print(text)
    if not options.quick:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
