"""The corruptions once more, in float64, from what the released generators of CIFAR-10-C and ImageNet-C do.

Nothing here calls our corruptions. An image is an array of shape (height, width, channels) in [0, 1]. The results are
not clipped. The functions of random corruptions take their noise as arguments, so that a test can give them the noise
that our code has drawn. `RANDOM` draws it with NumPy.
"""

from __future__ import annotations

import colorsys
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import ndimage

Array = npt.NDArray[Any]
Row = tuple[float, ...]


def table(text: str) -> dict[str, tuple[Row, ...]]:
    """Lines like "name: a b; a b": the constants of each severity."""
    lines = (line.split(":") for line in text.strip().replace(";\n", ";").splitlines())
    return {name: tuple(tuple(map(float, row.split())) for row in rows.split(";")) for name, rows in lines}


# Constants of the released generators. Those of zoom blur are the stop and the step of numpy.arange.
CONSTANTS = {
    "cifar": table("""
gaussian-noise: 0.04; 0.06; 0.08; 0.09; 0.1
shot-noise: 500; 250; 100; 75; 50
impulse-noise: 0.01; 0.02; 0.03; 0.05; 0.07
defocus-blur: 0.3 0.4; 0.4 0.5; 0.5 0.6; 1 0.2; 1.5 0.1
glass-blur: 0.05 1 1; 0.25 1 1; 0.4 1 1; 0.25 1 2; 0.4 1 2
motion-blur: 6 1; 6 1.5; 6 2; 8 2; 9 2.5
zoom-blur: 1.06 0.01; 1.11 0.01; 1.16 0.01; 1.21 0.01; 1.26 0.01
snow: 0.1 0.2 1 0.6 8 3 0.95; 0.1 0.2 1 0.5 10 4 0.9; 0.15 0.3 1.75 0.55 10 4 0.9;
    0.25 0.3 2.25 0.6 12 6 0.85; 0.3 0.3 1.25 0.65 14 12 0.8
frost: 1 0.2; 1 0.3; 0.9 0.4; 0.85 0.4; 0.75 0.45
fog: 0.2 3; 0.5 3; 0.75 2.5; 1 2; 1.5 1.75
brightness: 0.05; 0.1; 0.15; 0.2; 0.3
contrast: 0.75; 0.5; 0.4; 0.3; 0.15
elastic-transform: 0 0 0.08; 0.05 0.2 0.07; 0.08 0.06 0.06; 0.1 0.04 0.05; 0.1 0.03 0.03
pixelate: 0.95; 0.9; 0.85; 0.75; 0.65
jpeg-compression: 80; 65; 58; 50; 40
speckle-noise: 0.06; 0.1; 0.12; 0.16; 0.2
gaussian-blur: 0.4; 0.6; 0.7; 0.8; 1
spatter: 0.62 0.1 0.7 0.7 0.5 0; 0.65 0.1 0.8 0.7 0.5 0; 0.65 0.3 1 0.69 0.5 0;
    0.65 0.1 0.7 0.69 0.6 1; 0.65 0.1 0.5 0.68 0.6 1
saturate: 0.3 0; 0.1 0; 1.5 0; 2 0.1; 2.5 0.2
"""),
    "imagenet": table("""
gaussian-noise: 0.08; 0.12; 0.18; 0.26; 0.38
shot-noise: 60; 25; 12; 5; 3
impulse-noise: 0.03; 0.06; 0.09; 0.17; 0.27
defocus-blur: 3 0.1; 4 0.5; 6 0.5; 8 0.5; 10 0.5
glass-blur: 0.7 1 2; 0.9 2 1; 1 2 3; 1.1 3 2; 1.5 4 2
motion-blur: 10 3; 15 5; 15 8; 15 12; 20 15
zoom-blur: 1.11 0.01; 1.16 0.01; 1.21 0.02; 1.26 0.02; 1.31 0.03
snow: 0.1 0.3 3 0.5 10 4 0.8; 0.2 0.3 2 0.5 12 4 0.7; 0.55 0.3 4 0.9 12 8 0.7;
    0.55 0.3 4.5 0.85 12 8 0.65; 0.55 0.3 2.5 0.85 12 12 0.55
frost: 1 0.4; 0.8 0.6; 0.7 0.7; 0.65 0.7; 0.6 0.75
fog: 1.5 2; 2 2; 2.5 1.7; 2.5 1.5; 3 1.4
brightness: 0.1; 0.2; 0.3; 0.4; 0.5
contrast: 0.4; 0.3; 0.2; 0.1; 0.05
elastic-transform: 2 0.7 0.1; 2 0.08 0.2; 0.05 0.01 0.02; 0.07 0.01 0.02; 0.12 0.01 0.02
pixelate: 0.6; 0.5; 0.4; 0.3; 0.25
jpeg-compression: 25; 18; 15; 10; 7
speckle-noise: 0.15; 0.2; 0.35; 0.45; 0.6
gaussian-blur: 1; 2; 3; 4; 6
spatter: 0.65 0.3 4 0.69 0.6 0; 0.65 0.3 3 0.68 0.6 0; 0.65 0.3 2 0.68 0.5 0;
    0.65 0.3 1 0.65 1.5 1; 0.67 0.4 1 0.65 1.5 1
saturate: 0.3 0; 0.1 0; 2 0; 5 0.1; 20 0.2
"""),
}
# The released code multiplies these by 244, for images of 224 pixels.
CONSTANTS["imagenet"]["elastic-transform"] = tuple(
    tuple(value * 244 / 224 for value in row) for row in CONSTANTS["imagenet"]["elastic-transform"]
)


