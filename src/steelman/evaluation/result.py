"""What an evaluation found: plain, frozen records that save to JSON and safetensors and load back equal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from scipy.stats import binomtest
from torch import Tensor

from steelman.errors import UserError
from steelman.files import write_atomic


def interval(correct: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact (Clopper-Pearson) confidence interval of a proportion.

    >>> low, high = interval(5, 10)
    >>> round(low, 4), round(high, 4)
    (0.1871, 0.8129)
    """
    found = binomtest(correct, total).proportion_ci(confidence, method="exact")
    return float(found.low), float(found.high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """How many of `total` samples stay right: clean, under one attack, or under all attacks together."""

    name: str  # "clean", the attack's label, or "worst case"
    settings: dict[str, Any]
    correct: int
    total: int
    seconds: float

    @property
    def accuracy(self) -> float:
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        return interval(self.correct, self.total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Accuracy under the curve's attack at one radius."""

    eps: float
    correct: int
    total: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """One sample of the gallery; images are in the input range, shape (C, H, W)."""

    index: int
    label: int
    clean_prediction: int
    adversarial_prediction: int
    attack: str
    clean: Tensor
    adversarial: Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One model, one dataset, one threat model: scores, accuracy against eps, a gallery, and all that is needed to
    read the numbers (settings, seed, count, versions)."""

    model: str
    data: str
    classes: tuple[str, ...]
    norm: str
    eps: float
    low: float
    high: float
    seed: int
    total: int
    versions: dict[str, str]
    scores: tuple[Score, ...]
    curve: tuple[CurvePoint, ...]
    curve_attack: str
    gallery: tuple[Example, ...]
    notes: tuple[str, ...] = ()

    def score(self, name: str) -> Score:
        """The score called `name`."""
        for score in self.scores:
            if score.name == name:
                return score
        raise UserError(f"no score {name!r} in this evaluation; it has: {', '.join(s.name for s in self.scores)}")

    def save(self, folder: Path) -> None:
        """Write ``evaluation.json`` and ``gallery.safetensors`` into `folder`."""
        record = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        record["scores"] = [dataclasses.asdict(score) for score in self.scores]
        record["curve"] = [dataclasses.asdict(point) for point in self.curve]
        record["gallery"] = [
            {k: v for k, v in vars(example).items() if not isinstance(v, Tensor)} for example in self.gallery
        ]
        tensors = {}
        if self.gallery:
            tensors["clean"] = torch.stack([example.clean for example in self.gallery]).contiguous()
            tensors["adversarial"] = torch.stack([example.adversarial for example in self.gallery]).contiguous()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "gallery.safetensors", save(tensors))
        write_atomic(folder / "evaluation.json", json.dumps(record, indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> Evaluation:
        """Read back what ``save`` wrote."""
        try:
            record = json.loads((folder / "evaluation.json").read_text())
            images = load_file(folder / "gallery.safetensors")
        except FileNotFoundError as error:
            raise UserError(f"no evaluation in {folder}: {error.filename or error} is missing") from None
        except (ValueError, SafetensorError) as error:
            raise UserError(f"the evaluation in {folder} is damaged: {error}") from None
        record["classes"] = tuple(record["classes"])
        record["notes"] = tuple(record["notes"])
        record["scores"] = tuple(Score(**score) for score in record["scores"])
        record["curve"] = tuple(CurvePoint(**point) for point in record["curve"])
        record["gallery"] = tuple(
            Example(**entry, clean=images["clean"][i], adversarial=images["adversarial"][i])
            for i, entry in enumerate(record["gallery"])
        )
        return cls(**record)
