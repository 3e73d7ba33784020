"""Writes the accuracies on corrupted images as one HTML page: means, differences, heat maps and curves.

The page has no script and loads no other file, as the page of a verdict.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from steelman.corruptions.accuracy import CorruptionAccuracy, Difference, Mean
from steelman.corruptions.published import PublishedTable
from steelman.errors import UserError
from steelman.evaluation.result import Score
from steelman.files import write_atomic
from steelman.report.html import environment, sheet
from steelman.report.plots import Axis, Chart, Line, Point, Style, percent_axis

SHADES = (0.05, 0.15, 0.3, 0.45, 0.6, 0.8)  # the error rates above which a cell has the next stronger tint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown:
    """A number with its interval, as the page's cells take it."""

    accuracy: float
    interval: tuple[float, float]

    @classmethod
    def of(cls, mean: Mean) -> Shown:
        return cls(accuracy=mean.value, interval=(mean.low, mean.high))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beside:
    """A model's accuracies beside others: what they are called, those of each corruption, and notes."""

    name: str
    cells: dict[str, tuple[float, ...]]
    mean: float
    notes: tuple[str, ...]


def beside_published(row: PublishedTable) -> Beside:
    """Published accuracies, to stand beside measured ones."""
    cells = {name: tuple(value / 100 for value in values) for name, values in row.cells.items()}
    notes = (
        f"{row.name} on {row.set_name}, from {row.source}. It is another model on other images.",
        f"The paper prints a mean of {row.printed_mca:.2f}%; its cells have {row.mca:.2f}%.",
        *row.errata,
    )
    return Beside(name=f"published {row.name}", cells=cells, mean=row.mca / 100, notes=notes)


def beside_official(found: CorruptionAccuracy) -> Beside:
    """The accuracies on a published set, to stand beside those on generated images."""
    cells = {name: tuple(found.accuracy(name, severity) for severity in found.severities) for name in found.corruptions}
    low, high = 100 * found.mean.low, 100 * found.mean.high
    notes = (
        f"{found.source}: {found.total:,} images a cell, mean {100 * found.mean.value:.1f}% [{low:.1f}, {high:.1f}].",
    )
    return Beside(name=found.source, cells=cells, mean=found.mean.value, notes=notes)


