"""Reading published datasets: their archives, and the bytes inside. Nothing is unpacked to the disk."""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from steelman.bounded import read_json
from steelman.errors import UserError, shown

Bytes = NDArray[np.uint8]
Arrays = dict[str, Bytes]

PARTS = ("train_images", "train_labels", "test_images", "test_labels")
MEMBER_LIMIT = 256 << 20  # the largest file in these datasets has 47 MB
ARCHIVE_LIMIT = 2 << 30


@dataclass(frozen=True)
class Layout:
    """The names of a dataset's files, and a function from their contents to the four arrays of `PARTS`."""

    files: tuple[str, ...]
    decode: Callable[[Mapping[str, bytes]], Arrays]


def digest(array: Bytes) -> str:
    """The SHA-256 of an array's bytes. It is the same for every archive that holds the array."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def read_folder(folder: Path, files: Sequence[str]) -> dict[str, bytes]:
    """The contents of `files` in `folder`. Each has its own name there, or its name with ``.gz``."""
    return {name: _read_file(folder, name) for name in files}


def _read_file(folder: Path, name: str) -> bytes:
    plain, zipped = folder / name, folder / f"{name}.gz"
    path = plain if plain.is_file() else zipped
    try:
        with plain.open("rb") if path == plain else gzip.open(zipped) as file:
            content = file.read(MEMBER_LIMIT + 1)
    except FileNotFoundError:
        raise UserError(f"{folder}: found neither {name} nor {name}.gz") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path}: cannot be read ({shown(str(error))[1:-1]})") from None
    if len(content) > MEMBER_LIMIT:
        raise UserError(f"{path}: expected at most {MEMBER_LIMIT} bytes, got more")
    return content


def read_tar(path: Path, files: Sequence[str]) -> dict[str, bytes]:
    """The contents of `files` in a ``.tar.gz``, found by their names in any folder of the archive.

    The files are read into memory, so the archive cannot write to the disk. Links and devices are refused. The sizes
    that the archive states have a limit.
    """
    found: dict[str, bytes] = {}
    total = 0
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                total += member.size
                name = PurePosixPath(member.name).name
                if total > ARCHIVE_LIMIT:
                    raise UserError(f"{path}: expected at most {ARCHIVE_LIMIT} bytes inside, got more")
                if name not in files:
                    continue
                if not member.isreg() or member.size > MEMBER_LIMIT or name in found or ".." in member.name.split("/"):
                    raise UserError(f"{path}: refused the member {member.name!r} (a link, a duplicate or too large)")
                content = archive.extractfile(member)
                assert content is not None  # a regular file has contents
                found[name] = content.read()
    except UserError:
        raise
    # tarfile does not catch what its own reading of numbers and texts raises.
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, OverflowError, LookupError) as error:
        raise UserError(f"{path}: damaged archive ({shown(str(error))[1:-1]})") from None
    if missing := [name for name in files if name not in found]:
        raise UserError(f"{path}: not in the archive: {', '.join(missing)}")
    return {name: found[name] for name in files}  # the archive may have another order


def idx(content: bytes, name: str, dimensions: int) -> Bytes:
    """Read an IDX array of bytes: two zeros, the type 8, the rank, the sizes as big-endian integers, the values."""
    start = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) < start:
        raise UserError(f"{name}: expected an IDX file of bytes with {dimensions} dimensions, got {content[:4]!r}")
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    values = np.frombuffer(content, np.uint8, offset=start)
    if values.size != math.prod(shape):
        raise UserError(f"{name}: expected {'x'.join(map(str, shape))} bytes, got {values.size}")
    return values.reshape(shape)


def decode_idx(files: Mapping[str, bytes]) -> Arrays:
    """The four IDX files of MNIST and its relatives."""
    arrays: Arrays = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        images, labels = f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"
        arrays[f"{part}_images"] = idx(files[images], images, 3)[:, None]
        arrays[f"{part}_labels"] = idx(files[labels], labels, 1)
    return arrays


def _records(files: Mapping[str, bytes], names: Sequence[str], labels: int) -> tuple[Bytes, Bytes]:
    width = labels + 3 * 32 * 32
    for name in names:
        if not files[name] or len(files[name]) % width:
            raise UserError(f"{name}: expected records of {width} bytes, got {len(files[name])} bytes")
    rows = np.concatenate([np.frombuffer(files[name], np.uint8).reshape(-1, width) for name in names])
    # CIFAR-100 has two labels for each image. The second is the class; the first is a group of classes.
    return rows[:, labels:].reshape(-1, 3, 32, 32), rows[:, labels - 1]


def decode_cifar(files: Mapping[str, bytes], *, labels: int) -> Arrays:
    """CIFAR's binary version: each record is `labels` label bytes, then 3 x 32 x 32 pixels."""
    test = [name for name in files if name.startswith("test")]
    train_images, train_labels = _records(files, [name for name in files if name not in test], labels)
    test_images, test_labels = _records(files, test, labels)
    return dict(zip(PARTS, (train_images, train_labels, test_images, test_labels), strict=True))


def decode_sprites(files: Mapping[str, bytes]) -> Arrays:
    """CIFAR-10 as six PNG files whose rows are images of 1024 RGB pixels, and two JSON lists of labels."""

    def images(names: Sequence[str]) -> Bytes:
        return np.concatenate([_sprite(files[name], name) for name in names])

    def labels(name: str) -> Bytes:
        try:
            values = np.array(read_json(files[name], what=name))
        except ValueError as error:  # lists of different lengths
            raise UserError(f"{name}: not a JSON list of labels ({error})") from None
        if values.ndim != 1 or values.dtype.kind != "i" or values.min(initial=0) < 0 or values.max(initial=0) > 9:
            raise UserError(f"{name}: expected a list of integers 0 .. 9")
        return values.astype(np.uint8)

    train = images([name for name in files if name.startswith("data_batch")])
    parts = (train, labels("train_lables.json"), images(["test_batch.png"]), labels("test_lables.json"))
    return dict(zip(PARTS, parts, strict=True))


def _sprite(content: bytes, name: str) -> Bytes:
    try:
        with Image.open(io.BytesIO(content), formats=("PNG",)) as picture:
            pixels = np.asarray(picture.convert("RGB"))
    except Exception as error:  # a broken PNG raises many kinds of error
        raise UserError(f"{name}: not a readable PNG ({error})") from None
    if pixels.shape[1] != 32 * 32:
        raise UserError(f"{name}: expected rows of 1024 pixels, got {pixels.shape[1]}")
    return np.ascontiguousarray(pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2))
