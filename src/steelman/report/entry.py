"""The input of a report: for each model its name, its evaluation, and its training history."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from steelman.evaluation.result import Evaluation, Score

CLEAN, WORST = "clean", "worst case"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of a report. `history` holds the lines of a run's ``metrics.jsonl``, one for each epoch."""

    name: str
    evaluation: Evaluation | None
    history: tuple[dict[str, Any], ...] = ()

    @property
    def cascade(self) -> Evaluation | None:
        """The evaluation, if its suite is a cascade."""
        verdict = self.evaluation.verdict if self.evaluation else None
        return self.evaluation if verdict and not verdict.protocol else None

    @property
    def doubt(self) -> str:
        """The trust of the verdict, or an empty text if it is sound."""
        verdict = self.evaluation.verdict if self.evaluation else None
        return verdict.trust if verdict and verdict.trust != "sound" else ""

    @property
    def scores(self) -> tuple[Score, ...]:
        """The scores: clean, under each attack, and the worst case.

        A cascade has no scores for its stages, because each stage gets only some of the samples.
        """
        scores = self.evaluation.scores if self.evaluation else ()
        return tuple(score for score in scores if not self.cascade or score.name in (CLEAN, WORST))

    def score(self, name: str) -> Score | None:
        """The score called `name`, or None if this model has no such score."""
        return next((score for score in self.scores if score.name == name and score.total > 0), None)

    def metric(self, key: str) -> list[tuple[float, float | None]]:
        """(epoch, value) for each epoch of the history. A missing, null or infinite value is None.

        >>> Entry(name="a", evaluation=None, history=({"epoch": 1, "loss": 2.0}, {"epoch": 2})).metric("loss")
        [(1.0, 2.0), (2.0, None)]
        """
        pairs = ((_finite(line.get("epoch")), _finite(line.get(key))) for line in self.history)
        return [(epoch, value) for epoch, value in pairs if epoch is not None]


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
