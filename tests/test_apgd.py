"""Auto-PGD and MultiTargeted: closed forms, Algorithm 1 written out for one sample, costs, and deliberate breaks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import PGD
from steelman.attacks import apgd as apgd_module
from steelman.attacks.apgd import APGD, checkpoints, ranked
from steelman.attacks.engine import Problem
from steelman.attacks.multi_targeted import MultiTargeted
from steelman.rng import Key
from steelman.threat import Norm, ThreatModel
from tests.oracles import (
    Array,
    LinearClassifier,
    check_budget,
    check_budget_in_box,
    linear_problem,
    nearest,
    rand,
    randn,
    random_problem,
    red,
    sizes,
)

NORMS: tuple[Norm, ...] = ("linf", "l2", "l1")
EPS = {"linf": 0.1, "l2": 0.4, "l1": 1.0}
LOSSES = ["cross-entropy", "dlr", "margin", "scale-invariant-cross-entropy"]
every_norm = pytest.mark.parametrize("norm", NORMS)
gradient, logits = Problem.gradient, Problem.logits


class Smooth(nn.Module):
    """A curved classifier whose logits do not depend on the batch in the last bit."""

    def __init__(self, classes: int = 4, pixels: int = 12, curve: float = 2.0) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(curve * randn(10, pixels, seed=1)), nn.Parameter(randn(classes, 10, seed=2))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        h = torch.tanh((x.flatten(1)[:, None, :] * self.a.to(x)).sum(dim=-1))
        return (h[:, None, :] * self.b.to(x)).sum(dim=-1)


def samples(n: int = 8, classes: int = 4, curve: float = 2.0) -> tuple[Smooth, Tensor, Tensor]:
    model, x = Smooth(classes, curve=curve), rand(n, 1, 3, 4, seed=3)
    y = model(x).argmax(dim=1)
    model.seen.clear()
    return model, x, y


def test_checkpoints() -> None:
    for norm in ("linf", "l2"):
        assert checkpoints(100, norm) == [22, 41, 57, 70, 80, 87, 93, 99]
        assert checkpoints(20, norm) == [5, 9, 12, 14, 16, 18, 19, 20]
        assert checkpoints(1, norm) == [1]
    assert checkpoints(100, "l1") == list(range(4, 101, 4))
    assert checkpoints(7, "l1") == [1, 2, 3, 4, 5, 6, 7]


def test_ranked_leaves_out_the_true_class() -> None:
    z = torch.tensor([[0.0, 3.0, 1.0, 2.0], [0.0, 3.0, 1.0, 2.0]])
    assert ranked(z, torch.tensor([1, 0]), 9).tolist() == [[3, 2, 0], [1, 3, 2]]
    assert ranked(z, torch.tensor([1, 2]), 2).tolist() == [[3, 2], [1, 3]]


def check_rival(attack: Any, norm: str, classes: int, slack: float = 0.03) -> None:
    """Where one rival class is near and the others are far, any loss leads to it, and the closed form is exact."""
    problem = linear_problem(classes, seed=classes)
    distances = problem.distances(norm)
    for eps in (distances[0] * (1 - slack), distances[3] * (1 + slack)):
        threat = ThreatModel(norm=norm, eps=float(eps), low=-100.0, high=100.0)  # type: ignore[arg-type]
        x_adv = attack(problem.model, problem.x, problem.y, threat, key=Key(7))
        assert (sizes(x_adv - problem.x, norm) <= eps * (1 + 1e-9)).all()
        fooled = (problem.model(x_adv).argmax(dim=1) != problem.y).numpy()
        assert fooled.tolist() == (distances < eps).tolist()


class TestLinear:
    @pytest.mark.parametrize(("norm", "classes"), [("linf", 2), ("l2", 10), ("l1", 2)])  # 3 are in the mutations
    def test_all_targets_reach_the_closed_form(self, norm: Norm, classes: int) -> None:
        check_budget(APGD(steps=15, loss="targeted-dlr"), norm, classes)

    @every_norm
    def test_targeted_margin_reaches_the_closed_form(self, norm: Norm) -> None:
        check_budget(APGD(steps=15, loss="targeted-margin"), norm, 3)

    @pytest.mark.parametrize(("norm", "classes"), [("linf", 10), ("l2", 2), ("l1", 2)])  # 3 are in the mutations
    def test_multi_targeted_reaches_the_closed_form(self, norm: Norm, classes: int) -> None:
        check_budget(MultiTargeted(steps=12, step_size=0.5), norm, classes)

    @pytest.mark.parametrize("i", range(3), ids=NORMS)
    @pytest.mark.parametrize("j", range(4), ids=LOSSES)
    def test_losses_without_a_target(self, i: int, j: int) -> None:
        """Each loss in each norm, and with each number of classes."""
        check_rival(APGD(steps=15, loss=LOSSES[j]), NORMS[i], (2, 3, 10)[(i + j) % 3])

    @every_norm
    @pytest.mark.parametrize("loss", ["margin", "targeted-dlr"])
    def test_solver_in_the_box(self, norm: Norm, loss: str) -> None:
        check_budget_in_box(APGD(steps=40, loss=loss), norm)

    @every_norm
    def test_multi_targeted_in_the_box(self, norm: Norm) -> None:
        check_budget_in_box(MultiTargeted(steps=40), norm)

    def test_diversified_start(self) -> None:
        check_budget(APGD(steps=15, loss="targeted-dlr", start="diversified"), "linf", 3)
        check_budget(MultiTargeted(steps=12, step_size=0.5, start="diversified"), "linf", 3)

    @every_norm
    @pytest.mark.parametrize(
        "attack",
        [APGD(steps=15), APGD(steps=15, loss="targeted-dlr"), MultiTargeted(steps=12, step_size=20.0)],
        ids=str,
    )
    def test_a_given_target_is_the_only_one(self, norm: Norm, attack: Any) -> None:
        for classes in (2, 4):
            problem = random_problem(classes, seed=classes)
            threat = ThreatModel(norm=norm, eps={"linf": 3.0, "l2": 10.0, "l1": 40.0}[norm], low=-100, high=100)
            target = (problem.y + 1) % classes
            found = attack.run(problem.model, problem.x, problem.y, threat, target=target)
            assert torch.equal(problem.model(found.x_adv).argmax(dim=1) == target, found.success)
            assert (found.forwards <= attack.steps + 1).all()  # one run, and no ranking
            # Far towards one of four classes, z_t - z_y may be highest where a third class wins.
            assert found.success.all() if classes == 2 else found.success.any()


# In l2 a pixel at its bound is left out of the step, and whether it is there is a matter of one rounding: no box.
BOX = {"linf": (0.0, 1.0), "l2": (-9.0, 9.0)}


def naive(model: nn.Module, x: Tensor, y: Tensor, norm: str, eps: float, steps: int, start: Tensor) -> list[Array]:
    """Algorithm 1 of Croce and Hein (2020) for one sample: every point it visits, in order."""

    def f(point: Array) -> tuple[float, Array]:
        at = torch.from_numpy(point).reshape(x.shape).requires_grad_()
        loss = nn.functional.cross_entropy(model(at), y)
        (slope,) = torch.autograd.grad(loss, at)
        return loss.item(), slope.numpy().reshape(-1)

    def project(point: Array) -> Array:
        return clean + nearest(point - clean, clean, norm, eps, *BOX[norm])

    def unit(slope: Array) -> Array:
        return np.sign(slope) if norm == "linf" else np.asarray(slope / np.linalg.norm(slope))

    clean = x.numpy().reshape(-1)
    w, p, gap = [0], 0.22, 0.22
    while p < 1:
        w.append(math.ceil(round(p * steps, 9)))
        gap = max(gap - 0.03, 0.06)
        p += gap
    eta, before, point = 2 * eps, start.numpy().reshape(-1), start.numpy().reshape(-1)
    points, (loss, slope) = [point], f(point)
    top, top_loss, top_slope, rose, etas, tops = point, loss, slope, [False], [eta], [math.nan]
    for k in range(1, steps + 1):
        z = project(point + eta * unit(slope))
        a = 1.0 if k == 1 else 0.75
        point, before = project(point + a * (z - point) + (1 - a) * (point - before)), point
        points.append(point)
        from_loss, (loss, slope) = loss, f(point)
        rose.append(loss > from_loss)
        if loss > top_loss:
            top, top_loss, top_slope = point, loss, slope
        if k in w[1:]:
            j = w.index(k)
            first = sum(rose[w[j - 1] + 1 : k + 1]) <= 0.75 * (k - w[j - 1])
            second = len(etas) > 1 and etas[-1] == etas[-2] and top_loss == tops[-1]
            if first or second:
                eta, point, loss, slope = eta / 2, top, top_loss, top_slope
            etas.append(eta)
            tops.append(top_loss)
    assert len(set(etas)) > 3, "the step size is meant to change"
    assert norm == "linf" or len(set(etas)) < len(w), "and not every time"
    return points


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_visits_the_points_of_algorithm_1(norm: Norm) -> None:
    # A radius at which each sample stays right, so that no run ends early.
    low, high = BOX[norm]
    threat, steps = ThreatModel(norm=norm, eps={"linf": 0.06, "l2": 0.15}[norm], low=low, high=high), 60
    model, x, y = samples(30)
    found = APGD(steps=steps).run(model, x, y, threat, key=Key(3))
    held = (~found.success).nonzero()[:, 0][:3]
    assert len(held) == 3
    for row in held.tolist():
        one = slice(row, row + 1)
        model.seen.clear()
        best = APGD(steps=steps)(model, x[one], y[one], threat, index=torch.tensor([row]), key=Key(3))
        visited = [point.numpy().reshape(-1) for point in model.seen]
        start = threat.random_start(x[one], torch.tensor([row]), Key(3).fold("restart", 0))
        expected = naive(model, x[one], y[one], norm, threat.eps, steps, start)
        assert len(visited) == len(expected) == steps + 1
        np.testing.assert_allclose(np.stack(visited), np.stack(expected), atol=1e-8)
        losses = [
            nn.functional.cross_entropy(model(p.reshape(x[one].shape)), y[one]).item()
            for p in map(torch.from_numpy, expected)
        ]
        np.testing.assert_allclose(best.numpy().reshape(-1), expected[int(np.argmax(losses))], atol=1e-8)


def naive_l1(model: nn.Module, x: Tensor, y: Tensor, eps: float, steps: int, start: Tensor) -> list[Array]:
    """Algorithm 1 of Croce and Hein (2021) for one sample: every point it visits, in order."""

    def f(point: Array) -> tuple[float, Array]:
        at = torch.from_numpy(point).reshape(x.shape).requires_grad_()
        loss = nn.functional.cross_entropy(model(at), y)
        (slope,) = torch.autograd.grad(loss, at)
        return loss.item(), slope.numpy().reshape(-1)

    clean, point = x.numpy().reshape(-1), start.numpy().reshape(-1)
    eta, k, changed = eps, max(int(0.2 * len(clean)), 1), len(clean)
    points, (loss, slope) = [point], f(point)
    top, top_loss, top_slope = point, loss, slope
    for step in range(1, steps + 1):
        able = [i for i in range(len(clean)) if (point[i] < 1 if slope[i] > 0 else point[i] > 0)]
        able = sorted(able, key=lambda i: -abs(slope[i]))[:k]
        move = np.zeros_like(clean)
        move[able] = np.sign(slope[able]) * eta / max(len(able), 1)
        point = clean + nearest(point + move - clean, clean, "l1", eps, 0.0, 1.0)
        points.append(point)
        loss, slope = f(point)
        if loss > top_loss:
            top, top_loss, top_slope = point, loss, slope
        if step % max(int(0.04 * steps), 1) == 0:
            now = int((np.abs(top - clean) > 1e-12).sum())
            k = max(int(now / 1.5), 1)
            if now / changed < 0.95:
                eta, point, slope = eps, top, top_slope
            else:
                eta = max(eta / 1.5, eps / 10)
            changed = now
    return points


def test_visits_the_points_of_the_sparse_algorithm() -> None:
    threat, steps = ThreatModel(norm="l1", eps=0.4), 50
    model, x, y = samples(30)
    found = APGD(steps=steps).run(model, x, y, threat, key=Key(3))
    held = (~found.success).nonzero()[:, 0][:3]
    assert len(held) == 3
    for row in held.tolist():
        one = slice(row, row + 1)
        model.seen.clear()
        APGD(steps=steps)(model, x[one], y[one], threat, index=torch.tensor([row]), key=Key(3))
        visited = [point.numpy().reshape(-1) for point in model.seen]
        start = threat.random_start(x[one], torch.tensor([row]), Key(3).fold("restart", 0))
        expected = naive_l1(model, x[one], y[one], threat.eps, steps, start)
        np.testing.assert_allclose(np.stack(visited), np.stack(expected), atol=1e-9)


@every_norm
def test_at_least_as_strong_as_pgd(norm: Norm) -> None:
    model, x, y = samples(60, curve=3.0)
    threat = ThreatModel(norm=norm, eps={"linf": 0.05, "l2": 0.15, "l1": 0.4}[norm])
    pgd = PGD(steps=20, loss="margin").run(model, x, y, threat).success.sum()
    assert 10 < int(pgd) < 50
    found = APGD(steps=20, loss="margin").run(model, x, y, threat).success.sum()
    every = APGD(steps=20, loss="targeted-margin").run(model, x, y, threat).success.sum()
    assert int(found) >= int(pgd)
    assert int(every) >= int(found)


@every_norm
@pytest.mark.parametrize(
    ("candidates", "expected"), [(None, [1, 2, 3]), (1, [1]), (2, [1, 2]), (3, [3, 1, 2]), (9, [3, 1, 2])]
)
def test_the_nearest_boundary_comes_first(norm: Norm, candidates: int | None, expected: list[int]) -> None:
    """Logits (0, x_0 - 1, x_1 - 2, 8 x_2 - 7): each class has a pixel of its own, and only its target's is raised. From
    1/2 in each, their boundaries are 1/2, 3/2 and 3/8 away in any norm."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3, 4))
    model[1].weight.data = torch.eye(4)[:, 1:] * torch.tensor([1.0, 1, 8])
    model[1].bias.data = torch.tensor([0.0, -1, -2, -7])
    x, threat = torch.full((1, 3, 1, 1), 0.5), ThreatModel(norm=norm, eps=0.25)
    climbed = []

    class Noted(MultiTargeted):
        def _targets(self, problem: Any) -> Tensor:
            climbed.append(super()._targets(problem)[0].tolist())
            return torch.tensor([climbed[-1][:1]])

    x_adv = Noted(steps=10, candidates=candidates)(model, x, torch.tensor([0]), threat)
    assert climbed == [expected]
    assert int((x_adv - x).flatten().argmax()) == expected[0] - 1
    assert 0.2 < float((x_adv - x).max()) < 0.2501


