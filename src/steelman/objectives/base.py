"""What an objective is: settings that turn a batch into a training loss, with an attack inside."""

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
    """The validator of an objective's attack: attacks by name, with the defaults of the method.

    An objective trains on an attack's last point, unless the recipe says otherwise. A search that stops at its first
    success would give the weakest images that break the model. So the choices are the attacks with the option `keep`.
    """
    given = {"keep": "last", **defaults}
    able = {name: partial(entry, **given) for name, entry in ATTACKS.items() if "keep" in options_of(entry)}
    return named("training attack", able)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch for an objective. `Criterion` makes it.

    `index` is each sample's place in the data, and decides its noise together with `key`. `model` is the model in
    training, with its wrappers for several processes. `net` is the module inside the wrappers. An attack works on
    `net`, because its gradients need no exchange between processes. `threat` has the radius of this step. `ratio` is
    that radius divided by the target radius; step sizes are multiplied by it.

    `carry` holds what an objective keeps from batch to batch. Checkpoints save it. Only ``Outcome.after`` may change
    it, because weight perturbation calls the objective twice in a step. `smoothing` is the label smoothing. `progress`
    is the share of the training that is done. `helper` is the other model that some objectives learn from. `x_adv` are
    adversarial images to use instead of an attack: weight perturbation trains twice on the same images.
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
        """Adversarial images that need no attack, or None.

        They are the given `x_adv` or, at a radius of zero, the clean images. A schedule may start at zero.
        """
        return self.x if self.x_adv is None and self.threat.eps == 0 else self.x_adv

    @contextlib.contextmanager
    def probed(self) -> Iterator[Tensor]:
        """Inside, an objective's own attack may call `net`; yields the clean logits, as constants.

        `net` is in eval mode and uses its adversarial batch norms, if it has any. Afterwards it is as before.
        """
        with routed(self.net, "adversarial"), untouched(self.net), torch.enable_grad():
            with torch.no_grad():
                clean = logits_of(self.net, self.x)
            yield clean

    def attacked(self, attack: Attack) -> Tensor:
        """The adversarial images of `attack` for this batch. The step size follows the scheduled radius."""
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
        """The logits of adversarial images, with gradients for the weights.

        They go through the adversarial batch norms, if the model has any.
        """
        with routed(self.net, "adversarial"):
            logits: Tensor = self.model(x_adv)
        return logits

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """The training cross-entropy of each sample, with the head's margin and the label smoothing."""
        lowered = with_margin(self.net, logits, self.y)
        return F.cross_entropy(lowered, self.y, reduction="none", label_smoothing=self.smoothing)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of an objective: the loss, the logits of the training images, and the adversarial images, if any.

    The training accuracy is computed from the logits. `after` is called when the gradients are known.
    """

    loss: Tensor
    logits: Tensor
    x_adv: Tensor | None = None
    after: Callable[[], None] | None = None


class Objective:
    """Settings that turn a batch into a loss. Each subclass is one method, and `Criterion` calls it.

    Class attributes tell the trainer about the method:
    `forwards`: the forwards in train mode, in their order. Nothing else may move batch-norm statistics.
    `adversarial`: False without a training attack. The model then cannot overfit to one.
    `helped`: True if it learns from another model besides the labels.
    `eager`: why it cannot run on a compiled model; empty if it can.
    `single_pass`: why its loss cannot be taken twice on the same images; empty if it can. Weight perturbation does so.
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
        """How many times in a row it trains on each batch."""
        return 1

    def scheduled(self) -> str:
        """The name of the setting that changes with the progress of the training, or an empty text."""
        return ""

    def check(self, net: nn.Module, x: Tensor) -> None:
        """Raise `UserError` for a model that this objective cannot train; `x` are a few images."""

    def setting(self, name: str) -> Any:
        """A setting that not every objective has, such as `attack` or `helper`, or None."""
        return getattr(self, name, None)


def check_model(objective: Objective, net: nn.Module, x: Tensor) -> None:
    """Refuse a model that an objective cannot train; `x` are a few images. The error names the objective."""
    try:
        objective.check(net, x)
    except UserError as error:
        raise UserError(f"{type(objective).__name__}: {error}") from None


def objections(objective: Objective, *, compiled: bool, awp: bool, auxiliary_norm: bool) -> list[tuple[str, str]]:
    """What an objective cannot be combined with: pairs (key of the recipe, reason)."""
    name, found = type(objective).__name__, []
    if compiled and objective.eager:
        found.append(("compute.compile", f"{name} {objective.eager}: expected the model without torch.compile"))
    if awp and objective.single_pass:
        found.append(("around.awp", f"{name} {objective.single_pass}"))
    if auxiliary_norm and len(set(objective.forwards)) < 2:
        found.append(
            (
                "around.auxiliary_norm",
                f"{name} trains on {objective.forwards[0]} images alone, so a second set of batch norms has no use; "
                "expected an objective with a clean and an adversarial forward, such as trades",
            )
        )
    return found
