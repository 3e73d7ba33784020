"""Feature denoising: a block that can end each stage of a residual backbone."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steelman.errors import unknown

FILTERS = ("softmax", "dot", "mean", "median")
EMBEDDING_SPREAD = 0.01


class Denoise(nn.Module):
    """out = x + bn(conv1x1(f(x))), where f filters a feature map over its N positions.

    softmax:  f(x)_i = sum_j softmax_j(theta(x_i) . phi(x_j) / sqrt(d)) x_j       mean:    of the 3x3 positions around i
    dot:      f(x)_i = sum_j (x_i . x_j) x_j / N                                  median:  of the same, in each channel

    The embeddings theta and phi of "softmax" are 1x1 convolutions to d = channels / 2. The 3x3 filters repeat the edge
    of the map outside it, so they work on maps of any size. The scale of the batch norm starts at zero, so the block
    starts as the identity. The batch norm, d, and the standard deviation 0.01 of the embeddings' first values are from
    the authors' code.

    Xie et al. (2019), "Feature Denoising for Improving Adversarial Robustness": Fig. 4 (the block), section 4.2 (the
    filters), section 6 (one block at the end of each stage).
    """

    def __init__(self, channels: int, kind: str) -> None:
        super().__init__()
        if not isinstance(kind, str) or kind not in FILTERS:
            raise unknown("denoise", kind, FILTERS)
        self.kind = kind
        if kind == "softmax":
            # Not nn.Conv2d: the backbone draws new weights for each one, and would replace these.
            shape = (max(1, channels // 2), channels, 1, 1)
            self.theta, self.phi = (nn.Parameter(EMBEDDING_SPREAD * torch.randn(shape)) for _ in range(2))
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        nn.init.zeros_(self.bn.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.bn(self.conv(self.filtered(x)))
        return out

    def filtered(self, x: Tensor) -> Tensor:
        """f(x)."""
        if self.kind == "softmax":
            theta, phi = F.conv2d(x, self.theta).flatten(2), F.conv2d(x, self.phi).flatten(2)
            return embedded(x.flatten(2), theta, phi).view_as(x)
        if self.kind == "dot":
            return dot(x.flatten(2)).view_as(x)
        return F.avg_pool2d(edged(x), 3, stride=1) if self.kind == "mean" else median(x)

    def extra_repr(self) -> str:
        return self.kind


def embedded(x: Tensor, theta: Tensor, phi: Tensor) -> Tensor:
    """x softmax(theta^T phi / sqrt(d))^T, for maps of shape (images, channels, positions)."""
    weights = (theta.mT @ phi / math.sqrt(theta.shape[1])).softmax(dim=-1)
    return x @ weights.mT


def dot(x: Tensor) -> Tensor:
    """x x^T x / N, in the cheaper order. The division comes first: the sums would overflow in half precision."""
    channels, positions = x.shape[1:]
    scaled = x.mT / positions
    return (x @ scaled) @ x if channels < positions else x @ (scaled @ x)


def median(x: Tensor) -> Tensor:
    """The median of the 3x3 positions around each position. It sorts, because that is repeatable on every device."""
    height, width = x.shape[2:]
    wide = edged(x)
    around = [wide[:, :, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return torch.stack(around, dim=-1).sort(dim=-1, stable=True).values[..., 4]


def edged(x: Tensor) -> Tensor:
    """The map with its edge repeated around it. It concatenates, because that gradient is repeatable everywhere."""
    x = torch.cat([x[:, :, :1], x, x[:, :, -1:]], dim=2)
    return torch.cat([x[..., :1], x, x[..., -1:]], dim=3)


def denoised(channels: int, kind: str) -> list[nn.Module]:
    """The modules at the end of a backbone's stage: one block, or none for "none"."""
    if kind == "none":
        return []
    if not isinstance(kind, str) or kind not in FILTERS:
        raise unknown("denoise", kind, ("none", *FILTERS))
    return [Denoise(channels, kind)]
