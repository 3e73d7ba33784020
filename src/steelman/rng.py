"""Counter-based noise: the noise of a sample depends on (seed, stream, sample index) alone.

The generator is SplitMix64 (Steele, Lea and Flood, 2014). Draw d of a sample is ``mix(key + (d + 1) * GOLDEN)``. So a
draw has no state: it is the same at any time, on any device, in any batch and in any process.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import operator

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_A = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_B = -7723592293110705685  # 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def _mix(z: Tensor) -> Tensor:
    """The SplitMix64 output function on int64 tensors. Products wrap around; masks make the shifts unsigned."""
    z = (z ^ ((z >> 30) & ((1 << 34) - 1))) * _MIX_A
    z = (z ^ ((z >> 27) & ((1 << 37) - 1))) * _MIX_B
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


@dataclasses.dataclass(frozen=True)
class Key:
    """A seed and a path of names below it: one stream of noise. ``fold`` gives another, independent stream.

    >>> key = Key(0).fold("attack", 3)
    >>> a = key.uniform(torch.tensor([5, 9]), (2,))
    >>> b = key.uniform(torch.tensor([9]), (2,))
    >>> bool((a[1] == b[0]).all())
    True
    """

    seed: int
    path: tuple[int | str, ...] = ()

    def fold(self, *parts: int | str) -> Key:
        """The stream with this stream's path and `parts` behind it."""
        return Key(self.seed, (*self.path, *parts))

    def integer(self) -> int:
        """This stream as one signed 64-bit integer."""
        parts = (part if isinstance(part, str) else operator.index(part) for part in (self.seed, *self.path))
        text = repr(tuple(parts)).encode()
        return _signed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))

    def bits(self, index: Tensor, count: int) -> Tensor:
        """`count` random 64-bit integers for each sample index: int64 of shape (N, count)."""
        index = index.to(torch.int64)
        start = _mix(_mix(index * _GOLDEN + self.integer()) + _GOLDEN)
        counter = torch.arange(1, count + 1, dtype=torch.int64, device=index.device) * _GOLDEN
        return _mix(start[:, None] + counter[None, :])

    def uniform(self, index: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform noise in [0, 1) of shape (N, *shape). Each value has 24 bits, so float32 and float64 agree.

        In half precision, the largest values are rounded to 1.
        """
        count = math.prod(shape)
        bits = self.bits(index, (count + 1) // 2)
        high = (bits >> 40) & 0xFFFFFF
        low = (bits >> 8) & 0xFFFFFF
        both = torch.stack((high, low), dim=-1).flatten(1)[:, :count]
        # Half precision cannot hold whole numbers near 2^24: float16 would make them infinite.
        exact = torch.promote_types(dtype, torch.float32)
        return (both.to(exact) * 2.0**-24).to(dtype).reshape(len(index), *shape)

    def normal(self, index: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal noise of shape (N, *shape), by the Box-Muller transform."""
        count = math.prod(shape)
        pairs = (count + 1) // 2
        u = self.uniform(index, (2 * pairs,), torch.float64)
        radius = (-2.0 * torch.log1p(-u[:, :pairs])).sqrt()
        angle = (2.0 * math.pi) * u[:, pairs:]
        both = torch.cat((radius * angle.cos(), radius * angle.sin()), dim=1)[:, :count]
        return both.to(dtype).reshape(len(index), *shape)

    def permutation(self, n: int) -> Tensor:
        """A random order of 0 .. n - 1."""
        draws = self.bits(torch.arange(n), 1)[:, 0]
        return torch.argsort(draws, stable=True)
