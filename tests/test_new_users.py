"""Mistakes that a new user makes: each answer says the way out."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import steelman
from steelman import errors
from steelman import recipe as recipes
from steelman.attacks import ATTACKS
from steelman.cli import listing
from steelman.data import DATASETS
from steelman.data.source import ArraySource
from steelman.errors import UserError, unknown
from steelman.heads import HEADS
from steelman.recipe_files import RECIPES
from steelman.testing import check_attack, check_head, check_objective
from steelman.threat import ThreatModel
from steelman.training import run
from tests.test_bad_input import RECIPE, TINY, Fails, fails  # noqa: F401 - a fixture
from tests.test_cli import Command, command, completions  # noqa: F401 - a fixture
from tests.training_helpers import a_net, some_data

NORMALISED = r"the model must normalise its own images: steelman\.wrap\(model, mean=\.\.\., std=\.\.\.\)$"


def eleven_outputs() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 11))


class Noisy(nn.Module):
    """Ten logits, other ones each time."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.rand(len(x), 10)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped before its evaluation."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    source, origin = recipes.read(RECIPE, TINY)
    run.train(source, folder, console=Console(quiet=True), origin=origin)
    for name in ("run.json", "model.json", "report.html"):
        (folder / name).unlink()
    shutil.rmtree(folder / "attacks")
    return folder


