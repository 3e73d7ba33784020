"""What an attack is, and a context in which an attack leaves the model and the global generators unchanged."""

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
    """Settings that turn images into adversarial images inside a threat model.

    Arguments:
        index: the place of each sample in its dataset. With `key`, it decides the sample's noise. By default samples
            are counted from 0.
        target: a class for each sample. The attack then looks for this class, and not for any wrong class.
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
    """Inside, the model is in `mode` with frozen weights. Afterwards the model and the global generators are as before.

    In "train" mode, batch norm uses the batch's statistics without recording them, and dropout is on.
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
            # A forward pass may write to buffers, such as batch-norm statistics or counters. Here it writes to copies.
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
    """Seed torch's global generators on the CPU and the model's devices. The caller must restore them afterwards."""
    torch.default_generator.manual_seed(seed)
    for device in {parameter.get_device() for parameter in model.parameters() if parameter.is_cuda}:
        torch.cuda.default_generators[device].manual_seed(seed)


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """The model's logits. Half precision is converted to float32."""
    logits: Tensor = model(x)
    if not isinstance(logits, Tensor):
        raise UserError(
            f"the model answers with {type(logits).__name__}, and logits are expected: steelman.wrap(model) takes them "
            "out of such an answer"
        )
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def input_gradient(losses: Tensor, x_adv: Tensor, *, retain: bool = False) -> Tensor:
    """The gradient of each sample's loss with respect to its image.

    A NaN entry counts as zero. An infinite entry counts as the largest finite one of the sample. So a model with a few
    broken derivatives is still attacked through the other entries.
    """
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
