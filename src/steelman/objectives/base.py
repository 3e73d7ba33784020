"""What an objective is: it turns a batch into a training loss, and owns the attack inside."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from pydantic import BeforeValidator
from torch import Tensor, nn

from steelman.attacks import ATTACKS, PGD, Attack
from steelman.attacks.base import logits_of, untouched
from steelman.errors import UserError
from steelman.heads import with_margin
from steelman.models.batchnorm import Branch, routed
from steelman.rng import Key
from steelman.settings import named, options_of
from steelman.threat import ThreatModel


def inner(**defaults: Any) -> BeforeValidator:
    """The validator of an objective's attack: attacks by name, with the defaults that the method gives them.

    Inside an objective an attack returns its last point, unless the recipe says otherwise: a search that stops at its
    first success would train on the weakest adversary that works. So the choices are those that can.
    """
    given = {"keep": "last", **defaults}
    able = {name: partial(entry, **given) for name, entry in ATTACKS.items() if "keep" in options_of(entry)}
    return named("training attack", able)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch and what surrounds it.

    `threat` has the radius scheduled for this step, `ratio` is that radius over the target one (step sizes follow it);
    `net` is the bare module an inner attack works on, while the model an objective is called with may be wrapped for
    several processes; `carry` is what an objective keeps from batch to batch, and is saved in checkpoints; it may be
    changed in ``Outcome.after`` alone, for weight perturbation takes the loss twice a step. `smoothing` is the label
    smoothing of the training loss, `progress` the share of the run that is done, `helper` the other model that an
    objective with a setting of that name learns from. `x_adv`, when given, are the adversarial images to use: weight
    perturbation trains a second time on the same ones.
    """

    x: Tensor
    y: Tensor
    index: Tensor
    threat: ThreatModel
    ratio: float
    key: Key
    net: nn.Module
    carry: dict[str, Tensor]
    smoothing: float = 0.0
    progress: float = 0.0
    helper: nn.Module | None = None
    x_adv: Tensor | None = None

    def known(self) -> Tensor | None:
        """The adversarial images that need no attack: those given, or the clean ones at a radius of zero, where a
        schedule may start."""
        return self.x if self.x_adv is None and self.threat.eps == 0 else self.x_adv

    @contextlib.contextmanager
    def probed(self) -> Iterator[Tensor]:
        """Inside, an objective's own attack may work on `net`, which shows its adversarial side in eval mode and is as
        before afterwards; yields the clean logits, as constants."""
        with routed(self.net, "adversarial"), untouched(self.net), torch.enable_grad():
            with torch.no_grad():
                clean = logits_of(self.net, self.x)
            yield clean

    def attacked(self, attack: Attack) -> Tensor:
        """The images `attack` makes of this batch, with its step size following the scheduled radius."""
        if (known := self.known()) is not None:
            return known
        scaled = attack.at(self.ratio) if isinstance(attack, PGD) else attack
        with routed(self.net, "adversarial"):
            return scaled(self.net, self.x, self.y, self.threat, index=self.index, key=self.key)

    def adversarial(self, model: nn.Module, x_adv: Tensor) -> Tensor:
        """The model's logits of adversarial images: through the auxiliary batch norms, if it has them."""
        with routed(self.net, "adversarial"):
            logits: Tensor = model(x_adv)
        return logits

    def cross_entropy(self, model: nn.Module, logits: Tensor) -> Tensor:
        """The training cross-entropy of each sample: with the head's margin and the label smoothing."""
        return F.cross_entropy(
            with_margin(model, logits, self.y), self.y, reduction="none", label_smoothing=self.smoothing
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The loss to descend, the logits of the samples it was trained on (for the training accuracy), and the adversarial
    images, if any. `after` is called once the gradients are there, before the optimiser's step."""

    loss: Tensor
    logits: Tensor
    x_adv: Tensor | None = None
    after: Callable[[], None] | None = None


@runtime_checkable
class Objective(Protocol):
    """Settings that turn ``(model, batch)`` into a loss.

    Class attributes say what the rest must know of it, where it differs from the usual:
    `forwards`: the forwards in train mode, in order; these, and nothing else, move batch-norm statistics.
    `adversarial`: False for one that has no training attack, and so none to overfit to.
    `eager`: why it cannot run compiled. `single_pass`: why its loss cannot be taken twice on the same images, as
    weight perturbation does. `replays`: how often in a row it sees each batch. A method `check(net, x)` raises for a
    model that the objective cannot train.
    """

    def __call__(self, model: nn.Module, batch: Batch) -> Outcome: ...


def check_model(objective: object, net: nn.Module, x: Tensor) -> None:
    """Refuse a model that an objective cannot train, in the objective's own words; `x` are a few images."""
    check = getattr(objective, "check", None)
    if check is not None:
        try:
            check(net, x)
        except UserError as error:
            raise UserError(f"{type(objective).__name__}: {error}") from None


def is_adversarial(objective: object) -> bool:
    """Whether an objective trains against an attack."""
    return bool(getattr(objective, "adversarial", True))


def forwards_of(objective: object) -> tuple[Branch, ...]:
    """The forwards in train mode that an objective makes of each batch."""
    forwards: tuple[Branch, ...] = getattr(objective, "forwards", ("adversarial",))
    return forwards


def objections(objective: object, *, compiled: bool, awp: bool, auxiliary_norm: bool) -> list[tuple[str, str]]:
    """What an objective cannot be combined with, as (key of the recipe, reason)."""
    name, found = type(objective).__name__, []
    if compiled and (reason := getattr(objective, "eager", "")):
        found.append(("compute.compile", f"{name} {reason}"))
    if awp and (reason := getattr(objective, "single_pass", "")):
        found.append(("around.awp", f"{name} {reason}"))
    if auxiliary_norm and len(set(forwards_of(objective))) < 2:
        only = forwards_of(objective)[0]
        found.append(
            (
                "around.auxiliary_norm",
                f"{name} trains on {only} batches alone, so there are no two kinds to normalise apart; expected an "
                "objective with a clean and an adversarial forward, such as trades",
            )
        )
    return found
