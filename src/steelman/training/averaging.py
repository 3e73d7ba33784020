"""Exponential moving average of weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Average:
    """avg <- d avg + (1 - d) w after every step, with d = min(decay, (1 + t) / (10 + t)).

    d is small at first, so the weights of the first steps soon lose their influence. Buffers, such as batch-norm
    statistics, are averaged too. Counters are copied.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay, self.steps = decay, 0
        self.values: dict[str, Tensor] = {k: v.detach().clone() for k, v in model.state_dict().items()}

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint."""
        return {"steps": self.steps, "values": self.values}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what ``state`` gave."""
        self.steps = state["steps"]
        self.values = {name: value.to(self.values[name].device) for name, value in state["values"].items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        self.steps += 1
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                self.values[name].lerp_(value.to(self.values[name].dtype), 1 - decay)
            else:
                self.values[name].copy_(value)
