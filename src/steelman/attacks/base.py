"""What an attack is, and the bracket in which every attack runs: nothing of the model or the world is changed by it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from steelman.errors import UserError
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


def reseed(model: nn.Module, seed: int) -> None:
    """Begin torch's own noise anew where the model computes; for inside ``untouched``, which puts it back."""
    torch.default_generator.manual_seed(seed)
    for device in {parameter.get_device() for parameter in model.parameters() if parameter.is_cuda}:
        torch.cuda.default_generators[device].manual_seed(seed)


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """The model's logits, in full precision even where the model ran in half."""
    logits: Tensor = model(x)
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def input_gradient(losses: Tensor, x_adv: Tensor, *, retain: bool = False) -> Tensor:
    """Each sample's gradient of its loss. An undefined entry tells nothing and counts as zero; an infinite one counts
    as the largest finite one, so that a model with a few broken derivatives is still attacked through the others."""
    if not losses.requires_grad:
        raise UserError("the model gives no gradient with respect to its input; a black-box attack needs none")
    (gradient,) = torch.autograd.grad(losses.sum(), x_adv, retain_graph=retain)
    finite = gradient.isfinite()
    if finite.all():
        return gradient
    largest = torch.where(finite, gradient.abs(), 0).flatten(1).amax(dim=1)
    largest = torch.where(largest > 0, largest, 1).view(-1, *[1] * (gradient.dim() - 1))
    return torch.where(gradient.isinf(), gradient.sign() * largest, gradient.nan_to_num(nan=0.0))


def check_range(x: Tensor, threat: ThreatModel) -> None:
    """Refuse pixels that are not finite or lie outside the threat's range."""
    if not torch.isfinite(x).all():
        raise UserError(f"expected finite pixels, got {int((~torch.isfinite(x)).sum())} NaN or infinite ones")
    low, high = float(x.detach().min()), float(x.detach().max())
    if low < threat.low or high > threat.high:
        hint = ""
        if (threat.low, threat.high) == (0, 1) and low >= 0 and 2 < high <= 255:
            hint = f"; pixels go up to {high:g}: divide by 255"
        elif low < threat.low:
            hint = "; if they were normalised, leave that to the model, and give pixels as they are"
        raise UserError(f"expected pixels in [{threat.low:g}, {threat.high:g}], got {low:g} .. {high:g}{hint}")
