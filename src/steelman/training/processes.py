"""Communication between the processes of one run. A single process sends nothing."""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from torch import Tensor, nn


def sums(fabric: Fabric, *values: float) -> list[float]:
    """The sum of each value over all processes."""
    if fabric.world_size == 1:
        return list(values)
    total = fabric.all_reduce(torch.tensor(values, dtype=torch.float64), reduce_op="sum")
    assert isinstance(total, Tensor)
    return [float(value) for value in total]


def agree(fabric: Fabric, wish: bool) -> bool:
    """Whether `wish` is True in any process. All processes must save, or stop, at the same step."""
    return sums(fabric, wish)[0] > 0


def gathered(fabric: Fabric, value: Tensor) -> Tensor:
    """The tensors of all processes, stacked."""
    if fabric.world_size == 1:
        return value[None]
    value = value.detach().to(fabric.device).contiguous()
    every = [torch.empty_like(value) for _ in range(fabric.world_size)]
    torch.distributed.all_gather(every, value)
    return torch.stack(every).cpu()


def share_buffers(fabric: Fabric, net: nn.Module) -> None:
    """Copy the batch-norm statistics of the first process to all. Else each process would attack another model."""
    if fabric.world_size > 1:
        for buffer in net.buffers():
            torch.distributed.broadcast(buffer, src=0)
