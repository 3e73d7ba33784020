"""The evidence of an evaluation: a folder with the verdict, every adversarial image, and hashes.

- ``evidence.json`` holds the claims (settings, counts, verdict), the SHA-256 of the other files, and the seal.
- ``samples.safetensors`` has one row for each sample.
- ``signs.safetensors`` has what the pilot measured: its rows, and a column for each sign.
- ``adversarial-*.safetensors`` holds the image that broke each broken sample.
- ``gallery.safetensors`` holds the images of a few samples to look at.
- ``times.json`` is not evidence. The seal leaves it out, so that the same evaluation gives the same evidence.

The seal is the SHA-256 of the claims in ``evidence.json``. It shows whether the evidence was changed. It does not show
who made the evidence: anyone who can write the folder can change it, and compute a new seal. Only `verify` with the
model and the data can find such a change. If the seal was published before, everyone can see that it differs.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydantic
import torch
from safetensors.torch import save
from torch import Tensor, nn

from steelman.arguments import printable
from steelman.bounded import problem, read_bytes, read_json, read_tensors
from steelman.errors import UserError, shown, unfinished
from steelman.evaluation.result import Evaluation, StageRecord
from steelman.evidence.ledger import COLUMNS, FORMAT, Ledger, writing
from steelman.evidence.schema import Claims
from steelman.files import write_atomic
from steelman.threat import ThreatModel

if TYPE_CHECKING:
    from steelman.evaluation.verdict import Kept  # at run time, this import would be a cycle

SIGNS_FILE = "signs.safetensors"
SHARD, SHARD_BYTES = 512, 1 << 26  # the most adversarial images in a file, and the most bytes of them
MOST_BYTES, MOST_IMAGES = 1 << 26, 1 << 33  # the most bytes of evidence.json, and of another file
GALLERY, TIMES = "gallery.safetensors", "times.json"
NAMES = re.compile(r"(samples|signs|gallery|adversarial-\d{4,9})\.safetensors")
PICTURES = ("clean", "adversarial")  # the two images of each sample in a gallery
OWN = "verdict"  # the folder of a run with the evidence on its own model
GIVEN = "attacks"  # the folder of a run with the evidence of attacks that the user chose one by one


class DamagedError(UserError):
    """The evidence is damaged, was changed, or makes a false claim."""


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Evidence in memory: the claims (`record`), and the columns of the samples. The images stay on disk."""

    folder: Path
    record: dict[str, Any]
    samples: dict[str, Tensor]
    threat: ThreatModel

    @property
    def seal(self) -> str:
        return str(self.record["seal"])

    @property
    def version(self) -> str:
        """The version of steelman that made it."""
        return str(self.record["versions"].get("steelman", "unknown"))

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of one of its files. A changed file is refused."""
        return _tensors(self.folder / name, self.record["files"].get(name, ""))

    def images(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows, adversarial images) of each file. Over all files, the rows must rise."""
        last, shape, n = -1, None, len(self.samples["label"])
        for name in sorted(self.record["files"]):
            if not name.startswith("adversarial-"):
                continue
            part, path = self.tensors(name), self.folder / name
            if part.keys() != {"rows", "images"}:
                raise DamagedError(f"{path}: expected rows and images, got {', '.join(sorted(part)) or 'nothing'}")
            rows, images = part["rows"], part["images"]
            if rows.dtype != torch.int64 or rows.dim() != 1 or len(rows) == 0:
                raise DamagedError(f"{path}: expected a list of rows, got {rows.dtype} of shape {tuple(rows.shape)}")
            if images.dtype not in (torch.float32, torch.float64) or images.dim() != 4 or len(images) != len(rows):
                got = f"{images.dtype} of shape {tuple(images.shape)}"
                raise DamagedError(f"{path}: expected {len(rows)} images in float32 or float64, got {got}")
            if shape not in (None, (images.dtype, images.shape[1:])):
                raise DamagedError(f"{path}: its images are of another kind than those of the files before it")
            if not last < int(rows[0]) or bool((rows.diff() <= 0).any()) or int(rows[-1]) >= n:
                raise DamagedError(f"{path}: expected rising rows, each once, between {last + 1} and {n - 1}")
            last, shape = int(rows[-1]), (images.dtype, images.shape[1:])
            yield rows, images


