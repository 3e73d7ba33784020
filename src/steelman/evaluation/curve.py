"""The curve: accuracy against the radius, and the flag for a curve that does not fall to 0."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from steelman.attacks import PGD, Found
from steelman.attacks.engine import Precision
from steelman.evaluation.result import CurvePoint, Flag
from steelman.evaluation.runner import Runner
from steelman.evaluation.signs import flag
from steelman.evaluation.stages import Suite
from steelman.threat import ThreatModel

CURVE_RATIOS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
CURVE_ATTACK = PGD(steps=20)
CURVE_SAMPLES = 500


def ratios(threat: ThreatModel, shape: tuple[int, ...], *, protocol: bool) -> tuple[float, ...]:
    """The radii of the curve, as multiples of eps.

    In a cascade, any image can become any other at the last radius. There, a working attack breaks every sample.
    """
    return CURVE_RATIOS if protocol else (*CURVE_RATIOS, max(threat.widest(shape) / threat.eps, 4.0))


def measured_with(precision: Precision, *, protocol: bool) -> str:
    """The name of the curve's attack, as a report shows it."""
    name = f"PGD-{CURVE_ATTACK.steps}" + ("" if precision == "full" else f" in {precision}")
    return name if protocol else f"{name} (at eps itself, all of the pilot's attacks)"


def searched_in(suite: Suite) -> Precision:
    """The precision of the curve's search: bfloat16 if any stage has it. Points are judged in full precision."""
    return "bfloat16" if any(stage.precision == "bfloat16" for stage in suite.stages) else "full"


def curve_rows(run: Runner) -> Tensor:
    """The samples of the curve: those of the pilot, or in a protocol the first ones of the data."""
    return torch.arange(min(run.total, CURVE_SAMPLES)) if run.suite.protocol else run.pilot()


def correct_at(
    run: Runner,
    x: Tensor,
    y: Tensor,
    rows: Tensor,
    *,
    keep: Callable[[Tensor, Found], None] | None = None,
    broken: Tensor | None = None,
    robust: Tensor | None = None,
) -> Tensor:
    """How many of the samples `rows` are right without an attack, and then at each radius.

    A sample that is broken at one radius counts as broken at every larger radius: the larger ball contains the point.

    Arguments: `keep` receives which samples were attacked at a radius up to eps, and what was found. `broken` are the
    samples that other attacks broke at eps. `robust` are those that the other attacks did not break; the curve attacks
    them only at radii above eps.
    """
    loss = CURVE_ATTACK.loss if run.suite.protocol else "scale-invariant-cross-entropy"
    attack = dataclasses.replace(CURVE_ATTACK, loss=loss)
    none = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    broken, robust = (none if known is None else known for known in (broken, robust))
    right = run.ledger.right[rows].to(x.device)
    left = [int(right.sum())]
    for ratio in ratios(run.threat, run.source.shape, protocol=run.suite.protocol):
        wider = run.threat.at(run.threat.eps * ratio)
        right = right & ~broken if ratio >= 1 else right
        tried = (right if ratio > 1 else right & ~robust).nonzero()[:, 0]
        part, label = x[tried], y[tried]
        index = run.index(rows[tried.cpu()])
        found = attack.run(
            run.model, part, label, wider, index=index, key=run.key.fold("curve"), precision=searched_in(run.suite)
        )
        if keep is not None and ratio <= 1:
            keep(tried, found)
        right[tried] = (run.answers(found.x_adv).argmax(dim=1) == label) | ~wider.contains(found.x_adv, part)
        left.append(int(right.sum()))
    return torch.tensor([left])


def accuracy_curve(run: Runner, correct: Tensor, total: int) -> tuple[CurvePoint, ...]:
    """The points of the curve: `correct` counts the samples that are right without an attack, then at each radius."""
    radii = radii_of(run.threat, run.source.shape, protocol=run.suite.protocol)
    return tuple(CurvePoint(eps=eps, correct=n, total=total) for eps, n in zip(radii, correct.tolist(), strict=True))


def radii_of(threat: ThreatModel, shape: tuple[int, ...], *, protocol: bool) -> list[float]:
    """The radii of the curve. The first is 0."""
    return [threat.eps * ratio for ratio in (0.0, *ratios(threat, shape, protocol=protocol))]


def levels_off(points: tuple[CurvePoint, ...]) -> list[Flag]:
    """The flag for samples that stay robust at the last radius, where any image can become any other.

    A curve without a sample that is right has no such flag, and neither has a protocol.
    """
    if not points or not points[0].correct:
        return []
    left = points[-1].correct / points[0].correct
    return [
        flag(
            "accuracy levels off",
            left,
            max(0.05, 1 / points[0].correct),  # one sample out of a few could be chance
            "suspect",
            f"with a radius at which any image can become any other, {left:.0%} of the samples tried are robust; "
            "an attack that works breaks all",
        )
    ]
