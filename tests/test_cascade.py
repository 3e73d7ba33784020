"""The cascade: the same verdict in any order and batch, the right samples for each stage, nothing taken on trust."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import PGD, Attack
from steelman.attacks.multi_targeted import MultiTargeted
from steelman.data.source import ArraySource, Source
from steelman.errors import UserError
from steelman.evaluation import evaluate as evaluating
from steelman.evaluation.protocols import autoattack
from steelman.evaluation.result import Evaluation
from steelman.evaluation.stages import Stage, Suite
from steelman.evaluation.suites import fast, full, standard
from steelman.evidence.bundle import read_bundle
from steelman.evidence.ledger import ROBUST, WRONG, digests
from steelman.evidence.verify import verify
from steelman.threat import ThreatModel
from tests.evidence_helpers import Net, a_model, evaluate
from tests.oracles import LinearClassifier

THREAT = ThreatModel(eps=0.05)


def some_data(n: int = 120, order: Tensor | None = None) -> ArraySource:
    x = torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(11))
    with torch.no_grad():
        y = a_model()(x).argmax(dim=1)
    y[::15] = (y[::15] + 1) % 3
    order = torch.arange(n) if order is None else order
    return ArraySource(x[order], y[order], ["a", "b", "c"])


def shuffled(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(2))


def small(suite: Suite) -> Suite:
    """The stages of a suite, their shares and their order, with budgets that take a blink."""

    def less(attack: Attack) -> Any:
        sizes = {"steps": 4, "queries": 25, "restarts": 2, "targets": 2}
        fields = {field.name for field in dataclasses.fields(attack)}  # type: ignore[arg-type]
        given = {key: getattr(attack, key) for key in sizes if key in fields}
        changes = {key: min(value, sizes[key]) for key, value in given.items() if value is not None}
        return dataclasses.replace(attack, **changes)  # type: ignore[type-var]

    stages = [dataclasses.replace(stage, attack=less(stage.attack)) for stage in suite.stages]
    wide = [dataclasses.replace(stage, share=0.1) if stage.role == "sentinel" else stage for stage in stages]
    return Suite(name=f"small {suite.name}", stages=tuple(wide))


@dataclasses.dataclass
class Rows:
    """What is known of each sample, by its content."""

    found: Evaluation
    columns: dict[int, tuple[int, ...]]
    margins: dict[int, float]
    points: dict[int, Tensor]


def rows_of(found: Evaluation, out: Path) -> Rows:
    bundle = read_bundle(out)
    samples, ids = bundle.samples, bundle.samples["digest"].tolist()
    names = ("label", "clean", "guess", "broken_by", "passes", "forwards", "backwards")
    columns = dict(zip(ids, zip(*(samples[name].tolist() for name in names))))
    points = {ids[row]: image for rows, images in bundle.images() for row, image in zip(rows.tolist(), images)}
    return Rows(found, columns, dict(zip(ids, samples["margin"].tolist())), points)


def run(
    out: Path, suite: Suite, *, model: nn.Module | None = None, source: Source | None = None, **options: Any
) -> Rows:
    given = {"curve": False, "gallery": 0, "batch_size": 64, **options}
    threat = given.pop("threat", THREAT)
    model, source = model or a_model(torch.float64), source or some_data()
    found = evaluate(model, source, None, threat, suite, out=out, **given)
    if not any(isinstance(stage.attack, Recorder) for stage in suite.stages):
        verify(out, model=model, source=source)
    return rows_of(found, out)


@pytest.fixture(autouse=True)
def _untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the self-test, which an attack of a few queries, or one that only looks on, need not pass."""
    monkeypatch.setattr(evaluating, "self_test", lambda *_: None)
    monkeypatch.setattr("steelman.evidence.ledger.SMALL", 0)  # the sizes of a large set: see test_small_sets.py


# Order and batches.


