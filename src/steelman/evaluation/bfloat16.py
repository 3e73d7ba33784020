"""Decides whether the searches of a suite run in bfloat16.

They may, if the device computes in bfloat16, and if the model's gradients in bfloat16 agree with its exact ones.
"""

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

TRIED = 32  # images on which the gradients are compared
ALIKE = 0.9  # the smallest cosine at which the two gradients of an image count as equal
APART = 0.1  # the largest difference of a logit between the precisions, as a share of the logits' spread
ENOUGH = 0.9  # the share of the images that must agree in logits and gradients


def settled(
    suite: Suite,
    model: nn.Module,
    source: Source,
    threat: ThreatModel,
    device: torch.device,
    most: int = TRIED,
) -> Suite:
    """The suite with the precision that each stage will have: the planned one, or full for all stages.

    "auto" keeps bfloat16 if the device computes in it, and if the model's gradients agree with those in full precision.
    "full" never keeps it. "bfloat16" keeps it on any device, and refuses a model whose gradients do not agree. No batch
    is larger than `most`.
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
    """Whether the device computes in bfloat16. A device that only emulates bfloat16 is faster in full precision."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    cpu: Any = torch.cpu
    asked = [getattr(cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return device.type == "cpu" and any(bool(ask()) for ask in asked if ask is not None)


def alike(model: nn.Module, x: Tensor, threat: ThreatModel, most: int = TRIED) -> bool:
    """Whether logits and gradients in bfloat16 agree with those in full precision, at random points near the images."""
    if x.dtype != torch.float32:
        return False
    points = threat.random_start(x, torch.arange(len(x), device=x.device), Key(0).fold("reduced"))
    try:
        exact, slopes = _answers(model, points, most)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            coarse, coarse_slopes = _answers(model, points, most, exact.argmax(dim=1))
    except Exception:  # a model that raises any error in bfloat16 is searched in full precision
        return False
    # An error that all logits of an image share does not change the model's answer. Here it is taken away.
    moved = (coarse - exact) - (coarse - exact).mean(dim=1, keepdim=True)
    near = moved.abs().amax(dim=1) <= APART * spread(exact)
    cosine = nn.functional.cosine_similarity(slopes, coarse_slopes)
    return bool((near & (cosine >= ALIKE)).double().mean() >= ENOUGH)


def _answers(model: nn.Module, points: Tensor, most: int, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The logits, and the gradient of the margin of class `y` at each point. By default, `y` is the predicted class."""
    answers, slopes = list[Tensor](), list[Tensor]()
    with untouched(model), torch.enable_grad():
        for rows in torch.split(torch.arange(len(points), device=points.device), most):
            at = points[rows].detach().requires_grad_(True)
            logits = logits_of(model, at)
            label = logits.argmax(dim=1) if y is None else y[rows]
            slopes.append(input_gradient(margin(logits, label), at).flatten(1).double())
            answers.append(logits.detach().double())
    return torch.cat(answers), torch.cat(slopes)
