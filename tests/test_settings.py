"""Every mistake in settings is answered with the path of its key, what was given, and the choices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import pytest

from steelman.attacks import ATTACKS, PGD, Attack
from steelman.errors import UserError, unknown
from steelman.schedules import SCHEDULES, Linear, Scheduled
from steelman.settings import Number, SettingsError, make, named, number, options_of, settings, summary_of
from steelman.threat import ThreatModel


@settings
class Inner:
    """An ingredient that holds two others."""

    lr: Scheduled
    attack: Annotated[Attack, named("attack", ATTACKS)]
    share: Number = 0.5


@settings
class Outer:
    inner: Annotated[Inner, named("inner", {"inner": Inner})]
    count: int = 1


def build(**options: Any) -> Outer:
    return make("outer", {"outer": Outer}, "outer", options)


def problems(**options: Any) -> dict[str, str]:
    with pytest.raises(SettingsError) as caught:
        build(**options)
    return {".".join(path): text for path, text in caught.value.problems}


GOOD = {"name": "inner", "lr": 0.1, "attack": "fgsm"}


def test_names_and_mappings_build_objects_at_every_depth() -> None:
    outer = build(
        inner={
            "name": "inner",
            "lr": {"name": "linear", "start": 0, "end": "8/255"},
            "attack": {"name": "pgd", "steps": 3},
        }
    )
    assert outer == Outer(inner=Inner(lr=Linear(start=0, end=8 / 255), attack=PGD(steps=3)))
    assert build(inner=GOOD).inner.attack == PGD(steps=1, start="zero")


def test_all_mistakes_are_listed_with_their_paths() -> None:
    found = problems(
        inner={
            "name": "inner",
            "lr": {"name": "linear", "start": 0, "end": "far"},
            "attack": {"name": "pgd", "steps": -1, "step_size": "1/0"},
            "share": "half",
        },
        count="many",
    )
    assert found.keys() == {"inner.lr.end", "inner.attack.steps", "inner.attack.step_size", "inner.share", "count"}
    assert found["inner.attack.steps"] == "input should be greater than 0, got -1"
    assert found["inner.attack.step_size"] == "expected a number or a fraction such as 8/255, got '1/0'"
    for path, value in {"inner.lr.end": "far", "inner.share": "half", "count": "many"}.items():
        assert found[path].endswith(f"got {value!r}")


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        ({"attack": "pdg"}, "inner.attack", "unknown attack 'pdg' (did you mean 'pgd'?); choices: "),
        ({"attack": {"name": "pdg"}}, "inner.attack", "unknown attack 'pdg' (did you mean 'pgd'?); choices: "),
        ({"attack": {"name": None}}, "inner.attack", "unknown attack None; choices: "),
        ({"attack": {"steps": 3}}, "inner.attack.name", "is required: which attack? choices: "),
        (
            {"attack": {"name": "pgd", "stesp": 3}},
            "inner.attack.stesp",
            "unknown option of attack 'pgd' 'stesp' (did you mean 'steps'?); choices: decay, head_margin, ",
        ),
        ({"attack": {"name": "pgd", "loss": "cw"}}, "inner.attack.loss", "unknown loss 'cw'; choices: cross-entropy, "),
        (
            {"attack": {"name": "pgd", "start": "zer"}},
            "inner.attack.start",
            "got 'zer'",
        ),
        ({"attack": 5}, "inner.attack", "got 5"),
        ({"lr": "linaer"}, "inner.lr", "unknown schedule 'linaer' (did you mean 'linear'?); choices: "),
        ({"lr": {"name": "linear", "start": 0}}, "inner.lr.end", "is required and missing"),
        ({"lr": {"name": "linear", "start": 0, "end": 1, "untl": 1}}, "inner.lr.untl", "(did you mean 'until'?)"),
        ({"shrae": 1}, "inner.shrae", "unknown option of inner 'inner' 'shrae' (did you mean 'share'?); choices: "),
        ({"share": float("nan")}, "inner.share", "finite number, got nan"),
    ],
)
def test_one_mistake(change: dict[str, Any], path: str, words: str) -> None:
    found = problems(inner={**GOOD, **change})
    assert list(found) == [path]
    assert words in found[path]


def test_choices_are_read_from_the_registry() -> None:
    assert all(name in problems(inner={**GOOD, "attack": "x"})["inner.attack"] for name in ATTACKS)
    assert all(name in problems(inner={**GOOD, "lr": "x"})["inner.lr"] for name in SCHEDULES)


def test_an_unknown_name_at_the_top() -> None:
    with pytest.raises(UserError, match="unknown outer 'outter'"):
        make("outer", {"outer": Outer}, "outter", {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8/255", 8 / 255),
        (" 8 / 255 ", 8 / 255),
        ("-1/4", -0.25),
        ("2.5/10", 0.25),
        ("1e1/2e1", 0.5),
        ("0.3", 0.3),
        ("1e-3", 1e-3),
        (3, 3),
        (0.5, 0.5),
    ],
)
def test_numbers_and_fractions(text: object, value: float) -> None:
    assert number(text) == value
    assert Inner(lr=1, attack=PGD(), share=text).share == value  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["8/0", "1/2/3", "8/", "/8", "1.2.3/4", "eight", "", "8/-255", "1e999/1", "inf", "nan"]
)
def test_what_is_not_a_number_is_refused(text: str) -> None:
    found = problems(inner={**GOOD, "share": text})
    assert list(found) == ["inner.share"]
    assert repr(text) in found["inner.share"] or "got" in found["inner.share"]


def test_settings_are_frozen_keyword_only_comparable_and_closed() -> None:
    one = PGD(steps=3)
    assert one == PGD(steps=3)
    assert hash(one) == hash(PGD(steps=3))
    assert one != PGD(steps=4)
    assert "steps=3" in repr(one)
    assert dataclasses.replace(one, steps=4) == PGD(steps=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.steps = 4  # type: ignore[misc]
    made: Any = PGD
    wrongs: list[tuple[Callable[[], object], str]] = [
        (lambda: made(3), "expected settings by their names, got 3 without a name"),
        (lambda: made(stesp=3), "stesp: unknown key 'stesp' (did you mean 'steps'?)"),
        (lambda: dataclasses.replace(one, steps=0), "steps: input should be greater than 0, got 0"),
    ]
    for wrong, said in wrongs:
        with pytest.raises(UserError) as caught:
            wrong()
        assert str(caught.value).startswith(said)
        assert "\n" not in str(caught.value)


def test_a_settings_error_is_a_user_error_with_one_line_a_problem() -> None:
    error = SettingsError([(("a", "b"), "is wrong"), ((), "all of it is")])
    assert isinstance(error, UserError)
    assert isinstance(error, ValueError)
    assert str(error) == "a.b: is wrong\nall of it is"


def test_unknown_without_a_near_name_gives_no_hint() -> None:
    assert str(unknown("head", "zzz", ["he", "fn"])) == "unknown head 'zzz'; choices: fn, he"
    assert str(unknown("head", 3, ["he"])) == "unknown head 3; choices: he"


def test_registry_entries_describe_themselves() -> None:
    for name, factory in ATTACKS.items():
        assert summary_of(factory), name
        assert "steps" in options_of(factory) or options_of(factory)
    assert summary_of(Inner) == "An ingredient that holds two others."
    assert options_of(ATTACKS["fgsm"])["steps"].default == 1


@pytest.mark.parametrize(
    "make_one", [lambda: PGD(steps=True), lambda: ThreatModel(eps=True), lambda: PGD(momentum=True)]
)
def test_a_boolean_is_not_a_number(make_one: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="expected a number, got true"):
        make_one()
