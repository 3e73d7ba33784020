"""An evaluation that is killed goes on, and ends with the same bundle, byte for byte."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

from steelman import files
from steelman.attacks import ATTACKS, PGD
from steelman.errors import UserError
from steelman.evaluation import evaluate as evaluating
from steelman.evaluation import pilot, runner
from steelman.evaluation.masking import Pilot
from steelman.evaluation.result import Evaluation
from steelman.evaluation.signs import SIGNS, SOMETIMES
from steelman.evaluation.stages import Stage, Suite
from steelman.evidence import bundle as bundles
from steelman.evidence import ledger
from steelman.evidence.verify import verify
from steelman.threat import ThreatModel
from tests.evidence_helpers import EPS, Net, a_model, evaluate, the_data
from tests.test_evidence import contents, names

_context = multiprocessing.get_context("forkserver")

SUITE = Suite(
    name="small",
    stages=(
        Stage(name="pilot", attack=Pilot(), role="pilot"),
        Stage(name="first", attack=PGD(steps=1, start="zero", step_size=EPS)),
        Stage(name="targets", attack=PGD(steps=3, step_size=EPS, loss="margin"), share=0.8),
        Stage(name="warm square", attack=ATTACKS["square"](queries=40), share=0.5, warm=True),
        Stage(name="sentinel pgd", attack=PGD(steps=4, restarts=2), share=0.3, role="sentinel"),
        Stage(name="escalated pgd", attack=PGD(steps=4, restarts=2), role="escalation"),
    ),
)


class Slow(Net):
    """A model that takes its time, so that there is time to kill it."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.001)
        return super().forward(x)


def slow() -> Slow:
    model = Slow().eval()
    model.load_state_dict(a_model().state_dict())
    return model


def run(out: Path, model: Any = None, **changes: Any) -> Evaluation:
    given: dict[str, Any] = {"batch_size": 6, "curve": False, "gallery": 3, **changes}
    return evaluate(model or a_model(), the_data(), None, ThreatModel(eps=EPS), SUITE, out=out, **given)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same evaluation in one go."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "SHARD", 4)
        found = run(folder)
    assert found.verdict is not None
    assert 0 < found.verdict.correct < found.score("clean").correct < found.total
    return folder


def same(out: Path, whole: Path) -> None:
    assert contents(out) == contents(whole)
    assert len(contents(out)) >= 4
    assert names(out) == names(whole), "and nothing is left behind"
    one, other = Evaluation.load(out), Evaluation.load(whole)
    assert one.verdict == other.verdict
    assert [(s.name, s.correct) for s in one.scores] == [(s.name, s.correct) for s in other.scores]
    verify(out, model=a_model(), source=the_data())


def _process(out: str) -> None:
    torch.set_num_threads(1)
    bundles.SHARD = 4
    run(Path(out), slow())


@pytest.mark.timeout(240)
def test_sigkill_at_ten_random_moments(tmp_path: Path, whole: Path) -> None:
    moments, out, killed = random.Random(3), tmp_path / "out", 0
    for _ in range(60):
        before = len(list(out.glob("work/*.batch")))
        process = _context.Process(target=_process, args=(str(out),), daemon=True)
        process.start()
        until = time.monotonic() + 60
        while process.is_alive() and killed < 10:
            # Some are killed as they begin, most after a few more batches, in the middle of whatever they do.
            if len(list(out.glob("work/*.batch"))) > before + moments.choice((-1, 0, 1, 2)):
                time.sleep(moments.uniform(0, 0.02))
                break
            assert time.monotonic() < until
            time.sleep(0.001)
        if killed < 10 and process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
        process.join(120)
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode == 0:
            break
        killed += 1
    assert process.exitcode == 0
    assert killed >= 5, "a machine so quick that it was done before"
    same(out, whole)


def no_signs(_: object, x: Tensor, *__: object, **___: object) -> dict[str, Tensor]:
    return {name: torch.zeros(len(x), dtype=torch.bool) for name in sorted(SIGNS.keys() - SOMETIMES)}


class Killed(BaseException):
    """As good as a SIGKILL: nothing catches it, and what was half written stays."""


