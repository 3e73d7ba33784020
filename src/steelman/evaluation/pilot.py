"""The pilot: signs of masking and the curve, measured on a few samples before the attacks.

What the attacks behind them break counts in a suite that has a stage for it.
"""

from __future__ import annotations

import functools
import time

import torch
from torch import Tensor

from steelman.evaluation.curve import accuracy_curve, correct_at, curve_rows, levels_off, ratios
from steelman.evaluation.findings import Findings
from steelman.evaluation.masking import SIGNS, Finds, flags_of, measure
from steelman.evaluation.runner import Runner
from steelman.evidence.bundle import weights_digest

BATCH = 64  # samples at most that are looked at before what was seen is kept


def look_ahead(run: Runner, deadline: float | None) -> Findings:
    """The flags that need no stage, and accuracy against the radius: a batch at a time, each kept whatever interrupts
    the evaluation, and no more of them than the time allows."""
    # The curve is PGD's, and whoever asks for black-box attacks alone may have no gradient.
    curve = run.suite.curve and not all(getattr(stage.attack, "black_box", False) for stage in run.suite.stages)
    if run.suite.protocol and not curve:
        return Findings()
    rows, done = curve_rows(run), 0
    seen, parts = list[dict[str, Tensor]](), list[dict[str, Tensor]]()
    correct = torch.zeros(len(ratios(run)) + 1, dtype=torch.int64)
    looking = functools.partial(_measure, run, curve=curve)
    # What was kept is what would be measured now.
    asked = [*([] if curve else ["plain"]), *(weights_digest(one)[:16] for one in run.suite.surrogates)]
    question = "".join(f"-{what}" for what in asked)
    for part_rows, part in run.batches(f"pilot{question}", rows, looking, deadline, most=BATCH):
        if curve:
            correct += part.pop("curve")[0]
        if not run.suite.protocol:
            seen.append({name: part.pop(name) for name in list(part) if name.split(",")[0] in SIGNS})
            parts.append(part)
        done += len(part_rows)
        run.tell("pilot", done, len(rows))
    points = accuracy_curve(run, correct, done) if curve and (done or not len(rows)) else ()
    return Findings(
        flags=(*flags_of(seen), *levels_off(points, run.suite)),
        curve=points,
        parts=tuple(parts),
        cut=(done, len(rows)) if done < len(rows) else None,
        question=question,
    )


def _measure(run: Runner, x: Tensor, y: Tensor, rows: Tensor, *, curve: bool) -> dict[str, Tensor]:
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
            surrogates=run.suite.surrogates,
            batch_size=run.batch_size,
            keep=finds.keep,
        )
    if curve and finds is None:
        counts["curve"] = correct_at(run, x, y, rows)
    elif curve and finds is not None:
        wrong = (run.answers(finds.x_adv).argmax(dim=1) != y) & run.threat.contains(finds.x_adv, x)
        counts["curve"] = correct_at(
            run, x, y, rows, keep=finds.keep, broken=finds.success & wrong, robust=finds.tried & ~finds.success
        )
    if finds is None:
        return counts
    seconds = time.perf_counter() - started
    judged = run.judged("pilot", rows, x, y, finds.x_adv, finds.success, finds.counts.cpu(), seconds)
    return {**judged, **seen, **counts}
