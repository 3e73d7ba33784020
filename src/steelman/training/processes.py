"""What the processes of one run tell one another. With a single process nothing is sent."""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn


def sums(fabric: Fabric, *values: float) -> list[float]:
    """Each value, added up over the processes."""
    if fabric.world_size == 1:
        return list(values)
    total = fabric.all_reduce(torch.tensor(values, dtype=torch.float64), reduce_op="sum")
    assert isinstance(total, Tensor)
    return [float(value) for value in total]


def agree(fabric: Fabric, wish: bool) -> bool:
    """Whether any process wishes it: all must save, or stop, at the same step."""
    return sums(fabric, wish)[0] > 0


def gathered(fabric: Fabric, value: Tensor) -> Tensor:
    """The tensor of every process, stacked."""
    if fabric.world_size == 1:
        return value[None]
    value = value.detach().to(fabric.device).contiguous()
    every = [torch.empty_like(value) for _ in range(fabric.world_size)]
    torch.distributed.all_gather(every, value)
    return torch.stack(every).cpu()


def share_buffers(fabric: Fabric, net: nn.Module) -> None:
    """Give all processes the first one's batch-norm statistics: they attack, average and validate one model."""
    if fabric.world_size > 1:
        for buffer in net.buffers():
            torch.distributed.broadcast(buffer, src=0)