def each_channel(x: Array, change: Callable[[Array], Array]) -> Array:
    return np.stack([change(channel) for channel in np.moveaxis(x, -1, 0)], axis=-1)


def grey(x: Array) -> Array:
    return x[..., :1] if x.shape[-1] == 1 else x @ np.array([[0.299], [0.587], [0.114]])


def gaussian(x: Array, sigma: float) -> Array:
    """The blur of scikit-image: the edge pixels are repeated, and the kernel ends at 4 sigma."""
    return each_channel(x, lambda channel: ndimage.gaussian_filter(channel, sigma, mode="nearest", truncate=4.0))


def levels(x: Array) -> Array:
    """Cut to grey levels of 8 bits. What is a whole level but for a rounding stays one."""
    return np.floor(np.clip(x, 0, 1) * 255 + 1e-6)


# Without noise.


def defocus_blur(x: Array, radius: float, sigma: float) -> Array:
    reach, around = (8, 1) if radius <= 8 else (int(radius), 2)
    kernel = np.zeros((2 * reach + 1, 2 * reach + 1))
    for row, column in np.ndindex(kernel.shape):
        kernel[row, column] = (row - reach) ** 2 + (column - reach) ** 2 <= radius**2
    kernel /= kernel.sum()
    line = np.exp(-(np.arange(-around, around + 1) ** 2) / (2 * sigma**2))
    for axis in (0, 1):
        kernel = ndimage.correlate1d(kernel, line / line.sum(), axis, mode="mirror")  # OpenCV's border
    return each_channel(x, lambda channel: ndimage.correlate(channel, kernel, mode="mirror"))


