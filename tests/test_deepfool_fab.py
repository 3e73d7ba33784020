"""DeepFool and FAB: geometry against solvers, updates against naive loops, distances against closed forms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import deepfool as deepfool_module
from steelman.attacks import fab as fab_module
from steelman.attacks import hyperplane
from steelman.attacks.deepfool import DeepFool
from steelman.attacks.engine import Found, Problem, Search
from steelman.attacks.fab import FAB
from steelman.attacks.hyperplane import step_onto
from steelman.errors import UserError
from steelman.rng import Key
from steelman.threat import Norm, ThreatModel
from tests.oracles import (
    DUALS,
    ORDERS,
    Array,
    LinearClassifier,
    _reach,
    check_budget,
    check_budget_in_box,
    check_distances,
    check_distances_in_box,
    linear_problem,
    rand,
    randn,
    random_problem,
    red,
    sizes,
)

NORMS: tuple[Norm, ...] = ("linf", "l2", "l1")
EPS = {"linf": 0.1, "l2": 0.4, "l1": 1.0}
ATTACKS: dict[str, Search] = {
    "deepfool": DeepFool(),
    "fab": FAB(steps=4),
    "fab-t": FAB(steps=4, targets=9),
    "fab-t, together": FAB(steps=4, targets=9, together=True),
    "fab, restarted": FAB(steps=3, restarts=2),
}
# DeepFool's overshoot is 2% of the distance, to the last digit.
FACTOR = {name: 1.02 + 1e-9 if name == "deepfool" else 1.005 for name in ATTACKS}
every_norm = pytest.mark.parametrize("norm", NORMS)
every_attack = pytest.mark.parametrize("name", list(ATTACKS))
# Each attack in each norm, with another number of classes in each.
SQUARE = [(name, norm, (2, 3, 10)[(i + j) % 3]) for i, name in enumerate(ATTACKS) for j, norm in enumerate(NORMS)]


class Curved(nn.Module):
    """z = B tanh(A x), whose gradients are short to write down, and which knows no batch in its last bit."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(2 * randn(10, 12, seed=1)), nn.Parameter(randn(classes, 10, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh((x.flatten(1)[:, None, :] * self.a.to(x)).sum(dim=-1))
        return (h[:, None, :] * self.b.to(x)).sum(dim=-1)


def samples(n: int = 8, classes: int = 4) -> tuple[Curved, Tensor, Tensor]:
    model, x = Curved(classes), rand(n, 1, 3, 4, seed=3)
    return model, x, model(x).argmax(dim=1)


# --- the geometry ---------------------------------------------------------------------------------


def check_step(norm: Norm) -> None:
    """The shortest step onto a hyperplane within the box: its length is the solver's, and it gets there."""
    for seed in range(2):
        points = (0.5 + 0.5 * randn(6, 1, 2, 5, seed=seed)).clamp(0, 1)  # many pixels start at a bound
        normals = randn(6, 1, 2, 5, seed=seed + 20)
        normals[:, :, 0, :2] = 0.0
        normals[0, 0, 1] = 1.5  # ties
        most = torch.where(normals > 0, normals * (1 - points), -normals * points).flatten(1).sum(dim=1)
        least = torch.where(normals > 0, -normals * points, normals * (1 - points)).flatten(1).sum(dim=1)
        share = rand(6, seed=seed + 40)
        for gaps in (share * most, share * least, 0.999 * most, 0.0 * most):
            r = step_onto(points, normals, gaps, ThreatModel(norm=norm, eps=1.0))
            moved = points + r
            assert float(moved.min()) > -1e-12
            assert float(moved.max()) < 1 + 1e-12
            assert (r[normals == 0] == 0).all()
            assert torch.allclose((normals * r).flatten(1).sum(dim=1), gaps, atol=1e-9)
            for row, length in enumerate(sizes(r, norm)):
                x, w, gap = points[row].flatten().numpy(), normals[row].flatten().numpy(), float(gaps[row])
                sign = 1.0 if gap >= 0 else -1.0
                expected = _reach(sign * w, abs(gap) * (1 - 1e-12), 0.0 - x, 1.0 - x, norm)
                assert length == pytest.approx(expected, rel=1e-6, abs=1e-9)


