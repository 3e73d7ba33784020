"""Small promises that a new user meets: options that are yes or no, folders of any size, plain training left alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

from steelman import recipe as recipes
from steelman.cli.measure import measure
from steelman.errors import UserError
from steelman.evaluation.evaluate import DEFAULT_ATTACKS, evaluate
from steelman.objectives import OBJECTIVES
from steelman.settings import options_from_texts
from steelman.threat import ThreatModel
from steelman.training import Guard, Trainer, run
from tests.training_helpers import plain_trainer

SHORT = ["training.epochs=1", "validation.samples=10", "evaluation.samples=10", "training.batch_size=256"]


def test_a_head_takes_yes_and_no() -> None:
    source, _ = recipes.read("digits-pgd-at", ["head.name=linear", "head.bias=false", "head.zero_init=true"])
    recipe = recipes.parse(source)
    assert recipe.head.options == {"bias": False, "zero_init": True}
    weights = run.build_model(recipe, (1, 8, 8), 10).state_dict()
    assert "head.bias" not in weights
    assert not weights["head.weight"].any()


def test_options_on_the_command_line_take_yes_and_no() -> None:
    assert options_from_texts(["flag=true", "width=16", "eps=8/255"]) == {
        "flag": True,
        "width": 16,
        "eps": 8 / 255,
    }


def test_training_without_an_adversary_cannot_overfit_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {name for name, make in OBJECTIVES.items() if not make().adversarial} == {"standard", "cure"}
    for name, epochs in (("standard", 3), ("fast-at", 2)):
        scores = iter([0.9, 0.1, 0.1])
        monkeypatch.setattr(Trainer, "validate", lambda _, scores=scores: (1.0, next(scores)))
        guard = Guard(drop=0.2)
        trained = plain_trainer(tmp_path / name, objective=OBJECTIVES[name](), guard=guard).fit()
        # The synthetic fall counts as a collapse only while training accuracy does not fall with it.
        if trained.history[1]["train_accuracy"] >= trained.history[0]["train_accuracy"] - 0.05:
            assert len(trained.history) == epochs, name
            assert (trained.stopped is None) == (name == "standard")


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Two classes of small colour pictures: reddish and bluish."""
    noise = np.random.default_rng(0)
    for part, count in (("train", 12), ("val", 5)):
        for label, channel in (("red", 0), ("blue", 2)):
            folder = tmp_path / "photos" / part / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = noise.integers(0, 90, (20, 24, 3), dtype=np.uint8)
                pixels[..., channel] += 120
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "photos"


def test_a_run_on_a_folder_is_measured_at_the_size_it_was_trained_at(photographs: Path, tmp_path: Path) -> None:
    given = [f"data={{name: folder, root: '{photographs}', size: 12, resize: 14}}", "model=mlp", "validation.size=6"]
    source, origin = recipes.read("digits-pgd-at", [*given, *SHORT])
    found = run.train(source, tmp_path / "run", console=Console(quiet=True), origin=origin)
    assert found is not None
    assert found.evaluation.gallery[0].clean.shape == (3, 12, 12)
    assert "data:image/png" in (tmp_path / "run" / "report.html").read_text()
    other = tmp_path / "moved"
    photographs.rename(other)
    for place, data in enumerate((None, "folder", "folder:size=12,resize=14")):
        again = measure(
            str(tmp_path / "run"),
            data=data,
            root=other,
            norm=None,
            eps=None,
            attacks=["fgsm"],
            weights=None,
            layout=None,
            head="linear",
            options=[],
            samples=None,
            batch_size=8,
            seed=0,
            workers=place,
            out=tmp_path / f"again-{place}",
            console=Console(quiet=True),
        )
        assert again.score("clean").correct == found.evaluation.score("clean").correct


def test_a_validation_split_that_is_too_large_names_its_key(photographs: Path, tmp_path: Path) -> None:
    source, origin = recipes.read(
        "digits-pgd-at", [f"data={{name: folder, root: '{photographs}'}}", "model=mlp", *SHORT]
    )
    with pytest.raises(UserError, match=r"validation\.size: expected a validation set of 1 \.\. 22 .* got 200"):
        run.train(source, tmp_path / "run", console=Console(quiet=True), origin=origin)
    assert not (tmp_path / "run").exists()


def test_images_of_four_channels_are_measured_without_pictures() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    found = evaluate(net, torch.rand(6, 4, 2, 2), torch.arange(6) % 2, ThreatModel(eps=0.1), DEFAULT_ATTACKS)
    assert found.total == 6
    assert found.gallery == ()


def test_a_run_that_is_not_there_is_said_first() -> None:
    from typer.testing import CliRunner

    from steelman.cli import app

    result = CliRunner().invoke(app, ["evaluate", "runs/nope"])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith("no run at runs/nope")
