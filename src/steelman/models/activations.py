"""The activations that a backbone can have."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from steelman.errors import unknown

# Methods such as CURE and LLR differentiate an input gradient. They need a smooth activation, and ReLU is not smooth.
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
