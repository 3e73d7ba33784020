"""HAT: helper-based adversarial training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from steelman.attacks import PGD, Attack
from steelman.attacks.base import logits_of, untouched
from steelman.errors import UserError
from steelman.losses import kl
from steelman.models.batchnorm import Branch
from steelman.objectives.base import Batch, Objective, Outcome, inner
from steelman.settings import Number, settings


@settings
class HAT(Objective):
    """mean [ CE(f(x), y) + beta * KL(f(x) || f(x*)) + gamma * CE(f(x + 2 (x* - x)), argmax g(x*)) ], x* as in TRADES.

    g is a model from standard training; `helper` is the folder of its finished run. Its label, the class that x* looks
    like to a model without robustness, is asked for at twice the perturbation, so that the margin does not grow far
    beyond the ball, which costs clean accuracy. The helper images leave the ball on purpose, and are not cut to the
    box, as in the released code: a cut pixel would fall short of twice its perturbation. The margin of a head is in
    both cross-entropies, on the label of each. Three forwards in train mode move batch norm: x, x*, the helper images.

    Rade and Moosavi-Dezfooli (2022), "Reducing Excessive Margin to Achieve a Better Accuracy vs. Robustness Trade-off".
    """

    forwards: ClassVar[tuple[Branch, ...]] = ("clean", "adversarial", "adversarial")
    helped: ClassVar[bool] = True
    beta: Annotated[Number, Field(ge=0)] = 2.5
    gamma: Annotated[Number, Field(ge=0)] = 0.5
    helper: Path | None = None
    attack: Annotated[Attack, inner(loss="kl", start="gaussian")] = PGD(
        steps=10, keep="last", loss="kl", start="gaussian"
    )

    def __call__(self, batch: Batch) -> Outcome:
        if batch.helper is None:
            raise UserError(
                "HAT learns from the labels of another model: expected one from standard training as `helper` "
                "(in a recipe, objective.helper is the folder of its run), got none"
            )
        x_adv = batch.attacked(self.attack)
        with torch.no_grad(), untouched(batch.helper):
            helped = dataclasses.replace(batch, y=logits_of(batch.helper, x_adv).argmax(dim=1))
        clean, adversarial = batch.clean(), batch.adversarial(x_adv)
        beyond = batch.adversarial(batch.x + 2 * (x_adv - batch.x))
        trades = batch.cross_entropy(clean) + self.beta * kl(adversarial, clean)
        loss = (trades + self.gamma * helped.cross_entropy(beyond)).mean()
        return Outcome(loss=loss, logits=adversarial.detach(), x_adv=x_adv)
