"""Sources: they give images in [0, 1] by sample index. Also subsets, splits and batches of a source."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from steelman.arguments import check_plain
from steelman.errors import UserError
from steelman.rng import Key

UNNAMED = "data"  # the name of a source without a name, in the records of an evaluation
NORMALISED = "; the model must normalise its own images: steelman.wrap(model, mean=..., std=...)"
MOST_CLASSES = 1_000_000  # a label beyond is a mistake, and a name for each class below it would fill the memory


@runtime_checkable
class Source(Protocol):
    """Labelled images by index. `shape` is (C, H, W). All labels are in memory. Images are read when asked for.

    A source may have a `name` for the records of an evaluation; the default is "data". A source that reads files may
    have `workers`, the number of processes that read them. The default is 0: the calling process reads.
    """

    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def shape(self) -> tuple[int, int, int]: ...
    @property
    def labels(self) -> Tensor: ...

    def __len__(self) -> int: ...

    def images(self, index: Tensor, key: Key | None = None) -> Tensor:
        """The images at `index` as float32 in [0, 1], shape (N, C, H, W).

        Without a key they are images for an evaluation, and always the same. With a key they are training images, which
        may be random. They depend on (key, sample index) alone. A source in memory ignores the key.
        """
        ...


class ArraySource:
    """Images in memory: floating point within `bounds`, or uint8. `images` divides uint8 by 255.

    >>> source = ArraySource(torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 0, 1]))
    >>> source.shape, source.classes, source.images(torch.tensor([2])).shape
    ((1, 8, 8), ('0', '1'), torch.Size([1, 1, 8, 8]))
    """

    def __init__(
        self,
        images: Tensor | NDArray[Any],
        labels: Tensor | NDArray[Any],
        classes: Sequence[str] | None = None,
        bounds: tuple[float, float] = (0.0, 1.0),
        name: str = UNNAMED,
    ) -> None:
        """Without `classes`, the classes are 0 up to the largest label. More classes, without images, may exist."""
        self.name, self.named = name, classes is not None
        self._images = _checked_images(_tensor(images, "images"), bounds)
        self.labels = _checked_labels(_tensor(labels, "labels"), len(self._images), classes)
        self.classes = tuple(classes if classes is not None else map(str, range(int(self.labels.max()) + 1)))
        channels, height, width = self._images.shape[1:]
        self.shape = (channels, height, width)

    def __len__(self) -> int:
        return len(self._images)

    def images(self, index: Tensor, key: Key | None = None) -> Tensor:  # noqa: ARG002
        batch = self._images[index.to(self._images.device)]
        return batch.to(torch.float32).div_(255) if batch.dtype == torch.uint8 else batch.to(torch.float32)


def _tensor(values: Tensor | NDArray[Any], what: str) -> Tensor:
    if isinstance(values, Tensor):
        check_plain(what, values)
        return values.detach()
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf" or values.itemsize > 8:
        got = f"an array of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
        raise UserError(f"expected {what} as a tensor or an array of numbers, got {got}")
    # torch refuses arrays in another byte order, and warns of arrays that are not writable.
    native = values.astype(values.dtype.newbyteorder("="), copy=not values.flags.writeable)
    return torch.from_numpy(np.ascontiguousarray(native))


def _checked_images(images: Tensor, bounds: tuple[float, float]) -> Tensor:
    shape = tuple(images.shape)
    if len(shape) == 3:
        images = images[:, None]
    elif len(shape) != 4:
        raise UserError(f"expected images of shape (N, C, H, W) or (N, H, W), got {shape}")
    elif shape[3] in (1, 3) and min(shape[1:3]) > 4:
        raise UserError(f"expected images of shape (N, C, H, W), got {shape}, which looks like (N, H, W, C); transpose")
    if not images.numel():
        raise UserError(f"expected at least one image, got shape {shape}")
    if images.dtype == torch.uint8 and bounds == (0.0, 1.0):
        return images
    if not images.is_floating_point():
        kinds = (
            "uint8, or as floating point in [0, 1]" if bounds == (0.0, 1.0) else f"floating point in {_range(bounds)}"
        )
        raise UserError(f"expected images as {kinds}, got {images.dtype}")
    low, high = (float(value) for value in images.aminmax())
    if not (np.isfinite(low) and np.isfinite(high)):
        bad = ~images.isfinite()
        first = int(bad.flatten(1).any(1).nonzero()[0])
        raise UserError(f"expected finite pixels, got {int(bad.sum())} NaN or infinite, the first in image {first}")
    if low < bounds[0] or high > bounds[1]:
        hint = "; divide by 255" if bounds == (0.0, 1.0) and high <= 255 else ""
        hint = NORMALISED if low < bounds[0] or high <= 2 else hint
        raise UserError(f"expected values in {_range(bounds)}, got {low:g} .. {high:g}{hint}")
    return images


def _range(bounds: tuple[float, float]) -> str:
    return f"[{bounds[0]:g}, {bounds[1]:g}]"


def _checked_labels(labels: Tensor, n: int, classes: Sequence[str] | None) -> Tensor:
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise UserError(f"expected integer labels, got {labels.dtype}")
    if labels.shape != (n,):
        raise UserError(f"expected one label for each of {n} images, got labels of shape {tuple(labels.shape)}")
    labels = labels.to("cpu", torch.int64)
    if classes is not None and len(set(classes)) != len(classes):
        raise UserError(f"expected different class names, got {list(classes)}")
    if classes is None and int(labels.max()) >= MOST_CLASSES:
        raise UserError(f"labels: expected fewer than {MOST_CLASSES:,} classes, got label {int(labels.max())}")
    wrong = (labels < 0) | (labels >= (len(classes) if classes is not None else labels.max() + 1))
    if wrong.any():
        first = int(wrong.nonzero()[0])
        choice = f"0 .. {len(classes) - 1}" if classes is not None else "0 or more"
        raise UserError(f"label {int(labels[first])} at index {first}, expected {choice}")
    return labels


class Subset:
    """The samples of `source` at `index`, with new numbers from 0. Their noise depends on the old numbers."""

    def __init__(self, source: Source, index: Tensor) -> None:
        index = index.to("cpu", torch.int64)
        if index.ndim != 1 or (len(index) and not 0 <= int(index.min()) <= int(index.max()) < len(source)):
            raise UserError(f"expected a list of indices in 0 .. {len(source) - 1}")
        self.source, self.index = source, index
        self.name, self.workers, self.named = name_of(source), workers_of(source), knows_classes(source)
        self.labels = source.labels[index]
        self.classes, self.shape = source.classes, source.shape

    def __len__(self) -> int:
        return len(self.index)

    def images(self, index: Tensor, key: Key | None = None) -> Tensor:
        return self.source.images(self.index[index.to("cpu")], key)


def first(source: Source, n: int | None = None) -> Subset:
    """A view of the first `n` samples, or of all if there are fewer. Its `name` and `workers` may be set.

    >>> len(first(ArraySource(torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 0, 1])), 3))
    3
    """
    if n is not None and n < 1:
        raise UserError(f"samples: expected at least 1, got {n}")
    return Subset(source, torch.arange(len(source) if n is None else min(n, len(source))))


def name_of(source: Source) -> str:
    """The name of a source in the records of an evaluation."""
    return str(getattr(source, "name", UNNAMED))


def workers_of(source: Source) -> int:
    """The number of processes that read a source's files."""
    return int(getattr(source, "workers", 0))