class TestCost:
    @every_norm
    def test_one_pass_a_step(self, norm: Norm) -> None:
        model, x, y = samples()
        threat = ThreatModel(norm=norm, eps=1e-6)  # nobody falls
        for attack, forwards, backwards in (
            (APGD(steps=9), 10, 9),
            (APGD(steps=9, restarts=2), 20, 18),
            (APGD(steps=9, start="diversified"), 12, 11),
            (APGD(steps=9, loss="targeted-dlr"), 1 + 3 * 10, 27),
            (APGD(steps=9, loss="targeted-dlr", targets=2), 1 + 2 * 10, 18),
            (MultiTargeted(steps=9), 1 + 3 * 10, 27),
            (MultiTargeted(steps=9, targets=1, restarts=2), 1 + 2 * 10, 18),
            (MultiTargeted(steps=9, candidates=2), 2 + 2 * 10, 2 + 18),
            (MultiTargeted(steps=9, candidates=9, targets=1), 2 + 10, 3 + 9),
        ):
            found = attack.run(model, x, y, threat)
            assert not found.success.any()
            assert found.forwards.tolist() == [forwards] * 8
            assert found.backwards.tolist() == [backwards] * 8

    @pytest.mark.parametrize("attack", [APGD(steps=9, loss="targeted-dlr"), MultiTargeted(steps=9)], ids=str)
    def test_what_is_already_wrong_costs_the_ranking_alone(self, attack: Any) -> None:
        model, x, y = samples()
        found = attack.run(model, x, (y + 1) % 4, ThreatModel(eps=0.1))
        assert found.forwards.tolist() == [1] * 8
        assert found.backwards.tolist() == [0] * 8
        assert torch.equal(found.x_adv, x)

    def test_the_fallen_leave(self) -> None:
        model, x, y = samples(30)
        found = APGD(steps=20).run(model, x, y, ThreatModel(eps=0.06))
        assert 0 < int(found.success.sum()) < 30
        assert (found.forwards[found.success] < 21).any()
        assert (found.forwards[~found.success] == 21).all()