def write(
    path: Path,
    found: Sequence[CorruptionAccuracy],
    *,
    baseline: CorruptionAccuracy | None = None,
    beside: Sequence[tuple[int, Beside]] = (),
) -> None:
    """Render the page, and write it to `path` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, render(found, baseline=baseline, beside=beside).encode())


def render(
    found: Sequence[CorruptionAccuracy],
    *,
    baseline: CorruptionAccuracy | None = None,
    beside: Sequence[tuple[int, Beside]] = (),
) -> str:
    """The page as a string. `beside` has accuracies that stand beside those of the model with that number."""
    if not found:
        raise UserError("a report needs at least one model, got none")
    for one in found[1:]:
        found[0].check_like(one)
    first, (style, policy) = found[0], sheet()
    models = [(one, Style.of(number)) for number, one in enumerate(found)]
    return str(
        environment()
        .get_template("corruptions.html")
        .render(
            title=f"{first.model if len(found) == 1 else f'{len(found)} models'} on corrupted images",
            style=style,
            policy=policy,
            first=first,
            mean_name="mCA" if first.standard else "mean",
            models=[(one, look, _means(one)) for one, look in models],
            baseline=baseline,
            errors=_errors(found, baseline),
            error_names=error_names(first),
            lead=_lead(found),
            differences=differences(found),
            heats=[(one, _heat(one)) for one in found],
            severities=first.severities,
            charts=_charts(models),
            beside=[(found[number].model, other, _table(found[number], other)) for number, other in beside],
        )
    )


def differences(found: Sequence[CorruptionAccuracy]) -> list[Difference]:
    """The difference of each pair of models."""
    return [one.against(other) for one, other in itertools.combinations(found, 2)]


def _means(one: CorruptionAccuracy) -> dict[str, Score | Shown]:
    clean = Score(name="clean", settings={}, correct=int(one.clean.sum()), total=len(one.clean))
    kinds = {kind: Shown.of(mean) for kind, mean in one.kinds().items()}
    return {"clean": clean, **kinds, "mCA" if one.standard else "mean": Shown.of(one.mean)}


def _errors(found: Sequence[CorruptionAccuracy], baseline: CorruptionAccuracy | None) -> list[tuple[str, str, str]]:
    """(model, mCE, relative mCE) of each model."""
    return [] if baseline is None else [(one.model, *error_texts(one, baseline)) for one in found]


def error_names(one: CorruptionAccuracy) -> tuple[str, str]:
    """What the errors against a baseline are called. With some cells alone they are no mCE."""
    return ("mCE", "relative mCE") if one.standard else ("error ratio", "relative error ratio")


def error_texts(one: CorruptionAccuracy, baseline: CorruptionAccuracy) -> tuple[str, str]:
    """The mCE and the relative mCE as texts."""
    values = (one.mce(baseline), one.mce(baseline, relative=True))
    plain, relative = (f"{value:.1f}%" if math.isfinite(value) else "not defined" for value in values)
    return plain, relative


def _lead(found: Sequence[CorruptionAccuracy]) -> str:
    best = max(found, key=lambda one: one.mean.value)
    cells = [(name, severity) for name in best.measured for severity in best.severities]
    worst_name, worst_severity = min(cells, key=lambda cell: best.accuracy(*cell))
    kept = 100 * best.mean.value
    start = f"{best.model} gets {kept:.1f}% of the corrupted images right, on average over all cells"
    if len(found) > 1:
        start = f"{best.model} has the highest mean: it gets {kept:.1f}% of the corrupted images right"
    worst = 100 * best.accuracy(worst_name, worst_severity)
    clean = 100 * float(best.clean.double().mean())
    return (
        f"{start}, and {clean:.1f}% of the clean ones. Its worst cell is {worst_name} {worst_severity}: {worst:.1f}%."
    )


def _heat(one: CorruptionAccuracy) -> list[tuple[str, list[tuple[str, int, str]], Shown]]:
    """For each corruption: its name, (accuracy, tint, interval) of each severity, and its mean."""
    rows = []
    for name in one.corruptions:
        cells = []
        for severity in one.severities:
            low, high = one.interval(name, severity)
            share = one.accuracy(name, severity)
            cells.append((f"{100 * share:.1f}", shade(1 - share), f"{100 * low:.1f} to {100 * high:.1f}%"))
        rows.append((name, cells, Shown.of(one.over((name,)))))
    return rows


def shade(error: float) -> int:
    """The tint of a cell with this share of errors.

    >>> shade(0.01), shade(0.5), shade(0.9)
    (0, 4, 6)
    """
    return sum(error > least for least in SHADES)


def _charts(models: Sequence[tuple[CorruptionAccuracy, Style]]) -> list[Chart]:
    """Accuracy against severity: the mean over all corruptions, and each corruption."""
    first = models[0][0]
    if len(first.severities) < 2:
        return []
    steps = tuple(float(severity) for severity in first.severities)
    across = Axis(label="severity", low=steps[0], high=steps[-1], ticks=steps, text=lambda v: f"{v:g}")

    def chart(number: int, title: str, names: tuple[str, ...]) -> Chart:
        lines = []
        for one, style in models:
            means = [one.over(names, (severity,)) for severity in one.severities]
            points = [Point(step, mean.value, mean.low, mean.high) for step, mean in zip(steps, means, strict=True)]
            lines.append(Line(name=one.model, style=style, points=tuple(points)))
        return Chart(id=f"severity-{number}", title=title, x=across, y=percent_axis("accuracy"), lines=tuple(lines))

    every = (("mean over all", first.measured), *((name, (name,)) for name in first.corruptions))
    return [chart(number, title, names) for number, (title, names) in enumerate(every)]


def _table(one: CorruptionAccuracy, other: Beside) -> list[tuple[str, list[tuple[str, str, str] | None]]]:
    """For each corruption and severity: our accuracy, the other's, and the difference in points."""
    rows = []
    for name in one.corruptions:
        cells: list[tuple[str, str, str] | None] = []
        for severity in one.severities:
            values = other.cells.get(name, ())
            if len(values) < severity and len(values) != len(one.severities):
                cells.append(None)
                continue
            at = severity - 1 if len(values) == 5 else one.severities.index(severity)
            ours, theirs = 100 * one.accuracy(name, severity), 100 * values[at]
            cells.append((f"{ours:.1f}", f"{theirs:.1f}", f"{ours - theirs:+.1f}"))
        rows.append((name, cells))
    return rows
