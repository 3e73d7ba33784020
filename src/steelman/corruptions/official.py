"""The published sets CIFAR-10-C, CIFAR-100-C and ImageNet-C, read from a user's folder.

The authors of the benchmark ask that published numbers use these files. Images that are generated differ from them.
"""

from __future__ import annotations

import io
import math
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from steelman.arguments import home_of
from steelman.corruptions import CORRUPTIONS, SEVERITIES
from steelman.data.folder import FolderSource
from steelman.data.source import ArraySource, Source, Subset, first, workers_of
from steelman.errors import UserError, shortened, shown, unknown
from steelman.rng import Key

CIFAR = {10: "CIFAR-10-C", 100: "CIFAR-100-C"}  # by the number of classes
CIFAR_SIDE, IMAGENET_SIDE = 32, 224
HEADER_BYTES = 1 << 12  # of a .npy file: its header ends within them. The published files need 128.
READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}  # by the version of the format
LAYOUTS = (
    "labels.npy and <corruption>.npy, as CIFAR-10-C and CIFAR-100-C have them, "
    "or <corruption>/<severity>/<class>/*.JPEG, as ImageNet-C has them"
)


@dataclass(frozen=True)
class Official:
    """A published set in a folder.

    Arguments:
        name: "CIFAR-10-C", "CIFAR-100-C" or "ImageNet-C".
        corruptions: the corruptions that the folder has, by their names in `CORRUPTIONS` and in its order.
        read: a function that gives the images of a corruption and a severity. `cell` checks its arguments.
    """

    name: str
    corruptions: tuple[str, ...]
    read: Callable[[str, int], Source] = field(repr=False, compare=False)

    def cell(self, name: str, severity: int) -> Source:
        """The images of one corruption and one severity: image i is image i of the clean set, corrupted."""
        if name not in self.corruptions:
            raise unknown("corruption", name, self.corruptions)
        if not isinstance(severity, int) or severity not in SEVERITIES:
            raise UserError(f"severity: expected a whole number from 1 to 5, got {shown(severity)}")
        return self.read(name, int(severity))


def open_official(folder: Path, clean: Source) -> Official:
    """The published set in `folder`, whose images are those of the test set `clean`.

    If `clean` is the first part of its test set, the cells have the same part. All headers, folders and class names are
    checked here, so that a mistake is seen before the first image is read.
    """
    folder = home_of("folder", folder)
    try:
        entries = {entry.name for entry in folder.iterdir()}
        arrays = [name for name in CORRUPTIONS if _array(name) in entries]
        folders = [name for name in CORRUPTIONS if (folder / _stem(name)).is_dir()]
        if arrays:
            return _cifar(folder, arrays, clean)
        if folders:
            return _imagenet(folder, folders, clean)
    except OSError as error:
        raise UserError(f"cannot read {error.filename or folder}: {error.strerror or error}") from None
    raise UserError(f"{folder}: expected {LAYOUTS}; got neither")


def _stem(name: str) -> str:
    return name.replace("-", "_")


def _array(name: str) -> str:
    return f"{_stem(name)}.npy"


def _check_shape(name: str, clean: Source, side: int) -> None:
    if tuple(clean.shape) != (3, side, side):
        got = " x ".join(map(str, clean.shape))
        raise UserError(f"{name}: expected a clean set of 3 x {side} x {side} images, got {got}")


def _known(clean: Source) -> Tensor:
    return clean.labels.to("cpu", torch.int64)


