"""The settings of a training: optimiser, schedules, validation, saving and hardware."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Literal, Protocol, runtime_checkable

import torch
from pydantic import Field, NonNegativeInt, model_validator

from steelman.attacks import ATTACKS, PGD, Attack
from steelman.errors import UserError
from steelman.models.batchnorm import Branch
from steelman.objectives.awp import AWP
from steelman.schedules import Resets, Scheduled, Warmup, lowest
from steelman.settings import Count, Number, SettingsError, at_most, named, settings

NonNegative = Annotated[Number, Field(ge=0)]
Decay = Annotated[Number, Field(ge=0, lt=1)]
BatchSize = Annotated[Count, at_most(1_000_000)]
Epochs = Annotated[Count, at_most(1_000_000)]
Processes = Annotated[Count, at_most(10_000)]
Seed = Annotated[int, at_most(2**64 - 1), Field(ge=-(2**63))]


@runtime_checkable
class Optimizer(Protocol):
    """Settings that make a torch optimiser. The trainer sets the learning rate before every step."""

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer: ...


@settings
class SGD:
    """Stochastic gradient descent with momentum."""

    momentum: Decay = 0.9
    weight_decay: NonNegative = 0.0
    nesterov: bool = False

    @model_validator(mode="after")
    def _something_to_look_ahead_with(self) -> SGD:
        if self.nesterov and self.momentum == 0:
            raise UserError("nesterov needs a momentum: expected one above 0, got 0")
        return self

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters, lr=0.0, momentum=self.momentum, weight_decay=self.weight_decay, nesterov=self.nesterov
        )


@settings
class Adam:
    """Adam (Kingma and Ba, 2015). Weight decay is added to the gradient."""

    betas: tuple[Decay, Decay] = (0.9, 0.999)
    weight_decay: NonNegative = 0.0

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.0, betas=self.betas, weight_decay=self.weight_decay)


@settings
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019)."""

    betas: tuple[Decay, Decay] = (0.9, 0.999)
    weight_decay: NonNegative = 0.01

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.0, betas=self.betas, weight_decay=self.weight_decay)


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


@settings
class Validation:
    """Training images that are held out to choose the epoch. The test set is never used for that.

    `size` images are held out. After each epoch the first `samples` of them are scored: clean, and under `attack` at
    the target radius.
    """

    size: Count = 1000
    samples: Count = 1000
    attack: Annotated[Attack, named("attack", ATTACKS)] = PGD(steps=10)


@settings
class Guard:
    """The guard against catastrophic overfitting (Wong et al., 2020, section 5.4), which stops the training.

    It acts after an epoch under two conditions. Validation robustness is by more than `drop` below that of the best
    epoch. The accuracy against the training attack has not fallen.
    """

    drop: Annotated[Number, Field(gt=0, le=1)] = 0.2
    on_collapse: Literal["rollback", "stop", "ignore"] = "rollback"


@settings
class Compute:
    """Device, precision and processes, as Lightning Fabric names them."""

    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    devices: Processes | Literal["auto"] = 1
    nodes: Processes = 1
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    channels_last: bool = False
    compile: bool = False
    workers: Annotated[NonNegativeInt, at_most(1000)] = 0


@settings
class Around:
    """Options that can be combined with any objective. An objective that cannot have one says why.

    `label_smoothing` spreads that share of the label over all classes, in every cross-entropy of the training loss.
    `clip` bounds the norm of the whole gradient. `awp` perturbs the weights. `patience` stops after that many epochs
    without a better validation robustness. `auxiliary_norm` gives clean and adversarial images their own batch norms,
    and names those that the finished model predicts with.
    """

    label_smoothing: Decay = 0.0
    clip: Annotated[Number, Field(gt=0)] | None = None
    awp: AWP | None = None
    patience: Epochs | None = None
    auxiliary_norm: Branch | None = None


@settings
class Training:
    """The settings of the training loop.

    `eps` None means the threat's radius. A schedule must end at or below that radius. `eps_per` "step" changes the
    scheduled radius with every step. "epoch" keeps it for an epoch, as Periodic Adversarial Scheduling does.

    `ema` is the decay of an exponential average of the weights. The average is then validated and kept. None: no
    average. `select` is the epoch to keep: the one with the best validation robustness, or the last. "cycles" keeps the
    last epoch of each cycle, and the kept model is their ensemble. A cycle ends at each reset of the learning rate's or
    the radius's schedule ``resets``.
    """

    epochs: Epochs = 10
    batch_size: BatchSize = 128
    optimizer: Annotated[Optimizer, named("optimizer", OPTIMIZERS)] = SGD()
    lr: Scheduled = 0.1
    eps: Scheduled | None = None
    eps_per: Literal["step", "epoch"] = "step"
    ema: Decay | None = None
    select: Literal["best", "last", "cycles"] = "best"
    save_minutes: Annotated[Number, Field(gt=0)] = 5.0
    seed: Seed = 0

    @model_validator(mode="after")
    def _never_negative(self) -> Training:
        for name, value in (("lr", self.lr), ("eps", self.eps)):
            if value is not None and (least := lowest(value)) < 0:
                raise SettingsError([((name,), f"expected at least 0 throughout the run, got {least:g}")])
        if self.select == "cycles":
            self.cycle_ends()
        return self

    def cycle_ends(self) -> list[int]:
        """The epochs at the end of a cycle, counted from 1. A cycle must have a whole number of epochs."""
        inner = [one.schedule if isinstance(one, Warmup) else one for one in (self.lr, self.eps)]
        resets = [one.at for one in inner if isinstance(one, Resets)]
        if not resets:
            raise SettingsError([(("select",), "cycles needs a schedule with resets, and neither lr nor eps has one")])
        if any(at != resets[0] for at in resets):
            raise SettingsError([(("select",), f"cycles of lr and of eps differ: at {resets[0]} and {resets[1]}")])
        ends = [share * self.epochs for share in (*resets[0], 1.0)]
        if any(abs(end - round(end)) > 1e-6 or round(end) < 1 for end in ends):
            shown = ", ".join(f"{end:g}" for end in ends)
            raise SettingsError([(("select",), f"cycles must end with an epoch; of {self.epochs} they end at {shown}")])
        return [round(end) for end in ends]


@settings
class RunSettings:
    """All settings of a training, in the same blocks as in a recipe."""

    training: Training = Training()
    validation: Validation = Validation()
    guard: Guard = Guard()
    around: Around = Around()
    compute: Compute = Compute()