@pytest.mark.parametrize("make", [fast, standard])
def test_no_sample_knows_its_place_or_its_batch(tmp_path: Path, make: Any) -> None:
    suite, n = small(make(THREAT)), 120
    first = run(tmp_path / "32", suite, batch_size=32)
    fates = [row[3] for row in first.columns.values()]
    assert {WRONG, ROBUST} < set(fates)
    assert len(first.points) > 20
    others = {
        "100": run(tmp_path / "100", suite, batch_size=100),
        "256": run(tmp_path / "256", suite, batch_size=256),
        "shuffled": run(tmp_path / "shuffled", suite, source=some_data(n, shuffled(n)), batch_size=32),
    }
    for name, other in others.items():
        assert other.columns == first.columns, name
        assert other.found.verdict == first.found.verdict, name
        for sample, margin in first.margins.items():
            assert other.margins[sample] == pytest.approx(margin, abs=1e-9), name
        for sample, point in first.points.items():
            torch.testing.assert_close(other.points[sample], point, rtol=0, atol=1e-9)
    seeded = run(tmp_path / "seed", suite, batch_size=100, seed=1)
    assert any(
        not torch.equal(seeded.points[key], point) for key, point in first.points.items() if key in seeded.points
    )


# Whom a stage attacks.


class Recorder:
    """An attack that writes down whom it was given, and leaves them as they are."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **options: Any) -> Tensor:
        self.given += options["index"].tolist()
        return x.clone()


FIRST = Stage(name="first", attack=PGD(steps=2, step_size=0.05))


def watched(share: float, **options: Any) -> tuple[Recorder, Suite]:
    spy = Recorder()
    return spy, Suite(name="spied", stages=(FIRST, Stage(name="spy", attack=spy, share=share, **options)))


def test_a_stage_is_given_the_survivors_that_came_nearest_to_falling(tmp_path: Path) -> None:
    before = run(tmp_path / "before", Suite(name="one", stages=(FIRST,)))
    alive = sorted((before.margins[key], key) for key, row in before.columns.items() if row[3] == ROBUST)
    assert len(alive) > 30
    for share in (0.1, 0.5, 1.0):
        spy, suite = watched(share)
        run(tmp_path / str(share), suite)
        assert len(spy.given) == len(set(spy.given))
        assert set(spy.given) == {key for _, key in alive[: math.ceil(share * len(alive))]}


def test_two_classes_are_ranked_too(tmp_path: Path) -> None:
    """Divided by their own spread, two logits are always as far apart; the distance to the boundary is known here."""
    g = torch.Generator().manual_seed(6)
    weight, x = torch.randn(2, 16, generator=g).double(), torch.rand(40, 1, 4, 4, generator=g) / 2 + 0.25
    across = weight[1] - weight[0]
    bias = torch.tensor([float(across.sum()) / 2, 0.0], dtype=torch.float64)
    gap = x.flatten(1).double() @ across - bias[0]
    y, ids = (gap > 0).long(), digests(x, (gap > 0).long()).tolist()
    spy = Recorder()
    first = Stage(name="first", attack=PGD(steps=2, step_size=0.02))
    suite = Suite(name="spied", stages=(first, Stage(name="spy", attack=spy, share=0.25)))
    eps = 0.02
    threat, reach = ThreatModel(eps=eps), gap.abs() / across.abs().sum()
    run(tmp_path / "out", suite, model=LinearClassifier(weight, bias), source=ArraySource(x, y), threat=threat)
    left = sorted((float(distance), key) for distance, key in zip(reach, ids) if distance > eps)
    assert 12 < len(left) < 40
    assert set(spy.given) == {key for _, key in left[: math.ceil(0.25 * len(left))]}


def test_of_equal_margins_neither_order_nor_batch_decides(tmp_path: Path) -> None:
    """Images whose pixels are turned about, on a model that sees their sum only: margins that are equal to the bit."""
    levels = torch.arange(16).view(1, 1, 4, 4) / 32 + 0.25
    x = torch.cat([levels.flatten().roll(k).view(1, 1, 4, 4) for k in range(16)]).double()
    x = torch.cat((x, x + 1 / 64))
    weight = torch.stack((-torch.ones(16), torch.ones(16))).double()
    bias = torch.tensor([7.0, 0.0], dtype=torch.float64)
    model, y = LinearClassifier(weight, bias), torch.ones(32, dtype=torch.int64)
    stage = Stage(name="first", attack=PGD(steps=1, start="zero", step_size=1 / 1024))
    chosen = []
    for name, order, size in (("a", torch.arange(32), 32), ("b", shuffled(32), 32), ("c", shuffled(32), 5)):
        spy = Recorder()
        suite = Suite(name="ties", stages=(stage, Stage(name="spy", attack=spy, share=0.25)))
        found = run(
            tmp_path / name,
            suite,
            model=model,
            source=ArraySource(x[order], y),
            batch_size=size,
            threat=ThreatModel(eps=1 / 1024),
            tiny_eps=True,
        )
        assert len(set(found.margins.values())) < 20, "ties"
        chosen.append(sorted(spy.given))
    assert len(chosen[0]) == 8
    assert chosen[0] == chosen[1] == chosen[2]
    low = set(digests(x[:16], y[:16]).tolist())
    assert set(chosen[0]) < low, "and a smaller margin goes before any other"


def test_the_sentinel_depends_on_seed_and_content_alone(tmp_path: Path) -> None:
    n, chosen = 120, {}
    cases: dict[str, dict[str, Any]] = {
        "plain": {},
        "batches": {"batch_size": 17},
        "shuffled": {"source": some_data(n, shuffled(n))},
        "seed": {"seed": 5},
    }
    for name, options in cases.items():
        spy, suite = watched(0.2, role="sentinel")
        found = run(tmp_path / name, suite, **options)
        chosen[name] = set(spy.given)
    assert chosen["plain"] == chosen["batches"] == chosen["shuffled"] != chosen["seed"]
    alive = [key for key, row in found.columns.items() if row[3] == ROBUST]
    assert len(chosen["plain"]) == math.ceil(0.2 * len(alive))
    nearest = sorted(alive, key=lambda key: found.margins[key])[: len(chosen["plain"])]
    assert chosen["plain"] != set(nearest), "whatever their margin"


def test_the_sentinels_samples_are_the_same_for_each_of_its_attacks(tmp_path: Path) -> None:
    one, two = Recorder(), Recorder()
    strong = PGD(steps=6, restarts=2)
    stages = [
        Stage(name="sentinel one", attack=one, share=0.5, role="sentinel"),
        Stage(name="sentinel pgd", attack=strong, share=0.5, role="sentinel"),
        Stage(name="sentinel two", attack=two, share=0.5, role="sentinel"),
    ]
    found = run(tmp_path / "out", Suite(name="watch", stages=tuple(stages)))
    fallen = {key for key, row in found.columns.items() if row[3] == 1}
    assert fallen
    assert set(two.given) == set(one.given) - fallen, "those that it broke apart"


def test_naming_a_suite_imports_no_engine() -> None:
    """What a suite is made of depends on nothing that runs it."""
    loads = (
        "import sys, steelman.evaluation.suites\n"
        "engine = {'runner', 'pilot', 'curve', 'verdict', 'evaluate'}\n"
        "print([name for name in engine if f'steelman.evaluation.{name}' in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", loads], capture_output=True, text=True, check=False, timeout=120)
    assert (found.returncode, found.stdout.strip(), found.stderr) == (0, "[]", "")


def test_the_runner_runs_stages_by_their_role(tmp_path: Path) -> None:
    """An attack without a role, a sentinel that finds nothing, and an escalation that nobody needs."""
    stages = [
        dataclasses.replace(FIRST, name=role, role=role) for role in ("pilot", "attack", "sentinel", "escalation")
    ]
    found = run(
        tmp_path / "roles", Suite(name="roles", stages=tuple(stages)), threat=ThreatModel(eps=1e-6), tiny_eps=True
    ).found
    assert [stage.name for stage in found.stages] == ["pilot", "attack", "sentinel"]
    assert [stage.attacked for stage in found.stages] == [32, *[found.score("clean").correct] * 2]


def test_a_pilot_comes_first_and_in_no_protocol() -> None:
    pilot = dataclasses.replace(FIRST, name="pilot", role="pilot")
    with pytest.raises(UserError, match="suite late: expected one pilot at most, and as the first stage"):
        Suite(name="late", stages=(FIRST, pilot))
    with pytest.raises(UserError, match="suite table: a protocol has no pilot"):
        Suite(name="table", stages=(pilot, FIRST), protocol=True)
    with pytest.raises(UserError, match=r"unknown role of a stage 'sentinal' \(did you mean 'sentinel'"):
        dataclasses.replace(FIRST, role="sentinal")  # type: ignore[arg-type]


# Escalation.


def doubtful(first: Attack) -> Suite:
    strong = PGD(steps=6, restarts=2)
    return Suite(
        name="doubtful",
        stages=(
            Stage(name="blind", attack=first),
            Stage(name="sentinel pgd", attack=strong, share=0.2, role="sentinel"),
            Stage(name="escalated pgd", attack=strong, role="escalation"),
        ),
    )


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_full_is_autoattack_after_a_pilot_whose_breaks_count(norm: Any) -> None:
    pilot, *rest = full(threat := ThreatModel(norm=norm, eps=0.05)).stages
    assert pilot.role == "pilot"
    assert tuple(rest) == autoattack(threat)
    assert all(stage.share == 1 and stage.role == "attack" for stage in rest)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("make", [fast, standard])
def test_the_sentinel_and_the_escalation_are_all_of_autoattack(make: Any, norm: Any) -> None:
    """Its attacks and budgets: for the sentinel's few laid out otherwise, in doubt for every survivor as they are."""
    threat = ThreatModel(norm=norm, eps=0.05)
    official = {stage.name: stage.described() for stage in autoattack(threat)}
    stages = make(threat).stages
    doubt = {stage.name.removeprefix("escalated "): stage for stage in stages if stage.role == "escalation"}
    assert {name: stage.described() for name, stage in doubt.items()} == official
    assert all(stage.share == 1 for stage in doubt.values())
    watch = {stage.name.removeprefix("sentinel "): stage.described() for stage in stages if stage.role == "sentinel"}
    layout = {"together", "ahead"}
    assert [*watch] == [*official]
    for name, settings in watch.items():
        assert {k: v for k, v in settings.items() if k not in layout} == {
            k: v for k, v in official[name].items() if k not in layout
        }


