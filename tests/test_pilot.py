"""What flags and curve find while they are measured counts, once, and is not measured again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from steelman.attacks import PGD, Found
from steelman.errors import UserError
from steelman.evaluation import Stage, Suite, cascade, evaluate, harness, pilot, verify
from steelman.evaluation.evidence import read_bundle
from steelman.evaluation.pilot import Finds, Pilot
from steelman.evaluation.result import StageRecord
from steelman.threat import ThreatModel
from tests.evidence_helpers import a_model, the_data

THREAT = ThreatModel(eps=0.1)
IDLE = Stage(name="idle", attack=PGD(steps=1, start="zero", step_size=1e-9))
SUITE = Suite(name="idle after a pilot", stages=(Stage(name="pilot", attack=Pilot(), pilot=True), IDLE))


@pytest.fixture(autouse=True)
def _no_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would refuse the idle attack, and rightly."""
    monkeypatch.setattr(harness, "self_test", lambda *_: None)


def found(points: list[float], success: list[bool], passes: int = 1) -> Found:
    count = torch.full((len(points),), passes)
    return Found(
        x_adv=torch.tensor(points).view(-1, 1, 1, 1),
        success=torch.tensor(success, dtype=torch.bool),
        forwards=count,
        backwards=2 * count,
    )


class TestFinds:
    def test_the_first_that_fools_is_kept_and_all_cost(self) -> None:
        finds = Finds(torch.zeros(3, 1, 1, 1))
        finds.keep(torch.tensor([0, 1, 2]), found([0.1, 0.2, 0.3], [False, True, False]))
        finds.keep(torch.tensor([0, 1]), found([0.4, 0.5], [True, True], passes=5))
        assert finds.x_adv.flatten().tolist() == pytest.approx([0.4, 0.2, 0.3])
        assert finds.success.tolist() == [True, True, False]
        assert finds.counts.tolist() == [[6, 6, 1], [12, 12, 2]]

    def test_of_several_points_of_one_sample_the_first_that_fools(self) -> None:
        finds = Finds(torch.zeros(2, 1, 1, 1))
        rows = torch.tensor([0, 1, 0, 1, 0, 1])
        finds.keep(rows, found([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [False, False, True, False, True, False]))
        assert finds.x_adv.flatten().tolist() == pytest.approx([0.3, 0.2])
        assert finds.success.tolist() == [True, False]
        assert finds.counts.tolist() == [[3, 3], [6, 6]]

    def test_nothing(self) -> None:
        finds = Finds(torch.zeros(2, 1, 1, 1))
        finds.keep(torch.empty(0, dtype=torch.int64), found([], []))
        assert finds.counts.sum() == 0


def run(out: Path | None = None, suite: Suite = SUITE, **options: object) -> tuple[StageRecord, ...]:
    return evaluate(a_model(), the_data(), None, THREAT, suite, out=out, **options).stages  # type: ignore[arg-type]


def test_what_the_pilot_breaks_is_broken(tmp_path: Path) -> None:
    first, second = run(tmp_path / "out")
    assert (first.name, second.name) == ("pilot", "idle")
    assert first.attacked == 32
    assert first.broken > 0
    assert second.broken == 0
    assert second.attacked == first.left
    assert first.forwards > 32 * 20
    samples = read_bundle(tmp_path / "out").samples
    assert int((samples["broken_by"] == 0).sum()) == first.broken
    verify(tmp_path / "out", model=a_model(), source=the_data())


def test_a_suite_without_a_place_for_it_keeps_to_its_own_attacks() -> None:
    """Who asks for Square alone is told what Square breaks."""
    (only,) = run(suite=Suite(name="idle", stages=(IDLE,)))
    assert (only.name, only.broken) == ("idle", 0)


def test_what_the_curve_finds_within_eps_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pilot, "signs", lambda *_, **__: [])
    (with_curve, _), (without, _) = run(), run(curve=False)
    assert with_curve.broken > 0
    assert without.broken == 0


def test_the_batch_size_does_not_matter() -> None:
    many, few = run(batch_size=256), run(batch_size=7)
    assert [(one.attacked, one.broken, one.left) for one in many] == [
        (one.attacked, one.broken, one.left) for one in few
    ]


def test_interrupted_it_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: object) -> Tensor:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(cascade.Runner, "_attack", killed)
        with pytest.raises(Killed):
            run(tmp_path / "out")
    whole = run(tmp_path / "whole")
    monkeypatch.setattr(pilot, "_measure", lambda *_, **__: pytest.fail("measured again"))
    assert [one.broken for one in run(tmp_path / "out")] == [one.broken for one in whole]


def test_as_an_attack() -> None:
    source = the_data()
    x, y = source.images(torch.arange(10)), source.labels[:10]
    points = Pilot()(a_model(), x, y, THREAT)
    assert bool(THREAT.contains(points, x).all())
    assert not torch.equal(points, x)
    with pytest.raises(UserError, match="knows no target"):
        Pilot()(a_model(), x, y, THREAT, target=y)


def test_no_suite_for_one_norm_lacks_it() -> None:
    for norm in ("linf", "l2", "l1"):
        threat = ThreatModel(norm=norm, eps=0.1)
        stages = evaluate(a_model(), the_data(), None, threat, "fast", samples=8).stages
        assert stages[0].name == "pilot"
