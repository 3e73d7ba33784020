"""What goes wrong in training is noticed, said in words, and does not cost the good weights."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from steelman import recipe as recipes
from steelman.errors import UserError
from steelman.objectives import OBJECTIVES, Batch, Outcome
from steelman.threat import ThreatModel
from steelman.training import Guard, Trainer, Validation, run
from steelman.training.checkpoint import checkpoint_path, load_checkpoint
from steelman.training.guard import blind, collapse, poisoned, stop_on_signals
from tests.training_helpers import Made, a_net, a_trainer, metrics, plain_trainer, same, some_data


def epochs(*scores: tuple[float, float]) -> list[dict[str, Any]]:
    """A history from (training accuracy, validation robustness)."""
    return [
        {"epoch": place, "train_accuracy": train, "validation_robust": robust}
        for place, (train, robust) in enumerate(scores, 1)
    ]


COLLAPSED = epochs((0.4, 0.30), (0.5, 0.42), (0.95, 0.02))


def test_catastrophic_overfitting_is_said_in_numbers() -> None:
    message = collapse(COLLAPSED, Guard())
    assert message is not None
    assert "catastrophic overfitting in epoch 3" in message
    assert "fell from 42.0% (epoch 2) to 2.0%" in message
    assert "from 50.0% to 95.0%" in message


@pytest.mark.parametrize(
    ("history", "guard"),
    [
        ([], Guard()),
        (epochs((0.9, 0.0)), Guard()),
        (epochs((0.4, 0.3), (0.5, 0.4)), Guard()),
        (epochs((0.4, 0.3), (0.5, 0.42), (0.5, 0.24)), Guard()),  # a fall by less than 0.2
        (epochs((0.4, 0.3), (0.5, 0.42), (0.3, 0.02)), Guard()),  # the training accuracy falls with it
        (COLLAPSED, Guard(on_collapse="ignore")),
        (COLLAPSED, Guard(drop=0.5)),
    ],
)
def test_what_is_no_collapse(history: list[dict[str, Any]], guard: Guard) -> None:
    assert collapse(history, guard) is None


def test_a_slow_fall_over_several_epochs_counts_from_the_best() -> None:
    assert collapse(epochs((0.5, 0.5), (0.6, 0.4), (0.7, 0.29)), Guard()) is not None


def test_a_training_attack_that_shows_nothing_is_reported() -> None:
    assert blind([]) is None
    assert blind(epochs((0.6, 0.3))) is None
    message = blind(epochs((0.5, 0.5), (0.9, 0.1)))
    assert message is not None
    assert "90.0%" in message
    assert "10.0%" in message


def robustness(values: list[float]) -> Any:
    """A validation attack that lets the given share of the images stand, one value an epoch."""
    left = iter(values)

    def attack(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **_: Any) -> Tensor:
        share = next(left)
        with torch.no_grad():
            other = torch.stack([x[y != k][0] for k in y.tolist()])  # an image of another class: certain to fool
        standing = torch.arange(len(x)) < share * len(x)
        return torch.where(standing[:, None, None, None], x, other)

    return attack


def as_if_attacked(batch: Batch) -> Outcome:
    """Clean training that does not say that it has no adversary."""
    return OBJECTIVES["standard"]()(batch)


def test_the_scripted_attack_does_what_it_says(tmp_path: Path) -> None:
    """The two tests below rest on it."""
    trainer = plain_trainer(
        tmp_path,
        training={"epochs": 6},
        watch=Validation(size=24, samples=24, attack=robustness([1.0, 0.75, 0.5, 0.25, 0.5, 0.0])),
    )
    trainer.fit()
    assert metrics(tmp_path)[3]["validation_clean"] == 1
    assert [epoch["validation_robust"] for epoch in metrics(tmp_path)][3:] == [0.25, 0.5, 0.0]


@pytest.mark.parametrize(
    ("on_collapse", "select", "kept", "trained"),
    [
        ("rollback", "best", 3, 4),
        ("rollback", "last", 3, 4),
        ("stop", "best", 3, 4),
        ("stop", "last", 4, 4),
        ("ignore", "best", 3, 6),
        ("ignore", "last", 6, 6),
    ],
)
def test_a_provoked_collapse(tmp_path: Path, on_collapse: Any, select: str, kept: int, trained: int) -> None:
    trainer = plain_trainer(
        tmp_path,
        net=a_net(dropout=0.0),
        objective=as_if_attacked,
        train=some_data(48),
        training={"epochs": 6, "select": select},
        watch=Validation(size=24, samples=24, attack=robustness([0.5, 0.6, 0.75, 0.25, 0.3, 0.25])),
        guard=Guard(on_collapse=on_collapse),
    )
    found = trainer.fit()
    assert (found.epoch, len(found.history)) == (kept, trained)
    same(found.state, load_checkpoint(checkpoint_path(tmp_path, 6 * kept))["model"])
    if on_collapse == "ignore":
        assert found.stopped is None
    else:
        assert found.stopped is not None
        assert "catastrophic overfitting in epoch 4" in found.stopped
        again = plain_trainer(
            tmp_path,
            net=a_net(dropout=0.0),
            objective=as_if_attacked,
            train=some_data(48),
            training={"epochs": 6, "select": select},
            guard=Guard(on_collapse=on_collapse),
        ).fit(resume=True)
        assert (again.epoch, again.stopped) == (found.epoch, found.stopped), "a resume does not train on past it"


def failing(trainer: Trainer, step: int, how: str) -> None:
    """Make the objective's loss, or only its gradient, NaN or infinite at one step."""
    inner = trainer.criterion.objective

    def objective(batch: Batch) -> Outcome:
        outcome = inner(batch)
        if trainer.progress.step != step:
            return outcome
        if how == "gradient":
            # sqrt(|w|) at 0 has the value 0 and no finite derivative.
            (weight,) = (p for name, p in trainer.net.named_parameters() if name == "head.weight")
            return Outcome(outcome.loss + ((weight - weight.detach()).abs().sum()).sqrt(), outcome.logits)
        return Outcome(outcome.loss * float(how), outcome.logits)

    trainer.criterion.objective = Made(objective)


