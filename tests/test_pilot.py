"""What flags and curve find while they are measured counts, once, and is not measured again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steelman.attacks import PGD, Found
from steelman.errors import UserError
from steelman.evaluation import evaluate as evaluating
from steelman.evaluation import pilot, runner
from steelman.evaluation.masking import Finds, Pilot
from steelman.evaluation.result import StageRecord
from steelman.evaluation.stages import Stage, Suite
from steelman.evidence.bundle import read_bundle
from steelman.evidence.verify import verify
from steelman.threat import ThreatModel
from tests.evidence_helpers import a_model, evaluate, the_data

THREAT = ThreatModel(eps=0.1)
IDLE = Stage(name="idle", attack=PGD(steps=1, start="zero", step_size=1e-9))
SUITE = Suite(name="idle after a pilot", stages=(Stage(name="pilot", attack=Pilot(), role="pilot"), IDLE))


@pytest.fixture(autouse=True)
def _no_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would refuse the idle attack, and rightly."""
    monkeypatch.setattr(evaluating, "self_test", lambda *_: None)
    monkeypatch.setattr("steelman.evidence.ledger.SMALL", 0)  # the sizes of a large set: see test_small_sets.py


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
    return evaluate(a_model(), the_data(), None, THREAT, suite, out=out, **options).stages


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
    monkeypatch.setattr(pilot, "measure", lambda *_, **__: {})
    (with_curve, _), (without, _) = run(), run(curve=False)
    assert with_curve.broken > 0
    assert without.broken == 0


def test_the_batch_size_does_not_matter() -> None:
    many, few = run(batch_size=256), run(batch_size=7)
    assert [(one.attacked, one.broken, one.left) for one in many] == [
        (one.attacked, one.broken, one.left) for one in few
    ]


class Killed(BaseException):
    """As good as a SIGKILL: nothing catches it."""


def killed(*_: object) -> Tensor:
    raise Killed


def counts(stages: tuple[StageRecord, ...]) -> list[tuple[int, ...]]:
    return [(one.attacked, one.broken, one.left, one.forwards, one.backwards) for one in stages]


def test_interrupted_it_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(runner.Runner, "_attack", killed)
        with pytest.raises(Killed):
            run(tmp_path / "out")
    whole = run(tmp_path / "whole")
    monkeypatch.setattr(pilot, "_measure", lambda *_, **__: pytest.fail("measured again"))
    assert counts(run(tmp_path / "out")) == counts(whole)


