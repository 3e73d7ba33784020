"""A fetched dataset on the disk: one safetensors file, which is mapped into memory when it is read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import platformdirs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from steelman.bounded import read_json
from steelman.data.download import storage
from steelman.data.formats import PARTS, Arrays, digest
from steelman.errors import UserError, shown
from steelman.files import write_atomic

VARIABLE = "STEELMAN_DATA"
MOST = 1 << 44  # bytes of an array: 16 TB


def data_root() -> Path:
    """The folder of all fetched datasets: the variable ``STEELMAN_DATA``, or else the user's cache folder."""
    given = os.environ.get(VARIABLE)
    return Path(given).expanduser() if given else Path(platformdirs.user_cache_dir("steelman"))


def stored(name: str, root: Path | None = None) -> Path:
    """The path of the file that holds the dataset `name`. The file need not exist."""
    return (root or data_root()) / name / f"{name}.safetensors"


def write(path: Path, arrays: Arrays, meta: Mapping[str, object]) -> None:
    """Write the four arrays and their description. An error leaves no half-written file."""
    parts = {name: np.ascontiguousarray(arrays[name]) for name in PARTS}
    content = save(parts, {"steelman": json.dumps(meta, sort_keys=True)})
    with storage(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, content)


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The arrays, mapped from the file and not copied, and their description."""
    try:
        with safe_open(path, framework="pt") as file:
            meta = read_json((file.metadata() or {})["steelman"], what=str(path))
            found = {name: file.get_tensor(name) for name in PARTS}
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:  # torch: a size without end
        raise UserError(
            f"{path} cannot be read ({shown(str(error))[1:-1]}); run: steelman data get {path.stem}"
        ) from None
    for name, value in found.items():
        if math.prod(max(side, 1) for side in value.shape) > MOST:  # without any data, a size can be endless
            raise UserError(f"{path}: {name} has the impossible shape {tuple(value.shape)}")
        if value.dtype != torch.uint8:
            raise UserError(f"{path}: expected {name} in 8 bits, got {value.dtype}; run: steelman data get {path.stem}")
    return found, meta


def intact(path: Path, digests: Mapping[str, str]) -> bool:
    """Whether the file can be read and holds exactly these arrays."""
    if not path.is_file():
        return False
    try:
        tensors, _ = read(path)
    except UserError:
        return False
    return all(digest(tensors[name].numpy()) == expected for name, expected in digests.items())