def zoomed(x: Array, factor: float) -> Array:
    part = [math.ceil(side / factor) for side in x.shape[:2]]
    top, left = ((side - inner) // 2 for side, inner in zip(x.shape, part))
    large = ndimage.zoom(x[top : top + part[0], left : left + part[1]], (factor, factor, 1), order=1)
    top, left = ((outer - side) // 2 for outer, side in zip(large.shape[:2], x.shape))
    return np.asarray(large[top : top + x.shape[0], left : left + x.shape[1]])


def zoom_blur(x: Array, stop: float, step: float) -> Array:
    # Because of roundings, arange(1, 1.06, 0.01) and arange(1, 1.11, 0.01) have their stop as the last value.
    layers = [x, *(zoomed(x, factor) for factor in np.arange(1, stop, step))]
    return np.asarray(np.mean(layers, axis=0))


def by_hsv(x: Array, change: Callable[[float, float, float], tuple[float, float, float]]) -> Array:
    found = np.empty((*x.shape[:2], 3))
    for at in np.ndindex(*x.shape[:2]):
        found[at] = colorsys.hsv_to_rgb(*change(*colorsys.rgb_to_hsv(*np.broadcast_to(x[at], 3).tolist())))
    return found if x.shape[-1] == 3 else grey(found)


def contrast(x: Array, factor: float) -> Array:
    mean = x.mean(axis=(0, 1))
    return np.asarray((x - mean) * factor + mean)


def box(lines: Array, size: int) -> Array:
    """Pillow's box filter along the first axis: 8-bit values, weights of 22 bits, a result that is rounded."""
    scale = len(lines) / size
    support = max(scale, 1.0) / 2
    found = np.empty((size, *lines.shape[1:]), dtype=np.int64)
    for at in range(size):
        middle = (at + 0.5) * scale
        first, last = max(int(middle - support + 0.5), 0), min(int(middle + support + 0.5), len(lines))
        far = (np.arange(first, last) + 0.5 - middle) / max(scale, 1.0)
        weights = ((far > -0.5) & (far <= 0.5)).astype(np.float64)
        whole = np.floor(weights / weights.sum() * 2**22 + 0.5).astype(np.int64)
        found[at] = (np.tensordot(whole, lines[first:last], 1) + 2**21) >> 22
    return found


def pixelate(x: Array, share: float) -> Array:
    values = (x * 255).round().astype(np.int64)
    height, width = x.shape[:2]
    for rows, columns in ((int(height * share), int(width * share)), (height, width)):
        values = box(values.swapaxes(0, 1), columns).swapaxes(0, 1)  # columns first
        values = box(values, rows)
    return values / 255


def jpeg_compression(x: Array, quality: float) -> Array:
    content = io.BytesIO()
    values = (x * 255).round().astype(np.uint8)
    Image.fromarray(values.squeeze()).save(content, "JPEG", quality=int(quality))
    return np.asarray(Image.open(content)).reshape(x.shape) / 255.0


PLAIN: dict[str, Callable[..., Array]] = {
    "defocus-blur": defocus_blur,
    "zoom-blur": zoom_blur,
    "brightness": lambda x, amount: by_hsv(x, lambda h, s, v: (h, s, min(v + amount, 1.0))),
    "contrast": contrast,
    "pixelate": pixelate,
    "jpeg-compression": jpeg_compression,
    "gaussian-blur": gaussian,
    "saturate": lambda x, factor, added: by_hsv(x, lambda h, s, v: (h, min(s * factor + added, 1.0), v)),
}

# With noise, which comes last in the arguments.


def swapped(x: Array, moves: int, offsets: Array) -> Array:
    """The loop of the glass blur. `offsets` (2, height, width) has the rows and the columns, -moves to moves - 1.

    Both sides of the assignment are views of one array, so the partner keeps its value. In an image of one channel the
    released loop would swap numbers; here the channel is an axis, and the loop does what it does to colour images.
    """
    x = x.copy()
    for row in range(x.shape[0] - moves, moves, -1):
        for column in range(x.shape[1] - moves, moves, -1):
            to = row + offsets[0, row, column], column + offsets[1, row, column]
            x[row, column], x[to] = x[to], x[row, column]
    return x


def glass_blur(x: Array, sigma: float, moves: int, offsets: Array) -> Array:
    """`offsets` has a first axis for the rounds."""
    x = levels(gaussian(x, sigma)) / 255
    for one in offsets:
        x = swapped(x, moves, one)
    return gaussian(x, sigma)


def motion_blur(x: Array, radius: float, sigma: float, degrees: float) -> Array:
    """ImageMagick's motion blur, without its rounding to 8 bits."""
    steps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    down = np.ceil(steps * math.sin(math.radians(degrees)) - 0.5).astype(int)
    across = np.ceil(steps * math.cos(math.radians(degrees)) - 0.5).astype(int)
    rows, columns = np.ogrid[: x.shape[0], : x.shape[1]]
    found = np.zeros_like(x)
    for weight, below, right in zip(weights / weights.sum(), down, across):
        found += weight * x[np.clip(rows + below, 0, x.shape[0] - 1), np.clip(columns + right, 0, x.shape[1] - 1)]
    return found


def snow(x: Array, constants: Row, noise: Array, degrees: float) -> Array:
    mean, std, zoom, threshold, radius, sigma, mix = constants
    layer = zoomed((mean + std * noise)[..., None], zoom)
    layer = np.round(motion_blur(levels(np.where(layer < threshold, 0, layer)), radius, sigma, degrees)) / 255
    return mix * x + (1 - mix) * np.maximum(x, grey(x) * 1.5 + 0.5) + layer + np.rot90(layer, 2)


def plasma(decay: float, noise: Array) -> Array:
    """The diamond-square fractal on a torus. `noise` is uniform in (-1, 1), of shape (side, side, images)."""
    side = len(noise)
    found, step, wibble = np.zeros_like(noise), side, 100.0
    while step >= 2:
        half = step // 2
        diagonal, straight = ((-half, -half), (-half, half), (half, -half), (half, half)), ((-half, 0), (half, 0))
        sides = (*straight, (0, -half), (0, half))
        for top, left, around in ((half, half, diagonal), (0, half, sides), (half, 0, sides)):
            for row in range(top, side, step):
                for column in range(left, side, step):
                    corners = [found[(row + down) % side, (column + across) % side] for down, across in around]
                    found[row, column] = sum(corners) / 4 + wibble * wibble * noise[row, column]
        step, wibble = half, wibble / decay
    found -= found.min(axis=(0, 1))
    return np.asarray(found / found.max(axis=(0, 1)))


def fog(x: Array, amount: float, layer: Array) -> Array:
    most = x.max()
    return np.asarray((x + amount * layer[: x.shape[0], : x.shape[1], None]) * most / (most + amount))


def elastic_transform(x: Array, constants: Row, corners: Array, field: Array, places: int = 0) -> Array:
    """`corners` (3, 2) and `field` (2, height, width) are uniform in (-1, 1).

    OpenCV rounds the places of the affine map to 1 / 32 of a pixel. `places` does it too; 0 means no rounding.
    """
    height, width = x.shape[:2]
    amplitude, sigma, affine = (value * min(height, width) for value in constants)
    # The released code passes (rows, columns) to OpenCV, which reads (columns, rows).
    square = np.array([height // 2, width // 2]) + min(height, width) // 3 * np.array([[1, 1], [1, -1], [-1, -1]])
    ones = np.ones((3, 1))
    forth = np.linalg.solve(np.hstack((square, ones)), np.hstack((square + affine * corners, ones)))
    rows, columns = np.mgrid[:height, :width]
    across, down, _ = np.linalg.inv(forth.T) @ np.stack((columns.ravel(), rows.ravel(), np.ones(rows.size)))
    if places:
        across, down = np.round(across * places) / places, np.round(down * places) / places
    at = down.reshape(rows.shape), across.reshape(rows.shape)
    x = each_channel(x, lambda channel: ndimage.map_coordinates(channel, at, order=1, mode="mirror"))
    if amplitude:
        blurred = [amplitude * ndimage.gaussian_filter(one, sigma, mode="reflect", truncate=3.0) for one in field]
        at = rows + blurred[0], columns + blurred[1]
        x = each_channel(x, lambda channel: ndimage.map_coordinates(channel, at, order=1, mode="reflect"))
    return x


def grown(found: Array, change: Callable[[Array], Array]) -> Array:
    """`change` again and again, until nothing changes."""
    while not np.array_equal(after := change(found), found):
        found = after
    return found


def canny(layer: Array, low: float = 50, high: float = 150) -> Array:
    """OpenCV's edges, with a kernel of 3 pixels and the sum of both slopes."""
    across, down = (ndimage.sobel(layer, axis, mode="nearest") for axis in (1, 0))
    slope = np.pad(np.abs(across) + np.abs(down), 1)
    ridge = np.zeros(layer.shape, dtype=bool)
    for row, column in np.ndindex(*layer.shape):
        x, y = across[row, column], down[row, column]
        way = -1 if x * y < 0 else 1
        beside = [(0, -1), (0, 1)], [(-1, 0), (1, 0)], [(-1, -way), (1, way)]
        kind = 0 if abs(y) < math.tan(math.pi / 8) * abs(x) else 1 if abs(y) > math.tan(math.pi * 3 / 8) * abs(x) else 2
        before, after = (slope[row + 1 + to[0], column + 1 + to[1]] for to in beside[kind])
        here = slope[row + 1, column + 1]
        # On a diagonal, an equal slope on either side ends the ridge.
        ridge[row, column] = here > low and here > before and (here > after if kind == 2 else here >= after)
    strong = ridge & (slope[1:-1, 1:-1] > high)
    return grown(strong, lambda edges: ridge & ndimage.binary_dilation(edges, np.ones((3, 3))))


def chamfer(edges: Array, most: float = 20) -> Array:
    """OpenCV's distance to the next edge, by steps of a knight (2.1969), of a bishop (1.4) and of one pixel."""
    far = np.where(edges, 0, most)
    steps = [(down, across) for down in range(-2, 3) for across in range(-2, 3) if math.gcd(down, across) == 1]
    lengths = {1: 1.0, 2: 1.4, 3: 2.1969}

    def nearer(far: Array) -> Array:
        wide = np.pad(far, 2, constant_values=most)
        rows, columns = far.shape
        moved = [
            wide[2 + down : 2 + down + rows, 2 + across : 2 + across + columns] + lengths[abs(down) + abs(across)]
            for down, across in steps
        ]
        return np.min([far, *moved], axis=0)  # type: ignore[no-any-return]

    return grown(far, nearer)


def equalised(values: Array) -> Array:
    counts = np.bincount(values.ravel(), minlength=256)
    least = values.min()
    if counts[least] == values.size:
        return values
    return np.asarray(np.round(255 * (np.cumsum(counts) - counts[least]) / (values.size - counts[least]))[values])


def euclidean(edges: Array) -> Array:
    return np.minimum(ndimage.distance_transform_edt(~edges), 20) if edges.any() else np.full(edges.shape, 20.0)


def water(layer: Array, distance: Callable[[Array], Array] = chamfer) -> Array:
    """The brightness of water, at most 1, from the 8-bit layer of drops."""
    mean = np.ones((3, 3)) / 9
    # OpenCV blurs numbers with fractions here, and NumPy then cuts them to 8 bits.
    far = np.floor(ndimage.correlate(distance(canny(layer)), mean, mode="mirror") + 1e-6).astype(np.int64)
    light = np.array([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]])
    far = np.clip(ndimage.correlate(equalised(far).astype(np.float64), light, mode="mirror"), 0, 255)
    wet = layer * np.round(ndimage.correlate(far, mean, mode="mirror"))
    return np.asarray(wet / max(wet.max(), 1.0))


def spatter(x: Array, constants: Row, noise: Array, distance: Callable[[Array], Array] = chamfer) -> Array:
    mean, std, sigma, threshold, strength, mud = constants
    layer = gaussian((mean + std * noise)[..., None], sigma)
    layer[layer < threshold] = 0
    if not mud:
        # The released code casts to 8 bits without a clip, so what is above 1 would be near 0 on most machines.
        shine = water(levels(layer[..., 0]), distance)
        return np.asarray(x + strength * shine[..., None] * np.array([175, 238, 238]) / 255)
    cover = gaussian((layer > threshold).astype(np.float64), strength)
    cover[cover < 0.8] = 0
    return np.asarray(x * (1 - cover) + cover * np.array([63, 42, 20]) / 255)


def frost(x: Array, constants: Row, part: Array) -> Array:
    return constants[0] * x + constants[1] * (part if x.shape[-1] == 3 else grey(part))


def offsets(rng: np.random.Generator, constants: Row, x: Array) -> Array:
    return rng.integers(-int(constants[1]), int(constants[1]), size=(int(constants[2]), 2, *x.shape[:2]))


def foggy(x: Array, constants: Row, rng: np.random.Generator) -> Array:
    side = 2 ** math.ceil(math.log2(max(x.shape[1:3])))
    layers = plasma(constants[1], rng.uniform(-1, 1, (side, side, len(x))))
    return np.stack([fog(image, constants[0], layer) for image, layer in zip(x, np.moveaxis(layers, -1, 0))])


Random = Callable[[Array, Row, np.random.Generator], Array]


def one_by_one(change: Random) -> Random:
    return lambda x, constants, rng: np.stack([change(image, constants, rng) for image in x])


# From images (N, height, width, channels), constants and a generator.
RANDOM: dict[str, Random] = {
    "gaussian-noise": lambda x, c, rng: x + rng.normal(scale=c[0], size=x.shape),
    "shot-noise": lambda x, c, rng: rng.poisson(x * c[0]) / c[0],
    "impulse-noise": lambda x, c, rng: np.where(rng.random(x.shape) < c[0], rng.random(x.shape) < 0.5, x),
    "speckle-noise": lambda x, c, rng: x + x * rng.normal(scale=c[0], size=x.shape),
    "glass-blur": one_by_one(lambda x, c, rng: glass_blur(x, c[0], int(c[1]), offsets(rng, c, x))),
    "motion-blur": one_by_one(lambda x, c, rng: np.round(255 * motion_blur(x, c[0], c[1], rng.uniform(-45, 45))) / 255),
    "snow": one_by_one(lambda x, c, rng: snow(x, c, rng.normal(size=x.shape[:2]), rng.uniform(-135, -45))),
    "fog": foggy,
    "elastic-transform": one_by_one(
        lambda x, c, rng: elastic_transform(x, c, rng.uniform(-1, 1, (3, 2)), rng.uniform(-1, 1, (2, *x.shape[:2])), 32)
    ),
    "spatter": one_by_one(lambda x, c, rng: spatter(x, c, rng.normal(size=x.shape[:2]))),
}
