"""The built-in recipes: every trained row of the papers has one, with its number; and how recipes build on others."""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from rich.console import Console

from steelman.attacks import PGD
from steelman.attacks.fn import FNAttack
from steelman.errors import UserError
from steelman.models.classifier import build_classifier
from steelman.objectives import OBJECTIVES
from steelman.recipe import Recipe, fingerprint, parse, read
from steelman.recipe_blocks import Published
from steelman.recipe_files import MISSING, laid_over, load, recipes, setting
from steelman.schedules import Schedule, value_at
from steelman.training import run

HE, LLR, RAT, PAS = "Pang et al. (2020)", "Qin et al. (2019)", "Jin et al. (2023)", "Liu et al. (2020)"
CIFAR = "PGD-AT, PGD-AT+HE, ALP, ALP+HE, TRADES, TRADES+HE"
FREE = "ResNet-50 FreeAT, ResNet-152 FreeAT, WRN-50-2 FreeAT, WRN-101-2 FreeAT"
RADII = ("Const", "Cosine", "Linear")
KINDS = ("constant", "cosine", "linear")

# Each table, and the rows of it that are trained models.
ROWS: dict[tuple[str, str], set[str]] = {
    (HE, "Table 2"): set(CIFAR.split(", ")),
    (HE, "Table 3"): {method + head for method in ("FastAT", "FreeAT") for head in ("", "+HE", "+m-HE")},
    (HE, "Table 4"): {row + head for row in FREE.split(", ") for head in ("", "+HE")},
    (HE, "Table 5"): {*CIFAR.split(", "), "FreeAT", "FreeAT+HE"},
    (HE, "Table 6"): {"PGD-AT+HE, WRN-34-10", "PGD-AT+HE, WRN-34-20"},
    (HE, "Table 7"): {"WRN-34-10, standardly trained"},
    (HE, "Table 8"): set(CIFAR.split(", ")),
    (HE, "Table 9"): {f"s 15, m {m}" for m in ("0", "0.1", "0.2", "0.3", "0.4", "0.5")}
    | {f"s {s}, m 0.2" for s in (1, 5, 10, 20)},
    (HE, "Table 10"): {"PGD-AT+m-HE", "ALP+m-HE", "TRADES+m-HE"},
    (HE, "section 4.1"): {"ablation, PGD-AT+FN", "ablation, PGD-AT+WN", "ablation, PGD-AT+FN+WN", "adaptive attacks"},
    (HE, "Figure 2"): {"PGD-AT, 7 steps", "PGD-AT+HE, 3 steps"},
    (HE, "rebuttal Table C"): set(CIFAR.split(", ")),
    (HE, "rebuttal"): {"TRADES", "TRADES+HE"},
    (LLR, "rebuttal"): {
        "TRADES, WRN-28",
        "LLR, WRN-28",
        "gamma alone",
        "gamma and a large weight on ||grad l||_2",
    },
    (LLR, "abstract"): {"LLR, ImageNet at 4/255"},
    (RAT, "Table 7"): {"TRADES", "TRADES+1st+2nd"},
    (RAT, "Table 8"): {"AT", "AT+1st+2nd", "GAT", "TRADES+GAT", "HAT", "HAT(DDPM)"},
    (PAS, "rebuttal Table 1"): {f"MNIST LeNet, {eps}" for eps in RADII}
    | {
        f"CIFAR10 {net}, {eps}{resets}"
        for net in ("VGG", "ResNet18")
        for eps in RADII
        for resets in ("", ", periodic learning rate resets")
    },
    (PAS, "rebuttal"): {"MNIST, eps 0.3, PAS", "MNIST, eps 0.3, the challenge's model"},
}

# Recipes of a paper that have no number: what another one needs, and what no source here gives a number for.
HELPERS = {"rat-cifar10-hat-helper", "rat-cifar10-hat-ddpm-helper", "cure-cifar10-standard"}
NUMBERLESS = {
    "cure-cifar10-cure",
    "llr-cifar10-llr-2-steps",
    "llr-imagenet-resnet152-adv",
    "llr-imagenet-resnet152-denoise",
    *(f"pas-mnist-{kind}-lr1e-3" for kind in KINDS),
    *(f"pas-mnist-l2-{kind}{rate}" for kind in KINDS for rate in ("", "-lr1e-3")),
    *(f"rat-cifar10-{net}-trades{rat}" for net in ("wrn34-10", "vgg16", "mobilenet") for rat in ("", "-1st-2nd")),
    *(f"rat-cifar100-trades{rat}" for rat in ("", "-1st-2nd")),
}

