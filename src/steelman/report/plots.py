"""The geometry of line charts and histograms. A template draws them as inline SVG.

Plotly's offline bundle would add 4 MB of script to each page. These charts need a few kilobytes and no script, and
their colours follow the reader's light or dark setting.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

COLOURS, DASHES = 6, 4  # the style sheet has this many colours and dashes
MARKERS = (  # SVG paths around the origin: circle, square, triangle up, diamond, triangle down
    "M-3.2,0a3.2,3.2 0 1,0 6.4,0a3.2,3.2 0 1,0 -6.4,0Z",
    "M-2.9,-2.9H2.9V2.9H-2.9Z",
    "M0,-4L3.7,2.7H-3.7Z",
    "M0,-4.2L4.2,0L0,4.2L-4.2,0Z",
    "M0,4L3.7,-2.7H-3.7Z",
)


class Point(NamedTuple):
    """A point of a line, with its interval if it has one. The line has a gap where `y` is None."""

    x: float
    y: float | None
    low: float | None = None
    high: float | None = None
    name: str = ""  # shown instead of the line's name


class Bar(NamedTuple):
    """A bar of a histogram: from `start` to `end` on the x axis, up to `height`."""

    start: float
    end: float
    height: float


class Style(NamedTuple):
    """The colour, dash and marker of a model, the same in every chart.

    Models of the same colour differ in dash or marker.
    """

    colour: int
    dash: int
    marker: str

    @classmethod
    def of(cls, index: int) -> Style:
        """The style of the model at `index`. The first 60 styles differ."""
        return cls(index % COLOURS, index % DASHES, MARKERS[index % len(MARKERS)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """The line of one model."""

    name: str
    style: Style
    points: tuple[Point, ...]

    def runs(self) -> list[list[Point]]:
        """The points between the gaps, one list for each connected part of the line."""
        found: list[list[Point]] = [[]]
        for point in self.points:
            if point.y is not None:
                found[-1].append(point)
            elif found[-1]:
                found.append([])
        return [run for run in found if run]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A linear axis from `low` to `high`. `text` writes a value, and `name` is the axis's name in a sentence."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    text: Callable[[float], str]
    name: str = ""


def percent_axis(label: str) -> Axis:
    """An axis of fractions from 0 to 1, written in percent."""
    return Axis(label=label, low=0.0, high=1.0, ticks=(0.0, 0.25, 0.5, 0.75, 1.0), text=_percent)


def _percent(value: float) -> str:
    return f"{round(100 * value, 1):g}%"


def tick_step(span: float, count: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts `span` into at most `count` pieces.

    >>> tick_step(30, 5), tick_step(30, 6)
    (10.0, 5.0)
    """
    power: float = 10.0 ** math.floor(math.log10(span / count))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power * count >= span * (1 - 1e-9))


def eps_axis(values: Iterable[float], *, in_255ths: bool) -> Axis:
    """An axis of radii, with ticks at round numbers or at round multiples of 1/255."""
    if not in_255ths:
        return axis("eps", values, count=6, snug=True)
    found = axis("eps", (255 * value for value in values), count=6, snug=True)
    ticks = tuple(tick / 255 for tick in found.ticks)
    return dataclasses.replace(
        found, high=found.high / 255, ticks=ticks, text=lambda v: f"{255 * v:.4g}/255" if v else "0"
    )


def axis(label: str, values: Iterable[float], *, count: int = 5, whole: bool = False, snug: bool = False) -> Axis:
    """An axis that covers `values` and zero, with ticks at round numbers.

    Args:
        count: the most ticks after the first.
        whole: ticks at whole numbers only, such as epochs.
        snug: the axis ends at the largest value, not at the next tick.
    """
    held = [0.0, *values]
    low, high = min(held), max(held)
    if high - low <= 0:
        high = low + 1
    step = tick_step(high - low, count)
    if whole:
        step = max(1.0, step)
    first = math.floor(low / step + 1e-9)
    last = math.floor(high / step + 1e-9) if snug else math.ceil(high / step - 1e-9)
    ticks = tuple(round(k * step, 12) for k in range(first, last + 1))
    return Axis(label=label, low=ticks[0], high=high if snug else ticks[-1], ticks=ticks, text=lambda v: f"{v:.4g}")


