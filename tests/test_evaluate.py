"""Evaluation: exact where the answer is known, deaf to what attacks claim, and clear about what cannot be measured."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta
from torch import Tensor, nn

from steelman.attacks import ATTACKS, PGD, Found
from steelman.attacks.eot import EOT
from steelman.attacks.rays import RayS
from steelman.attacks.square import Square
from steelman.data.datasets import load
from steelman.data.source import ArraySource, first, name_of
from steelman.errors import UserError
from steelman.evaluation import evaluate as evaluating
from steelman.evaluation.checks import predictions
from steelman.evaluation.curve import CURVE_RATIOS
from steelman.evaluation.evaluate import DEFAULT_ATTACKS
from steelman.evaluation.masking import Pilot
from steelman.evaluation.result import Evaluation, interval
from steelman.evaluation.stages import Stage, Suite, describe
from steelman.evidence.bundle import bundle_at
from steelman.heads import embed
from steelman.threat import ThreatModel
from tests import evidence_helpers
from tests.oracles import LinearClassifier
from tests.training_helpers import SHAPE, a_net, some_data

Adversary = Any


def evaluate(model: nn.Module, data: Any, threat: ThreatModel, attacks: Any = None, **options: Any) -> Evaluation:
    """Each attack on every sample: what the cascade adds is tested elsewhere."""
    x, y = data if isinstance(data, tuple) else (data, None)
    return evidence_helpers.evaluate(model, x, y, threat, DEFAULT_ATTACKS if attacks is None else attacks, **options)


def line(n: int = 40, seed: int = 0) -> tuple[LinearClassifier, Tensor, Tensor, np.ndarray]:
    """A linear model of two classes, images far from 0 and 1, labels that are nine times in ten its own, and each
    image's exact l-infinity distance to the boundary."""
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(2, 16, generator=g)
    x = 0.5 + 0.05 * torch.randn(n, *SHAPE, generator=g)
    across = (weight[1] - weight[0]).double()
    bias = torch.tensor([float(weight[1].sum() - weight[0].sum()) / 2, 0.0])  # the boundary runs through the middle
    model = LinearClassifier(weight, bias)
    gap = (x.flatten(1).double() @ across - float(bias[0])).numpy()
    y = torch.from_numpy((gap > 0).astype(np.int64))
    y[::10] = 1 - y[::10]
    return model, x, y, np.abs(gap) / float(across.abs().sum())


class DoNothing:
    """An attack that gives up."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **_: Any) -> Tensor:
        return x.clone()


@dataclasses.dataclass
class Returns:
    """An attack that returns what a function says."""

    function: Any

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **_: Any) -> Tensor:
        out: Tensor = self.function(x, y, threat)
        return out


def test_robust_accuracy_of_a_linear_model_is_the_exact_share() -> None:
    model, x, y, distance = line()
    right = (model(x).argmax(dim=1) == y).numpy()
    order = np.sort(distance)
    for k in (0, 5, 20, 35):
        eps = float(order[k] + order[k + 1]) / 2
        assert min(abs(distance - eps)) > 1e-6
        found = evaluate(
            model,
            (x, y),
            ThreatModel(eps=eps),
            {"fgsm": PGD(steps=1, start="zero"), "pgd": PGD(steps=20)},
            tiny_eps=True,
        )
        standing = int((right & (distance > eps)).sum())
        assert found.score("clean").correct == right.sum()
        assert found.score("fgsm").correct == standing
        assert found.score("pgd").correct == standing
        assert found.score("worst case").correct == standing
        assert found.total == 40


def test_the_curve_is_exact_on_a_linear_model_and_falls() -> None:
    model, x, y, distance = line(60)
    right = (model(x).argmax(dim=1) == y).numpy()
    eps = float(np.median(distance)) / 1.3
    found = evaluate(model, (x, y), ThreatModel(eps=eps), {"fgsm": PGD(steps=1, start="zero")})
    assert [point.eps for point in found.curve] == [0.0, *(eps * ratio for ratio in CURVE_RATIOS)]
    expected = [int((right & (distance > point.eps)).sum()) for point in found.curve]
    got = [point.correct for point in found.curve]
    assert got == expected
    assert got == sorted(got, reverse=True)
    assert len(set(got)) > 4
    assert {point.total for point in found.curve} == {60}


def test_a_cascades_curve_is_exact_and_spares_whom_eps_does_not_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whom the pilot's attacks break at eps is tried below it, whom they do not above it, and nobody there again."""
    model, x, y, distance = line(30)
    right = (model(x).argmax(dim=1) == y).numpy()
    eps, real, tried = float(np.median(distance)), PGD.run, dict[float, int]()

    def run(self: PGD, *given: Any, **options: Any) -> Found:
        if (self.loss, self.steps) == ("scale-invariant-cross-entropy", 20):
            tried[round(given[3].eps / eps, 2)] = len(given[1])
        return real(self, *given, **options)

    monkeypatch.setattr(PGD, "run", run)
    monkeypatch.setattr("steelman.evaluation.runner.pilot_size", lambda total: total)
    stages = (Stage(name="pilot", attack=Pilot(), role="pilot"), Stage(name="pgd", attack=PGD(steps=10)))
    found = evaluate(model, (x, y), ThreatModel(eps=eps), Suite(name="pilot", stages=stages))
    for point in found.curve:
        assert point.correct == int((right & (distance > point.eps)).sum())
    assert found.curve[0].total == right.sum() == 27
    fall = {ratio: right & (distance <= ratio * eps) for ratio in CURVE_RATIOS}
    assert {ratio: tried[ratio] for ratio in CURVE_RATIOS} == {
        0.25: fall[1.0].sum(),
        0.5: (fall[1.0] & ~fall[0.25]).sum(),
        0.75: (fall[1.0] & ~fall[0.5]).sum(),
        1.0: 0,
        1.5: (right & ~fall[1.0]).sum(),
        2.0: (right & ~fall[1.5]).sum(),
        3.0: (right & ~fall[2.0]).sum(),
    }
    assert tried[0.5] > 0
    assert tried[2.0] > 0