# A few cells of each paper, copied by hand.
CELLS: dict[tuple[str, str, str], Any] = {
    ("he-cifar10-pgd-at", "Table 2", "Clean"): 86.75,
    ("he-cifar10-alp-he", "Table 2", "FAB"): 51.86,
    ("he-cifar10-trades-he", "Table 2", "PGD-20"): 62.02,
    ("he-cifar10-trades-he", "Table 8", "SPSA-80"): 65.62,
    ("he-cifar10-alp-he", "Table 5", "mCA"): 80.55,
    ("he-cifar10-pgd-at-he", "section 4.1", "adaptive PGD-500"): 52.54,
    ("he-cifar10-alp-m-he", "Table 10", "PGD-500"): 53.34,
    ("he-cifar10-freeat-m-he", "Table 3", "PGD-50"): 51.85,
    ("he-cifar10-fastat", "Table 3", "Time"): 11.38,
    ("he-imagenet-wrn101-2-freeat-he", "Table 4", "PGD-50"): 45.04,
    ("he-imagenet-resnet50-freeat", "Table 5", "mCA"): 28.22,
    ("he-cifar10-wrn34-20-pgd-at-he-decay", "Table 6", "AutoAttack"): 53.74,
    ("he-cifar10-standard", "Table 7", "PGD-2 with FN"): 33.75,
    ("he-cifar10-standard", "Table 7", "PGD-1"): 67.09,
    ("he-cifar10-standard", "Table 7", "PGD-1 with FN"): 62.89,
    ("he-cifar10-standard", "Table 7", "PGD-2"): 50.37,
    ("he-cifar10-pgd-at-7-steps", "Figure 2", "PGD-20"): 52.67,
    ("he-cifar10-pgd-at-he-3-steps", "Figure 2", "PGD-20"): 53.22,
    ("he-cifar10-trades-he-s1-m0.2", "Table 9", "Clean"): 89.34,
    ("he-cifar10-trades-he-s15-m0", "Table 9", "PGD-20"): 60.35,
    ("he-cifar10-pgd-at-wn", "section 4.1", "Clean"): 87.28,
    ("llr-cifar10-llr", "rebuttal", "DeepFool"): 71.43,
    ("llr-cifar10-gamma-only", "rebuttal", "adversarial"): 49.37,
    ("llr-imagenet-resnet152-llr", "abstract", "untargeted attack"): 47,
    ("rat-cifar10-trades-1st-2nd", "Table 7", "ADBD"): 0.0435,
    ("rat-cifar10-at-1st-2nd", "Table 8", "AA"): 48.7,
    ("rat-cifar10-hat-ddpm", "Table 8", "Clean"): 86.86,
    ("pas-mnist-cosine", "rebuttal Table 1", "PGD100"): (8.46, 0.82),
    ("pas-cifar10-vgg-linear-resets", "rebuttal Table 1", "Square5K"): (51.28, 0.04),
    ("pas-cifar10-resnet18-constant", "rebuttal Table 1", "APGD100-DLR"): (56.6, 0.25),
    ("pas-mnist-eps0.3-challenge", "rebuttal", "PGD100 x50"): 89.62,
}

SHAPES = {
    "digits": ((1, 8, 8), 10),
    "mnist": ((1, 28, 28), 10),
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "arrays": ((3, 32, 32), 10),
    "folder": ((3, 224, 224), 1000),
}


@functools.cache
def recipe(name: str) -> Recipe:
    source, origin = read(name)
    return parse(source, origin)


def rows_of(name: str) -> tuple[Published, ...]:
    return recipe(name).published or ()


# Every recipe.


@pytest.mark.parametrize("name", recipes())
def test_every_built_in_recipe_is_valid_whole_and_called_by_its_name(name: str) -> None:
    source, origin = read(name)
    found = parse(source, origin)
    assert found.name == name
    assert found.description
    assert len(found.description) <= 60 or recipes()[name].parent.name == "recipes", "the list has a line for each"
    assert "base" not in source
    again = yaml.safe_load(yaml.safe_dump(source, sort_keys=False))
    assert parse(again) == found
    assert fingerprint(again) == fingerprint(source), "a run's own copy of the recipe must be known again"


@pytest.mark.parametrize("name", recipes())
def test_what_is_marked_as_chosen_is_a_setting_of_the_recipe(name: str) -> None:
    source, _ = read(name)
    for key, reason in recipe(name).chosen.items():
        assert setting(source, key) is not MISSING, key
        assert reason