def test_what_every_targeted_stage_breaks_is_weighed_against_the_untargeted_ones(tmp_path: Path) -> None:
    blind = Stage(name="blind", attack=PGD(steps=1, step_size=1e-6, start="zero"))
    towards = [
        Stage(name="short", attack=MultiTargeted(steps=3), share=0.3),
        Stage(name="long", attack=MultiTargeted(steps=20)),
    ]
    flags = []
    for stages in ([blind], [blind, *towards]):
        suite = Suite(name="two kinds", stages=tuple(stages))
        found = run(tmp_path / str(len(stages)), suite, threat=ThreatModel(eps=0.2)).found
        assert found.verdict is not None
        flags.append({flag.name: flag for flag in found.verdict.flags})
    broken = [stage.broken for stage in found.stages][1:]
    assert min(broken) > 0
    assert "targeted ahead" not in flags[0]
    assert flags[1]["targeted ahead"].figure == sum(broken) / 120
    assert flags[1]["targeted ahead"].raised


def test_a_sentinel_that_breaks_something_sends_all_survivors_through_everything(tmp_path: Path) -> None:
    found = run(tmp_path / "blind", doubtful(Recorder()))
    verdict = found.found.verdict
    assert verdict is not None
    assert verdict.escalated
    assert verdict.complete
    flag = next(one for one in verdict.flags if one.name == "sentinel broken")
    watch, all_of_them = (next(s for s in found.found.stages if s.name == n) for n in ("sentinel pgd", "escalated pgd"))
    assert flag.raised
    assert flag.figure == watch.broken > 0
    clean = found.found.score("clean").correct
    assert watch.attacked == math.ceil(0.2 * clean)
    assert all_of_them.attacked == clean - watch.broken
    assert any("at full cost" in reason for reason in verdict.reasons)
    # Nobody is better off for it: the same attack on every sample breaks as many.
    whole = run(
        tmp_path / "whole", Suite(name="all", stages=(Stage(name="escalated pgd", attack=PGD(steps=6, restarts=2)),))
    )
    assert whole.found.verdict is not None
    assert abs(verdict.correct - whole.found.verdict.correct) <= watch.broken