def test_the_curve_never_rises_even_where_the_attack_is_weak_at_large_radii() -> None:
    class Wavy(nn.Module):
        """Right or wrong by a wave in the first pixel: steps of a large radius jump over what small ones find."""

        def forward(self, x: Tensor) -> Tensor:
            wave = torch.sin(60 * x[:, 0, 0, 0])
            return torch.stack((wave, -wave), dim=1)

    x = torch.rand(50, *SHAPE)
    y = Wavy()(x).argmax(dim=1)
    found = evaluate(Wavy(), (x, y), ThreatModel(eps=0.02), {"pgd": PGD(steps=2)})
    got = [point.correct for point in found.curve]
    assert got == sorted(got, reverse=True)


def test_an_attack_that_does_nothing_leaves_robust_at_clean() -> None:
    model, x, y, _ = line()
    found = evaluate(model, (x, y), ThreatModel(eps=0.1), {"nothing": DoNothing()}, curve=False)
    assert found.score("nothing").correct == found.score("clean").correct == found.score("worst case").correct
    assert 0 < found.score("clean").correct < 40
    assert found.notes == ()
    assert found.curve == ()


CHEATS = {
    "far away": lambda x, y, threat: x + 5 * threat.eps * (1 - 2 * y.float())[:, None, None, None],
    "just outside": lambda x, y, threat: x + 1.0001 * threat.eps,
    "below the box": lambda x, y, threat: x - threat.eps,
    "NaN": lambda x, y, threat: torch.full_like(x, float("nan")),
    "infinite": lambda x, y, threat: torch.full_like(x, float("inf")),
    "NaN in one pixel": lambda x, y, threat: x.masked_fill(torch.arange(16).view(SHAPE) == 3, float("nan")),
}


@pytest.mark.parametrize("name", CHEATS)
def test_points_outside_the_threat_model_are_not_believed_and_are_noted(name: str) -> None:
    """The model flips for all of them, so that only the check of the point stands between the cheat and success."""

    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known = x

        def forward(self, given: Tensor) -> Tensor:
            same = (given[:, None] == self.known[None]).flatten(2).all(dim=2).any(dim=1).float()
            return torch.stack((same, 1 - same), dim=1)

    x = torch.rand(12, *SHAPE) * 0.02
    if name in ("far away", "just outside"):
        x = 0.5 + x
    y = torch.zeros(12, dtype=torch.int64)
    found = evaluate(
        Fickle(), (x, y), ThreatModel(eps=0.1), {"cheat": Returns(CHEATS[name]), "honest": DoNothing()}, curve=False
    )
    assert found.score("cheat").correct == 12
    assert found.score("worst case").correct == 12
    assert found.notes == ("cheat: 12 points outside the threat model were not counted",)
    threat = ThreatModel(eps=0.1)
    for example in found.gallery:
        assert threat.contains(example.adversarial[None], example.clean[None]).all(), "nor are they shown"
        assert example.adversarial_prediction == 0


def test_one_that_is_inside_is_believed_beside_others_that_are_not() -> None:
    model, x, y, distance = line()
    right = model(x).argmax(dim=1) == y
    eps = float(np.sort(distance)[30])
    across = (model.weight[1] - model.weight[0]).detach().sign().reshape(SHAPE)

    def half(given: Tensor, labels: Tensor, threat: ThreatModel) -> Tensor:
        towards = (1 - 2 * labels.float())[:, None, None, None] * across
        size = torch.where(torch.arange(len(given)) % 2 == 0, threat.eps, 3 * threat.eps)
        return given + size[:, None, None, None] * towards

    found = evaluate(model, (x, y), ThreatModel(eps=eps), {"half": Returns(half)}, curve=False)
    attacked = np.flatnonzero(right.numpy())
    fallen = sum(1 for place, row in enumerate(attacked) if place % 2 == 0 and distance[row] < eps)
    assert found.score("half").correct == len(attacked) - fallen
    assert f"half: {len(attacked) // 2} points" in found.notes[0]