@pytest.mark.parametrize(
    ("attack", "norm"),
    [
        (APGD(steps=12, restarts=2), "linf"),
        (APGD(steps=8, loss="targeted-dlr"), "l2"),
        (APGD(steps=8, loss="targeted-dlr", together=True), "l2"),
        (APGD(steps=8, loss="targeted-dlr", together=True), "l1"),
    ],
    ids=str,
)
def test_alone_or_in_a_batch(norm: Norm, attack: Any) -> None:
    model, x, y = samples()
    threat, index = ThreatModel(norm=norm, eps=EPS[norm] / 2), torch.tensor([30, 4, 77, 12, 9, 1, 5, 600])
    whole = attack.run(model, x, y, threat, index=index, key=Key(2))
    assert threat.contains(whole.x_adv, x).all()
    assert torch.equal(model(whole.x_adv).argmax(dim=1) != y, whole.success)
    for row in range(len(x)):
        one = slice(row, row + 1)
        alone = attack.run(model, x[one], y[one], threat, index=index[one], key=Key(2))
        assert torch.equal(alone.x_adv, whole.x_adv[one])
        assert torch.equal(alone.forwards, whole.forwards[one])


@every_norm
@pytest.mark.parametrize("start", ["uniform", "diversified"])
def test_targets_together_break_what_they_break_in_turn(norm: Norm, start: Any) -> None:
    model, x, y = samples(12)
    threat = ThreatModel(norm=norm, eps=EPS[norm] / 3)
    turn, together = (
        APGD(steps=8, loss="targeted-dlr", restarts=2, start=start, together=on).run(model, x, y, threat, key=Key(2))
        for on in (False, True)
    )
    assert 0 < int(turn.success.sum()) < len(x)
    assert torch.equal(turn.success, together.success)
    stood = ~turn.success
    assert torch.equal(turn.x_adv[stood], together.x_adv[stood])
    assert torch.equal(turn.forwards[stood], together.forwards[stood])
    assert torch.equal(turn.backwards[stood], together.backwards[stood])
    assert torch.equal(model(together.x_adv).argmax(dim=1) != y, together.success)
    assert threat.contains(together.x_adv, x).all()


