"""What is put around an objective, in whole runs: replays, weight perturbation, clipping, smoothing, patience."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from steelman import recipe as recipes
from steelman.errors import TrainingInterruptedError, UserError
from steelman.heads import HEADS
from steelman.objectives import OBJECTIVES, Batch, Objective, Outcome
from steelman.objectives.free_at import FreeAT
from steelman.training import AWP, Around, Trainer, run
from steelman.training.guard import stagnation
from tests.training_helpers import OWN, a_net, a_trainer, interrupted_at, plain_trainer, said, same_run

QUIET = [
    "model=tests.training_helpers:digits_net",
    "validation={size: 200, samples: 20, attack: {name: pgd, steps: 2}}",
    "evaluation={samples: 20, suite: null, attacks: {FGSM: fgsm}}",
    "training.batch_size=256",
    "training.epochs=1",
]


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": OBJECTIVES["trades"](), "around": Around(awp=AWP(gamma=0.01, start=0.3))},
        {"objective": OBJECTIVES["mart"](), "around": Around(label_smoothing=0.1, clip=0.5)},
    ],
)
def test_an_interrupted_run_ends_with_the_same_bits(changes: dict[str, Any], tmp_path: Path) -> None:
    a_trainer(tmp_path / "whole", **changes).fit()
    trainer = a_trainer(tmp_path / "parts", **changes)
    with interrupted_at({5, 9}, trainer), pytest.raises(TrainingInterruptedError):
        trainer.fit()
    a_trainer(tmp_path / "parts", **changes).fit(resume=True)
    same_run(tmp_path / "whole", tmp_path / "parts")


def test_replays_show_each_batch_that_often_in_a_row(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Watching(Objective):
        repeats, inner = 3, FreeAT(replays=3)

        def __call__(self, batch: Batch) -> Outcome:
            seen.append(batch.index.tolist())
            return self.inner(batch)

    trainer = plain_trainer(tmp_path, objective=Watching(), training={"epochs": 2})
    trainer.fit()
    assert trainer.progress.step == len(seen) == 2 * 6 * 3
    for start in range(0, len(seen), 3):
        assert seen[start] == seen[start + 1] == seen[start + 2]
    assert sorted(index for batch in seen[:18:3] for index in batch) == list(range(42))


def test_weight_perturbation_gives_the_weights_back(tmp_path: Path) -> None:
    """With a learning rate of zero the weights end where they began, but for rounding; batch norm moves once a step."""
    net = a_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    trainer = plain_trainer(
        tmp_path,
        net=net,
        objective=OBJECTIVES["pgd-at"](),
        around=Around(awp=AWP(gamma=0.05)),
        training={"lr": 0.0, "epochs": 1},
    )
    trainer.fit()
    for name, value in net.named_parameters():
        torch.testing.assert_close(value.detach(), before[name], rtol=0, atol=1e-6)
    assert int(net.state_dict()["backbone.layers.1.num_batches_tracked"]) == 6


def test_weight_perturbation_changes_what_is_learned(tmp_path: Path) -> None:
    kept = [
        plain_trainer(tmp_path / str(gamma), objective=OBJECTIVES["pgd-at"](), around=Around(awp=awp)).fit().state
        for gamma, awp in ((0, AWP(gamma=0)), (1, AWP(gamma=0.1)), (2, None))
    ]
    assert torch.equal(kept[0]["head.weight"], kept[2]["head.weight"]), "a step of zero is no perturbation, to the bit"
    assert not torch.equal(kept[0]["head.weight"], kept[1]["head.weight"])


def test_clipping_bounds_the_step(tmp_path: Path) -> None:
    net = a_net()
    before = torch.cat([value.detach().flatten().clone() for value in net.parameters()])
    trainer = plain_trainer(
        tmp_path,
        net=net,
        around=Around(clip=0.01),
        training={"epochs": 1, "batch_size": 42, "lr": 1.0, "optimizer": {"name": "sgd", "momentum": 0}},
    )
    trainer.fit()
    after = torch.cat([value.detach().flatten() for value in net.parameters()])
    assert float((after - before).norm()) == pytest.approx(0.01, rel=1e-3)


def test_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.2, 0.5, 0.4, 0.5, 0.9])
    monkeypatch.setattr(Trainer, "validate", lambda _: (1.0, next(scores)))
    trainer = plain_trainer(tmp_path, around=Around(patience=2), training={"epochs": 5})
    trained = trainer.fit()
    assert (len(trained.history), trained.epoch) == (4, 2)
    assert trained.stopped == "no better validation robustness for 2 epochs (best 50.0%)"
    again = plain_trainer(tmp_path, around=Around(patience=2), training={"epochs": 5})
    assert again.fit(resume=True).epoch == 2, "a resumed run knows that it had stopped"
    assert "starting" not in said(again.console)


def test_no_patience_no_stop() -> None:
    history = [{"validation_robust": value} for value in (0.5, 0.4, 0.3)]
    assert stagnation(history, None) is None
    assert stagnation(history, 3) is None
    assert stagnation(history, 2) is not None
    assert stagnation([*history, {"validation_robust": 0.6}], 2) is None


def test_weight_perturbation_of_free_at_is_refused() -> None:
    source, _ = recipes.read("digits-pgd-at", ["objective=free-at", "around.awp.gamma=0.01"])
    with pytest.raises(UserError, match=r"around\.awp: FreeAT makes its perturbation while it trains"):
        recipes.parse(source)


def no_linear_layer() -> nn.Module:
    """For a recipe, by import path: logits that come from a convolution."""
    return nn.Sequential(nn.Conv2d(1, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize("name", ["rat", "tla"])
def test_features_that_cannot_be_read_are_said_before_a_folder_is_made(name: str, tmp_path: Path) -> None:
    source, _ = recipes.read("digits-pgd-at", [f"objective={name}", "model=tests.test_around:no_linear_layer"])
    with pytest.raises(UserError, match=f"{name.upper()}: expected a model whose logits come from a linear layer"):
        run.train(source, tmp_path / "run", console=Console(quiet=True), allow_import=["tests.test_around"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective=llr", "compute.compile=true"], "compute.compile: LLR differentiates an input gradient"),
        (["objective=tla", "compute.compile=true"], "compute.compile: TLA reads features as the model runs"),
        (["around.auxiliary_norm=clean"], "around.auxiliary_norm: PGDAT trains on adversarial images alone"),
        (["objective=free-at", "objective.replays=0"], "objective.replays: input should be greater than 0, got 0"),
        (["head={name: he, scale: 0}"], "head scale: expected a number above 0, got 0"),
        (["training.eps={name: cosine, start: 0.1, end: 0.2, cap: 0.05}"], "training.eps.cap: expected at least"),
    ],
)
def test_combinations_that_cannot_be_are_refused_with_the_reason(overrides: list[str], message: str) -> None:
    source, _ = recipes.read("digits-pgd-at", overrides)
    with pytest.raises(UserError, match=re.escape(message)):
        recipes.parse(source)


@pytest.fixture(scope="session")
def standard_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of standard training, for the objective that learns from one."""
    folder = tmp_path_factory.mktemp("helper") / "run"
    source, origin = recipes.read("digits-standard", QUIET)
    run.train(source, folder, console=Console(quiet=True), origin=origin, allow_import=OWN)
    return folder


