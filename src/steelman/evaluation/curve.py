"""Accuracy against the radius, and whether it falls to nothing as it should."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from steelman.attacks import PGD, Found
from steelman.evaluation.cascade import Runner
from steelman.evaluation.masking import flag
from steelman.evaluation.result import CurvePoint, Flag
from steelman.evaluation.stages import Suite
from steelman.threat import ThreatModel

CURVE_RATIOS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
CURVE_ATTACK = PGD(steps=20)
CURVE_SAMPLES = 500


def accuracy_curve(run: Runner, keep: Callable[[Tensor, Found], None] | None = None) -> tuple[CurvePoint, ...]:
    """Accuracy at radii around eps. A sample that fell at a smaller radius has fallen at a larger: balls nest.

    Arguments: `keep` is given what was found within eps, and for which of the pilot's samples.
    """
    attack, ratios = CURVE_ATTACK, list(CURVE_RATIOS)
    if run.suite.protocol:
        rows = torch.arange(min(run.total, CURVE_SAMPLES))
    else:
        rows = run.pilot()
        attack = dataclasses.replace(attack, loss="scale-invariant-cross-entropy")
        ratios.append(max(whole_box(run.threat, run.source.shape) / run.threat.eps, 4.0))
    correct = dict.fromkeys((0.0, *ratios), 0)
    for part in run.parts(torch.arange(len(rows))):
        alive = part[run.ledger.right[rows[part]]]
        correct[0.0] += len(alive)
        for ratio in ratios:
            x, y = run.images(rows[alive])
            wider = run.threat.at(run.threat.eps * ratio)
            found = attack.run(run.model, x, y, wider, index=run.index(rows[alive]), key=run.key.fold("curve"))
            if keep is not None and ratio <= 1:
                keep(alive, found)
            fooled = (run.answers(found.x_adv).argmax(dim=1) != y) & wider.contains(found.x_adv, x)
            alive = alive[~fooled.cpu()]
            correct[ratio] += len(alive)
    return tuple(
        CurvePoint(eps=run.threat.eps * ratio, correct=count, total=len(rows)) for ratio, count in correct.items()
    )


def whole_box(threat: ThreatModel, shape: tuple[int, ...]) -> float:
    """A radius at which every image can be turned into every other."""
    return float((threat.high - threat.low) * math.prod(shape) ** (1 / threat.p))


def levels_off(points: tuple[CurvePoint, ...], suite: Suite) -> list[Flag]:
    """Whether accuracy stays up where every image can be turned into every other."""
    if suite.protocol or not points or not points[0].correct:
        return []
    left = points[-1].correct / points[0].correct
    return [
        flag(
            "accuracy levels off",
            left,
            0.05,
            "suspect",
            f"with a radius at which any image can become any other, {left:.0%} of the samples tried withstand the "
            "attack; one that works breaks all",
        )
    ]
