"""What all corruptions share: their settings, the two families of constants, and the noise of each sample."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field, model_validator
from torch import Tensor

from steelman.errors import UserError, shown
from steelman.rng import Key
from steelman.settings import SettingsError, at_most, settings

Severity = Annotated[int, at_most(5), Field(ge=1)]
Family = Literal["auto", "cifar", "imagenet"]
Constants = tuple[float, ...]

SMALLEST = 28  # pixels along a side: below it, the kernels of some corruptions are larger than the image
LARGE = 64  # pixels along the shorter side from which "auto" means the constants of ImageNet-C
BLOCK = 1 << 19  # values that are corrupted together: they stay in the processor's cache
SLACK = 1e-4  # of a grey level: a value that is a whole level must not lose it to a rounding
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
GREY = (0.299, 0.587, 0.114)  # the weights of red, green and blue in a grey image


@settings
class Corruption(ABC):
    """A corruption of images in [0, 1], of one or three channels.

    Arguments:
        severity: 1 to 5. Each severity has its constants, in `CIFAR` and in `IMAGENET`.
        family: whose constants. "auto" means "cifar" for images below 64 pixels, and "imagenet" from 64 pixels on. The
            constants of the two families differ by a factor of two and more.
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
        """The corrupted images, without a gradient. `index` has a number for each image, by default 0, 1, 2 ..."""
        check_images(x)
        index = torch.arange(len(x)) if index is None else index
        if not isinstance(key, Key):
            raise UserError(f"key: expected a steelman.Key, such as Key(0), got {shown(key)}")
        whole = isinstance(index, Tensor) and index.dtype in WHOLE
        if not whole or index.shape != (len(x),):
            raise UserError(f"index: expected a whole number for each of {len(x)} images, got {_shape(index)}")
        if not len(x):
            return x.clone()
        constants = self.constants(*x.shape[2:])
        key = key.fold("corruption", type(self).__name__, self.severity)
        # Corrupted images have no gradient. Without this, threads would write into one graph.
        with torch.inference_mode(False):
            x = x.clone() if x.is_inference() else x.detach()
            found, index, rows = torch.empty_like(x), index.to(x.device), max(BLOCK // x[0].numel(), 1)
        kind = torch.promote_types(x.dtype, torch.float32)

        def corrupt(start: int) -> None:
            at = slice(start, start + rows)
            part = x[at].to(kind)
            _check_range(part)  # here, where the values are in the cache anyway
            made = self._apply(part, constants, index[at], key)
            made = made.clone() if made.data_ptr() == part.data_ptr() else made  # it is changed in place below
            found[at] = _cut(made.clamp_(0, 1)) if self.exact else made.clamp_(0, 1)

        with torch.inference_mode(False):
            on_threads(corrupt, range(0, len(x), rows), x.device)
        return found

    @abstractmethod
    def _apply(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        """The corrupted images. They may leave [0, 1]; the caller clips them."""


@settings
class PlainCorruption(Corruption):
    """A corruption without noise."""

    @abstractmethod
    def corrupt(self, x: Tensor, constants: Constants) -> Tensor:
        """The corrupted images. They may leave [0, 1]; the caller clips them."""

    def _apply(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:  # noqa: ARG002 - it draws none
        return self.corrupt(x, constants)


@settings
class RandomCorruption(Corruption):
    """A corruption that draws noise for each image."""

    @abstractmethod
    def draw(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        """The corrupted images, with the noise of each `index`. They may leave [0, 1]; the caller clips them."""

    def _apply(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        return self.draw(x, constants, index, key)


def on_threads(work: Callable[[int], None], starts: Iterable[int], device: torch.device) -> None:
    """Do the work for each start. On a CPU, each of torch's threads does its own blocks.

    An operation on several threads would add up in another order than on one, and be slow beside another program.
    """
    if device.type != "cpu":
        for start in starts:
            work(start)
        return
    threads = torch.get_num_threads()
    try:
        # With OpenMP, the number of threads counts for the calling thread alone.
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(work, starts):
                pass
    finally:
        torch.set_num_threads(threads)


def check_images(x: object) -> None:
    """Refuse what is not a batch of images that can be corrupted."""
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
        raise UserError(f"images: expected floating-point numbers of shape (N, C, H, W), got {_shape(x)}")
    check_shape(tuple(x.shape[1:]), "images")


def _check_range(x: Tensor) -> None:
    low, high = map(float, torch.aminmax(x))
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
    return _cut(x.clone())


def _cut(x: Tensor) -> Tensor:
    """The same in place."""
    return x.mul_(255).add_(SLACK).floor_().div_(255)


def grey(x: Tensor) -> Tensor:
    """The grey images of colour images; grey ones are returned as they are."""
    if x.shape[1] == 1:
        return x
    red, green, blue = x.unbind(1)
    return (GREY[0] * red + GREY[1] * green + GREY[2] * blue)[:, None]


def in_colour(x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Change images that need three channels. A grey image becomes a colour one, and is made grey again."""
    return change(x) if x.shape[1] == 3 else grey(change(x.expand(-1, 3, -1, -1)))


def drawn(key: Key, index: Tensor, draw: Callable[[np.random.Generator, int], Any]) -> Tensor:
    """What `draw` gives for each sample: it gets a generator of the sample's own, and the sample's row.

    The generators are NumPy's. They are five times faster than the noise of `Key`, which gives them their seeds.
    """
    seeds = key.bits(index.cpu(), 1)[:, 0].tolist()
    made = [draw(np.random.Generator(np.random.SFC64(seed % (1 << 64))), row) for row, seed in enumerate(seeds)]
    return torch.from_numpy(np.stack(made)).to(index.device)


def normal(key: Key, index: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normal noise for each sample, by the Box-Muller transform. It is twice as fast as NumPy's own."""
    count = math.prod(shape)
    first, second = uniform(key, index, (2, (count + 1) // 2)).unbind(1)
    radius = first.neg_().log1p_().mul_(-2).sqrt_()
    angle = second.mul_(2 * math.pi)
    both = torch.cat((radius * angle.cos(), radius.mul_(angle.sin_())), dim=1)
    return both[:, :count].reshape(len(index), *shape)


def uniform(key: Key, index: Tensor, shape: tuple[int, ...], kind: Any = np.float32) -> Tensor:
    """Uniform noise in [0, 1) for each sample."""
    return drawn(key, index, lambda one, _: one.random(shape, dtype=kind))


def by_pillow(x: Tensor, change: Callable[[Image.Image], Image.Image]) -> Tensor:
    """Change images that Pillow reads: 8-bit images, each by itself."""
    values = (x * 255).round().to(torch.uint8).cpu().numpy()

    def one(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        planes = [Image.fromarray(plane) for plane in value]
        found = change(planes[0] if len(planes) == 1 else Image.merge("RGB", planes))
        return np.stack([np.asarray(plane) for plane in found.split()])

    return torch.from_numpy(np.stack([one(value) for value in values])).to(x.device, x.dtype) / 255
