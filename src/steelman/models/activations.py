"""Activations a backbone can be built with."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from steelman.errors import unknown

# The smooth ones are for methods that differentiate an input gradient: the second derivative of ReLU is zero.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "softplus": nn.Softplus,
    "silu": nn.SiLU,
}


def make_activation(name: str) -> nn.Module:
    """A new activation module.

    >>> make_activation("relu")
    ReLU()
    """
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise unknown("activation", name, ACTIVATIONS)
    return ACTIVATIONS[name]()