def _cifar(folder: Path, found: Sequence[str], clean: Source) -> Official:
    """The set in arrays: each file has all images of severity 1, then those of severity 2, and so on."""
    if (classes := len(clean.classes)) not in CIFAR:
        raise UserError(f"{folder}: expected a clean set of 10 or 100 classes for its .npy files, got {classes}")
    title = CIFAR[classes]
    _check_shape(title, clean, CIFAR_SIDE)
    total = _check_labels(folder / "labels.npy", clean)
    for name in found:
        _images(folder / _array(name), total)

    def read(name: str, severity: int) -> Source:
        pixels = _images(folder / _array(name), total).mapped()
        start = (severity - 1) * (total // len(SEVERITIES))
        part = torch.from_numpy(pixels[start : start + len(clean)]).permute(0, 3, 1, 2)
        return _Mapped(part, _known(clean), clean.classes, name=f"{title} {name} {severity}")

    return Official(title, tuple(found), read)


def _check_labels(path: Path, clean: Source) -> int:
    """Refuse labels that are not those of the clean set. Returns how many labels there are."""
    stored, n, rows = _header(path), len(clean), len(SEVERITIES)
    if stored.dtype.kind not in "iu":
        raise UserError(f"{path}: expected labels as whole numbers, got {shortened(str(stored.dtype))}")
    if len(stored.shape) != 1 or stored.shape[0] % rows or stored.shape[0] < rows * n:
        got = f"{stored.shape[0]:,} labels" if len(stored.shape) == 1 else f"shape {shown(stored.shape)}"
        raise UserError(f"{path}: expected {rows} x {n:,} labels, or {rows} times a larger number, got {got}")
    labels = stored.mapped().reshape(rows, -1)[:, :n].astype(np.int64)
    if wrong := int((labels != _known(clean).numpy()).sum()):
        raise UserError(
            f"{path}: expected the labels of the clean set for each severity, got others for {wrong:,} of {rows * n:,}"
        )
    return stored.shape[0]


def _images(path: Path, total: int) -> _Stored:
    """The header of a file of images, of which `labels.npy` has `total` labels."""
    stored = _header(path)
    if stored.dtype != np.uint8:
        raise UserError(f"{path}: expected images in 8 bits (uint8), got {shortened(str(stored.dtype))}")
    if stored.shape != (total, CIFAR_SIDE, CIFAR_SIDE, 3):
        wanted = f"({total}, {CIFAR_SIDE}, {CIFAR_SIDE}, 3)"
        raise UserError(f"{path}: expected shape {wanted} for {total:,} labels, got {shown(stored.shape)}")
    return stored


@dataclass(frozen=True)
class _Stored:
    """What the header of a .npy file says: the values in it, and the byte at which they begin."""

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    def mapped(self) -> NDArray[Any]:
        """The values, read from the disk when they are needed."""
        try:
            # "c": what is written to the array stays in memory. torch warns of an array that is not writable.
            return np.memmap(self.path, self.dtype, "c", self.offset, self.shape)
        except (OSError, ValueError) as error:  # the file changed after its header was read
            raise UserError(f"{self.path}: cannot be read ({shown(str(error))[1:-1]})") from None


def _header(path: Path) -> _Stored:
    """Read the header of a .npy file, and nothing else. A pickle is refused."""
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):  # a pipe would be waited for, and a device may have no end
            raise UserError(f"{path}: expected a file, got a {'folder' if stat.S_ISDIR(mode) else 'device'}")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = io.BytesIO(file.read(HEADER_BYTES))  # not the file: its header may claim to have gigabytes
        shape, fortran, dtype = READERS[npy.read_magic(start)](start)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"expected the file {path}, found none") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # a damaged header raises many kinds of error
        raise UserError(f"{path}: expected an array in NumPy's format ({shown(str(error))[1:-1]})") from None
    if dtype.hasobject:
        raise UserError(f"{path}: expected numbers, got Python objects, which are never read")
    if fortran:
        raise UserError(f"{path}: expected the values in C order, got Fortran order")
    expected = start.tell() + math.prod(shape) * dtype.itemsize
    if size != expected:
        wanted = shortened(f"{expected:,}")
        raise UserError(f"{path}: expected {wanted} bytes, as its header says, got {size:,}; the file is damaged")
    return _Stored(path, dtype, shape, start.tell())


class _Mapped(ArraySource):
    """Images in a mapped file. They are stored as (N, H, W, C); the batches have the usual layout of memory."""

    def images(self, index: Tensor, key: Key | None = None) -> Tensor:
        return super().images(index, key).contiguous()


def _imagenet(folder: Path, found: Sequence[str], clean: Source) -> Official:
    """The set in folders. `clean` has the same classes."""
    title = "ImageNet-C"
    _check_shape(title, clean, IMAGENET_SIDE)
    for name in found:
        place = folder / _stem(name)
        missing = [str(severity) for severity in SEVERITIES if not (place / str(severity)).is_dir()]
        if missing:
            raise UserError(f"{place}: expected the folders 1, 2, 3, 4 and 5, found none for {', '.join(missing)}")
        for severity in SEVERITIES:
            _check_classes(place / str(severity), clean.classes)

    def read(name: str, severity: int) -> Source:
        place = folder / _stem(name) / str(severity)
        source = _Unchanged(place, workers=workers_of(clean), name=f"{title} {name} {severity}")
        n = len(clean)
        if len(source) < n:
            raise UserError(f"{place}: expected {n:,} images, as the clean set has, got {len(source):,}")
        if wrong := int((source.labels[:n] != _known(clean)).sum()):
            raise UserError(f"{place}: expected the labels of the clean set, got others for {wrong:,} of {n:,} images")
        # Two images of one class could be exchanged. Their labels would not show it.
        for at, (wanted, got) in enumerate(zip(_file_names(clean), _file_names(source), strict=False)):
            if wanted != got:
                raise UserError(
                    f"{place}: expected image {at} to be {shown(wanted)}, as in the clean set, got {shown(got)}"
                )
        return source if len(source) == n else first(source, n)

    return Official(title, tuple(found), read)


def _file_names(source: Source) -> list[str]:
    """The names of the files of a source, without their endings. None are known if it is no folder."""
    if isinstance(source, FolderSource):
        return [source.path(at).stem for at in range(len(source))]
    if isinstance(source, Subset) and isinstance(source.source, FolderSource):
        return [source.source.path(at).stem for at in source.index.tolist()]
    return []


def _check_classes(place: Path, classes: Sequence[str]) -> None:
    names = sorted(entry.name for entry in os.scandir(place) if entry.is_dir() and not entry.name.startswith("."))
    if len(names) != len(classes):
        raise UserError(f"{place}: expected {len(classes)} class folders, as the clean set has, got {len(names)}")
    for got, wanted in zip(names, classes, strict=True):
        if got != wanted:
            raise UserError(f"{place}: expected the class names of the clean set, such as {wanted!r}, got {shown(got)}")


class _Unchanged(FolderSource):
    """Images in folders that have the right size already. Nothing is resized, cropped or mirrored."""

    def __init__(self, root: Path, *, workers: int, name: str) -> None:
        super().__init__(root, size=IMAGENET_SIDE, resize=IMAGENET_SIDE, workers=workers, name=name)

    def images(self, index: Tensor, key: Key | None = None) -> Tensor:  # noqa: ARG002 - they are for evaluations
        return super().images(index)

    def _centre(self, picture: Image.Image) -> Image.Image:
        if picture.size != (self.size, self.size):
            got = " x ".join(map(str, picture.size))
            raise UserError(f"{self.root}: expected images of {self.size} x {self.size} pixels, got one of {got}")
        return picture
