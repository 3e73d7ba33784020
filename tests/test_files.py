"""A file is either the old one or the new one, never half of either."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from steelman.files import write_atomic


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_writes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_atomic(path, b"one")
    write_atomic(path, b"two" * 100_000)
    assert path.read_bytes() == b"two" * 100_000
    write_atomic(path, b"")
    assert path.read_bytes() == b""
    assert names(tmp_path) == ["a.bin"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("call", ["fsync", "replace", "write"])
def test_a_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "a.bin"
    write_atomic(path, b"old")

    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise OSError(28, "No space left on device")

    if call == "fsync":
        monkeypatch.setattr(os, "fsync", fail)
    elif call == "replace":
        monkeypatch.setattr(Path, "replace", fail)
    else:
        opened = os.fdopen

        class Full:
            def __init__(self, handle: int, mode: str) -> None:
                self.file = opened(handle, mode)

            def __enter__(self) -> Full:
                return self

            def __exit__(self, *args: object) -> None:
                self.file.close()

            def write(self, content: bytes) -> None:
                self.file.write(content[:1])
                fail()

        monkeypatch.setattr(os, "fdopen", Full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, b"new and longer")
    monkeypatch.undo()
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(descriptor: int) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "a.bin", b"new")
    assert names(tmp_path) == []


def test_content_reaches_the_disk_before_the_name_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def spy_fsync(descriptor: int) -> None:
        events.append("fsync")
        fsync(descriptor)

    def spy_replace(self: Path, target: Path) -> Path:
        events.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(Path, "replace", spy_replace)
    write_atomic(tmp_path / "a.bin", b"x")
    assert events == ["fsync", "replace", "fsync"]  # the content, the move, the folder


def test_a_missing_folder_and_a_folder_in_the_way_raise(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "none" / "a.bin", b"x")
    (tmp_path / "d").mkdir()
    with pytest.raises(OSError, match="d"):
        write_atomic(tmp_path / "d", b"x")
    assert names(tmp_path) == ["d"]
