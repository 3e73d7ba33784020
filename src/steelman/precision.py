"""float32 that is float32: no TF32 or bfloat16 inside convolutions and matrix products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Inside, products of float32 numbers are computed in float32, whatever is allowed outside.

    GPUs round them to 10 bits by default in convolutions, and some CPUs to 8 where that was asked for: enough to turn a
    close decision.
    """
    knobs = _knobs()
    kept = [getattr(place, name) for place, name, _ in knobs]
    try:
        for place, name, exact in knobs:
            setattr(place, name, exact)
        yield
    finally:
        for (place, name, _), value in zip(knobs, kept, strict=True):
            setattr(place, name, value)


def _knobs() -> list[tuple[Any, str, Any]]:
    """(place, name, exact value) of every switch there is. PyTorch has old and new ones for the same thing, and refuses
    to read the old where the new were used."""
    backends: Any = torch.backends
    cuda: list[tuple[Any, str, Any]] = [
        (backends.cudnn, "allow_tf32", False),
        (backends.cuda.matmul, "allow_tf32", False),
    ]
    try:
        for place, name, _ in cuda:
            getattr(place, name)
    except RuntimeError:
        cuda = [(place, "fp32_precision", "ieee") for place in (backends.cudnn.conv, backends.cuda.matmul)]
    cpu = [getattr(backends.mkldnn, name, None) for name in ("matmul", "conv")]
    return [*cuda, *((place, "fp32_precision", "ieee") for place in cpu if hasattr(place, "fp32_precision"))]
