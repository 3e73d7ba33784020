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
    """Descend the loss at w + gamma v instead of at w, where v is the direction in which the loss grows fastest.

    v = grad L(w), scaled for each weight to the length of that weight. Weights with one dimension (biases, batch norm)
    do not move. Both losses are on the same adversarial images. Batch-norm statistics move in the second pass only.
    `start` is the share of the run after which the perturbation begins.

    Wu et al. (2020), "Adversarial Weight Perturbation Helps Robust Generalization", Eq. (10).
    """

    gamma: Annotated[Number, Field(ge=0)] = 0.005
    start: Annotated[Number, Field(ge=0, le=1)] = 0.0

    def shifted(self, objective: Objective, batch: Batch) -> Shifted | None:
        """Move the weights to w + gamma v. Return the batch for the second loss, and the move.

        The first loss runs on the module inside all wrappers, so this method averages its gradients over the processes.
        If that loss is not finite, nothing moves, and None is returned.
        """
        net = batch.net
        buffers = [buffer.clone() for buffer in net.buffers()]
        devices = [batch.x.device] if batch.x.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):  # or else dropout would drop other units in the second pass
            outcome = objective(dataclasses.replace(batch, model=net))
        finite = bool(torch.isfinite(averaged(outcome.loss.detach())))
        step = self.direction(net, outcome.loss)
        for buffer, before in zip(net.buffers(), buffers, strict=True):
            buffer.copy_(before)
        if not finite:
            return None
        shift(net, step, 1)
        torch.clear_autocast_cache()  # it holds copies of the weights from before the move
        return dataclasses.replace(batch, x_adv=batch.x if outcome.x_adv is None else outcome.x_adv), step

    def direction(self, net: nn.Module, loss: Tensor) -> dict[str, Tensor]:
        """gamma v for each weight that moves. The gradient is that of the mean loss of all processes."""
        weights = {name: weight for name, weight in net.named_parameters() if weight.requires_grad and weight.dim() > 1}
        gradients = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        step = {}
        for (name, weight), gradient in zip(weights.items(), map(averaged, gradients), strict=True):
            step[name] = self.gamma * weight.detach().norm() / (gradient.norm() + TINY) * gradient
        return step


def averaged(value: Tensor) -> Tensor:
    """The mean of a value over all processes of the training."""
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
