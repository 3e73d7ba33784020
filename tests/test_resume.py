"""A run that is stopped, killed or crashed, and taken up again, ends with the same bits as one left alone."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from steelman import recipe as recipes
from steelman.errors import TrainingInterruptedError, UserError
from steelman.objectives import Batch, Outcome
from steelman.rng import Key
from steelman.training import Trainer, run
from steelman.training import finish as ending
from steelman.training import folder as folders
from steelman.training.checkpoint import checkpoints
from tests.training_helpers import (
    OWN,
    Made,
    Running,
    a_net,
    a_trainer,
    interrupted_at,
    metrics,
    newest,
    said,
    same,
    same_run,
    steelman,
    wait_for,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing interrupts: 3 epochs of 6 batches."""
    folder = tmp_path_factory.mktemp("whole")
    a_trainer(folder).fit()
    return folder


def test_the_whole_run_uses_everything_a_resume_must_bring_back(whole: Path) -> None:
    """Otherwise the tests below would show nothing."""
    state = newest(whole)
    assert state["progress"]["step"] == 18
    assert state["average"]["steps"] == 18
    assert float(state["carry"]["seen"].abs().sum()) > 0
    assert state["carry"]["count"].tolist() == [3 * 42], "one for each process"
    assert all(float(entry["momentum_buffer"].abs().sum()) > 0 for entry in state["optimizer"]["state"].values())
    fresh = torch.get_rng_state()
    assert not torch.equal(state["rng"][0], fresh), "dropout draws from the global generator"
    assert len({epoch["lr"] for epoch in metrics(whole)}) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at", [(0,), (3,), (4,), (5,), (6,), (11,), (17,), (1, 2, 8, 12, 16)])
def test_a_signal_at_any_batch(at: tuple[int, ...], number: int, whole: Path, tmp_path: Path) -> None:
    """In the middle of an epoch, at its last batch, at its first, at the very end, and again and again."""
    for place, step in enumerate(at):
        trainer = a_trainer(tmp_path)
        handlers = [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)]
        with interrupted_at({step}, trainer, number), pytest.raises(TrainingInterruptedError) as caught:
            trainer.fit(resume=place > 0)
        assert caught.value.number == number
        assert f"steelman resume {tmp_path}" in str(caught.value)
        assert [signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)] == handlers
        assert newest(tmp_path)["progress"]["step"] == step + 1, "the batch at hand is finished, then saved"
        torch.manual_seed(step)  # another process has another generator
    last = a_trainer(tmp_path)
    last.fit(resume=True)
    same_run(whole, tmp_path)


class CrashError(Exception):
    pass