class TestStepOntoHyperplane:
    @every_norm
    def test_shortest_by_the_solver(self, norm: Norm) -> None:
        check_step(norm)

    @every_norm
    def test_without_a_box_it_is_the_published_step(self, norm: Norm) -> None:
        w, gap = randn(5, 7), randn(5, seed=1)
        r = step_onto(rand(5, 7), w, gap, ThreatModel(norm=norm, eps=1.0, low=-100.0, high=100.0))
        dual = np.linalg.norm(w.numpy(), ord=DUALS[norm], axis=1)
        assert sizes(r, norm) == pytest.approx(np.abs(gap.numpy()) / dual, rel=1e-12)
        if norm == "linf":
            assert torch.allclose(r, (gap / w.abs().sum(dim=1))[:, None] * w.sign())
        if norm == "l2":
            assert torch.allclose(r, (gap / w.square().sum(dim=1))[:, None] * w)

    @every_norm
    def test_out_of_reach_is_the_nearest_corner(self, norm: Norm) -> None:
        x, w = rand(6, 8), randn(6, 8, seed=1)
        w[:, 3] = 0
        for sign in (1.0, -1.0):
            r = step_onto(x, w, torch.full((6,), sign * 1e3, dtype=x.dtype), ThreatModel(norm=norm, eps=1.0))
            corner = torch.where(sign * w > 0, 1.0, 0.0).where(w != 0, x)
            assert torch.allclose(x + r, corner, atol=1e-15)

    @every_norm
    def test_nowhere_to_go(self, norm: Norm) -> None:
        threat = ThreatModel(norm=norm, eps=1.0)
        assert (step_onto(rand(3, 4), torch.zeros(3, 4, dtype=torch.float64), randn(3), threat) == 0).all()
        assert (step_onto(rand(3, 4), randn(3, 4), torch.zeros(3, dtype=torch.float64), threat) == 0).all()
        assert step_onto(rand(0, 4), randn(0, 4), randn(0), threat).shape == (0, 4)
        assert step_onto(rand(3, 0), randn(3, 0), randn(3), threat).shape == (3, 0)

    @every_norm
    @pytest.mark.parametrize("scale", [1e-30, 1e30])
    def test_a_tiny_or_huge_gradient_is_as_good_as_any(self, norm: Norm, scale: float) -> None:
        x, w, gap = rand(6, 8), randn(6, 8, seed=1), randn(6, seed=2)
        threat = ThreatModel(norm=norm, eps=1.0)
        expected = step_onto(x, w, gap, threat)
        got = step_onto(x.float(), (scale * w).float(), (scale * gap).float(), threat)
        assert got.dtype == torch.float32
        assert torch.allclose(got.double(), expected, atol=1e-5)

    @every_norm
    def test_a_row_knows_nothing_of_the_others(self, norm: Norm) -> None:
        x, w, gap = rand(9, 40).clamp(0.2, 0.9), randn(9, 40, seed=1), 6 * randn(9, seed=2)
        threat = ThreatModel(norm=norm, eps=0.7, low=0.2, high=0.9)
        whole = step_onto(x, w, gap, threat)
        for row in range(9):
            one = slice(row, row + 1)
            assert torch.equal(step_onto(x[one], w[one], gap[one], threat), whole[one])


# --- linear models --------------------------------------------------------------------------------


