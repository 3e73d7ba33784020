"""The published datasets themselves, fetched once into the usual folder (or STEELMAN_DATA) and kept there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from steelman.data import Dataset, get, load, stream
from steelman.data.formats import PARTS, digest
from steelman.data.published import FETCHABLE
from steelman.data.source import Source, batches
from steelman.data.store import read
from steelman.errors import UserError

pytestmark = pytest.mark.real_data


def fetched(name: str) -> Dataset:
    try:
        get(name)
    except UserError as error:
        pytest.skip(f"{name} cannot be had here: {error}")
    return load(name)


def mean(source: Source) -> torch.Tensor:
    order = batches(len(source), 5000, None)
    total = sum((x.double().mean((2, 3)).sum(0) for x, _, _ in stream(source, order, None)), torch.zeros(()))
    return total / len(source)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_the_stored_arrays_are_the_published_ones(name: str) -> None:
    fetched(name)
    path: Path = get(name)
    tensors, meta = read(path)
    assert meta["name"] == name
    assert {part: digest(tensors[part].numpy()) for part in PARTS} == FETCHABLE[name].digests


def test_mnist() -> None:
    data = fetched("mnist")
    assert (len(data.train), len(data.test), data.shape, data.num_classes) == (60000, 10000, (1, 28, 28), 10)
    assert data.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert data.test.labels[:5].tolist() == [7, 2, 1, 0, 4]
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert torch.bincount(data.train.labels).tolist() == counts
    assert mean(data.train).tolist() == pytest.approx([0.1307], abs=5e-5)


def test_fashion_mnist() -> None:
    data = fetched("fashion-mnist")
    assert (len(data.train), len(data.test), data.shape) == (60000, 10000, (1, 28, 28))
    assert torch.bincount(data.train.labels).tolist() == [6000] * 10
    assert data.classes[int(data.train.labels[0])] == "ankle boot"
    assert mean(data.train).tolist() == pytest.approx([0.2860], abs=5e-5)


def test_cifar10() -> None:
    data = fetched("cifar10")
    assert (len(data.train), len(data.test), data.shape, data.num_classes) == (50000, 10000, (3, 32, 32), 10)
    assert [data.classes[label] for label in data.train.labels[:5]] == ["frog", "truck", "truck", "deer", "automobile"]
    assert data.test.labels[:5].tolist() == [3, 8, 8, 0, 6]
    assert torch.bincount(data.train.labels).tolist() == [5000] * 10
    assert torch.bincount(data.test.labels).tolist() == [1000] * 10
    assert mean(data.train).tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=5e-5)


def test_cifar10_rows_and_columns_are_not_swapped() -> None:
    """Skies are above the ground: the top rows are brighter than the bottom ones, the left like the right."""
    x = fetched("cifar10").train.images(torch.arange(5000)).mean((0, 1))
    assert x[:4].mean() > x[-4:].mean() + 0.03
    assert abs(x[:, :4].mean() - x[:, -4:].mean()) < 0.01
