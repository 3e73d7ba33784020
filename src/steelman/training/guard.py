"""What goes wrong in training, noticed and said in words; and stopping cleanly when asked."""

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
    """A sentence when the last epoch shows catastrophic overfitting, else None."""
    if guard.on_collapse == "ignore" or len(history) < 2:
        return None
    last, before = history[-1], history[-2]
    best = max(history[:-1], key=lambda epoch: float(epoch["validation_robust"]))
    if last.get("eps", 0) < best.get("eps", 0):  # a reset of the radius, after which both are expected
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
    """A sentence when the last `patience` epochs brought no better validation robustness than the ones before."""
    if patience is None or len(history) <= patience:
        return None
    robust = [float(epoch["validation_robust"]) for epoch in history]
    if max(robust[-patience:]) > max(robust[:-patience]):
        return None
    return f"no better validation robustness for {patience} epochs (best {max(robust):.1%})"


def blind(history: Sequence[dict[str, Any]]) -> str | None:
    """A sentence when the training attack says nothing about robustness: the model beats it, but not PGD."""
    if not history:
        return None
    last = history[-1]
    if last["train_accuracy"] - last["validation_robust"] < 0.5:
        return None
    return (
        f"the model withstands its training attack ({last['train_accuracy']:.1%}) but not the validation attack "
        f"({last['validation_robust']:.1%}): a training attack of more or smaller steps, or another start, is needed"
    )


def poisoned(model: nn.Module, epoch: int) -> str | None:
    """A sentence when weights are no longer finite: the last loss of the epoch was, its gradient was not."""
    broken = [name for name, value in model.state_dict().items() if not torch.isfinite(value).all()]
    if not broken:
        return None
    return f"weights became NaN or infinite at the end of epoch {epoch} ({broken[0]}); try a smaller learning rate"


class StopRequest:
    """The number of the signal that asked for a stop, once one came; 0 until then."""

    number: int = 0


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM into a request; a second Ctrl-C acts at once."""
    request = StopRequest()

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature signals need
        if request.number and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.number = number

    old = {}
    with contextlib.suppress(ValueError):  # signals can be set in the main thread only
        for number in (signal.SIGINT, signal.SIGTERM):
            old[number] = signal.signal(number, ask)
    try:
        yield request
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
