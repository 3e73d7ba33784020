"""From fetched MNIST to a robust model, in one short run: the whole path on real images."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from steelman import config, run
from steelman.data import get
from steelman.errors import UserError

pytestmark = pytest.mark.real_data


def test_a_short_run_on_mnist_is_far_more_robust_than_chance(tmp_path: Path) -> None:
    try:
        get("mnist")
    except UserError as error:
        pytest.skip(f"mnist cannot be had here: {error}")
    source, origin = config.read(
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
