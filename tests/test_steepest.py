"""The steepest step U_p: Lemma 1, its invariants, and the l1 step that knows the box."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize
from torch import Tensor

from steelman.errors import UserError
from steelman.threat import Norm, ThreatModel, steepest
from tests.oracles import Array, check_unit_step, rand, randn, sizes

NORMS: tuple[Norm, ...] = ("linf", "l2", "l1")
P = [1.0, 1.5, 2.0, 3.0, 10.0, math.inf]
pixels = st.floats(-3, 3, width=32)


def dual_norm(gradient: Array, p: float) -> float:
    return float(np.linalg.norm(gradient, ord=math.inf if p == 1 else (1 if p == math.inf else p / (p - 1))))


class TestSteepest:
    """Lemma 1 of Pang et al. (2020): over the ball, the linearised loss peaks at x + eps U_p(g), eps ||g||_q higher."""

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
        assert steepest(u, 2.0)[0].tolist() == pytest.approx([0.6, -0.8, 0.0])
        assert steepest(u, 1.0).tolist() == [[0.0, -1.0, 0.0]]

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
