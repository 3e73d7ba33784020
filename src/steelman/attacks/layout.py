"""The memory layout of a search: channels_last, if the model gives the same answers with it. It is often quicker."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from steelman.attacks.base import Mode, logits_of
from steelman.rng import Key
from steelman.threat import ThreatModel


@contextlib.contextmanager
def laid_out(
    model: nn.Module, x: Tensor, threat: ThreatModel, mode: Mode, *, backward: bool
) -> Iterator[torch.memory_format]:
    """Inside, the model's convolutions have the yielded layout. Afterwards they have their own again.

    The images should have that layout too. `backward` says that the search needs gradients. The trial of the layout
    then compares gradients too.
    """
    kernels = [parameter for parameter in model.parameters() if parameter.dim() == 4]
    if x.dim() != 4 or not kernels or mode == "train":
        yield torch.contiguous_format
        return
    kept = [kernel.data for kernel in kernels]
    # The trial has two images, because a batch of one hides a layout. They are noise, because a grey image is the same
    # in any order of its pixels. The samples' own images would cost these samples a query.
    noise = Key(0).fold("layout").uniform(torch.arange(2, device=x.device), tuple(x.shape[1:]), x.dtype)
    tried = threat.low + (threat.high - threat.low) * noise

    def agrees() -> bool:
        try:
            expected = _answer(model, tried.clone(), backward)
            for kernel in kernels:
                kernel.data = _channels_last(kernel.data)
            got = _answer(model, tried.contiguous(memory_format=torch.channels_last), backward)
            return got.shape == expected.shape and torch.allclose(got, expected, rtol=1e-3, atol=1e-4)
        except Exception:  # a model may raise any error here; its layout then stays
            return False

    def restore() -> None:
        for kernel, data in zip(kernels, kept, strict=True):
            kernel.data = data

    try:
        if agrees():
            yield torch.channels_last
        else:
            restore()
            yield torch.contiguous_format
    finally:
        restore()


def _answer(model: nn.Module, images: Tensor, backward: bool) -> Tensor:
    """The logits and, with `backward`, the gradients of their sum, as one vector."""
    images.requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        logits = logits_of(model, images)
    if not backward:
        return logits.detach().flatten()
    (slopes,) = torch.autograd.grad(logits.sum(), images)
    return torch.cat((logits.detach().flatten(), slopes.flatten()))


def _channels_last(kernel: Tensor) -> Tensor:
    """A copy of the kernel in channels_last.

    Its strides are set explicitly, because torch may choose other strides if there is one channel.
    """
    _, channels, height, width = kernel.shape
    strides = (height * width * channels, 1, width * channels, channels)
    return torch.empty_strided(kernel.shape, strides, dtype=kernel.dtype, device=kernel.device).copy_(kernel)