@pytest.mark.parametrize("moment", ["before", "half way", "after"])
def test_killed_at_every_file_in_turn(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The mark, each batch, each file of the bundle, the page's own: one run is killed at each, and goes on."""
    out, real, torn = tmp_path / "out", files.write_atomic, set()

    def deadly(path: Path, content: bytes) -> None:
        if path.name in torn:
            real(path, content)
            return
        torn.add(path.name)
        if moment == "half way":
            (path.parent / f".{path.name}.a1b2c3d4").write_bytes(content[: len(content) // 2])
        if moment == "after":
            real(path, content)
        raise Killed

    monkeypatch.setattr(bundles, "SHARD", 4)
    for module in (ledger, bundles):
        monkeypatch.setattr(module, "write_atomic", deadly)
    # Neither writes a file, and both take longer than all the rest.
    monkeypatch.setattr(pilot, "measure", no_signs)
    monkeypatch.setattr(evaluating, "self_test", lambda *_: None)
    killed = 0
    while True:
        try:
            run(out)
            break
        except Killed:
            killed += 1
            assert killed < 100
            if (out / "evidence.json").exists():
                verify(out)  # whole, or not there
    assert killed == len(torn) > 30
    assert {
        "run.json",
        "clean-00000.batch",
        "samples.safetensors",
        "gallery.safetensors",
        "times.json",
        "evidence.json",
    } < torn
    monkeypatch.undo()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "SHARD", 4)
        patch.setattr(pilot, "measure", no_signs)
        run(tmp_path / "unflagged")
    same(out, tmp_path / "unflagged")
    assert contents(out).keys() == contents(whole).keys()


def test_nothing_that_is_done_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> NoReturn:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(evaluating, "write_bundle", killed)
        with pytest.raises(Killed):
            run(tmp_path / "out")
        patch.setattr(runner.Runner, "_attack", lambda *_: pytest.fail("attacked again"))
        patch.setattr(runner.Runner, "_look", lambda *_: pytest.fail("looked again"))
        patch.setattr(pilot, "_measure", lambda *_, **__: pytest.fail("measured again"))
        with pytest.raises(Killed):
            run(tmp_path / "out")
    run(tmp_path / "out")


def test_two_processes_on_one_folder(tmp_path: Path, whole: Path) -> None:
    """The second is refused, and the first is not disturbed."""
    out = tmp_path / "out"
    process = _context.Process(target=_process, args=(str(out),), daemon=True)
    process.start()
    until = time.monotonic() + 60
    while not list(out.glob("work/clean-*.batch")):
        assert time.monotonic() < until
        time.sleep(0.002)
    with pytest.raises(UserError, match="another process is evaluating into"):
        run(out)
    process.join(120)
    assert process.exitcode == 0
    same(out, whole)


# Time that runs out.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that goes on by a minute each time somebody looks at it for the deadline."""
    now = [0.0]

    def monotonic() -> float:
        now[0] += 60
        return now[0]

    for module in (runner, evaluating):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=monotonic, perf_counter=time.perf_counter))
    yield now
    monkeypatch.undo()


def test_time_runs_out_honestly_and_can_be_gone_on_from(
    tmp_path: Path, whole: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "SHARD", 4)
    out, robust, attacked = tmp_path / "out", [], []
    for minutes in (3, 6, 4, 12):
        found = run(out, minutes=minutes)
        verdict = found.verdict
        assert verdict is not None
        assert not verdict.complete
        assert any("the time ran out before all attacks had run" in reason for reason in verdict.reasons)
        robust.append(verdict.correct)
        attacked.append(sum(stage.attacked for stage in found.stages))
        assert (out / "work").is_dir(), "what is done is kept"
        checked = verify(out, model=a_model(), source=the_data())
        assert checked.robust == verdict.correct
    assert 0 < attacked[0] < attacked[1]
    assert attacked[1] < attacked[2] <= attacked[1] + 6, "what was done is never lost, and there is always a batch more"
    assert attacked[2] < attacked[3]
    assert robust == sorted(robust, reverse=True)
    with pytest.raises(UserError, match="seed was 0, is 1"):
        run(out, seed=1)
    found = run(out, minutes=10_000)
    assert found.verdict is not None
    assert found.verdict.complete
    assert not any("time ran out" in reason for reason in found.verdict.reasons)
    monkeypatch.setattr(runner, "time", time)
    same(out, whole)


def test_no_time_at_all_is_a_batch_each_time(tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "SHARD", 4)
    out, attacked = tmp_path / "out", []
    for _ in range(100):
        found = run(out, minutes=1e-9)
        assert found.verdict is not None
        if found.verdict.complete:
            break
        attacked.append(sum(stage.attacked for stage in found.stages))
        assert found.verdict.trust == "suspect"
        assert any("the time ran out after" in note for note in found.notes)
    assert attacked == sorted(set(attacked))
    assert len(attacked) > 5
    same(out, whole)
    with pytest.raises(UserError, match="minutes: expected a time above 0"):
        run(tmp_path / "none", minutes=0)