class TestLinearOracle:
    @pytest.mark.parametrize(("name", "norm", "classes"), SQUARE)
    def test_distance_is_the_closed_form(self, name: str, norm: Norm, classes: int) -> None:
        check_distances(ATTACKS[name], norm, classes, FACTOR[name])

    @every_attack
    @every_norm
    def test_distance_is_the_solvers_in_the_box(self, name: str, norm: Norm) -> None:
        check_distances_in_box(ATTACKS[name], norm, FACTOR[name])

    @pytest.mark.parametrize(("name", "norm", "classes"), SQUARE)
    def test_success_exactly_where_eps_exceeds_the_distance(self, name: str, norm: Norm, classes: int) -> None:
        check_budget(ATTACKS[name], norm, classes, slack=0.021 if name == "deepfool" else 0.006)

    @pytest.mark.parametrize("name", ["deepfool", "fab"])
    @every_norm
    def test_success_in_the_box(self, name: str, norm: Norm) -> None:
        check_budget_in_box(ATTACKS[name], norm, slack=0.021 if name == "deepfool" else 0.006)

    @every_norm
    def test_a_target_is_reached_at_its_own_distance(self, norm: Norm) -> None:
        """Of three classes, the boundary of the one that is asked for, and never the nearer other one."""
        problem = linear_problem(2, n=4)
        far = 2 * problem.model.weight.detach()[1:] - problem.model.weight.detach()[:1]
        model = LinearClassifier(
            torch.cat((problem.model.weight.detach(), far)), torch.tensor([0.0, 0.0, -0.7], dtype=torch.float64)
        )
        z = model(problem.x).detach()
        y, w = z.argmax(dim=1), model.weight.detach()
        threat = ThreatModel(norm=norm, eps=0.1, low=-100.0, high=100.0)
        for goal in (1, 2):
            # A class is entered where it passes all others.
            others = [k for k in range(3) if k != goal]
            steps = [(z[:, k] - z[:, goal]) / torch.linalg.vector_norm(w[goal] - w[k], ord=DUALS[norm]) for k in others]
            expected = torch.stack(steps).amax(dim=0).numpy()
            for attack in (DeepFool(), FAB(steps=10), FAB(steps=10, targets=2)):
                target = torch.full_like(y, goal)
                found = attack.run(model, problem.x, y, threat, target=target, distances=True)
                assert found.nearest is not None
                assert found.distance is not None
                assert torch.equal(model(found.nearest).argmax(dim=1), target)
                assert (found.distance.numpy() / expected < 1.021).all()
                assert (found.distance.numpy() / expected > 1 - 1e-9).all()

    def test_few_candidates_see_few_classes(self) -> None:
        """The nearest boundary belongs to a class of low logit and steep weights: two candidates do not see it."""
        weight = torch.tensor([[0.0, 0.0], [0.1, 0.0], [0.0, 9.0]], dtype=torch.float64)
        model = LinearClassifier(weight, torch.tensor([1.0, 0.95, -1.0], dtype=torch.float64))
        x, y, threat = torch.zeros(1, 1, 1, 2, dtype=torch.float64), torch.tensor([0]), ThreatModel(norm="l2", eps=0.1)
        for candidates, expected in ((2, 0.5), (3, 2 / 9), (None, 2 / 9)):
            found = DeepFool(candidates=candidates).run(model, x, y, threat, distances=True)
            assert float(_distance(found)) == pytest.approx(1.02 * expected)
            assert int(found.backwards) == (candidates or 3) - 1


# --- the published updates, one sample at a time --------------------------------------------------


