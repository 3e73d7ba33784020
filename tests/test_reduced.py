"""Searches in bfloat16: only where the model answers there as it does in full precision, and the evidence says so."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import PGD
from steelman.data.source import ArraySource
from steelman.errors import UserError
from steelman.evaluation import bfloat16
from steelman.evaluation.bfloat16 import alike, native, settled
from steelman.evaluation.result import Evaluation
from steelman.evaluation.stages import Stage, Suite
from steelman.evaluation.suites import suite_named
from steelman.threat import ThreatModel
from tests.evidence_helpers import a_model, check, evaluate, the_data
from tests.oracles import linear_problem

CPU = torch.device("cpu")
THREAT = ThreatModel(eps=0.05)
SUITE = Suite(
    name="tiny",
    stages=(
        Stage(name="coarse", attack=PGD(steps=4, step_size=0.05, loss="margin"), precision="bfloat16"),
        Stage(name="fine", attack=PGD(steps=4, step_size=0.05, loss="margin")),
    ),
)


class Changed(nn.Module):
    """The small model of the evidence's tests, with its answers changed."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.change = a_model(), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.net(x))


def refuses_halves(logits: Tensor) -> Tensor:
    if logits.dtype == torch.bfloat16:
        raise RuntimeError("not in bfloat16")
    return logits


def upside_down_in_halves(logits: Tensor) -> Tensor:
    return -logits if logits.dtype == torch.bfloat16 else logits


def precisions(suite: Suite) -> list[str]:
    return [stage.precision for stage in suite.stages]


class TestWhether:
    def test_a_plain_model_is_alike(self) -> None:
        assert alike(a_model(), the_data().images(torch.arange(16)), THREAT)

    @pytest.mark.parametrize(
        "change",
        [
            lambda z: 1000 * z,
            lambda z: z / 1000,
            lambda z: z.float() - z.float().logsumexp(dim=1, keepdim=True),
        ],
    )
    def test_so_is_one_whose_logits_have_another_scale_or_are_log_probabilities(
        self, change: Callable[[Tensor], Tensor]
    ) -> None:
        assert alike(Changed(change).eval(), the_data().images(torch.arange(16)), THREAT)

    @pytest.mark.parametrize(
        "change",
        [
            lambda z: z + 1000,  # what the logits have in common leaves no room for their differences
            refuses_halves,
            upside_down_in_halves,
            lambda z: z.detach() if z.dtype == torch.bfloat16 else z,
            lambda z: z * float("nan") if z.dtype == torch.bfloat16 else z,
            lambda z: torch.where(z > 0, 1.0, -1.0) + 0 * z,  # no slope at all: nothing to compare
        ],
    )
    def test_one_that_answers_otherwise_in_halves_is_not(self, change: Callable[[Tensor], Tensor]) -> None:
        assert not alike(Changed(change).eval(), the_data().images(torch.arange(16)), THREAT)

    def test_no_batch_is_larger_than_it_may_be(self) -> None:
        sizes = set[int]()

        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = a_model()

            def forward(self, x: Tensor) -> Tensor:
                sizes.add(len(x))
                logits: Tensor = self.model(x)
                return logits

        assert alike(Counting().eval(), the_data().images(torch.arange(16)), THREAT, most=6)
        assert sizes == {6, 4}

    def test_one_in_float64_is_not(self) -> None:
        assert not alike(a_model(torch.float64), the_data().images(torch.arange(16)).double(), THREAT)

    def test_auto_asks_the_machine_and_the_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def asked(precision: str, model: nn.Module) -> list[str]:
            suite = dataclasses.replace(SUITE, precision=precision)
            return precisions(settled(suite, model, the_data(), THREAT, CPU))

        strange = Changed(upside_down_in_halves).eval()
        monkeypatch.setattr(bfloat16, "native", lambda device: True)
        assert asked("auto", a_model()) == ["bfloat16", "full"]
        assert asked("full", a_model()) == ["full", "full"]
        assert asked("auto", strange) == ["full", "full"]
        monkeypatch.setattr(bfloat16, "native", lambda device: False)
        assert asked("auto", a_model()) == ["full", "full"]
        assert asked("bfloat16", a_model()) == ["bfloat16", "full"]
        with pytest.raises(
            UserError, match="gradients in bfloat16 are those of full precision, and this one's are not"
        ):
            asked("bfloat16", strange)

    def test_what_a_machine_can_do_is_a_yes_or_a_no(self) -> None:
        assert native(CPU) in (True, False)
        assert native(torch.device("meta")) is False

    def test_another_word_is_refused(self) -> None:
        with pytest.raises(UserError, match="precision: expected one of auto, full, bfloat16, got 'half'"):
            evaluate(a_model(), the_data(), None, THREAT, SUITE, precision="half")

    @pytest.mark.parametrize("name", ["fast", "standard"])
    def test_fine_work_and_the_sentinel_stay_in_full_precision(self, name: str) -> None:
        suite = suite_named(name, THREAT)
        assert "bfloat16" in precisions(suite)
        for stage in suite.stages:
            if stage.role != "attack" or stage.warm or "APGD" in str(stage.attack):
                assert stage.precision == "full", stage.name

    def test_full_is_full(self) -> None:
        assert set(precisions(suite_named("full", THREAT))) == {"full"}


