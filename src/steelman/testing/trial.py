"""An objective with networks, batches and criteria to try it on. An error in a call is a broken promise."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from steelman.heads import embed
from steelman.objectives import Objective
from steelman.objectives.criterion import Criterion
from steelman.testing.promises import Subject, global_noise, noise
from steelman.threat import ThreatModel

SAMPLES = 6
STEPS, STOPPED = 6, 4  # batches of a whole training, and of one that is interrupted


@dataclasses.dataclass
class Trial:
    """One objective, and the model, images and helper to try it on."""

    subject: Subject
    objective: Objective
    model: Callable[[], nn.Module] | None
    shape: tuple[int, int, int]
    classes: int
    helper: nn.Module | None

    def net(self, head: str = "he", classes: int | None = None) -> nn.Module:
        """A new network in train mode, always with the same weights.

        It has no dropout, so that only the objective draws random numbers.
        """
        with global_noise(3):
            net = small(self.shape, classes or self.classes) if self.model is None else self.model()
            return embed(net, head).train()

    def batch(self, classes: int | None = None, name: str = "x") -> tuple[Tensor, Tensor]:
        x = noise(name, SAMPLES, *self.shape).float()
        return x, torch.arange(SAMPLES) % (classes or self.classes)

    def criterion(self, net: nn.Module, **changes: Any) -> Criterion:
        """A criterion of a copy of the objective. Without the copy, one check could change the next one's objective."""
        given: dict[str, Any] = {"threat": ThreatModel(eps=0.1), "steps": STEPS, "seed": 5, **changes}
        helper = Waves(self.classes) if self.helper is None else self.helper
        with self.subject.runs("to be made a Criterion of"):
            return Criterion(copy.deepcopy(self.objective), net, helper=helper, **given)

    def loss(self, what: str, criterion: Criterion, x: Tensor, y: Tensor, **rest: Any) -> Tensor:
        with self.subject.runs(what):
            loss = criterion(x, y, index=7 + 3 * torch.arange(len(x)), **rest)
        self.subject.keeps("scalar", loss.shape == (), f"gives a loss of shape {tuple(loss.shape)}, not one number")
        value = float(loss.detach())
        self.subject.keeps("finite", bool(loss.isfinite()), f"gives a loss of {value} {what}, expected a finite one")
        return loss

    def backward(self, what: str, criterion: Criterion, x: Tensor, y: Tensor, **rest: Any) -> None:
        """Compute the loss and the gradients, and check both."""
        loss = self.loss(what, criterion, x, y, **rest)
        with self.subject.runs(f"in the backward pass {what}"):
            torch.autograd.backward(loss)
        for name, weight in criterion.net.named_parameters():
            gradient = weight.grad
            self.subject.keeps("gradient", gradient is not None, f"gives no gradient for {name} {what}")
            finite = gradient is not None and bool(gradient.isfinite().all())
            self.subject.keeps("gradient", finite, f"gives a gradient for {name} {what} that is NaN or infinite")


class Waves(nn.Module):
    """A helper model for images of any shape and precision."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([torch.sin(x * (k + 1)).flatten(1).sum(dim=1) for k in range(self.classes)], dim=1)


def small(shape: tuple[int, int, int], classes: int) -> nn.Sequential:
    """Two layers with batch norm between them. Some objectives differentiate twice, so the activation is smooth."""
    pixels = shape[0] * shape[1] * shape[2]
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 12), nn.BatchNorm1d(12), nn.SiLU(), nn.Linear(12, classes))


def sgd(net: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


def moves(net: nn.Module) -> dict[str, int]:
    """How often each batch norm has recorded a batch."""
    ends = ".num_batches_tracked"
    return {name.removesuffix(ends): int(value) for name, value in net.state_dict().items() if name.endswith(ends)}
