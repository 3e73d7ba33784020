"""Batch norm: separate ones for clean and adversarial images, and control over the statistics they use."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from steelman.errors import UserError

Branch = Literal["clean", "adversarial"]


class AuxiliaryNorm(nn.Module):
    """Two batch norms in the place of one. A forward uses the one that `branch` names.

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
    """Replace every batch norm of a model by an `AuxiliaryNorm`. The model itself is changed, and returned.

    >>> net = split_norms(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    >>> type(net[1]).__name__
    'AuxiliaryNorm'
    """
    # named_children would find a module that has several places at the first place only.
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
    """Send a model's forwards through one branch. A model without auxiliary batch norm does not change."""
    for module in model.modules():
        if isinstance(module, AuxiliaryNorm):
            module.branch = branch


@contextlib.contextmanager
def routed(model: nn.Module, branch: Branch) -> Iterator[None]:
    """Inside, a model's forwards go through one branch. Afterwards the branches are as before."""
    before = [(module, module.branch) for module in model.modules() if isinstance(module, AuxiliaryNorm)]
    route(model, branch)
    try:
        yield
    finally:
        for module, was in before:
            module.branch = was


Statistics = dict[_BatchNorm, tuple[Tensor, Tensor]]


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[Statistics]:
    """Inside, each forward notes the mean and the (biased) variance with which every batch norm normalised its batch.

    A batch norm is missing from the result if it did not run, or if it used its running averages. If one batch norm
    runs at several places, its last statistics count.

    >>> norm = nn.BatchNorm1d(1)
    >>> with recorded(norm) as seen:
    ...     out = norm(torch.tensor([[1.0], [3.0]]))
    >>> seen[norm]
    (tensor([2.]), tensor([1.]))
    """
    seen: Statistics = {}

    def note(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(norm, _BatchNorm)
        if norm.training or norm.running_mean is None:
            x = inputs[0].detach()
            x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
            variance, mean = torch.var_mean(x, dim=[0, *range(2, x.dim())], correction=0)
            seen[norm] = (mean, variance)

    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    handles = [norm.register_forward_pre_hook(note) for norm in norms]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def fixed(model: nn.Module, statistics: Mapping[_BatchNorm, tuple[Tensor, Tensor]] | None = None) -> Iterator[None]:
    """Inside, a model is in eval mode, and `statistics` replace the running averages of its batch norms.

    No forward inside changes an average. Each sample's output depends on that sample alone. Afterwards modes and
    averages are as before, even after an exception.
    """
    modes = [(module, module.training) for module in model.modules()]
    kept = [(norm, norm.running_mean, norm.running_var) for norm in statistics or {}]
    try:
        for module, _ in modes:
            module.training = False
        for norm, (mean, variance) in (statistics or {}).items():
            norm.running_mean, norm.running_var = mean, variance
        yield
    finally:
        for norm, running_mean, running_var in kept:
            norm.running_mean, norm.running_var = running_mean, running_var
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def shared(model: nn.Module, statistics: Statistics | None = None) -> Iterator[Statistics]:
    """Inside, a model is in eval mode, but its batch norms use the statistics of one batch, with gradients.

    By default they are the statistics of each forward's own batch, and the yielded mapping gets them. With
    `statistics`, they are the given ones. Gradients flow through them, to the weights and to the images they come from.
    A batch norm in eval mode uses its running averages. No average changes, and afterwards the modes are as before.

    >>> norm, x = nn.BatchNorm1d(1, affine=False, eps=0), torch.tensor([[1.0], [3.0]])
    >>> with shared(norm) as seen:
    ...     own = norm(x)
    >>> with shared(norm, seen):
    ...     own.T, norm(x + 2).T
    (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
    """
    modes = [(module, module.training) for module in model.modules()]
    norms = [module for module, training in modes if isinstance(module, _BatchNorm) and training]
    seen: Statistics = {} if statistics is None else statistics

    def forward(norm: _BatchNorm, x: Tensor) -> Tensor:
        if statistics is None:
            variance, mean = torch.var_mean(x, dim=[0, *range(2, x.dim())], correction=0)
            seen[norm] = (mean, variance)
        if norm not in seen:  # this batch norm did not run on the batch with the given statistics
            return type(norm).forward(norm, x)
        shape = (1, -1, *(1,) * (x.dim() - 2))
        mean, variance = (value.view(shape) for value in seen[norm])
        out = (x - mean) / (variance + norm.eps).sqrt()
        if norm.affine:
            out = out * norm.weight.view(shape) + norm.bias.view(shape)
        return out

    try:
        for module, _ in modes:
            module.training = False
        for norm in norms:
            norm.forward = functools.partial(forward, norm)  # type: ignore[method-assign]
        yield seen
    finally:
        for norm in norms:
            del norm.forward
        for module, training in modes:
            module.training = training
