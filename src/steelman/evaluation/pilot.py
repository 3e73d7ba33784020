"""The pilot: signs of masking and the curve, measured on a few samples.

In a suite with a pilot stage, the samples that the pilot's attacks break count as broken.
"""

from __future__ import annotations

import functools
import time

import torch
from torch import Tensor

from steelman.evaluation.curve import accuracy_curve, correct_at, curve_rows, ratios
from steelman.evaluation.findings import Findings
from steelman.evaluation.masking import Finds, measure
from steelman.evaluation.runner import Runner
from steelman.evaluation.signs import SIGNS
from steelman.evidence.bundle import weights_digest

BATCH = 64  # the most samples in a batch of the pilot; each finished batch is saved


def look_ahead(run: Runner, deadline: float | None) -> Findings:
    """The signs of masking, and the curve.

    Each finished batch is saved, so an interrupted pilot continues from there. The pilot ends when the time runs out.
    """
    # The curve needs a gradient. A suite of black-box attacks alone may be for a model without one.
    curve = run.suite.curve and not all(getattr(stage.attack, "black_box", False) for stage in run.suite.stages)
    if run.suite.protocol and not curve:
        return Findings()
    rows, done = curve_rows(run), 0
    seen, parts = list[dict[str, Tensor]](), list[dict[str, Tensor]]()
    correct = torch.zeros(len(ratios(run.threat, run.source.shape, protocol=run.suite.protocol)) + 1, dtype=torch.int64)
    looking = functools.partial(_measure, run, curve=curve)
    # Saved batches are named after the options that change them. Else a call with other options would read them.
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
        signs=tuple(seen),
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
            witness=run.witness,
            grain=run.grain,
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
