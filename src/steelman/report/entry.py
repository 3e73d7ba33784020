"""What a report is made from: a model's name, its evaluation, and the history of its training."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from steelman.evaluation.result import Evaluation, Score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of a report; `history` holds the lines of a run's ``metrics.jsonl``, one per epoch."""

    name: str
    evaluation: Evaluation | None
    history: tuple[dict[str, Any], ...] = ()

    def score(self, name: str) -> Score | None:
        """The score called `name`, or None if this model was not measured so."""
        scores = self.evaluation.scores if self.evaluation else ()
        return next((score for score in scores if score.name == name and score.total > 0), None)

    def metric(self, key: str) -> list[tuple[float, float | None]]:
        """(epoch, value) for each epoch of the history; a missing, null or infinite value is None.

        >>> Entry(name="a", evaluation=None, history=({"epoch": 1, "loss": 2.0}, {"epoch": 2})).metric("loss")
        [(1.0, 2.0), (2.0, None)]
        """
        pairs = ((_finite(line.get("epoch")), _finite(line.get(key))) for line in self.history)
        return [(epoch, value) for epoch, value in pairs if epoch is not None]


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