def test_a_sentinel_that_breaks_nothing_is_the_end(tmp_path: Path) -> None:
    found = run(tmp_path / "seen", doubtful(PGD(steps=8, restarts=3)))
    verdict = found.found.verdict
    assert verdict is not None
    assert [stage.name for stage in found.found.stages] == ["blind", "sentinel pgd"]
    assert found.found.stages[0].broken > 20
    assert (verdict.escalated, verdict.complete, verdict.trust) == (False, True, "sound")


# What counts.


def test_passes_of_the_stages_are_those_of_the_samples(tmp_path: Path) -> None:
    class Counting(Net):
        asked = 0

        def forward(self, x: Tensor) -> Tensor:
            Counting.asked += len(x)
            return super().forward(x)

    model = Counting().eval()
    model.load_state_dict(a_model().state_dict())
    model.double()
    suite = Suite(name="two", stages=(FIRST, Stage(name="second", attack=PGD(steps=3, loss="margin"), share=0.5)))
    bundle = run(tmp_path / "out", suite, model=model)
    stages, rows = bundle.found.stages, bundle.columns.values()
    assert sum(row[5] for row in rows) == 120 + sum(stage.forwards for stage in stages)
    assert sum(row[6] for row in rows) == sum(stage.backwards for stage in stages)
    for stage in stages:
        assert stage.attacked <= stage.backwards <= stage.forwards
    wrong = [row for row in rows if row[3] == WRONG]
    assert {(row[5], row[6]) for row in wrong} == {(1, 0)}, "a sample that is wrong is looked at once"
    for row in rows:
        if row[3] >= 0:
            assert 1 <= row[4] <= row[5]
    # The model itself was asked at least that often: no pass is made up.
    assert Counting.asked >= sum(row[5] for row in rows)


