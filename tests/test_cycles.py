"""Cycles: schedules begun anew, radii held for an epoch, and the ensemble of the ends of cycles."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save
from torch import Tensor, nn

from steelman import recipe as recipes
from steelman.attacks import PGD
from steelman.errors import TrainingInterruptedError, UserError
from steelman.models.classifier import Ensemble
from steelman.objectives import OBJECTIVES, Batch, Outcome
from steelman.schedules import SCHEDULES
from steelman.threat import ThreatModel
from steelman.training import Guard, Trainer, Training, run
from steelman.training.checkpoint import checkpoint_path, load_checkpoint
from steelman.training.folder import load_model
from steelman.training.guard import collapse
from tests.training_helpers import a_trainer, interrupted_at, plain_trainer, said, same_run

CYCLES: dict[str, Any] = {
    "epochs": 4,
    "select": "cycles",
    "lr": SCHEDULES["resets"](schedule={"name": "cosine", "start": 0.2, "end": 0.0}, at=[0.25, 0.5]),
}


def weights_at(folder: Path, step: int) -> dict[str, Tensor]:
    state: dict[str, Tensor] = load_checkpoint(checkpoint_path(folder, step))["model"]
    return state


def test_the_ends_of_cycles_are_kept_as_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "validate", lambda _: (1.0, 0.5))  # the first epoch stays the best one
    trained = plain_trainer(tmp_path, training=CYCLES).fit()
    assert (trained.members, trained.epoch) == (3, 4)
    for member, epoch in enumerate((1, 2, 4)):
        weights = weights_at(tmp_path, 6 * epoch)
        assert all(torch.equal(trained.state[f"members.{member}.{name}"], value) for name, value in weights.items())
    assert len(trained.state) == 3 * len(weights_at(tmp_path, 24))
    assert not checkpoint_path(tmp_path, 18 - 1).exists()


def test_an_interrupted_run_has_the_same_members(tmp_path: Path) -> None:
    eps = SCHEDULES["resets"](schedule={"name": "linear", "start": 0.0, "end": 0.1}, at=[0.25, 0.5])
    training = {**CYCLES, "eps_per": "epoch", "eps": eps}
    whole = a_trainer(tmp_path / "whole", training=training).fit()
    trainer = a_trainer(tmp_path / "parts", training=training)
    with interrupted_at({13}, trainer), pytest.raises(TrainingInterruptedError):
        trainer.fit()
    parts = a_trainer(tmp_path / "parts", training=training).fit(resume=True)
    same_run(tmp_path / "whole", tmp_path / "parts")
    assert whole.state.keys() == parts.state.keys()
    assert all(torch.equal(value, parts.state[name]) for name, value in whole.state.items())


def test_a_run_that_ends_in_its_first_cycle_keeps_its_best_epoch(tmp_path: Path, monkeypatch: Any) -> None:
    scores = iter([0.6, 0.5])
    monkeypatch.setattr(Trainer, "validate", lambda _: (1.0, next(scores)))
    monkeypatch.setattr(Trainer, "_reason_to_stop", lambda self: "enough" if self.progress.epoch == 2 else None)
    training = {**CYCLES, "epochs": 6, "lr": SCHEDULES["resets"](schedule=0.1, at=[0.5])}
    trained = plain_trainer(tmp_path, training=training).fit()
    assert (trained.members, trained.epoch, trained.stopped) == (None, 1, "enough")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": 0.1}, "neither lr nor eps has one"),
        ({"epochs": 3}, r"cycles must end with an epoch; of 3 they end at 0\.75, 1\.5, 3"),
    ],
)
def test_cycles_that_cannot_be_kept_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Training(**{**CYCLES, **changes})


def test_an_end_that_the_run_was_stopped_for_is_no_member(tmp_path: Path, monkeypatch: Any) -> None:
    scores = iter([0.6, 0.7, 0.1])
    monkeypatch.setattr(Trainer, "validate", lambda _: (1.0, next(scores)))
    monkeypatch.setattr(Trainer, "_reason_to_stop", lambda self: "fallen" if self.progress.epoch == 3 else None)
    training = {**CYCLES, "epochs": 6, "lr": SCHEDULES["resets"](schedule=0.1, at=[1 / 6, 0.5])}
    trained = plain_trainer(tmp_path, training=training, guard=Guard()).fit()
    assert (trained.members, trained.epoch) == (1, 1), "the end of the second cycle is the one that fell"


def test_a_damaged_end_costs_one_member(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(Trainer, "validate", lambda _: (1.0, 0.5))
    plain_trainer(tmp_path, training=CYCLES).fit()
    (checkpoint_path(tmp_path, 12) / "tensors.safetensors").write_bytes(b"not what it was")
    again = plain_trainer(tmp_path, training=CYCLES)
    assert again.fit(resume=True).members == 2
    assert "the ensemble goes without it" in said(again.console)


def test_a_reset_of_the_radius_is_no_collapse() -> None:
    rows = [(0.40, 0.40, 0.03), (0.45, 0.45, 0.03), (0.02, 0.90, 0.0)]
    history = [
        {"epoch": i + 1, "validation_robust": robust, "train_accuracy": train, "eps": eps}
        for i, (robust, train, eps) in enumerate(rows)
    ]
    assert collapse(history, Guard()) is None
    assert collapse([*history[:2], {**history[2], "eps": 0.03}], Guard()) is not None


def test_attacks_that_need_one_head_are_refused_before_an_ensemble_is_trained() -> None:
    overrides = ["training.lr={name: resets, at: [0.5], schedule: 0.1}", "training.select=cycles", "training.epochs=4"]
    overrides += ["evaluation.attacks={a: adaptive, b: pgd}"]
    recipes.parse(recipes.read("digits-pgd-at", overrides)[0])  # a linear head has neither scale nor margin
    with pytest.raises(UserError, match=r"evaluation\.attacks: a: head_margin and head_scale are for a model with one"):
        recipes.parse(recipes.read("digits-pgd-at", [*overrides, "head=he"])[0])


def test_cycles_that_differ_are_refused_and_a_warm_up_hides_none() -> None:
    eps = SCHEDULES["resets"](schedule={"name": "linear", "start": 0, "end": 0.1}, at=[0.25])
    with pytest.raises(ValueError, match="cycles of lr and of eps differ"):
        Training(**{**CYCLES, "eps": eps})
    lr = SCHEDULES["warmup"](schedule=CYCLES["lr"], until=0.1)
    assert Training(**{**CYCLES, "lr": lr}).cycle_ends() == [1, 2, 4]


def test_cycles_may_be_those_of_the_radius() -> None:
    eps = SCHEDULES["resets"](schedule={"name": "linear", "start": 0, "end": 0.1}, at=[0.5])
    assert Training(epochs=4, select="cycles", eps=eps).cycle_ends() == [2, 4]


def test_a_radius_per_epoch_is_held_for_it(tmp_path: Path) -> None:
    seen: list[tuple[float, float]] = []

    class Watching:
        inner = OBJECTIVES["standard"]()

        def __call__(self, batch: Batch) -> Outcome:
            seen.append((batch.threat.eps, batch.ratio))
            return self.inner(batch)

    eps = SCHEDULES["cosine"](start=0.0, end=0.15, cap=0.1)
    plain_trainer(tmp_path, objective=Watching(), training={"epochs": 3, "eps": eps, "eps_per": "epoch"}).fit()
    expected = [eps(epoch / 3) for epoch in range(3) for _ in range(6)]
    assert [value for value, _ in seen] == pytest.approx(expected)
    assert [ratio for _, ratio in seen] == pytest.approx([value / 0.1 for value in expected])
    assert expected[-1] == pytest.approx(0.1), "the cap is reached"


def test_an_ensemble_is_the_log_of_the_mean_probability() -> None:
    torch.manual_seed(0)
    members = [nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double() for _ in range(3)]
    x = torch.rand(4, 1, 4, 4, dtype=torch.float64)
    logits = Ensemble(members)(x)
    for row in range(4):
        for k in range(3):
            mean = sum(float(member(x)[row].softmax(0)[k].detach()) for member in members) / 3
            assert float(logits[row, k].exp().detach()) == pytest.approx(mean, rel=1e-12)


def test_a_trained_ensemble_is_measured_and_attacked_as_one_model(tmp_path: Path) -> None:
    overrides = [
        "training.lr={name: resets, at: [0.5], schedule: {name: cosine, start: 4e-3, end: 0}}",
        "training.eps={name: resets, at: [0.5], schedule: {name: cosine, start: 0, end: 0.2, cap: 0.15}}",
        "training.eps_per=epoch",
        "training.select=cycles",
        "training.epochs=4",
        "validation.samples=20",
        "evaluation.samples=60",
    ]
    source, origin = recipes.read("digits-pgd-at", overrides)
    found = run.train(source, tmp_path / "run", console=Console(quiet=True), origin=origin)
    assert found is not None
    model, record = load_model(tmp_path / "run")
    assert record["members"] == 2
    assert isinstance(model, Ensemble)
    x = torch.rand(5, 1, 8, 8)
    mean = torch.stack([member(x).softmax(dim=1) for member in model.members]).mean(dim=0)
    torch.testing.assert_close(model(x).exp(), mean)
    first, second = (next(iter(member.parameters())) for member in model.members)
    assert not torch.equal(first, second)
    x_adv = PGD(steps=3, keep="last")(model, x, torch.arange(5), ThreatModel(eps=0.1))
    before, after = (torch.nn.functional.cross_entropy(model(images), torch.arange(5)) for images in (x, x_adv))
    assert after > before
    scores = {score.name: score.accuracy for score in found.evaluation.scores}
    assert scores["clean"] > 0.5
    assert scores["worst case"] < scores["clean"]


class TestHelper:
    def test_a_missing_one_is_asked_for(self) -> None:
        source, _ = recipes.read("digits-pgd-at", ["objective=hat"])
        with pytest.raises(UserError, match=r"objective\.helper: expected the folder of a finished run, .* HAT learns"):
            recipes.parse(source)

    def test_one_that_is_no_run_is_refused(self, tmp_path: Path) -> None:
        source, _ = recipes.read("digits-pgd-at", [f"objective={{name: hat, helper: {tmp_path}}}"])
        with pytest.raises(UserError, match=r"objective\.helper: no model in .*it is not a run"):
            run.train(source, tmp_path / "run", console=Console(quiet=True))
        assert not (tmp_path / "run").exists(), "said before a folder was made"

    def test_another_one_is_another_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        quick = ["training.epochs=1", "validation.samples=10", "evaluation.samples=10", "training.batch_size=256"]
        quick += ["evaluation.suite=null", "evaluation.attacks={fgsm: fgsm}"]
        source, origin = recipes.read("digits-standard", quick)
        run.train(source, tmp_path / "helper", console=Console(quiet=True), origin=origin)
        source, origin = recipes.read("digits-pgd-at", [*quick, "objective=hat", f"objective.helper={tmp_path}/helper"])
        seen: list[str] = []
        plain = Trainer.fit

        def fit(trainer: Trainer, resume: bool = False) -> Any:
            seen.append(trainer.fingerprint)
            return plain(trainer, resume)

        monkeypatch.setattr(Trainer, "fit", fit)
        run.train(source, tmp_path / "one", console=Console(quiet=True), origin=origin)
        record = json.loads((tmp_path / "helper" / "model.json").read_text())
        model, _ = load_model(tmp_path / "helper")
        weights = {name: 1.5 * value for name, value in model.state_dict().items()}
        (tmp_path / "helper" / "model.safetensors").write_bytes(save(weights))
        record["sha256"] = hashlib.sha256((tmp_path / "helper" / "model.safetensors").read_bytes()).hexdigest()
        (tmp_path / "helper" / "model.json").write_text(json.dumps(record))
        run.train(source, tmp_path / "two", console=Console(quiet=True), origin=origin)
        assert seen[0] != seen[1]
