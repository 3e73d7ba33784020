"""Checkpoints: nothing is lost on the way, half a one is never seen, and a damaged one is never believed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from steelman.errors import TrainingInterruptedError, UserError
from steelman.objectives import Batch, Outcome
from steelman.training import Trainer, checkpoint
from steelman.training.checkpoint import checkpoint_path, checkpoints, load_checkpoint, load_newest, save_checkpoint
from tests.training_helpers import Made, a_trainer, interrupted_at, newest, plain_trainer, said, same, same_run

STATE: dict[str, Any] = {
    "numbers": {
        "int": 3,
        "float": 0.1 + 0.2,
        "tiny": 5e-324,
        "inf": float("inf"),
        "big": 2**62,
        "none": None,
        "yes": True,
    },
    "keys": {0: "int", "0": "text"},
    "list": [1, [2.5, "three"], {"four": torch.tensor([4])}],
    "empty": {"dict": {}, "list": [], "tensor": torch.empty(0, 3)},
    "tensors": {
        "scalar": torch.tensor(1.5),
        "double": torch.rand(3, dtype=torch.float64),
        "half": torch.rand(3).bfloat16(),
        "bytes": torch.get_rng_state(),
        "mask": torch.tensor([True, False]),
        "nan": torch.tensor([float("nan"), float("-inf"), -0.0]),
        "transposed": torch.rand(3, 2).T,
        "channels last": torch.rand(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    },
    "strings": ["zwei", "drei\nvier", "\u00fc \u65e5\u672c"],
}


def test_round_trip_to_the_bit(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step-1", STATE)
    loaded = load_checkpoint(tmp_path / "step-1")
    nan = loaded["tensors"].pop("nan")
    assert nan[:2].tolist()[1] == float("-inf")
    assert torch.isnan(nan[0])
    assert torch.signbit(nan[2])
    half, expected = loaded["tensors"].pop("half"), STATE["tensors"]["half"]
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, expected)
    wanted = {**STATE, "tensors": {k: v for k, v in STATE["tensors"].items() if k not in ("nan", "half")}}
    same(wanted, loaded)


def test_tensors_that_share_memory_or_a_name_stay_apart(tmp_path: Path) -> None:
    weight = torch.rand(4)
    state = {"a": weight, "b": weight, "c": weight[:2], "d.e": torch.tensor(1), "d": {"e": torch.tensor(2)}}
    save_checkpoint(tmp_path / "step-1", state)
    loaded = load_checkpoint(tmp_path / "step-1")
    same(state, loaded)
    loaded["a"].zero_()
    assert torch.equal(loaded["b"], weight)


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state\.carry\.thing is a object"):
        save_checkpoint(tmp_path / "step-1", {"carry": {"thing": object()}})
    assert list(tmp_path.iterdir()) == []


def test_no_code_can_hide_in_a_checkpoint(tmp_path: Path) -> None:
    """Plain JSON and safetensors: what the files hold is all there is."""
    save_checkpoint(tmp_path / "step-1", STATE)
    assert sorted(path.name for path in (tmp_path / "step-1").iterdir()) == ["state.json", "tensors.safetensors"]
    text, _ = (tmp_path / "step-1" / "state.json").read_text().rstrip("\n").rsplit("\n", 1)
    json.loads(text)


def truncate(folder: Path) -> None:
    path = folder / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def empty(folder: Path) -> None:
    (folder / "tensors.safetensors").write_bytes(b"")


def flip(folder: Path, name: str = "tensors.safetensors") -> None:
    path = folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))


def flip_state(folder: Path) -> None:
    flip(folder, "state.json")


def bad_json(folder: Path) -> None:
    (folder / "state.json").write_text('{"format": 1, \n')


def not_text(folder: Path) -> None:
    (folder / "state.json").write_bytes(b"\xff\xfe\x00 \n\n")


def empty_state(folder: Path) -> None:
    (folder / "state.json").write_text("")


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def swapped(folder: Path) -> None:
    """The tensors of another step."""
    shutil.copy(checkpoints(folder.parent.parent)[1] / "tensors.safetensors", folder)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated tensors": (truncate, "damaged: tensors.safetensors has checksum"),
    "empty tensors": (empty, "damaged: tensors.safetensors has checksum"),
    "a flipped bit in the tensors": (flip, "damaged: tensors.safetensors has checksum"),
    "a flipped bit in the state": (flip_state, "damaged|incomplete"),
    "tensors of another checkpoint": (swapped, "damaged: tensors.safetensors has checksum"),
    "no state": (lambda folder: (folder / "state.json").unlink(), "incomplete: .*state.json"),
    "no tensors": (lambda folder: (folder / "tensors.safetensors").unlink(), "incomplete: .*tensors.safetensors"),
    "bad json": (bad_json, "damaged|incomplete"),
    "not text": (not_text, "damaged: state.json does not match"),
    "empty state": (empty_state, "damaged: state.json does not match"),
    "nothing": (emptied, "incomplete"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    a_trainer(folder).fit()
    return folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints at steps 6 (an epoch's end) and 9."""
    folder = tmp_path_factory.mktemp("stopped")
    trainer = a_trainer(folder)
    with interrupted_at({8}, trainer), pytest.raises(TrainingInterruptedError):
        trainer.fit()
    assert [path.name for path in checkpoints(folder)] == ["step-00000009", "step-00000006"]
    return folder


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    name: str, whole: Path, stopped: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    damage, expected = DAMAGES[name]
    damage(checkpoint_path(folder, 9))
    with pytest.raises(UserError, match=expected):
        load_checkpoint(checkpoint_path(folder, 9))
    trainer = a_trainer(folder)
    trainer.fit(resume=True)
    assert "step-00000009 is " in said(trainer.console)
    assert "going on from the one before" in said(trainer.console)
    same_run(whole, folder)
    assert (folder / "checkpoints" / "damaged-step-00000009").is_dir(), "the evidence is kept"


