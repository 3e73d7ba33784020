"""How a run trains: optimiser, schedules, validation, saving and hardware, as validated settings."""

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
from steelman.settings import Count, Number, SettingsError, named, settings

NonNegative = Annotated[Number, Field(ge=0)]
Decay = Annotated[Number, Field(ge=0, lt=1)]


@runtime_checkable
class Optimizer(Protocol):
    """Settings that make a torch optimiser; the learning rate is set by the trainer at every step."""

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
            raise UserError("nesterov looks ahead along the momentum: expected one above 0, got 0")
        return self

    def __call__(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters, lr=0.0, momentum=self.momentum, weight_decay=self.weight_decay, nesterov=self.nesterov
        )


@settings
class Adam:
    """Adam (Kingma and Ba, 2015); weight decay is added to the gradient."""

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
    """The held-out split, cut from the training images, on which a checkpoint is chosen; the test set never is.

    `size` images are held out; each epoch the first `samples` of them are scored, clean and under `attack` at the
    target radius.
    """

    size: Count = 1000
    samples: Count = 1000
    attack: Annotated[Attack, named("attack", ATTACKS)] = PGD(steps=10)


@settings
class Guard:
    """When to stop by itself: validation robustness falling by more than `drop` below the best epoch while the training
    accuracy against the training attack does not fall is catastrophic overfitting (Wong et al., 2020, section 5.4)."""

    drop: Annotated[Number, Field(gt=0, le=1)] = 0.2
    on_collapse: Literal["rollback", "stop", "ignore"] = "rollback"


@settings
class Compute:
    """Device, precision and processes, as Lightning Fabric names them."""

    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    devices: Count | Literal["auto"] = 1
    nodes: Count = 1
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true"
    channels_last: bool = False
    compile: bool = False
    workers: NonNegativeInt = 0


@settings
class Around:
    """What can be put around an objective; one that cannot have it says why.

    `label_smoothing` spreads that share of the label over all classes, in every cross-entropy of the training loss;
    `clip` bounds the norm of the whole gradient; `awp` perturbs the weights; `patience` stops after that many epochs
    without a better validation robustness. `auxiliary_norm` normalises clean and adversarial batches apart, and names
    the batch norms the finished model predicts with.
    """

    label_smoothing: Decay = 0.0
    clip: Annotated[Number, Field(gt=0)] | None = None
    awp: AWP | None = None
    patience: Count | None = None
    auxiliary_norm: Branch | None = None


@settings
class Training:
    """One run of the loop. `eps` None means the threat's radius throughout; a schedule must end at or below it.

    `ema` is the decay of an exponential average of the weights (None: no average), which is then what is validated and
    kept. `select` keeps the epoch with the best validation robustness, the last, or the last of each cycle: the cycles
    are those of the learning rate's (or the radius's) ``resets``, and the kept model is the ensemble of their ends.
    `eps_per` "epoch" holds the scheduled radius for an epoch, as Periodic Adversarial Scheduling does; "step" moves it
    with every step.
    """

    epochs: Count = 10
    batch_size: Count = 128
    optimizer: Annotated[Optimizer, named("optimizer", OPTIMIZERS)] = SGD()
    lr: Scheduled = 0.1
    eps: Scheduled | None = None
    eps_per: Literal["step", "epoch"] = "step"
    ema: Decay | None = None
    select: Literal["best", "last", "cycles"] = "best"
    save_minutes: Annotated[Number, Field(gt=0)] = 5.0
    seed: int = 0

    @model_validator(mode="after")
    def _never_negative(self) -> Training:
        for name, value in (("lr", self.lr), ("eps", self.eps)):
            if value is not None and (least := lowest(value)) < 0:
                raise SettingsError([((name,), f"expected at least 0 throughout the run, got {least:g}")])
        if self.select == "cycles":
            self.cycle_ends()
        return self

    def cycle_ends(self) -> list[int]:
        """The epochs, counted from 1, that end a cycle; each must be a whole one."""
        inner = [one.schedule if isinstance(one, Warmup) else one for one in (self.lr, self.eps)]
        resets = [one.at for one in inner if isinstance(one, Resets)]
        if not resets:
            raise SettingsError([(("select",), "cycles are those of resets, and neither lr nor eps has any")])
        if any(at != resets[0] for at in resets):
            raise SettingsError([(("select",), f"cycles of lr and of eps differ: at {resets[0]} and {resets[1]}")])
        ends = [share * self.epochs for share in (*resets[0], 1.0)]
        if any(abs(end - round(end)) > 1e-6 or round(end) < 1 for end in ends):
            shown = ", ".join(f"{end:g}" for end in ends)
            raise SettingsError([(("select",), f"cycles must end with an epoch; of {self.epochs} they end at {shown}")])
        return [round(end) for end in ends]


@settings
class RunSettings:
    """How a run trains, whole: the same blocks as a recipe has."""

    training: Training = Training()
    validation: Validation = Validation()
    guard: Guard = Guard()
    around: Around = Around()
    compute: Compute = Compute()