def test_together_asks_in_larger_batches() -> None:
    model, x, y = samples(2)
    APGD(steps=5, loss="targeted-dlr", together=True).run(model, x, y, ThreatModel(eps=1e-4))
    assert [len(part) for part in model.seen[-6:]] == [6] * 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "kl"}, "expected one of cross-entropy, dlr, margin"),
        ({"loss": "crossentropy"}, "expected one of cross-entropy, dlr, margin"),
        ({"targets": 3}, "targets are for the targeted losses"),
        ({"steps": 0}, "greater than 0"),
        ({"rho": 1.0}, "less than 1"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        APGD(**options)


class TestMutations:
    """The oracles notice a broken attack."""

    def checks(self, norm: str) -> list[Callable[[], None]]:
        return [
            partial(check_rival, APGD(steps=15), norm, 3),
            partial(check_budget, APGD(steps=15, loss="targeted-dlr"), norm, 3),
            partial(check_budget, MultiTargeted(steps=12, step_size=0.5), norm, 3),
        ]

    def green_then_red(self, checks: list[Callable[[], None]], patch: Callable[[], None]) -> None:
        for check in checks:
            check()
        patch()
        for check in checks:
            assert red(check), f"{check}: the break went unnoticed"

    @every_norm
    def test_gradient_sign_flipped(self, monkeypatch: pytest.MonkeyPatch, norm: Norm) -> None:
        def flipped(*args: Any, **options: Any) -> Tensor:
            return -gradient(*args, **options)

        self.green_then_red(self.checks(norm), lambda: monkeypatch.setattr(Problem, "gradient", flipped))

    @pytest.mark.parametrize("norm", ["l2"])
    def test_gradient_of_nothing(self, monkeypatch: pytest.MonkeyPatch, norm: Norm) -> None:
        def zero(*args: Any, **options: Any) -> Tensor:
            return 0 * gradient(*args, **options)

        self.green_then_red(self.checks(norm), lambda: monkeypatch.setattr(Problem, "gradient", zero))

    @pytest.mark.parametrize("norm", ["linf"])
    def test_loss_constant(self, monkeypatch: pytest.MonkeyPatch, norm: Norm) -> None:
        def constant(name: str, logits: Tensor, y: Tensor, **rest: Any) -> Tensor:
            return 0 * logits.sum(dim=1)

        patch = partial(monkeypatch.setattr, apgd_module, "adversarial_loss", constant)
        self.green_then_red(self.checks(norm)[:2], patch)

    @pytest.mark.parametrize("norm", ["l1"])
    def test_step_of_zero(self, monkeypatch: pytest.MonkeyPatch, norm: Norm) -> None:
        def stay(state: Any, threat: ThreatModel, first: bool) -> None:
            pass

        self.green_then_red(self.checks(norm)[:2], lambda: monkeypatch.setattr(apgd_module._State, "move", stay))

    @pytest.mark.parametrize("norm", ["linf"])
    def test_one_target_only(self, monkeypatch: pytest.MonkeyPatch, norm: Norm) -> None:
        # The class of the highest logit is not always the nearest one.
        check = partial(check_budget, APGD(steps=15, loss="targeted-dlr"), norm, 10)
        self.green_then_red([check], lambda: monkeypatch.setattr(apgd_module, "TARGETS", 1))

    @pytest.mark.parametrize(("name", "value"), [("MOMENTUM", 1.0), ("FIRST", 30), ("SHORTER", 0), ("SHORTEST", 20)])
    def test_constants_of_algorithm_1(self, monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
        monkeypatch.setattr(apgd_module, name, value)
        assert red(partial(test_visits_the_points_of_algorithm_1, "linf"))

    @pytest.mark.parametrize(("name", "value"), [("SPARSITY", 0.5), ("SPARSER", 3.0), ("LOOK", 10), ("LEAST", 1.0)])
    def test_constants_of_the_sparse_algorithm(self, monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
        monkeypatch.setattr(apgd_module, name, value)
        assert red(test_visits_the_points_of_the_sparse_algorithm)

    def test_no_return_to_the_best_point(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def ignore(state: Any, which: Tensor) -> None:
            pass

        check = partial(test_visits_the_points_of_algorithm_1, "linf")
        self.green_then_red([check], lambda: monkeypatch.setattr(apgd_module._State, "_return", ignore))

    def test_pixels_at_their_bounds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def check() -> None:
            # The first pixel weighs most and is at its bound: all of the radius belongs to the second.
            weight = torch.tensor([[0.0, 0.0, 0.0, 0.0], [9.0, 2.0, 1.9, 1.8]], dtype=torch.float64)
            model = LinearClassifier(weight, torch.tensor([99.0, 0.0], dtype=torch.float64))
            x = torch.tensor([1.0, 0.3, 0.3, 0.3], dtype=torch.float64).reshape(1, 1, 2, 2)
            x_adv = APGD(steps=20, loss="margin")(model, x, torch.tensor([0]), ThreatModel(norm="l1", eps=0.5))
            np.testing.assert_allclose((x_adv - x).flatten(), [0.0, 0.5, 0.0, 0.0], atol=1e-9)

        def blind(state: Any, threat: ThreatModel) -> Tensor:
            return sparse(state, ThreatModel(norm="l1", eps=threat.eps, low=-1e3, high=1e3))

        sparse = apgd_module._State._sparse
        self.green_then_red([check], lambda: monkeypatch.setattr(apgd_module._State, "_sparse", blind))