@dataclasses.dataclass
class Naive:
    """The two algorithms for one sample, in NumPy; the box by bisection."""

    model: Curved
    norm: str
    low: float = 0.0
    high: float = 1.0

    def logits(self, x: Array) -> Array:
        return np.asarray(self.model.b.detach().numpy() @ np.tanh(self.model.a.detach().numpy() @ x))

    def boundary(self, x: Array, y: int, rivals: list[int]) -> tuple[float, Array]:
        a, b = self.model.a.detach().numpy(), self.model.b.detach().numpy()
        bend = 1 - np.tanh(a @ x) ** 2
        found = []
        for k in rivals:
            w = a.T @ (bend * (b[k] - b[y]))
            lead = float(self.logits(x)[k] - self.logits(x)[y])
            found.append((abs(lead) / float(np.linalg.norm(w, ord=DUALS[self.norm])), lead, w))
        _, lead, w = min(found, key=lambda one: one[0])
        return lead, w

    def onto(self, x: Array, w: Array, gap: float) -> Array:
        """Bisection on how far each pixel may go; in l1 on how steep it has to be to go at all."""
        w, gap = (w, gap) if gap >= 0 else (-w, -gap)
        room = np.where(w > 0, self.high - x, x - self.low)
        if self.norm == "l1":
            r = np.zeros_like(x)
            for i in np.argsort(-np.abs(w)):
                r[i] = np.sign(w[i]) * min(room[i], max(0.0, gap - float(w @ r)) / abs(w[i]))
            return r

        def at(t: float) -> Array:
            size = np.full_like(x, t) if self.norm == "linf" else t * np.abs(w)
            return np.asarray(np.sign(w) * np.minimum(size, room))

        less, more = 0.0, 1e4
        for _ in range(80):
            middle = (less + more) / 2
            less, more = (middle, more) if w @ at(middle) < gap else (less, middle)
        return at(more)

    def size(self, r: Array) -> float:
        return float(np.linalg.norm(r, ord=ORDERS[self.norm]))

    def deepfool(self, x: Array, y: int, steps: int) -> Array:
        u = x
        for _ in range(steps):
            if self.logits(u).argmax() != y:
                break
            lead, w = self.boundary(u, y, [k for k in range(len(self.logits(u))) if k != y])
            u = np.clip(u + 1.02 * self.onto(u, w, -lead), self.low, self.high)
        return u

    def fab(self, x: Array, y: int, steps: int, rivals: list[int]) -> tuple[float, Array]:
        u, best, nearest = x, math.inf, x
        for _ in range(steps):
            lead, w = self.boundary(u, y, rivals)
            here, there = self.onto(u, w, -lead), self.onto(x, w, -lead + float(w @ (u - x)))
            alpha = min(self.size(here) / (self.size(here) + self.size(there)), 0.1)
            u = np.clip((1 - alpha) * (u + 1.05 * here) + alpha * (x + 1.05 * there), self.low, self.high)
            if self.logits(u).argmax() != y:
                if self.size(u - x) < best:
                    best, nearest = self.size(u - x), u
                u = x + 0.9 * (u - x)
        return best, nearest


class TestNaiveLoop:
    @every_norm
    def test_deepfool(self, norm: Norm) -> None:
        model, x, y = samples()
        naive = Naive(model, norm)
        found = DeepFool().run(model, x, y, ThreatModel(norm=norm, eps=0.1), distances=True)
        assert found.nearest is not None
        assert int(found.forwards.max()) > 3  # more than one step somewhere
        for row in range(len(x)):
            expected = naive.deepfool(x[row].flatten().numpy(), int(y[row]), 50)
            np.testing.assert_allclose(found.nearest[row].flatten().numpy(), expected, atol=1e-9)

    @every_norm
    @pytest.mark.parametrize("targets", [None, 2])
    def test_fab(self, norm: Norm, targets: int | None) -> None:
        check_fab(FAB(steps=8, targets=targets, final_search=0), norm)


def check_fab(attack: FAB, norm: Norm) -> None:
    """The nearest point is the naive loop's, which has the published constants."""
    model, x, y = samples(5)
    naive = Naive(model, norm)
    found = attack.run(model, x, y, ThreatModel(norm=norm, eps=0.1), distances=True)
    assert found.nearest is not None
    for row in range(len(x)):
        one = x[row].flatten().numpy()
        ranked = [int(k) for k in np.argsort(-naive.logits(one)) if k != int(y[row])]
        runs = [ranked] if attack.targets is None else [[k] for k in ranked[: attack.targets]]
        best, expected = min((naive.fab(one, int(y[row]), attack.steps, run) for run in runs), key=lambda pair: pair[0])
        assert float(_distance(found)[row]) == pytest.approx(best, rel=1e-8)
        np.testing.assert_allclose(found.nearest[row].flatten().numpy(), expected, atol=1e-8)


