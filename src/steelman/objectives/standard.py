"""Standard training: no adversary."""

from __future__ import annotations

from typing import ClassVar

from steelman.models.batchnorm import Branch
from steelman.objectives.base import Batch, Objective, Outcome
from steelman.settings import settings


@settings
class Standard(Objective):
    """Cross-entropy on clean images: mean CE(f(x), y)."""

    forwards: ClassVar[tuple[Branch, ...]] = ("clean",)
    adversarial: ClassVar[bool] = False

    def __call__(self, batch: Batch) -> Outcome:
        logits = batch.clean()
        return Outcome(loss=batch.cross_entropy(logits).mean(), logits=logits.detach())
