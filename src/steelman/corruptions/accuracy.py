"""The accuracy of a model on corrupted images: one number for each corruption and severity, and what follows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from scipy.special import betaincinv
from torch import Tensor

from steelman.corruptions import KINDS, SEVERITIES, STANDARD
from steelman.errors import UserError, shown, unknown
from steelman.evaluation.result import interval
from steelman.evidence.compare import holm, mcnemar

LEVEL = 0.05  # below this corrected p, two models differ


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over samples, with its 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Tensor) -> Mean:
        """The mean of one value from 0 to 1 for each sample.

        The interval is Clopper-Pearson's for as many answers of 0 or 1 as would have this mean's variance (Korn and
        Graubard, 1998). Student's interval would be far too short near 0 and 1.

        >>> found = Mean.of(torch.tensor([0.0, 1.0, 1.0, 1.0]))
        >>> found.value, round(found.low, 3), round(found.high, 3)
        (0.75, 0.194, 0.994)
        """
        values, count = values.double(), len(values)
        mean = float(values.mean())
        spread = float(values.var(correction=0)) if count > 1 else 0.0
        # Without any spread, nothing is known of the variance. Then each sample counts as one answer.
        answers = count * mean * (1 - mean) / spread if spread > 1e-12 else float(count)
        right = answers * mean
        low = float(betaincinv(right, answers - right + 1, 0.025)) if mean > 0 else 0.0
        high = float(betaincinv(right + 1, answers - right, 0.975)) if mean < 1 else 1.0
        return cls(mean, low, high)

    @classmethod
    def of_differences(cls, values: Tensor) -> Mean:
        """The mean of one difference from -1 to 1 for each sample."""
        found = cls.of((values.double() + 1) / 2)
        return cls(*(2 * value - 1 for value in (found.value, found.low, found.high)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorruptionAccuracy:
    """The answers of one model to the corrupted images, and their accuracy.

    `source` is "generated", or the name of a published set. `right` has a row for each corruption and severity, in the
    order of `cells`, and a column for each sample. `clean` has the same without a corruption. `settings` are those of
    the corruptions. `images` has a checksum of the images of each row, and `digest` is that of the clean data. `frost`
    says which pictures of frost were used.
    """

    model: str
    data: str
    source: str
    corruptions: tuple[str, ...]
    severities: tuple[int, ...]
    settings: dict[str, Any]
    seed: int
    clean: Tensor
    right: Tensor
    images: tuple[str, ...]
    digest: str
    frost: str
    versions: dict[str, str]

    @property
    def total(self) -> int:
        return self.right.shape[1]

    @property
    def cells(self) -> list[tuple[str, int]]:
        return [(name, severity) for name in self.corruptions for severity in self.severities]

    @property
    def standard(self) -> bool:
        """Whether all 75 cells of the benchmark are there."""
        return set(STANDARD) <= set(self.corruptions) and self.severities == SEVERITIES

    def row(self, name: str, severity: int) -> Tensor:
        """Which samples are right in a cell."""
        if name not in self.corruptions:
            raise unknown("corruption", name, self.corruptions)
        if severity not in self.severities:
            raise unknown("severity", severity, map(str, self.severities))
        return self.right[self.corruptions.index(name) * len(self.severities) + self.severities.index(severity)]

    def correct(self, name: str, severity: int) -> int:
        """How many samples are right in a cell."""
        return int(self.row(name, severity).sum())

    def accuracy(self, name: str, severity: int) -> float:
        return self.correct(name, severity) / self.total

    def interval(self, name: str, severity: int) -> tuple[float, float]:
        """The 95% Clopper-Pearson interval of a cell's accuracy."""
        return interval(self.correct(name, severity), self.total)

    def over(self, names: tuple[str, ...], severities: tuple[int, ...] | None = None) -> Mean:
        """The mean accuracy over some corruptions and severities. The interval is over the samples."""
        rows = [self.row(name, severity) for name in names for severity in severities or self.severities]
        return Mean.of(torch.stack(rows).double().mean(dim=0))

    @property
    def measured(self) -> tuple[str, ...]:
        """The corruptions that the mean is over: those of the benchmark if all are there, else all that are there."""
        return STANDARD if self.standard else self.corruptions

    @property
    def mean(self) -> Mean:
        """The mean accuracy over all measured corruptions and severities. With all 75 cells it is the mCA."""
        return self.over(self.measured)

    @property
    def mca(self) -> Mean:
        """The mean corruption accuracy: the plain mean over 15 corruptions and 5 severities (Pang et al., 2020)."""
        if not self.standard:
            raise UserError(f"expected the 15 corruptions and 5 severities of the benchmark, got {self.what}")
        return self.mean

    @property
    def what(self) -> str:
        return f"{len(self.corruptions)} corruptions and {len(self.severities)} severities"

    def kinds(self) -> dict[str, Mean]:
        """The mean accuracy over noise, blur, weather and digital changes, as far as they were measured."""
        found = {kind: tuple(name for name in names if name in self.corruptions) for kind, names in KINDS.items()}
        return {kind: self.over(names) for kind, names in found.items() if names}

    def mce(self, baseline: CorruptionAccuracy, *, relative: bool = False) -> float:
        """The mean corruption error against a baseline, in percent (Hendrycks and Dietterich, 2019).

        It is the mean over corruptions of E / E_baseline, with the errors summed over severities. `relative` takes the
        clean error away from each error. Infinite if a baseline's sum is not above 0. Only with all 75 cells is it the
        benchmark's mCE.
        """
        self.check_like(baseline)

        def summed(one: CorruptionAccuracy, name: str) -> int:
            # In whole numbers: sums of rounded shares would not be 0 where they should.
            clean = len(one.clean) - int(one.clean.sum()) if relative else 0
            wrong = (one.total - one.correct(name, severity) for severity in one.severities)
            return sum(count * len(one.clean) - clean * one.total for count in wrong)

        ratios = []
        for name in self.measured:
            ours, theirs = summed(self, name), summed(baseline, name)
            ratios.append(ours / theirs if theirs > 0 else math.inf)
        return 100 * sum(ratios) / len(ratios)

    def check_like(self, other: CorruptionAccuracy) -> None:
        """Refuse a comparison of accuracies on other images."""
        if not isinstance(other, CorruptionAccuracy):
            raise UserError(f"expected the accuracy of another model on corrupted images, got {shown(other)}")
        for what in ("source", "corruptions", "severities", "total", "digest", "images"):
            ours, theirs = getattr(self, what), getattr(other, what)
            if ours != theirs:
                said = f"{ours} and {theirs}" if what in ("source", "total") else "they differ"
                raise UserError(
                    f"{self.model} and {other.model}: expected accuracies on the same images; {what}: {said}"
                )

    def against(self, other: CorruptionAccuracy) -> Difference:
        """The difference to another model on the same images."""
        self.check_like(other)
        names = self.measured
        ours, theirs = (
            torch.stack([one.row(name, severity) for name in names for severity in self.severities])
            for one in (self, other)
        )
        apart = Mean.of_differences(ours.double().mean(dim=0) - theirs.double().mean(dim=0))
        tests = [(int((mine & ~its).sum()), int((its & ~mine).sum())) for mine, its in zip(ours, theirs, strict=True)]
        corrected = holm([mcnemar(*counts) for counts in tests])
        cells = [(name, severity) for name in names for severity in self.severities]
        sure = [(cell, counts) for cell, counts, p in zip(cells, tests, corrected, strict=True) if p < LEVEL]
        return Difference(
            first=self.model,
            second=other.model,
            mean=apart,
            better=tuple(cell for cell, (mine, its) in sure if mine > its),
            worse=tuple(cell for cell, (mine, its) in sure if mine < its),
            cells=len(cells),
        )

    def to_dict(self) -> dict[str, Any]:
        """The numbers as plain values."""
        mean = self.mean
        return {
            "model": self.model,
            "data": self.data,
            "source": self.source,
            "total": self.total,
            "clean": float(self.clean.double().mean()),
            "mean": [mean.value, mean.low, mean.high],
            "mCA": self.mca.value if self.standard else None,
            "cells": {
                name: [self.accuracy(name, severity) for severity in self.severities] for name in self.corruptions
            },
        }

    def __str__(self) -> str:
        mean = self.mean
        name = "mCA" if self.standard else f"mean over {self.what}"
        clean = interval(int(self.clean.sum()), len(self.clean))
        return (
            f"{name} {percent(mean)} of {self.total:,} ({self.data}, {self.source})\n"
            f"clean {100 * float(self.clean.double().mean()):.1f}% [{100 * clean[0]:.1f}, {100 * clean[1]:.1f}]"
        )

    __repr__ = __str__  # a notebook shows this one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The first model's mean accuracy minus the second's, and the cells in which they surely differ.

    In a cell, McNemar's exact test compares them, with Holm's correction over all cells.
    """

    first: str
    second: str
    mean: Mean
    better: tuple[tuple[str, int], ...]
    worse: tuple[tuple[str, int], ...]
    cells: int

    @property
    def text(self) -> str:
        """The result in one sentence."""
        low, high = 100 * self.mean.low, 100 * self.mean.high
        points = f"{100 * self.mean.value:+.1f} points [{low:+.1f}, {high:+.1f}]"
        cells = f"better in {len(self.better)} and worse in {len(self.worse)} of {self.cells} cells beyond chance"
        if low > 0 or high < 0:
            ahead, behind = (self.first, self.second) if low > 0 else (self.second, self.first)
            start = f"{ahead} is more accurate on corrupted images than {behind}"
        else:
            start = f"these samples do not settle whether {self.first} or {self.second} is more accurate"
        return f"{start}: {self.first} minus {self.second} is {points}; {self.first} is {cells}"


def percent(mean: Mean) -> str:
    """A mean and its interval, in percent.

    >>> percent(Mean(0.5, 0.4, 0.6))
    '50.0% [40.0, 60.0]'
    """
    return f"{100 * mean.value:.1f}% [{100 * mean.low:.1f}, {100 * mean.high:.1f}]"


def shares(cells: Mapping[str, tuple[float, ...]]) -> float:
    """The plain mean over cells of accuracies, for published tables."""
    values = [value for row in cells.values() for value in row]
    return sum(values) / len(values)
