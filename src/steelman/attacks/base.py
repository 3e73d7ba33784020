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
    buffers = [(module, name, buffer) for module in modules for name, buffer in module.named_buffers(recurse=False)]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    devices = sorted({parameter.get_device() for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices=devices):
        try:
            for parameter in trainable:
                parameter.requires_grad_(False)
            for module in modules:
                module.training = mode == "train"
            # What a forward records (batch-norm statistics, power iterations, counters) goes into copies.
            for module, name, buffer in buffers:
                setattr(module, name, buffer.clone())
            yield
        finally:
            for module, name, buffer in buffers:
                setattr(module, name, buffer)
            for module, training in zip(modules, modes, strict=True):
                module.training = training
            for parameter in trainable:
                parameter.requires_grad_(True)


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """The model's logits, in full precision even where the model ran in half."""
    logits: Tensor = model(x)
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def input_gradient(losses: Tensor, x_adv: Tensor, *, retain: bool = False) -> Tensor:
    """Each sample's gradient of its loss. An undefined entry tells nothing and counts as zero; an infinite one stays
    large, so that a model with a few broken derivatives is still attacked through the others."""
    (gradient,) = torch.autograd.grad(losses.sum(), x_adv, retain_graph=retain)
    return torch.nan_to_num(gradient, nan=0.0, posinf=1e30, neginf=-1e30)
