"""Batch-norm statistics as constants: those of one batch, recorded in its forward, used in others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Statistics = dict[_BatchNorm, tuple[Tensor, Tensor]]


@contextlib.contextmanager
def recorded(model: nn.Module) -> Iterator[Statistics]:
    """Inside, each forward notes the mean and (biased) variance by which every batch norm normalised its batch.

    A batch norm that did not run, or that used its running averages, is not in it; of one that runs at several places
    the last is.

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
    """Run a model in eval mode, with these statistics in place of its batch norms' running averages.

    No forward inside moves an average, and each sample's output depends on that sample alone. Modes and averages are
    as before afterwards, even after an exception.
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
