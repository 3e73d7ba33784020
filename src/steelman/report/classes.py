"""Robustness by class: how many samples of each stay right, and what the others are taken for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from steelman.evaluation.result import Evaluation, Score
from steelman.report.entry import Entry
from steelman.report.plots import Style
from steelman.report.verdict import Models, score_of

MOST_CLASSES = 20  # a table of more cannot be read
SHADES = 6  # the style sheet defines this many


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassRow:
    """One class: how many samples it has, and how many of them stay right."""

    name: str
    total: int
    clean: Score | None
    robust: Score | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mistake:
    """How often one class was taken for another."""

    true: str
    answer: str
    count: int
    total: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classes:
    """A model's accuracy by class, and what it takes each class for under attack."""

    entry: Entry
    look: Style
    shown: list[ClassRow]
    others: list[ClassRow]  # those that are left when there are many
    cells: list[tuple[str, list[tuple[int, int]]]]  # (count, shade) by row; empty when there are many
    mistakes: list[Mistake]  # the commonest first

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.cells]

    @property
    def weakest(self) -> ClassRow | None:
        return min(
            (row for row in self.shown if row.robust), key=lambda r: r.robust.accuracy if r.robust else 1, default=None
        )


def classes(models: Models) -> list[Classes]:
    """One for each cascade that says what was taken for what."""
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
    if many:  # the weakest first; those without a sample last
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
    """Each count with its shade: none for 0, else by its share of the row."""
    total = max(sum(counts), 1)
    return [(count, math.ceil(SHADES * count / total)) for count in counts]