@pytest.mark.parametrize("folders", [("runs/a", "runs/b"), (["runs/a", "runs/b"],), (Path("runs/a"),)])
def test_compare_without_names_shows_the_right_call(folders: Any) -> None:
    with pytest.raises(UserError, match=r"such as compare\(\{'mine': 'runs/mine', .*\}\), got .*runs/a"):
        steelman.compare(*folders)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("cifar10", r"^data: .* got 'cifar10'; give \(images, labels\), .* steelman\.data\.load\('cifar10'\)\.train$"),
        (Path("my/images"), r"my/images.*; give \(images, labels\), .* steelman\.data\.load\('mnist'\)\.train$"),
        ([(torch.rand(1, 4, 4), 0)] * 5, "got 5 values; put all images in one tensor .* or give a torch Dataset$"),
    ],
)
def test_what_is_no_data_says_what_to_give(data: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        steelman.fit(a_net(), data, ThreatModel(eps=0.1))


def test_a_text_as_test_data_says_what_to_give() -> None:
    with pytest.raises(UserError, match=r"^test: .*load\('mnist'\)\.test$"):
        steelman.fit(a_net(), some_data(), ThreatModel(eps=0.1), test="mnist", console=Console(quiet=True))


@pytest.mark.parametrize("more", [(), ("--eps", "0.1")])
@pytest.mark.parametrize("norm", ["Linf", "LINF"])
def test_an_unknown_norm_is_told_from_a_missing_radius(
    norm: str,
    more: tuple[str, ...],
    fails: Fails,  # noqa: F811
) -> None:
    words = ("evaluate", "tests.test_cli:my_trained_model", "--data", "digits", "--norm", norm, *more)
    assert f"--norm: unknown norm '{norm}' (did you mean 'linf'?); choices: l1, l2, linf" in fails(*words)


@pytest.mark.parametrize(
    ("override", "places"),
    [
        ("epochs=3", "'training.epochs'"),
        ("epoch=3", "'training.epochs'"),
        ("eps=0.1", "'threat.eps' or 'training.eps'"),
        ("steps=3", "'objective.attack.steps' or 'validation.attack.steps'"),
        ("weight_decay=0.1", "'training.optimizer.weight_decay'"),
        ("width=3", "'model.width'"),
        ("scale=3", "'head.scale'"),
        ("suite=fast", "'evaluation.suite'"),
        ("objetive=pgd-at", "'objective'"),
    ],
)
def test_a_key_without_its_section(override: str, places: str, fails: Fails) -> None:  # noqa: F811
    key = override.partition("=")[0]
    assert f"{key}: unknown key '{key}' (did you mean {places}?); choices: around, " in fails(
        "train", "digits-pgd-at-he", override
    )


def test_a_key_of_no_section_and_a_recipe_with_other_mistakes() -> None:
    for words in (("num_classes=10",), ("options=3",), ("epochs=3", "head=hee")):
        source, _ = recipes.read("digits-pgd-at", words)
        with pytest.raises(UserError, match=rf"unknown key '{words[0].partition('=')[0]}'; choices: around, "):
            recipes.parse(source)


def test_of_many_choices_only_the_like_ones_are_printed(fails: Fails) -> None:  # noqa: F811
    assert len(RECIPES) > errors.MOST_CHOICES
    assert fails("train", "digits-pgd") == (
        "unknown recipe 'digits-pgd' (did you mean 'digits-pgd-at'?); choices: digits-pgd-at, digits-pgd-at-he, "
        f"digits-standard, and {len(RECIPES) - 3} more: steelman list recipes\n"
    )
    assert fails("train", "xyz") == f"unknown recipe 'xyz'; choices: {len(RECIPES)} names: steelman list recipes\n"
    few = [f"n{place}" for place in range(errors.MOST_CHOICES)]
    assert str(unknown("name", "xyz", few, listed="say")).endswith(f"choices: {', '.join(sorted(few))}")


@pytest.mark.parametrize("name", [name.upper() for name in ("pgd", "cw", "multi-targeted")])
def test_capitals_are_a_likeness(name: str) -> None:
    assert f"(did you mean {name.lower()!r}?)" in str(unknown("attack", name, ATTACKS))


@pytest.mark.parametrize(
    "words", [("verify", "{}"), ("gate", "{}", "--min-robust", "0.5"), ("compare", "a={}", "b={}")]
)
def test_an_unfinished_run_has_no_evidence_yet(
    words: tuple[str, ...],
    fails: Fails,  # noqa: F811
    interrupted: Path,
) -> None:
    said = fails(*(word.format(interrupted) for word in words))
    assert said == f"no evidence in {interrupted}: the run is not finished; go on with: steelman resume {interrupted}\n"


@pytest.mark.parametrize(
    ("pixels", "bounds", "hint"),
    [
        ((-2.5, 2.5), (0.0, 1.0), NORMALISED),
        ((0.0, 1.5), (0.0, 1.0), NORMALISED),
        ((-2.5, 2.5), (-1.0, 1.0), NORMALISED),
        ((0.0, 255.0), (0.0, 1.0), r"255; divide by 255$"),
        ((0.0, 65535.0), (0.0, 1.0), r"65535$"),
    ],
)
def test_normalised_images_are_named(pixels: tuple[float, float], bounds: tuple[float, float], hint: str) -> None:
    images = np.linspace(*pixels, 32).reshape(2, 1, 4, 4)
    with pytest.raises(UserError, match=hint):
        ArraySource(images, np.array([0, 1]), bounds=bounds)


@pytest.mark.parametrize("factory", ["eleven_outputs", "Noisy"])
def test_a_refused_evaluation_names_no_folder(
    factory: str,
    command: Command,  # noqa: F811
    tmp_path: Path,
) -> None:
    words = ("evaluate", f"tests.test_new_users:{factory}", "--data", "digits", "--eps", "0.1", "--samples", "20")
    code, out, err = command(*words, *(["--random-weights"] if factory != "Noisy" else []))
    assert (code, out) == (2, ""), err
    assert ("more-outputs" if factory != "Noisy" else "the model is random") in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("check", "given", "words"),
    [
        (check_head, "he", r"head_factory: expected a function that makes a head .*HEADS\['he'\], got 'he'"),
        (check_head, HEADS["he"](6, 4), "head_factory: expected a function that makes a head"),
        (check_attack, "pgd", r"attack: expected an attack, such as PGD\(steps=10\), got 'pgd'"),
        (check_objective, "trades", r"objective: expected an objective, such as PGDAT\(\), got 'trades'"),
    ],
)
def test_a_check_says_what_it_takes(check: Callable[[Any], None], given: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(given)


def test_attacks_and_datasets_complete(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    nearest = {name for name, make in ATTACKS.items() if make().minimum_norm}
    assert [tuple(sorted(names)) for names in (ATTACKS, DATASETS, nearest)] == [
        listing.ATTACKS,
        listing.DATASETS,
        listing.NEAREST,
    ]
    for words, names in (
        ("evaluate runs/mine --attack ap", {"apgd", "apgd-dlr", "apgd-t"}),
        ("transfer runs/mine --attack fg", {"fgsm"}),
        ("distance runs/mine --attack ", nearest),
        ("verify runs/mine --suite he-b", {"he-blackbox"}),
        *((f"{name} runs/mine --data ", DATASETS.keys()) for name in ("evaluate", "transfer", "distance", "verify")),
    ):
        assert set(completions(monkeypatch, capfd, f"steelman {words}")) == names
