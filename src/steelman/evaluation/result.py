"""The results of an evaluation, as frozen records of plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from scipy.special import betaincinv
from torch import Tensor

from steelman.errors import UserError


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


def share_of(correct: int, total: int) -> str:
    """A share of the samples and its 95% interval, as text in percent.

    >>> share_of(5, 10)
    '50.0% [18.7, 81.3]'
    """
    low, high = interval(correct, total)
    return f"{100 * correct / total:.1f}% [{100 * low:.1f}, {100 * high:.1f}]"


def in_255ths(eps: float) -> bool:
    """Whether a radius is meant in 8-bit grey levels. 8/255 is. 0.2 is not, although it equals 51/255."""
    return abs(eps - round(eps, 3)) > 1e-9 and abs(eps * 510 - round(eps * 510)) < 1e-4


def radius(eps: float) -> str:
    """A radius as text.

    >>> radius(8 / 255), radius(0.2)
    ('8/255', '0.2')
    """
    return f"{round(eps * 510) / 2:g}/255" if in_255ths(eps) else f"{eps:.4g}"


def grey_levels(norm: str, eps: float, low: float = 0.0, high: float = 1.0) -> str:
    """A radius in grey levels of 8-bit images. Empty in l0, where a radius counts pixels.

    >>> grey_levels("linf", 8 / 255), grey_levels("linf", 0.15, 0, 255)
    ('8.0 of 255 grey levels', '0.15 of 255 grey levels')
    """
    levels = eps * 255 / (high - low)
    digits = f"{levels:.1f}" if levels >= 1 else f"{levels:.2g}"
    return "" if norm == "l0" else f"{digits} of 255 grey levels"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """How many of `total` samples are right: without an attack, under one attack, or under all attacks together.

    `seconds` is None if the time is not known.
    """

    name: str  # "clean", the attack's label, or "worst case"
    settings: dict[str, Any]
    correct: int
    total: int
    seconds: float | None = None

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
    """One sample of the gallery. Its images are in the input range, of shape (C, H, W)."""

    index: int
    label: int
    clean_prediction: int
    adversarial_prediction: int
    attack: str
    clean: Tensor
    adversarial: Tensor


Trust = Literal["sound", "suspect", "invalid"]
Role = Literal["attack", "pilot", "sentinel", "escalation"]  # see `Stage`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """A sign that attacks may have failed on samples that are not robust.

    `name` identifies the flag. `figure` is the measured value. The flag is raised if `figure` is above `limit`. `trust`
    is the most trust that a raised flag leaves to the verdict. With "sound", the flag does not lower the trust. `text`
    explains the flag.
    """

    name: str
    figure: float
    limit: float
    raised: bool
    trust: Trust
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Verdict:
    """How many samples no attack broke (`correct`), and how far this number can be trusted.

    `clean` counts the samples that are right without an attack. `norm`, `eps`, `low` and `high` are the threat model.
    `complete` is False if the time ran out before the end of the suite. `escalated` is True if a raised flag made the
    escalation stages run on every robust sample. `protocol` is True if the suite is a protocol. Printed, a verdict has
    at most three lines.
    """

    correct: int
    total: int
    clean: int
    norm: str
    eps: float
    suite: str
    trust: Trust
    reasons: tuple[str, ...]
    flags: tuple[Flag, ...]
    complete: bool = True
    escalated: bool = False
    protocol: bool = False
    low: float = 0.0
    high: float = 1.0

    @property
    def robust_accuracy(self) -> float:
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        return interval(self.correct, self.total)

    @property
    def word(self) -> str:
        """The trust in one or two words. A protocol does not check whether its attacks work, so it gives a bound."""
        return "upper bound" if self.protocol and self.trust == "sound" else self.trust

    @property
    def ball(self) -> str:
        """The norm, and the radius as a number and in grey levels."""
        levels = grey_levels(self.norm, self.eps, self.low, self.high)
        return f"{self.norm}, eps {self.eps:.3g}" + (f", {levels}" if levels else "")

    def __str__(self) -> str:
        robust, clean = (share_of(count, self.total) for count in (self.correct, self.clean))
        lines = [
            f"robust {robust} of {self.total:,} ({self.ball}), {self.word}",
            f"clean {clean}, suite {self.suite}",
        ]
        return "\n".join([*lines, *(["; ".join(self.reasons)] if self.reasons else [])])

    __repr__ = __str__  # a notebook shows this one


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageRecord:
    """What one stage of a suite did: how many samples it attacked and broke, and its passes.

    Three counts are of points that were not counted: `outside` the threat model, with logits that are not finite, and
    `refuted`. A refuted point is a success of the attack that full precision does not confirm. The model was copied
    before the first question. The copy was asked about `witnessed` points. Its answer was another one at
    `contradicted` of them.
    """

    name: str
    settings: dict[str, Any]
    attacked: int
    broken: int
    left: int
    forwards: int
    backwards: int
    outside: int = 0
    refuted: int = 0
    nonfinite: int = 0
    witnessed: int = 0
    contradicted: int = 0
    seconds: float | None = None


def scores_of(
    stages: Sequence[StageRecord], total: int, *, clean: int, robust: int, clean_seconds: float | None
) -> tuple[Score, ...]:
    """The scores: clean, after each stage (in a protocol: under each attack), and the worst case."""
    return (
        Score(name="clean", settings={}, correct=clean, total=total, seconds=clean_seconds),
        *(
            Score(name=stage.name, settings=stage.settings, correct=stage.left, total=total, seconds=stage.seconds)
            for stage in stages
        ),
        Score(name="worst case", settings={}, correct=robust, total=total, seconds=seconds_of(stages)),
    )


def seconds_of(stages: Sequence[StageRecord]) -> float | None:
    """The seconds of all stages together. None if the time of any stage is not known."""
    known = [stage.seconds for stage in stages if stage.seconds is not None]
    return sum(known) if len(known) == len(stages) else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results for one model on one dataset under one threat model, with the settings behind the numbers.

    `margins` are the smallest margins of the robust samples. `right` counts, for each class, the samples that are right
    without an attack. `confusion` counts the model's answers under attack: rows are true classes, columns are answers.
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

    @classmethod
    def load(cls, path: Path | str) -> Evaluation:
        """The evaluation whose evidence is in the folder `path`.

        For the folder of a run, it is the evidence in ``verdict``, or else in ``attacks``. Changed files are refused.
        `verify` also checks the claims.
        """
        from steelman.evidence.rebuild import evaluation_of  # at the top of the file, this import would be a cycle

        return evaluation_of(Path(path))
