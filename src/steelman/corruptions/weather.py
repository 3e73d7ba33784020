"""Weather: snow, frost, fog and brightness, and spatter of water or mud."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from scipy import ndimage
from torch import Tensor

from steelman.corruptions import filters, frost
from steelman.corruptions.base import (
    Constants,
    PlainCorruption,
    RandomCorruption,
    grey,
    in_colour,
    normal,
    truncated,
    uniform,
)
from steelman.rng import Key
from steelman.settings import Number, settings

Share = Annotated[Number, Field(ge=0, le=1)] | None
Size = Annotated[Number, Field(gt=0, le=1000)] | None
Least = Annotated[Number, Field(ge=0)] | None

WATER, MUD = (175, 238, 238), (63, 42, 20)  # red, green and blue, of 255


@settings
class Snow(RandomCorruption):
    """Flakes of enlarged noise, blurred along their fall, on a whitened image.

    The flakes are normal noise with `mean` and `std`, enlarged by `zoom`; what is below `threshold` becomes 0. They are
    blurred with `radius` and `sigma` at an angle between -135 and -45 degrees. The image becomes
    mix x + (1 - mix) max(x, 1.5 grey + 0.5). The flakes are added, and added once more turned by 180 degrees.
    """

    NAMES: ClassVar = ("mean", "std", "zoom", "threshold", "radius", "sigma", "mix")
    CIFAR: ClassVar = (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )
    IMAGENET: ClassVar = (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    )

    mean: Number | None = None
    std: Least = None
    zoom: Annotated[Number, Field(ge=1, le=100)] | None = None
    threshold: Number | None = None
    radius: Size = None
    sigma: Size = None
    mix: Share = None

    def draw(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        mean, std, zoom, threshold, radius, sigma, mix = constants
        flakes = mean + std * normal(key, index, (1, *x.shape[2:])).to(x.dtype)
        flakes = filters.clipped_zoom(flakes, zoom)
        flakes = truncated(torch.where(flakes < threshold, 0, flakes).clamp(0, 1))
        degrees = 90 * key.fold("angle").uniform(index, (1,), torch.float64)[:, 0] - 135
        flakes = filters.motion_blur(flakes, radius, sigma, degrees.tolist())
        flakes = (flakes * 255).round() / 255
        whitened = mix * x + (1 - mix) * torch.maximum(x, 1.5 * grey(x) + 0.5)
        return whitened + flakes + flakes.flip(2, 3)


@settings
class Frost(RandomCorruption):
    """image x + frost picture: a random part of a photograph of frost, or of a generated texture.

    `pictures` is a folder with the pictures frost1.png to frost5.jpg, or "generated". By default, the pictures of the
    package imagecorruptions are used if it is installed, and the generated texture if not. ``source`` says which.
    """

    NAMES: ClassVar = ("image", "frost")
    CIFAR: ClassVar = ((1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))
    IMAGENET: ClassVar = ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))

    image: Least = None
    frost: Least = None
    pictures: str | None = None

    def source(self) -> str:
        """Where the frost comes from: "generated", or "pictures" with the start of their checksum."""
        return frost.source(self.pictures)

    def check(self) -> None:
        """Refuse pictures that are missing, damaged or tiny."""
        frost.check(self.pictures)

    def draw(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        size = (x.shape[2], x.shape[3])
        parts = frost.parts(self.pictures, size, self.family_for(*size), index, key).to(x.device, x.dtype)
        return constants[0] * x + constants[1] * (parts if x.shape[1] == 3 else grey(parts))


@settings
class Fog(RandomCorruption):
    """(x + amount plasma) max(x) / (max(x) + amount), with a plasma fractal in [0, 1].

    Each level of the fractal has half the step of the level before, and its noise is `decay` squared times smaller.
    """

    NAMES: ClassVar = ("amount", "decay")
    CIFAR: ClassVar = ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75))
    IMAGENET: ClassVar = ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))

    amount: Annotated[Number, Field(gt=0)] | None = None
    decay: Annotated[Number, Field(ge=1, le=1000)] | None = None

    def draw(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        amount, decay = constants
        height, width = x.shape[2:]
        fog = plasma(max(height, width), decay, index, key)[:, None, :height, :width].to(x.dtype)
        most = x.amax(dim=(1, 2, 3), keepdim=True)
        return (x + amount * fog) * most / (most + amount)


def plasma(size: int, decay: float, index: Tensor, key: Key) -> Tensor:
    """A plasma fractal for each sample, in [0, 1], by the diamond-square method on a torus.

    Its side is the next power of two. Each level sets the middles of squares, then those of diamonds, to the mean of
    their four corners and uniform noise.
    """
    side = 1 << math.ceil(math.log2(size))
    noise = uniform(key, index, (side, side), np.float64) * 2 - 1  # each pixel is set once
    found = torch.zeros(len(index), side, side, dtype=torch.float64, device=index.device)
    step, spread = side, 100.0**2
    while step >= 2:
        half = step // 2
        corners = found[:, ::step, ::step]
        below = corners + corners.roll(-1, 1)
        centres = (below + below.roll(-1, 2)) / 4 + spread * noise[:, half::step, half::step]
        found[:, half::step, half::step] = centres
        across = (centres + centres.roll(1, 1) + corners + corners.roll(-1, 2)) / 4
        found[:, ::step, half::step] = across + spread * noise[:, ::step, half::step]
        down = (centres + centres.roll(1, 2) + corners + corners.roll(-1, 1)) / 4
        found[:, half::step, ::step] = down + spread * noise[:, half::step, ::step]
        step, spread = half, spread / decay**2
    found -= found.amin(dim=(1, 2), keepdim=True)
    return found / found.amax(dim=(1, 2), keepdim=True)


@settings
class Brightness(PlainCorruption):
    """V + amount, for the V of HSV: the largest of red, green and blue."""

    NAMES: ClassVar = ("amount",)
    CIFAR: ClassVar = ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,))
    IMAGENET: ClassVar = ((0.1,), (0.2,), (0.3,), (0.4,), (0.5,))

    amount: Annotated[Number, Field(ge=-1, le=1)] | None = None

    def corrupt(self, x: Tensor, constants: Constants) -> Tensor:
        before = x.amax(dim=1, keepdim=True)
        after = (before + constants[0]).clamp(0, 1)
        # Hue and saturation stay, so all channels grow by the same factor. Black has none, and becomes grey.
        return torch.where(before > 0, x * (after / torch.where(before > 0, before, 1)), after)


@settings
class Spatter(RandomCorruption):
    """Drops of water, or of mud if `mud` is 1. It is no part of the 15 of the benchmark.

    The drops are normal noise with `mean` and `std`, blurred by `sigma`; what is below `threshold` is dry. `strength`
    is the brightness of water, or the blur of mud.
    """

    NAMES: ClassVar = ("mean", "std", "sigma", "threshold", "strength", "mud")
    CIFAR: ClassVar = (
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    )
    IMAGENET: ClassVar = (
        (0.65, 0.3, 4, 0.69, 0.6, 0),
        (0.65, 0.3, 3, 0.68, 0.6, 0),
        (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1),
        (0.67, 0.4, 1, 0.65, 1.5, 1),
    )

    mean: Number | None = None
    std: Least = None
    sigma: Size = None
    threshold: Share = None
    strength: Size = None
    mud: Annotated[int, Field(ge=0, le=1)] | None = None

    def draw(self, x: Tensor, constants: Constants, index: Tensor, key: Key) -> Tensor:
        mean, std, sigma, threshold, strength, mud = constants
        drops = filters.gaussian_blur(mean + std * normal(key, index, (1, *x.shape[2:])).to(x.dtype), sigma)
        drops = torch.where(drops < threshold, 0, drops)
        colour = x.new_tensor(MUD if mud else WATER).view(1, 3, 1, 1) / 255
        if mud:
            cover = filters.gaussian_blur((drops > threshold).to(x.dtype), strength)
            cover = torch.where(cover < 0.8, 0, cover)
            return in_colour(x, lambda image: (image * (1 - cover) + cover * colour).clamp(0, 1))
        layers = truncated(drops.clamp(0, 1)).mul(255).round()[:, 0].cpu().numpy().astype(np.uint8)
        shine = torch.from_numpy(np.stack([_water(layer) for layer in layers]))[:, None].to(x.device, x.dtype)
        return in_colour(x, lambda image: (image + strength * shine * colour).clamp(0, 1))


def _water(layer: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How bright the water is at each pixel, at most 1: dark near the edges of a drop, with light from one side."""
    dry = ~_edges(layer)
    far = np.minimum(ndimage.distance_transform_edt(dry), 20) if not dry.all() else np.full(layer.shape, 20.0)
    far = (ndimage.uniform_filter(far, 3, mode="mirror") + 1e-6).astype(np.uint8)  # a whole mean must stay whole
    light = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], dtype=np.float64)
    far = ndimage.correlate(_equalised(far).astype(np.float64), light, mode="mirror").clip(0, 255)
    wet = layer * ndimage.uniform_filter(far, 3, mode="mirror").round()
    return np.asarray(wet / max(wet.max(), 1.0))