def test_an_attack_that_loses_samples_is_refused() -> None:
    model, x, y, _ = line()
    with pytest.raises(UserError, match=r"short: expected points of shape"):
        evaluate(model, (x, y), ThreatModel(eps=0.1), {"short": Returns(lambda x, y, t: x[:-1])}, curve=False)


def test_worst_case_is_each_samples_worst_fate() -> None:
    """Two attacks that each fell other samples, and both some."""
    model, x, y, _ = line()
    right = (model(x).argmax(dim=1) == y).nonzero()[:, 0].tolist()
    threat = ThreatModel(norm="linf", eps=1.0)

    def felling(rows: list[int]) -> Adversary:
        def attack(given: Tensor, labels: Tensor, _: ThreatModel) -> Tensor:
            out = given.clone()
            for place in range(len(given)):
                origin = next(row for row in range(len(x)) if torch.equal(x[row], given[place]))
                if origin in rows:
                    out[place] = next(x[row] for row in right if y[row] != labels[place])
            return out

        return Returns(attack)

    first, second = right[:10], right[6:20]
    found = evaluate(model, (x, y), threat, {"a": felling(first), "b": felling(second)}, curve=False, gallery=40)
    assert found.score("a").correct == len(right) - 10
    assert found.score("b").correct == len(right) - 14
    assert found.score("worst case").correct == len(right) - 20
    # The gallery shows the first attack that fooled the model, or else the last that was tried.
    shown = {example.index: example.attack for example in found.gallery}
    assert shown == {row: "a" if row in first else "b" for row in right}


def test_intervals_are_exact_binomial_ones() -> None:
    """Clopper-Pearson by the quantiles of the beta distribution."""
    for correct, total in ((0, 10), (10, 10), (5, 10), (873, 1000), (1, 10000)):
        low, high = interval(correct, total)
        assert low == pytest.approx(beta.ppf(0.025, correct, total - correct + 1) if correct else 0.0, abs=1e-9)
        assert high == pytest.approx(
            beta.ppf(0.975, correct + 1, total - correct) if correct < total else 1.0, abs=1e-9
        )
    model, x, y, _ = line()
    found = evaluate(model, (x, y), ThreatModel(eps=0.1), curve=False)
    for score in found.scores:
        assert score.interval == interval(score.correct, 40)
        assert score.accuracy == score.correct / 40


def test_the_gallery_holds_the_first_images_that_were_right() -> None:
    model, x, y, distance = line()
    right = (model(x).argmax(dim=1) == y).nonzero()[:, 0].tolist()
    eps = float(np.median(distance))
    threat = ThreatModel(eps=eps)
    found = evaluate(model, (x, y), threat, {"pgd": PGD(steps=10)}, batch_size=7, gallery=5, curve=False)
    assert [example.index for example in found.gallery] == right[:5]
    for example in found.gallery:
        assert torch.equal(example.clean, x[example.index])
        assert example.label == example.clean_prediction == int(y[example.index])
        assert example.adversarial_prediction == int(model(example.adversarial[None]).argmax())
        assert (example.adversarial_prediction != example.label) == (distance[example.index] < eps)
        assert threat.contains(example.adversarial[None], example.clean[None]).all()
        assert example.attack == "pgd"
    assert evaluate(model, (x, y), threat, {"pgd": PGD(steps=1)}, gallery=0, curve=False).gallery == ()


def test_every_number_carries_its_settings() -> None:
    model, x, y, _ = line()
    found = evaluate(
        model, (x, y), ThreatModel(norm="l2", eps=0.25), {"mine": PGD(steps=3, loss="margin")}, seed=5, samples=30
    )
    assert (found.norm, found.eps, found.low, found.high, found.seed, found.total) == ("l2", 0.25, 0.0, 1.0, 5, 30)
    assert found.score("mine").settings["steps"] == 3
    assert found.score("mine").settings["loss"] == "margin"
    assert found.score("mine").settings["attack"] == "PGD"
    assert {"steelman", "torch", "numpy", "python", "platform"} <= found.versions.keys()
    assert [score.name for score in found.scores] == ["clean", "mine", "worst case"]
    assert found.classes == ("0", "1")
    with pytest.raises(UserError, match="no score 'pgd' in this evaluation; it has: clean, mine, worst case"):
        found.score("pgd")


