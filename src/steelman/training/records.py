"""The progress of a run, and its result."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor


@dataclasses.dataclass
class Progress:
    """The progress of a run: all numbers that a resumed run needs."""

    epoch: int = 0  # finished epochs
    batch: int = 0  # finished batches of the current epoch
    step: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    count: int = 0
    seconds: float = 0.0  # spent in the current epoch
    best_step: int | None = None
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of a training: the kept weights `state`, and the `epoch` they are from.

    `stopped` is the reason of an early end. For an ensemble, `members` is their number, and `state` holds the weights
    of all members under ``members.i.``.
    """

    state: dict[str, Tensor]
    epoch: int
    history: tuple[dict[str, Any], ...]
    stopped: str | None = None
    members: int | None = None
