"""The pilot: signs of masking and the curve, measured on a few samples before the attacks.

What its own attacks break is broken, and in a suite that has a place for it, it counts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from steelman.evaluation.curve import accuracy_curve, correct_at, curve_rows, levels_off, ratios
from steelman.evaluation.masking import SIGNS, Finds, flags_of, measure
from steelman.evaluation.result import CurvePoint, Flag
from steelman.evaluation.runner import Runner
from steelman.evidence.bundle import weights_digest

BATCH = 64  # samples at most that are looked at before what was seen is kept


def look_ahead(
    run: Runner, deadline: float | None, surrogates: Sequence[nn.Module] = (), *, curve: bool = True
) -> tuple[list[Flag], tuple[CurvePoint, ...]]:
    """The flags that need no stage, and accuracy against the radius: a batch at a time, each kept whatever interrupts
    the evaluation, and no more of them than the time allows."""
    rows = curve_rows(run)
    seen, correct, done = list[dict[str, Tensor]](), torch.zeros(len(ratios(run)) + 1, dtype=torch.int64), 0
    numbers = [number for number, stage in enumerate(run.suite.stages) if stage.pilot]
    for number in numbers:
        run.take(number)
    if run.suite.protocol and not curve:
        return [], ()
    looking = functools.partial(_measure, run, surrogates, curve=curve)
    # What was kept is what would be measured now.
    asked = [*([] if curve else ["plain"]), *(weights_digest(one)[:16] for one in surrogates)]
    run.question = "".join(f"-{what}" for what in asked)
    for part_rows, part in run.batches(f"pilot{run.question}", rows, looking, deadline, most=BATCH):
        if curve:
            correct += part.pop("curve")[0]
        if not run.suite.protocol:
            seen.append({name: part.pop(name) for name in list(part) if name.split(",")[0] in SIGNS})
        run.piloted[part_rows] = part.get("broken", torch.tensor(False))
        for number in numbers:
            run.take(number, part)
        done += len(part_rows)
        run.tell("pilot", done, len(rows))
    if done < len(rows):
        run.cut["curve" if run.suite.protocol else "pilot"] = (done, len(rows))
        run.complete = run.complete and run.suite.protocol  # a curve of fewer samples says so itself
    points = accuracy_curve(run, correct, done) if curve and (done or not len(rows)) else ()
    return [*flags_of(seen), *levels_off(points, run.suite)], points


def _measure(
    run: Runner, surrogates: Sequence[nn.Module], x: Tensor, y: Tensor, rows: Tensor, *, curve: bool
) -> dict[str, Tensor]:
    started, seen, counts = time.perf_counter(), dict[str, Tensor](), dict[str, Tensor]()
    finds = None if run.suite.protocol else Finds(x)
    if finds is not None:
        seen = measure(
            run.model,
            x,
            y,
            run.threat,
            index=run.index(rows),
            key=run.key.fold("signs"),
            surrogates=surrogates,
            batch_size=run.batch_size,
            keep=finds.keep,
        )
    if curve and finds is None:
        counts["curve"] = correct_at(run, x, y, rows)
    elif curve and finds is not None:
        wrong = (run.answers(finds.x_adv).argmax(dim=1) != y) & run.threat.contains(finds.x_adv, x)
        counts["curve"] = correct_at(
            run, x, y, rows, keep=finds.keep, fallen=finds.success & wrong, withstood=finds.tried & ~finds.success
        )
    if finds is None:
        return counts
    seconds = time.perf_counter() - started
    judged = run.judged("pilot", rows, x, y, finds.x_adv, finds.success, finds.counts.cpu(), seconds)
    return {**judged, **seen, **counts}
