"""The ledger of an evaluation: columns of numbers in memory, and images on disk. Also the files of finished batches.

If an evaluation is killed, the next call continues from the finished batches, and its result is the same.
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from steelman.bounded import read_bytes, read_json, read_tensors
from steelman.data.source import MOST_CLASSES
from steelman.errors import UserError, shortened
from steelman.files import write_atomic
from steelman.losses import margin, standardised
from steelman.rng import Key

WRONG, ROBUST = -2, -1  # values of `broken_by`: wrong without an attack, and broken by no attack
FORMAT = 3  # the version of the evidence's format
COLUMNS = {  # the columns of samples.safetensors
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
    "unclear": torch.bool,
}
# The share of the samples that the pilot gets, and the least and the most samples.
PILOT, PILOT_LEAST, PILOT_MOST = 0.02, 32, 200
SMALL = 1000  # in a set of fewer samples, pilot and sentinel are smaller: else they would take most of the time
# The files of the evidence; the first holds the claims.
PARTS = (
    "evidence.json",
    "samples.safetensors",
    "signs.safetensors",
    "adversarial-*.safetensors",
    "gallery.safetensors",
)
DONE = ".work.done"  # the folder `work` gets this name just before it is deleted
HALF_WRITTEN = re.compile(r"\.[\w-]+\.(json|safetensors|batch)\.\w{8}")


class Ledger:
    """The state of each sample: one row for each sample in every column.

    `broken_by` is the number of the stage that broke the sample. `tried` is the number of the last stage that attacked
    it while it was robust. `margin` is the smallest (z_y - max z_k) / std(z) seen at a point of the threat model,
    including the clean image; see `nearness`. A broken sample has the margin of the point that broke it. `lead` is
    z_y - max z_k at the same point, and `guess` is the model's answer there. ``points`` gives the point. `passes` are
    the forwards of the stage that broke the sample. `unclear` are the samples that a point broke by no more than a
    rounding. Such a point does not count.
    """

    def __init__(self, folder: Path, n: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.folder, self.n, self.shape = folder, n, shape
        self.label = torch.zeros(n, dtype=torch.int64)
        self.digest = torch.zeros(n, dtype=torch.int64)
        self.clean = torch.zeros(n, dtype=torch.int64)
        self.guess = torch.zeros(n, dtype=torch.int64)
        self.broken_by = torch.full((n,), ROBUST, dtype=torch.int64)
        self.tried = torch.full((n,), -1, dtype=torch.int64)
        self.passes = torch.zeros(n, dtype=torch.int64)
        self.unclear = torch.zeros(n, dtype=torch.bool)
        self.moved = torch.zeros(n, dtype=torch.bool)  # False if the point is still the clean image
        self.margin = torch.zeros(n, dtype=torch.float64)
        self.lead = torch.zeros(n, dtype=torch.float64)
        self.forwards = torch.zeros(n, dtype=torch.int64)
        self.backwards = torch.zeros(n, dtype=torch.int64)
        self._points = Images(folder / "points.bin", shape, torch.float64 if dtype == torch.float64 else torch.float32)

    @property
    def right(self) -> Tensor:
        """Which samples the model gets right without an attack."""
        return self.broken_by != WRONG

    @property
    def robust(self) -> Tensor:
        """Which samples the model gets right, and no stage has broken."""
        return self.broken_by == ROBUST

    def columns(self) -> dict[str, Tensor]:
        """The columns that go into the evidence, by name."""
        return {name: getattr(self, name) for name in COLUMNS}

    def points(self, rows: Tensor, x: Tensor) -> Tensor:
        """The point of each sample in `rows` where its margin was smallest. `x` are their clean images."""
        found, moved = x.clone(), self.moved[rows]
        found[moved.to(x.device)] = self._points[rows[moved]].to(x)
        return found

    def kept(self, rows: Tensor) -> Tensor:
        """The points that broke the samples `rows`."""
        return self._points[rows]

    def record(self, stage: int, part: dict[str, Tensor]) -> None:
        """Enter the checked result of one batch of a stage.

        `forwards`, `backwards` and `unclear` change for every sample of the batch. The other columns change only for
        samples that are still robust.
        """
        rows, broken = part["rows"], part["broken"]
        self.forwards[rows] += part["forwards"]
        self.backwards[rows] += part["backwards"]
        self.unclear[rows] |= part["unclear"]
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
    """Images in a file, each at its own place. An image that was never written takes no space on disk.

    The file is not memory-mapped. A mapped file would fill the memory, and a full disk would kill the process.
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
    """The folder of an evaluation in progress: its fingerprint, and a file for each finished batch.

    From its creation to the end of the ``with`` block, no other process can evaluate into the folder above it.
    """

    def __init__(self, folder: Path, fingerprint: dict[str, Any], parts: Sequence[str] = PARTS) -> None:
        """`parts` are the files that the finished evaluation will write above `folder`, the claims first."""
        self.folder, self.parts = folder, parts
        with writing(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
        self._went_on = False  # whether a batch of an earlier call was read
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
            tidy(place)
        if mark.exists():
            if difference := difference_of(mark, new):
                raise UserError(
                    f"{place} holds an unfinished evaluation of something else ({difference}); choose another folder, "
                    "or delete it"
                )
            return
        if (place / self.parts[0]).exists():
            difference = difference_of(place / self.parts[0], new)
            what = f"another evaluation ({difference})" if difference else "this evaluation already, and it is finished"
            raise UserError(f"{place} holds {what}; verify it, or choose another folder")
        if rest := sorted(path.name for name in self.parts for path in place.glob(name)):
            raise UserError(f"{place} holds {rest[0]} of another evaluation; choose another folder")
        with writing(self.folder):
            self.folder.mkdir(exist_ok=True)
            write_atomic(mark, json.dumps(new, sort_keys=True, indent=1).encode())

    def __enter__(self) -> Work:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._release()
        if self._went_on and isinstance(error, RuntimeError | LookupError | TypeError | ValueError):
            if isinstance(error, UserError):
                return
            said = next(iter(str(error).splitlines()), "")[:200]
            raise UserError(
                f"the evaluation went on from {self.folder} and failed ({type(error).__name__}: {said}): a batch there "
                "may be another's. Delete this folder, and the same call begins anew"
            ) from error

    def has(self, name: str) -> bool:
        """Whether the batch called `name` is finished."""
        return (self.folder / f"{name}.batch").exists()

    def batch(self, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The result of the batch called `name`: read if an interrupted call saved it, else computed and saved."""
        path = self.folder / f"{name}.batch"
        if self.has(name):
            seal, _, content = read_bytes(path, most_bytes=1 << 35).partition(b"\n")
            if hashlib.sha256(content).hexdigest().encode() != seal:
                raise UserError(f"{path} does not fit its checksum; delete it, and its batch is computed again")
            self._went_on = True
            kept = read_tensors(content, what=f"{path} is damaged")
            if "guess" in kept and bool(((kept["guess"] < 0) | (kept["guess"] >= MOST_CLASSES)).any()):
                raise UserError(f"{path} is damaged: expected classes of 0 or more, below {MOST_CLASSES:,}")
            return kept
        found = {key: value.detach().cpu().contiguous() for key, value in compute().items()}
        content = save(found)
        with writing(path):
            write_atomic(path, hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        return found

    def close(self) -> None:
        """Delete the folder. Only a complete evaluation does this, because its evidence holds all results."""
        with writing(self.folder):
            self.folder.replace(self.folder.parent / DONE)  # in one step: `work` is complete or gone
            shutil.rmtree(self.folder.parent / DONE)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError in this block into an error that says what could not be written, and how to continue."""
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
    """Keep other processes out of `folder` in this block. Their error says what this process is `doing`."""
    descriptor = _lock(folder, doing)
    try:
        yield
    finally:
        _unlock(descriptor)


def _lock(folder: Path, doing: str = "evaluating") -> int:
    """Lock `folder`, and return an open file for `_unlock`.

    If the process is killed, the system removes the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    _held.add(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _unlock(descriptor)
        raise UserError(f"another process is {doing} into {folder}; wait for it, or choose another folder") from None
    except OSError:
        pass  # some network file systems have no locks; then `folder` stays unlocked
    return descriptor


def _unlock(descriptor: int) -> None:
    if descriptor in _held:
        _held.discard(descriptor)
        os.close(descriptor)


def _let_go() -> None:
    """Close the locks in a forked process, such as an image reader. Else it could hold a lock after its parent ends."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def tidy(place: Path) -> None:
    """Delete what a killed evaluation left half written or half deleted in its folder."""
    if (place / DONE).exists():
        shutil.rmtree(place / DONE)
    for folder in (place, place / "work"):
        for path in folder.glob(".*"):
            if HALF_WRITTEN.fullmatch(path.name):
                path.unlink()


def difference_of(mark: Path, new: dict[str, Any]) -> str:
    """The differences between the settings in a file and the settings `new`, as text. Empty if there are none."""
    try:
        kept = read_json(mark, most_bytes=1 << 26)
    except (UserError, OSError):
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
        place = shortened(path)  # a stranger's file may have any key
        yield f"{place} was {kept}, is {new}" if short else f"{place} differs"


def pilot_size(total: int) -> int:
    """How many samples the pilot gets, if the model gets so many right.

    >>> [pilot_size(total) for total in (200, 600, 1000, 5000, 50_000)]
    [16, 20, 32, 100, 200]
    """
    if total < SMALL:
        return max(math.ceil(PILOT_LEAST / SMALL * total), PILOT_LEAST // 2)
    return min(max(math.ceil(PILOT * total), PILOT_LEAST), PILOT_MOST)


def share_size(share: float, robust: int) -> int:
    """How many of the robust samples a stage gets."""
    return math.ceil(share * robust)


def sentinel_size(share: float, robust: int, total: int) -> int:
    """How many of the robust samples the sentinel gets.

    In a small set it gets none rather than one too many: AutoAttack on a single sample takes a third of the time, and
    says little about the others.

    >>> sentinel_size(0.004, 249, 999), sentinel_size(0.004, 249, 1000)
    (0, 1)
    """
    return int(share * robust) if total < SMALL else share_size(share, robust)


def drawn(key: Key, digest: Tensor, rows: Tensor, why: str) -> Tensor:
    """`rows` in an order that depends on the seed and on each sample's content, not on the order of the data."""
    return rows[key.fold(why).bits(digest[rows], 1)[:, 0].argsort(stable=True)]


def nearness(logits: Tensor, y: Tensor) -> Tensor:
    """The margin (z_y - max z_k) / std(z) of each sample, in float64. It is below 0 if the model is wrong.

    With two classes it is z_y - z_k. The division would give every sample the same size of margin.
    """
    return -margin(standardised(logits) if logits.shape[1] > 2 else logits, y).double()


def digests(x: Tensor, y: Tensor) -> Tensor:
    """A number for each sample that depends on its pixels and its label alone.

    A sample's noise depends on this number. So the noise does not change with the order of the data.

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
