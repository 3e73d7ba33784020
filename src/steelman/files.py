"""Writing files so that no reader finds half a file, not even after a power cut."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

from steelman.errors import UserError


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` beside `path`, flush it to the disk, and move it into place in one step."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
    sync_folder(path.parent)


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder with these files, whole or not at all. A folder that is not empty is refused and not changed.

    The files are written into a hidden folder beside it, which is moved into place in one step. An empty folder that is
    there already may be a mount point, or the current folder: it cannot be replaced. The files are written into it one
    by one, in their order.
    """
    for place, error in ((folder.parent, errno.ENOTDIR), (folder, errno.EEXIST)):
        if place.exists() and not place.is_dir():
            raise OSError(error, os.strerror(error), str(place))
    folder.parent.mkdir(parents=True, exist_ok=True)
    rest = re.compile(rf"\.{re.escape(folder.resolve().name)}\.[0-9a-f]{{8}}\.part")
    for path in folder.parent.iterdir():
        if rest.fullmatch(path.name):  # of a killed process
            shutil.rmtree(path, ignore_errors=True)
    if folder.exists():
        if any(not _half_written(path.name, files) for path in folder.iterdir()):
            raise UserError(f"{folder} is not empty; choose another folder")
        sweep(folder, files)
        for name, content in files.items():
            write_atomic(folder / name, content)
        return
    part = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    part.mkdir()
    try:
        for name, content in files.items():
            write_atomic(part / name, content)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def sweep(folder: Path, names: Collection[str]) -> None:
    """Delete what killed calls of `write_atomic` left of the files `names` in a folder."""
    for path in folder.glob(".*"):
        if _half_written(path.name, names):
            path.unlink(missing_ok=True)


def _half_written(found: str, names: Collection[str]) -> bool:
    """Whether `found` is the name of a half-written file. They end with eight characters of `tempfile`."""
    return any(re.fullmatch(rf"\.{re.escape(name)}\.[a-z0-9_]{{8}}", found) for name in names)


def sync_folder(folder: Path) -> None:
    """Flush the list of a folder's files to the disk. Without this, a power cut can undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
