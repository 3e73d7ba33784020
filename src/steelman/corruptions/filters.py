"""Filters for batches of images. Each image is filtered by itself, so its result does not depend on the batch.

They are called on one thread. On several, sums would be rounded otherwise at the ends of a thread's share, and these
depend on the batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SHORT = 16  # the radius of a kernel: from here on, a product with a matrix is faster than a sum
MANY_TAPS = 100  # of a kernel: from here on, a Fourier transform is faster than a sum


@functools.lru_cache(maxsize=64)
def blur_matrix(
    size: int, sigma: float, truncate: float = 4.0, border: Literal["repeat", "mirror"] = "repeat"
) -> Tensor:
    """The gaussian blur of a line of `size` pixels as a matrix, in float64.

    The kernel ends at `truncate` times sigma. Beyond the border, the edge pixel is repeated, or the line is mirrored
    with its edge pixel: c b a | a b c.

    >>> blur_matrix(3, 0.0)
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]], dtype=torch.float64)
    """
    radius = int(truncate * sigma + 0.5)
    offsets = torch.arange(-radius, radius + 1)
    weights = torch.exp(-0.5 * (offsets.double() / sigma) ** 2) if radius else torch.ones(1, dtype=torch.float64)
    places = torch.arange(size)[:, None] + offsets
    if border == "repeat":
        places = places.clamp(0, size - 1)
    else:
        places = places.remainder(2 * size)
        places = torch.where(places < size, places, 2 * size - 1 - places)
    matrix = torch.zeros(size, size, dtype=torch.float64)
    return matrix.scatter_add_(1, places, (weights / weights.sum()).expand(size, -1))


def separable(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """rows @ image @ columns^T for each channel of each image."""
    rows, columns = rows.to(x.device, x.dtype), columns.to(x.device, x.dtype).T
    # One image at a time: a product of other sizes adds up in another order. A clone begins at a whole cache line.
    return torch.stack([rows @ image.clone() @ columns for image in x])


def gaussian_blur(x: Tensor, sigma: float) -> Tensor:
    """Blur each channel. The edge pixels are repeated beyond the border."""
    radius = int(4 * sigma + 0.5)
    if radius == 0:
        return x
    if radius <= SHORT:
        for axis in (2, 3):
            x = _along(x, sigma, radius, axis)
        return x
    return separable(x, blur_matrix(x.shape[2], sigma), blur_matrix(x.shape[3], sigma))


def _along(x: Tensor, sigma: float, radius: int, axis: int) -> Tensor:
    """The blur along one axis as a sum of shifted images."""
    weights = torch.exp(-0.5 * (torch.arange(-radius, radius + 1).double() / sigma) ** 2)
    weights /= weights.sum()
    padded = F.pad(x, (0, 0, radius, radius) if axis == 2 else (radius, radius, 0, 0), mode="replicate")
    total = torch.zeros_like(x)
    for start, weight in enumerate(weights.tolist()):
        total.add_(padded.narrow(axis, start, x.shape[axis]), alpha=weight)
    return total


@functools.lru_cache(maxsize=64)
def disk(radius: float, sigma: float) -> Tensor:
    """A disk without smooth edges on a grid of whole pixels, then blurred. Its sum is one before the blur."""
    reach = 8 if radius <= 8 else math.ceil(radius)
    at = torch.arange(-reach, reach + 1, dtype=torch.float64)
    kernel = ((at[:, None] ** 2 + at**2) <= radius**2).double()
    kernel /= kernel.sum()
    around = 1 if radius <= 8 else 2
    line = torch.exp(-(torch.arange(-around, around + 1, dtype=torch.float64) ** 2) / (2 * sigma**2))
    line /= line.sum()
    padded = F.pad(kernel[None, None], (around,) * 4, mode="reflect")
    return F.conv2d(F.conv2d(padded, line.view(1, 1, -1, 1)), line.view(1, 1, 1, -1))[0, 0]


def correlate(x: Tensor, kernel: Tensor) -> Tensor:
    """The kernel's weighted sum around each pixel. Beyond the border the image is mirrored without its edge pixel."""
    places = kernel.abs() > 0
    reach = max(int((places.nonzero() - len(kernel) // 2).abs().max()), 1)
    middle = len(kernel) // 2
    kernel = kernel[middle - reach : middle + reach + 1, middle - reach : middle + reach + 1]
    padded = F.pad(x, (reach,) * 4, mode="reflect")
    if int((kernel != 0).sum()) > MANY_TAPS:
        return _by_fourier(padded, kernel, reach)
    height, width = x.shape[2:]
    total = torch.zeros_like(x)
    for row, column in kernel.nonzero().tolist():
        total.add_(padded[:, :, row : row + height, column : column + width], alpha=float(kernel[row, column]))
    return total


def _by_fourier(padded: Tensor, kernel: Tensor, reach: int) -> Tensor:
    """The same sum for a symmetric kernel, for each image by itself."""
    height, width = padded.shape[2:]
    waves = torch.fft.rfft2(kernel.to(padded.device, padded.dtype), s=(height, width))
    found = [torch.fft.irfft2(torch.fft.rfft2(image.clone()) * waves, s=(height, width)) for image in padded]
    return torch.stack(found)[:, :, 2 * reach :, 2 * reach :]


def clipped_zoom(x: Tensor, factor: float) -> Tensor:
    """The middle of each image, enlarged linearly to the image's size.

    The middle has ceil(size / factor) pixels. The enlarged part is a little larger than the image, and is cut around
    its middle.
    """
    size = x.shape[2:]
    part = [math.ceil(side / factor) for side in size]
    top, left = ((side - inner) // 2 for side, inner in zip(size, part, strict=True))
    middle = x[:, :, top : top + part[0], left : left + part[1]]
    # Python rounds halves to the even number, as the released code does.
    large = F.interpolate(
        middle, (round(part[0] * factor), round(part[1] * factor)), mode="bilinear", align_corners=True
    )
    top, left = ((outer - side) // 2 for outer, side in zip(large.shape[2:], size, strict=True))
    return large[:, :, top : top + size[0], left : left + size[1]]


def motion_blur(x: Tensor, radius: float, sigma: float, degrees: Sequence[float]) -> Tensor:
    """Blur each image along a line of its own, to one side.

    A pixel becomes a mean of 2 radius + 1 pixels, from itself on along the line. Their weights are half a gaussian.
    Places on the line are rounded to whole pixels, and edge pixels are repeated beyond the border.
    """
    height, width = x.shape[2:]
    steps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights /= weights.sum()
    angles = np.deg2rad(np.asarray(degrees, dtype=np.float64))
    paths = [
        np.clip(np.ceil(steps * way[:, None] - 0.5).astype(np.int64), -side, side)
        for way, side in ((np.sin(angles), height), (np.cos(angles), width))
    ]
    found = torch.empty_like(x)
    # Images with the same path are blurred together.
    kinds, which = np.unique(np.concatenate(paths, axis=1), axis=0, return_inverse=True)
    for kind, path in enumerate(kinds.reshape(-1, 2, len(steps))):
        rows = torch.from_numpy(np.flatnonzero(which.reshape(-1) == kind)).to(x.device)
        (up, left), (down, right) = (-path.min(axis=1)).clip(0), path.max(axis=1).clip(0)
        padded = F.pad(x[rows], (int(left), int(right), int(up), int(down)), mode="replicate")
        total = torch.zeros_like(x[rows])
        for weight, dy, dx in zip(weights, up + path[0], left + path[1], strict=True):
            total.add_(padded[:, :, dy : dy + height, dx : dx + width], alpha=float(weight))
        found[rows] = total
    return found


def sample(x: Tensor, down: Tensor, across: Tensor, *, edge_twice: bool) -> Tensor:
    """The images at the places (down, across), in pixels, by linear interpolation.

    Beyond the border the image is mirrored, with its edge pixel (`edge_twice`) or without it.
    """
    height, width = x.shape[2:]
    if edge_twice:
        places = torch.stack(((2 * across + 1) / width - 1, (2 * down + 1) / height - 1), dim=-1)
    else:
        places = torch.stack((2 * across / (width - 1) - 1, 2 * down / (height - 1) - 1), dim=-1)
    return F.grid_sample(
        x, places.to(x.dtype), mode="bilinear", padding_mode="reflection", align_corners=not edge_twice
    )
