"""What the files of a run must hold. Each is read through one schema, and a wrong field is one sentence.

A run's folder may be another person's. So nothing here trusts a type, a size or a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from steelman.bounded import checked, read_json
from steelman.errors import UserError
from steelman.models.batchnorm import Branch
from steelman.threat import Norm

MOST_BYTES = 1 << 26  # 100,000 epochs take less
Whole = Annotated[int, Field(ge=0, lt=1 << 53)]
Real = Annotated[float, Field(allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]
Options = dict[str, Any]
# What these optimisers keep of each weight: tensors of its shape, and the number of the step.
MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq"})
KEPT = {torch.optim.SGD: frozenset({"momentum_buffer"}), torch.optim.Adam: MOMENTS, torch.optim.AdamW: MOMENTS}


class _Strict(pydantic.BaseModel):
    """Every key is known, and no value is converted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Epoch(_Strict):
    """The numbers of a finished epoch."""

    epoch: Whole
    step: Whole
    loss: Real
    train_accuracy: Share
    validation_clean: Share
    validation_robust: Share
    lr: Real
    eps: Real
    seconds: Real


class BuiltModel(_Strict):
    """A model that steelman builds from a name and options."""

    name: Name
    options: Options
    mean: Annotated[list[Real], Field(min_length=1, max_length=1024)]
    std: Annotated[list[Real], Field(min_length=1, max_length=1024)]
    weights: None = None


class OwnModel(_Strict):
    """A model that only the user's own code can build."""

    name: None
    class_: Annotated[Name, Field(alias="class")]
    wrapped: bool


class Head(_Strict):
    """The name and the options of a head."""

    name: Name
    options: Options


class Data(_Strict):
    """The name and the options of a dataset."""

    name: Name | None
    options: dict[str, str]


class Threat(_Strict):
    """A threat model."""

    norm: Norm
    eps: Annotated[Real, Field(ge=0)]
    low: Real
    high: Real


class ModelFile(_Strict):
    """model.json."""

    format: Literal[1]
    recipe: str
    model: BuiltModel | OwnModel
    head: Head
    input_shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 15)]], Field(min_length=3, max_length=3)]
    classes: Annotated[list[str], Field(min_length=1, max_length=100_000)]
    data: Data
    threat: Threat
    auxiliary_norm: Branch | None
    epoch: Whole
    members: Annotated[int, Field(ge=1, le=10_000)] | None
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class RunFile(_Strict):
    """run.json."""

    status: Literal["finished", "stopped early"]
    message: str | None
    kept_epoch: Whole
    training_seconds: Real
    session_seconds: Real
    history: list[Epoch]


class ProgressPart(_Strict):
    """The progress in a checkpoint."""

    epoch: Whole
    batch: Whole
    step: Whole
    loss_sum: Real
    correct: Whole | Real  # several processes add up floating-point numbers
    count: Whole | Real
    seconds: Real
    best_step: Whole | None
    history: list[Epoch]

    @pydantic.model_validator(mode="after")
    def _epochs_fit(self) -> ProgressPart:
        if len(self.history) != self.epoch or (self.best_step is None) != (self.epoch == 0):
            raise ValueError("expected the numbers of each finished epoch, and the best step among them")
        return self


class AveragePart(_Strict):
    """The average of the weights in a checkpoint."""

    steps: Whole
    values: dict[str, Tensor]


class OptimizerPart(_Strict):
    """The state of an optimiser in a checkpoint. ``restore_optimizer`` checks what is inside."""

    state: dict[int, dict[str, Any]]
    param_groups: list[dict[str, Any]]


class CheckpointState(_Strict):
    """The state in a checkpoint."""

    fingerprint: str
    progress: ProgressPart
    model: dict[str, Tensor]
    optimizer: OptimizerPart
    average: AveragePart | None
    carry: dict[str, Tensor]
    rng: Tensor
    cuda: Tensor | None
    precision: dict[str, Any]


def model_file(path: Path) -> dict[str, Any]:
    """The content of a run's model.json."""
    what = f"{path} is damaged"
    value = read_json(path, what=what)
    if not isinstance(value, dict):
        raise UserError(f"{what}: expected a mapping, got {type(value).__name__}")
    return checked(ModelFile, value, what=what).model_dump(by_alias=True)


def run_file(path: Path) -> dict[str, Any]:
    """The content of a run's run.json."""
    what = f"{path} is damaged"
    return checked(RunFile, read_json(path, what=what, most_bytes=MOST_BYTES), what=what).model_dump()


def fit_file(path: Path) -> dict[str, Any]:
    """The content of a run's fit.json: the arguments of a call, as texts."""
    what = f"{path} is damaged"
    value = read_json(path, what=what)
    if not isinstance(value, dict) or not all(isinstance(part, str | int) for part in value.values()):
        raise UserError(f"{what}: expected a mapping of names to texts")
    return value


def checkpoint_state(state: object, folder: Path) -> dict[str, Any]:
    """The state of a checkpoint, each part with its type."""
    found = checked(CheckpointState, state, what=f"checkpoint {folder} is damaged")
    return {
        **{name: getattr(found, name) for name in CheckpointState.model_fields},
        "progress": found.progress.model_dump(),
        "optimizer": dict(found.optimizer),
        "average": None if found.average is None else dict(found.average),
    }


def same_shapes(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Whether two states have the same names, shapes and types."""
    return found.keys() == expected.keys() and all(
        (value.shape, value.dtype) == (expected[name].shape, expected[name].dtype) for name, value in found.items()
    )


def check_processes(state: Mapping[str, Any], what: str) -> None:
    """Refuse a state whose parts do not have a row for each process."""
    for name, value in {"rng": state["rng"], **state["carry"]}.items():
        if value.dim() < 1 or len(value) != len(state["rng"]):
            raise UserError(f"{what}: {name} does not have a row for each process")


def _kept_fits(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Whether an optimiser keeps what it should of a weight: everything or nothing, in the weight's shape."""
    kept = optimizer.state.get(parameter, {})
    return not kept or (
        kept.keys() == KEPT[type(optimizer)]
        and all(
            (name == "momentum_buffer" and value is None)
            or (isinstance(value, Tensor) and (value.shape, value.dtype) == (parameter.shape, parameter.dtype))
            or (isinstance(value, Tensor) and name == "step" and (value.shape, value.dtype) == ((), torch.float32))
            for name, value in kept.items()
        )
    )


def _options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What an optimiser was built with. The weights are not part of it, and each step sets the learning rate anew."""
    return [
        {  # a checkpoint gives tuples back as lists
            name: list(value) if isinstance(value, tuple) else value
            for name, value in group.items()
            if name not in ("params", "lr")
        }
        for group in optimizer.param_groups
    ]


def restore_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any], what: str) -> None:
    """Give an optimiser its saved state. torch itself would take tensors of any shape, and fail at the next step."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    options = _options(optimizer)
    try:
        if not all(isinstance(group.get("params"), list) for group in state["param_groups"]):
            raise ValueError("expected a list of weights in each group")
        optimizer.load_state_dict(dict(state))
        found = _options(optimizer)
        known = type(optimizer) in KEPT
        # The recipe says the options. Others from a file could train to the worse, or fail on this device.
        same = (
            repr(found) == repr(options) if known else [one.keys() for one in found] == [one.keys() for one in options]
        )
        fits = same and (not known or all(_kept_fits(optimizer, parameter) for parameter in parameters))
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(f"{what}: its optimiser cannot be read ({str(error).splitlines()[0]})") from None
    if not fits:
        raise UserError(f"{what}: its optimiser is that of another model, or has other options than the recipe's")
