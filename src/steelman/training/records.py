"""Where a run is, and what it ends with."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor


@dataclasses.dataclass
class Progress:
    """Where a run is: everything that is not a tensor and that a resumed run must know."""

    epoch: int = 0  # epochs finished
    batch: int = 0  # batches of the current epoch done
    step: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    count: int = 0
    seconds: float = 0.0  # spent in the current epoch
    best_step: int | None = None
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Trained:
    """The weights a run keeps, from which epoch, and, when it ended early, why.

    Of an ensemble, `state` has the weights of all `members`, each under ``members.i.``.
    """

    state: dict[str, Tensor]
    epoch: int
    history: tuple[dict[str, Any], ...]
    stopped: str | None = None
    members: int | None = None
