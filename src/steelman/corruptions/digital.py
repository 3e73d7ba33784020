"""Digital changes: contrast, elastic transform, pixelate, JPEG compression and saturation."""

from __future__ import annotations

import io
from typing import Annotated, ClassVar

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor

from steelman.corruptions import filters
from steelman.corruptions.base import Constants, PlainCorruption, RandomCorruption, by_pillow, in_colour, uniform
from steelman.rng import Key
from steelman.settings import Number, settings

Least = Annotated[Number, Field(ge=0)] | None


@settings
class Contrast(PlainCorruption):
    """(x - mean) factor + mean, with the mean over the pixels of each channel."""

    NAMES: ClassVar = ("factor",)
    CIFAR: ClassVar = ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,))
    IMAGENET: ClassVar = ((0.4,), (0.3,), (0.2,), (0.1,), (0.05,))

    factor: Least = None

    def corrupt(self, x: Tensor, constants: Constants) -> Tensor:
        mean = x.double().mean(dim=(2, 3), keepdim=True).to(x.dtype)
        return (x - mean) * constants[0] + mean


@settings
class ElasticTransform(RandomCorruption):
    """A random affine map, and then a smooth random displacement of each pixel.

    Three corners of the middle square move by up to `affine`. The displacement is uniform noise, blurred by `sigma`,
    times `amplitude`. All three are shares of the image's shorter side.
    """

    NAMES: ClassVar = ("amplitude", "sigma", "affine")
    CIFAR: ClassVar = ((0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03))
    # The released code multiplies by 244 for images of 224 pixels.
    IMAGENET: ClassVar = tuple(
        tuple(value * 244 / 224 for value in row)
        for row in ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))
    )

    amplitude: Least = None
    sigma: Annotated[Number, Field(ge=0, le=10)] | None = None
    affine: Annotated[Number, Field(ge=0, le=0.3)] | None = None

    def draw(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        height, width = x.shape[2:]
        amplitude, sigma, affine = (value * min(height, width) for value in constants)
        moves = (2 * key.fold("affine").uniform(index, (3, 2), torch.float64) - 1) * affine
        down, across = affine_places(height, width, moves)
        x = filters.sample(x, down, across, edge_twice=False)
        if not amplitude:
            return x
        noise = 2 * uniform(key.fold("field"), index, (2, height, width)).to(x.dtype) - 1
        lines = [filters.blur_matrix(side, sigma, 3.0, "mirror") for side in (height, width)]
        field = amplitude * filters.separable(noise, *lines)
        rows = torch.arange(height, device=x.device, dtype=x.dtype)[:, None]
        columns = torch.arange(width, device=x.device, dtype=x.dtype)
        return filters.sample(x, rows + field[:, 0], columns + field[:, 1], edge_twice=True)


def affine_places(height: int, width: int, moves: Tensor) -> tuple[Tensor, Tensor]:
    """The place in the image that each pixel takes its value from, if three corners move by `moves` (N, 3, 2).

    As in the released code, the corners are (column, row) pairs whose middle is (height // 2, width // 2).
    """
    half = min(height, width) // 3
    middle = torch.tensor([height // 2, width // 2], dtype=torch.float64, device=moves.device)
    ways = torch.tensor([[1, 1], [1, -1], [-1, -1]], dtype=torch.float64, device=moves.device)
    before = middle + half * ways
    after = before + moves
    # The map takes a pixel of the result back to the image: [column, row, 1] of the result times `back`.
    ones = torch.ones_like(after[..., :1])
    back = torch.linalg.solve(torch.cat((after, ones), dim=-1), before.expand_as(after))
    rows = torch.arange(height, device=moves.device, dtype=torch.float64)[:, None]
    columns = torch.arange(width, device=moves.device, dtype=torch.float64)
    across, down = (
        columns * back[:, 0, part, None, None] + rows * back[:, 1, part, None, None] + back[:, 2, part, None, None]
        for part in (0, 1)
    )
    return down, across


@settings
class Pixelate(PlainCorruption):
    """Resize to `share` of the size and back, with a box filter, on 8-bit images."""

    NAMES: ClassVar = ("share",)
    CIFAR: ClassVar = ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,))
    IMAGENET: ClassVar = ((0.6,), (0.5,), (0.4,), (0.3,), (0.25,))

    share: Annotated[Number, Field(gt=0, le=1)] | None = None

    def corrupt(self, x: Tensor, constants: Constants) -> Tensor:
        height, width = x.shape[2:]
        small = max(int(width * constants[0]), 1), max(int(height * constants[0]), 1)
        box = Image.Resampling.BOX
        return by_pillow(x, lambda image: image.resize(small, box).resize((width, height), box))


@settings
class JPEGCompression(PlainCorruption):
    """JPEG compression of 8-bit images."""

    NAMES: ClassVar = ("quality",)
    CIFAR: ClassVar = ((80,), (65,), (58,), (50,), (40,))
    IMAGENET: ClassVar = ((25,), (18,), (15,), (10,), (7,))

    quality: Annotated[int, Field(ge=1, le=100)] | None = None

    def corrupt(self, x: Tensor, constants: Constants) -> Tensor:
        quality = int(constants[0])

        def change(image: Image.Image) -> Image.Image:
            content = io.BytesIO()
            image.save(content, "JPEG", quality=quality)
            return Image.open(content, formats=("JPEG",))

        return by_pillow(x, change)


@settings
class Saturate(PlainCorruption):
    """S factor + added, for the S of HSV. It is no part of the 15 of the benchmark."""

    NAMES: ClassVar = ("factor", "added")
    CIFAR: ClassVar = ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2))
    IMAGENET: ClassVar = ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2))

    factor: Least = None
    added: Annotated[Number, Field(ge=-1, le=1)] | None = None

    def corrupt(self, x: Tensor, constants: Constants) -> Tensor:
        return in_colour(x, lambda image: _saturated(image, *constants))


def _saturated(x: Tensor, factor: float, added: float) -> Tensor:
    """Colour images with S times `factor` plus `added`. Grey has hue 0, which is red."""
    value = x.amax(dim=1, keepdim=True)
    span = value - x.amin(dim=1, keepdim=True)
    before = torch.where(value > 0, span / torch.where(value > 0, value, 1), 0)
    after = (before * factor + added).clamp(0, 1)
    red = x.new_tensor([0.0, 1.0, 1.0]).view(1, 3, 1, 1)
    # How far each channel is below the largest one, as a share of the span. It follows from the hue alone.
    depth = torch.where(span > 0, (value - x) / torch.where(span > 0, span, 1), red)
    return value * (1 - after * depth)
