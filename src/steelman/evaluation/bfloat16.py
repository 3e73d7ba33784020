"""Searches in bfloat16: where the machine is quicker at it, and the model slopes there as it does in full precision."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from steelman.attacks.base import input_gradient, logits_of, untouched
from steelman.data.source import Source
from steelman.errors import UserError
from steelman.evaluation.checks import as_model
from steelman.evaluation.stages import Suite
from steelman.losses import margin, spread
from steelman.rng import Key
from steelman.threat import ThreatModel

TRIED = 32  # images on which the slopes are compared
ALIKE = 0.9  # the cosine between the two slopes of an image from which on they count as one
APART = 0.1  # the part of their spread by which its two answers may differ
ENOUGH = 0.9  # of the images must be alike in both


def settled(
    suite: Suite,
    model: nn.Module,
    source: Source,
    threat: ThreatModel,
    device: torch.device,
    most: int = TRIED,
) -> Suite:
    """The suite with each stage's precision as it will be: what was planned, or full for all. No batch is larger than
    `most`.

    "auto" keeps bfloat16 where the machine multiplies such numbers itself and the model's slopes are those of full
    precision; "full" never does; "bfloat16" wants it on any machine, and refuses a model whose slopes are others.
    """
    precision = suite.precision
    planned = [stage for stage in suite.stages if stage.precision != "full"]
    if precision == "bfloat16" and not planned:
        raise UserError(
            f"precision: suite {suite.name} has no stage that may be searched in bfloat16; expected auto or full"
        )
    if planned and precision != "full" and (precision == "bfloat16" or native(device)):
        if alike(model, as_model(model, source.images(torch.arange(min(TRIED, len(source)))), device), threat, most):
            return suite
        if precision == "bfloat16":
            raise UserError(
                "precision: expected a model whose gradients in bfloat16 are those of full precision, and this one's "
                "are not; search in full"
            )
    return dataclasses.replace(
        suite, stages=tuple(dataclasses.replace(stage, precision="full") for stage in suite.stages)
    )


def native(device: torch.device) -> bool:
    """Whether the device multiplies numbers in bfloat16 itself; where it imitates them, full precision is quicker."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    cpu: Any = torch.cpu
    asked = [getattr(cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return device.type == "cpu" and any(bool(ask()) for ask in asked if ask is not None)


def alike(model: nn.Module, x: Tensor, threat: ThreatModel, most: int = TRIED) -> bool:
    """Whether answers and their slopes at points near the images are in bfloat16 what they are in full precision."""
    if x.dtype != torch.float32:
        return False
    points = threat.random_start(x, torch.arange(len(x), device=x.device), Key(0).fold("reduced"))
    try:
        exact, slopes = _answers(model, points, most)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            coarse, coarse_slopes = _answers(model, points, most, exact.argmax(dim=1))
    except Exception:  # whatever a model has against it, it is searched in full precision
        return False
    # What all logits have in common decides nothing, but it is what leaves coarse ones no room for their differences.
    moved = (coarse - exact) - (coarse - exact).mean(dim=1, keepdim=True)
    near = moved.abs().amax(dim=1) <= APART * spread(exact)
    cosine = nn.functional.cosine_similarity(slopes, coarse_slopes)
    return bool((near & (cosine >= ALIKE)).double().mean() >= ENOUGH)


def _answers(model: nn.Module, points: Tensor, most: int, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Logits, and for each point the gradient of the margin of class y: by default of the class that leads."""
    answers, slopes = list[Tensor](), list[Tensor]()
    with untouched(model), torch.enable_grad():
        for rows in torch.split(torch.arange(len(points), device=points.device), most):
            at = points[rows].detach().requires_grad_(True)
            logits = logits_of(model, at)
            label = logits.argmax(dim=1) if y is None else y[rows]
            slopes.append(input_gradient(margin(logits, label), at).flatten(1).double())
            answers.append(logits.detach().double())
    return torch.cat(answers), torch.cat(slopes)