def log_axis(label: str, name: str, values: Iterable[float]) -> Axis:
    """A logarithmic axis from 1 to the largest of `values`. Points on it must be logarithms to the base 10."""
    high = max(1.0, *(math.log10(value) for value in values))
    ticks = tuple(p + q for p in range(math.floor(high) + 1) for q in (0.0, math.log10(3)) if p + q <= high)
    return Axis(
        label=label, low=0.0, high=high, ticks=ticks, text=lambda v: f"{float(f'{10**v:.3g}'):,.10g}", name=name
    )


def histogram(values: Sequence[float], ends: tuple[float, float], count: int) -> tuple[Bar, ...]:
    """How many of `values` fall into each of `count` equal parts between `ends`. The last part includes its end.

    >>> [bar.height for bar in histogram([0.0, 0.1, 0.9, 1.0], (0.0, 1.0), 2)]
    [2, 2]
    """
    low, high = ends
    width = (high - low) / count
    heights = [0] * count
    for value in values:
        heights[min(max(int((value - low) / width), 0), count - 1)] += 1
    return tuple(Bar(low + k * width, low + (k + 1) * width, height) for k, height in enumerate(heights))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart of lines with interval bands, or of bars.

    Positions and sizes are in the units of the SVG: x to the right, y down, origin at the top left.
    """

    id: str
    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...] = ()
    bars: tuple[Bar, ...] = ()
    said: str = ""  # what the chart shows, if it has no lines that say it
    rule: tuple[float, str] | None = None  # the x of a vertical line, and its label
    width: int = 340
    height: int = 220
    left: int = 44
    right: int = 14
    top: int = 12
    bottom: int = 38

    def across(self, x: float) -> float:
        """The horizontal position of a value of the x axis."""
        share = (x - self.x.low) / (self.x.high - self.x.low)
        return round(self.left + share * (self.width - self.left - self.right), 2)

    def down(self, y: float) -> float:
        """The vertical position of a value of the y axis."""
        share = (self.y.high - y) / (self.y.high - self.y.low)
        return round(self.top + share * (self.height - self.top - self.bottom), 2)

    def stroke(self, line: Line) -> str:
        """The SVG path of a line, with a break at each gap."""
        return " ".join(self._path([(p.x, p.y) for p in run if p.y is not None]) for run in line.runs() if len(run) > 1)

    def band(self, line: Line) -> str:
        """The SVG path around a line's intervals."""
        paths = []
        for run in line.runs():
            lower = [(p.x, p.low) for p in run if p.low is not None]
            upper = [(p.x, p.high) for p in run if p.high is not None]
            if len(lower) == len(upper) > 1:
                paths.append(self._path([*upper, *reversed(lower)]) + "Z")
        return " ".join(paths)

    def marks(self, line: Line, most: int = 12) -> list[tuple[float, float, str]]:
        """(x, y, text) of the markers of a line.

        A short line has a marker at every point, and so has a line with a named point. A long line has about `most`.
        """
        points = [point for run in line.runs() for point in run]
        stride = 1 if any(point.name for point in points) else math.ceil(len(points) / most)
        chosen = sorted({*range(0, len(points), max(1, stride)), *([len(points) - 1] if points else [])})
        return [
            (self.across(point.x), self.down(point.y), f"{point.name or line.name}: {self._say(point)}")
            for point in (points[i] for i in chosen)
            if point.y is not None
        ]

    @property
    def description(self) -> str:
        """The chart in words: where each line starts and ends."""
        said = [self.said] if self.said else []
        for line in self.lines:
            points = [point for run in line.runs() for point in run]
            ends = [self._say(point) for point in (points[:1] + points[-1:] if len(points) > 1 else points)]
            said.append(f"{line.name}: {' to '.join(ends) or 'no values'}.")
        return " ".join(said)

    def _say(self, point: Point) -> str:
        assert point.y is not None
        text = self.y.text(point.y)
        if point.low is not None and point.high is not None:
            text += f" [{self.y.text(point.low)}, {self.y.text(point.high)}]"
        return f"{text} at {self.x.name or self.x.label} {self.x.text(point.x)}"

    def _path(self, points: Iterable[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{self.across(x):g},{self.down(y):g}" for x, y in points)
