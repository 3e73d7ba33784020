"""The datasets by name: one is built in, some can be fetched, and two read your own images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import validate_call
from torch import Tensor

from steelman.arguments import home_of
from steelman.data.folder import FolderSource
from steelman.data.formats import PARTS
from steelman.data.published import FETCHABLE, Fetchable
from steelman.data.source import MOST_CLASSES, UNNAMED, ArraySource, Source, name_of, split
from steelman.data.store import read, stored
from steelman.errors import UserError, shown
from steelman.settings import make

MOST_UNPACKED, MOST_RATIO = 1 << 30, 100  # above both, an .npz file is refused


@dataclass(frozen=True)
class Dataset:
    """A training and a test set of the same classes and the same image shape."""

    name: str
    train: Source
    test: Source

    def __post_init__(self) -> None:
        if self.train.classes != self.test.classes:
            only = set(self.train.classes) ^ set(self.test.classes)
            raise UserError(f"{self.name}: expected the same classes to train and to test; only in one: {sorted(only)}")
        if self.train.shape != self.test.shape:
            raise UserError(f"{self.name}: expected one image shape, got {self.train.shape} and {self.test.shape}")
        for part, source in (("train", self.train), ("test", self.test)):
            if name_of(source) == UNNAMED:  # an evaluation records this name
                object.__setattr__(source, "name", f"{self.name} {part}")

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes."""
        return self.train.classes

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        return self.train.shape


@validate_call
def digits() -> Dataset:
    """1797 handwritten digits, built in: 1437 to train, 360 to test; 1 x 8 x 8, 10 classes."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).to(torch.float32) / 16
    labels = torch.from_numpy(bunch.target)
    both = split(ArraySource(images, labels), 360, seed=0)
    names = tuple("0123456789")
    train, test = (ArraySource(images[part.index], labels[part.index], names) for part in both)
    return Dataset("digits", train, test)


_known: dict[Path, tuple[int, int, int]] = {}  # files whose arrays were checked: inode, size and time of change


def _checked(item: Fetchable, path: Path) -> dict[str, Tensor]:
    """The arrays of a fetched dataset. Others under its name are refused; the check is made once for each file."""
    found = path.stat()
    mark = (found.st_ino, found.st_size, found.st_mtime_ns)
    tensors, _ = read(path)
    if _known.get(path) != mark:
        try:
            item.check({name: value.numpy() for name, value in tensors.items()})
        except UserError as error:
            raise UserError(f"{path} is not {item.name}: {error}; run: steelman data get {item.name}") from None
        _known[path] = mark
    return tensors


def published(item: Fetchable) -> Callable[..., Dataset]:
    """A function that loads a fetched dataset. Its `root` is the folder of the dataset, if not the usual one."""

    @validate_call
    def dataset(*, root: Path | None = None) -> Dataset:
        path = stored(item.name, root)
        if not path.is_file():
            where = f" (looked for {path})" if root is not None else ""
            raise UserError(f"{item.name} is not on this machine{where}; run: steelman data get {item.name}")
        tensors = _checked(item, path)
        train, test = (
            ArraySource(tensors[f"{part}_images"], tensors[f"{part}_labels"], item.classes)
            for part in ("train", "test")
        )
        return Dataset(item.name, train, test)

    dataset.__doc__ = item.summary
    return dataset


@validate_call
def folder(*, root: Path | None = None, size: int = 224, resize: int = 256, test: str | None = None) -> Dataset:
    """Your images: root/train/<class>/*.jpg, and root/val or root/test. If you have both, `test` names one."""
    base = _given("folder", root)
    held_out = [name for name in ("val", "test") if (base / name).is_dir()] if test is None else [test]
    if len(held_out) != 1:
        found = "both" if held_out else "neither"
        raise UserError(f"{base}: expected a folder val or test, found {found}; name the folder to test on: test=NAME")
    parts = (FolderSource(base / part, size=size, resize=resize) for part in ("train", held_out[0]))
    return Dataset("folder", *parts)


@validate_call
def arrays(*, root: Path | None = None) -> Dataset:
    """Your arrays: train_images, train_labels, test_images and test_labels in one .npz, or as .npy in a folder."""
    base = _given("arrays", root)
    found = {name: _array(base, name) for name in PARTS}
    # The labels of both parts, because a small test set may lack a class.
    labels = [found[name] for name in ("train_labels", "test_labels") if found[name].size]
    most = max((int(values.max()) for values in labels if values.dtype.kind in "iub"), default=0)
    if most >= MOST_CLASSES:
        raise UserError(f"labels: expected fewer than {MOST_CLASSES:,} classes, got label {most}")
    classes = [str(i) for i in range(1 + most)]
    train, test = (_source(found, part, classes) for part in ("train", "test"))
    return Dataset("arrays", train, test)


def _given(name: str, root: Path | None) -> Path:
    if root is None:
        raise UserError(f"dataset {name!r} needs root=PATH, where your images are")
    if not (place := home_of("root", root)).exists():
        raise UserError(f"dataset {name!r}: expected an existing root, got {shown(str(root))}")
    return place


def _source(found: dict[str, NDArray[Any]], part: str, classes: list[str]) -> ArraySource:
    try:
        return ArraySource(found[f"{part}_images"], found[f"{part}_labels"], classes)
    except UserError as error:
        raise UserError(f"{part}: {error}") from None


def _array(base: Path, name: str) -> NDArray[Any]:
    path = base / f"{name}.npy" if base.is_dir() else base
    try:
        if base.is_dir():
            # "c" reads from the disk only as needed, and gives a writable array, which torch needs.
            content = np.load(path, mmap_mode="c", allow_pickle=False)
        else:
            with np.load(path, allow_pickle=False) as archive:
                _check_packed(archive)
                content = archive[name]
    except FileNotFoundError:
        raise UserError(f"expected the file {path}, found none") from None
    except KeyError:
        raise UserError(f"{path}: expected the arrays {', '.join(PARTS)}; there is no {name}") from None
    except Exception as error:  # a damaged file, or one of another format, raises many kinds of error
        raise UserError(f"{path}: cannot be read ({shown(str(error))[1:-1]})") from None
    if not isinstance(content, np.ndarray):
        raise UserError(f"{path}: expected one array, got {type(content).__name__}")
    return content


def _check_packed(archive: Any) -> None:
    """Refuse an .npz file of few bytes whose arrays would fill the memory."""
    parts = archive.zip.infolist()
    packed, size = (sum(getattr(part, name) for part in parts) for name in ("compress_size", "file_size"))
    if size > MOST_UNPACKED and size > MOST_RATIO * packed:
        raise UserError(f"its arrays take {size:,} bytes, and the file only {packed:,}; save them with numpy.savez")


DATASETS: dict[str, Callable[..., Dataset]] = {
    "digits": digits,
    **{name: published(item) for name, item in FETCHABLE.items()},
    "folder": folder,
    "arrays": arrays,
}


def load(name: str, /, **options: Any) -> Dataset:
    """Load the dataset that `DATASETS` calls `name`, with its options.

    >>> data = load("digits")
    >>> len(data.train), len(data.test), data.num_classes, data.shape
    (1437, 360, 10, (1, 8, 8))
    """
    return make("dataset", DATASETS, name, options)