class Noting(nn.Module):
    """A model that notes what it computes in when a gradient is asked for, and when not."""

    def __init__(self) -> None:
        super().__init__()
        self.net = a_model()

    def forward(self, x: Tensor) -> Tensor:
        NOTED.append((x.requires_grad, torch.is_autocast_enabled("cpu")))
        out: Tensor = self.net(x)
        return out


NOTED: list[tuple[bool, bool]] = []


def test_only_the_search_runs_in_bfloat16() -> None:
    def noted(precision: str) -> set[tuple[bool, bool]]:
        NOTED.clear()
        evaluate(Noting().eval(), the_data(), None, THREAT, SUITE, precision=precision, curve=False)
        return set(NOTED)

    assert (True, True) in noted("bfloat16")
    assert not any(halved for _, halved in noted("full"))


def test_the_evidence_says_what_ran_and_stands(tmp_path: Path) -> None:
    evaluate(a_model(), the_data(), None, THREAT, SUITE, precision="bfloat16", out=tmp_path / "e")
    record = json.loads((tmp_path / "e" / "evidence.json").read_text())
    assert [stage["precision"] for stage in record["suite"]["stages"]] == ["bfloat16", "full"]
    shown = Evaluation.load(tmp_path / "e").scores[1:-1]
    assert [score.settings.get("precision") for score in shown] == ["bfloat16", None]
    assert record["curve_attack"].startswith("PGD-20 in bfloat16")
    assert check(tmp_path / "e").broken > 0  # each of them puts to the model in full precision


def test_an_evaluation_does_not_go_on_in_another_precision(tmp_path: Path) -> None:
    def begin(precision: str) -> None:
        evaluate(a_model(), the_data(), None, THREAT, SUITE, precision=precision, out=tmp_path / "e", minutes=1e-9)

    begin("bfloat16")
    with pytest.raises(UserError, match=r"unfinished evaluation of something else \(.*suite"):
        begin("full")


@pytest.mark.parametrize("precision", ["full", "bfloat16"])
def test_the_verdict_on_a_linear_model_is_the_true_one(precision: str) -> None:
    problem = linear_problem(4, n=12, corners=True)
    layer = nn.Linear(12, 4)
    layer.load_state_dict(problem.model.state_dict())
    distances = np.sort(problem.distances_in_box("linf", 0, 1))
    threat = ThreatModel(eps=float(distances[5:7].mean()))
    source = ArraySource(problem.x.float(), problem.y)
    model = nn.Sequential(nn.Flatten(), layer).eval()
    coarse = tuple(stage for stage in suite_named("fast", threat).stages if stage.precision != "full")
    suite = Suite(name="coarse", stages=coarse)
    found = evaluate(model, source, None, threat, suite, precision=precision, curve=False)
    assert {stage.settings.get("precision", "full") for stage in found.stages} == {precision}
    assert found.score("clean").correct == 12
    assert found.score("worst case").correct == 6
