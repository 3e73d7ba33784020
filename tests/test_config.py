"""Recipes: what is right is read, and every mistake is answered with its key, its value and the choices."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from steelman.attacks import PGD
from steelman.cli.subjects import attack_from_text
from steelman.data import CropFlip
from steelman.errors import UserError
from steelman.objectives.pgd_at import PGDAT
from steelman.recipe import Recipe, check_root, fingerprint, parse, read
from steelman.recipe_blocks import EvaluationSpec
from steelman.recipe_files import recipes
from steelman.schedules import SCHEDULES
from steelman.settings import name_and_options, options_from_texts
from steelman.training import Training

BASE: dict[str, Any] = {
    "name": "base",
    "data": "digits",
    "model": {"name": "mlp", "width": 16},
    "head": {"name": "he", "scale": 10},
    "threat": {"norm": "linf", "eps": "8/255"},
    "objective": {"name": "pgd-at", "attack": {"name": "pgd", "steps": 3}},
    "training": {"epochs": 2, "lr": 0.1},
}


def changed(*overrides: str) -> dict[str, Any]:
    """The base with key=value overrides, as the command line makes them."""
    from steelman.recipe import _override

    source = copy.deepcopy(BASE)
    for text in overrides:
        _override(source, text)
    return source


def parsed(*overrides: str) -> Recipe:
    return parse(changed(*overrides))


def refused(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        parsed(*overrides)
    return str(caught.value)


# What is right.


def test_there_are_recipes() -> None:
    assert {"digits-standard", "digits-pgd-at", "digits-pgd-at-he"} <= recipes().keys()


def test_numbers_may_be_fractions_and_exponents() -> None:
    assert parsed().threat.eps == 8 / 255
    assert parsed("threat.eps=0.3").threat.eps == 0.3
    # YAML reads 1e-4 as text: there is no dot in it.
    assert yaml.safe_load("1e-4") == "1e-4"
    assert parsed("training.lr=1e-4").training.lr == 1e-4
    assert parsed("training.optimizer={name: sgd, weight_decay: 5e-4}").training.optimizer.weight_decay == 5e-4  # type: ignore[attr-defined]
    assert parsed("objective.attack.step_size=2/255").objective.attack.step_size == 2 / 255  # type: ignore[attr-defined]
    assert parsed("head.scale=1e1").head.options["scale"] == 10
    schedule = parsed("training.lr={name: piecewise, points: [[0, 0], [0.4, 1e-1], [1, 1/1000]]}").training.lr
    assert callable(schedule)
    assert schedule(1.0) == pytest.approx(0.001)


def test_names_stand_for_objects_with_their_defaults() -> None:
    recipe = parsed("objective=pgd-at", "head=linear", "model=linear", "data=digits", "training.optimizer=adam")
    assert recipe.objective == PGDAT(attack=PGD(steps=10, keep="last"))
    assert recipe.head.options == {}
    assert recipe.training.epochs == 2
    assert (recipe.evaluation.suite, recipe.evaluation.attacks) == ("fast", {})
    assert parsed("data={name: digits, augment: {name: crop-flip, pad: 2}}").data.augment == CropFlip(pad=2)


def test_options_may_stand_beside_the_name_or_below_it() -> None:
    beside = parsed("model={name: mlp, width: 16, mean: [0.5]}").model
    below = parsed("model={name: mlp, options: {width: 16}, mean: [0.5]}").model
    assert beside == below
    assert beside.options == {"width": 16}
    assert beside.mean == (0.5,)


def test_an_imported_model_takes_any_options() -> None:
    assert parsed("model={name: 'package.module:factory', depth: 3}").model.options == {"depth": 3}


def test_reading_changes_neither_the_source_nor_the_default() -> None:
    source = changed()
    before = copy.deepcopy(source)
    parse(source)
    assert source == before
    first, second = EvaluationSpec(), EvaluationSpec()
    assert first.attacks is not second.attacks


def test_a_recipe_is_frozen() -> None:
    with pytest.raises((AttributeError, TypeError)):
        parsed().training.epochs = 3  # type: ignore[misc]


# Overrides.


def test_overrides_are_dotted_and_make_what_is_missing() -> None:
    recipe = parsed(
        "training.seed=7",
        "validation.size=50",  # no such block in the source
        "evaluation.attacks.one.name=fgsm",
        "data.augment.name=crop",  # data is a name there, and becomes a mapping with that name
        "data.augment.pad=3",
        "training.lr.name=linear",  # and lr a number
        "training.lr.start=0.1",
        "training.lr.end=0",
    )
    assert recipe.training.seed == 7
    assert recipe.validation.size == 50
    assert list(recipe.evaluation.attacks) == ["one"]
    assert recipe.data.name == "digits"
    assert recipe.data.augment == CropFlip(pad=3, flip=False)
    assert recipe.training.lr == SCHEDULES["linear"](start=0.1, end=0)


def test_a_name_may_be_given_options_by_an_override() -> None:
    assert changed("objective=pgd-at", "objective.attack=fgsm")["objective"] == {"name": "pgd-at", "attack": "fgsm"}


def test_the_last_of_two_overrides_wins_and_an_empty_one_clears() -> None:
    assert parsed("training.epochs=3", "training.epochs=4").training.epochs == 4
    assert parsed("training.ema=0.9", "training.ema=").training.ema is None


def test_values_may_hold_equals_signs() -> None:
    assert changed("description=a=b")["description"] == "a=b"


@pytest.mark.parametrize("text", ["training.epochs", "=3", "", "--epochs"])
def test_an_override_without_key_and_value_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"expected key=value, such as training\.epochs=3, got"):
        read("digits-standard", [text])


def test_an_override_that_is_not_yaml_is_refused() -> None:
    with pytest.raises(UserError, match=r"training.lr: '\{name: ' is not YAML: line"):
        read("digits-standard", ["training.lr={name: "])


# What is wrong.

WRONG: dict[str, tuple[str, ...]] = {
    "objetive=pgd-at": ("objetive: unknown key", "did you mean 'objective'"),
    "training.epoch=3": ("training.epoch: unknown key",),
    "threat.epsilon=3": ("threat.epsilon: unknown key",),
    "guard.drops=3": ("guard.drops: unknown key",),
    "objective.attack.step=3": ("objective.attack.step: unknown option", "did you mean 'steps'"),
    "objective.attack.name=pdg": ("objective.attack: unknown training attack 'pdg'", "did you mean 'pgd'", "fgsm"),
    "objective.attack.name=square": ("objective.attack: unknown training attack 'square'", "choices: adaptive, bim"),
    "evaluation.attacks={a: cw}": ("evaluation.attacks.a: CarliniWagner knows the norms l2, and threat.norm is linf",),
    "validation.attack=cw": ("validation.attack: CarliniWagner knows the norms l2, and threat.norm is linf",),
    "objective.name=pgd-ta": ("objective: unknown objective 'pgd-ta'", "did you mean 'pgd-at'", "standard"),
    "head.name=hee": ("head.name: unknown head 'hee'", "did you mean 'he'"),
    "head.scal=3": ("head.scal: unknown option of head 'he' 'scal'", "did you mean 'scale'"),
    "data=digit": ("data.name: unknown dataset 'digit'", "did you mean 'digits'"),
    "data.roof=x": ("data.roof: unknown option of dataset 'digits' 'roof'",),
    "data.augment=cropflip": ("data.augment: unknown augmentation 'cropflip'", "did you mean 'crop-flip'"),
    "model.name=lenett": ("model.name: unknown model 'lenett'", "did you mean 'lenet'"),
    "model.widht=3": ("model.widht: unknown option of model 'mlp' 'widht'", "did you mean 'width'"),
    "model.input_shape=3": ("model.input_shape: unknown option",),
    "objective.attack.loss=marign": ("objective.attack.loss: unknown loss 'marign'", "did you mean 'margin'"),
    "training.lr={name: cosin, start: 1, end: 0}": ("training.lr: unknown schedule 'cosin'", "did you mean 'cosine'"),
    "training.optimizer=adma": ("training.optimizer: unknown optimizer 'adma'", "did you mean 'adam'"),
    "validation.attack=pdg": ("validation.attack: unknown attack 'pdg'",),
    "evaluation.attacks={a: fgsm, b: pdg}": ("evaluation.attacks.b: unknown attack 'pdg'",),
    "evaluation.attacks={a: {name: pgd, step: 3}}": ("evaluation.attacks.a.step: unknown option",),
    "evaluation.attacks={a: {name: pgd, steps: many}}": ("evaluation.attacks.a.steps: ", "'many'"),
    "evaluation.suite=null": ("evaluation.suite: expected a suite or attacks; suites: ",),
    "evaluation.suite=quick": ("evaluation.suite: unknown suite 'quick'",),
    "evaluation.attacks=[pgd]": ("evaluation.attacks: ", "dictionary"),
    "evaluation.samples=0": ("evaluation.samples: ", "greater than 0, got 0"),
    "threat.eps=-1": ("threat.eps: ", "greater than or equal to 0, got -1"),
    "threat.eps=0": ("threat.eps: expected a radius above 0, got 0",),
    "threat.eps=8/0": ("threat.eps: expected a number or a fraction such as 8/255, got '8/0'",),
    "threat.eps=small": ("threat.eps: ", "valid number", "'small'"),
    "threat.norm=l3": ("threat.norm: ", "'linf', 'l2' or 'l1'", "'l3'"),
    "threat.low=2": ("threat: expected low < high",),
    "objective.attack.steps=many": ("objective.attack.steps: ", "valid integer", "'many'"),
    "objective.attack.steps=0": ("objective.attack.steps: ", "greater than 0, got 0"),
    "objective.attack.steps=2.5": ("objective.attack.steps: ", "2.5"),
    "objective.attack.step_size=0": ("objective.attack.step_size: ", "greater than 0"),
    "objective.attack.restarts=[1]": ("objective.attack.restarts: ", "valid integer"),
    "objective.attack.mode=trane": ("objective.attack.mode: ", "'eval' or 'train'"),
    "training.epochs=0": ("training.epochs: ", "greater than 0"),
    "training.epochs=": ("training.epochs: ", "None"),
    "training.batch_size=-4": ("training.batch_size: ", "greater than 0"),
    "training.lr=-0.1": ("training.lr: expected at least 0 throughout the run, got -0.1",),
    "training.lr={name: linear, start: 0.1, end: -0.1}": ("training.lr: expected at least 0", "-0.1"),
    "training.lr={name: piecewise, points: [[0.5, 1], [0.2, 3]]}": ("training.lr: expected at least two points",),
    "training.lr={start: 1}": ("training.lr.name: is required: which schedule? choices: constant, cosine",),
    "training.lr={name: linear, start: 1}": ("training.lr.end: is required and missing",),
    "training.lr=fast": ("training.lr: unknown schedule 'fast'",),
    "training.eps={name: linear, start: -1, end: 0.01}": ("training.eps: expected at least 0", "-1"),
    "training.eps=0.5": ("training.eps: expected to end at or below threat.eps, 0.0313725, got 0.5",),
    "training.ema=1": ("training.ema: ", "less than 1"),
    "training.select=worst": ("training.select: ", "'best', 'last' or 'cycles'"),
    "training.save_minutes=0": ("training.save_minutes: ", "greater than 0"),
    "training.optimizer={name: sgd, momentum: 2}": ("training.optimizer.momentum: ", "less than 1"),
    "training.optimizer={name: sgd, momentum: 0, nesterov: true}": ("training.optimizer: nesterov needs a momentum",),
    "guard.on_collapse=panic": ("guard.on_collapse: ", "'rollback', 'stop' or 'ignore'"),
    "compute.precision=8-true": ("compute.precision: ", "'32-true'"),
    "compute.devices=0": ("compute.devices",),
    "compute.workers=-1": ("compute.workers: ", "greater than or equal to 0"),
    "head.scale=-3": ("head: head scale: expected a number above 0, got -3",),
    "head.scale=large": ("head: head scale: expected a number above 0, got 'large'",),
    "head.margin=-1": ("head: head margin",),
    "model=": ("model: expected a mapping of keys to values, got None",),
    "model={width: 3}": ("model.name: is required and missing",),
    "model.mean=[a]": ("model.mean", "valid number"),
    "model=[mlp]": ("model: expected a mapping of keys to values, got ['mlp']",),
    "objective=3": ("objective: ", "3"),
    "objective={attack: pgd}": ("objective.name: is required: which objective? choices: alp, cure, fast-at",),
    "threat=linf": ("threat: ",),
    "training=long": ("training: ",),
}


@pytest.mark.parametrize("text", ["threat.eps=.nan", "threat.eps=.inf", "training.lr=-.inf"])
def test_a_number_that_is_not_finite_is_refused_as_it_is_read(text: str) -> None:
    key, _, value = text.partition("=")
    assert refused(text) == f"{key}: {value!r}: line 1: expected a finite number that fits 64 bits, got {value!r}"


@pytest.mark.parametrize("text", WRONG)
def test_a_mistake_is_answered_with_its_path_and_its_value(text: str) -> None:
    message = refused(text)
    for part in WRONG[text]:
        assert part in message, message
    assert message.startswith("recipe:\n  ")
    assert "pydantic" not in message
    assert "http" not in message


def test_all_mistakes_are_told_at_once() -> None:
    message = refused("threat.eps=-1", "training.epochs=none", "objective.attack.steps=many", "head.name=hee")
    assert message.count("\n") == 4, message


def test_a_radius_that_ends_at_the_target_is_right_up_to_rounding() -> None:
    for end in ("8/255", "0.0313725490196078434"):
        assert parsed(f"training.eps={{name: linear, start: 1/255, end: {end}}}").training.eps is not None


def test_what_is_required() -> None:
    for key in ("name", "model", "threat", "objective"):
        source = {name: value for name, value in BASE.items() if name != key}
        with pytest.raises(UserError, match=f"{key}: is required and missing"):
            parse(source)


def test_a_batch_must_divide_among_the_processes() -> None:
    assert "training.batch_size: expected a multiple of the number of processes, 2, got 33" in refused(
        "training.batch_size=33", "compute.devices=2"
    )
    assert parsed("training.batch_size=32", "compute.devices=2").compute.devices == 2


def test_images_of_ones_own_must_be_told_where_they_are() -> None:
    for text in ("data=folder", "data={name: arrays}", "data={name: folder, root: null, size: 8}"):
        source = changed(text)
        parse(source)  # a recipe without a root is a good one all the same
        with pytest.raises(UserError, match=r"^my\.yaml:\n  data\.root: dataset '\w+' needs .*: data\.root=PATH"):
            check_root(source, "my.yaml")
    for text in ("data=digits", "data={name: folder, root: images}", "data=", "data=[folder]"):
        check_root(changed(text), "my.yaml")


def test_the_origin_is_named() -> None:
    with pytest.raises(UserError, match=r"^my\.yaml:\n  threat\.eps"):
        parse(changed("threat.eps=-1"), "my.yaml")


# Files.


def test_a_recipe_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(BASE))
    source, origin = read(str(path), ["training.epochs=5"])
    assert parse(source).training.epochs == 5
    assert origin == str(path)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"name: [", "is not YAML"),
        (b"\xff\xfe\x00", "expected text in UTF-8"),
        (b"- a\n- b\n", "expected a mapping of keys to values, got list"),
        (b"", "expected a mapping of keys to values, got NoneType"),
        (b"just text", "expected a mapping of keys to values, got str"),
        (b"a: !!python/object/apply:os.system ['true']", "line 1: expected a value without a tag"),
    ],
)
def test_a_file_that_is_no_recipe(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=expected):
        read(str(path))


def test_a_missing_file_and_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no recipe at"):
        read(str(tmp_path / "none.yaml"))
    with pytest.raises(UserError, match=r"unknown recipe 'digits-pgd' \(did you mean 'digits-pgd-at'\?\); choices"):
        read("digits-pgd")


# Fingerprints.


@pytest.mark.parametrize(
    "text",
    [
        "name=other",
        "data.augment=crop",
        "model.width=17",
        "head.scale=11",
        "threat.eps=0.1",
        "threat.norm=l2",
        "objective.attack.steps=4",
        "training.epochs=3",
        "training.lr=0.2",
        "training.seed=1",
        "training.ema=0.9",
        "training.batch_size=64",
        "training.optimizer=adam",
        "training.eps=0.01",
        "training.select=last",
        "validation.size=9",
        "validation.attack=fgsm",
        "guard.drop=0.3",
        "compute.precision=bf16-mixed",
    ],
)
def test_any_setting_of_the_training_changes_the_fingerprint(text: str) -> None:
    assert fingerprint(changed(text)) != fingerprint(BASE)


def test_order_words_and_measuring_do_not(tmp_path: Path) -> None:
    backwards = dict(reversed(BASE.items()))
    assert list(backwards) != list(BASE)
    assert fingerprint(backwards) == fingerprint(BASE)
    for text in ("description=other", "published={a: 1}", "chosen={training.lr: a guess}", "evaluation.samples=3"):
        assert fingerprint(changed(text)) == fingerprint(BASE)


# Attacks on the command line.


def test_attacks_as_text() -> None:
    assert attack_from_text("pgd") == ("pgd", PGD())
    label, attack = attack_from_text("pgd:steps=50,restarts=10,loss=margin,step_size=2/255")
    assert label == "pgd:steps=50,restarts=10,loss=margin,step_size=2/255"
    assert attack == PGD(steps=50, restarts=10, loss="margin", step_size=2 / 255)
    assert attack_from_text(" pgd : steps = 5 ")[1] == PGD(steps=5)
    assert name_and_options("he:scale=1e1") == ("he", {"scale": 10.0})
    assert options_from_texts(["mean=[0.5, 0.25]", "width=3"]) == {"mean": [0.5, 0.25], "width": 3}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pdg", "unknown attack 'pdg' .did you mean 'pgd'"),
        ("pgd:steps", "expected an option as key=value, got 'steps'"),
        ("pgd:=3", "expected an option as key=value, got '=3'"),
        ("pgd:step=3", "unknown option of attack 'pgd' 'step' .did you mean 'steps'"),
        ("pgd:steps=many", "attack 'pgd:steps=many': steps: .*'many'"),
        ("pgd:steps=[", "is not YAML: line"),
        ("pgd:loss=ce", "loss: unknown loss 'ce'"),
        ("", "unknown attack ''"),
    ],
)
def test_a_bad_attack_as_text(text: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        attack_from_text(text)


def test_settings_made_in_python_are_checked_the_same_way() -> None:
    with pytest.raises(ValueError, match="expected at least 0"):
        Training(lr=-0.1)
    with pytest.raises(ValueError, match="greater than 0"):
        Training(epochs=0)