def test_every_model_can_be_built() -> None:
    """Of the full size, in no memory. Recipes share models, and each is built once with each kind of head."""
    seen = set()
    for name in recipes():
        spec = recipe(name)
        shape, classes = SHAPES[spec.data.name]
        if (key := (str(spec.model), spec.head.name, shape)) in seen:
            continue
        seen.add(key)
        with torch.device("meta"):
            model = build_classifier(
                spec.model.name,
                input_shape=shape,
                num_classes=classes,
                head=spec.head.name,
                head_options=spec.head.options,
                mean=spec.model.mean,
                std=spec.model.std,
                **spec.model.options,
            )
        assert next(iter(model.parameters())).device.type == "meta"
    assert len(seen) > 20


def test_no_two_recipes_have_one_name() -> None:
    folder = Path(recipes()["digits-standard"]).parent
    stems = [path.stem for path in folder.rglob("*.yaml")]
    assert len(stems) == len(set(stems)) == len(recipes())
    assert {"cure", "he", "llr", "pas", "rat"} == {path.name for path in folder.iterdir() if any(path.glob("*.yaml"))}


def test_the_package_takes_them_all_along() -> None:
    root = Path(__file__).parent.parent
    wanted = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["steelman"]
    taken = {path for pattern in wanted for path in (root / "src" / "steelman").glob(pattern)}
    assert {path.resolve() for path in recipes().values()} <= {path.resolve() for path in taken}


# The published rows.


def test_every_trained_row_of_every_table_has_one_recipe() -> None:
    found: dict[tuple[str, str], list[str]] = {}
    for name in recipes():
        for row in rows_of(name):
            found.setdefault((row.paper, row.table), []).append(row.row)
    assert found.keys() == ROWS.keys()
    for table, rows in found.items():
        assert sorted(rows) == sorted(ROWS[table])


@pytest.mark.parametrize(("name", "table", "column"), CELLS)
def test_published_numbers_are_those_of_the_papers(name: str, table: str, column: str) -> None:
    (value,) = (row.numbers[column] for row in rows_of(name) if row.table == table and column in row.numbers)
    assert value == CELLS[name, table, column]


def test_every_recipe_of_a_paper_has_a_row_or_serves_one_that_has() -> None:
    without = {name for name, path in recipes().items() if path.parent.name != "recipes" and not rows_of(name)}
    assert without == HELPERS | NUMBERLESS
    for name in NUMBERLESS:
        assert recipe(name).description.endswith("; no published number."), name
    for name in ("rat-cifar10-hat", "rat-cifar10-hat-ddpm"):
        helper: Path = getattr(recipe(name).objective, "helper")  # noqa: B009 - of this objective alone
        assert helper.parts == ("runs", f"{name}-helper"), "where the helper's recipe trains to"
        assert recipe(f"{name}-helper").data.name == recipe(name).data.name, "a helper must know the same classes"


def test_numbers_can_be_compared() -> None:
    """Percentages are percentages, and a column that an attack here stands for says the same everywhere."""
    for name in recipes():
        for row in rows_of(name):
            assert row.measure in (
                "accuracy %",
                "error %",
                "minutes per epoch",
                "accuracy %; time in minutes",
                "accuracy %; ADBD a distance in [0, 1] units",
            )
            for column, value in row.numbers.items():
                mean = value[0] if isinstance(value, tuple) else value
                assert 0 < mean < (1 if column == "ADBD" else 100), (name, column)


def test_hypersphere_heads_are_attacked_as_published_and_honestly_too() -> None:
    hyperspheres = [name for name in recipes() if name.startswith("he-") and recipe(name).head.name in ("he", "m-he")]
    assert len(hyperspheres) == 27
    for name in hyperspheres:
        attacks = recipe(name).evaluation.attacks
        assert {attack.head_scale for attack in attacks.values() if isinstance(attack, PGD)} == {True, False}, name
        for label, attack in attacks.items():
            assert isinstance(attack, PGD)
            assert attack.head_scale == ("scaled" in label or "adaptive" in label), (name, label)


def test_the_recipes_use_every_method_of_the_papers() -> None:
    used = {type(recipe(name).objective) for name in recipes() if rows_of(name)}
    names = "standard, pgd-at, alp, trades, llr, rat, free-at, fast-at, gat, hat"
    assert used == {OBJECTIVES[name] for name in names.split(", ")}


# Schedules: the learning rate (or the radius) at an epoch, as the papers give it.

