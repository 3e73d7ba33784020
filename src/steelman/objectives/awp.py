"""Adversarial weight perturbation, around any objective."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from steelman.objectives.base import Batch, Objective
from steelman.settings import Number, settings

TINY = 1e-20

Shifted = tuple[Batch, dict[str, Tensor]]


@settings
class AWP:
    """Descend the loss at w + gamma v instead of at w, where v is the weights' own worst direction.

    v = grad L(w), rescaled for each weight of two or more dimensions to the length of that weight; vectors (biases,
    batch norm) are left alone. Both losses are on the same adversarial images. Batch-norm statistics move in the second
    pass only. `start` is the share of the run after which it begins.

    Wu et al. (2020), "Adversarial Weight Perturbation Helps Robust Generalization", Eq. (10).
    """

    gamma: Annotated[Number, Field(ge=0)] = 0.005
    start: Annotated[Number, Field(ge=0, le=1)] = 0.0

    def shifted(self, objective: Objective, batch: Batch) -> Shifted | None:
        """Move the weights to where the loss is to be taken; the batch to take it on, and the move.

        The first loss is taken on the bare module: its gradients are averaged over the processes here. Where it is not
        finite nothing is moved.
        """
        net = batch.net
        buffers = [buffer.clone() for buffer in net.buffers()]
        devices = [batch.x.device] if batch.x.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # both passes drop the same units
            outcome = objective(dataclasses.replace(batch, model=net))
        finite = bool(torch.isfinite(averaged(outcome.loss.detach())))
        step = self.direction(net, outcome.loss)
        for buffer, before in zip(net.buffers(), buffers, strict=True):
            buffer.copy_(before)
        if not finite:
            return None
        shift(net, step, 1)
        torch.clear_autocast_cache()  # it holds the weights as they were
        return dataclasses.replace(batch, x_adv=batch.x if outcome.x_adv is None else outcome.x_adv), step

    def direction(self, net: nn.Module, loss: Tensor) -> dict[str, Tensor]:
        """gamma v for each weight that takes part; every process climbs the loss of all."""
        weights = {name: weight for name, weight in net.named_parameters() if weight.requires_grad and weight.dim() > 1}
        gradients = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        step = {}
        for (name, weight), gradient in zip(weights.items(), map(averaged, gradients), strict=True):
            step[name] = self.gamma * weight.detach().norm() / (gradient.norm() + TINY) * gradient
        return step


def averaged(value: Tensor) -> Tensor:
    """The mean over the processes that train together; the value itself where there is one."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    total = value.clone()
    torch.distributed.all_reduce(total)
    return total / torch.distributed.get_world_size()


@torch.no_grad()
def shift(net: nn.Module, step: dict[str, Tensor], sign: int) -> None:
    """w <- w + sign * step."""
    for name, weight in net.named_parameters():
        if name in step:
            weight.add_(step[name], alpha=sign)