def knows_classes(source: Source) -> bool:
    """Whether a source knows all its classes. For plain tensors they are guessed from the labels."""
    return bool(getattr(source, "named", True))


def split(source: Source, validation: int, seed: int) -> tuple[Subset, Subset]:
    """Two disjoint views of a source: for training, and for validation with `validation` samples.

    Each class has about the same share of both. Each class keeps at least one training image.
    """
    labels = source.labels
    counts = torch.bincount(labels, minlength=len(source.classes))
    most = len(source) - int((counts > 0).sum())
    if not 1 <= validation <= most:
        raise UserError(f"expected a validation set of 1 .. {most} of the {len(source)} images, got {validation}")
    # Each class gets its share, rounded down. The other images go, one by one, to the class furthest below its share.
    share = validation * counts
    quota = share // len(source)
    for _ in range(validation - int(quota.sum())):
        behind = (share - quota * len(source)).masked_fill(quota >= counts - 1, torch.iinfo(torch.int64).min)
        quota[behind.argmax()] += 1
    order = Key(seed).fold("split").permutation(len(source))
    by_class = order[labels[order].argsort(stable=True)]
    rank = torch.arange(len(source)) - (counts.cumsum(0) - counts)[labels[by_class]]
    held_out = rank < quota[labels[by_class]]
    return Subset(source, by_class[~held_out].sort().values), Subset(source, by_class[held_out].sort().values)


def batches(n: int, batch_size: int, key: Key | None, drop_last: bool = False) -> list[Tensor]:
    """The batches of one epoch over `n` samples, as indices: shuffled by `key`, or in order without a key.

    >>> batches(5, 2, None)
    [tensor([0, 1]), tensor([2, 3]), tensor([4])]
    """
    if batch_size < 1:
        raise UserError(f"expected a batch size of at least 1, got {batch_size}")
    if drop_last and 0 < n < batch_size:
        raise UserError(f"expected a batch size of at most {n}, got {batch_size}: a last, smaller batch is dropped")
    order = torch.arange(n) if key is None else key.permutation(n)
    parts = [order[start : start + batch_size] for start in range(0, n, batch_size)]
    return parts[:-1] if drop_last and n % batch_size else parts


def stream(
    source: Source, batches: Sequence[Tensor], key: Key | None, workers: int | None = None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (images, labels, index) for each of `batches`, in their order.

    `workers` processes read a source that is not in memory. By default it is the source's own number. The images do not
    depend on the number of processes. To resume an epoch, pass the rest of its batches.
    """
    decoded: Iterator[Tensor | UserError]
    workers = workers_of(source) if workers is None else workers
    if workers > 0 and not _in_memory(source):
        # Without its own generator, the loader would draw its seed from torch's global one, and so change it.
        loader = DataLoader(
            _Batches(source, list(batches), key),
            batch_size=None,
            num_workers=workers,
            generator=torch.Generator().manual_seed(0),
        )
        decoded = iter(loader)
    else:
        decoded = (source.images(index, key) for index in batches)
    try:
        for index, images in zip(batches, decoded, strict=True):
            if isinstance(images, UserError):
                raise images
            yield images, source.labels[index.to("cpu")], index
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise UserError(
            f"a process that reads images died; a common cause is too little memory: try fewer workers ({error})"
        ) from error


def _in_memory(source: Source) -> bool:
    while isinstance(source, Subset):
        source = source.source
    return isinstance(source, ArraySource)


@dataclass(frozen=True)
class _Batches(Dataset[Tensor | UserError]):
    """A dataset for `DataLoader` whose items are whole batches."""

    source: Source
    batches: list[Tensor]
    key: Key | None

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, item: int) -> Tensor | UserError:
        try:
            return self.source.images(self.batches[item], self.key)
        except UserError as error:
            # An error raised in a worker would reach the user with the worker's traceback.
            return error
