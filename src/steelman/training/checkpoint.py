"""Checkpoints: safetensors and JSON in one folder. It is written whole or not at all, and checked by hash when read.

Layout of a run: ``checkpoints/step-00001234/{tensors.safetensors,state.json}``. A run keeps the two newest checkpoints.
It also keeps that of the last finished epoch, that with the best validation robustness, and the needed ends of cycles.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pydantic
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from steelman.bounded import checked, read_bytes, read_json
from steelman.errors import UserError
from steelman.files import sync_folder

KEEP = 2
# No optimiser and no history of ours needs more.
MOST_TEXT, MOST_TENSORS = 1 << 26, 1 << 35


class _Record(pydantic.BaseModel):
    """state.json."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")

    format: int
    sha256: str
    structure: dict[str, Any]


def pack(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Split nested dicts and lists into plain JSON and named tensors. ``unpack`` does the opposite."""
    if isinstance(value, Tensor):
        while name in tensors:  # key "a.b" in one dict, and key "b" in a dict "a", would get the same name
            name += "'"
        # A clone: safetensors refuses tensors that share memory, and the caller may change its tensor later.
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, pack(item, f"{name}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [pack(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}  # JSON has no infinity
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise TypeError(
        f"a checkpoint holds tensors, numbers, strings, lists and dicts; {name} is a {type(value).__name__}"
    )


def unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of ``pack`` (tuples come back as lists). What ``pack`` never writes is refused."""
    kind, content = next(iter(value.items())) if isinstance(value, dict) and len(value) == 1 else ("", None)
    if kind == "tensor" and isinstance(content, str) and content in tensors:
        return tensors[content]
    if kind == "dict" and isinstance(content, list) and all(_is_pair(one) for one in content):
        return {key: unpack(item, tensors) for key, item in content}
    if kind == "list" and isinstance(content, list):
        return [unpack(item, tensors) for item in content]
    if kind == "float" and content in ("inf", "-inf", "nan"):
        return float(content)
    if kind == "value" and (content is None or isinstance(content, bool | int | float | str)):
        return content
    raise UserError("expected a tensor that is there, a dict, a list or a plain value in each part of the structure")


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str | int)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    """Write `state` as the checkpoint `folder`. A failure leaves no half-written checkpoint, and no older one changes.

    An existing folder is kept: it is the same step of the same run.
    """
    if folder.exists():
        return
    tensors: dict[str, Tensor] = {}
    structure = pack(state, "state", tensors)
    content = save(tensors)
    record = {"format": 1, "sha256": hashlib.sha256(content).hexdigest(), "structure": structure}
    text = json.dumps(record)
    seal = hashlib.sha256(text.encode()).hexdigest()
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = folder.with_name(f".part-{folder.name}")
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir()
        _write(part / "tensors.safetensors", content)
        _write(part / "state.json", f"{text}\n{seal}\n".encode())
        sync_folder(part)
        part.rename(folder)
        sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """Read a checkpoint. A damaged or incomplete one is refused, and the error says why."""
    what = f"checkpoint {folder} is damaged"
    try:
        # Errors of the system, such as too many open files, prove no damage. So they are not caught.
        parts = read_bytes(folder / "state.json", most_bytes=MOST_TEXT).rstrip(b"\n").rsplit(b"\n", 1)
        content = read_bytes(folder / "tensors.safetensors", most_bytes=MOST_TENSORS)
        text, seal = parts if len(parts) == 2 else (b"", b"")
    except UserError as error:
        raise UserError(f"checkpoint {folder} is incomplete: {error}") from None
    if hashlib.sha256(text).hexdigest().encode() != seal:
        raise UserError(f"{what}: state.json does not match its checksum")
    record = checked(_Record, read_json(text, what=what, most_bytes=MOST_TEXT), what=what)
    found = hashlib.sha256(content).hexdigest()
    if found != record.sha256:
        raise UserError(f"{what}: tensors.safetensors has checksum {found[:12]}..., expected {record.sha256[:12]}...")
    try:
        state = unpack(record.structure, load(content))
    except (SafetensorError, UserError) as error:
        raise UserError(f"{what}: {error}") from None
    if not isinstance(state, dict):
        raise UserError(f"{what}: expected a dict as the state, got {type(state).__name__}")
    return state


def checkpoint_path(run: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return run / "checkpoints" / f"step-{step:08d}"


def checkpoints(run: Path) -> list[Path]:
    """A run's checkpoints, newest first."""
    return sorted((run / "checkpoints").glob("step-*"), reverse=True)


def prune(run: Path, keep: set[int]) -> None:
    """Delete all checkpoints except the newest, and those of the steps in `keep`."""
    kept = {checkpoint_path(run, step) for step in keep}
    for folder in checkpoints(run)[KEEP:]:
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def load_newest(run: Path, first: bool = True) -> tuple[dict[str, Any], list[str]]:
    """The newest undamaged checkpoint of a run, and a sentence for each newer, damaged one.

    Damaged checkpoints are renamed. Of several processes, only the `first` renames; the others skip them.
    """
    for rest in (run / "checkpoints").glob(".part-*") if first else ():  # a killed process leaves such a folder
        shutil.rmtree(rest, ignore_errors=True)
    damaged: list[str] = []
    for folder in checkpoints(run):
        try:
            return load_checkpoint(folder), damaged
        except UserError as error:
            damaged.append(str(error))
            if first:
                aside = folder.with_name(f"damaged-{folder.name}")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)
    if damaged:
        raise UserError("all checkpoints are damaged:\n" + "\n".join(damaged))
    raise UserError(f"nothing to resume in {run}: it has no checkpoint")
