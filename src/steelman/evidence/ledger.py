"""What is known of each sample: small columns in memory, images on disk, and every finished batch kept as it is done.

A run that is killed begins again from the batches it had finished, and ends as it would have ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from steelman.errors import UserError
from steelman.files import write_atomic
from steelman.losses import margin, standardised

WRONG, ROBUST = -2, -1  # `broken_by` of a sample that is wrong without an attack, and of one that no attack broke
FORMAT = 2  # of what an evaluation leaves on disk
COLUMNS = {  # what is kept of each sample
    "label": torch.int64,
    "digest": torch.int64,
    "clean": torch.int64,
    "guess": torch.int64,
    "broken_by": torch.int64,
    "passes": torch.int64,
    "margin": torch.float64,
    "lead": torch.float64,
    "forwards": torch.int64,
    "backwards": torch.int64,
}
# The share of the samples on which signs of masking and the curve are measured, and how many at least and at most.
PILOT, PILOT_LEAST, PILOT_MOST = 0.02, 32, 200
# What an evaluation leaves in its folder.
PARTS = ("evidence.json", "samples.safetensors", "adversarial-*.safetensors", "gallery.safetensors")
DONE = ".work.done"  # a folder `work` that is no longer needed, on its way out
HALF_WRITTEN = re.compile(r"\.[\w-]+\.(json|safetensors)\.\w{8}")


class Ledger:
    """A row a sample; `broken_by` is the number of the stage that broke it, `tried` of the last that attacked it.

    `margin` is the smallest (z_y - max z_k) / std(z) seen at a point of the threat model, the clean image included, and
    `point` where it was seen. `lead` is z_y - max z_k itself, and `guess` what the model says there. `passes` is how
    many forwards the stage that broke a sample took to do it.
    """

    def __init__(self, folder: Path, n: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.folder, self.n = folder, n
        self.label = torch.zeros(n, dtype=torch.int64)
        self.digest = torch.zeros(n, dtype=torch.int64)
        self.clean = torch.zeros(n, dtype=torch.int64)
        self.guess = torch.zeros(n, dtype=torch.int64)
        self.broken_by = torch.full((n,), ROBUST, dtype=torch.int64)
        self.tried = torch.full((n,), -1, dtype=torch.int64)
        self.passes = torch.zeros(n, dtype=torch.int64)
        self.moved = torch.zeros(n, dtype=torch.bool)  # whether `point` is another than the clean image
        self.margin = torch.zeros(n, dtype=torch.float64)
        self.lead = torch.zeros(n, dtype=torch.float64)
        self.forwards = torch.zeros(n, dtype=torch.int64)
        self.backwards = torch.zeros(n, dtype=torch.int64)
        self._points = Images(folder / "points.bin", shape, torch.float64 if dtype == torch.float64 else torch.float32)

    @property
    def right(self) -> Tensor:
        """Which samples the model gets right when they are left alone."""
        return self.broken_by != WRONG

    @property
    def robust(self) -> Tensor:
        """Which samples nothing has broken."""
        return self.broken_by == ROBUST

    def columns(self) -> dict[str, Tensor]:
        """What is kept of each sample, by name."""
        return {name: getattr(self, name) for name in COLUMNS}

    def points(self, rows: Tensor, x: Tensor) -> Tensor:
        """Where each sample's margin was smallest; `x` are the clean images of `rows`."""
        found, moved = x.clone(), self.moved[rows]
        found[moved.to(x.device)] = self._points[rows[moved]].to(x)
        return found

    def kept(self, rows: Tensor) -> Tensor:
        """The points of samples that were broken."""
        return self._points[rows]

    def record(self, stage: int, part: dict[str, Tensor]) -> None:
        """Take in what an attack left of the samples `rows`: checked points, whose `broken` counts."""
        rows, broken = part["rows"], part["broken"]
        self.forwards[rows] += part["forwards"]
        self.backwards[rows] += part["backwards"]
        news = self.robust[rows]
        self.tried[rows[news]] = stage
        better = news & (broken | (part["margin"] < self.margin[rows]))
        at = rows[better]
        self.margin[at], self.lead[at] = part["margin"][better], part["lead"][better]
        self.guess[at] = part["guess"][better]
        self._points[at] = part["x_adv"][better]
        self.moved[at] = True
        lost = rows[news & broken]
        self.broken_by[lost] = stage
        self.passes[lost] = part["forwards"][news & broken]