def test_with_all_damaged_nothing_is_trained_over(stopped: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    for path in checkpoints(folder):
        truncate(path)
    for _ in range(2):  # and no second try starts silently from the beginning
        with pytest.raises(UserError, match=r"all checkpoints are damaged|has no checkpoint"):
            a_trainer(folder).fit(resume=True)
    assert len(list((folder / "checkpoints").glob("damaged-*"))) == 2


def test_damaged_twice_at_the_same_step(stopped: Path, tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    for _ in range(2):
        truncate(checkpoint_path(folder, 9))
        trainer = a_trainer(folder)
        with interrupted_at({8}, trainer), pytest.raises(TrainingInterruptedError):
            trainer.fit(resume=True)
        assert load_checkpoint(checkpoint_path(folder, 9))["progress"]["step"] == 9
    a_trainer(folder).fit(resume=True)
    same_run(whole, folder)


def test_an_error_that_may_pass_condemns_no_checkpoint(
    stopped: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, a network disk that is away for a moment, missing rights."""
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)

    def busy(*_: object, **__: object) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", busy)
        with pytest.raises(OSError, match="Too many open files"):
            a_trainer(folder).fit(resume=True)
    assert len(checkpoints(folder)) == 2
    a_trainer(folder).fit(resume=True)
    same_run(whole, folder)


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to resume"):
        load_newest(tmp_path)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FAILURES = {
    "writing the tensors": ("_write", full_disk),
    "making the folder": ("os.mkdir", full_disk),
    "moving it into place": ("os.rename", full_disk),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.parametrize("step", [3, 6])
def test_a_full_disk_loses_nothing_saved_before(
    name: str, step: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, failure = FAILURES[name]
    trainer = a_trainer(tmp_path, training={"save_minutes": 1e-9})
    inner = trainer.criterion.objective

    def objective(batch: Batch) -> Outcome:
        if trainer.progress.step == step:
            before.update({path.name: load_checkpoint(path) for path in checkpoints(tmp_path)})
            target = os if where.startswith("os.") else checkpoint
            patch.setattr(target, where.removeprefix("os."), failure)
        return inner(batch)

    trainer.criterion.objective = Made(objective)
    before: dict[str, Any] = {}
    with monkeypatch.context() as patch, pytest.raises(UserError) as caught:
        trainer.fit()
    assert "No space left on device" in str(caught.value)
    assert f"steelman resume {tmp_path}" in str(caught.value)
    assert before
    for path in checkpoints(tmp_path):
        same(load_checkpoint(path), before.pop(path.name))
    assert not before, "none was lost"
    assert not list((tmp_path / "checkpoints").glob(".part-*"))
    a_trainer(tmp_path).fit(resume=True)
    same_run(whole, tmp_path)


def test_a_full_disk_at_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, content: bytes) -> None:
        path.write_bytes(content[: len(content) // 2])
        full_disk()

    monkeypatch.setattr(checkpoint, "_write", half)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(checkpoint_path(tmp_path, 1), STATE)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Checkpoints where a file is in the way; a read-only disk says the same in other words."""
    trainer = a_trainer(tmp_path)
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(UserError, match=r"could not save a checkpoint in .*: (File exists|Not a directory)"):
        trainer.fit()


def test_a_read_only_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    trainer = a_trainer(tmp_path)
    monkeypatch.setattr(checkpoint, "_write", read_only)
    with pytest.raises(UserError, match="Read-only file system"):
        trainer.fit()


def test_what_a_killed_save_left_is_no_checkpoint(stopped: Path, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    shutil.copytree(checkpoint_path(folder, 9), folder / "checkpoints" / ".part-step-00000011")
    (folder / "checkpoints" / ".part-step-00000011" / "state.json").unlink()
    a_trainer(folder).fit(resume=True)
    same_run(whole, folder)
    assert not list((folder / "checkpoints").glob(".part-*"))


def test_what_an_objective_carries_comes_back_to_the_bit(tmp_path: Path) -> None:
    carried: list[dict[str, torch.Tensor]] = []

    def objective(batch: Batch) -> Outcome:
        carried.append({name: value.clone() for name, value in batch.carry.items()})
        batch.carry["delta"] = torch.randn(4, 1, 4, 4) / 3
        batch.carry["double"] = torch.rand((), dtype=torch.float64)
        batch.carry["count"] = batch.carry.get("count", torch.tensor(0)) + 1
        logits = batch.clean()
        return Outcome(logits.square().mean(), logits.detach())

    trainer = a_trainer(tmp_path, objective=objective)
    with interrupted_at({7}, trainer), pytest.raises(TrainingInterruptedError):
        trainer.fit()
    last = {name: value.clone() for name, value in trainer.criterion.carry.items()}
    carried.clear()
    a_trainer(tmp_path, objective=objective).fit(resume=True)
    assert int(last["count"]) == 8
    same(last, carried[0])


def test_the_newest_is_a_checkpoint_of_the_last_step(whole: Path) -> None:
    assert newest(whole)["progress"]["epoch"] == 3


def test_a_damaged_best_epoch_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.1, 0.9, 0.5])
    monkeypatch.setattr(Trainer, "validate", lambda _: (1.0, next(scores)))
    trainer = plain_trainer(tmp_path)
    assert trainer.fit().epoch == 2
    best = checkpoint_path(tmp_path, trainer.progress.best_step or 0)
    (best / "tensors.safetensors").write_bytes(b"not what it was")
    again = plain_trainer(tmp_path)
    assert again.fit(resume=True).epoch == 3
    assert "keeping the last epoch instead" in said(again.console)
