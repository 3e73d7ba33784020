"""From fetched MNIST to a robust model, in one short run: the whole path on real images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from steelman import recipe as recipes
from steelman.data import get
from steelman.errors import UserError
from steelman.training import run
from tests.training_helpers import metrics

pytestmark = pytest.mark.real_data


@pytest.fixture(autouse=True)
def _mnist() -> None:
    try:
        get("mnist")
    except UserError as error:
        pytest.skip(f"mnist cannot be had here: {error}")


def test_a_short_run_on_mnist_is_far_more_robust_than_chance(tmp_path: Path) -> None:
    source, origin = recipes.read(
        "mnist-fastat-style",
        [
            "threat.eps=0.1",
            "objective.attack.step_size=0.125",
            "validation.size=54000",  # leaves 6000 images to train on
            "validation.samples=200",
            "training.epochs=3",
            "evaluation.samples=500",
            "evaluation.attacks={PGD-20: {name: pgd, steps: 20}, margin: {name: pgd, steps: 20, loss: margin}}",
        ],
    )
    found = run.train(source, tmp_path / "run", console=Console(quiet=True), origin=origin)
    assert found is not None
    assert found.total == 500
    assert found.score("clean").accuracy > 0.9
    # Without the adversary (objective=standard) the same run keeps 43% at this radius.
    assert 0.65 < found.score("worst case").accuracy < found.score("clean").accuracy
    assert found.curve[-1].correct < found.curve[0].correct / 4
    assert (tmp_path / "run" / "report.html").is_file()


def test_one_step_without_a_random_start_overfits_is_found_out_and_rolled_back(tmp_path: Path) -> None:
    """A robust model that goes on against one step from the image itself learns that step's images alone. It begins
    robust, for from scratch it is chance how robust it becomes before it falls."""
    common = [
        "training.ema=null",
        "training.batch_size=50",
        "validation={size: 50000, samples: 200, attack: {name: pgd, steps: 10, step_size: 0.05}}",
        "evaluation={samples: 50, attacks: {PGD: {name: pgd, steps: 5}}}",
    ]

    def train(folder: str, start: str, *changes: str) -> list[dict[str, Any]]:
        weights = [f"model={{name: fastat-mnist, weights: {tmp_path / start / 'model.safetensors'}}}"] if start else []
        source, origin = recipes.read("mnist-fastat-style", [*common, *weights, *changes])
        run.train(source, tmp_path / folder, console=Console(quiet=True), origin=origin)
        return metrics(tmp_path / folder)

    train("near", "", "threat.eps=0.2", "training.epochs=3")
    train("robust", "near", "training.epochs=3")
    one_step = "objective={name: pgd-at, attack: {name: pgd, steps: 1, step_size: 0.3, start: zero}}"
    history = train("run", "robust", one_step, "training.epochs=20")
    best = max(history, key=lambda epoch: epoch["validation_robust"])
    assert len(history) < 20, "stopped before its 20 epochs"
    assert best["validation_robust"] - history[-1]["validation_robust"] > 0.15
    assert history[-1]["train_accuracy"] > 0.5, "while it withstands its own attack"
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "stopped early"
    assert "catastrophic overfitting" in record["message"]
    assert record["kept_epoch"] == best["epoch"] < history[-1]["epoch"]