def test_a_part_of_a_source_is_evaluated() -> None:
    model, x, y, _ = line()
    right, threat = model(x).argmax(dim=1) == y, ThreatModel(eps=0.1)
    some = first(ArraySource(x, y, name="toys"), 7)
    found = evaluate(model, some, threat, curve=False)
    assert (found.score("clean").correct, found.total, found.data) == (right[:7].sum(), 7, "toys")
    assert len(first(some, 999)) == len(first(some)) == 7
    assert evaluate(model, (x, y), threat, curve=False).data == "data"
    with pytest.raises(UserError, match="samples: expected at least 1, got 0"):
        first(some, 0)


def test_a_source_says_who_reads_it_and_a_dataset_what_its_parts_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    test = load("digits").test
    assert [name_of(part) for part in (test, first(test, 5), load("digits").train)] == [
        "digits test",
        "digits test",
        "digits train",
    ]
    asked = list[int]()

    class Loader:
        def __init__(self, batches: Any, *, num_workers: int, **_: Any) -> None:
            asked.append(num_workers)
            self.batches = batches

        def __iter__(self) -> Any:
            return (self.batches[at] for at in range(len(self.batches)))

    monkeypatch.setattr("steelman.data.source.DataLoader", Loader)
    view = first(OnDemand())
    view.workers = 2
    found = evaluate(Constant(logits(0.0)), first(view, 4), ThreatModel(eps=0.1), {"one": PGD(steps=1)}, curve=False)
    assert found.total == 4
    assert set(asked) == {2}


class OnDemand:
    """A source that is not in memory, with nothing but what a source must have."""

    classes, shape, labels = tuple("0123456789"), SHAPE, torch.arange(6)

    def __len__(self) -> int:
        return 6

    def images(self, index: Tensor, key: Any = None) -> Tensor:
        return (index / 10).view(-1, 1, 1, 1).expand(-1, *SHAPE)


class Outputs(nn.Module):
    """As many outputs as wanted, the first two of a linear model."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.inner, self.outputs = line()[0], outputs

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.inner(x)
        return nn.functional.pad(z, (0, self.outputs - 2), value=-9.0)


def test_a_model_with_more_outputs_than_the_data_have_classes_is_refused_unless_it_is_said() -> None:
    """Its labels are likely to mean something else; of plain tensors nobody knows how many classes there are."""
    _, x, y, _ = line()
    named, threat = ArraySource(x, y, ["cat", "dog"]), ThreatModel(eps=0.05)
    for source in (named, first(named, 20)):
        with pytest.raises(UserError, match=r"has 5 outputs, and the data have 2 classes \(cat, dog\).*--more-outputs"):
            evaluate(Outputs(5), source, threat, curve=False)
    found = evaluate(Outputs(5), named, threat, curve=False, more_outputs=True)
    assert found.classes == ("0", "1", "2", "3", "4")
    whole = evaluate(Outputs(2), named, threat, curve=False)
    assert whole.classes == ("cat", "dog")
    assert found.score("worst case").correct == whole.score("worst case").correct
    assert evaluate(Outputs(5), (x, y), threat, curve=False).total == 40


@pytest.mark.parametrize(("labels", "said"), [(0.5, True), (0.85, False)])
def test_a_model_that_answers_all_with_one_class_is_called_collapsed(labels: float, said: bool, tmp_path: Path) -> None:
    """Unless the data are nearly as one-sided; the trust stays what it is."""
    x, y = torch.rand(60, *SHAPE), (torch.arange(60) >= round(60 * labels)).long()

    class Always(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            bright = x.flatten(1).sum(dim=1)
            return torch.stack((bright, bright - 99), dim=1)

    source = ArraySource(x, y, ["dog", "cat"])
    verdict = evaluate(Always(), source, ThreatModel(eps=0.05), curve=False, out=tmp_path).verdict
    assert verdict is not None
    assert verdict.trust == "sound"
    sentence = 'the model answers "dog" for 100% of the images: it has collapsed'
    assert (sentence in verdict.reasons) == (sentence in str(verdict)) == said
    assert Evaluation.load(tmp_path).verdict == verdict


def test_a_model_that_tells_classes_apart_is_not_called_collapsed() -> None:
    model, x, y, _ = line()
    verdict = evaluate(model, (x, y), ThreatModel(eps=0.05), curve=False).verdict
    assert verdict is not None
    assert "collapsed" not in str(verdict)


class InDouble(nn.Module):
    """Float32 images, float64 arithmetic: what is left of rounding is far below any margin."""

    def __init__(self) -> None:
        super().__init__()
        self.net = a_net("linear", dropout=0.0).double().eval()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.double())
        return out


def test_nothing_depends_on_the_size_of_batches() -> None:
    source, model, threat = some_data(60), InDouble().eval(), ThreatModel(eps=0.08)
    attacks = {"pgd": PGD(steps=5, restarts=2), "margin": PGD(steps=5, loss="margin")}
    first, *rest = (evaluate(model, source, threat, attacks, batch_size=size, gallery=60) for size in (60, 256, 17, 1))
    assert 0 < first.score("worst case").correct < first.score("clean").correct
    for other in rest:
        assert [score.correct for score in other.scores] == [score.correct for score in first.scores]
        assert other.curve == first.curve
        for a, b in zip(first.gallery, other.gallery):
            assert (a.index, a.attack, a.adversarial_prediction) == (b.index, b.attack, b.adversarial_prediction)
            torch.testing.assert_close(a.adversarial, b.adversarial, rtol=0, atol=1e-6)


def test_the_same_seed_gives_the_same_answer_and_leaves_the_generator_alone() -> None:
    source, model, threat = some_data(30), a_net("linear").eval(), ThreatModel(eps=0.08)
    state = torch.get_rng_state()
    one = evaluate(model, source, threat, {"pgd": PGD(steps=1)}, seed=1, gallery=3, curve=False)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    two = evaluate(model, source, threat, {"pgd": PGD(steps=1)}, seed=1, gallery=3, curve=False)
    other = evaluate(model, source, threat, {"pgd": PGD(steps=1)}, seed=2, gallery=3, curve=False)
    assert all(torch.equal(a.adversarial, b.adversarial) for a, b in zip(one.gallery, two.gallery))
    assert not all(torch.equal(a.adversarial, b.adversarial) for a, b in zip(one.gallery, other.gallery))


def test_the_model_is_left_as_it_was() -> None:
    """A part of it in train mode, with gradients, batch-norm statistics and a frozen weight of its own."""
    model = a_net("linear").train()
    model(torch.rand(4, *SHAPE)).sum().backward()
    model.eval()
    model.backbone.layers[3].train()  # type: ignore[index,union-attr]
    model.head.weight.requires_grad_(False)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    wanted = [p.requires_grad for p in model.parameters()]
    modes = [module.training for module in model.modules()]
    evaluate(model, some_data(20), ThreatModel(eps=0.1))
    with pytest.raises(RuntimeError, match="broken"):
        evaluate(model, some_data(20), ThreatModel(eps=0.1), {"broken": Returns(lambda *_: _broken())})
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for before, parameter in zip(gradients, model.parameters()):
        assert (before is None) == (parameter.grad is None)
        assert before is None or (parameter.grad is not None and torch.equal(parameter.grad, before))
    assert [p.requires_grad for p in model.parameters()] == wanted
    assert [module.training for module in model.modules()] == modes


def _broken() -> Tensor:
    raise RuntimeError("broken")


def test_the_model_is_judged_in_eval_mode() -> None:
    """Dropout of everything in train mode: judged there, no image would be right but by chance."""
    model = nn.Sequential(nn.Dropout(0.99), *line()[0:1]).train()
    _, x, y, _ = line()
    right = line()[0](x).argmax(dim=1) == y
    with pytest.raises(UserError, match="in train mode, where it answers otherwise"):
        evaluate(model, (x, y), ThreatModel(eps=1e-6), curve=False, tiny_eps=True)
    assert line()[0].training  # where train mode makes no difference, nobody minds
    evaluate(line()[0], (x, y), ThreatModel(eps=1e-6), curve=False, tiny_eps=True)
    model.eval()[0].train()
    assert evaluate(model, (x, y), ThreatModel(eps=1e-6), curve=False, tiny_eps=True).score("clean").correct == int(
        right.sum()
    )


class Viewing(nn.Module):
    """As many models are written: a view that cannot be made of no images."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = line()[0]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.view(x.size(0), -1))
        return out


