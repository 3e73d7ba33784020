"""Steps, projections, random starts and membership, against closed forms, SciPy and brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import linprog, minimize
from torch import Tensor

from steelman.errors import UserError
from steelman.rng import Key
from steelman.settings import SettingsError, make
from steelman.threat import Norm, ThreatModel, norms, steepest
from tests.oracles import ORDERS, Array, check_projection, check_unit_step, nearest, sizes

NORMS: tuple[Norm, ...] = ("linf", "l2", "l1")
P = [1.0, 1.5, 2.0, 3.0, 10.0, math.inf]
pixels = st.floats(-3, 3, width=32)


def dual_norm(gradient: Array, p: float) -> float:
    return float(np.linalg.norm(gradient, ord=math.inf if p == 1 else (1 if p == math.inf else p / (p - 1))))


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class TestSteepest:
    """Lemma 1 of Pang et al. (2020): the linearised loss over the ball peaks at x + eps U_p(grad), eps ||grad||_q up."""

    @pytest.mark.parametrize("p", P)
    @pytest.mark.parametrize("seed", [0, 1])
    def test_lemma_1(self, p: float, seed: int) -> None:
        a, c = randn(8, 5, seed=seed), randn(8, seed=seed + 10)
        x = randn(1, 5, seed=seed + 20).requires_grad_()

        def loss(at: Tensor) -> Tensor:
            return (torch.tanh(at @ a.T) * c).sum() + torch.logsumexp(at @ a.T, dim=1).sum()

        value = loss(x)
        (gradient,) = torch.autograd.grad(value, x)
        eps, g = 0.3, gradient[0].numpy()
        step = steepest(gradient, p)[0].numpy()
        peak = eps * dual_norm(g, p)
        assert eps * (g @ step) == pytest.approx(peak, rel=1e-12)
        # No unit vector does better.
        rivals = np.random.default_rng(seed).standard_normal((20000, 5))
        rivals *= np.random.default_rng(seed + 1).random((20000, 5)) < 0.6  # many on the axes and faces
        rivals = rivals[np.abs(rivals).sum(axis=1) > 0]
        rivals /= np.linalg.norm(rivals, ord=p, axis=1)[:, None]
        assert (eps * rivals @ g).max() <= peak + 1e-12
        # A solver that knows nothing of duals arrives at the same value.
        assert solver_peak(g, p) * eps == pytest.approx(peak, rel=1e-5)
        # And it is the loss itself that grows at that rate.
        h = 1e-6
        grown = loss(x.detach() + h * torch.from_numpy(step)[None]) - value.detach()
        assert float(grown) / h == pytest.approx(peak / eps, rel=1e-4)

    @pytest.mark.parametrize("p", P)
    @given(u=st.lists(st.lists(pixels, min_size=4, max_size=4), min_size=1, max_size=3))
    def test_unit_length_and_dual_norm(self, p: float, u: list[list[float]]) -> None:
        check_unit_step(p, torch.tensor(u, dtype=torch.float64))

    @pytest.mark.parametrize("p", P)
    @pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 1e30])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_size_of_the_gradient_is_irrelevant(self, p: float, size: float, dtype: torch.dtype) -> None:
        check_unit_step(p, size * randn(3, 2, 4, dtype=dtype))

    @pytest.mark.parametrize("p", P)
    def test_nothing_to_climb(self, p: float) -> None:
        mixed = torch.stack((torch.zeros(4), torch.tensor([0.0, 3.0, 0.0, -4.0])))
        step = steepest(mixed, p)
        assert torch.equal(step[0], torch.zeros(4))
        assert torch.isfinite(step).all()
        assert steepest(torch.zeros(0, 1, 2, 2), p).shape == (0, 1, 2, 2)
        assert steepest(torch.zeros(2, 0), p).shape == (2, 0)

    def test_hand_worked(self) -> None:
        u = torch.tensor([[3.0, -4.0, 0.0]])
        assert steepest(u, math.inf).tolist() == [[1.0, -1.0, 0.0]]
        assert steepest(u, 2.0).tolist() == pytest.approx([[0.6, -0.8, 0.0]])
        assert steepest(u, 1.0).tolist() == [[0.0, -1.0, 0.0]]
        assert steepest(u, 1.0, count=2).tolist() == [[0.5, -0.5, 0.0]]
        assert steepest(u, 1.0, count=9).tolist() == [[0.5, -0.5, 0.0]]  # the flat coordinate gets nothing

    @pytest.mark.parametrize("p", [0.5, 0.0, -1.0, math.nan])
    def test_other_orders_are_refused(self, p: float) -> None:
        with pytest.raises(UserError, match="p >= 1"):
            steepest(torch.ones(1, 2), p)

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("length", [0.5, 1.0, 7.0])
    def test_threat_steps_have_their_length(self, norm: Norm, length: float) -> None:
        threat = ThreatModel(norm=norm, eps=1, low=-50, high=50)
        gradient, x = randn(3, 1, 4, 4), rand(3, 1, 4, 4)
        step = threat.steepest(gradient, x, length=length)
        assert sizes(step, norm) == pytest.approx([length] * 3)
        torch.testing.assert_close(step, length * steepest(gradient, threat.p))

    @pytest.mark.parametrize("length", [0.3, 4.0, 1e3])
    def test_an_l1_step_is_the_best_that_stays_in_the_box(self, length: float) -> None:
        gradient, x = randn(3, 1, 8, 8), (rand(3, 1, 8, 8, seed=1) * 1.5 - 0.25).clamp(0, 1)
        step = ThreatModel(norm="l1", eps=1).steepest(gradient, x, length=length)
        assert ((x + step >= -1e-12) & (x + step <= 1 + 1e-12)).all()
        assert (sizes(step, "l1") <= length + 1e-9).all()
        for g, v, at in zip(gradient.flatten(1).numpy(), step.flatten(1).numpy(), x.flatten(1).numpy()):
            best = linprog(
                np.r_[-g, g],
                A_ub=np.ones((1, 128)),
                b_ub=[length],
                bounds=[*((0, 1 - a) for a in at), *((0, a) for a in at)],
            )
            assert g @ v == pytest.approx(-best.fun)

    def test_share_spreads_an_l1_step(self) -> None:
        threat, x = ThreatModel(norm="l1", eps=1, low=-50, high=50), torch.zeros(2, 1, 10, 10)
        step = threat.steepest(randn(2, 1, 10, 10, dtype=torch.float32), x, share=0.05)
        assert (step != 0).flatten(1).sum(dim=1).tolist() == [5, 5]
        torch.testing.assert_close(step.abs().amax(dim=(1, 2, 3)), torch.full((2,), 0.2))


def solver_peak(g: Array, p: float) -> float:
    """max g.v over ||v||_p <= 1, by a linear program or by SLSQP."""
    d = len(g)
    if p == math.inf:
        return float(-linprog(-g, bounds=[(-1, 1)] * d).fun)
    if p == 1:
        return float(-linprog(np.r_[-g, g], A_ub=np.ones((1, 2 * d)), b_ub=[1], bounds=[(0, None)] * (2 * d)).fun)
    ball = {"type": "ineq", "fun": lambda v: 1 - (np.abs(v) ** p).sum()}
    starts = [np.sign(g) * 0.5 / d, g / np.linalg.norm(g, ord=p) * 0.5]
    found = [minimize(lambda v: -g @ v, s, constraints=[ball], options={"maxiter": 500, "ftol": 1e-14}) for s in starts]
    return float(max(-f.fun for f in found))


class TestProject:
    @pytest.mark.parametrize("norm", NORMS)
    def test_nearest_point_with_the_box_in_the_way(self, norm: Norm) -> None:
        check_projection(norm)

    @pytest.mark.parametrize("norm", NORMS)
    def test_nearest_point_without_the_box(self, norm: Norm) -> None:
        check_projection(norm, low=-500.0, high=500.0)

    @pytest.mark.parametrize("norm", NORMS)
    @given(
        x=st.lists(st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1)), min_size=5, max_size=5),
        delta=st.lists(st.one_of(st.just(0.0), pixels), min_size=5, max_size=5),
        eps=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 1.0, 2.5, 100.0]),
    )
    def test_nearest_point_wherever(self, norm: Norm, x: list[float], delta: list[float], eps: float) -> None:
        start, change = np.array(x), np.array(delta)
        threat = ThreatModel(norm=norm, eps=eps)
        got = threat.project(torch.tensor([start + change]), torch.tensor([start]))
        expected = nearest(start + change - start, start, norm, eps, 0.0, 1.0)
        np.testing.assert_allclose(got[0].numpy() - start, expected, atol=1e-7)
        assert threat.contains(got, torch.tensor([start])).all()

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("seed", range(4))
    def test_a_general_solver_finds_nothing_nearer(self, norm: Norm, seed: int) -> None:
        x = (rand(4, seed=seed) * 1.6 - 0.3).clamp(0, 1).numpy()
        far, eps = x + randn(4, seed=seed + 50).numpy(), 0.4
        # Variables are the parts above and below x, so that every norm's constraint is smooth.
        ball: dict[str, Any] = {
            "l1": {"type": "ineq", "fun": lambda v: eps - v.sum()},
            "l2": {"type": "ineq", "fun": lambda v: eps**2 - ((v[:4] - v[4:]) ** 2).sum()},
            "linf": {"type": "ineq", "fun": lambda v: eps - np.r_[v[:4] - v[4:], v[4:] - v[:4]]},
        }[norm]
        found = minimize(
            lambda v: ((x + v[:4] - v[4:] - far) ** 2).sum(),
            np.full(8, 0.01),
            bounds=[*((0, 1 - a) for a in x), *((0, a) for a in x)],
            constraints=[ball],
            method="SLSQP",
            options={"maxiter": 1000, "ftol": 1e-15},
        )
        got = ThreatModel(norm=norm, eps=eps).project(torch.tensor([far]), torch.tensor([x]))[0].numpy()
        assert ((got - far) ** 2).sum() == pytest.approx(found.fun, abs=1e-7)
        np.testing.assert_allclose(got, x + found.x[:4] - found.x[4:], atol=2e-4)

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 1e3, 1e6, 1e10])
    @pytest.mark.parametrize("shape", [(1, 1, 1), (3, 32, 32)])
    def test_ends_inside_from_however_far(
        self, norm: Norm, dtype: torch.dtype, spread: float, shape: tuple[int, ...]
    ) -> None:
        x = (rand(5, *shape, dtype=dtype) * 1.5 - 0.25).clamp(0, 1)
        far = x + spread * randn(5, *shape, dtype=dtype)
        for eps in (0.0, 8 / 255, 0.5, 12.0):
            threat = ThreatModel(norm=norm, eps=eps)
            got = threat.project(far, x)
            assert got.dtype == dtype
            assert threat.contains(got, x).all()
            again = threat.project(got, x)
            assert float((again - got).abs().max()) <= 2 * torch.finfo(dtype).eps
            if spread >= 1 and eps in (8 / 255, 0.5) and shape != (1, 1, 1):
                assert sizes(got.double() - x.double(), norm) == pytest.approx([eps] * 5, rel=1e-3)  # no radius lost

    @pytest.mark.parametrize("norm", NORMS)
    def test_what_is_inside_stays(self, norm: Norm) -> None:
        x = 0.4 + 0.2 * rand(3, 1, 2, 2, dtype=torch.float32)
        near = x + 1e-3 * randn(3, 1, 2, 2, dtype=torch.float32)
        torch.testing.assert_close(ThreatModel(norm=norm, eps=0.1).project(near, x), near, atol=1e-7, rtol=0)
        assert torch.equal(ThreatModel(norm=norm, eps=0.1).project(x, x), x)

    @pytest.mark.parametrize("norm", NORMS)
    def test_samples_do_not_meet(self, norm: Norm) -> None:
        x, far = rand(6, 1, 3, 3), rand(6, 1, 3, 3) + 2 * randn(6, 1, 3, 3)
        threat = ThreatModel(norm=norm, eps=0.3)
        whole = threat.project(far, x)
        for row in range(6):
            assert torch.equal(threat.project(far[row : row + 1], x[row : row + 1])[0], whole[row])

    @pytest.mark.parametrize("norm", NORMS)
    def test_empty_batch(self, norm: Norm) -> None:
        threat, x = ThreatModel(norm=norm, eps=0.3), torch.zeros(0, 1, 2, 2)
        assert threat.project(x, x).shape == x.shape
        assert threat.contains(x, x).shape == (0,)
        assert threat.random_start(x, torch.arange(0), Key(0)).shape == x.shape
        assert threat.steepest(x, x).shape == x.shape
        assert norms(x, threat.p).shape == (0,)

    def test_box_whose_ends_are_not_floats(self) -> None:
        threat = ThreatModel(norm="l2", eps=5, low=-2.1179, high=2.64)
        x = torch.zeros(2, 3, 4, 4)
        got = threat.project(x + 100 * torch.sign(randn(2, 3, 4, 4, dtype=torch.float32)), x)
        assert threat.contains(got, x).all()


class TestContains:
    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_radius_is_kept_to_the_stated_tolerance(self, norm: Norm, dtype: torch.dtype) -> None:
        x = torch.full((1, 3, 4, 4), 0.5, dtype=dtype)
        threat = ThreatModel(norm=norm, eps=0.25)
        tolerance = threat.tolerance(x)
        assert tolerance == pytest.approx(torch.finfo(dtype).eps * 48 ** (1 / ORDERS[norm]))
        one = torch.zeros_like(x)
        one[0, 0, 0, 0] = 1
        assert threat.contains(x + 0.25 * one, x).all()
        assert not threat.contains(x + (0.25 + 10 * tolerance) * one, x).any()
        assert not threat.contains(x - (0.25 + 10 * tolerance) * one, x).any()
        assert threat.contains(x + (0.25 - 10 * tolerance) * one, x).all()

    def test_tolerance_as_documented(self) -> None:
        x = torch.zeros(1, 3, 32, 32)
        stated = {"linf": 1.2e-7, "l2": 6.6e-6, "l1": 3.7e-4}
        for norm in NORMS:
            assert ThreatModel(norm=norm, eps=1).tolerance(x) == pytest.approx(stated[norm], rel=0.02)

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("bad", [1 + 1e-6, -1e-6, math.nan, math.inf, -math.inf])
    def test_the_box_is_exact_and_numbers_are_finite(self, norm: Norm, bad: float) -> None:
        x = torch.tensor([0.0, 1.0]).repeat(3, 2).reshape(3, 1, 2, 2)
        x_adv = x.clone()
        x_adv[1].view(-1)[int(bad > 0.5)] = bad
        assert ThreatModel(norm=norm, eps=2).contains(x_adv, x).tolist() == [True, False, True]

    def test_the_distance_is_not_measured_in_float32(self) -> None:
        x = torch.zeros(1, 1, 1000, 1000)
        x_adv = x + 1e-4
        assert not ThreatModel(norm="l1", eps=99.0).contains(x_adv, x).any()
        assert ThreatModel(norm="l1", eps=100.001).contains(x_adv, x).all()


class TestRandomStart:
    N, D = 4000, 6

    def start(self, norm: Norm, eps: float, seed: int = 0) -> Array:
        x = torch.full((self.N, 1, 2, 3), 0.5, dtype=torch.float64)
        drawn = ThreatModel(norm=norm, eps=eps).random_start(x, torch.arange(self.N), Key(seed))
        return np.asarray((drawn - x).flatten(1).numpy())

    def test_linf_is_uniform_in_the_cube(self) -> None:
        delta = self.start("linf", 0.3)
        for column in delta.T:
            assert stats.kstest(column, stats.uniform(-0.3, 0.6).cdf).pvalue > 1e-3
        assert np.abs(np.corrcoef(delta.T) - np.eye(self.D)).max() < 5 / math.sqrt(self.N)

    @pytest.mark.parametrize("norm", ["l2", "l1"])
    def test_l2_and_l1_are_uniform_in_the_ball(self, norm: Norm) -> None:
        delta = self.start(norm, 0.4)
        radius = np.linalg.norm(delta, ord=ORDERS[norm], axis=1)
        assert stats.kstest((radius / 0.4) ** self.D, "uniform").pvalue > 1e-3  # r ~ u^(1/d)
        share = np.abs(delta) / radius[:, None]
        for column, sign in zip(share.T, np.sign(delta).T):
            if norm == "l2":
                assert stats.kstest(column**2, stats.beta(0.5, (self.D - 1) / 2).cdf).pvalue > 1e-3
            else:
                assert stats.kstest(column, stats.beta(1, self.D - 1).cdf).pvalue > 1e-3
            assert stats.binomtest(int((sign > 0).sum()), self.N).pvalue > 1e-3
        assert abs(stats.pearsonr(radius, delta[:, 0]).statistic) < 5 / math.sqrt(self.N)

    @pytest.mark.parametrize("norm", NORMS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("eps", [0.0, 8 / 255, 0.5, 20.0])
    def test_inside(self, norm: Norm, dtype: torch.dtype, eps: float) -> None:
        x = (rand(20, 3, 5, 5, dtype=dtype) * 1.5 - 0.25).clamp(0, 1)
        threat = ThreatModel(norm=norm, eps=eps)
        drawn = threat.random_start(x, torch.arange(20), Key(0))
        assert drawn.dtype == dtype
        assert threat.contains(drawn, x).all()

    @pytest.mark.parametrize("norm", NORMS)
    def test_keyed_by_sample_alone(self, norm: Norm) -> None:
        threat, x, index = ThreatModel(norm=norm, eps=0.3), rand(5, 1, 3, 3), torch.tensor([9, 2, 40, 7, 3])
        whole = threat.random_start(x, index, Key(0))
        order = torch.tensor([3, 0, 4, 2, 1])
        assert torch.equal(threat.random_start(x[order], index[order], Key(0)), whole[order])
        assert torch.equal(threat.random_start(x[2:3], index[2:3], Key(0)), whole[2:3])
        for other in (Key(1), Key(0).fold("restart", 1)):
            assert not torch.equal(threat.random_start(x, index, other), whole)
        assert not torch.equal(whole[0] - x[0], whole[1] - x[1])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eps": -1}, "eps: "),
        ({"eps": "8/0"}, "eps: expected a number or a fraction such as 8/255"),
        ({}, "eps: is required"),
        ({"eps": 1, "norm": "l3"}, "norm: input should be 'linf', 'l2' or 'l1', got 'l3'"),
        ({"eps": 1, "low": 1, "high": 0}, "expected low < high, got low 1.0 and high 0.0"),
        ({"eps": math.inf}, "eps: "),
        ({"esp": 1}, r"did you mean 'eps'\?"),
    ],
)
def test_bad_settings(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make("threat", {"threat": ThreatModel}, "threat", options)


def test_at_changes_the_radius_alone() -> None:
    threat = ThreatModel(norm="l2", eps=0.5, low=-1, high=2)
    assert threat.at(0.25) == ThreatModel(norm="l2", eps=0.25, low=-1, high=2)