class Images:
    """Images in a file, each at its own place; one that was never written takes no room.

    Read and written, not mapped: a mapped file stays in memory as it is filled, and a full disk would end the process.
    """

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._shape, self._dtype = shape, dtype
        self._size = math.prod(shape) * dtype.itemsize
        with writing(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._close = weakref.finalize(self, os.close, self._file)
        self._path = path

    def __getitem__(self, rows: Tensor) -> Tensor:
        content = bytearray(b"".join(os.pread(self._file, self._size, row * self._size) for row in rows.tolist()))
        flat = torch.frombuffer(content, dtype=self._dtype) if content else torch.empty(0, dtype=self._dtype)
        return flat.reshape(len(rows), *self._shape)

    def __setitem__(self, rows: Tensor, images: Tensor) -> None:
        with writing(self._path):
            for row, image in zip(rows.tolist(), images.to(self._dtype).contiguous().numpy(), strict=True):
                if os.pwrite(self._file, image.tobytes(), row * self._size) != self._size:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Work:
    """The folder of a run that is under way: its fingerprint, and a file for each finished batch.

    Who enters it has the folder above it to himself until he leaves.
    """

    def __init__(self, folder: Path, fingerprint: dict[str, Any]) -> None:
        self.folder = folder
        with writing(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
        self._release = weakref.finalize(self, _unlock, _lock(folder.parent))
        try:
            self._begin({"format": FORMAT, **fingerprint})
        except BaseException:
            self._release()
            raise

    def _begin(self, fingerprint: dict[str, Any]) -> None:
        place, mark = self.folder.parent, self.folder / "run.json"
        new = json.loads(json.dumps(fingerprint))
        with writing(place):
            _sweep(place)
        if mark.exists():
            if difference := _difference(mark, new):
                raise UserError(
                    f"{place} holds an unfinished evaluation of something else ({difference}); choose another folder, "
                    "or delete it"
                )
            return
        if (place / "evidence.json").exists():
            difference = _difference(place / "evidence.json", new)
            what = f"another evaluation ({difference})" if difference else "this evaluation already, and it is finished"
            raise UserError(f"{place} holds {what}; verify it, or choose another folder")
        if rest := sorted(path.name for name in PARTS for path in place.glob(name)):
            raise UserError(f"{place} holds {rest[0]} of another evaluation; choose another folder")
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
            write_atomic(mark, json.dumps(new, sort_keys=True, indent=1).encode())

    def __enter__(self) -> Work:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._release()

    def has(self, name: str) -> bool:
        """Whether this batch is done."""
        return (self.folder / f"{name}.safetensors").exists()

    def batch(self, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What was computed under this name, now or by the run that was interrupted."""
        path = self.folder / f"{name}.safetensors"
        if self.has(name):
            try:
                return load_file(path)
            except SafetensorError as error:
                raise UserError(f"{path} is damaged ({error}); delete it, and its batch is computed again") from None
        found = {key: value.detach().cpu().contiguous() for key, value in compute().items()}
        with writing(path):
            write_atomic(path, save(found))
        return found

    def close(self) -> None:
        """The evaluation is whole: what it was put together from is no longer needed."""
        with writing(self.folder):
            self.folder.replace(self.folder.parent / DONE)  # in one step: never a part of it without the rest
            shutil.rmtree(self.folder.parent / DONE)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say what could not be written, and that nothing is lost by it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot write {path}: {reason}. What is finished is kept, and the same call goes on from there"
        ) from error


_held: set[int] = set()


@contextlib.contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """Keep other processes out of `folder` in this block. They are told what this one is `doing`."""
    descriptor = _lock(folder, doing)
    try:
        yield
    finally:
        _unlock(descriptor)


def _lock(folder: Path, doing: str = "evaluating") -> int:
    """Keep others out of `folder`; an open file for `_unlock`. A process that is killed lets them in again."""
    descriptor = os.open(folder, os.O_RDONLY)
    _held.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _unlock(descriptor)
        raise UserError(f"another process is {doing} into {folder}; wait for it, or choose another folder") from None
    except OSError:
        pass  # some network file systems know no locks
    return descriptor


def _unlock(descriptor: int) -> None:
    if descriptor in _held:
        _held.discard(descriptor)
        os.close(descriptor)


def _let_go() -> None:
    """In a process that was forked off, such as one that reads images: it must not outlive its parent with the lock."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def _sweep(place: Path) -> None:
    """Clear away what a process that was killed left half written, or half deleted."""
    if (place / DONE).exists():
        shutil.rmtree(place / DONE)
    for folder in (place, place / "work"):
        for path in folder.glob(".*"):
            if HALF_WRITTEN.fullmatch(path.name):
                path.unlink()


def _difference(mark: Path, new: dict[str, Any]) -> str:
    """How the settings written down differ from these; nothing if they do not."""
    try:
        kept = json.loads(mark.read_bytes())
    except (ValueError, OSError, RecursionError):
        return f"{mark} is damaged"
    if not isinstance(kept, dict):
        return f"{mark} is damaged"
    found = list(_differences({key: kept.get(key) for key in new}, new, ""))
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def _differences(kept: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(kept, dict) and isinstance(new, dict):
        for key in sorted({*kept, *new}):
            yield from _differences(kept.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif isinstance(kept, list) and isinstance(new, list) and len(kept) == len(new):
        for at, (one, other) in enumerate(zip(kept, new, strict=True)):
            yield from _differences(one, other, f"{path}.{at}")
    elif kept != new:
        short = max(len(str(kept)), len(str(new))) <= 40
        yield f"{path} was {kept}, is {new}" if short else f"{path} differs"


def pilot_size(total: int) -> int:
    """How many samples a pilot takes, if the model gets so many right."""
    return min(max(math.ceil(PILOT * total), PILOT_LEAST), PILOT_MOST)


def nearness(logits: Tensor, y: Tensor) -> Tensor:
    """How far each sample is from being broken, in float64: (z_y - max z_k) / std(z), below 0 where it is.

    Of two classes it is z_y - z_k: divided by their own spread, two logits are always as far apart.
    """
    return -margin(standardised(logits) if logits.shape[1] > 2 else logits, y).double()


def digests(x: Tensor, y: Tensor) -> Tensor:
    """A number for each sample that depends on its pixels and label alone: its noise follows it to any place.

    >>> x = torch.rand(2, 1, 4, 4)
    >>> bool((digests(x, torch.tensor([0, 1])) == digests(x.double(), torch.tensor([0, 1]))).all())
    True
    """
    images = x.detach().to("cpu", torch.float32).contiguous().numpy()
    found = []
    for image, label in zip(images, y.tolist(), strict=True):
        content = hashlib.blake2b(image.tobytes() + int(label).to_bytes(8, "little", signed=True), digest_size=8)
        found.append(int.from_bytes(content.digest(), "little", signed=True))
    return torch.tensor(found, dtype=torch.int64)
