"""TRADES."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from steelman.attacks import PGD, Attack
from steelman.losses import kl
from steelman.models.batchnorm import Branch
from steelman.objectives.base import Batch, Objective, Outcome, inner
from steelman.settings import Number, settings


@settings
class TRADES(Objective):
    """mean [ CE(f(x), y) + beta * KL(f(x) || f(x*)) ], where x* climbs the same KL from a small Gaussian start.

    Gradients flow through both sides of the KL. The head's margin is in the cross-entropy alone. Two forwards in train
    mode, x and then x*, move batch norm. The original code makes a third, of x, which only moves the statistics.

    Zhang et al. (2019), "Theoretically Principled Trade-off between Robustness and Accuracy", Eq. (5). beta is 1/lambda
    in the papers.
    """

    forwards: ClassVar[tuple[Branch, ...]] = ("clean", "adversarial")
    beta: Annotated[Number, Field(ge=0)] = 6.0
    attack: Annotated[Attack, inner(loss="kl", start="gaussian")] = PGD(
        steps=10, keep="last", loss="kl", start="gaussian"
    )

    def __call__(self, batch: Batch) -> Outcome:
        x_adv = batch.attacked(self.attack)
        clean, adversarial = batch.clean(), batch.adversarial(x_adv)
        loss = (batch.cross_entropy(clean) + self.beta * kl(adversarial, clean)).mean()
        return Outcome(loss=loss, logits=adversarial.detach(), x_adv=x_adv)
