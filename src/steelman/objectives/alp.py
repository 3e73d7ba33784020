"""Adversarial logit pairing."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from steelman.attacks import PGD, Attack
from steelman.heads import head_of
from steelman.models.batchnorm import Branch
from steelman.objectives.base import Batch, Objective, Outcome, inner
from steelman.settings import Number, settings


@settings
class ALP(Objective):
    """mean [ CE(f(x), y) / 2 + CE(f(x*), y) / 2 + weight * d(z(x), z(x*)) ], with x* climbing CE(f(x'), y).

    The pair term d compares logits divided by the head's scale. So `weight` means the same for every head. With `pair`
    "mse", d is the mean over classes of the squared difference, as in the released code of Pang et al. (2020). With
    "norm", d is the l2 norm of the difference, as in the papers. Gradients flow through both logits. Two forwards in
    train mode, x and then x*, move batch norm.

    Kannan et al. (2018), "Adversarial Logit Pairing", section 4; Pang et al. (2020), Table 1.
    """

    forwards: ClassVar[tuple[Branch, ...]] = ("clean", "adversarial")
    weight: Annotated[Number, Field(ge=0)] = 0.5
    pair: Literal["mse", "norm"] = "mse"
    attack: Annotated[Attack, inner()] = PGD(steps=10, keep="last")

    def __call__(self, batch: Batch) -> Outcome:
        x_adv = batch.attacked(self.attack)
        clean, adversarial = batch.clean(), batch.adversarial(x_adv)
        both = (batch.cross_entropy(clean) + batch.cross_entropy(adversarial)) / 2
        loss = (both + self.weight * self.distance(batch.net, clean, adversarial)).mean()
        return Outcome(loss=loss, logits=adversarial.detach(), x_adv=x_adv)

    def distance(self, model: nn.Module, clean: Tensor, adversarial: Tensor) -> Tensor:
        """d(z(x), z(x*)) for each sample."""
        head = head_of(model)
        difference = (clean - adversarial) / (1.0 if head is None else head.scale)
        if self.pair == "mse":
            return (difference**2).mean(dim=1)
        return torch.linalg.vector_norm(difference, dim=1)  # type: ignore[no-any-return]