def write_bundle(folder: Path, settings: dict[str, Any], ledger: Ledger, found: Evaluation, kept: Kept) -> str:
    """Write the evidence of an evaluation into `folder`, and return its seal."""
    files: dict[str, str] = {}

    def put(name: str, tensors: dict[str, Tensor]) -> None:
        content = save({key: value.contiguous() for key, value in tensors.items()})
        files[name] = hashlib.sha256(content).hexdigest()
        write_atomic(folder / name, content)

    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        # An earlier call whose time ran out left this file. It would not fit the files below.
        (folder / "evidence.json").unlink(missing_ok=True)
        put("samples.safetensors", ledger.columns())
        if kept.signs:
            put(SIGNS_FILE, dict(kept.signs))
        broken = (ledger.broken_by >= 0).nonzero()[:, 0]
        image = ledger.kept(broken[:1])
        size = max(min(SHARD, SHARD_BYTES // max(image.numel() * image.element_size(), 1)), 1)
        for shard, rows in enumerate(torch.split(broken, size) if len(broken) else ()):
            put(f"adversarial-{shard:04d}.safetensors", {"rows": rows, "images": ledger.kept(rows)})
        if found.gallery:
            rows = torch.tensor([one.index for one in found.gallery])
            images = {
                name: torch.stack([getattr(one, name) for one in found.gallery]) for name in ("clean", "adversarial")
            }
            put(GALLERY, {"rows": rows, "tried": ledger.tried[rows], **images})
        for path in folder.glob("*.safetensors"):  # an earlier call whose time ran out may have left more files
            if NAMES.fullmatch(path.name) and path.name not in files:
                path.unlink()
        record = {
            "format": FORMAT,
            **settings,
            **_claims(found, kept),
            "shape": list(ledger.shape),
            "data_digest": data_digest(ledger.digest),
            "clean_correct": int(ledger.right.sum()),
            "robust_correct": int(ledger.robust.sum()),
            "files": files,
        }
        record["seal"] = seal_of(record)
        times = {"clean": found.score("clean").seconds, **{stage.name: stage.seconds for stage in found.stages}}
        write_atomic(folder / TIMES, json.dumps(times, indent=1).encode())
        write_atomic(folder / "evidence.json", _text(record))  # last: where this file exists, all others are complete
    return str(record["seal"])


def _claims(found: Evaluation, kept: Kept) -> dict[str, Any]:
    """The claims of an evaluation that are in neither its settings nor its samples, as plain JSON values."""
    assert found.verdict is not None
    said = {
        "classes": found.classes,
        "stages": [_counts(stage) for stage in found.stages],
        "verdict": {name: value for name, value in dataclasses.asdict(found.verdict).items() if name in _VERDICT},
        "curve": [dataclasses.asdict(point) for point in found.curve],
        "curve_attack": found.curve_attack,
        "notes": found.notes,
        "random": kept.random,
        "grain": kept.grain,
        "cut": kept.cut,
        "look_cut": kept.look_cut,
    }
    plain: dict[str, Any] = json.loads(json.dumps(said))
    return plain


def _counts(stage: StageRecord) -> dict[str, Any]:
    """The counts of a stage. Its settings are in the suite, and its time is in ``times.json``."""
    return {name: value for name, value in vars(stage).items() if name not in ("settings", "seconds")}


def bundle_at(path: Path) -> Path:
    """The folder with the evidence: `path`, or its folder ``verdict``, or else its folder ``attacks``."""
    for folder in (path, path / OWN, path / GIVEN):
        if (folder / "evidence.json").exists():
            return folder
    if how := unfinished(path):
        raise UserError(f"no evidence in {path}: {how}")
    expected = f"no evidence in {path}: evidence.json is missing there and in its folders {OWN!r} and {GIVEN!r}"
    there = sorted(place.parent for name in ("*", "evaluations/*") for place in path.glob(f"{name}/evidence.json"))
    if there:
        raise UserError(f"{expected}; it has these evaluations, name one: {', '.join(map(str, there))}")
    raise UserError(expected)


def finished(folder: Path) -> bool:
    """Whether `folder` holds the evidence of a finished evaluation."""
    # An evaluation deletes the folder of its batches last, and only if it is complete.
    return (folder / "evidence.json").exists() and not (folder / "work").exists()


def read_bundle(folder: Path) -> Bundle:
    """Read the evidence at `folder` (see `bundle_at`). Changed evidence is refused."""
    folder = bundle_at(folder)
    path = folder / "evidence.json"
    try:
        content = read_bytes(path, most_bytes=MOST_BYTES)
        record = _record(content, path)
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            got = record.get("format") if isinstance(record, dict) else type(record).__name__
            raise UserError(f"{path}: expected evidence of format {FORMAT}, got {str(got)[:40]}")
        if record.get("seal") != seal_of(record) or content != _text(record):
            raise DamagedError(f"{path} was changed: its seal does not fit its content")
        Claims.model_validate(record)
        check_texts(record, path)
        threat = _threat(record["threat"])
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except pydantic.ValidationError as error:
        raise DamagedError(f"{path} is damaged: {problem(error)}") from None
    except UserError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {str(error)[:200]}") from None
    for name in record["files"]:
        if not NAMES.fullmatch(name):
            raise DamagedError(f"{path} is damaged: no evidence is kept in a file called {name[:40]!r}")
    there = {file.name for file in folder.iterdir() if file.suffix == ".safetensors"}
    if unknown := there - record["files"].keys():
        raise DamagedError(f"{folder / min(unknown)} is not part of the evidence")
    samples = _tensors(folder / "samples.safetensors", record["files"].get("samples.safetensors", ""))
    if unknown := samples.keys() - COLUMNS.keys():
        raise DamagedError(f"samples.safetensors: no evidence has a column called {min(unknown)[:40]!r}")
    for name, dtype in COLUMNS.items():
        column = samples.get(name)
        if column is None or column.dtype != dtype or column.shape != (record["total"],):
            got = "none" if column is None else f"{column.dtype} of shape {tuple(column.shape)}"
            raise DamagedError(f"samples.safetensors: expected {record['total']} rows of {name!r}, got {got}")
    return Bundle(folder, record, samples, threat)


def _threat(claimed: dict[str, Any]) -> ThreatModel:
    threat = ThreatModel(**claimed)
    if not threat.eps > 0:
        raise ValueError(f"expected a radius above 0, got {threat.eps}")
    return threat


def check_texts(record: dict[str, Any], path: Path) -> None:
    """Refuse texts that steer a terminal: they could write lines that no check has said."""
    for text in _texts(record):
        if not printable(text):
            raise DamagedError(f"{path} is damaged: expected texts of printable characters, got {shown(text)}")


def _texts(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    elif isinstance(part, dict | list):
        for value in (*part, *part.values()) if isinstance(part, dict) else part:
            yield from _texts(value)


def _record(content: bytes, path: Path) -> Any:
    try:
        return read_json(content, what=f"{path} is damaged", most_bytes=MOST_BYTES)
    except UserError as error:
        raise DamagedError(str(error)) from None


def _tensors(path: Path, expected: str) -> dict[str, Tensor]:
    if not path.exists():
        raise DamagedError(f"{path} is missing")
    try:
        content = read_bytes(path, most_bytes=MOST_IMAGES)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if hashlib.sha256(content).hexdigest() != expected:
        raise DamagedError(f"{path} was changed: its SHA-256 is not the one in evidence.json")
    try:
        found = read_tensors(content, what=f"{path} is damaged")
        header = read_json(content[8 : 8 + int.from_bytes(content[:8], "little")], what=str(path))
    except UserError as error:
        raise DamagedError(str(error)) from None
    if "__metadata__" in header:
        raise DamagedError(f"{path}: expected tensors alone, got metadata too")
    return found


def seal_of(record: dict[str, Any]) -> str:
    """The SHA-256 of the claims. The claims hold the SHA-256 of each file, so the seal covers the files too."""
    content = {key: value for key, value in record.items() if key != "seal"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _text(record: dict[str, Any]) -> bytes:
    return json.dumps(record, indent=1).encode()


def weights_digest(model: nn.Module) -> str:
    """The SHA-256 of a model's weights and buffers, with their names."""
    return digest_of(model.state_dict())


def digest_of(state: Mapping[str, object]) -> str:
    """The SHA-256 of weights and buffers by name."""
    found = hashlib.sha256()
    for name, value in sorted(state.items()):
        if isinstance(value, Tensor):
            array = value.detach().cpu().contiguous()
            found.update(f"{name} {array.dtype} {tuple(array.shape)}\n".encode())
            found.update(array.flatten().view(torch.uint8).numpy().tobytes() if array.numel() else b"")
    return found.hexdigest()


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's weights, or of its buffers. The CPU for a model without tensors."""
    return next((value.device for value in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def data_digest(digests: Tensor) -> str:
    """The SHA-256 of the digests of all samples, in their order."""
    return hashlib.sha256(digests.numpy().tobytes()).hexdigest()


# The fields of a verdict that do not follow from counts or settings.
_VERDICT = ("trust", "reasons", "flags", "complete", "escalated")
