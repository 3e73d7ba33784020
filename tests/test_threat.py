"""Projections, random starts and membership, against closed forms, SciPy and brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.optimize import minimize

from steelman.errors import UserError
from steelman.rng import Key
from steelman.settings import SettingsError, make
from steelman.threat import Norm, ThreatModel, norms
from tests.oracles import ORDERS, Array, check_projection, nearest, rand, randn, sizes

NORMS: tuple[Norm, ...] = ("linf", "l2", "l1")
pixels = st.floats(-3, 3, width=32)


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
        threat = ThreatModel(norm=norm, eps=0).at(eps)
        got = threat.project(torch.from_numpy(start + change)[None], torch.from_numpy(start)[None])
        expected = nearest(start + change - start, start, norm, eps, 0.0, 1.0)
        np.testing.assert_allclose(got[0].numpy() - start, expected, atol=1e-7)
        assert threat.contains(got, torch.from_numpy(start)[None]).all()

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
        got = ThreatModel(norm=norm, eps=eps).project(torch.from_numpy(far)[None], torch.from_numpy(x)[None])[0].numpy()
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
            threat = ThreatModel(norm=norm, eps=0).at(eps)
            got = threat.project(far, x)
            assert got.dtype == dtype
            assert threat.contains(got, x).all()
            again = threat.project(got, x)
            assert float((again - got).abs().max()) <= 8 * torch.finfo(dtype).eps
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
        assert ThreatModel(norm=norm, eps=1).at(2).contains(x_adv, x).tolist() == [True, False, True]

    def test_shapes_must_agree(self) -> None:
        x = torch.zeros(3, 1, 2, 2)
        for wrong in (x[:1], x[0], x.flatten(1)):
            with pytest.raises(UserError, match=r"expected adversarial images of shape \(3, 1, 2, 2\), got "):
                ThreatModel(eps=1).contains(wrong, x)

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
        threat = ThreatModel(norm=norm, eps=0).at(eps)
        drawn = threat.random_start(x, torch.arange(20), Key(0))
        assert drawn.dtype == dtype
        assert threat.contains(drawn, x).all()

    @pytest.mark.parametrize("norm", NORMS)
    def test_in_the_ball_alone_where_asked(self, norm: Norm) -> None:
        x = torch.tensor([0.0, 1.0, 0.5]).repeat(20, 2).reshape(20, 1, 2, 3).double()
        threat = ThreatModel(norm=norm, eps=0.3)
        drawn = threat.random_start(x, torch.arange(20), Key(0), box=False)
        assert (sizes(drawn - x, norm) <= 0.3 + 1e-12).all()
        assert ((drawn < 0) | (drawn > 1)).any()
        assert torch.equal(threat.project(drawn, x), threat.random_start(x, torch.arange(20), Key(0)))

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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"eps": 8}, "eps: expected a radius of at most 1 in a range of 0 .. 1, got 8; did you mean 8/255?"),
        ({"eps": 300}, "eps: expected a radius of at most 1 in a range of 0 .. 1, got 300"),
        (
            {"eps": 0.8, "low": 0.2, "high": 0.9},
            "eps: expected a radius of at most 0.7 in a range of 0.2 .. 0.9, got 0.8",
        ),
        ({"eps": 256, "high": 255}, "eps: expected a radius of at most 255 in a range of 0 .. 255, got 256"),
    ],
)
def test_a_radius_above_the_range_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as refused:
        make("threat", {"threat": ThreatModel}, "threat", options)
    assert str(refused.value) == words
    with pytest.raises(ValueError, match="expected a radius of at most"):  # whoever writes Python is told as well
        ThreatModel(**options)


def test_a_radius_as_wide_as_the_range_is_none_too_many() -> None:
    assert ThreatModel(eps=1).eps == 1
    assert ThreatModel(eps=0.7, low=0.2, high=0.9).eps == 0.7  # 0.9 - 0.2 is a little less in floating point
    assert ThreatModel(eps=0.9 - 0.2, low=0.2, high=0.9).eps == 0.9 - 0.2
    assert ThreatModel(eps=8, high=255).eps == 8


def test_a_radius_in_l2_and_l1_depends_on_the_shape() -> None:
    shape = (3, 32, 32)
    assert ThreatModel(norm="l2", eps=0.5).widest(shape) == pytest.approx(math.sqrt(3 * 32 * 32))
    assert ThreatModel(norm="l1", eps=12, low=-1).widest(shape) == 2 * 3 * 32 * 32
    assert ThreatModel(norm="l2", eps=55.4).too_wide(shape) is None
    said = ThreatModel(norm="l2", eps=128).too_wide(shape)
    assert said is not None
    assert said.startswith("expected a radius of at most 55.4256 in a range of 0 .. 1 for images of shape (3, 32, 32)")
    assert said.endswith("in l2, got 128; did you mean 128/255?")


def test_a_schedule_may_look_beyond_the_range() -> None:
    """A curve goes to where every image can become every other, and FAB draws from a ball of radius 1."""
    wide = ThreatModel(eps=0.3, low=0.2, high=0.9).at(1.5)
    assert (wide.norm, wide.eps, wide.low, wide.high) == ("linf", 1.5, 0.2, 0.9)
    assert wide.at(0.3) == ThreatModel(eps=0.3, low=0.2, high=0.9)
    for bad in (-0.1, math.nan, math.inf):
        with pytest.raises(UserError, match="eps: expected a radius of at least 0, got"):
            wide.at(bad)