class Cheat:
    """Returns points that fool the model and break a rule."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **_: Any) -> Tensor:
        if self.kind == "far":
            return 1 - x
        if self.kind == "nan":
            return torch.full_like(x, math.nan)
        if self.kind == "in place":  # its radius seen from where it has put the image is 0
            return x.neg_().add_(1)
        return x - 1


@pytest.mark.parametrize("kind", ["far", "nan", "below", "in place"])
def test_a_point_outside_never_counts_and_moves_no_margin(tmp_path: Path, kind: str) -> None:
    before = run(tmp_path / "before", Suite(name="one", stages=(FIRST,)))
    stages = (Stage(name="cheat", attack=Cheat(kind)), FIRST)
    found = run(tmp_path / "cheat", Suite(name="cheated", stages=stages))
    assert found.found.stages[0].broken == 0
    assert found.found.notes
    assert "cheat" in found.found.notes[0]
    assert "outside the threat model were not counted" in found.found.notes[0]
    assert found.margins == before.margins
    assert [row[2] for row in found.columns.values()] == [row[2] for row in before.columns.values()]


class Hair(nn.Module):
    """Wrong above the middle of a pixel, by hair's breadths of `width` roundings at a distance of 0.1."""

    def __init__(self, width: float) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        above = (x[:, 0, 0, 0] - 0.5) * 10 * self.width * torch.finfo(torch.float64).eps
        one = self.one.expand(len(x))
        return torch.stack((one, one + above, -one), dim=1)


class Up:
    """To the end of the radius."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **_: Any) -> Tensor:
        return (x + threat.eps).clamp(threat.low, threat.high)


@pytest.mark.parametrize(("width", "falls"), [(8.0, False), (200.0, True)])
def test_a_sample_that_is_wrong_by_a_rounding_is_not_broken(tmp_path: Path, width: float, falls: bool) -> None:
    x, y = torch.full((4, 1, 2, 2), 0.45) + torch.arange(4).view(4, 1, 1, 1) / 1000, torch.zeros(4, dtype=torch.int64)
    model, threat = Hair(width), ThreatModel(eps=0.15)
    with torch.no_grad():
        assert bool((model(x.double() + 0.15).argmax(dim=1) == 1).all()), "wrong, as far as argmax can tell"
    found = evaluate(model, x, y, threat, {"up": Up()}, out=tmp_path / "out", curve=False, gallery=0)
    assert found.verdict is not None
    assert found.verdict.correct == (0 if falls else 4)
    assert verify(tmp_path / "out", model=model, source=ArraySource(x, y)).broken == (4 if falls else 0)
