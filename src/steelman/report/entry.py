"""What a report is made from: a model's name, its evaluation, and the history of its training."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from steelman.evaluation.result import Evaluation, Score

CLEAN, WORST = "clean", "worst case"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of a report; `history` holds the lines of a run's ``metrics.jsonl``, one per epoch."""

    name: str
    evaluation: Evaluation | None
    history: tuple[dict[str, Any], ...] = ()

    @property
    def cascade(self) -> Evaluation | None:
        """The evaluation, if it is a cascade's."""
        verdict = self.evaluation.verdict if self.evaluation else None
        return self.evaluation if verdict and not verdict.protocol else None

    @property
    def doubt(self) -> str:
        """The trust in the verdict, unless that is sound."""
        verdict = self.evaluation.verdict if self.evaluation else None
        return verdict.trust if verdict and verdict.trust != "sound" else ""

    @property
    def scores(self) -> tuple[Score, ...]:
        """Accuracy clean, under each attack, and under all; a cascade's stages meet only what others left of it."""
        scores = self.evaluation.scores if self.evaluation else ()
        return tuple(score for score in scores if not self.cascade or score.name in (CLEAN, WORST))

    def score(self, name: str) -> Score | None:
        """The score called `name`, or None if this model was not measured so."""
        return next((score for score in self.scores if score.name == name and score.total > 0), None)

    def metric(self, key: str) -> list[tuple[float, float | None]]:
        """(epoch, value) for each epoch of the history; a missing, null or infinite value is None.

        >>> Entry(name="a", evaluation=None, history=({"epoch": 1, "loss": 2.0}, {"epoch": 2})).metric("loss")
        [(1.0, 2.0), (2.0, None)]
        """
        pairs = ((_finite(line.get("epoch")), _finite(line.get(key))) for line in self.history)
        return [(epoch, value) for epoch, value in pairs if epoch is not None]


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