RATES: dict[str, dict[float, float]] = {
    "he-cifar10-trades-he": {0: 0.1, 74: 0.1, 75: 0.01, 89: 0.01, 90: 0.001, 99: 0.001},
    "he-cifar10-fastat-he": {0: 0, 15: 0.2, 30: 0},
    "he-cifar10-freeat-m-he": {0: 0, 5: 0.04, 10: 0},
    "he-imagenet-wrn50-2-freeat-he": {0: 0.1, 7: 0.1, 8: 0.01, 15: 0.01, 16: 0.001, 22: 0.001},
    "llr-cifar10-trades": {0: 0.1, 104: 0.1, 105: 0.01, 116: 1e-3, 126: 1e-4},
    "llr-cifar10-llr": {0: 0.2, 105: 0.02, 116: 2e-3, 126: 2e-4},
    "llr-imagenet-resnet152-llr": {34: 0.1, 35: 0.01, 69: 0.01, 70: 0.001, 95: 1e-4, 109: 1e-4},
    "cure-cifar10-cure": {0: 1e-4, 9: 1e-4},
    "rat-cifar100-trades-1st-2nd": {0: 0.1, 99: 0.1, 100: 0.01, 149: 0.01, 150: 0.001},
    "rat-cifar10-at-1st-2nd": {0: 0.1, 99: 0.1, 100: 0.01, 149: 0.01, 150: 0.001},
    "rat-cifar10-gat": {0: 0.1, 70: 0.1, 71: 0.01, 85: 0.01, 86: 0.001},
    "rat-cifar10-hat": {0: 0.0084, 12.5: 0.21, 50: 0},
    "pas-mnist-linear": {0: 1e-4, 99: 1e-4},
    "pas-mnist-l2-linear": {0: 1e-4, 99: 1e-4},
    **{f"pas-mnist-{norm}{kind}-lr1e-3": {0: 1e-3, 99: 1e-3} for norm in ("", "l2-") for kind in KINDS},
    "pas-cifar10-vgg-cosine": {0: 0.1, 100: 0.01, 150: 0.001},
    "pas-cifar10-resnet18-linear-resets": {
        start + share * length: rate
        for start, length in ((0, 100), (100, 50), (150, 50))
        for share, rate in ((0, 0.1), (0.48, 0.1), (0.5, 0.01), (0.74, 0.01), (0.76, 0.001), (0.98, 0.001))
    },
}


def at_epoch(schedule: float | Schedule, epoch: float, epochs: int) -> float:
    """As the trainer asks: steps done over all steps."""
    return value_at(schedule, (epoch * 1000) / (epochs * 1000))


@pytest.mark.parametrize("name", RATES)
def test_learning_rates_drop_where_they_are_published_to(name: str) -> None:
    training = recipe(name).training
    for epoch, rate in RATES[name].items():
        assert at_epoch(training.lr, epoch, training.epochs) == pytest.approx(rate), epoch


def test_hat_follows_a_one_cycle_policy() -> None:
    torch_one = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.21)
    policy = torch.optim.lr_scheduler.OneCycleLR(torch_one, max_lr=0.21, pct_start=0.25, total_steps=401)
    lr = recipe("rat-cifar10-hat").training.lr
    for step in range(400):
        assert value_at(lr, step / 400) == pytest.approx(policy.get_last_lr()[0], abs=0.005)
        torch_one.step()
        policy.step()


def test_radii_grow_as_published() -> None:
    training = recipe("pas-mnist-cosine").training
    assert training.eps is not None
    assert training.eps_per == "epoch"
    radii = [at_epoch(training.eps, epoch, training.epochs) for epoch in range(100)]
    assert radii[:61] == pytest.approx([0.3 * (1 - math.cos(math.pi * epoch / 100)) for epoch in range(61)])
    assert set(radii[61:]) == {0.4}
    constant = recipe("pas-mnist-constant").training
    assert constant.eps is None


# The radius that a schedule heads for and the epoch at which it is at the target one, from the checkpoints' names.
GROWTH: dict[str, tuple[float, int | None]] = {
    "pas-mnist-cosine": (0.6, 61),
    "pas-mnist-linear": (0.8, 50),
    "pas-mnist-l2-cosine": (6, 61),
    "pas-mnist-l2-linear": (8, 50),
    "pas-cifar10-vgg-cosine": (8 / 255, None),
    "pas-cifar10-vgg-linear": (8 / 255, None),
    "pas-cifar10-vgg-cosine-resets": (16 / 255, 50),
    "pas-cifar10-vgg-linear-resets": (16 / 255, 50),
    "pas-cifar10-resnet18-cosine": (16 / 255, 100),
    "pas-cifar10-resnet18-linear": (16 / 255, 100),
    "pas-cifar10-resnet18-cosine-resets": (16 / 255, 50),
    "pas-cifar10-resnet18-linear-resets": (16 / 255, 50),
}


