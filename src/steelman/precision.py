"""Exact float32: no TF32 and no bfloat16 inside convolutions and matrix products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """Inside, products of float32 numbers are computed in float32, whatever the global settings say.

    By default, GPUs round the numbers to 10 bits in convolutions. Some CPUs can be told to round them to 8 bits. Such
    rounding can change a close decision of the model.
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
    """(place, name, exact value) of every switch of this PyTorch.

    PyTorch has old and new switches for the same setting. It refuses to read an old one if a new one was used.
    """
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
