"""What a call of ``fit`` asked for, as texts. A later call with the same folder is compared with them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from steelman.data.augment import Augmentation, NoAugment
from steelman.data.source import ArraySource, Source
from steelman.errors import LONGEST, UserError
from steelman.evaluation.stages import Suite, describe
from steelman.evidence.bundle import weights_digest
from steelman.objectives.base import Objective
from steelman.threat import ThreatModel
from steelman.training.described import fit_file
from steelman.training.folder import make_folder
from steelman.training.settings import RunSettings

LOOKED_AT = 256  # images of a source that is not in memory: reading all of them takes long
MEASURED = ("test", "suite")  # what decides the verdict and not the weights


def asked_for(
    net: nn.Module,
    train: Source,
    test: Source,
    suite: Suite,
    threat: ThreatModel,
    objective: Objective,
    how: RunSettings,
    augment: Augmentation | None,
    helper: nn.Module | None,
) -> dict[str, Any]:
    """The arguments of a call, as texts; `fingerprint` is a digest of all that decides the weights."""
    state = {name: value for name, value in net.state_dict().items() if isinstance(value, Tensor)}
    layers = repr([(name, tuple(value.shape)) for name, value in state.items()])
    said = {
        "format": 1,
        "objective": text_of(objective),
        "threat": text_of(threat),
        **{
            f"{block}.{field.name}": text_of(getattr(getattr(how, block), field.name))
            for block in vars(how)
            for field in dataclasses.fields(getattr(how, block))
        },
        "augment": text_of(augment or NoAugment()),
        "data": _images(train),
        # The text of a module tells its activations too, which have no weights.
        "model": f"{type(net).__name__} of {sum(value.numel() for value in state.values()):,} numbers, "
        f"{digest((layers + repr(net)).encode())}",
        "helper": "none" if helper is None else weights_digest(helper)[:16],
        "test": _images(test),
        "suite": text_of(suite),
    }
    weighty = {key: value for key, value in said.items() if key not in MEASURED}
    return {**said, "fingerprint": digest(json.dumps(weighty, sort_keys=True).encode())}


def _images(source: Source) -> str:
    """How many images a source has, of which shape, and a digest of them and of their labels."""
    content = hashlib.sha256(source.labels.numpy().tobytes())
    if exact(source):
        n = len(source)
        rows = torch.arange(n) if _in_memory(source) else torch.linspace(0, n - 1, min(LOOKED_AT, n)).long()
        for part in torch.split(rows, 1000):
            content.update(source.images(part).numpy().tobytes())
    return f"{len(source)} images of shape {source.shape}, {content.hexdigest()[:16]}"


def _inner(source: Source) -> Source:
    while (inner := getattr(source, "source", None)) is not None:
        source = inner
    return source


def _in_memory(source: Source) -> bool:
    return isinstance(_inner(source), ArraySource)


def exact(source: Source) -> bool:
    """Whether the images are the same when they are read a second time."""
    return bool(getattr(_inner(source), "exact", True))


def text_of(value: object) -> str:
    """A setting as text. An object without a text of its own is told by what it holds, a function by its body."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = (f"{field.name}={text_of(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(text_of, value))})"
    text = repr(value)
    return json.dumps(describe(value), sort_keys=True, default=str) if " at 0x" in text else text  # type: ignore[arg-type]


def digest(content: bytes) -> str:
    """A short digest."""
    return hashlib.sha256(content).hexdigest()[:16]


def _at_difference(value: object, other: object) -> str:
    """A value as text. Of a long one, the part where it begins to differ from the `other`."""
    text, length = str(value), _alike(str(value), str(other))
    start = max(0, length - LONGEST // 2)
    if len(text) <= 2 * LONGEST:
        return text
    return ("..." if start else "") + text[start : start + LONGEST] + ("..." if start + LONGEST < len(text) else "")


def _alike(text: str, other: str) -> int:
    """How many characters two texts begin with in common."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((at for at, (one, two) in pairs if one != two), min(len(text), len(other)))


def begin(place: Path, asked: Mapping[str, Any]) -> Literal["new", "unfinished", "finished"]:
    """Make the run's folder, or find the run of the same call in it."""
    mark = place / "fit.json"
    if not mark.exists():
        if (place / "recipe.yaml").exists():
            raise UserError(f"{place} holds a run of a recipe; choose another folder")
        make_folder(place, "fit.json", json.dumps(asked, indent=1).encode())
        return "new"
    kept = fit_file(mark)
    different = [key for key in asked if key != "fingerprint" and kept.get(key) != asked[key]]
    if different:
        key = different[0]
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise UserError(
            f"{place} holds the run of another call: its {key} is {_at_difference(kept.get(key), asked[key])}, and "
            f"that of this call is {_at_difference(asked[key], kept.get(key))}{more}; choose another folder, or "
            "delete it"
        )
    return "finished" if (place / "run.json").exists() else "unfinished"
