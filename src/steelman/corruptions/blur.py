"""Blur: defocus, glass, motion, zoom and gaussian blur."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from steelman.corruptions import filters
from steelman.corruptions.base import Constants, PlainCorruption, RandomCorruption, drawn, truncated
from steelman.rng import Key
from steelman.settings import Number, settings

Radius = Annotated[Number, Field(gt=0, le=1000)] | None
Sigma = Annotated[Number, Field(gt=0, le=1000)] | None
Whole = Annotated[int, Field(ge=1, le=100)] | None


@settings
class DefocusBlur(PlainCorruption):
    """The mean over a disk of `radius` pixels, whose edge is softened by a gaussian of `sigma`."""

    NAMES: ClassVar = ("radius", "sigma")
    CIFAR: ClassVar = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1))
    IMAGENET: ClassVar = ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))

    radius: Annotated[Number, Field(gt=0, le=25)] | None = None
    sigma: Sigma = None

    def corrupt(self, x: Tensor, constants: Constants) -> Tensor:
        return filters.correlate(x, filters.disk(*constants))


@settings
class GlassBlur(RandomCorruption):
    """Gaussian blur, 8 bits, pixels that take the value of a neighbour, and the blur again.

    In each of the `rounds`, the pixels go one after another from the lower right to the upper left. Each takes the
    present value of a pixel at most `moves` away. So a value can travel further than that.
    """

    NAMES: ClassVar = ("sigma", "moves", "rounds")
    CIFAR: ClassVar = ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2))
    IMAGENET: ClassVar = ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))

    sigma: Sigma = None
    moves: Annotated[int, Field(ge=1, le=10)] | None = None
    rounds: Annotated[int, Field(ge=1, le=20)] | None = None

    def draw(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        sigma, moves, rounds = constants[0], int(constants[1]), int(constants[2])
        x = truncated(filters.gaussian_blur(x, sigma))
        for one in range(rounds):
            x = moved(x, moves, index, key.fold(one))
        return filters.gaussian_blur(x, sigma)


def moved(x: Tensor, moves: int, index: Tensor, key: Key) -> Tensor:
    """Each pixel but those at the border takes the present value of a pixel up to `moves` away.

    A pixel that was visited before has its partner's value already, which may be its partner's partner's, and so on.
    All these chains are followed at once, in steps of 1, 2, 4 and so on.
    """
    height, width = x.shape[2:]
    # The draw of each pixel: -moves .. moves - 1 in both directions.
    ways = drawn(key, index, lambda one, _: one.integers(-moves, moves, (2, height, width)))
    rows = torch.arange(height, device=x.device)[:, None].expand(height, width)
    columns = torch.arange(width, device=x.device).expand(height, width)
    visited = ((rows > moves) & (rows <= height - moves) & (columns > moves) & (columns <= width - moves)).flatten()
    partner = ((rows + ways[:, 0]) * width + columns + ways[:, 1]).flatten(1)
    here = torch.arange(height * width, device=x.device).expand(len(x), -1)
    target = torch.where(visited, partner.clamp(0, height * width - 1), here)
    # Pixels that come later in the rows were visited earlier. Only their values have changed.
    goes_on = visited[target] & (target > here)
    while bool(goes_on.any()):
        further = target.gather(1, target)
        target, goes_on = torch.where(goes_on, further, target), goes_on & goes_on.gather(1, target)
    return x.flatten(2).gather(2, target[:, None].expand(-1, x.shape[1], -1)).view_as(x)


@settings
class MotionBlur(RandomCorruption):
    """A one-sided gaussian along a line at an angle between -45 and 45 degrees."""

    NAMES: ClassVar = ("radius", "sigma")
    CIFAR: ClassVar = ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5))
    IMAGENET: ClassVar = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))

    radius: Radius = None
    sigma: Sigma = None

    def draw(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        degrees = 90 * key.uniform(index, (1,), torch.float64)[:, 0] - 45
        found = filters.motion_blur(x, constants[0], constants[1], degrees.tolist())
        # The released code blurs 8-bit images with ImageMagick, which rounds.
        return (found * 255).round() / 255 if self.exact else found


@settings
class ZoomBlur(PlainCorruption):
    """The mean of the image and of its enlargements, by factors from 1 to `end` in steps of `step`.

    The released code means to end at 1.05 for the first severity of CIFAR, and its range ends one step later, for a
    rounding. The same is true of 1.10 for the second severity of CIFAR and the first of ImageNet. The published images
    have these factors, and so has this class.
    """

    NAMES: ClassVar = ("end", "step")
    CIFAR: ClassVar = ((1.06, 0.01), (1.11, 0.01), (1.15, 0.01), (1.20, 0.01), (1.25, 0.01))
    IMAGENET: ClassVar = ((1.11, 0.01), (1.15, 0.01), (1.20, 0.02), (1.24, 0.02), (1.30, 0.03))

    end: Annotated[Number, Field(ge=1, le=10)] | None = None
    step: Annotated[Number, Field(ge=0.001, le=10)] | None = None

    def corrupt(self, x: Tensor, constants: Constants) -> Tensor:
        end, step = constants
        # As numpy.arange rounds them: a factor that is off by a rounding can move a crop by a pixel.
        factors = 1 + ((1 + step) - 1) * np.arange(round((end - 1) / step) + 1)
        total = x + sum(filters.clipped_zoom(x, float(factor)) for factor in factors)
        return total / (len(factors) + 1)


@settings
class GaussianBlur(PlainCorruption):
    """A gaussian blur. It is no part of the 15 of the benchmark."""

    NAMES: ClassVar = ("sigma",)
    CIFAR: ClassVar = ((0.4,), (0.6,), (0.7,), (0.8,), (1.0,))
    IMAGENET: ClassVar = ((1.0,), (2.0,), (3.0,), (4.0,), (6.0,))

    sigma: Sigma = None

    def corrupt(self, x: Tensor, constants: Constants) -> Tensor:
        return filters.gaussian_blur(x, constants[0])
