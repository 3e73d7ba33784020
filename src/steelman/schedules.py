"""Schedules: functions of progress in [0, 1]. Learning rates and radii take a number or one of these.

Progress is (steps done) / (steps of the whole run), so a schedule does not change when batch size or epochs do.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import Field, PlainValidator, model_validator

from steelman.errors import UserError
from steelman.settings import Number, named, number, settings


@runtime_checkable
class Schedule(Protocol):
    """A function of progress in [0, 1]."""

    def __call__(self, progress: float) -> float: ...


Share = Annotated[Number, Field(ge=0, le=1)]


@settings
class Constant:
    """The same value throughout."""

    value: Number

    def __call__(self, progress: float) -> float:  # noqa: ARG002 - a schedule takes progress
        return self.value


@settings
class Linear:
    """start + (end - start) r, reached at the share `until` of the run and held from there.

    >>> Linear(start=0, end=8, until=0.5)(0.25)
    4.0
    """

    start: Number
    end: Number
    until: Annotated[Number, Field(gt=0, le=1)] = 1.0

    def __call__(self, progress: float) -> float:
        return self.start + (self.end - self.start) * min(progress / self.until, 1.0)


@settings
class Cosine:
    """start + (end - start) (1 - cos(pi r)) / 2, reached at the share `until` of the run and held from there.

    >>> round(Cosine(start=0, end=1)(0.5), 12)
    0.5
    """

    start: Number
    end: Number
    until: Annotated[Number, Field(gt=0, le=1)] = 1.0

    def __call__(self, progress: float) -> float:
        r = min(progress / self.until, 1.0)
        return self.start + (self.end - self.start) * (1 - math.cos(math.pi * r)) / 2


@settings
class MultiStep:
    """`start`, multiplied by `factor` at each share of the run in `drops`.

    >>> [round(MultiStep(start=0.1, drops=[0.5, 0.75])(r), 6) for r in (0.0, 0.5, 0.8)]
    [0.1, 0.01, 0.001]
    """

    start: Number
    drops: tuple[Share, ...]
    factor: Annotated[Number, Field(gt=0)] = 0.1

    def __call__(self, progress: float) -> float:
        return self.start * self.factor ** sum(progress >= drop for drop in self.drops)


@settings
class Piecewise:
    """Straight lines through the points (progress, value).

    >>> Piecewise(points=[(0, 0), (0.4, 2), (1, 0)])(0.2)
    1.0
    """

    points: tuple[tuple[Share, Number], ...]

    @model_validator(mode="after")
    def _rising(self) -> Piecewise:
        at = [point[0] for point in self.points]
        if len(at) < 2 or any(b <= a for a, b in itertools.pairwise(at)):
            raise UserError(f"expected at least two points in rising order of progress, got {self.points}")
        return self

    def __call__(self, progress: float) -> float:
        points = self.points
        if progress <= points[0][0]:
            return points[0][1]
        for (r0, v0), (r1, v1) in itertools.pairwise(points):
            if progress <= r1:
                return v0 + (v1 - v0) * (progress - r0) / (r1 - r0)
        return points[-1][1]


@settings
class Cyclic:
    """From `low` up to `peak` at the share `peak_at` of the run, and back down to `low` at its end.

    >>> Cyclic(peak=0.2)(0.25)
    0.1
    """

    peak: Number
    low: Number = 0.0
    peak_at: Annotated[Number, Field(gt=0, lt=1)] = 0.5

    def __call__(self, progress: float) -> float:
        rising = progress <= self.peak_at
        r = progress / self.peak_at if rising else (1 - progress) / (1 - self.peak_at)
        return self.low + (self.peak - self.low) * r


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "multistep": MultiStep,
    "piecewise": Piecewise,
    "cyclic": Cyclic,
}

_named = named("schedule", SCHEDULES)


def _as_schedule(value: Any) -> float | Schedule:
    plain = value if isinstance(value, bool) else number(value)
    if isinstance(plain, (int, float)) and not isinstance(plain, bool):
        if not math.isfinite(plain):
            raise UserError(f"expected a finite number or a schedule, got {value!r}")
        return float(plain)
    built = _named.func(plain)  # type: ignore[call-arg]
    if not isinstance(built, Schedule):
        raise UserError(f"expected a number or a schedule ({', '.join(SCHEDULES)}), got {value!r}")
    return built


Scheduled = Annotated[float | Schedule, PlainValidator(_as_schedule)]


def value_at(value: float | Schedule, progress: float) -> float:
    """A number as it is; a schedule at `progress`."""
    return value(progress) if callable(value) else value
