"""Standard training: no adversary."""

from __future__ import annotations

from torch import nn

from steelman.heads import with_margin
from steelman.losses import cross_entropy
from steelman.objectives.base import Batch, Outcome
from steelman.settings import settings


@settings
class Standard:
    """Cross-entropy on clean images: mean CE(f(x), y)."""

    def __call__(self, model: nn.Module, batch: Batch) -> Outcome:
        logits = model(batch.x)
        return Outcome(cross_entropy(with_margin(model, logits, batch.y), batch.y).mean(), logits.detach())