def test_batches_in_which_no_image_is_right() -> None:
    _, x, y, _ = line()
    with pytest.raises(RuntimeError, match="reshape"):
        Viewing()(x[:0])
    wrong = 1 - Viewing()(x).argmax(dim=1)
    found = evaluate(Viewing(), (x, wrong), ThreatModel(eps=0.1), batch_size=8)
    assert [score.correct for score in found.scores] == [0] * 5
    assert found.gallery == ()
    # And of which none is left at a large radius.
    found = evaluate(Viewing(), (x, y), ThreatModel(eps=0.3), batch_size=8)
    assert found.curve[-1].correct == 0
    assert predictions(Viewing(), x[:0], "clean").shape == (0,)


# Records.


def same_evaluation(a: Evaluation, b: Evaluation) -> None:
    for field in dataclasses.fields(Evaluation):
        if field.name != "gallery":
            assert getattr(a, field.name) == getattr(b, field.name), field.name
    assert len(a.gallery) == len(b.gallery)
    for left, right in zip(a.gallery, b.gallery):
        for name, value in vars(left).items():
            other = getattr(right, name)
            assert torch.equal(value, other) if isinstance(value, Tensor) else value == other


@pytest.mark.parametrize("gallery", [3, 0])
def test_what_evaluate_returns_is_what_its_evidence_says(tmp_path: Path, gallery: int) -> None:
    model, x, y, _ = line()
    attacks: dict[str, Any] = {"pgd": PGD(steps=3, step_size=0.01), "cheat": Returns(CHEATS["NaN"])}
    source = ArraySource(x, y, ["caf\u00e9", "<b>"])
    place = tmp_path / "deep" / "folder"
    found = evaluate(model, source, ThreatModel(eps=0.1), attacks, gallery=gallery, name="m", data_name="d", out=place)
    same_evaluation(found, Evaluation.load(place))
    assert found.score("pgd").seconds is not None
    assert [example.index for example in found.gallery] == [1, 2, 3][:gallery]
    record = json.loads((place / "evidence.json").read_text())
    assert ("gallery.safetensors" in record["files"]) == bool(gallery) == (place / "gallery.safetensors").exists()


