"""A small network and the digits, for the examples to run with. Yours take their place."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import steelman


class Digits(Dataset[tuple[Tensor, int]]):
    """The embedded digits as any torch Dataset: images of 1 x 8 x 8 in [0, 1], and labels."""

    def __init__(self, train: bool) -> None:
        data = steelman.DATASETS["digits"]()
        source, n = (data.train, 1000) if train else (data.test, 150)
        self.tensors = source.images(torch.arange(n)), source.labels[:n]

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.tensors[0][index], int(self.tensors[1][index])


def network() -> nn.Module:
    """A small convolutional network that gives ten logits."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