def _equalised(levels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The levels, spread so that each is about as frequent as any other."""
    counts = np.bincount(levels.ravel(), minlength=256)
    first = int(np.flatnonzero(counts)[0])
    if counts[first] == levels.size:
        return levels
    ranks = np.cumsum(counts) - counts[first]
    spread: np.ndarray[Any, Any] = (255.0 * ranks / (levels.size - counts[first])).round().clip(0, 255)
    found: np.ndarray[Any, Any] = spread.astype(np.uint8)[levels]
    return found


def _edges(layer: np.ndarray[Any, Any], low: float = 50, high: float = 150) -> np.ndarray[Any, Any]:
    """Canny's edges: ridges of the slope that reach `high`, and what is above `low` and joined to them."""
    values = layer.astype(np.float64)
    across, down = (ndimage.sobel(values, axis=axis, mode="nearest") for axis in (1, 0))
    slope = np.abs(across) + np.abs(down)
    padded = np.pad(slope, 1)

    def beside(dy: int, dx: int) -> np.ndarray[Any, Any]:
        return padded[1 + dy : 1 + dy + slope.shape[0], 1 + dx : 1 + dx + slope.shape[1]]

    steep = np.abs(down) / np.maximum(np.abs(across), 1e-12)
    flat, upright = steep < math.tan(math.pi / 8), steep > math.tan(3 * math.pi / 8)
    falling = across * down >= 0
    pairs = [
        (flat, (0, -1), (0, 1)),
        (upright, (-1, 0), (1, 0)),
        (~flat & ~upright & falling, (-1, -1), (1, 1)),
        (~flat & ~upright & ~falling, (-1, 1), (1, -1)),
    ]
    ridge = np.zeros(slope.shape, dtype=bool)
    for where, one, other in pairs:
        # On a diagonal, the released code's library lets no tie through.
        after = slope > beside(*other) if 0 not in one else slope >= beside(*other)
        ridge |= where & (slope > beside(*one)) & after
    weak = ridge & (slope > low)
    regions, count = ndimage.label(weak, structure=np.ones((3, 3)))
    kept: np.ndarray[Any, Any] = np.zeros(count + 1, dtype=bool)
    kept[np.unique(regions[weak & (slope > high)])] = True
    kept[0] = False
    found: np.ndarray[Any, Any] = kept[regions]
    return found