def test_killed_in_the_middle_it_goes_on_from_the_last_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, real, batches = run(tmp_path / "whole", batch_size=10), pilot._measure, list[int]()

    def counted(*given: object, **options: object) -> dict[str, Tensor]:
        batches.append(len(given[-1]))  # type: ignore[arg-type]
        if batches == [10, 10, 10]:
            raise Killed
        return real(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pilot, "_measure", counted)
    with pytest.raises(Killed):
        run(tmp_path / "out", batch_size=10)
    assert counts(run(tmp_path / "out", batch_size=10)) == counts(whole)
    assert batches == [10, 10, 10, 10, 2]
    for name in ("evidence.json", "samples.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_what_was_kept_of_another_question_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a curve before and with one now; and with a surrogate."""
    with monkeypatch.context() as patch:
        patch.setattr(runner.Runner, "_attack", killed)
        with pytest.raises(Killed):
            run(tmp_path / "out", curve=False)
        with pytest.raises(Killed):
            run(tmp_path / "out")
    found = evaluate(a_model(), the_data(), None, THREAT, SUITE, out=tmp_path / "out", surrogates=[a_model()])
    assert found.verdict is not None
    assert "transfer stronger" in {flag.name for flag in found.verdict.flags}
    assert found.curve[0].total == 32


def test_a_suite_that_does_not_count_what_the_pilot_breaks_is_suspect_for_it() -> None:
    def flags(*stages: Stage) -> dict[str, float]:
        verdict = evaluate(a_model(), the_data(), None, THREAT, Suite(name="s", stages=stages)).verdict
        assert verdict is not None
        assert (verdict.trust == "suspect") == ("pilot stronger" in {flag.name for flag in verdict.flags})
        return {flag.name: flag.figure for flag in verdict.flags}

    assert flags(IDLE)["pilot stronger"] > 0.05
    assert "pilot stronger" not in flags(*SUITE.stages)
    assert "pilot stronger" not in flags(Stage(name="strong", attack=PGD(steps=20, restarts=3, loss="margin")))


@pytest.mark.parametrize("surrogate", [False, True])
def test_stages_are_not_taken_over_from_another_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, surrogate: bool
) -> None:
    """Who is left to them depends on what the pilot broke."""
    steps = PGD(steps=2, step_size=0.02)
    suite = Suite(name="half", stages=(*SUITE.stages[:1], Stage(name="one", attack=steps, share=0.5), IDLE))
    options = {"surrogates": [a_model()]} if surrogate else {"curve": False}
    measured = pilot._measure

    def breaks_nobody(*arguments: Any, **named: Any) -> dict[str, Tensor]:
        part = measured(*arguments, **named)
        return {**part, "broken": torch.zeros_like(part["broken"])}

    with monkeypatch.context() as patch:
        patch.setattr(pilot, "_measure", breaks_nobody)
        for _ in range(20):  # a batch at a time, until there is one of the first stage
            run(tmp_path / "out", suite, batch_size=8, minutes=1e-9)
            if list((tmp_path / "out" / "work").glob("01-*")):
                break
    assert list((tmp_path / "out" / "work").glob("01-*"))
    went_on = run(tmp_path / "out", suite, batch_size=8, **options)
    whole = run(tmp_path / "whole", suite, batch_size=8, **options)
    assert [replace(one, seconds=0) for one in went_on] == [replace(one, seconds=0) for one in whole]
    verify(tmp_path / "out", model=a_model(), source=the_data())
    for name in ("samples.safetensors", "evidence.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_the_time_may_run_out_in_it(tmp_path: Path) -> None:
    """Then no stage runs, what is known is told as that, and the next calls go on."""
    attacked = []
    for _ in range(20):
        found = evaluate(a_model(), the_data(), None, THREAT, SUITE, out=tmp_path / "out", batch_size=10, minutes=1e-9)
        assert found.verdict is not None
        if found.verdict.complete:
            break
        attacked.append(sum(one.attacked for one in found.stages))
        assert found.verdict.trust == "suspect"
        assert found.curve[0].total == min(attacked[-1], 32)
        assert len(found.stages) == 1 + (attacked[-1] >= 32)
        assert "pilot: the time ran out after 10 of 32 samples" in " ".join(found.notes) or attacked[-1] > 10
    assert attacked[:4] == [10, 20, 30, 32]
    assert len(attacked) > 4
    run(tmp_path / "whole", batch_size=10)
    assert (tmp_path / "out" / "evidence.json").read_bytes() == (tmp_path / "whole" / "evidence.json").read_bytes()


def test_given_attacks_come_before_the_curve() -> None:
    """Who gave them little time gets them; a curve of no samples is none."""
    asked = {"one": PGD(steps=1), "two": PGD(steps=2)}
    found = evaluate(a_model(), the_data(), None, THREAT, asked, minutes=1e-9, batch_size=len(the_data()))
    assert found.verdict is not None
    assert not found.verdict.complete
    assert [one.name for one in found.stages] == ["one", "two"]
    assert found.curve == ()
    only = evaluate(
        a_model(), the_data(), None, THREAT, {"one": asked["one"]}, minutes=1e-9, batch_size=len(the_data())
    )
    assert only.verdict is not None
    assert only.verdict.complete, "what was asked for is done"
    assert only.curve == ()
    assert any(note.startswith("curve: the time ran out after 0 of") for note in only.notes)
    whole = evaluate(a_model(), the_data(), None, THREAT, asked, batch_size=7)
    assert [point.total for point in whole.curve] == [len(the_data())] * 8


def test_as_an_attack() -> None:
    source = the_data()
    x, y = source.images(torch.arange(10)), source.labels[:10]
    points = Pilot()(a_model(), x, y, THREAT)
    assert bool(THREAT.contains(points, x).all())
    assert not torch.equal(points, x)
    with pytest.raises(UserError, match="knows no target"):
        Pilot()(a_model(), x, y, THREAT, target=y)


def test_no_suite_for_one_norm_lacks_it() -> None:
    for norm in ("l2", "l1"):  # linf is all the other tests'
        threat = ThreatModel(norm=norm, eps=0.1)
        stages = evaluate(a_model(), the_data(), None, threat, "fast", samples=8).stages
        assert stages[0].name == "pilot"
