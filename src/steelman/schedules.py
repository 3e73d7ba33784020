"""Schedules: functions of progress in [0, 1]. A learning rate or a radius is a number or a schedule.

Progress is (steps done) / (steps of the whole run). So a schedule is the same for any batch size and number of epochs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from steelman.errors import UserError
from steelman.settings import Number, SettingsError, named, number, settings


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


def _capped(start: float, end: float, cap: float | None) -> None:
    if cap is not None and cap < min(start, end):
        raise SettingsError(
            [(("cap",), f"expected at least the schedule's smallest value {min(start, end):g}, got {cap:g}")]
        )


@settings
class Linear:
    """start + (end - start) r, at most `cap`; r rises from 0 to 1 at the share `until` of the run, and stays there.

    With `end` above `cap`, this is the linear radius of Periodic Adversarial Scheduling.

    >>> Linear(start=0, end=8, until=0.5)(0.25), Linear(start=0, end=0.6, cap=0.4)(1.0)
    (4.0, 0.4)
    """

    start: Number
    end: Number
    until: Annotated[Number, Field(gt=0, le=1)] = 1.0
    cap: Number | None = None

    @model_validator(mode="after")
    def _possible(self) -> Linear:
        _capped(self.start, self.end, self.cap)
        return self

    def __call__(self, progress: float) -> float:
        value = self.start + (self.end - self.start) * min(progress / self.until, 1.0)
        return value if self.cap is None else min(value, self.cap)


@settings
class Cosine:
    """start + (end - start) (1 - cos(pi r)) / 2, at most `cap`; r rises from 0 to 1 at the share `until`, and stays.

    With `end` above `cap`, this is the cosine radius of Periodic Adversarial Scheduling.

    >>> round(Cosine(start=0, end=1)(0.5), 12)
    0.5
    """

    start: Number
    end: Number
    until: Annotated[Number, Field(gt=0, le=1)] = 1.0
    cap: Number | None = None

    @model_validator(mode="after")
    def _possible(self) -> Cosine:
        _capped(self.start, self.end, self.cap)
        return self

    def __call__(self, progress: float) -> float:
        r = min(progress / self.until, 1.0)
        value = self.start + (self.end - self.start) * (1 - math.cos(math.pi * r)) / 2
        return value if self.cap is None else min(value, self.cap)


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


@settings
class Resets:
    """Another schedule, which starts again at each share of the run in `at`.

    >>> Resets(schedule=Linear(start=0, end=8), at=[0.5])(0.75)
    4.0
    """

    schedule: Annotated[Any, BeforeValidator(lambda value: _as_schedule(value))]  # noqa: PLW0108 - defined below
    at: tuple[Annotated[Number, Field(gt=0, lt=1)], ...]

    @model_validator(mode="after")
    def _rising(self) -> Resets:
        if not self.at or any(b <= a for a, b in itertools.pairwise(self.at)):
            raise SettingsError([(("at",), f"expected one or more rising shares of the run, got {list(self.at)}")])
        return self

    def __call__(self, progress: float) -> float:
        edges = (0.0, *self.at, 1.0)
        cycle = sum(progress >= edge for edge in self.at)
        start, end = edges[cycle], edges[cycle + 1]
        return value_at(self.schedule, (progress - start) / (end - start))


@settings
class Warmup:
    """Another schedule or a number, multiplied by progress / `until` until that share of the run.

    >>> Warmup(schedule=0.1, until=0.5)(0.25)
    0.05
    """

    schedule: Annotated[Any, BeforeValidator(lambda value: _as_schedule(value))]  # noqa: PLW0108 - defined below
    until: Annotated[Number, Field(gt=0, le=1)] = 0.05

    def __call__(self, progress: float) -> float:
        return value_at(self.schedule, progress) * min(progress / self.until, 1.0)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "multistep": MultiStep,
    "piecewise": Piecewise,
    "cyclic": Cyclic,
    "resets": Resets,
    "warmup": Warmup,
}

_named = named("schedule", SCHEDULES)


def _as_schedule(value: Any) -> float | Schedule:
    plain = number(value)
    if isinstance(plain, (int, float)) and not isinstance(plain, bool):
        if not math.isfinite(plain):
            raise UserError(f"expected a finite number or a schedule, got {value!r}")
        return float(plain)
    built = _named.func(plain)  # type: ignore[call-arg]
    if not isinstance(built, Schedule):
        raise UserError(f"expected a number or a schedule ({', '.join(SCHEDULES)}), got {value!r}")
    return built


Scheduled = Annotated[float | Schedule, PlainValidator(_as_schedule)]


def lowest(value: float | Schedule) -> float:
    """The smallest value at 0, 1, 2 ... 100 percent of a run."""
    return min(value_at(value, percent / 100) for percent in range(101))


def value_at(value: float | Schedule, progress: float) -> float:
    """The number itself, or the schedule's value at `progress`."""
    return value(progress) if callable(value) else value