@pytest.mark.parametrize("name", GROWTH)
def test_radii_head_for_what_the_names_of_the_checkpoints_say(name: str) -> None:
    found, (end, arrives) = recipe(name), GROWTH[name]
    eps = found.training.eps
    assert eps is not None
    assert getattr(getattr(eps, "schedule", eps), "end") == pytest.approx(end)  # noqa: B009 - of these schedules alone
    radii = [at_epoch(eps, epoch, found.training.epochs) for epoch in range(found.training.epochs)]
    at_target = [epoch for epoch, radius in enumerate(radii) if radius == pytest.approx(found.threat.eps, rel=1e-9)]
    assert (at_target[0] if at_target else None) == arrives
    assert max(radii) <= found.threat.eps * (1 + 1e-9)


@pytest.mark.parametrize("name", [name for name in recipes() if name.startswith("pas-cifar10")])
def test_what_only_names_of_checkpoints_tell_is_said_to_be_told_by_them_alone(name: str) -> None:
    found = recipe(name)
    assert getattr(found.training.optimizer, "weight_decay") == 1e-3  # noqa: B009 - of this optimiser
    keys = ["training.optimizer.weight_decay"]
    if found.training.eps is not None:
        keys.append("training.eps.schedule.end" if "resets" in name else "training.eps.end")
    if "resets" in name:
        keys.append("training.lr.at")
    for key in keys:
        assert found.chosen[key].startswith("told by the names of the released checkpoints alone"), key


def test_cure_lengthens_its_probe_over_the_first_epochs() -> None:
    """The released lengths, of normalised images, in units of the image: times the std of an image, 0.2009."""
    found = recipe("cure-cifar10-cure")
    h: Schedule = getattr(found.objective, "h")  # noqa: B009 - of this objective alone
    std = math.sqrt(sum(one**2 for one in found.model.std) / 3)
    steps = 383  # of 128 images in an epoch of 49,000
    for epoch, length in enumerate([0.1, 0.4, 0.8, 1.8, 3, 3, 3, 3, 3, 3]):
        for step in (0, steps - 1):
            assert value_at(h, (epoch * steps + step) / (10 * steps)) == pytest.approx(length * std, rel=2e-3), epoch


def test_steps_in_training_are_those_that_the_recipe_is_named_by() -> None:
    for name, steps in {"he-cifar10-pgd-at-7-steps": 7, "he-cifar10-pgd-at-he-3-steps": 3}.items():
        assert getattr(recipe(name).objective, "attack").steps == steps  # noqa: B009 - of this objective
    for name in ("llr-cifar10-llr-2-steps", "llr-imagenet-resnet152-llr"):
        assert getattr(recipe(name).objective, "steps") == 2  # noqa: B009 - of this objective


def test_fastat_clips_its_start_where_the_released_code_does() -> None:
    for name in ("he-cifar10-fastat", "he-cifar10-fastat-he", "he-cifar10-fastat-m-he"):
        assert getattr(recipe(name).objective, "clipped_start") is True, name  # noqa: B009 - of this objective alone
        assert "clips the random start" in rows_of(name)[0].note


def test_a_standard_model_is_attacked_through_normalised_features_too() -> None:
    attacks = recipe("he-cifar10-standard").evaluation.attacks
    (row,) = rows_of("he-cifar10-standard")
    assert attacks.keys() == row.numbers.keys()
    for label, attack in attacks.items():
        assert isinstance(attack, FNAttack if "FN" in label else PGD), label
        assert getattr(attack, "steps") == int(label[4]), label  # noqa: B009 - of both attacks


@pytest.mark.parametrize("net", ["vgg", "resnet18"])
@pytest.mark.parametrize("kind", ["constant", "cosine", "linear"])
def test_resets_begin_learning_rate_and_radius_anew_and_end_in_an_ensemble(net: str, kind: str) -> None:
    found = recipe(f"pas-cifar10-{net}-{kind}-resets")
    training = found.training
    assert training.select == "cycles"
    assert training.cycle_ends() == [100, 150, 200]
    if kind == "constant":
        assert training.eps is None
        return
    assert training.eps is not None
    for start, end in ((0, 100), (100, 150), (150, 200)):
        assert at_epoch(training.eps, start, 200) == 0
        assert 0 < at_epoch(training.eps, start + (end - start) / 4, 200) < 8 / 255
        assert at_epoch(training.eps, end - 1, 200) == 8 / 255


def test_gat_guides_harder_at_the_end() -> None:
    weight = getattr(recipe("rat-cifar10-gat").objective, "weight")  # noqa: B009 - of this objective alone
    assert [value_at(weight, share) for share in (0, 0.85, 0.86, 0.99)] == [10, 10, 40, 40]


