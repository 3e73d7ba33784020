"""From fetched MNIST to a robust model, in one short run: the whole path on real images."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from steelman import recipe as recipes
from steelman.data import get
from steelman.errors import UserError
from steelman.training import run
from steelman.training.folder import Run
from tests.training_helpers import metrics

pytestmark = pytest.mark.real_data


COMMON = [
    "threat.eps=0.2",
    "training.ema=null",
    "training.batch_size=50",
    # Leaves 5000 images to train on.
    "validation={size: 55000, samples: 200, attack: {name: pgd, steps: 10, step_size: 0.05}}",
]
ATTACKS = "PGD-20: {name: pgd, steps: 20}, margin: {name: pgd, steps: 20, loss: margin}"


def trained(folder: Path, *changes: str) -> Run:
    source, origin = recipes.read("mnist-fastat-style", [*COMMON, *changes])
    found = run.train(source, folder, console=Console(quiet=True), origin=origin)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Run:
    try:
        get("mnist")
    except UserError as error:
        pytest.skip(f"mnist cannot be had here: {error}")
    evaluation = f"evaluation={{samples: 200, suite: null, attacks: {{{ATTACKS}}}}}"
    return trained(tmp_path_factory.mktemp("mnist") / "short", "training.epochs=4", evaluation)


def test_a_short_run_on_mnist_is_far_more_robust_than_chance(short: Run) -> None:
    found = short.evaluation
    assert found.total == 200
    assert found.score("clean").accuracy > 0.9
    # Without the adversary (objective=standard) the same run keeps 1% at this radius.
    assert 0.4 < found.score("worst case").accuracy < found.score("clean").accuracy
    assert found.curve[-1].correct < found.curve[0].correct / 4
    assert short.path is not None
    assert (short.path / "report.html").is_file()


def test_one_step_without_a_random_start_overfits_is_found_out_and_rolled_back(short: Run, tmp_path: Path) -> None:
    """A robust model that goes on against one step from the image itself learns that step's images alone. It begins
    robust, for from scratch it is chance how robust it becomes before it falls."""
    assert short.path is not None
    trained(
        tmp_path / "run",
        f"model={{name: fastat-mnist, weights: {short.path / 'model.safetensors'}}}",
        "objective={name: pgd-at, attack: {name: pgd, steps: 1, step_size: 0.2, start: zero}}",
        "training.epochs=20",
        "evaluation={samples: 50, suite: null, attacks: {PGD: {name: pgd, steps: 5}}}",
    )
    history = metrics(tmp_path / "run")
    best = max(history, key=lambda epoch: epoch["validation_robust"])
    assert len(history) < 20, "stopped before its 20 epochs"
    assert best["validation_robust"] - history[-1]["validation_robust"] > 0.15
    assert history[-1]["train_accuracy"] > 0.5, "while it withstands its own attack"
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "stopped early"
    assert "catastrophic overfitting" in record["message"]
    assert record["kept_epoch"] == best["epoch"] < history[-1]["epoch"]
