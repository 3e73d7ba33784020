"""The evidence of an evaluation: a folder with every verdict, every adversarial image, and hashes of all they rest on.

``evidence.json`` holds what is claimed (settings, counts, verdict) and the SHA-256 of the other files;
``samples.safetensors`` a row a sample; ``adversarial-*.safetensors`` the images that broke the model. ``seal`` is the
hash of all of it. Times are not in it: the same evaluation gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from steelman.errors import UserError
from steelman.evaluation.ledger import Ledger
from steelman.evaluation.result import Evaluation
from steelman.files import write_atomic

FORMAT = 1
SHARD = 512  # adversarial images in a file
COLUMNS = (
    "label",
    "digest",
    "clean",
    "guess",
    "broken_by",
    "passes",
    "margin",
    "lead",
    "forwards",
    "backwards",
)


class DamagedError(UserError):
    """The evidence is not what was written."""


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Evidence as read: the claims, a row a sample, and where the images are."""

    folder: Path
    record: dict[str, Any]
    samples: dict[str, Tensor]

    @property
    def seal(self) -> str:
        return str(self.record["seal"])

    def images(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows, adversarial images), a file at a time."""
        for name in self.record["files"]:
            if name.startswith("adversarial-"):
                part = _tensors(self.folder / name, self.record["files"][name])
                yield part["rows"], part["images"]


def write_bundle(folder: Path, settings: dict[str, Any], ledger: Ledger, found: Evaluation) -> str:
    """Write the evidence of an evaluation into `folder`; its seal."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}

    def put(name: str, tensors: dict[str, Tensor]) -> None:
        content = save({key: value.contiguous() for key, value in tensors.items()})
        files[name] = hashlib.sha256(content).hexdigest()
        write_atomic(folder / name, content)

    put("samples.safetensors", {name: getattr(ledger, name) for name in COLUMNS})
    broken = (ledger.broken_by >= 0).nonzero()[:, 0]
    for shard, rows in enumerate(torch.split(broken, SHARD) if len(broken) else ()):
        put(f"adversarial-{shard:04d}.safetensors", {"rows": rows, "images": ledger.kept(rows)})
    verdict = None if found.verdict is None else dataclasses.asdict(found.verdict)
    record = {
        "format": FORMAT,
        **settings,
        "classes": list(found.classes),
        "data_digest": data_digest(ledger.digest),
        "clean_correct": int(ledger.right.sum()),
        "robust_correct": int(ledger.alive.sum()),
        "stages": [
            {key: value for key, value in dataclasses.asdict(stage).items() if key != "seconds"}
            for stage in found.stages
        ],
        "verdict": verdict,
        "files": files,
    }
    record["seal"] = seal_of(record)
    write_atomic(folder / "evidence.json", json.dumps(record, indent=1, sort_keys=True).encode())
    return str(record["seal"])


def read_bundle(folder: Path) -> Bundle:
    """Read evidence back; refuse any that was changed since."""
    path = folder / "evidence.json"
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"no evidence in {folder}: evidence.json is missing") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        got = record.get("format") if isinstance(record, dict) else type(record).__name__
        raise UserError(f"{path}: expected evidence of format {FORMAT}, got {got!r}")
    if record.get("seal") != seal_of(record):
        raise DamagedError(f"{path} was changed: its seal does not fit its content")
    unknown = {
        name.name for pattern in ("adversarial-*.safetensors", "samples.safetensors") for name in folder.glob(pattern)
    } - record["files"].keys()
    if unknown:
        raise DamagedError(f"{folder / min(unknown)} is not part of the evidence")
    samples = _tensors(folder / "samples.safetensors", record["files"].get("samples.safetensors", ""))
    return Bundle(folder, record, samples)


def _tensors(path: Path, expected: str) -> dict[str, Tensor]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise DamagedError(f"{path} is missing") from None
    if hashlib.sha256(content).hexdigest() != expected:
        raise DamagedError(f"{path} was changed: its SHA-256 is not the one in evidence.json")
    try:
        return load(content)
    except SafetensorError as error:
        raise DamagedError(f"{path} is damaged: {error}") from None


def seal_of(record: dict[str, Any]) -> str:
    """The SHA-256 of the claims, which hold those of the files."""
    content = {key: value for key, value in record.items() if key != "seal"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def weights_digest(model: nn.Module) -> str:
    """The SHA-256 of a model's weights and buffers, by name."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            array = value.detach().cpu().contiguous()
            found.update(f"{name} {array.dtype} {tuple(array.shape)}\n".encode())
            found.update(array.flatten().view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    return found.hexdigest()


def data_digest(digests: Tensor) -> str:
    """The SHA-256 of the samples' own digests, in their order."""
    return hashlib.sha256(digests.numpy().tobytes()).hexdigest()