# Starting: a few steps on images drawn at random, with a narrow network, or a plain one where the method is all that
# is tried.

STARTED: dict[str, list[str]] = {
    "he-cifar10-standard": ["model.name=mlp", "model.width=8"],
    "he-cifar10-alp-m-he": ["model.name=mlp", "model.width=8"],
    "he-cifar10-pgd-at-fn": ["model.name=mlp", "model.width=8"],
    "he-cifar10-pgd-at-wn": ["model.name=mlp", "model.width=8"],
    "he-cifar10-trades-he": ["model.name=mlp", "model.width=8"],
    "he-cifar10-fastat-he": ["model.width=4"],
    "he-imagenet-resnet50-freeat-he": ["model.width=4"],
    "llr-cifar10-llr": ["model.width=1", "objective.steps=2"],
    "llr-cifar10-gradient-norm": ["model.name=mlp", "model.width=8"],
    "llr-imagenet-resnet152-denoise": ["model.name=resnet50", "model.width=4"],
    "llr-imagenet-resnet152-llr": ["model.name=resnet50", "model.width=4", "training.lr=1e-3"],
    "pas-cifar10-resnet18-cosine-resets": ["model.width=1", "training.epochs=4"],
    "pas-cifar10-vgg-linear": ["model.width=1"],
    "pas-mnist-constant-lr1e-3": ["model.width=1"],
    "pas-mnist-l2-cosine-lr1e-3": ["model.width=1"],
    "rat-cifar10-at-1st-2nd": ["model.width=4"],
    "rat-cifar10-vgg16-trades-1st-2nd": ["model.width=1"],
    "rat-cifar100-trades-1st-2nd": ["model.width=4"],
    "rat-cifar10-gat": ["model.width=1"],
    "rat-cifar10-trades-gat": ["model.width=1"],
    "cure-cifar10-cure": ["model.width=1"],
    "rat-cifar10-hat": ["model.width=1"],
}
# What must be trained first: its recipe, and the setting that names what is left of it.
NEEDED = {
    "cure-cifar10-cure": ("cure-cifar10-standard", "model.weights", "model.safetensors"),
    "rat-cifar10-hat": ("rat-cifar10-hat-helper", "objective.helper", ""),
}


def started(name: str, folder: Path, overrides: list[str]) -> Path:
    """A run of a recipe, cut short; its folder."""
    shape, classes = SHAPES[recipe(name).data.name] if recipe(name).data.name != "folder" else ((3, 32, 32), 10)
    g = torch.Generator().manual_seed(0)
    arrays: dict[str, Any] = {}
    for part, n in (("train", classes + 6), ("test", 4)):
        arrays[f"{part}_images"] = torch.rand(n, *shape, generator=g).numpy()
        arrays[f"{part}_labels"] = (torch.arange(n) % classes).numpy()
    np.savez(folder / "data.npz", **arrays)
    inner = ["objective.attack.steps=1"] if hasattr(recipe(name).objective, "attack") else []
    common = [
        "training.epochs=1",
        f"training.batch_size={classes // 2 + 1}",
        "validation.size=4",
        "validation.attack.steps=1",
    ]
    source, origin = read(name, [*common, *inner, *overrides])
    source["data"] = {**source["data"], "name": "arrays", "root": str(folder / "data.npz")}
    source["data"] = {key: value for key, value in source["data"].items() if key not in ("size", "resize")}
    for attack in source["evaluation"]["attacks"].values():
        if isinstance(attack, dict):
            attack |= {"steps": 1, **({"restarts": 1} if "restarts" in attack else {})}
    source["evaluation"]["suite"] = None
    source["compute"] = {"accelerator": "cpu"}
    found = run.train(source, folder / "run", console=Console(quiet=True), origin=origin)
    assert found is not None
    assert found.evaluation.total == 4
    assert "NaN" not in (folder / "run" / "metrics.jsonl").read_text()
    return folder / "run"


@pytest.mark.parametrize("name", STARTED)
def test_recipes_start_learn_and_are_measured(name: str, tmp_path: Path) -> None:
    overrides = STARTED[name]
    if name in NEEDED:
        first, key, file = NEEDED[name]
        (tmp_path / first).mkdir()
        overrides = [*overrides, f"{key}={started(first, tmp_path / first, overrides) / file}"]
    started(name, tmp_path, overrides)


