"""Numbers and settings as text, the same in the terminal and on the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from steelman.evaluation.result import CurvePoint, Evaluation, Score, Verdict, grey_levels, radius, share_of
from steelman.report.entry import CLEAN, WORST, Entry

UNNAMED = "custom"  # the name of a suite of attacks that the user chose one by one

_NORMS = {"linf": "L∞", "l0": "L0", "l1": "L1", "l2": "L2"}


def percent(fraction: float) -> str:
    """A fraction in percent.

    >>> percent(0.9123)
    '91.2%'
    """
    return f"{100 * fraction:.1f}%"


def bounds(ends: tuple[float, float]) -> str:
    """An interval in percent.

    >>> bounds((0.8888, 0.9312))
    '[88.9, 93.1]'
    """
    return f"[{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"


def accuracy(found: Score | CurvePoint | Verdict) -> str:
    """A score, a verdict or a point of a curve as text, such as "91.2% [88.9, 93.1]"."""
    return share_of(found.correct, found.total)


def seconds(value: float | None) -> str:
    """A time in seconds, or a dash if it is not known.

    >>> seconds(1.26), seconds(None)
    ('1.3', '–')
    """
    return "–" if value is None else f"{value:.1f}"


def norm_name(norm: str) -> str:
    """The name of a norm as readers know it.

    >>> norm_name("linf")
    'L∞'
    """
    return _NORMS.get(norm, norm)


def ball(evaluation: Evaluation) -> str:
    """The threat model of an evaluation: norm and radius, also in grey levels."""
    levels = grey_levels(evaluation.norm, evaluation.eps, evaluation.low, evaluation.high)
    return f"{norm_name(evaluation.norm)}, eps = {radius(evaluation.eps)}" + (f" ({levels})" if levels else "")


def options(settings: Mapping[str, Any]) -> str:
    """Settings in one line.

    >>> options({"steps": 10, "loss": "dlr"})
    'steps = 10, loss = dlr'
    """
    return ", ".join(f"{key} = {_plain(value)}" for key, value in settings.items())


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def conditions(evaluation: Evaluation) -> str:
    """The conditions of an evaluation: data, number of samples, radius, seed, suite and versions."""
    versions = ", ".join(f"{name} {version}" for name, version in evaluation.versions.items())
    ball = f"{norm_name(evaluation.norm)}, eps = {radius(evaluation.eps)}"
    text = f"{evaluation.data}, n = {evaluation.total}, {ball}, seed {evaluation.seed}"
    if evaluation.verdict and evaluation.verdict.suite != UNNAMED:
        text += f", suite {evaluation.verdict.suite}"
    return f"{text}; {versions}" if versions else text


def groups(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """The names of the models under each set of conditions. Only numbers under the same conditions are comparable."""
    found: dict[str, list[str]] = {}
    for entry in entries:
        if entry.evaluation:
            found.setdefault(conditions(entry.evaluation), []).append(entry.name)
    return found


def columns(entries: Sequence[Entry]) -> list[str]:
    """The names of the scores to show: clean first, then each attack, and the worst case last."""
    names = dict.fromkeys(score.name for entry in entries for score in entry.scores)
    attacks = [name for name in names if name not in (CLEAN, WORST)]
    return [*([CLEAN] if CLEAN in names else []), *attacks, *([WORST] if WORST in names else [])]
