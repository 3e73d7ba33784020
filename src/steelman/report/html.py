"""Writes a report as one HTML page: scores, accuracy against eps, training curves, a gallery, and all settings.

The page has no script and loads no other file. Its content security policy allows only its own style sheet and images
in data URIs.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import importlib.resources
import math
import re
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from steelman.errors import UserError
from steelman.evaluation.result import (
    CurvePoint,
    Evaluation,
    Example,
    Score,
    in_255ths,
    interval,
    radius,
    seconds_of,
)
from steelman.files import write_atomic
from steelman.report import text, verdict
from steelman.report.classes import classes
from steelman.report.entry import CLEAN, WORST, Entry
from steelman.report.images import data_uri, scaled_perturbation
from steelman.report.plots import Chart, Line, Point, Style, axis, eps_axis, percent_axis

_METRICS = {  # key in the history: title of the chart
    "validation_robust": "Validation accuracy, attacked",
    "validation_clean": "Validation accuracy, clean",
    "train_accuracy": "Accuracy on the training examples",
    "loss": "Training loss",
    "eps": "Training radius eps",
    "lr": "Learning rate",
}
REACH = 4  # a chart of accuracy against eps leaves out radii above this many times eps
_FRACTIONS = ("validation_robust", "validation_clean", "train_accuracy")


def write(path: Path, entries: Sequence[Entry], *, title: str, intro: str = "") -> None:
    """Render the page, and write it to `path` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, render(entries, title=title, intro=intro).encode())


def render(entries: Sequence[Entry], *, title: str, intro: str = "") -> str:
    """The page as a string.

    Args:
        entries: the models, in the order of the page.
        intro: plain text, with blank lines between paragraphs.
    """
    if not entries:
        raise UserError("a report needs at least one model, got none")
    style, policy = sheet()
    models = [(entry, Style.of(index)) for index, entry in enumerate(entries)]
    page = environment().get_template("page.html")
    return page.render(
        title=title,
        intro=[part for part in re.split(r"\n\s*\n", intro.strip()) if part],
        style=style,
        policy=policy,
        models=models,
        evaluated=[(entry, look) for entry, look in models if entry.evaluation],
        columns=text.columns(entries),
        groups=text.groups(entries),
        unnamed=text.UNNAMED,
        judgements=verdict.judgements(models),
        breaks=verdict.breaks(models),
        margins=verdict.margins(models),
        classes=classes(models),
        finding=_finding(entries),
        curves=_curves(models),
        training=_training(models),
        pictures=_pictures,
    )


