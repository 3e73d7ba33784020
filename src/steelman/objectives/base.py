"""What an objective is: it turns a batch into a training loss, and owns the attack inside."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

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
    """One batch as an objective sees it. `Criterion` makes it, and nobody else has to.

    `model` is the model that is trained, in whatever it is wrapped for several processes. `net` is the bare module
    inside: an attack works on it, for an attack needs no exchange of gradients. `threat` has the radius of this step,
    and `ratio` is that radius over the target one: step sizes follow it. `carry` is what an objective keeps from batch
    to batch. It is saved in checkpoints, and changes in ``Outcome.after`` alone, for weight perturbation takes the loss
    twice a step. `smoothing` is the label smoothing, `progress` the share of the training that is done, `helper` the
    other model that some objectives learn from. `x_adv`, when given, are the adversarial images to use: weight
    perturbation trains a second time on the same ones.
    """

    x: Tensor
    y: Tensor
    index: Tensor
    threat: ThreatModel
    ratio: float
    key: Key
    model: nn.Module
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

    def clean(self) -> Tensor:
        """The logits of the clean images, with gradients for the weights."""
        logits: Tensor = self.model(self.x)
        return logits

    def adversarial(self, x_adv: Tensor) -> Tensor:
        """The logits of adversarial images, with gradients for the weights; through the auxiliary batch norms, if the
        model has them."""
        with routed(self.net, "adversarial"):
            logits: Tensor = self.model(x_adv)
        return logits

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """The training cross-entropy of each sample: with the head's margin and the label smoothing."""
        lowered = with_margin(self.net, logits, self.y)
        return F.cross_entropy(lowered, self.y, reduction="none", label_smoothing=self.smoothing)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The loss to descend, the logits of the samples it was trained on (for the training accuracy), and the adversarial
    images, if any. `after` is called once the gradients are there."""

    loss: Tensor
    logits: Tensor
    x_adv: Tensor | None = None
    after: Callable[[], None] | None = None


class Objective:
    """Settings that turn a batch into a loss. `Criterion` calls it; each subclass is one method.

    Class attributes say what the rest must know of it:
    `forwards`: the forwards in train mode, in order; these, and nothing else, move batch-norm statistics.
    `adversarial`: False for one that has no training attack, and so none to overfit to.
    `helped`: True for one that learns from another model beside the labels.
    `eager`: why it cannot run compiled. `single_pass`: why its loss cannot be taken twice on the same images, as
    weight perturbation does.
    """

    forwards: ClassVar[tuple[Branch, ...]] = ("adversarial",)
    adversarial: ClassVar[bool] = True
    helped: ClassVar[bool] = False
    eager: ClassVar[str] = ""
    single_pass: ClassVar[str] = ""

    def __call__(self, batch: Batch) -> Outcome:
        raise NotImplementedError(f"{type(self).__name__} has no loss: an objective defines __call__(batch)")

    @property
    def repeats(self) -> int:
        """How often in a row it sees each batch."""
        return 1

    def scheduled(self) -> str:
        """The setting that changes with the progress of the training; nothing if none does."""
        return ""

    def check(self, net: nn.Module, x: Tensor) -> None:
        """Raise for a model that it cannot train; `x` are a few images."""

    def setting(self, name: str) -> Any:
        """A setting that not every objective has, such as `attack` or `helper`; None in those without it."""
        return getattr(self, name, None)


def check_model(objective: Objective, net: nn.Module, x: Tensor) -> None:
    """Refuse a model that an objective cannot train, in the objective's own words; `x` are a few images."""
    try:
        objective.check(net, x)
    except UserError as error:
        raise UserError(f"{type(objective).__name__}: {error}") from None


def objections(objective: Objective, *, compiled: bool, awp: bool, auxiliary_norm: bool) -> list[tuple[str, str]]:
    """What an objective cannot be combined with, as (key of the recipe, reason)."""
    name, found = type(objective).__name__, []
    if compiled and objective.eager:
        found.append(("compute.compile", f"{name} {objective.eager}"))
    if awp and objective.single_pass:
        found.append(("around.awp", f"{name} {objective.single_pass}"))
    if auxiliary_norm and len(set(objective.forwards)) < 2:
        found.append(
            (
                "around.auxiliary_norm",
                f"{name} trains on {objective.forwards[0]} batches alone, so there are no two kinds to normalise "
                "apart; expected an objective with a clean and an adversarial forward, such as trades",
            )
        )
    return found
