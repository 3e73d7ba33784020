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

    g is the helper: a model from standard training. `helper` is the folder of its finished run. The label argmax g(x*)
    is the class that x* shows to a model without robustness. The loss asks for this label at twice the perturbation.
    Without this term, the model's margin would grow far beyond the ball, and clean accuracy would fall.

    The images x + 2 (x* - x) leave the ball, and may leave the box, as in the released code. A clipped pixel would
    have less than twice its perturbation. The head's margin is in both cross-entropies, each on its own label. Three
    forwards in train mode move batch norm: x, then x*, then x + 2 (x* - x).

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
                "HAT learns from the labels of another model: expected a model from standard training as `helper` "
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
