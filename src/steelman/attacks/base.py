"""What an attack is, and the bracket in which every attack runs: nothing of the model or the world is changed by it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from steelman.rng import Key
from steelman.threat import ThreatModel

Mode = Literal["eval", "train"]


@runtime_checkable
class Attack(Protocol):
    """Settings that turn samples into adversarial ones inside a threat model.

    Arguments: `index` is each sample's place in its dataset and, with `key`, decides its noise; without it samples
    count from 0. With `target` the attack looks for that class instead of any wrong one.
    """

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: ThreatModel,
        *,
        index: Tensor | None = None,
        key: Key = ...,
        target: Tensor | None = None,
    ) -> Tensor: ...


@contextlib.contextmanager
def untouched(model: nn.Module, mode: Mode = "eval") -> Iterator[None]:
    """Run an attack with frozen weights in the given mode; leave the model and the global RNG as they were.

    In "train" mode batch norm uses the batch's statistics without recording them, and dropout is on.
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
    tracked = [module for module in modules if getattr(module, "track_running_stats", False)]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    devices = sorted({parameter.get_device() for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            for parameter in trainable:
                parameter.requires_grad_(False)
            for module in modules:
                module.training = mode == "train"
            if mode == "train":
                for module in tracked:
                    module.track_running_stats = False  # type: ignore[assignment]
            yield
        finally:
            for module in tracked:
                module.track_running_stats = True  # type: ignore[assignment]
            for module, training in zip(modules, modes, strict=True):
                module.training = training
            for parameter in trainable:
                parameter.requires_grad_(True)


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """The model's logits, in full precision even where the model ran in half."""
    logits: Tensor = model(x)
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
