"""Noise: gaussian, shot, impulse and speckle noise, on each value of each channel."""

from __future__ import annotations

from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from steelman.corruptions.base import Constants, RandomCorruption, drawn, normal
from steelman.rng import Key
from steelman.settings import Number, settings

Spread = Annotated[Number, Field(ge=0)] | None


def _rows(*values: float) -> tuple[Constants, ...]:
    return tuple((value,) for value in values)


@settings
class GaussianNoise(RandomCorruption):
    """x + N(0, scale^2)."""

    NAMES: ClassVar = ("scale",)
    CIFAR: ClassVar = _rows(0.04, 0.06, 0.08, 0.09, 0.10)
    IMAGENET: ClassVar = _rows(0.08, 0.12, 0.18, 0.26, 0.38)

    scale: Spread = None

    def draw(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        return x + constants[0] * normal(key, index, tuple(x.shape[1:])).to(x.dtype)


@settings
class ShotNoise(RandomCorruption):
    """Poisson(photons x) / photons: the noise of a sensor that counts photons."""

    NAMES: ClassVar = ("photons",)
    CIFAR: ClassVar = _rows(500, 250, 100, 75, 50)
    IMAGENET: ClassVar = _rows(60, 25, 12, 5, 3)

    photons: Annotated[Number, Field(gt=0, le=1e9)] | None = None

    def draw(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        (photons,) = constants
        rates = x.cpu().double().numpy() * photons
        return drawn(key, index, lambda one, row: one.poisson(rates[row])).to(x.dtype) / photons


@settings
class ImpulseNoise(RandomCorruption):
    """Salt and pepper: a share of all values becomes 0 or 1, half of them each."""

    NAMES: ClassVar = ("share",)
    CIFAR: ClassVar = _rows(0.01, 0.02, 0.03, 0.05, 0.07)
    IMAGENET: ClassVar = _rows(0.03, 0.06, 0.09, 0.17, 0.27)

    share: Annotated[Number, Field(ge=0, le=1)] | None = None

    def draw(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        (share,) = constants
        # 16 bits decide: the share is right to 1 in 65,536, and drawing them takes a quarter of the time.
        bits = drawn(key, index, lambda one, _: one.integers(-(1 << 15), 1 << 15, x.shape[1:], dtype=np.int16))
        most, half = round(share * (1 << 16)) - (1 << 15), round(share * (1 << 15)) - (1 << 15)
        return torch.where(bits < most, (bits < half).to(x.dtype), x)


@settings
class SpeckleNoise(RandomCorruption):
    """x + x N(0, scale^2). It is no part of the 15 of the benchmark."""

    NAMES: ClassVar = ("scale",)
    CIFAR: ClassVar = _rows(0.06, 0.1, 0.12, 0.16, 0.2)
    IMAGENET: ClassVar = _rows(0.15, 0.2, 0.35, 0.45, 0.6)

    scale: Spread = None

    def draw(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        return x + x * constants[0] * normal(key, index, tuple(x.shape[1:])).to(x.dtype)
