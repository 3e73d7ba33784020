"""MART: misclassification-aware adversarial training."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from steelman.attacks import PGD, Attack
from steelman.losses import kl
from steelman.models.batchnorm import Branch
from steelman.objectives.base import Batch, Objective, Outcome, inner
from steelman.settings import Number, settings

# The constants of the released code. They keep the logarithm finite, and the weight of the KL above zero.
LIFT, TINY, WEIGHT_LIFT = 1.0001, 1e-12, 1.0000001


@settings
class MART(Objective):
    """mean [ BCE(f(x*), y) + beta * KL(f(x) || f(x*)) * (1 - f(x)_y) ], where x* climbs CE(f(x'), y).

    BCE(p, y) = CE(p, y) - log(1 - max_{k != y} p_k). Gradients flow through 1 - f(x)_y, as in the released code.
    Two forwards in train mode, x and then x*, move batch norm.

    Wang et al. (2020), "Improving Adversarial Robustness Requires Revisiting Misclassified Examples", Eq. (11).
    """

    forwards: ClassVar[tuple[Branch, ...]] = ("clean", "adversarial")
    beta: Annotated[Number, Field(ge=0)] = 6.0
    attack: Annotated[Attack, inner()] = PGD(steps=10, keep="last", start="gaussian")

    def __call__(self, batch: Batch) -> Outcome:
        x_adv = batch.attacked(self.attack)
        clean, adversarial = batch.clean(), batch.adversarial(x_adv)
        boosted = batch.cross_entropy(adversarial) + runner_up(adversarial, batch.y)
        right = clean.softmax(dim=1).gather(1, batch.y[:, None])[:, 0]
        loss = (boosted + self.beta * kl(adversarial, clean) * (WEIGHT_LIFT - right)).mean()
        return Outcome(loss=loss, logits=adversarial.detach(), x_adv=x_adv)


def runner_up(logits: Tensor, y: Tensor) -> Tensor:
    """-log(1 - max_{k != y} p_k) for each sample."""
    wrong = logits.softmax(dim=1).scatter(1, y[:, None], 0.0).amax(dim=1)
    return -torch.log(LIFT - wrong + TINY)
