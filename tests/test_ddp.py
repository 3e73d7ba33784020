"""Two processes on CPU: one model, the same noise for every sample, and the same bits after a resume."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from steelman import recipe as recipes
from steelman.attacks import PGD
from steelman.data import CropFlip
from steelman.errors import UserError
from steelman.rng import Key
from steelman.threat import ThreatModel
from steelman.training import run
from steelman.training.checkpoint import checkpoint_path, checkpoints
from tests.training_helpers import OWN, Running, a_batch, a_net, metrics, newest, same_run, two_processes, wait_for

COMMON = (
    "training.epochs=2",
    "training.batch_size=128",
    "training.save_minutes=0.00001",
    "objective.attack.steps=2",
    "validation.samples=51",
    "evaluation.samples=16",
    "evaluation.suite=null",
    "evaluation.attacks={fgsm: fgsm}",
    "compute.accelerator=cpu",
)
# Batch norm, dropout and an average: whatever differs between the processes must come back to each.
NOISY = (*COMMON, "model=tests.training_helpers:digits_net", "training.ema=0.9", "compute.devices=2")
AGAIN = ("resume", "run", "--allow-import", *OWN)
TRAIN = ("train", "digits-pgd-at", *NOISY, "--out", "run")

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_a_sample_gets_the_same_noise_in_one_process_and_in_two(norm: str) -> None:
    net = a_net().eval().double()
    batch = a_batch(net, 6, threat=ThreatModel(norm=norm, eps=0.3))  # type: ignore[arg-type]
    for one in (PGD(steps=2, keep="last"), PGD(steps=2, start="gaussian", keep="last")):

        def attack(rows: torch.Tensor, attack: PGD = one) -> torch.Tensor:
            return attack(net, batch.x[rows], batch.y[rows], batch.threat, index=batch.index[rows], key=batch.key)

        whole = attack(torch.arange(6))
        for rank in (0, 1):
            rows = torch.arange(rank, 6, 2)
            torch.testing.assert_close(attack(rows), whole[rows], rtol=0, atol=1e-12)
    augmented = CropFlip(pad=1)(batch.x, batch.index, Key(1))
    assert torch.equal(CropFlip(pad=1)(batch.x[1::2], batch.index[1::2], Key(1)), augmented[1::2])


def ended(running: list[Running], codes: set[int]) -> None:
    found = [one.end() for one in running]
    assert set(found) <= codes, f"{found}: {running[0].error}\n{running[1].error}"
    assert not any("Traceback" in one.error for one in running)


PLAIN = "objective={name: pgd-at, attack: {name: pgd, steps: 2, step_size: 0.05}}"


@pytest.mark.parametrize("objective", [PLAIN, "objective={name: llr, steps: 2}"])
def test_two_processes_train_to_what_one_does(objective: str, tmp_path: Path) -> None:
    """Without batch norm and dropout the gradient of a batch is the mean of its halves'."""
    smooth = objective != PLAIN
    epochs = f"training.epochs={1 if smooth else 2}"  # in the second, too, each process has its own half
    common = (objective, *(option for option in COMMON if not option.startswith("objective")), epochs)
    net = f"model={{name: mlp, width: 16, activation: {'silu' if smooth else 'relu'}}}"
    options = (*common, net, "data={name: digits, augment: {name: crop, pad: 1}}")
    both = two_processes(tmp_path, "train", "digits-pgd-at", *options, "compute.devices=2", "--out", "two")
    source, _ = recipes.read("digits-pgd-at", options)
    run.train(source, tmp_path / "one", console=Console(quiet=True), allow_import=OWN)
    ended(both, {0})
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, value in one.items():
        # A sign that rounding turns moves a pixel, and Adam makes the most of it: more so on a smooth network.
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=2e-3 if smooth else 1e-4)
    for left, right in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two")):
        assert right["step"] == left["step"]
        assert right["loss"] == pytest.approx(left["loss"], rel=1e-3)
        for name in ("train_accuracy", "validation_clean", "validation_robust"):
            assert right[name] == pytest.approx(left[name], abs=0.021), name
    assert both[1].output == "", "one process speaks for both"
    assert "report:" in both[0].output


