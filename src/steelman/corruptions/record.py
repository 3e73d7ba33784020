"""The evidence of a measurement on corrupted images.

- ``corruptions.json`` holds the claims: settings, counts, checksums of the images of each cell, and the seal.
- ``corruptions.safetensors`` holds the labels, and the answer to each image.

The seal is the SHA-256 of the claims. The claims hold the SHA-256 of the other file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import torch
from pydantic import Field
from safetensors.torch import save
from torch import Tensor

from steelman.arguments import MOST_LETTERS, printable
from steelman.bounded import problem, read_bytes, read_json, read_tensors
from steelman.corruptions import CORRUPTIONS
from steelman.corruptions.accuracy import CorruptionAccuracy
from steelman.errors import UserError, shown
from steelman.evidence.bundle import DamagedError, check_texts, seal_of
from steelman.evidence.ledger import difference_of, writing
from steelman.evidence.schema import Count, Hash, Name
from steelman.files import write_atomic

GENERATED = "generated"
NAME, ANSWERS = "corruptions.json", "corruptions.safetensors"
PARTS = (NAME, ANSWERS)
FORMAT = 1
MOST_BYTES, MOST_ANSWERS = 1 << 26, 1 << 33
CONSTANT = Annotated[float, Field(allow_inf_nan=False)]


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")


class _Settings(_Strict):
    family: Literal["cifar", "imagenet"]
    exact: bool
    constants: dict[str, list[list[CONSTANT]]]


class Schema(_Strict):
    """The fields of ``corruptions.json``."""

    format: int
    model: Name
    weights: Hash
    data: Name
    total: Annotated[Count, Field(gt=0)]
    clean_total: Annotated[Count, Field(gt=0)]
    shape: Annotated[list[Annotated[Count, Field(gt=0)]], Field(min_length=3, max_length=3)]
    classes: Annotated[list[Name], Field(min_length=2)]
    source: Literal["generated", "CIFAR-10-C", "CIFAR-100-C", "ImageNet-C"]
    corruptions: Annotated[list[Name], Field(min_length=1, max_length=len(CORRUPTIONS))]
    severities: Annotated[list[Annotated[int, Field(ge=1, le=5)]], Field(min_length=1, max_length=5)]
    settings: _Settings | Annotated[dict[str, Any], Field(max_length=0)]
    seed: int
    frost: Name
    versions: dict[Name, Name]
    data_digest: Hash
    clean_correct: Count
    cells: dict[str, list[Count]]
    images: dict[str, list[Hash]]
    files: dict[str, Hash]
    seal: Hash


@dataclasses.dataclass(frozen=True)
class Claimed:
    """The answers of a model: to the clean images, and to those of each cell. `images` are checksums of the cells."""

    clean: Tensor
    guess: Tensor
    clean_label: Tensor
    label: Tensor
    images: tuple[str, ...]

    @property
    def clean_right(self) -> Tensor:
        return self.clean == self.clean_label

    @property
    def right(self) -> Tensor:
        return self.guess == self.label


@dataclasses.dataclass(frozen=True)
class Record:
    """The evidence in memory."""

    folder: Path
    record: dict[str, Any]
    claimed: Claimed

    @property
    def seal(self) -> str:
        return str(self.record["seal"])

    @property
    def cells(self) -> list[tuple[str, int]]:
        return [(name, severity) for name in self.record["corruptions"] for severity in self.record["severities"]]

    @property
    def accuracy(self) -> CorruptionAccuracy:
        record = self.record
        return CorruptionAccuracy(
            model=record["model"],
            data=record["data"],
            source=record["source"],
            corruptions=tuple(record["corruptions"]),
            severities=tuple(record["severities"]),
            settings=record["settings"],
            seed=record["seed"],
            clean=self.claimed.clean_right,
            right=self.claimed.right,
            images=self.claimed.images,
            digest=record["data_digest"],
            frost=record["frost"],
            versions=record["versions"],
        )


def write_record(folder: Path, claims: Mapping[str, Any], claimed: Claimed) -> Record:
    """Write the evidence into `folder`. The claims are written last: where they are, all is complete."""
    tensors = {
        "clean": claimed.clean.to(torch.int32),
        "clean_label": claimed.clean_label.to(torch.int32),
        "guess": claimed.guess.to(torch.int32),
        "label": claimed.label.to(torch.int32),
    }
    content = save({name: value.contiguous() for name, value in tensors.items()})
    record = {
        "format": FORMAT,
        **claims,
        **_counts(claims, claimed),
        "files": {ANSWERS: hashlib.sha256(content).hexdigest()},
    }
    record["seal"] = seal_of(record)
    with writing(folder):
        write_atomic(folder / ANSWERS, content)
        write_atomic(folder / NAME, _text(record))
    return read_record(folder)


def _counts(claims: Mapping[str, Any], claimed: Claimed) -> dict[str, Any]:
    """The parts of the record that follow from the answers."""
    right, size = claimed.right.sum(dim=1).tolist(), len(claims["severities"])
    names = list(enumerate(claims["corruptions"]))
    return {
        "clean_correct": int(claimed.clean_right.sum()),
        "cells": {name: right[size * at : size * (at + 1)] for at, name in names},
        "images": {name: list(claimed.images[size * at : size * (at + 1)]) for at, name in names},
    }


def _text(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, indent=1).encode()


def read_record(folder: Path, claims: Mapping[str, Any] | None = None) -> Record:
    """Read the evidence in `folder`. Changed evidence is refused, and so is another measurement than `claims`."""
    path = folder / NAME
    if not path.is_file():
        raise UserError(f"no accuracy on corrupted images in {folder}: {NAME} is missing")
    if claims is not None and (difference := difference_of(path, json.loads(json.dumps(claims)))):
        raise UserError(f"{folder} holds another measurement ({difference}); choose another folder")
    try:
        content = read_bytes(path, most_bytes=MOST_BYTES)
        record = read_json(content, what=f"{path} is damaged", most_bytes=MOST_BYTES)
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            got = record.get("format") if isinstance(record, dict) else type(record).__name__
            raise UserError(f"{path}: expected a record of format {FORMAT}, got {shown(got)}")
        if record.get("seal") != seal_of(record) or content != _text(record):
            raise DamagedError(f"{path} was changed: its seal does not fit its content")
        Schema.model_validate(record)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except pydantic.ValidationError as error:
        raise DamagedError(f"{path} is damaged: {problem(error)}") from None
    check_texts(record, path)
    _check_names(path, record)
    claimed = _answers(folder, record)
    if {key: record[key] for key in ("clean_correct", "cells", "images")} != _counts(record, claimed):
        raise DamagedError(f"{path}: the counts of right answers do not follow from the answers")
    return Record(folder, record, claimed)


def check_claims(claims: Mapping[str, Any]) -> None:
    """Refuse claims that could not be read back, before hours of work go into them."""
    named = (claims[name] for name in ("model", "data", "frost"))
    for text in (*named, *claims["classes"]):
        if not printable(text) or len(text) > MOST_LETTERS:
            raise UserError(f"expected a name of at most {MOST_LETTERS:,} printable characters, got {shown(text)}")
    if len(claims["classes"]) < 2:
        raise UserError(f"data: expected at least two classes, got {len(claims['classes'])}")


def differs(folder: Path, claims: Mapping[str, Any]) -> bool:
    """Whether `folder` holds another measurement than `claims`, finished or not."""
    marks = [path for path in (folder / NAME, folder / "work" / "run.json") if path.is_file()]
    return any(difference_of(path, json.loads(json.dumps(claims))) for path in marks)


def _check_names(path: Path, record: Mapping[str, Any]) -> None:
    names, severities = record["corruptions"], record["severities"]
    if names != [name for name in CORRUPTIONS if name in names] or severities != sorted(set(severities)):
        raise DamagedError(f"{path} is damaged: expected known corruptions and severities, each once and in order")
    tables = [record[key] for key in ("cells", "images")]
    tables += [record["settings"]["constants"]] if record["settings"] else []
    if any(list(table) != names or {len(row) for row in table.values()} != {len(severities)} for table in tables):
        raise DamagedError(f"{path} is damaged: expected a value for each corruption and severity")
    if list(record["files"]) != [ANSWERS]:
        raise DamagedError(f"{path} is damaged: expected the checksum of {ANSWERS} alone")
    if bool(record["settings"]) != (record["source"] == GENERATED):
        raise DamagedError(f"{path} is damaged: expected the settings of generated images, and of no others")


def _answers(folder: Path, record: Mapping[str, Any]) -> Claimed:
    path = folder / ANSWERS
    try:
        content = read_bytes(path, most_bytes=MOST_ANSWERS)
    except (OSError, UserError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from None
    if hashlib.sha256(content).hexdigest() != record["files"][ANSWERS]:
        raise DamagedError(f"{path} was changed: its SHA-256 is not the one in {NAME}")
    tensors = read_tensors(content, what=f"{path} is damaged")
    total, clean, cells = record["total"], record["clean_total"], sum(map(len, record["cells"].values()))
    shapes = {"clean": (clean,), "clean_label": (clean,), "guess": (cells, total), "label": (total,)}
    if tensors.keys() != shapes.keys():
        raise DamagedError(f"{path}: expected {', '.join(shapes)}, got {', '.join(sorted(tensors))[:80]}")
    for name, shape in shapes.items():
        value = tensors[name]
        if value.dtype != torch.int32 or tuple(value.shape) != shape:
            raise DamagedError(f"{path}: expected {name} as whole numbers of shape {shape}, got {tuple(value.shape)}")
        if bool((value < 0).any()):
            raise DamagedError(f"{path}: expected classes of 0 or more in {name}")
        if bool(((value < 0) | (value >= len(record["classes"]))).any()) and "label" in name:
            raise DamagedError(f"{path}: expected labels from 0 to {len(record['classes']) - 1}")
    same = torch.equal(tensors["label"], tensors["clean_label"])
    if record["source"] == GENERATED and not same:
        raise DamagedError(f"{path}: expected the labels of the clean images for images that are made from them")
    return Claimed(
        clean=tensors["clean"],
        guess=tensors["guess"],
        clean_label=tensors["clean_label"],
        label=tensors["label"],
        images=tuple(value for row in record["images"].values() for value in row),
    )
