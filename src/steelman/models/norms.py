"""Auxiliary batch norm: clean and adversarial batches are normalised, and remembered, apart."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from steelman.errors import UserError

Branch = Literal["clean", "adversarial"]


class AuxiliaryNorm(nn.Module):
    """Two batch norms in the place of one; `branch` says which of them a forward goes through.

    Xie et al. (2020), "Adversarial Examples Improve Image Recognition", section 4.
    """

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        self.clean, self.adversarial = norm, copy.deepcopy(norm)
        self.branch: Branch = "clean"

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.clean(x) if self.branch == "clean" else self.adversarial(x)
        return out


def split_norms(model: nn.Module) -> nn.Module:
    """Give every batch norm of a model an auxiliary one for adversarial batches; the model is changed.

    >>> net = split_norms(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    >>> type(net[1]).__name__
    'AuxiliaryNorm'
    """
    # A module may stand at several places; named_children would tell of the first alone.
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, _BatchNorm)
    ]
    if not found:
        raise UserError("auxiliary batch norm: the model has no batch norm to split")
    split = {norm: AuxiliaryNorm(norm) for norm in dict.fromkeys(norm for _, _, norm in found)}
    for parent, name, norm in found:
        setattr(parent, name, split[norm])
    return model


def route(model: nn.Module, branch: Branch) -> None:
    """Send a model's forwards through one branch; a model without auxiliary batch norm is left as it is."""
    for module in model.modules():
        if isinstance(module, AuxiliaryNorm):
            module.branch = branch


@contextlib.contextmanager
def routed(model: nn.Module, branch: Branch) -> Iterator[None]:
    """Send a model's forwards through one branch for a while."""
    before = [(module, module.branch) for module in model.modules() if isinstance(module, AuxiliaryNorm)]
    route(model, branch)
    try:
        yield
    finally:
        for module, was in before:
            module.branch = was