def test_what_an_objective_carries_is_each_processes_own(tmp_path: Path) -> None:
    options = [option for option in NOISY if not option.startswith("objective")]
    train = ("train", "digits-pgd-at", *options, "objective={name: tla, pool: 3}", "--out", "run")
    both = started(tmp_path, *train, steps=6)
    both[0].signal(signal.SIGTERM)
    ended(both, {143})
    carried = newest(tmp_path / "run")["carry"]
    assert len(carried["pool_index"]) == 2
    assert not set(carried["pool_index"][0].tolist()) & set(carried["pool_index"][1].tolist())
    # Another number of processes is refused, for the state of each process's generator is its own.
    recipe = tmp_path / "run" / "recipe.yaml"
    text = recipe.read_text()
    recipe.write_text(text.replace("devices: 2", "devices: 1"))
    with pytest.raises(UserError, match="another recipe"):
        run.resume(tmp_path / "run", Console(quiet=True), allow_import=OWN)
    recipe.write_text(text)
    ended(two_processes(tmp_path, *AGAIN), {0})


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    ended(two_processes(folder, *TRAIN), {0})
    state = newest(folder / "run")
    assert len(state["rng"]) == 2
    assert not torch.equal(state["rng"][0], state["rng"][1]), "each process has its own dropout"
    return folder / "run"


def started(folder: Path, *arguments: str, steps: int) -> list[Running]:
    """Two processes that have just passed the given step."""
    both = two_processes(folder, *arguments)
    wait_for(lambda: any(int(path.name[5:]) >= steps for path in checkpoints(folder / "run")), both)
    return both


def same_result(a: Path, b: Path) -> None:
    same_run(a, b)
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()


def test_stopped_by_a_signal_then_killed_and_resumed_with_a_damaged_checkpoint(tmp_path: Path, unbroken: Path) -> None:
    """A signal to the second process stops both; one to the first does in the test of what is carried."""
    both = started(tmp_path, *TRAIN, steps=3)
    both[1].signal(signal.SIGTERM)
    ended(both, {143})
    assert "steelman resume run" in both[0].error
    both = started(tmp_path, *AGAIN, steps=12)
    for one in both:
        one.signal(signal.SIGKILL)
    ended(both, {137})
    path = checkpoints(tmp_path / "run")[0] / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    again = two_processes(tmp_path, *AGAIN)
    ended(again, {0})
    assert "going on from the one before" in " ".join(again[0].output.split())
    same_result(unbroken, tmp_path / "run")


def test_fewer_validation_images_than_processes(tmp_path: Path) -> None:
    """One process has none to score, and its model need not be able to take none."""
    ended(two_processes(tmp_path, *TRAIN, "training.epochs=1", "validation.samples=1"), {0})
    (epoch,) = metrics(tmp_path / "run")
    assert epoch["validation_clean"] in (0, 1)


def test_a_checkpoint_that_cannot_be_written_stops_both_with_a_sentence(tmp_path: Path) -> None:
    source, _ = recipes.read("digits-pgd-at", NOISY)
    run.prepare(tmp_path / "run", source)
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    both = two_processes(tmp_path, *AGAIN)
    ended(both, {2})
    assert "could not save a checkpoint in run" in both[0].error


@pytest.mark.timeout(280)
def test_the_command_line_starts_both_itself(tmp_path: Path) -> None:
    """``compute.devices=2`` is all that a user says."""
    script = Path(sys.executable).with_name("steelman")
    options = ("training.epochs=1", *COMMON[1:], "compute.devices=2", "--out", "run")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    begun = time.monotonic()
    found = subprocess.run(
        [script, "train", "digits-pgd-at", *options],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    assert found.returncode == 0, f"after {time.monotonic() - begun:.0f} s: {found.stderr}"
    assert "Traceback" not in found.stderr
    assert (tmp_path / "run" / "run.json").is_file()
    (epoch,) = metrics(tmp_path / "run")
    assert 0.1 < epoch["train_accuracy"] <= 1
    assert 0 <= epoch["validation_robust"] <= epoch["validation_clean"] <= 1
    assert checkpoint_path(tmp_path / "run", epoch["step"]).is_dir()
