"""What an evaluation found: plain, frozen records that save to JSON and safetensors and load back equal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from scipy.special import betaincinv
from torch import Tensor

from steelman.errors import UserError
from steelman.files import write_atomic


def interval(correct: int, total: int, confidence: float = 0.95) -> tuple[float, float]:
    """The exact (Clopper-Pearson) confidence interval of a proportion.

    >>> low, high = interval(5, 10)
    >>> round(low, 4), round(high, 4)
    (0.1871, 0.8129)
    """
    if not 0 <= correct <= total or total < 1:
        raise UserError(f"expected 0 .. {total} of at least one sample, got {correct}")
    tail = (1 - confidence) / 2
    low = float(betaincinv(correct, total - correct + 1, tail)) if correct else 0.0
    high = float(betaincinv(correct + 1, total - correct, 1 - tail)) if correct < total else 1.0
    return low, high


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


Trust = Literal["sound", "suspect", "invalid"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """A sign that an attack may have failed where the model did not hold: what was seen, and what follows from it.

    `name` is for machines, `figure` what was measured and `limit` where it begins to matter; `trust` is what a raised
    flag leaves of the verdict's ("sound": it is worth knowing, no more). `text` says it in plain words.
    """

    name: str
    figure: float
    limit: float
    raised: bool
    trust: Trust
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """How many samples no attack broke, and how far that may be believed.

    `complete` is False when the time ran out before the suite was through; `escalated` says that doubt made the whole
    of AutoAttack run on every survivor; `protocol` that each attack was run on every sample, and nothing else.
    """

    correct: int
    total: int
    suite: str
    trust: Trust
    reasons: tuple[str, ...]
    flags: tuple[Flag, ...]
    complete: bool = True
    escalated: bool = False
    protocol: bool = False

    @property
    def robust_accuracy(self) -> float:
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        return interval(self.correct, self.total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageRecord:
    """What one stage of a suite did: how many samples it attacked and broke, and its passes through the model."""

    name: str
    settings: dict[str, Any]
    attacked: int
    broken: int
    left: int
    forwards: int
    backwards: int
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One model, one dataset, one threat model: scores, accuracy against eps, a gallery, and all that is needed to
    read the numbers (settings, seed, count, versions).

    Also the verdict, the stages, the survivors' smallest margins, and by class how many samples were `right` when left
    alone and what they were taken for under attack (`confusion`: rows are true classes, columns answers).
    """

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
    verdict: Verdict | None = None
    stages: tuple[StageRecord, ...] = ()
    right: tuple[int, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    margins: tuple[float, ...] = ()

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
        record["stages"] = [dataclasses.asdict(stage) for stage in self.stages]
        record["verdict"] = None if self.verdict is None else dataclasses.asdict(self.verdict)
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
        record["stages"] = tuple(StageRecord(**stage) for stage in record.get("stages", ()))
        record["confusion"] = tuple(map(tuple, record.get("confusion", ())))
        record["margins"] = tuple(record.get("margins", ()))
        record["right"] = tuple(record.get("right", ()))
        verdict = record.get("verdict")
        if verdict is not None:
            flags = tuple(Flag(**flag) for flag in verdict["flags"])
            record["verdict"] = Verdict(**{**verdict, "flags": flags, "reasons": tuple(verdict["reasons"])})
        return cls(**record)
