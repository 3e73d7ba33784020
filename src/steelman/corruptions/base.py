"""What all corruptions share: their settings, the two families of constants, and the noise of each sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field, model_validator
from torch import Tensor

from steelman.errors import UserError, shown
from steelman.rng import Key
from steelman.settings import SettingsError, settings

Severity = Annotated[int, Field(ge=1, le=5)]
Family = Literal["auto", "cifar", "imagenet"]
Constants = tuple[float, ...]

SMALLEST = 28  # pixels along a side: below it, the kernels of some corruptions are larger than the image
LARGE = 64  # pixels along the shorter side from which "auto" means the constants of ImageNet-C
BLOCK = 1 << 18  # values that are corrupted together: they stay in the processor's cache
SLACK = 1e-3  # of a grey level: a value that is a whole level must not lose it to a rounding
THREADS = 4  # for the images that go through Pillow
GREY = (0.299, 0.587, 0.114)  # the weights of red, green and blue in a grey image


@settings
class Corruption:
    """A corruption of images in [0, 1], of one or three channels.

    Arguments:
        severity: 1 to 5. Each severity has its constants, in `CIFAR` and in `IMAGENET`.
        family: whose constants. "auto" means "cifar" for images below 64 pixels, and "imagenet" from 64 pixels on. The
            constants of the two families differ by a factor of two to four.
        exact: cut the result to whole grey levels of 8 bits, as the images of the published sets are.

    Each corruption has further settings, which are constants. They replace those of the severity, all together.

    The noise of a sample depends on `key`, its `index`, the corruption and the severity alone. So the batch, the order
    and the device change nothing.
    """

    # A row for each severity. The columns are the settings in NAMES.
    CIFAR: ClassVar[tuple[Constants, ...]]
    IMAGENET: ClassVar[tuple[Constants, ...]]
    NAMES: ClassVar[tuple[str, ...]]

    severity: Severity = 3
    family: Family = "auto"
    exact: bool = False

    @model_validator(mode="after")
    def _all_or_none(self) -> Corruption:
        given = [name for name in self.NAMES if getattr(self, name) is not None]
        if given and (missing := [name for name in self.NAMES if name not in given]):
            raise SettingsError(
                [((name,), f"is required, because {given[0]} is given; expected all or none") for name in missing]
            )
        return self

    def family_for(self, height: int, width: int) -> str:
        """The family whose constants an image of this size gets."""
        return self.family if self.family != "auto" else "imagenet" if min(height, width) >= LARGE else "cifar"

    def constants(self, height: int, width: int) -> Constants:
        """The constants for an image of this size, in the order of `NAMES`."""
        given = tuple(getattr(self, name) for name in self.NAMES)
        if given and given[0] is not None:
            return tuple(float(value) for value in given)
        return (self.CIFAR if self.family_for(height, width) == "cifar" else self.IMAGENET)[self.severity - 1]

    def __call__(self, x: Tensor, *, index: Tensor | None = None, key: Key = Key(0)) -> Tensor:  # noqa: B008 - a Key is frozen
        """The corrupted images. `index` has a number for each image, and defaults to 0, 1, 2 and so on."""
        check_images(x)
        index = torch.arange(len(x)) if index is None else index
        if index.shape != (len(x),) or index.is_floating_point():
            raise UserError(f"index: expected a whole number for each of {len(x)} images, got {_shape(index)}")
        if not len(x):
            return x.clone()
        computed = x.to(torch.promote_types(x.dtype, torch.float32))
        constants = self.constants(*x.shape[2:])
        key = key.fold("corruption", type(self).__name__, self.severity)
        rows = max(BLOCK // x[0].numel(), 1)
        parts = [
            self._apply(part, constants, at, key).clamp(0, 1)
            for part, at in zip(torch.split(computed, rows), torch.split(index.to(x.device), rows), strict=True)
        ]
        found = torch.cat(parts)
        return (truncated(found) if self.exact else found).to(x.dtype)

    def corrupt(self, x: Tensor, constants: Constants) -> Tensor:
        """The corrupted images. They may leave [0, 1]; the caller clips them."""
        raise NotImplementedError

    def _apply(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:  # noqa: ARG002 - see below
        return self.corrupt(x, constants)


@settings
class RandomCorruption(Corruption):
    """A corruption that draws noise for each image."""

    def draw(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        """The corrupted images, with the noise of each `index`. They may leave [0, 1]; the caller clips them."""
        raise NotImplementedError

    def _apply(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        return self.draw(x, constants, index, key)


def check_images(x: object) -> None:
    """Refuse what is not a batch of images that can be corrupted."""
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
        raise UserError(f"images: expected floating-point numbers of shape (N, C, H, W), got {_shape(x)}")
    check_shape(tuple(x.shape[1:]), "images")
    if len(x):
        low, high = float(x.min()), float(x.max())
        if not (low >= 0 and high <= 1):
            hint = "; divide 8-bit images by 255" if high > 2 else ""
            raise UserError(f"images: expected values in [0, 1], got {low:.4g} to {high:.4g}{hint}")


def check_shape(shape: Sequence[int], what: str) -> None:
    """Refuse images of this shape (C, H, W) if they cannot be corrupted."""
    if shape[0] not in (1, 3):
        raise UserError(f"{what}: expected images of 1 or 3 channels, got {shape[0]}")
    if min(shape[1:]) < SMALLEST:
        raise UserError(
            f"{what}: expected images of at least {SMALLEST} x {SMALLEST} pixels, got {shape[1]} x {shape[2]}"
        )


def _shape(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else shown(x)


def truncated(x: Tensor) -> Tensor:
    """Images of whole grey levels: each value goes down to the next level, as in the published sets.

    >>> truncated(torch.tensor([0.5, 1.0])) * 255
    tensor([127., 255.])
    """
    return (x * 255 + SLACK).floor().clamp(0, 255) / 255


def grey(x: Tensor) -> Tensor:
    """The grey images of colour images; grey ones are returned as they are."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    return (GREY[0] * red + GREY[1] * green + GREY[2] * blue)[:, None]


def in_colour(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change images that need three channels. A grey image becomes a colour one, and is made grey again."""
    return change(x) if x.shape[1] == 3 else grey(change(x.expand(-1, 3, -1, -1)))


def generators(key: Key, index: Tensor) -> list[np.random.Generator]:
    """A generator of NumPy for each sample, for the draws that `Key` has not."""
    seeds = key.bits(index.cpu(), 1)[:, 0].tolist()
    return [np.random.Generator(np.random.Philox(key=seed % (1 << 64))) for seed in seeds]


def by_pillow(x: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    """Change images that Pillow reads: 8-bit images, each by itself, some at once."""
    values = (x * 255).round().to(torch.uint8).movedim(1, -1).cpu().numpy()

    def one(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        found = np.asarray(change(Image.fromarray(value[..., 0] if value.shape[-1] == 1 else value)))
        return found.reshape(value.shape)

    if len(values) == 1:
        changed = [one(values[0])]
    else:
        with ThreadPoolExecutor(THREADS) as pool:  # Pillow lets other threads run while it works
            changed = list(pool.map(one, values))
    return torch.from_numpy(np.stack(changed)).to(x.device).movedim(-1, 1).to(x.dtype) / 255