def test_settings_of_any_attack_can_be_written(tmp_path: Path) -> None:
    """A user's own attack may have a function, a tensor or another attack among its settings."""
    attack = Returns(CHEATS["NaN"])
    assert json.dumps(describe(attack))
    assert describe(DoNothing()) == {"attack": "DoNothing"}
    assert describe(PGD(steps=3))["step_size"] is None
    around = describe(EOT(attack=PGD(steps=3), draws=2))
    assert around == {"attack": "EOT", "inner": describe(PGD(steps=3)), "draws": 2, "average": "logits"}
    assert describe(RayS(queries=7)) == {"attack": "RayS", "queries": 7, "tolerance": 1e-3}


def test_attacks_that_are_no_settings_are_told_apart_by_what_they_hold() -> None:
    """Else an evaluation that was interrupted would go on with another attack."""

    class Own:
        def __init__(self, steps: int) -> None:
            self.steps, self.lock = steps, object()

        def __call__(self, _: nn.Module, x: Tensor, *__: Any, **___: Any) -> Tensor:
            return x

    def enclosing(attack: int) -> Any:
        def inside(_: nn.Module, x: Tensor, *__: Any, **___: Any) -> Tensor:
            return x + attack

        return inside

    makers: tuple[Any, ...] = (Own, enclosing, lambda steps: functools.partial(Own(1), steps=steps))
    for make in makers:
        one, same, other = (describe(make(value)) for value in (1, 1, 2))
        assert json.loads(json.dumps(one)) == same
        assert one != other
    assert describe(makers[0](3)) == {"attack": "Own", "values": {"steps": 3, "lock": "object"}}


