"""What is known of each sample: small columns in memory, images on disk, and every finished batch kept as it is done.

A run that is killed begins again from the batches it had finished, and ends as it would have ended.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from steelman.errors import UserError
from steelman.files import write_atomic

WRONG, ROBUST = -2, -1  # `broken_by` of a sample that is wrong without an attack, and of one that no attack broke
FORMAT = 1


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
        kind = np.float64 if dtype == torch.float64 else np.float32
        self._points = np.memmap(folder / "points.bin", dtype=kind, mode="w+", shape=(n, *shape))

    @property
    def right(self) -> Tensor:
        """Which samples the model gets right when they are left alone."""
        return self.broken_by != WRONG

    @property
    def alive(self) -> Tensor:
        """Which samples nothing has broken."""
        return self.broken_by == ROBUST

    def points(self, rows: Tensor, x: Tensor) -> Tensor:
        """Where each sample's margin was smallest; `x` are the clean images of `rows`."""
        kept = torch.from_numpy(self._points[rows.numpy()]).to(x)
        return torch.where(self.moved[rows].to(x.device).view(-1, *[1] * (x.dim() - 1)), kept, x)

    def kept(self, rows: Tensor) -> Tensor:
        """The points of samples that were broken."""
        return torch.from_numpy(self._points[rows.numpy()])

    def record(self, stage: int, part: dict[str, Tensor]) -> None:
        """Take in what an attack left of the samples `rows`: checked points, whose `broken` counts."""
        rows, broken = part["rows"], part["broken"]
        self.forwards[rows] += part["forwards"]
        self.backwards[rows] += part["backwards"]
        news = self.alive[rows]
        self.tried[rows[news]] = stage
        better = news & (broken | (part["margin"] < self.margin[rows]))
        at = rows[better]
        self.margin[at], self.lead[at] = part["margin"][better], part["lead"][better]
        self.guess[at] = part["guess"][better]
        self._points[at.numpy()] = part["x_adv"][better].numpy()
        self.moved[at] = True
        fallen = rows[news & broken]
        self.broken_by[fallen] = stage
        self.passes[fallen] = part["forwards"][news & broken]


class Work:
    """The folder of a run that is under way: its fingerprint, and a file for each finished batch."""

    def __init__(self, folder: Path, fingerprint: dict[str, Any]) -> None:
        self.folder = folder
        text = json.dumps({"format": FORMAT, **fingerprint}, sort_keys=True, indent=1)
        mark = folder / "run.json"
        if mark.exists():
            if mark.read_text() != text:
                raise UserError(
                    f"{folder.parent} holds an unfinished evaluation of something else ({_difference(mark, text)}); "
                    "choose another folder, or delete it"
                )
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(mark, text.encode())

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
        write_atomic(path, save(found))
        return found

    def close(self) -> None:
        """The evaluation is whole: what it was put together from is no longer needed."""
        shutil.rmtree(self.folder)


def _difference(mark: Path, text: str) -> str:
    try:
        kept, new = json.loads(mark.read_text()), json.loads(text)
    except ValueError:
        return f"{mark} is damaged"
    return ", ".join(f"its {key} is another" for key in new if kept.get(key) != new[key])


def digests(x: Tensor, y: Tensor) -> Tensor:
    """A number for each sample that depends on its pixels and label alone: its noise follows it wherever it stands.

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
