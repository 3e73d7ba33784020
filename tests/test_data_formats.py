"""Reading the archives and the files of published datasets, whole ones and bad ones."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from steelman.data import formats
from steelman.data.formats import PARTS, read_tar
from steelman.data.published import CIFAR10, CIFAR100, IDX, SPRITES
from steelman.errors import UserError
from tests import data_helpers as helpers
from tests.data_helpers import tar_bytes, write_files

COLOUR = helpers.tiny_arrays(channels=3, side=32)


def same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(found[name], expected[name]) for name in PARTS)


def test_cifar10_binary_whatever_the_order_in_the_archive(tmp_path: Path) -> None:
    files = helpers.cifar10_files(COLOUR)
    shuffled = {f"cifar-10-batches-bin/{name}": files[name] for name in reversed(files)}
    path = tmp_path / "a.tar.gz"
    path.write_bytes(tar_bytes({"cifar-10-batches-bin/readme.html": b"hello", **shuffled}))
    assert same(CIFAR10.decode(read_tar(path, CIFAR10.files)), COLOUR)


def test_cifar100_binary_takes_the_fine_labels() -> None:
    files = {
        f"{part}.bin": helpers.cifar_bytes(
            COLOUR[f"{part}_images"], COLOUR[f"{part}_labels"] * 0 + 77, COLOUR[f"{part}_labels"]
        )
        for part in ("train", "test")
    }
    assert same(CIFAR100.decode(files), COLOUR)
    with pytest.raises(UserError, match=r"train\.bin: expected records of 3074 bytes"):
        CIFAR100.decode({**files, "train.bin": files["train.bin"][:-1]})


def test_sprites() -> None:
    files = helpers.sprite_files(COLOUR)
    assert same(SPRITES.decode(files), COLOUR)
    with pytest.raises(UserError, match=r"test_batch\.png: not a readable PNG"):
        SPRITES.decode({**files, "test_batch.png": files["test_batch.png"][:500]})
    with pytest.raises(UserError, match=r"test_lables\.json: expected a list of integers 0 \.\. 9"):
        SPRITES.decode({**files, "test_lables.json": b"[1, 11]"})


def test_idx_with_a_wrong_head_or_length() -> None:
    packed = helpers.idx_files(helpers.tiny_arrays())
    files = {name: gzip.decompress(packed[f"{name}.gz"]) for name in IDX.files}
    with pytest.raises(UserError, match="expected 40x40x40 bytes, got 63999"):
        IDX.decode({**files, IDX.files[0]: files[IDX.files[0]][:-1]})
    with pytest.raises(UserError, match="expected an IDX file"):
        IDX.decode({**files, IDX.files[0]: b"<html>" * 10})


def test_an_archive_never_writes_outside(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    files = helpers.cifar10_files(COLOUR)
    path = write_files(inside, {"a.tar.gz": tar_bytes({"../evil": b"x", "/evil-steelman": b"x", **files})}) / "a.tar.gz"
    assert same(CIFAR10.decode(read_tar(path, CIFAR10.files)), COLOUR)
    assert [entry.name for entry in tmp_path.iterdir()] == ["inside"]
    assert [entry.name for entry in inside.iterdir()] == ["a.tar.gz"]


def test_members_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tar.gz"
    for content in (
        tar_bytes({"../../train.bin": b"x"}),
        tar_bytes({}, {"train.bin": "/etc/passwd"}),
        tar_bytes({"a/train.bin": b"x", "b/train.bin": b"y"}),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match="refused the member"):
            read_tar(path, ["train.bin"])
    path.write_bytes(tar_bytes({"train.bin": b"x" * 2000}))
    with pytest.raises(UserError, match=r"not in the archive: test\.bin"):
        read_tar(path, ["train.bin", "test.bin"])
    monkeypatch.setattr(formats, "MEMBER_LIMIT", 1999)
    with pytest.raises(UserError, match="too large"):
        read_tar(path, ["train.bin"])
    monkeypatch.setattr(formats, "ARCHIVE_LIMIT", 1999)
    with pytest.raises(UserError, match="at most 1999 bytes inside"):
        read_tar(path, ["train.bin"])


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"not an archive", lambda b: b""])
def test_damaged_archives(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "a.tar.gz"
    path.write_bytes(damage(tar_bytes(helpers.cifar10_files(COLOUR))))
    with pytest.raises(UserError, match=r"damaged archive|not in the archive"):
        read_tar(path, CIFAR10.files)
