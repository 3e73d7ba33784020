"""What an objective is: it turns a batch into a training loss, and owns the attack inside."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Annotated, Protocol, runtime_checkable

from torch import Tensor, nn

from steelman.attacks import ATTACKS, Attack
from steelman.rng import Key
from steelman.settings import named
from steelman.threat import ThreatModel

# Inside an objective an attack named in a recipe returns its last point, unless the recipe says otherwise: a search
# that stops at its first success would train on the weakest adversary that works.
InnerAttack = Annotated[
    Attack, named("attack", {name: partial(attack, keep="last") for name, attack in ATTACKS.items()})
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch and what surrounds it.

    `threat` has the radius scheduled for this step, `ratio` is that radius over the target one (step sizes follow it);
    `net` is the bare module an inner attack works on, while the model an objective is called with may be wrapped for
    several processes; `carry` is what an objective keeps from batch to batch, and is saved in checkpoints.
    """

    x: Tensor
    y: Tensor
    index: Tensor
    threat: ThreatModel
    ratio: float
    key: Key
    net: nn.Module
    carry: dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The loss to descend, and the logits of the samples it was trained on (for the training accuracy)."""

    loss: Tensor
    logits: Tensor


@runtime_checkable
class Objective(Protocol):
    """Settings that turn ``(model, batch)`` into a loss."""

    def __call__(self, model: nn.Module, batch: Batch) -> Outcome: ...
