"""Augmentation of a batch. What happens to a sample depends on (key, sample index), not on its batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from steelman.errors import UserError
from steelman.rng import Key
from steelman.settings import settings


@runtime_checkable
class Augmentation(Protocol):
    """Images, their sample indices and a key in; images of the same shape out."""

    def __call__(self, x: Tensor, index: Tensor, key: Key) -> Tensor: ...


@settings
class NoAugment:
    """The images as they are."""

    def __call__(self, x: Tensor, index: Tensor, key: Key) -> Tensor:  # noqa: ARG002
        return x


@settings
class CropFlip:
    """Pad by a few pixels, crop back to size at a random place, and mirror half of the images.

    >>> x = torch.rand(2, 3, 32, 32)
    >>> CropFlip(pad=4)(x, torch.tensor([0, 1]), Key(0).fold("augment")).shape
    torch.Size([2, 3, 32, 32])
    """

    pad: Annotated[int, Field(ge=0)] = 4
    flip: bool = True
    fill: Literal["zero", "reflect"] = "zero"

    def __call__(self, x: Tensor, index: Tensor, key: Key) -> Tensor:
        n, channels, height, width = x.shape
        if self.fill == "reflect" and self.pad >= min(height, width):
            raise UserError(f"reflecting {self.pad} pixels needs larger images, got {height} x {width}")
        if n == 0:
            return x
        noise = key.uniform(index.to(x.device), (3,))
        # Rounding may make the product 2 pad + 1. That is one more than the last place.
        corner = (noise[:, :2] * (2 * self.pad + 1)).long().clamp(max=2 * self.pad)
        across = torch.arange(width, device=x.device).expand(n, width)
        if self.flip:
            across = torch.where(noise[:, 2:] < 0.5, across.flip(1), across)
        rows = corner[:, :1] + torch.arange(height, device=x.device)
        columns = corner[:, 1:] + across
        padded = F.pad(x, (self.pad,) * 4, mode="constant" if self.fill == "zero" else "reflect")
        sample = torch.arange(n, device=x.device)[:, None, None, None]
        channel = torch.arange(channels, device=x.device)[None, :, None, None]
        return padded[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


_crop: Any = partial(CropFlip, flip=False)
_crop.summary = "Pad by a few pixels, and crop back to size at a random place."

AUGMENTATIONS: dict[str, Callable[..., Augmentation]] = {
    "none": NoAugment,
    "crop": _crop,
    "crop-flip": CropFlip,
}
