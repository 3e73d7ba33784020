"""Any map-style torch Dataset as a source."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from steelman.data.datasets import DATASETS
from steelman.data.source import NORMALISED, ArraySource, Source
from steelman.errors import UserError, shown
from steelman.rng import Key

TRIED = 4  # how many samples are read twice, to see whether they are the same both times


class TorchSource:
    """A map-style Dataset of (image, label). Images are in [0, 1], or have 8 bits and are divided by 255.

    Before each sample, the global generators of Python, NumPy and torch are seeded by the key and the sample's index.
    Afterwards they are as before. So a random transform depends on the sample and the epoch alone, not on batches or
    processes. `exact` is False if a sample is different the second time: a transform has its own generator.
    """

    def __init__(self, dataset: Any, name: str = "data", workers: int = 0) -> None:
        if isinstance(dataset, DataLoader):
            raise UserError(
                "expected a Dataset, got a DataLoader: a run must choose the order of the samples itself, so that it "
                "can resume exactly; give loader.dataset, and the batch size as batch_size"
            )
        if isinstance(dataset, IterableDataset) or not (
            hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        ):
            raise UserError(
                f"expected a Dataset with a length and samples by index, got {type(dataset).__name__}: a run chooses "
                "the order of the samples itself"
            )
        if len(dataset) == 0:
            raise UserError("expected at least one sample, got an empty Dataset")
        self.dataset, self.name, self.workers = dataset, name, workers
        first, _ = self._sample(0, None)
        self.eight_bit = first.dtype == torch.uint8
        self.shape = (int(first.shape[0]), int(first.shape[1]), int(first.shape[2]))
        self.labels = self._labels()
        self.classes = self._classes()
        tried = torch.arange(min(TRIED, len(dataset)))
        key = Key(0).fold("tried")
        self.exact = torch.equal(self.images(tried, key), self.images(tried, key))

    def __len__(self) -> int:
        return len(self.dataset)

    def images(self, index: Tensor, key: Key | None = None) -> Tensor:
        rows = []
        for place in index.tolist():
            image, label = self._sample(place, key)
            if tuple(image.shape) != self.shape:
                raise UserError(
                    f"sample {place}: expected an image of shape {self.shape}, as the first has, got "
                    f"{tuple(image.shape)}; let the Dataset resize its images"
                )
            if label != int(self.labels[place]):
                raise UserError(f"sample {place}: its label was {int(self.labels[place])} and is now {label}")
            rows.append(image)
        x = torch.stack(rows)
        x = x.to(torch.float32).div_(255) if x.dtype == torch.uint8 else x.to(torch.float32)
        low, high = (float(end) for end in x.aminmax())
        if not (low >= 0 and high <= 1):  # also True for NaN
            hint = "; divide by 255" if low >= 0 and 2 < high <= 255 else ""
            hint = hint or NORMALISED
            raise UserError(f"expected pixels in [0, 1], got {low:g} .. {high:g}{hint}")
        return x

    def _sample(self, place: int, key: Key | None) -> tuple[Tensor, int]:
        """One sample: the image as a tensor, and the label as a number."""
        with _seeded((key or Key(0).fold("evaluation")).fold("sample", place).integer()):
            try:
                item = self.dataset[place]
            except (IndexError, KeyError) as error:
                raise UserError(f"the Dataset has {len(self.dataset)} samples, but none at {place}: {error}") from None
        if not isinstance(item, Sequence) or len(item) != 2:
            got = f"{len(item)} values" if isinstance(item, Sequence) else type(item).__name__
            raise UserError(f"sample {place}: expected (image, label), got {got}")
        image, label = item
        return _image(image, place), _label(label, place)

    def _labels(self) -> Tensor:
        """All labels. They come from the Dataset's list `targets`, if there is one: reading every image takes long."""
        own = getattr(self.dataset, "targets", None)
        if own is not None and len(own) == len(self.dataset):
            labels = torch.as_tensor(own)
            if labels.dim() == 1 and not labels.is_floating_point():
                return labels.to(torch.int64)
        return torch.tensor([self._sample(place, None)[1] for place in range(len(self.dataset))])

    def _classes(self) -> tuple[str, ...]:
        own, most = getattr(self.dataset, "classes", None), int(self.labels.max()) + 1
        if int(self.labels.min()) < 0:
            raise UserError(f"expected labels of 0 or more, got {int(self.labels.min())}")
        if isinstance(own, Sequence) and len(own) >= most and len(set(map(str, own))) == len(own):
            return tuple(map(str, own))
        return tuple(map(str, range(most)))


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Inside, the global generators start at `seed`. Afterwards they are as before."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            torch.default_generator.manual_seed(seed & (2**63 - 1))
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _image(value: Any, place: int) -> Tensor:
    if isinstance(value, Image.Image):
        if value.mode not in ("L", "RGB"):
            raise UserError(f"sample {place}: expected a grey or RGB image, got one of mode {value.mode}")
        value = np.asarray(value)
        value = value[None] if value.ndim == 2 else value.transpose(2, 0, 1)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.array(value))  # a copy: a picture's own pixels cannot be written to
    if not isinstance(value, Tensor):
        raise UserError(f"sample {place}: expected an image as a tensor or an array, got {type(value).__name__}")
    if value.dim() == 2:
        value = value[None]
    if value.dim() != 3:
        raise UserError(f"sample {place}: expected an image of shape (C, H, W), got {tuple(value.shape)}")
    if value.dtype != torch.uint8 and not value.is_floating_point():
        raise UserError(f"sample {place}: expected pixels in [0, 1] or with 8 bits, got {value.dtype}")
    image: Tensor = value.detach()
    return image


def _label(value: Any, place: int) -> int:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point():
        value = value.item()
    if isinstance(value, np.integer):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"sample {place}: expected a label that is a whole number, got {value!r}")
    return value


def as_source(data: object, what: str = "data", bounds: tuple[float, float] = (0.0, 1.0)) -> Source:
    """A source from (images, labels) as tensors or arrays, from a source, or from a map-style torch Dataset."""
    if isinstance(data, str | os.PathLike):
        name, part = data if data in DATASETS else "mnist", "test" if what == "test" else "train"
        raise UserError(
            f"{what}: expected images and labels, got {shown(data)}; give (images, labels), a torch Dataset or, after "
            f"'import steelman.data', steelman.data.load({name!r}).{part}"
        )
    if isinstance(data, tuple | list):
        if len(data) != 2:
            raise UserError(
                f"{what}: expected (images, labels), got {len(data)} values; put all images in one tensor and all "
                "labels in another, or give a torch Dataset"
            )
        images, labels = data
        return ArraySource(images, labels, bounds=bounds)
    if isinstance(data, Source):
        return data
    if isinstance(data, Tensor | np.ndarray):
        raise UserError(f"{what}: expected (images, labels), got images alone")
    if bounds != (0.0, 1.0):
        raise UserError(
            f"{what}: a Dataset gives images in [0, 1], and the threat model's range is {bounds[0]:g} .. "
            f"{bounds[1]:g}; give tensors, or a threat model of that range"
        )
    try:
        return TorchSource(data)
    except UserError as error:
        raise UserError(f"{what}: {error}") from None