def test_each_method_head_norm_and_way_of_selecting_is_started() -> None:
    def kinds(names: Iterable[str]) -> set[object]:
        found: set[object] = set()
        for name in names:
            spec = recipe(name)
            found |= {type(spec.objective), spec.head.name, spec.threat.norm, spec.training.select, spec.data.name}
        return found - {"digits", "arrays"}

    assert kinds(STARTED) == kinds(recipes())


# Building on another recipe.

BASE: dict[str, Any] = {
    "name": "below",
    "description": "what is below",
    "published": [{"paper": "P", "table": "T", "row": "R", "numbers": {"Clean": 1.0}}],
    "chosen": {"training.epochs": "a guess", "head.scale": "another", "objective.attack.steps": "a third"},
    "data": "digits",
    "model": {"name": "mlp", "width": 16},
    "head": {"name": "he", "scale": 10, "margin": 0.1},
    "threat": {"norm": "linf", "eps": "8/255"},
    "objective": {"name": "pgd-at", "attack": {"name": "pgd", "steps": 3, "step_size": 0.01}},
    "training": {"epochs": 2, "lr": {"name": "multistep", "start": 0.1, "drops": [0.5, 0.75]}, "eps": 0.01},
}


@pytest.mark.parametrize(
    ("own", "key", "expected"),
    [
        ({"training": {"epochs": 5}}, "training.epochs", 5),
        ({"training": {"epochs": 5}}, "training.eps", 0.01),
        ({"training": {"eps": None}}, "training.eps", None),
        ({"head": {"scale": 5}}, "head", {"name": "he", "scale": 5, "margin": 0.1}),
        ({"head": {"name": "he", "scale": 5}}, "head", {"name": "he", "scale": 5, "margin": 0.1}),
        ({"head": {"name": "linear"}}, "head", {"name": "linear"}),
        ({"head": "he"}, "head", "he"),  # a single value replaces: the head with its own defaults
        ({"objective": {"attack": {"steps": 9}}}, "objective.attack", {"name": "pgd", "steps": 9, "step_size": 0.01}),
        ({"objective": {"attack": {"name": "fgsm"}}}, "objective.attack", {"name": "fgsm"}),
        ({"objective": {"name": "trades", "attack": {"steps": 9}}}, "objective.attack", {"steps": 9}),
        ({"training": {"lr": {"drops": [0.9]}}}, "training.lr", {"name": "multistep", "start": 0.1, "drops": [0.9]}),
        ({"training": {"lr": 0.2}}, "training.lr", 0.2),
        ({"data": {"augment": "crop"}}, "data", {"name": "digits", "augment": "crop"}),
        ({"data": {"name": "mnist"}}, "data", {"name": "mnist"}),
        ({"training": {"eps": {"name": "linear"}}}, "training.eps", {"name": "linear"}),
        ({"validation": {"size": 9}}, "validation", {"size": 9}),
    ],
)
def test_a_recipe_is_laid_over_its_base(own: dict[str, Any], key: str, expected: object) -> None:
    assert setting(laid_over(BASE, own), key) == expected


def test_laying_over_changes_neither_recipe() -> None:
    before = yaml.safe_dump(BASE)
    own = {"head": {"scale": 5}, "chosen": {"head.scale": "mine"}}
    whole = laid_over(BASE, own)
    whole["head"]["scale"] = 99
    whole["chosen"]["more"] = "words"
    assert yaml.safe_dump(BASE) == before
    assert own == {"head": {"scale": 5}, "chosen": {"head.scale": "mine"}}


def test_words_are_each_recipes_own() -> None:
    """The base's number is not what a changed recipe aims at."""
    whole = laid_over(BASE, {"training": {"epochs": 3}})
    assert not {"name", "description", "published"} & whole.keys()


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"training.epochs": "a guess", "head.scale": "another", "objective.attack.steps": "a third"}),
        ({"training": {"epochs": 3}}, {"head.scale": "another", "objective.attack.steps": "a third"}),
        ({"training": {"epochs": 2}}, {"head.scale": "another", "objective.attack.steps": "a third"}),
        ({"head": "linear"}, {"training.epochs": "a guess", "objective.attack.steps": "a third"}),
        ({"objective": {"name": "standard"}}, {"training.epochs": "a guess", "head.scale": "another"}),
        (
            {"head": {"scale": 3}, "chosen": {"head.scale": "mine"}},
            {"training.epochs": "a guess", "objective.attack.steps": "a third", "head.scale": "mine"},
        ),
    ],
)
def test_a_reason_stays_only_where_the_setting_is_left_alone(own: dict[str, Any], expected: dict[str, str]) -> None:
    assert laid_over(BASE, own)["chosen"] == expected


