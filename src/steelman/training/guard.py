"""Checks for problems in training, each with a sentence for the user; and a clean stop after a signal."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from steelman.training.settings import Guard


def collapse(history: Sequence[dict[str, Any]], guard: Guard) -> str | None:
    """A sentence if the last epoch shows catastrophic overfitting, else None."""
    if guard.on_collapse == "ignore" or len(history) < 2:
        return None
    last, before = history[-1], history[-2]
    best = max(history[:-1], key=lambda epoch: float(epoch["validation_robust"]))
    if last.get("eps", 0) < best.get("eps", 0):  # after a reset of the radius, both changes are normal
        return None
    fell = best["validation_robust"] - last["validation_robust"]
    if fell > guard.drop and last["train_accuracy"] >= before["train_accuracy"] - 0.05:
        return (
            f"catastrophic overfitting in epoch {last['epoch']}: validation robustness fell from "
            f"{best['validation_robust']:.1%} (epoch {best['epoch']}) to {last['validation_robust']:.1%}, while "
            f"accuracy against the training attack went from {before['train_accuracy']:.1%} "
            f"to {last['train_accuracy']:.1%}"
        )
    return None


def stagnation(history: Sequence[dict[str, Any]], patience: int | None) -> str | None:
    """A sentence if the last `patience` epochs brought no better validation robustness, else None."""
    if patience is None or len(history) <= patience:
        return None
    robust = [float(epoch["validation_robust"]) for epoch in history]
    if max(robust[-patience:]) > max(robust[:-patience]):
        return None
    return f"no better validation robustness for {patience} epochs (best {max(robust):.1%})"


def blind(history: Sequence[dict[str, Any]]) -> str | None:
    """A sentence if the model is robust to its training attack, but not to the validation attack; else None."""
    if not history:
        return None
    last = history[-1]
    if last["train_accuracy"] - last["validation_robust"] < 0.5:
        return None
    return (
        f"the model is robust to its training attack ({last['train_accuracy']:.1%}), but not to the validation attack "
        f"({last['validation_robust']:.1%}): take a training attack with more or smaller steps, or with another start"
    )


def poisoned(model: nn.Module, epoch: int) -> str | None:
    """A sentence if weights are NaN or infinite, else None. The last loss of an epoch can be finite all the same."""
    broken = [name for name, value in model.state_dict().items() if not torch.isfinite(value).all()]
    if not broken:
        return None
    return f"weights became NaN or infinite at the end of epoch {epoch} ({broken[0]}); try a smaller learning rate"


class StopRequest:
    """The number of the signal that asked for a stop, or 0."""

    number: int = 0


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Inside, the first Ctrl-C or SIGTERM only sets the request. A second Ctrl-C stops at once."""
    request = StopRequest()

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature signals need
        if request.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.number = number

    old = {}
    with contextlib.suppress(ValueError):  # Python allows signal handlers in the main thread only
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, ask)
    try:
        yield request
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