def _distance(found: Found) -> Tensor:
    assert found.distance is not None
    return found.distance


# --- a curved model -------------------------------------------------------------------------------


class TestCurvedModel:
    @every_norm
    def test_fab_is_nearer_than_deepfool(self, norm: Norm) -> None:
        model, x, y = samples(40)
        threat = ThreatModel(norm=norm, eps=0.1)
        found = {a: a.run(model, x, y, threat, distances=True) for a in (DeepFool(), FAB(steps=30))}
        for one in found.values():
            assert one.nearest is not None
            assert (model(one.nearest).argmax(dim=1) != y).all()
        fool, fab = (_distance(one) for one in found.values())
        assert (fab <= 1.001 * fool).double().mean() >= 0.95
        assert float(fab.mean()) < 0.97 * float(fool.mean())

    @every_norm
    def test_final_search_and_restarts_only_help(self, norm: Norm) -> None:
        model, x, y = samples(20)
        run = partial(Search.run, model=model, x=x, y=y, threat=ThreatModel(norm=norm, eps=0.1), distances=True)
        plain = _distance(run(FAB(steps=5, final_search=0)))
        searched, restarted = _distance(run(FAB(steps=5))), _distance(run(FAB(steps=5, restarts=3, final_search=0)))
        assert (searched <= plain).all()
        finite = plain.isfinite()
        assert float(searched[finite].mean()) < 0.999 * float(plain[finite].mean())
        assert (restarted <= plain).all()
        assert (restarted < plain).any()

    @every_norm
    def test_a_restart_begins_within_half_the_radius(self, monkeypatch: pytest.MonkeyPatch, norm: Norm) -> None:
        model, x, y = samples(20)
        begun: list[Tensor] = []
        begin = FAB._begin

        def seen(self: FAB, problem: Problem, rows: Tensor, place: int, restart: int) -> Tensor:
            begun.append(begin(self, problem, rows, place, restart) - problem.x[rows])
            if problem.distances and restart:
                assert (sizes(begun[-1], norm) <= problem.distance[rows].numpy() / 2 + 1e-12).all()
            return begin(self, problem, rows, place, restart)

        monkeypatch.setattr(FAB, "_begin", seen)
        eps = EPS[norm] / 100
        FAB(steps=1, restarts=3).run(model, x, y, ThreatModel(norm=norm, eps=eps))
        assert len(begun) == 3
        assert (begun[0] == 0).all()
        assert not torch.equal(begun[1], begun[2])
        for one in begun[1:]:
            assert (sizes(one, norm) <= eps / 2 + 1e-12).all()
            assert (sizes(one, norm) > 0).all()
        FAB(steps=1, restarts=2).run(model, x, y, ThreatModel(norm=norm, eps=eps), distances=True)


# --- what it costs --------------------------------------------------------------------------------