def test_a_model_without_gradients_is_evaluated_by_black_box_attacks() -> None:
    class Detached(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach().flatten(1)[:, :3]

    x = torch.rand(8, 1, 2, 2)
    data = (x, Detached()(x).argmax(dim=1))
    found = evaluate(Detached(), data, ThreatModel(eps=0.5), {"squares": Square(queries=50)})
    assert found.score("squares").correct < 8
    assert found.curve == ()
    with pytest.raises(UserError, match="gives no gradient with respect to its input"):
        evaluate(Detached(), data, ThreatModel(eps=0.5))


def test_an_evaluation_that_is_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no evidence in"):
        Evaluation.load(tmp_path)
    model, x, y, _ = line()
    evaluate(model, (x, y), ThreatModel(eps=0.1), curve=False, out=tmp_path)
    content = (tmp_path / "evidence.json").read_text()
    (tmp_path / "evidence.json").write_text(content[:-20])
    with pytest.raises(UserError, match="is damaged"):
        Evaluation.load(tmp_path)
    (tmp_path / "evidence.json").write_text(content)
    (tmp_path / "gallery.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="was changed"):
        Evaluation.load(tmp_path)


@pytest.mark.parametrize("times", [None, b"{", b"[]", b'{"clean": "long"}', b'{"clean": -1}', b"\xff", b"[" * 200_000])
def test_without_times_there_are_no_seconds_and_nothing_else_is_missing(tmp_path: Path, times: bytes | None) -> None:
    model, x, y, _ = line()
    found = evaluate(model, (x, y), ThreatModel(eps=0.1), curve=False, out=tmp_path)
    path = tmp_path / "times.json"
    path.unlink() if times is None else path.write_bytes(times)
    again = Evaluation.load(tmp_path)
    assert {score.seconds for score in again.scores} | {stage.seconds for stage in again.stages} == {None}

    def timeless(one: Evaluation) -> Evaluation:
        scores = tuple(dataclasses.replace(score, seconds=None) for score in one.scores)
        return dataclasses.replace(
            one, scores=scores, stages=tuple(dataclasses.replace(s, seconds=None) for s in one.stages)
        )

    same_evaluation(timeless(found), again)


def test_a_run_has_its_own_verdict_in_a_folder(tmp_path: Path) -> None:
    model, x, y, _ = line()
    run = tmp_path / "run"
    with pytest.raises(
        UserError, match=r"run: evidence\.json is missing there and in its folders 'verdict' and 'attacks'$"
    ):
        bundle_at(run)
    for name in ("linf-0.2", "linf-0.1"):
        evaluate(model, (x, y), ThreatModel(eps=0.1), curve=False, out=run / "evaluations" / name)
    with pytest.raises(UserError, match=r"it has these evaluations, name one: .*linf-0\.1, .*linf-0\.2$"):
        Evaluation.load(run)
    evaluate(model, (x, y), ThreatModel(eps=0.1), {"own": PGD(steps=1)}, curve=False, out=run / "verdict")
    assert bundle_at(run) == bundle_at(run / "verdict") == run / "verdict"
    assert bundle_at(run / "evaluations" / "linf-0.1") == run / "evaluations" / "linf-0.1"
    assert Evaluation.load(run).scores[1].name == "own"


# What cannot be measured.


class Constant(nn.Module):
    """A model that answers every image with the same thing."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(x) if callable(self.answer) else self.answer


def logits(value: float, classes: int = 10) -> Any:
    return lambda x: torch.full((len(x), classes), value) + 0 * x.sum()


GOOD = torch.rand(6, *SHAPE), torch.arange(6)
BAD_MODELS: dict[str, tuple[nn.Module, str]] = {
    "NaN logits": (Constant(logits(float("nan"))), "NaN or infinite logits for 4 of 4 clean images"),
    "infinite logits": (Constant(logits(float("inf"))), "NaN or infinite logits for 4 of 4 clean images"),
    "no logits": (Constant(lambda x: (x, x)), "answers with tuple, and no logits are found in it; name their place"),
    "a dict of maps": (Constant(lambda x: {"logits": x}), r"expected a tensor of shape \(N, classes\) in"),
    "one number an image": (Constant(lambda x: x.sum(dim=(1, 2, 3))), r"expected logits of shape .*, got \(4,\)"),
    "a map": (Constant(lambda x: x), r"expected logits of shape .*, got \(4, 1, 4, 4\)"),
    "one row": (Constant(lambda x: torch.zeros(1, 10)), r"expected logits of shape .*, got \(1, 10\)"),
    "one class": (Constant(logits(0.0, 1)), "at least two classes, got 1"),
    "other channels": (nn.Conv2d(3, 10, 4), r"the model cannot take images of shape \(1, 4, 4\): .*channels"),
    "other sizes": (nn.Sequential(nn.Flatten(), nn.Linear(7, 10)), r"cannot take images of shape \(1, 4, 4\): "),
    "other ranks": (nn.Sequential(nn.Flatten(), nn.BatchNorm2d(16)), r"cannot take images of shape \(1, 4, 4\): .*4D"),
    "our own shape": (a_net(), "label 3 at index 3, expected 0 .. 2"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_a_model_that_cannot_be_evaluated(name: str) -> None:
    model, expected = BAD_MODELS[name]
    with pytest.raises(UserError, match=expected):
        evaluate(model, GOOD, ThreatModel(eps=0.1))


def test_nan_at_adversarial_images_only() -> None:
    class Cliff(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = torch.stack((x.flatten(1).sum(dim=1), 8 + 0 * x[:, 0, 0, 0]), dim=1)
            return torch.where((x.flatten(1) > 0.66).any(dim=1)[:, None], float("nan"), z)

    x = torch.full((6, *SHAPE), 0.6)
    found = evaluate(
        Cliff(),
        (x, torch.zeros(6, dtype=torch.int64)),
        ThreatModel(eps=0.1),
        {"up": Returns(lambda x, y, t: x + 0.1)},
    )
    assert found.verdict is not None
    assert found.verdict.trust == "invalid"
    assert "NaN or infinite logits at 6 points inside the threat model" in found.verdict.reasons[0]


class Raw(ArraySource):
    """A source without the checks of one: what a user's own class may hand out."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.raw, self.labels = images, labels
        self.classes, self.shape = tuple("0123456789"), SHAPE

    def __len__(self) -> int:
        return len(self.raw)

    def images(self, index: Tensor, key: Any = None) -> Tensor:
        return self.raw[index]


def with_pixel(value: float, row: int) -> Tensor:
    x = torch.rand(6, *SHAPE)
    x[row, 0, 1, 1] = value
    return x


LABELS = torch.arange(6)
BAD_DATA: dict[str, tuple[Any, str]] = {
    "images up to 255": ((torch.rand(6, *SHAPE) * 255, LABELS), r"expected values in \[0, 1\], got .*divide by 255"),
    "images up to 255 from a source": (Raw(torch.rand(6, *SHAPE) * 255, LABELS), r"expected pixels in \[0, 1\], got"),
    "NaN pixels": ((with_pixel(float("nan"), 1), LABELS), "expected finite pixels, got 1 NaN or infinite"),
    "NaN pixels from a source": (Raw(with_pixel(float("nan"), 1), LABELS), "expected finite pixels, got 1 NaN"),
    "a bad pixel in the last image": (Raw(with_pixel(1.5, 5), LABELS), r"expected pixels in \[0, 1\], got 0.* .. 1.5"),
    "label 37 of 10": ((GOOD[0], torch.tensor([0, 1, 37, 3, 4, 5])), "label 37 at index 2, expected 0 .. 9"),
    "label -1": (Raw(GOOD[0], torch.tensor([0, 1, 2, 3, 4, -1])), "label -1 at index 5, expected 0 .. 9"),
    "no images": (Raw(GOOD[0][:0], LABELS[:0]), "expected at least one image, got none"),
    "fewer labels": ((GOOD[0], LABELS[:5]), "expected one label for each of 6 images"),
    "labels that are not integers": ((GOOD[0], LABELS.float()), "expected integer labels"),
}


@pytest.mark.parametrize("name", BAD_DATA)
def test_data_that_cannot_be_evaluated(name: str) -> None:
    data, expected = BAD_DATA[name]
    with pytest.raises(UserError, match=expected):
        evaluate(Constant(logits(0.0)), data, ThreatModel(eps=0.1))


def test_questions_that_cannot_be_asked() -> None:
    model = Constant(logits(0.0))
    with pytest.raises(UserError, match="eps: expected a radius above 0, got 0"):
        evaluate(model, GOOD, ThreatModel(eps=0))
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        ThreatModel(eps=-1)
    with pytest.raises(UserError, match="expected at least one attack, got none"):
        evaluate(model, GOOD, ThreatModel(eps=0.1), {})
    for taken in ("clean", "worst case"):
        with pytest.raises(UserError, match=f"an attack cannot be called '{taken}'"):
            evaluate(model, GOOD, ThreatModel(eps=0.1), {taken: PGD()})


def test_other_ranges_than_zero_to_one() -> None:
    """A threat model in the user's own units: the box is part of it."""
    source = Raw(torch.rand(6, *SHAPE) * 255, LABELS)
    found = evaluate(Constant(logits(0.0)), source, ThreatModel(eps=8, low=0, high=255), curve=False)
    assert found.high == 255
    assert found.score("clean").correct == 1


def test_a_head_put_on_another_model_is_evaluated_with_its_scale() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    found = evaluate(embed(net, "he", scale=10), some_data(12), ThreatModel(eps=0.05), curve=False)
    assert found.total == 12


def test_the_default_attacks_are_what_their_names_say() -> None:
    assert {
        "FGSM": PGD(steps=1, start="zero"),
        "PGD-20": PGD(steps=20),
        "PGD-20 margin": PGD(steps=20, loss="margin"),
    } == DEFAULT_ATTACKS


class TestSuitesThatAreNone:
    """Refused with a sentence, before anything runs."""

    @pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
    def test_a_share_is_above_0_and_at_most_1(self, share: float) -> None:
        with pytest.raises(UserError, match="expected a share above 0 and at most 1, got"):
            Stage(name="some", attack=PGD(), share=share)

    def test_an_attack_can_be_called(self) -> None:
        with pytest.raises(UserError, match="some: expected an attack, got 'pgd'"):
            Stage(name="some", attack="pgd")  # type: ignore[arg-type]
        with pytest.raises(UserError, match="some: FAB cannot begin from given points"):
            Stage(name="some", attack=ATTACKS["fab"](), warm=True)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"suite": ["fast"]}, "suite: expected a name, a Suite or attacks by label, got list"),
            ({"suite": {"PGD": "pgd"}}, "PGD: expected an attack, got 'pgd'"),
            ({"seed": 1.5}, "seed: expected a whole number, got 1.5"),
            ({"batch_size": 0}, "batch_size: expected at least 1, got 0"),
            ({"gallery": "all"}, "gallery: expected a whole number, got 'all'"),
            ({"gallery": -1}, "gallery: expected at least 0, got -1"),
            ({"suite": "full", "precision": "bfloat16"}, "precision: .*bfloat16"),
        ],
    )
    def test_evaluate_says_what_it_wants(self, options: dict[str, Any], message: str) -> None:
        net, x = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval(), torch.rand(4, 1, 2, 2)
        given = {"suite": "fast", **options}
        with pytest.raises(UserError, match=message):
            evidence_helpers.evaluate(net, x, net(x).argmax(dim=1), ThreatModel(eps=0.1), **given)

    def test_ten_arguments_are_enough(self) -> None:
        assert list(inspect.signature(evaluating.evaluate).parameters) == [
            *("model", "x", "y", "threat", "suite"),
            *("out", "name", "seed", "minutes", "batch_size"),
        ]

    def test_numpys_numbers_are_numbers(self, tmp_path: Path) -> None:
        net, x = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).eval(), torch.rand(4, 1, 2, 2)
        whole: dict[str, Any] = {"seed": np.int64(3), "gallery": np.int64(2), "batch_size": np.int32(2)}
        data = (x, net(x).argmax(dim=1))
        found = evaluate(net, data, ThreatModel(eps=0.1), {"PGD": PGD(steps=2)}, out=tmp_path / "o", **whole)
        assert (found.seed, len(found.gallery)) == (3, 2)
