"""The accuracy of a model during its training: on held-out training images, at the target radius."""

from __future__ import annotations

import torch
from lightning_fabric import Fabric
from torch import nn

from steelman.attacks.base import logits_of, untouched
from steelman.data.source import Source, batches, stream
from steelman.rng import Key
from steelman.threat import ThreatModel
from steelman.training.processes import sums
from steelman.training.settings import Compute, Validation


def score(
    net: nn.Module, source: Source, watch: Validation, threat: ThreatModel, key: Key, fabric: Fabric, compute: Compute
) -> tuple[float, float]:
    """Clean and robust accuracy on the first images of `source`. Each process measures its share of them."""
    n = min(len(source), watch.samples)
    shares = [share for index in batches(n, 500, None) if len(share := index[fabric.global_rank :: fabric.world_size])]
    clean = robust = 0
    for x, y, index in stream(source, shares, None, compute.workers):
        x, y, index = x.to(fabric.device), y.to(fabric.device), index.to(fabric.device)  # noqa: PLW2901
        x_adv = watch.attack(net, x, y, threat, index=index, key=key)
        with untouched(net), torch.no_grad():
            right = logits_of(net, x).argmax(dim=1) == y
            clean += int(right.sum())
            robust += int((right & (logits_of(net, x_adv).argmax(dim=1) == y)).sum())
    clean_sum, robust_sum = sums(fabric, clean, robust)
    return clean_sum / n, robust_sum / n