# Every method with every head takes its steps in test_contract.py. Whole runs are for each method once; the heads and
# the schedules of the radius are spread over them.
SPREAD = [
    (name, sorted(HEADS)[i % len(HEADS)], ("0.1", "{name: cosine, start: 0, end: 0.1}")[i // len(HEADS) % 2])
    for i, name in enumerate(sorted(OBJECTIVES))
]


@pytest.mark.parametrize(("name", "head", "eps"), SPREAD)
def test_every_objective_trains_resumes_and_is_measured(
    name: str, head: str, eps: str, tmp_path: Path, standard_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [f"objective={name}", f"head={head}", f"training.eps={eps}", *QUIET]
    if name == "hat":
        overrides.append(f"objective.helper={standard_run}")
    source, origin = recipes.read("digits-pgd-at", overrides)
    run.train(source, tmp_path / "whole", console=Console(quiet=True), origin=origin, allow_import=OWN)
    plain = Trainer.step

    def step(trainer: Trainer, *batch: Tensor) -> float:
        if trainer.progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(trainer, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        with pytest.raises(TrainingInterruptedError):
            run.train(source, tmp_path / "run", console=Console(quiet=True), origin=origin, allow_import=OWN)
    found = run.resume(tmp_path / "run", Console(quiet=True), allow_import=OWN)
    assert found is not None
    assert found.evaluation.total == 20
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    kept = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("run", "whole")]
    assert kept[0] == kept[1], "a resumed run ends with other weights"