class TestCost:
    @every_norm
    def test_passes_as_documented(self, norm: Norm) -> None:
        model, x, y = samples()
        run = partial(Search.run, model=model, x=x, y=y, threat=ThreatModel(norm=norm, eps=0.1), distances=True)
        found = run(DeepFool())
        assert torch.equal(found.backwards, 3 * (found.forwards - 1) // 2)
        assert torch.equal(run(DeepFool(candidates=2)).backwards, (run(DeepFool(candidates=2)).forwards - 1) // 2)
        for attack, forwards, backwards in (
            (FAB(steps=4, final_search=0), 1 + 2 * 4, 3 * 4),
            (FAB(steps=4, final_search=0, restarts=2), 1 + 2 * 8, 3 * 8),
            (FAB(steps=4, final_search=0, targets=2), 1 + 2 * 8, 8),
            (FAB(steps=4, final_search=0, targets=50, restarts=2), 1 + 2 * 24, 24),
            (FAB(steps=10, final_search=3), 1 + 2 * 10, 3 * 10),
        ):
            found = run(attack)
            searched = attack.final_search * _distance(found).isfinite()  # where there is something to search for
            assert torch.equal(found.forwards, forwards + searched)
            assert found.backwards.tolist() == [backwards] * 8
        for attack in (FAB(steps=4, final_search=0), FAB(steps=4, final_search=0, targets=3)):
            found = run(attack, target=(y + 1) % 4)
            assert found.forwards.tolist() == [9] * 8
            assert found.backwards.tolist() == [4] * 8

    @every_attack
    def test_the_counts_are_what_the_model_did(self, name: str) -> None:
        model, x, y = samples()
        seen = []
        model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
        found = ATTACKS[name].run(model, x, y, ThreatModel(norm="l2", eps=0.4))
        assert sum(seen) == int(found.forwards.sum())
        assert min(seen) < 8  # who has fallen is not computed any more
        assert found.success.any()

    @every_attack
    @every_norm
    def test_already_wrong_is_at_distance_zero_for_one_forward(self, name: str, norm: Norm) -> None:
        model, x, y = samples()
        wrong = torch.tensor([1, 4, 6])
        y[wrong] = (y[wrong] + 1) % 4
        for distances in (False, True):
            found = ATTACKS[name].run(model, x, y, ThreatModel(norm=norm, eps=0.1), distances=distances)
            assert _distance(found)[wrong].tolist() == [0.0] * 3
            assert found.success[wrong].all()
            assert found.forwards[wrong].tolist() == [1] * 3
            assert found.backwards[wrong].tolist() == [0] * 3
            assert torch.equal(found.x_adv[wrong], x[wrong])
            assert (_distance(found)[[0, 2, 3, 5, 7]] > 0).all()

    @every_attack
    @every_norm
    def test_nothing_found_is_infinitely_far(self, name: str, norm: Norm) -> None:
        class Constant(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return 0 * x.flatten(1)[:, :3] + torch.tensor([1.0, 0.0, 0.5]).to(x)

        x, y = rand(4, 1, 2, 3), torch.zeros(4, dtype=torch.int64)
        for distances in (False, True):
            found = ATTACKS[name].run(Constant(), x, y, ThreatModel(norm=norm, eps=0.1), distances=distances)
            assert _distance(found).tolist() == [math.inf] * 4
            assert not found.success.any()
            assert torch.equal(found.x_adv, x)
            if name == "deepfool":  # a step that does not move is not repeated
                assert found.forwards.tolist() == [2] * 4

    @every_norm
    def test_within_eps_leaves_at_once_unless_distances_are_asked_for(self, norm: Norm) -> None:
        problem = random_problem(3)
        threat = ThreatModel(norm=norm, eps=2 * float(problem.distances(norm).max()), low=-100.0, high=100.0)
        found = FAB(steps=5).run(problem.model, problem.x, problem.y, threat)
        assert found.forwards.tolist() == [3] * 6
        assert found.backwards.tolist() == [2] * 6
        assert found.success.all()
        nearer = FAB(steps=5).run(problem.model, problem.x, problem.y, threat, distances=True)
        assert (_distance(nearer) < _distance(found)).all()


# --- the contract ---------------------------------------------------------------------------------


@every_attack
@every_norm
class TestContract:
    def test_batch_size_order_and_surroundings_do_not_matter(self, name: str, norm: Norm) -> None:
        model, x, y = samples()
        before = x.clone()
        index, order = torch.tensor([30, 4, 77, 12, 9, 1, 5, 600]), torch.tensor([6, 0, 3, 7, 1, 2, 5, 4])
        run = partial(ATTACKS[name].run, model, threat=ThreatModel(norm=norm, eps=EPS[norm]), key=Key(2))
        for distances in (False, True):  # without them, samples leave, and those that stay change their rows
            whole = run(x=x, y=y, index=index, distances=distances)
            parts = [run(x=x[order], y=y[order], index=index[order], distances=distances)]
            with torch.no_grad():
                tracked = x.clone().requires_grad_()
                parts += [
                    run(x=tracked[[i]], y=y[[i]], index=index[[i]], distances=distances) for i in order[:3].tolist()
                ]
            assert torch.equal(parts[0].x_adv, whole.x_adv[order])
            assert torch.equal(torch.cat([part.x_adv for part in parts[1:]]), whole.x_adv[order[:3]])
            assert torch.equal(torch.cat([_distance(part) for part in parts[1:]]), _distance(whole)[order[:3]])
            assert torch.equal(torch.cat([part.forwards for part in parts[1:]]), whole.forwards[order[:3]])
        assert torch.equal(x, before)
        assert not whole.x_adv.requires_grad

    def test_distances_without_a_radius(self, name: str, norm: Norm) -> None:
        model, x, y = samples(classes=2)
        threat = ThreatModel(norm=norm, eps=0.0)
        assert (_distance(ATTACKS[name].run(model, x, y, threat, distances=True)) > 0).all()

    def test_infinite_derivatives_do_not_stop_it(self, name: str, norm: Norm) -> None:
        class Broken(LinearClassifier):
            def forward(self, x: Tensor) -> Tensor:
                first = x.flatten(1)[:, :1]
                return super().forward(x) + (first - first.detach()).sqrt()

        problem = linear_problem(3)
        model = Broken(problem.model.weight.detach(), problem.model.bias.detach())
        threat = ThreatModel(norm=norm, eps=2 * problem.distances(norm).max(), low=-100, high=100)
        x_adv = ATTACKS[name](model, problem.x, problem.y, threat)
        assert torch.isfinite(x_adv).all()
        assert (model(x_adv).argmax(dim=1) != problem.y).all()


@pytest.mark.parametrize(
    ("made", "options"),
    [
        *[(DeepFool, {"candidates": 1}), (DeepFool, {"overshoot": -0.1}), (DeepFool, {"steps": 0})],
        *[(FAB, {"beta": 0.0}), (FAB, {"eta": 0.9}), (FAB, {"alpha_max": 2}), (FAB, {"targets": 0})],
        *[(FAB, {"loss": "margin"}), (FAB, {"final_search": -1})],
    ],
)
def test_settings_that_make_no_sense(made: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        made(**options)


def test_defaults_are_the_published_ones() -> None:
    assert DeepFool() == DeepFool(steps=50, candidates=10, overshoot=0.02)
    assert FAB() == FAB(steps=100, restarts=1, targets=None, alpha_max=0.1, eta=1.05, beta=0.9, final_search=3)
    assert DeepFool.minimum_norm
    assert FAB.minimum_norm


# --- the tests bite -------------------------------------------------------------------------------


def green_then_red(check: Callable[[], None], patch: Callable[[], None]) -> None:
    check()
    patch()
    assert red(check), "the break went unnoticed"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Any], None]:
    """Replace a function of the geometry wherever it is used."""

    def replace(name: str, by: Any) -> None:
        for module in (hyperplane, deepfool_module, fab_module):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, by)

    return replace


@pytest.mark.parametrize("name", ["deepfool", "fab"])
@every_norm
class TestMutations:
    def check(self, name: str, norm: Norm, classes: int = 3) -> Callable[[], None]:
        return partial(check_distances, ATTACKS[name], norm, classes, FACTOR[name])

    def test_gradient_sign_flipped(self, monkeypatch: pytest.MonkeyPatch, name: str, norm: Norm) -> None:
        right = Problem.gradient
        flipped = lambda *args, **rest: -right(*args, **rest)  # noqa: E731
        green_then_red(self.check(name, norm), lambda: monkeypatch.setattr(Problem, "gradient", flipped))

    def test_step_of_zero(self, broken: Any, name: str, norm: Norm) -> None:
        green_then_red(self.check(name, norm), lambda: broken("step_onto", lambda points, *rest: 0 * points))

    def test_step_away_from_the_boundary(self, broken: Any, name: str, norm: Norm) -> None:
        away = lambda points, w, gap, threat: step_onto(points, w, -gap, threat)  # noqa: E731
        green_then_red(self.check(name, norm), lambda: broken("step_onto", away))

    def test_lead_constant(self, broken: Any, name: str, norm: Norm) -> None:
        right = hyperplane.leads
        green_then_red(self.check(name, norm), lambda: broken("leads", lambda *args: 0 * right(*args)))

    def test_step_of_another_norm(self, broken: Any, name: str, norm: Norm) -> None:
        other: dict[str, Norm] = {"linf": "l2", "l2": "l1", "l1": "linf"}

        def wrong(points: Tensor, w: Tensor, gap: Tensor, threat: ThreatModel) -> Tensor:
            return step_onto(points, w, gap, ThreatModel(norm=other[norm], eps=1.0, low=threat.low, high=threat.high))

        green_then_red(self.check(name, norm), lambda: broken("step_onto", wrong))

    def test_box_forgotten(self, broken: Any, name: str, norm: Norm) -> None:
        def blind(points: Tensor, w: Tensor, gap: Tensor, threat: ThreatModel) -> Tensor:
            return step_onto(points, w, gap, ThreatModel(norm=threat.norm, eps=1.0, low=-100.0, high=100.0))

        check = partial(check_distances_in_box, ATTACKS[name], norm, FACTOR[name])
        green_then_red(check, lambda: broken("step_onto", blind))


@pytest.mark.parametrize("name", ["deepfool", "fab"])
@every_norm
def test_wrong_class_noticed(broken: Any, name: str, norm: Norm) -> None:
    right = hyperplane.top_rivals
    check = partial(check_distances, ATTACKS[name], norm, 10, FACTOR[name])
    green_then_red(check, lambda: broken("top_rivals", lambda *args: right(*args)[:, -1:]))


@pytest.mark.parametrize("constant", [{"eta": 1.06}, {"beta": 0.85}, {"alpha_max": 0.0}])
@every_norm
def test_another_constant_noticed(norm: Norm, constant: dict[str, Any]) -> None:
    attack = FAB(steps=8, final_search=0)
    assert red(partial(check_fab, dataclasses.replace(attack, **constant), norm))


@pytest.mark.parametrize(("norm", "part"), [("linf", "_level"), ("l2", "_level"), ("l1", "_fill")])
def test_inexact_geometry_noticed(monkeypatch: pytest.MonkeyPatch, norm: Norm, part: str) -> None:
    right = getattr(hyperplane, part)
    off = lambda weight, room, *rest: 0.99 * right(weight, room, *rest)  # noqa: E731
    green_then_red(partial(check_step, norm), lambda: monkeypatch.setattr(hyperplane, part, off))


@every_norm
def test_targets_together_find_what_they_find_in_turn(norm: Norm) -> None:
    model, x, y = samples(12)
    threat = ThreatModel(norm=norm, eps=EPS[norm] / 3)
    for distances in (False, True):
        turn, together = (
            FAB(steps=6, targets=3, together=on).run(model, x, y, threat, key=Key(2), distances=distances)
            for on in (False, True)
        )
        assert 0 < int(turn.success.sum()) < len(x)
        assert torch.equal(turn.success, together.success)
        assert together.distance is not None
        assert turn.distance is not None
        stood = ~turn.success
        assert (together.distance[stood] <= turn.distance[stood] * (1 + 1e-6)).all()
        assert torch.equal(model(together.x_adv).argmax(dim=1) != y, together.success)
