"""Carlini and Wagner's attack: distances against the closed form and a solver, its steps against a naive loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from steelman.attacks import carlini_wagner as module
from steelman.attacks.carlini_wagner import CarliniWagner, adam, to_box, to_free
from steelman.attacks.engine import Problem
from steelman.errors import UserError
from steelman.rng import Key
from steelman.threat import ThreatModel
from tests.oracles import (
    LinearClassifier,
    LinearProblem,
    check_distances,
    check_distances_in_box,
    linear_problem,
    rand,
    randn,
    random_problem,
    red,
)

# The closed form needs a box that is not in the way, 200 wide: a rate of 1e-4 is 0.02 for images in [0, 1].
QUICK = CarliniWagner(steps=100, search_steps=5, lr=1e-4, c=0.1)
BOXED = CarliniWagner(steps=300, search_steps=6, lr=0.05, c=0.1)
WIDE = ThreatModel(norm="l2", eps=0.1, low=-100.0, high=100.0)


def run(attack: CarliniWagner, problem: LinearProblem, threat: ThreatModel = WIDE, **rest: Any) -> Any:
    return attack.run(problem.model, problem.x, problem.y, threat, **rest)


class TestDistances:
    @pytest.mark.parametrize("classes", [2, 3])
    def test_closed_form(self, classes: int) -> None:
        check_distances(QUICK, "l2", classes, factor=1.02)

    @pytest.mark.parametrize("classes", [3, 10])
    def test_closed_form_with_one_rival(self, classes: int) -> None:
        problem = linear_problem(classes, seed=classes)
        ratio = run(QUICK, problem, distances=True).distance.numpy() / problem.distances("l2")
        assert (ratio > 1 - 1e-9).all()
        assert (ratio < 1.03).all()

    def test_ten_equal_rivals(self) -> None:
        """The objective has a minimum at more than one class; the one found is exact for the class that it reached."""
        check_distances(QUICK, "l2", 10, factor=1.35)
        problem = random_problem(10, seed=10)
        found = run(QUICK, problem, distances=True)
        weight, z = problem.model.weight.detach(), problem.model(problem.x).detach()
        reached = problem.model(found.nearest).argmax(dim=1)
        for row, (y, k) in enumerate(zip(problem.y.tolist(), reached.tolist(), strict=True)):
            distance = float((z[row, y] - z[row, k]) / (weight[k] - weight[y]).norm())
            assert distance * (1 - 1e-9) <= float(found.distance[row]) < 1.02 * distance

    def test_nearest_of_all_targets_is_the_closed_form(self) -> None:
        problem = random_problem(10, seed=10, n=3)
        target = torch.tensor([k for y in problem.y.tolist() for k in range(10) if k != y])
        many = LinearProblem(problem.model, problem.x.repeat_interleave(9, 0), problem.y.repeat_interleave(9, 0))
        found = run(QUICK, many, target=target, distances=True)
        assert torch.equal(problem.model(found.nearest).argmax(dim=1), target)
        ratio = found.distance.view(3, 9).amin(dim=1).numpy() / problem.distances("l2")
        assert (ratio > 1 - 1e-9).all()
        assert (ratio < 1.02).all()

    def test_solver_in_the_box(self) -> None:
        check_distances_in_box(BOXED, "l2", factor=1.01)

    @pytest.mark.parametrize("confidence", [0.5, 2.0])
    def test_confidence_moves_the_boundary(self, confidence: float) -> None:
        """With two classes the nearest point that leads by k lies at (gap + k) / ||w||."""
        problem = random_problem(2, seed=2)
        attack = CarliniWagner(steps=200, search_steps=5, lr=1e-4, c=0.1, confidence=confidence)
        found = run(attack, problem, distances=True)
        z = problem.model(found.nearest)
        assert (z.gather(1, 1 - problem.y[:, None]) - z.gather(1, problem.y[:, None]) >= confidence).all()
        across = float((problem.model.weight[1] - problem.model.weight[0]).detach().norm())
        ratio = found.distance.numpy() / (problem.distances("l2") + confidence / across)
        assert (ratio > 1 - 1e-9).all()
        assert (ratio < 1.03).all()

    @pytest.mark.parametrize("targeted", [False, True])
    def test_within_a_budget(self, targeted: bool) -> None:
        problem = random_problem(2, seed=2)
        distances = problem.distances("l2")
        threat = WIDE.at(float(np.sort(distances)[3]) * 1.02)
        found = run(QUICK, problem, threat, target=1 - problem.y if targeted else None)
        assert found.success.tolist() == (distances < threat.eps).tolist()
        assert ((problem.model(found.x_adv).argmax(dim=1) != problem.y) == found.success).all()
        assert threat.contains(found.x_adv, problem.x).all()
        assert found.forwards[found.success].max() < found.forwards[~found.success].min(), "the fallen leave"


class TestAlgorithm:
    def test_first_steps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The points tried are those of a loop in NumPy with the gradient written out."""
        seen: list[Tensor] = []
        logits = Problem.logits

        def spy(self: Problem, points: Tensor, rows: Tensor) -> Tensor:
            seen.append(points.detach().clone())
            return logits(self, points, rows)

        monkeypatch.setattr(Problem, "logits", spy)
        problem, c, kappa, lr = random_problem(3, seed=1, n=1), 0.3, 0.7, 0.03
        threat = ThreatModel(norm="l2", eps=0.1, low=-0.2, high=1.3)
        run(CarliniWagner(steps=200, search_steps=1, c=c, lr=lr, confidence=kappa), problem, threat, distances=True)
        weight, bias = problem.model.weight.detach().numpy(), problem.model.bias.detach().numpy()
        x, y = problem.x.flatten().numpy(), int(problem.y)
        w = np.arctanh((x - 0.55) / 0.75 * 0.999999)
        m = v = np.zeros_like(w)
        active = 0
        assert len(seen) > 30
        for t, got in enumerate(seen[1:31], start=1):  # the first is the clean image
            point = 0.55 + 0.75 * np.tanh(w)
            np.testing.assert_allclose(got.flatten().numpy(), point, atol=1e-12)
            z = weight @ point + bias
            j = max((k for k in range(3) if k != y), key=lambda k: float(z[k]))
            hinge = z[y] - z[j] + kappa > 0
            active += int(hinge)
            g = (2 * (point - x) + c * hinge * (weight[y] - weight[j])) * 0.75 * (1 - np.tanh(w) ** 2)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            w = w - lr * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        assert 3 < active < 30, "both sides of the hinge are to be seen"

    def test_search_on_c(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tenfold until a success, then halving; each sample its own."""
        needed, tried = torch.tensor([0.0004, 0.037, 0.5, 900.0]), []

        def judge(self: CarliniWagner, problem: Problem, rows: Tensor, c: Tensor) -> Tensor:
            tried.append(c.clone())
            return c >= needed[rows]

        monkeypatch.setattr(CarliniWagner, "_descend", judge)
        problem = random_problem(3, seed=1, n=4)
        run(CarliniWagner(), problem, distances=True)
        assert len(tried) == 9
        for row, least in enumerate(needed.tolist()):
            c, below, above = 1e-3, 0.0, math.inf
            for got in tried:
                assert float(got[row]) == pytest.approx(c, rel=1e-6)
                below, above = (below, c) if c >= np.float32(least) else (c, above)
                c = (below + above) / 2 if above < math.inf else 10 * c

    def test_no_progress_ends_a_search(self) -> None:
        """Of two samples, one whose boundary cannot be felt and one that is on its way, the first alone leaves."""
        weight = torch.tensor([[1e-9, 0.0], [-1e-9, 0.0]], dtype=torch.float64)
        still = LinearProblem(
            LinearClassifier(weight, torch.tensor([0.1, 0.0], dtype=torch.float64)),
            torch.full((1, 1, 1, 2), 0.5, dtype=torch.float64),
            torch.tensor([0]),
        )
        found = run(CarliniWagner(steps=100, search_steps=1), still, ThreatModel(norm="l2", eps=0.1), distances=True)
        assert int(found.forwards) == 1 + 11  # the clean image, and a tenth of the steps
        assert math.isinf(float(found.distance))
        assert torch.equal(found.nearest, still.x)

    def test_passes(self) -> None:
        found = run(QUICK, random_problem(3, seed=3), distances=True)
        assert (found.forwards - found.backwards >= 1).all()
        assert (found.forwards - found.backwards <= 1 + QUICK.search_steps).all()
        assert (found.forwards <= 1 + QUICK.search_steps * (QUICK.steps + 1)).all()
        assert len(set(found.forwards.tolist())) > 1, "each sample ends its own searches"

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
    @pytest.mark.parametrize("low", [0.0, -0.3])
    def test_ends_of_the_box(self, dtype: torch.dtype, low: float) -> None:
        threat = ThreatModel(norm="l2", eps=1.0, low=low, high=0.7)
        x = torch.tensor([[low, 0.7, 0.1, 0.69]], dtype=dtype).clamp(low, 0.7)
        w = to_free(x, threat)
        assert torch.isfinite(w).all()
        assert torch.allclose(to_box(w, threat), x, atol=4e-6 if dtype != torch.float16 else 4e-3)
        far = to_box(100 * w.sign(), threat)
        assert float(far.min()) >= torch.tensor(low, dtype=dtype)
        assert float(far.max()) <= torch.tensor(0.7, dtype=dtype)

    def test_what_is_wrong_already_is_left_alone(self) -> None:
        problem = random_problem(3, seed=3)
        found = run(QUICK, LinearProblem(problem.model, problem.x, (problem.y + 1) % 3), distances=True)
        assert torch.equal(found.nearest, problem.x)
        assert found.distance.tolist() == [0.0] * 6
        assert found.forwards.tolist() == [1] * 6

    @pytest.mark.parametrize("distances", [False, True])
    def test_alone_or_in_a_batch(self, distances: bool) -> None:
        problem = linear_problem(3, seed=3, corners=True)
        attack, threat = CarliniWagner(steps=60, search_steps=4, c=0.3, lr=0.05), ThreatModel(norm="l2", eps=0.5)
        whole = run(attack, problem, threat, distances=distances)
        assert torch.isfinite(whole.distance).any()
        for row in range(6):
            one = slice(row, row + 1)
            alone = run(
                attack, LinearProblem(problem.model, problem.x[one], problem.y[one]), threat, distances=distances
            )
            assert torch.equal(alone.nearest, whole.nearest[one])
            assert torch.equal(alone.x_adv, whole.x_adv[one])
            assert torch.equal(alone.forwards, whole.forwards[one])

    def test_float32_images_stay_float32(self) -> None:
        model, x = (
            LinearClassifier(randn(3, 12).float(), torch.zeros(3)),
            rand(4, 1, 3, 4).float().round(),
        )  # pixels at the ends
        y = model(x).argmax(dim=1)
        threat = ThreatModel(norm="l2", eps=3.0)
        found = CarliniWagner(steps=60, search_steps=3, lr=0.3, c=1.0).run(model, x, y, threat, key=Key(1))
        assert found.x_adv.dtype == torch.float32
        assert float(found.x_adv.min()) >= 0
        assert float(found.x_adv.max()) <= 1
        assert found.success.any()

    @pytest.mark.parametrize("norm", ["linf", "l1"])
    def test_other_norms_are_refused(self, norm: Any) -> None:
        problem = random_problem(2)
        with pytest.raises(UserError, match="norms l2"):
            run(QUICK, problem, ThreatModel(norm=norm, eps=0.1))

    @pytest.mark.parametrize("bad", [{"c": 0}, {"lr": -1}, {"confidence": -1}, {"steps": 0}, {"search_steps": 0}])
    def test_bad_settings(self, bad: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(bad))):
            CarliniWagner(**bad)


CHECK = partial(check_distances, CarliniWagner(steps=60, search_steps=4, lr=2e-4, c=0.1), "l2", 2, factor=1.1)


class TestMutations:
    """Each break is seen."""

    def test_the_check_is_green(self) -> None:
        CHECK()

    def red(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, broken: Callable[..., Any]) -> None:
        monkeypatch.setattr(owner, name, broken)
        assert red(CHECK), "the break went unnoticed"

    def test_step_uphill(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.red(monkeypatch, module, "adam", lambda w, g, *rest: adam(w, -g, *rest))

    def test_step_of_zero(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.red(monkeypatch, module, "adam", lambda *_: None)

    def test_gradient_of_zero(self, monkeypatch: pytest.MonkeyPatch) -> None:
        gradient = Problem.gradient
        self.red(monkeypatch, Problem, "gradient", lambda *args: 0 * gradient(*args))

    def test_loss_constant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.red(monkeypatch, module, "adversarial_loss", lambda name, z, y, target=None: 0 * z.sum(dim=1))

    def test_box_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.red(monkeypatch, module, "to_box", lambda w, threat: w)

    def test_distance_forgotten(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without the distance term the points run away; the nearest on the way is what the long steps allow."""
        sharp = 1e9
        with_c = CarliniWagner(steps=60, search_steps=1, lr=2e-4, c=sharp)
        assert red(partial(check_distances, with_c, "l2", 2, factor=1.01))
