"""Schedules at their ends, in the middle, at their edges, and with settings that make no sense."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steelman.errors import UserError
from steelman.schedules import (
    SCHEDULES,
    Constant,
    Cosine,
    Cyclic,
    Linear,
    MultiStep,
    Piecewise,
    Resets,
    Scheduled,
    value_at,
)
from steelman.settings import SettingsError, make, settings
from tests.settings import SCHEDULE_SETTINGS

approx = pytest.approx


@settings
class Holder:
    value: Scheduled


def test_every_schedule_has_small_settings() -> None:
    assert SCHEDULE_SETTINGS.keys() == SCHEDULES.keys()


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_schedule_is_finite_and_comparable(name: str) -> None:
    schedule = make("schedule", SCHEDULES, name, SCHEDULE_SETTINGS[name])
    assert all(math.isfinite(schedule(r / 100)) for r in range(101))
    assert schedule == make("schedule", SCHEDULES, name, SCHEDULE_SETTINGS[name])
    assert isinstance(schedule(0.5), float)


def test_constant() -> None:
    assert [Constant(value=0.3)(r) for r in (0.0, 0.5, 1.0)] == [0.3] * 3


@pytest.mark.parametrize("until", [1.0, 0.4])
def test_linear(until: float) -> None:
    schedule = Linear(start=2.0, end=-1.0, until=until)
    assert [schedule(r * until) for r in (0.0, 1 / 3, 0.5, 1.0)] == approx([2.0, 1.0, 0.5, -1.0])
    assert schedule(1.0) == approx(-1.0)  # held after `until`


@pytest.mark.parametrize("until", [1.0, 0.4])
def test_cosine(until: float) -> None:
    schedule = Cosine(start=0.0, end=8.0, until=until)
    expected = [0.0, 4 * (1 - math.sqrt(0.5)), 4.0, 6.0, 8.0]
    assert [schedule(r * until) for r in (0.0, 0.25, 0.5, 2 / 3, 1.0)] == approx(expected)
    assert schedule(1.0) == approx(8.0)


@given(start=st.floats(-5, 5), end=st.floats(-5, 5), a=st.floats(0, 1), b=st.floats(0, 1))
def test_linear_and_cosine_are_monotone_and_stay_between_their_ends(
    start: float, end: float, a: float, b: float
) -> None:
    for kind in (Linear, Cosine):
        schedule = kind(start=start, end=end, until=0.7)
        first, second = schedule(min(a, b)), schedule(max(a, b))
        rising = 1 if end >= start else -1
        assert rising * (second - first) >= -1e-12
        assert min(start, end) - 1e-12 <= first <= max(start, end) + 1e-12


def test_multistep_drops_at_the_boundary_itself() -> None:
    schedule = MultiStep(start=0.1, drops=(0.75, 0.9))
    just_below = math.nextafter(0.75, 0)
    assert [schedule(r) for r in (0.0, just_below, 0.75, 0.8, 0.9, 1.0)] == approx([0.1, 0.1, 0.01, 0.01, 1e-3, 1e-3])
    # Progress is a quotient of steps; a drop after 75 of 100 epochs falls on that epoch's first step.
    for per_epoch in (1, 3, 7, 391):
        assert schedule(75 * per_epoch / (100 * per_epoch)) == approx(0.01)
        assert schedule((75 * per_epoch - 1) / (100 * per_epoch)) == approx(0.1)
    assert MultiStep(start=1.0, drops=(), factor=0.5)(1.0) == 1.0
    assert MultiStep(start=1.0, drops=(0.9, 0.5), factor=0.5)(0.6) == 0.5


def test_piecewise() -> None:
    schedule = Piecewise(points=((0.2, 1.0), (0.6, 3.0), (0.8, -1.0)))
    assert [schedule(r) for r in (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 1.0)] == approx([1.0, 1.0, 2.0, 3.0, 1.0, -1.0, -1.0])


def test_cyclic() -> None:
    schedule = Cyclic(peak=0.4, low=0.1, peak_at=0.25)
    assert [schedule(r) for r in (0.0, 0.125, 0.25, 0.625, 1.0)] == approx([0.1, 0.25, 0.4, 0.25, 0.1])


@pytest.mark.parametrize(
    ("name", "options", "path"),
    [
        ("constant", {"value": "much"}, "value"),
        ("constant", {"value": float("nan")}, "value"),
        ("linear", {"start": 0}, "end"),
        ("linear", {"start": 0, "end": 1, "until": 0}, "until"),
        ("linear", {"start": 0, "end": 1, "until": 1.5}, "until"),
        ("cosine", {"start": 0, "end": float("inf")}, "end"),
        ("cosine", {"start": 0, "end": 1, "slope": 2}, "slope"),
        ("multistep", {"start": 1, "drops": [0.5, 1.5]}, "drops.1"),
        ("multistep", {"start": 1, "drops": [0.5], "factor": 0}, "factor"),
        ("piecewise", {"points": [[0, 0]]}, "at least two points"),
        ("piecewise", {"points": [[0, 0], [0.5, 1], [0.5, 2]]}, "rising"),
        ("piecewise", {"points": [[0, 0], [2, 1]]}, "points.1.0"),
        ("cyclic", {"peak": 1, "peak_at": 1}, "peak_at"),
        ("cyclic", {}, "peak"),
    ],
)
def test_bad_settings_are_refused_by_name(name: str, options: dict[str, Any], path: str) -> None:
    with pytest.raises(SettingsError) as caught:
        make("schedule", SCHEDULES, name, options)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (3, 3.0),
        ("8/255", 8 / 255),
        ("1e-4", 1e-4),  # YAML reads 1e-4 as text
        ({"name": "linear", "start": 0, "end": "8/255"}, Linear(start=0, end=8 / 255)),
        (Constant(value=1), Constant(value=1)),
    ],
)
def test_a_field_takes_a_number_or_a_schedule(given: Any, expected: Any) -> None:
    assert Holder(value=given).value == expected


@pytest.mark.parametrize("given", [True, None, float("inf"), "nan", "linaer", [1], {"start": 0}])
def test_a_field_refuses_anything_else(given: Any) -> None:
    with pytest.raises(ValueError, match="schedule"):
        Holder(value=given)


def test_a_misspelt_schedule_is_answered_with_the_choices() -> None:
    with pytest.raises(UserError, match=r"unknown schedule 'cosin' \(did you mean 'cosine'\?\); choices: constant, "):
        make("schedule", SCHEDULES, "cosin", {})


def test_value_at() -> None:
    assert value_at(0.3, 0.9) == 0.3
    assert value_at(Linear(start=0, end=1), 0.25) == 0.25


def test_a_capped_radius_is_that_of_the_periodic_scheduling_paper() -> None:
    """eps_min + (eps_max - eps_min) (1 - cos(pi r)) / 2, capped: on MNIST 0 to 0.6 by epoch 100, at most 0.4."""
    cosine, linear = Cosine(start=0, end=0.6, cap=0.4), Linear(start=0, end=0.6, cap=0.4)
    for epoch in range(101):
        r = epoch / 100
        assert cosine(r) == pytest.approx(min(0.3 * (1 - math.cos(math.pi * r)), 0.4))
        assert linear(r) == pytest.approx(min(0.6 * r, 0.4))
    assert min(epoch for epoch in range(101) if cosine(epoch / 100) >= 0.4) == 61
    assert min(epoch for epoch in range(101) if linear(epoch / 100) >= 0.4 - 1e-12) == 67


@pytest.mark.parametrize("kind", [Linear, Cosine])
def test_a_cap_below_the_minimum_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r"smallest value 0\.2, got 0\.1"):
        kind(start=0.2, end=0.6, cap=0.1)


def test_resets_begin_the_schedule_anew() -> None:
    inner = MultiStep(start=0.1, drops=(0.5, 0.75))
    schedule = Resets(schedule=inner, at=(0.5, 0.75))
    for r, expected in ((0, 0.1), (0.25, 0.01), (0.375, 0.001), (0.5, 0.1), (0.625, 0.01), (0.75, 0.1), (0.99, 0.001)):
        assert schedule(r) == pytest.approx(expected), r
    assert schedule(1.0) == pytest.approx(inner(1.0))
    with pytest.raises(ValueError, match="rising shares"):
        Resets(schedule=inner, at=(0.75, 0.5))
    with pytest.raises(ValueError, match="unknown schedule"):
        Resets(schedule={"name": "linera"}, at=(0.5,))
