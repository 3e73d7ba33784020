"""Robustness by class: how many samples of each class are right, and the wrong answers for the others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from steelman.evaluation.result import Evaluation, Score
from steelman.report.entry import Entry
from steelman.report.plots import Style
from steelman.report.verdict import Models, score_of

MOST_CLASSES = 20  # a larger table is too hard to read
SHADES = 6  # the style sheet has this many shades


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassRow:
    """One class: how many samples it has, and how many are right, clean and under attack."""

    name: str
    total: int
    clean: Score | None
    robust: Score | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistake:
    """How often the model gave the class `answer` for samples of the class `true`, under attack."""

    true: str
    answer: str
    count: int
    total: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classes:
    """A model's accuracy by class, and its wrong answers under attack."""

    entry: Entry
    look: Style
    shown: list[ClassRow]
    others: list[ClassRow]  # the classes beyond MOST_CLASSES
    cells: list[tuple[str, list[tuple[int, int]]]]  # class, (count, shade); none beyond MOST_CLASSES
    mistakes: list[Mistake]  # the most frequent first

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.cells]

    @property
    def weakest(self) -> ClassRow | None:
        return min(
            (row for row in self.shown if row.robust), key=lambda r: r.robust.accuracy if r.robust else 1, default=None
        )


def classes(models: Models) -> list[Classes]:
    """One entry for each cascade that has a confusion table."""
    return [_classes(entry, look, found) for entry, look in models if (found := entry.cascade) and found.confusion]


def _classes(entry: Entry, look: Style, evaluation: Evaluation) -> Classes:
    names, table = evaluation.classes, evaluation.confusion
    right: tuple[int, ...] = evaluation.right
    rows = []
    for k, (name, counts) in enumerate(zip(names, table, strict=True)):
        total = sum(counts)
        rows.append(
            ClassRow(
                name=name,
                total=total,
                clean=score_of(name, right[k], total) if right and total else None,
                robust=score_of(name, counts[k], total) if total else None,
            )
        )
    many = len(rows) > MOST_CLASSES
    if many:  # the least robust first, classes without a sample last
        rows.sort(key=lambda row: row.robust.accuracy if row.robust else 2)
    wrong = [
        Mistake(true=names[i], answer=names[j], count=count, total=sum(counts))
        for i, counts in enumerate(table)
        for j, count in enumerate(counts)
        if i != j and count
    ]
    wrong.sort(key=lambda mistake: -mistake.count)
    return Classes(
        entry=entry,
        look=look,
        shown=rows[:MOST_CLASSES],
        others=rows[MOST_CLASSES:],
        cells=[] if many else [(name, _shaded(counts)) for name, counts in zip(names, table, strict=True)],
        mistakes=wrong[: MOST_CLASSES if many else 3],
    )


def _shaded(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Each count with its shade: 0 for a count of 0, up to SHADES for the whole row."""
    total = max(sum(counts), 1)
    return [(count, math.ceil(SHADES * count / total)) for count in counts]
