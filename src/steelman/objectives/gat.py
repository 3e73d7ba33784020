"""GAT: guided adversarial training, with one guided step."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from steelman.attacks.base import input_gradient, logits_of
from steelman.attacks.pgd import ascend
from steelman.losses import cross_entropy, kl
from steelman.models.batchnorm import Branch
from steelman.objectives.base import Batch, Objective, Outcome
from steelman.schedules import Scheduled, lowest, value_at
from steelman.settings import Number, SettingsError, settings


@settings
class GAT(Objective):
    """mean [ CE(f(x), y) + weight * ||p(x) - p(x*)||^2 ], with p the softmax.

    x* climbs CE(f(x'), y) + a * weight * ||p(x) - p(x')||^2. The factor a is 0 for one batch and 1 for the next, over
    the whole run. The released code begins each epoch with 0. x* starts at x plus random signs, which have length
    `start` * eps in the threat's norm. In linf this is +-`start` * eps in every pixel. The start is projected into the
    box; then x* makes one step of size `step` * eps.

    `weight` may be a schedule. The released recipe has 10, and 40 for the last 14 of 100 epochs. With `distance` "kl",
    the pair term of the loss is that of TRADES: beta * KL(p(x) || p(x*)). The attack does not change.

    The attack works in eval mode, and p(x) is a constant to it. The head's margin is in the cross-entropy of the loss,
    not in the attack. Two forwards in train mode, x and then x*, move batch norm. The released code makes a third, of
    x, for the attack's p(x).

    Sriramanan et al. (2020), "Guided Adversarial Attack for Evaluating and Enhancing Adversarial Defenses".
    """

    forwards: ClassVar[tuple[Branch, ...]] = ("clean", "adversarial")
    weight: Scheduled = 10.0
    step: Annotated[Number, Field(gt=0)] = 1.0
    start: Annotated[Number, Field(ge=0, le=1)] = 0.5
    distance: Literal["squared", "kl"] = "squared"
    beta: Annotated[Number, Field(ge=0)] = 6.0

    @model_validator(mode="after")
    def _sensible(self) -> GAT:
        if lowest(self.weight) < 0:
            raise SettingsError([(("weight",), f"expected a weight of at least 0, got {self.weight}")])
        return self

    def scheduled(self) -> str:
        return "weight" if callable(self.weight) else ""

    def __call__(self, batch: Batch) -> Outcome:
        weight = value_at(self.weight, batch.progress)
        turn = batch.carry.get("turn", torch.tensor(0))
        x_adv = self.guided(batch, turn * weight)
        clean, adversarial = batch.clean(), batch.adversarial(x_adv)
        squares = self.distance == "squared"
        pair = weight * squared(adversarial, clean) if squares else self.beta * kl(adversarial, clean)

        def after() -> None:
            """Switch a between 0 and 1 for the next batch."""
            batch.carry["turn"] = 1 - turn

        loss = (batch.cross_entropy(clean) + pair).mean()
        return Outcome(loss=loss, logits=adversarial.detach(), x_adv=x_adv, after=after)

    def guided(self, batch: Batch, weight: Tensor) -> Tensor:
        """x*: one step up the cross-entropy plus `weight` times the squared distance from the clean softmax."""
        x, net, threat = batch.x, batch.net, batch.threat
        if (known := batch.known()) is not None:
            return known
        with batch.probed() as clean:
            x_adv = threat.project(x + self.start * signs(batch), x).requires_grad_(True)
            logits = logits_of(net, x_adv)
            losses = cross_entropy(logits, batch.y) + weight * squared(logits, clean)
            return ascend(x_adv.detach(), input_gradient(losses, x_adv), x, threat, self.step * threat.eps)


def signs(batch: Batch) -> Tensor:
    """A random sign for every pixel, scaled to length eps in the threat's norm. It depends on the sample's index."""
    shape = tuple(batch.x.shape[1:])
    size: float = batch.threat.eps / math.prod(shape) ** (1 / batch.threat.p)
    up = batch.key.fold("signs").uniform(batch.index, shape, batch.x.dtype) < 0.5
    return size * (2 * up.to(batch.x.dtype) - 1)


def squared(logits: Tensor, reference: Tensor) -> Tensor:
    """||softmax(z) - softmax(reference)||^2 for each sample.

    >>> squared(torch.tensor([[100.0, 0.0]]), torch.tensor([[0.0, 100.0]]))
    tensor([2.])
    """
    return (logits.softmax(dim=1) - reference.softmax(dim=1)).square().sum(dim=1)