def sheet() -> tuple[Markup, str]:
    """The style sheet, and the content security policy that allows it and nothing else."""
    style = (importlib.resources.files("steelman.report") / "templates" / "style.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return Markup(style), policy


@functools.cache
def environment() -> Environment:
    """The templates, with the functions that they call."""
    made = Environment(
        loader=PackageLoader("steelman.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (
        text.ball,
        text.percent,
        text.bounds,
        text.accuracy,
        radius,
        text.norm_name,
        text.options,
        text.seconds,
    ):
        made.filters[function.__name__] = function
    made.filters["seconds_of"] = seconds_of
    made.tests["attack"] = lambda name: name not in (CLEAN, WORST)
    return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Finding:
    """The model with the highest worst-case accuracy, and the models whose intervals overlap its interval."""

    name: str
    clean: Score | None
    worst: Score
    rivals: list[str]
    doubt: str


def _finding(entries: Sequence[Entry]) -> _Finding | None:
    """The finding. None if no model was attacked, or if the models were evaluated under different conditions."""
    found = [(entry, score) for entry in entries if (score := entry.score(WORST))]
    if not found or len(text.groups(entries)) > 1:
        return None
    best, worst = max(found, key=lambda pair: pair[1].accuracy)
    rivals = [entry.name for entry, score in found if entry is not best and score.interval[1] >= worst.interval[0]]
    return _Finding(name=best.name, clean=best.score(CLEAN), worst=worst, rivals=rivals, doubt=best.doubt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Curve:
    """Accuracy against eps on one dataset in one norm: a wide chart, a narrow chart, and the numbers."""

    data: str
    norm: str
    attacks: list[str]
    counts: list[int]
    drawn: bool  # whether a cascade is shown: its pilot draws the samples at random
    wide: Chart
    narrow: Chart
    rows: list[tuple[float, list[CurvePoint | None]]]

    @property
    def beyond(self) -> list[tuple[float, list[CurvePoint | None]]]:
        """The numbers at the radii that the chart leaves out."""
        return [(eps, points) for eps, points in self.rows if eps > self.wide.x.high]


def _curves(models: Sequence[tuple[Entry, Style]]) -> list[_Curve]:
    together: dict[tuple[str, str], list[tuple[Entry, Style, Evaluation]]] = {}
    for entry, style in models:
        if entry.evaluation and any(point.total for point in entry.evaluation.curve):
            key = (entry.evaluation.data, entry.evaluation.norm)
            together.setdefault(key, []).append((entry, style, entry.evaluation))
    return [_curve(f"curve{i}", data, norm, group) for i, ((data, norm), group) in enumerate(together.items())]


def _curve(key: str, data: str, norm: str, group: Sequence[tuple[Entry, Style, Evaluation]]) -> _Curve:
    found = [{point.eps: point for point in evaluation.curve if point.total > 0} for _, _, evaluation in group]
    targets = {evaluation.eps for _, _, evaluation in group}
    radii = sorted({eps for points in found for eps in points})
    # The last radius of a cascade is usually far above the others. In the chart, it would squeeze them together.
    reach = REACH * max(targets) or math.inf
    near = [eps for eps in radii if eps <= reach]
    target = targets.pop() if len(targets) == 1 else None
    wide = Chart(
        id=f"{key}-wide",
        title=f"Accuracy against eps, {text.norm_name(norm)}, {data}",
        x=eps_axis([*near, *([target] if target else [])], in_255ths=any(map(in_255ths, near))),
        y=percent_axis("accuracy"),
        lines=tuple(
            Line(
                name=entry.name,
                style=style,
                points=tuple(
                    Point(eps, point.correct / point.total, *interval(point.correct, point.total))
                    for eps, point in sorted(points.items())
                    if eps <= reach
                ),
            )
            for (entry, style, _), points in zip(group, found, strict=True)
        ),
        rule=(target, f"eps = {radius(target)}") if target else None,
        width=860,
        height=370,
        top=26,
    )
    return _Curve(
        data=data,
        norm=norm,
        attacks=list(dict.fromkeys(evaluation.curve_attack for _, _, evaluation in group)),
        counts=sorted({point.total for points in found for point in points.values()}),
        drawn=any(entry.cascade for entry, _, _ in group),
        wide=wide,
        narrow=dataclasses.replace(wide, id=f"{key}-narrow", width=340, height=270),
        rows=[(eps, [points.get(eps) for points in found]) for eps in radii],
    )


def _training(models: Sequence[tuple[Entry, Style]]) -> list[Chart]:
    """A small chart for each metric that any model recorded. All charts share the axis of epochs."""
    trained = [(entry, style) for entry, style in models if entry.history]
    epochs = axis("epoch", (x for entry, _ in trained for x, _ in entry.metric("epoch")), whole=True, snug=True)
    charts = []
    for key, title in _METRICS.items():
        lines = tuple(
            Line(name=entry.name, style=style, points=tuple(Point(x, y) for x, y in entry.metric(key)))
            for entry, style in trained
        )
        values = [point.y for line in lines for point in line.points if point.y is not None]
        if values:
            y = percent_axis("accuracy") if key in _FRACTIONS else axis(title, values)
            charts.append(Chart(id=f"training-{key}", title=title, x=epochs, y=y, lines=lines))
    return charts


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Picture:
    """One sample of the gallery, with class names and images for the page."""

    example: Example
    label: str
    before: str
    after: str
    clean: str
    perturbation: str
    adversarial: str


def _pictures(evaluation: Evaluation) -> list[_Picture]:
    return [_picture(evaluation, example) for example in evaluation.gallery]


def _picture(evaluation: Evaluation, example: Example) -> _Picture:
    def name(index: int) -> str:
        return evaluation.classes[index] if 0 <= index < len(evaluation.classes) else str(index)

    span = evaluation.high - evaluation.low
    delta = example.adversarial.double() - example.clean.double()
    return _Picture(
        example=example,
        label=name(example.label),
        before=name(example.clean_prediction),
        after=name(example.adversarial_prediction),
        clean=data_uri((example.clean - evaluation.low) / span),
        perturbation=data_uri(scaled_perturbation(delta, norm=evaluation.norm, eps=evaluation.eps)),
        adversarial=data_uri((example.adversarial - evaluation.low) / span),
    )
