"""The weights that a run keeps: of its best epoch, of its last epoch, or of the ends of its cycles, as an ensemble."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from torch import Tensor

from steelman.errors import UserError
from steelman.training.checkpoint import checkpoint_path, load_checkpoint
from steelman.training.described import checkpoint_state
from steelman.training.records import Progress, Trained
from steelman.training.settings import Training


def steps_to_keep(progress: Progress, training: Training) -> set[int]:
    """The steps whose checkpoints the end of the run may need."""
    steps = {progress.best_step or 0} | {epoch["step"] for epoch in progress.history[-1:]}
    if training.select == "cycles":
        steps |= set(_cycles(progress, training))
    return steps


def _cycles(progress: Progress, training: Training) -> list[int]:
    ends = set(training.cycle_ends())
    return [epoch["step"] for epoch in progress.history if epoch["epoch"] in ends]


def keep(
    folder: Path, progress: Progress, training: Training, *, stopped: str | None, rollback: bool, console: Console
) -> Trained:
    """The weights to keep. A run that stopped early keeps the ends of its finished cycles, or else its best epoch."""
    if progress.best_step is None:
        raise UserError(f"{stopped}; no epoch was finished, so there are no weights to keep")
    last: int = progress.history[-1]["step"]
    members: dict[int, dict[str, Tensor]] = {}
    for end in _cycles(progress, training) if training.select == "cycles" else ():
        if stopped and rollback and end == last:  # the problem that stopped the run is in this epoch
            continue
        try:
            members[end] = _weights(folder, end)
        except UserError as error:
            console.print(f"{error}; the ensemble goes without it", style="yellow", highlight=False)
    if members:
        state = {f"members.{i}.{key}": item for i, one in enumerate(members.values()) for key, item in one.items()}
        return Trained(state, _epoch(progress, max(members)), tuple(progress.history), stopped, members=len(members))
    step = last if training.select == "last" and not (stopped and rollback) else progress.best_step
    try:
        state = _weights(folder, step)
    except UserError as error:
        step = last
        console.print(f"{error}; keeping the last epoch instead", style="yellow", highlight=False)
        state = _weights(folder, step)
    return Trained(state, _epoch(progress, step), tuple(progress.history), stopped)


def _weights(folder: Path, step: int) -> dict[str, Tensor]:
    place = checkpoint_path(folder, step)
    state = checkpoint_state(load_checkpoint(place), place)
    weights: dict[str, Tensor] = state["average"]["values"] if state["average"] else state["model"]
    return weights


def _epoch(progress: Progress, step: int) -> int:
    epoch: int = next(metrics["epoch"] for metrics in progress.history if metrics["step"] == step)
    return epoch