@pytest.mark.parametrize("how", ["nan", "inf"])
@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_best_finished_epoch(
    tmp_path: Path, how: str, ema: float | None
) -> None:
    trainer = a_trainer(tmp_path, training={"ema": ema})
    failing(trainer, 15, how)
    found = trainer.fit()
    assert found.stopped is not None
    assert re.match(rf"the loss became {how} in epoch 3, batch 4 of 6, at learning rate 0\.0\d+; try", found.stopped)
    best = max(found.history, key=lambda epoch: float(epoch["validation_robust"]))
    assert found.epoch == best["epoch"]
    assert len(found.history) == 2
    assert all(torch.isfinite(value).all() for value in found.state.values())
    saved = load_checkpoint(checkpoint_path(tmp_path, best["step"]))
    same(found.state, saved["model"] if ema is None else saved["average"]["values"])


def test_a_loss_that_is_not_finite_does_not_reach_the_weights(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    before: dict[str, Tensor] = {}
    failing(trainer, 8, "nan")
    inner = trainer.criterion.objective

    def objective(batch: Batch) -> Outcome:
        if trainer.progress.step == 8:
            before.update({name: value.detach().clone() for name, value in trainer.net.named_parameters()})
        return inner(batch)

    trainer.criterion.objective = Made(objective)
    trainer.fit()
    same(before, {name: value.detach() for name, value in trainer.net.named_parameters()})


def test_a_loss_that_is_not_finite_in_the_first_epoch_has_nothing_to_keep(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    failing(trainer, 2, "nan")
    with pytest.raises(UserError, match=r"the loss became nan in epoch 1, batch 3 of 6.*no epoch was finished"):
        trainer.fit()


@pytest.mark.parametrize("step", [5, 7, 11])
@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_gradient_that_is_not_finite_never_gets_into_what_is_kept(
    tmp_path: Path, step: int, ema: float | None
) -> None:
    """At an epoch's last step the loss is finite and the weights are not; argmax of NaN is class 0, which is right
    for a third of the images here: such an epoch must not count as finished, let alone as the best."""
    trainer = a_trainer(tmp_path, training={"ema": ema})
    failing(trainer, step, "gradient")
    if step == 5:
        with pytest.raises(UserError, match=r"at the end of epoch 1 \(head.weight\).*no epoch was finished"):
            trainer.fit()
        return
    found = trainer.fit()
    assert found.stopped is not None
    assert found.epoch == 1
    assert len(found.history) == 1
    assert all(torch.isfinite(value).all() for value in found.state.values())
    same(list(found.history), metrics(tmp_path))


def test_poisoned_names_the_weight() -> None:
    net = a_net()
    assert poisoned(net, 1) is None
    with torch.no_grad():
        net.head.weight[0, 0] = float("inf")
    assert "head.weight" in (poisoned(net, 2) or "")


def test_a_diverged_run_ends_with_a_report_of_the_good_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the recipe on: an exploding learning rate after a sane first epoch."""
    source, _ = recipes.read(
        "digits-standard",
        [
            "training.optimizer=sgd",
            "training.lr={name: piecewise, points: [[0, 0.2], [0.5, 0.2], [0.51, 1e30], [1, 1e30]]}",
            "training.epochs=2",
            "evaluation.samples=50",
            "evaluation.suite=null",
            "evaluation.attacks={fgsm: fgsm}",
            "compute.accelerator=cpu",
        ],
    )
    console = Console(width=300, record=True, quiet=False, file=(tmp_path / "log").open("w"))
    found = run.train(source, tmp_path / "run", console=console)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "stopped early"
    assert record["kept_epoch"] == 1
    assert "the loss became" in record["message"] or "NaN or infinite" in record["message"]
    assert "keeping epoch 1" in console.export_text()
    assert found is not None
    assert found.evaluation.score("clean").accuracy > 0.5


def test_signals_are_ours_only_inside() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as request:
        assert request.number == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_training_in_another_thread_works_without_signals(tmp_path: Path) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(a_trainer(tmp_path, training={"epochs": 1}).fit()))
    thread.start()
    thread.join()
    assert found[0].epoch == 1


def test_the_standard_objective_has_no_training_attack_to_warn_about() -> None:
    assert not hasattr(OBJECTIVES["standard"](), "attack")