def made(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def test_a_recipe_of_ones_own_on_a_built_in_one(tmp_path: Path) -> None:
    made(tmp_path, mine="name: mine\nbase: he-cifar10-trades-he\nhead: {scale: 7}\n")
    source, origin = read(str(tmp_path / "mine.yaml"), ["head.margin=0.3", "training.epochs=1"])
    found = parse(source, origin)
    assert found.head.options == {"scale": 7, "margin": 0.3, "wn_mode": "autograd"}
    assert found.training.epochs == 1, "overrides come last"
    assert found.objective == recipe("he-cifar10-trades").objective
    assert found.published is None
    assert found.name == "mine"


def test_a_base_is_found_from_the_recipes_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    made(tmp_path, below=yaml.safe_dump(BASE))
    made(tmp_path / "inner", middle="name: middle\nbase: ../below.yaml\nhead: linear\n")
    made(tmp_path, top="name: top\nbase: inner/middle.yaml\nmodel: {width: 8}\n")
    monkeypatch.chdir(tmp_path / "inner")
    found = parse(*read("../top.yaml"))
    assert (found.name, found.head.name, found.model.options) == ("top", "linear", {"width": 8})
    assert parse(load(tmp_path / "top.yaml")) == found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("base: he-cifar10-trade", r"top\.yaml: base: unknown recipe 'he-cifar10-trade' \(did you mean 'he-cifar10-tr"),
        ("base: none.yaml", r"top\.yaml: base: no recipe at .*none\.yaml"),
        ("base: [a, b]", r"top\.yaml: base: expected a recipe's name or the path of a YAML file, got \['a', 'b'\]"),
        ("base:", r"top\.yaml: base: expected a recipe's name or the path of a YAML file, got None"),
        ("base: top.yaml", r"top\.yaml: base: expected a base that is not based on this recipe, got top -> top"),
        ("base: round.yaml", r"round\.yaml: base: expected a base .*, got top -> round -> top"),
        ("base: bad.yaml", r"top\.yaml: base: .*bad\.yaml is not YAML"),
        ("base: lost.yaml", r"top\.yaml: base: .*lost\.yaml: base: unknown recipe 'nowhere'"),
    ],
)
def test_a_base_that_cannot_be_had(tmp_path: Path, text: str, expected: str) -> None:
    made(tmp_path, top=f"name: top\n{text}\n", round="base: top.yaml", bad="[", lost="base: nowhere")
    with pytest.raises(UserError, match=expected):
        read(str(tmp_path / "top.yaml"))


def test_a_bad_reason_in_either_recipe_is_told(tmp_path: Path) -> None:
    for chosen in ("[a]", "text", "{a: [b]}"):
        made(tmp_path, below=yaml.safe_dump({**BASE, "chosen": yaml.safe_load(chosen)}))
        made(tmp_path, top="name: top\nbase: below.yaml")
        with pytest.raises(UserError, match="chosen"):
            parse(*read(str(tmp_path / "top.yaml")))
        made(tmp_path, below=yaml.safe_dump(BASE), top=f"name: top\nbase: below.yaml\nchosen: {chosen}")
        with pytest.raises(UserError, match="chosen"):
            parse(*read(str(tmp_path / "top.yaml")))


# Published rows as settings.


def test_a_row_may_have_numbers_with_deviations() -> None:
    rows = [{"paper": "P", "table": "T", "row": "R", "numbers": {"a": "1e1", "b": [2, 0.5]}, "measure": "error %"}]
    (row,) = parse({**BASE, "published": rows}).published or ()
    assert row == Published(paper="P", table="T", row="R", numbers={"a": 10.0, "b": (2.0, 0.5)}, measure="error %")
    assert parse({**BASE, "published": [row]}).published == (row,)
    assert parse({**BASE, "published": None}).published is None


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({"a": 1}, "published: "),
        ("text", "published: "),
        ([3], r"published\.0: expected a mapping"),
        ([{"paper": "P", "table": "T", "row": "R"}], r"published\.0\.numbers: is required and missing"),
        ([{"paper": "P", "table": "T", "row": "R", "numbers": {}}], r"published\.0\.numbers: "),
        ([{"paper": "P", "table": "T", "row": "R", "numbers": {"a": "good"}}], r"published\.0\.numbers\.a"),
        ([{"paper": "P", "table": "T", "row": "R", "numbers": {"a": [1, 2, 3]}}], r"published\.0\.numbers\.a"),
        ([{"papr": "P"}], r"published\.0\.papr: unknown key 'papr' \(did you mean 'paper'\?\)"),
    ],
)
def test_a_bad_row_is_answered_with_its_place(rows: object, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        parse({**BASE, "published": rows})
