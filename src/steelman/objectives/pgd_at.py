"""PGD adversarial training."""

from __future__ import annotations

from typing import Annotated

from steelman.attacks import PGD, Attack
from steelman.objectives.base import Batch, Objective, Outcome, inner
from steelman.settings import settings


@settings
class PGDAT(Objective):
    """Cross-entropy on the adversary's images: mean CE(f(x*), y), where x* climbs CE(f(x'), y) inside the ball.

    The attack sees the logits with the head's scale and without the margin. The attack's `mode` is that of the model;
    by default it is "eval", and batch norm uses its running statistics. One forward in train mode, of x*, moves batch
    norm.

    Madry et al. (2018), "Towards Deep Learning Models Resistant to Adversarial Attacks", Eq. (1).
    """

    attack: Annotated[Attack, inner()] = PGD(steps=10, keep="last")

    def __call__(self, batch: Batch) -> Outcome:
        x_adv = batch.attacked(self.attack)
        logits = batch.adversarial(x_adv)
        return Outcome(loss=batch.cross_entropy(logits).mean(), logits=logits.detach(), x_adv=x_adv)
