"""Standard training: no adversary."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from steelman.models.batchnorm import Branch
from steelman.objectives.base import Batch, Outcome
from steelman.settings import settings


@settings
class Standard:
    """Cross-entropy on clean images: mean CE(f(x), y)."""

    forwards: ClassVar[tuple[Branch, ...]] = ("clean",)
    adversarial: ClassVar[bool] = False

    def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
        logits = model(batch.x)
        return Outcome(loss=batch.cross_entropy(model, logits).mean(), logits=logits.detach())