@pytest.mark.parametrize("save_minutes", [1e-9, 1000.0])
@pytest.mark.parametrize("step", [0, 3, 9, 17])
def test_a_crash_goes_back_to_the_last_checkpoint(step: int, save_minutes: float, whole: Path, tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, training={"save_minutes": save_minutes})
    inner = trainer.criterion.objective

    def objective(batch: Batch) -> Outcome:
        if trainer.progress.step == step:
            inner(batch)  # what it did to batch norm, the carry and the generator must not survive
            raise CrashError
        return inner(batch)

    trainer.criterion.objective = Made(objective)
    with pytest.raises(CrashError):
        trainer.fit()
    saved = newest(tmp_path)["progress"]["step"] if checkpoints(tmp_path) else 0
    assert saved == (step if save_minutes < 1 else 6 * (step // 6))
    a_trainer(tmp_path, training={"save_minutes": save_minutes}).fit(resume=True)
    same_run(whole, tmp_path)


def test_a_crash_in_validation_or_while_recording(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch's line may be in metrics.jsonl already, and the epoch not in any checkpoint."""
    trainer = a_trainer(tmp_path)
    save = trainer.save

    def failing() -> None:
        if trainer.progress.epoch == 2:
            assert len(metrics(tmp_path)) == 2
            with (tmp_path / "metrics.jsonl").open("a") as file:
                file.write('{"epoch": 3, "lo')  # a line cut off
            raise CrashError
        save()

    monkeypatch.setattr(trainer, "save", failing)
    with pytest.raises(CrashError):
        trainer.fit()
    again = a_trainer(tmp_path)
    monkeypatch.setattr(again, "validate", lambda: (_ for _ in ()).throw(CrashError()))
    with pytest.raises(CrashError):
        again.fit(resume=True)
    a_trainer(tmp_path).fit(resume=True)
    same_run(whole, tmp_path)


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(whole: Path, tmp_path: Path) -> None:
    """Also when it was killed while it wrote that checkpoint."""
    (tmp_path / "checkpoints" / ".part-step-00000001").mkdir(parents=True)
    trainer = a_trainer(tmp_path)
    trainer.fit(resume=True)
    assert "starting from the beginning" in said(trainer.console)
    same_run(whole, tmp_path)


def test_a_second_ctrl_c_acts_at_once(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)

    def objective(batch: Batch) -> Outcome:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second one was not heard")

    trainer.criterion.objective = Made(objective)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert signal.getsignal(signal.SIGINT) is before


def test_resuming_a_run_that_had_trained_to_the_end_keeps_the_same_weights(whole: Path, tmp_path: Path) -> None:
    """Killed after the last checkpoint and before the model was written."""
    first = a_trainer(tmp_path).fit()
    again = a_trainer(tmp_path).fit(resume=True)
    assert first.epoch == again.epoch
    same(first.state, again.state)
    same_run(whole, tmp_path)


def test_a_best_epoch_is_remembered_across_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = a_trainer(tmp_path)
    monkeypatch.setattr(trainer, "validate", lambda: (0.9, 0.8))
    with interrupted_at({8}, trainer), pytest.raises(TrainingInterruptedError):
        trainer.fit()
    again = a_trainer(tmp_path)
    monkeypatch.setattr(again, "validate", lambda: (0.9, 0.3))
    assert again.fit(resume=True).epoch == 1


def test_the_time_of_an_interrupted_epoch_is_counted_once(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, training={"epochs": 1})
    inner = trainer.criterion.objective

    def slow(batch: Batch) -> Outcome:
        time.sleep(0.05)
        return inner(batch)

    trainer.criterion.objective = Made(slow)
    with interrupted_at({3}, trainer), pytest.raises(TrainingInterruptedError):
        trainer.fit()
    saved = newest(tmp_path)["progress"]["seconds"]
    assert 0.2 <= saved < 2
    a_trainer(tmp_path, training={"epochs": 1}).fit(resume=True)
    assert saved < metrics(tmp_path)[0]["seconds"] < saved + 2


def test_another_recipe_is_refused_with_what_differs(whole: Path, tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    with interrupted_at({3}, trainer), pytest.raises(TrainingInterruptedError):
        trainer.fit()
    before = newest(tmp_path)
    with pytest.raises(UserError, match=r"another recipe.*this recipe.*that recipe"):
        a_trainer(tmp_path, fingerprint="that recipe").fit(resume=True)
    other = a_trainer(tmp_path, net=a_net(features=9))
    with pytest.raises(UserError, match=r"another model: \d of another shape \(backbone.*expected \(9"):
        other.fit(resume=True)
    same(newest(tmp_path), before)
    a_trainer(tmp_path).fit(resume=True)
    same_run(whole, tmp_path)


# The command line, in processes of its own.

TINY = (
    "model=tests.training_helpers:digits_net",
    "training.epochs=3",
    "training.batch_size=128",
    "training.save_minutes=0.00001",
    "training.ema=0.9",
    "training.eps={name: linear, start: 0, end: 0.1}",
    "data.augment.name=crop",
    "data.augment.pad=1",
    "objective.attack.steps=2",
    "validation.samples=50",
    "evaluation.samples=16",
    "evaluation.suite=null",
    "evaluation.attacks={fgsm: fgsm}",
    "compute.accelerator=cpu",
)
DATA = "data={name: digits, augment: {name: crop, pad: 1}}"
AGAIN = ("resume", "run", "--allow-import", *OWN)
RECIPE = ("train", "digits-pgd-at", *(DATA if item.startswith("data.") else item for item in TINY))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same recipe in one go, in this process."""
    folder = tmp_path_factory.mktemp("unbroken")
    source, origin = recipes.read(RECIPE[1], RECIPE[2:])
    run.train(source, folder / "run", console=Console(quiet=True), origin=origin, allow_import=OWN)
    return folder / "run"


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def same_results(a: Path, b: Path) -> None:
    assert digest(a) == digest(b)
    same_run(a, b)
    left, right = ((folder / "attacks" / "evidence.json").read_bytes() for folder in (a, b))
    assert left == right


def wait_for_news(folder: Path, running: Running) -> None:
    """Until a checkpoint newer than those there now appears."""
    before = {path.name for path in checkpoints(folder)}
    wait_for(lambda: {path.name for path in checkpoints(folder)} - before, [running])


@pytest.mark.timeout(240)
def test_sigkill_at_five_random_moments(tmp_path: Path, unbroken: Path) -> None:
    moments = random.Random(7)
    folder, killed = tmp_path / "run", 0
    running = steelman(tmp_path, *RECIPE, "--out", "run")
    while killed < 5:
        wait_for_news(folder, running)
        time.sleep(moments.uniform(0, 0.02))
        running.signal(signal.SIGKILL)
        if running.end() == 0:  # a machine so quick that it was done before the fifth
            break
        assert running.end() == 128 + signal.SIGKILL, running.error
        assert not (folder / "run.json").exists()
        killed += 1
        running = steelman(tmp_path, *AGAIN)
    assert killed >= 3
    assert running.end() == 0, running.error
    same_results(unbroken, folder)
    assert not list((folder / "checkpoints").glob(".part-*")), "what a killed save left behind is cleared away"


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_command_line(tmp_path: Path, unbroken: Path, number: int, code: int) -> None:
    folder = tmp_path / "run"
    running = steelman(tmp_path, *RECIPE, "--out", "run")
    wait_for_news(folder, running)
    running.signal(number)
    assert running.end() == code
    assert "Traceback" not in running.error
    assert "everything is saved; go on with: steelman resume run --allow-import tests.training_helpers" in running.error
    again = steelman(tmp_path, *AGAIN)
    assert again.end() == 0, again.error
    same_results(unbroken, folder)
    third = steelman(tmp_path, *AGAIN)
    assert third.end() == 2
    assert "run is finished; its report is run/report.html" in third.error


def test_killed_while_evaluating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training is over and the test set half read: a resume measures again, and does not train."""
    source, _ = recipes.read(RECIPE[1], RECIPE[2:])
    with monkeypatch.context() as patch:
        patch.setattr(ending, "evaluate", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            run.train(source, tmp_path / "run", console=Console(quiet=True), allow_import=OWN)
    monkeypatch.setattr(Trainer, "step", lambda *_: pytest.fail("trained again"))
    found = run.resume(tmp_path / "run", Console(quiet=True), allow_import=OWN)
    assert found is not None
    assert (tmp_path / "run" / "run.json").is_file()


def test_killed_before_the_report_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is finished once its report is there; until then a resume goes on."""
    source, _ = recipes.read(RECIPE[1], [*RECIPE[2:], "training.epochs=1"])
    with monkeypatch.context() as patch:
        patch.setattr(ending, "write_report", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            run.train(source, tmp_path / "run", console=Console(quiet=True), allow_import=OWN)
    run.resume(tmp_path / "run", Console(quiet=True), allow_import=OWN)
    assert (tmp_path / "run" / "report.html").is_file()


def read_all(folder: Path) -> dict[str, Any]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_an_edited_recipe_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    source, _ = recipes.read(RECIPE[1], [*RECIPE[2:], "training.epochs=1"])
    folder = tmp_path / "run"
    run.train(source, folder, console=Console(quiet=True), allow_import=OWN)
    (folder / "run.json").unlink()
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text.replace("eps: 0.15", "eps: 0.2"))
    before = read_all(folder)
    with pytest.raises(UserError, match="another recipe"):
        run.resume(folder, Console(quiet=True), allow_import=OWN)
    assert read_all(folder) == before
    # Measuring otherwise is no other training.
    (folder / "recipe.yaml").write_text(text.replace("samples: 16", "samples: 20"))
    found = run.resume(folder, Console(quiet=True), allow_import=OWN)
    assert found is not None
    assert found.evaluation.total == 20


def test_readers_of_images_that_fall_to_the_same_signal_lose_nothing(whole: Path, tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    images, calls = trainer.train.images, []

    def dying(index: Tensor, key: Key | None = None) -> Tensor:
        calls.append(len(index))
        if len(calls) == 5:  # the first looks at the features, before any step
            os.kill(os.getpid(), signal.SIGTERM)
            raise UserError("a process that reads images died")
        return images(index, key)

    trainer.train.images = dying  # type: ignore[method-assign]
    with pytest.raises(TrainingInterruptedError):
        trainer.fit()
    assert trainer.progress.step == 3
    a_trainer(tmp_path).fit(resume=True)
    same_run(whole, tmp_path)


def test_a_run_writes_through_no_link(tmp_path: Path) -> None:
    """A stranger's folder could lead its files to any place."""
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "verdict").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="verdict is a link, and the run would write to another place"):
        folders.mend(tmp_path / "run")
    assert list((tmp_path / "elsewhere").iterdir()) == []
