"""Square and RayS, which see logits or labels only: closed forms, naive loops of the papers, and exact counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import rays as rays_module
from steelman.attacks import square as square_module
from steelman.attacks.engine import Found, Problem, Search
from steelman.attacks.rays import RayS, accuracy, adbd
from steelman.attacks.square import (
    CHUNK,
    MOVES,
    PACE,
    Square,
    _draw,
    _Draws,
    _pixels,
    bumps,
    image_shape,
    share,
    squares,
    stripes,
)
from steelman.errors import UserError
from steelman.rng import Key
from steelman.threat import Norm, ThreatModel
from tests.oracles import (
    Array,
    LinearClassifier,
    check_budget,
    check_budget_in_box,
    check_distances,
    check_distances_in_box,
    linear_problem,
    rand,
    randn,
    red,
    sizes,
)

EPS: dict[Norm, float] = {"linf": 0.1, "l2": 0.4}
both_norms = pytest.mark.parametrize("norm", ["linf", "l2"])
# How near to the closed form random search comes on twelve pixels. With ten classes it has to choose the right rival,
# and restarts do; the l2 windows have one shape only, and stay further off.
SLACK = {"linf": 0.03, "l2": 0.3}
SEARCH: dict[tuple[str, int], Square] = {
    ("linf", 2): Square(queries=200, rescale=True),
    ("linf", 3): Square(queries=200, rescale=True),
    ("linf", 10): Square(queries=60, restarts=12, rescale=True),
    ("l2", 2): Square(queries=300, rescale=True),
    ("l2", 3): Square(queries=200, restarts=5, rescale=True),
    ("l2", 10): Square(queries=300, rescale=True),
}
FACTOR = 1.2
CASES: list[tuple[Search, Norm]] = [
    (Square(queries=60), "linf"),
    (Square(queries=60), "l2"),
    (Square(queries=60, whole=True), "l2"),
    (Square(queries=60, ahead=8), "linf"),
    (RayS(queries=120), "linf"),
]
every_case = pytest.mark.parametrize(("attack", "norm"), CASES)


class Smooth(nn.Module):
    """A curved classifier whose logits do not depend on the batch in the last bit; it refuses to record a graph."""

    def __init__(self, classes: int = 4, pixels: int = 12) -> None:
        super().__init__()
        self.a, self.b = 2 * randn(10, pixels, seed=1), randn(classes, 10, seed=2)

    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled(), "a black-box attack has no use for a graph"
        h = torch.tanh((x.flatten(1)[:, None, :] * self.a.to(x)).sum(dim=-1))
        return (h[:, None, :] * self.b.to(x)).sum(dim=-1)


@torch.no_grad()
def samples(n: int = 8, classes: int = 4, shape: tuple[int, ...] = (1, 3, 4)) -> tuple[Smooth, Tensor, Tensor]:
    model, x = Smooth(classes, math.prod(shape)), rand(n, *shape, seed=3)
    return model, x, model(x).argmax(dim=1)


def margins(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        z = model(x)
    other = z.scatter(1, y[:, None], -math.inf).amax(dim=1)
    margin: Tensor = other - z.gather(1, y[:, None])[:, 0]
    return margin


class TestClosedForm:
    @both_norms
    @pytest.mark.parametrize("classes", [2, 3, 10])
    def test_square_succeeds_where_it_can(self, norm: Norm, classes: int) -> None:
        check_budget(SEARCH[norm, classes], norm, classes, SLACK[norm])

    @both_norms
    def test_square_in_the_box(self, norm: Norm) -> None:
        check_budget_in_box(Square(queries=400, restarts=3, rescale=True), norm, {"linf": 0.05, "l2": 0.2}[norm])

    @pytest.mark.parametrize("classes", [2, 3, 10])
    def test_rays_distances(self, classes: int) -> None:
        check_distances(RayS(queries=400), "linf", classes, FACTOR)

    def test_rays_distances_in_the_box(self) -> None:
        check_distances_in_box(RayS(queries=400), "linf", FACTOR)

    @both_norms
    def test_square_reaches_a_target(self, norm: Norm) -> None:
        model, x = LinearClassifier(randn(4, 12), torch.zeros(4, dtype=torch.float64)), rand(4, 1, 3, 4)
        y = model(x).argmax(dim=1)
        threat = ThreatModel(norm=norm, eps={"linf": 3.0, "l2": 10.0}[norm], low=-100, high=100)
        for shift in (1, 2, 3):
            target = (y + shift) % 4
            found = Square(queries=300, rescale=True).run(model, x, y, threat, target=target)
            assert found.success.all()
            assert torch.equal(model(found.x_adv).argmax(dim=1), target)

    def test_rays_reaches_a_target_of_two(self) -> None:
        problem = linear_problem(2)
        threat = ThreatModel(eps=1.05 * problem.distances("linf").max(), low=-100, high=100)
        assert RayS(queries=400).run(problem.model, problem.x, problem.y, threat, target=1 - problem.y).success.all()


def naive_sides(step: int, p: float, height: int, width: int) -> float:
    """The published schedule, written out: what a square's side is before it is rounded and bounded."""
    for limit, halved in ((10, 1), (50, 2), (200, 4), (500, 8), (1000, 16), (2000, 32), (4000, 64)):
        if step <= limit:
            return math.sqrt(p / halved * height * width)
    raise AssertionError(f"the tests end before step {step}")


def naive_square(model: nn.Module, x: Tensor, y: int, eps: float, key: Key, index: int, queries: int) -> Tensor:
    """One sample's linf search, square by square."""
    c, h, w = x.shape
    at, key = torch.tensor([index]), key.fold("square", 0)
    up = key.fold("start").uniform(at, (c, w), torch.float64)[0] >= 0.5
    best, value = x.clone(), -math.inf
    for i in range(c):
        for j in range(w):
            best[i, :, j] = (x[i, :, j] + (eps if up[i, j] else -eps)).clamp(0, 1)
    trial = best
    for step in range(queries):
        if step > 0:
            chunk, place = divmod(step - 1, CHUNK)
            u = key.fold("steps", chunk).uniform(at, (CHUNK, 5 + 2 * c), torch.float64)[0, place].tolist()
            s = min(max(round(naive_sides(step - 1, 0.8, h, w)), 1), h, w)
            top, left = int(u[0] * (h - s + 1)), int(u[1] * (w - s + 1))
            signs = [-1 if v < 0.5 else 1 for v in u[5 : 5 + c]]
            flips = [v < 0.5 for v in u[5 + c :]]
            for attempt in range(2):
                trial = best.clone()
                for i in range(c):
                    inside = (i, slice(top, top + s), slice(left, left + s))
                    trial[inside] = (x[inside] + signs[i] * eps).clamp(0, 1)
                if attempt == 0 and torch.equal(trial, best):
                    flips = flips if any(flips) else [True] * c
                    signs = [-sign if flip else sign for sign, flip in zip(signs, flips)]
        margin = float(margins(model, trial[None], torch.tensor([y])))
        if margin > value:
            best, value = trial, margin
        if margin > 0:
            return trial
    return best


def naive_windows(model: nn.Module, x: Array, y: int, eps: float, key: Key, index: int, queries: int) -> Array:
    """One sample's l2 search from the attack's own start, in the paper's symbols (Algorithm 3)."""
    c, h, w = x.shape
    at, key = torch.tensor([index]), key.fold("square", 0)
    image = torch.from_numpy(x)[None]
    threat = ThreatModel(norm="l2", eps=eps)
    best = square_module.bumps(image, threat, at, key.fold("start"))[0].numpy()
    value, trial = -math.inf, best
    for step in range(queries):
        if step > 0:
            chunk, place = divmod(step - 1, CHUNK)
            u = key.fold("steps", chunk).uniform(at, (CHUNK, 5 + 2 * c), torch.float64)[0, place].numpy()
            s = max(round(naive_sides(step - 1, 0.8, h, w)), 3)
            s = min(s + 1 if s % 2 == 0 else s, h, w)
            corners = [
                int(u[0] * (h - s + 1)),
                int(u[1] * (w - s + 1)),
                int(u[2] * (h - s + 1)),
                int(u[3] * (w - s + 1)),
            ]
            w1, w2 = np.zeros((h, w), dtype=bool), np.zeros((h, w), dtype=bool)
            w1[corners[0] : corners[0] + s, corners[1] : corners[1] + s] = True
            w2[corners[2] : corners[2] + s, corners[3] : corners[3] + s] = True
            v = best - x
            unused = max(eps**2 - (v**2).sum(), 0.0)
            pattern = naive_bump(s) if u[4] < 0.5 else naive_bump(s).T
            new = np.zeros((c, s, s))
            for i in range(c):
                old = v[i][w1].reshape(s, s)
                new[i] = (-1 if u[5 + i] < 0.5 else 1) * pattern + old / max(np.linalg.norm(old), 1e-12)
                new[i] *= math.sqrt((v[i][w1 | w2] ** 2).sum() + unused / c) / np.linalg.norm(new[i])
            v[:, w2] = 0.0
            for i in range(c):
                v[i][w1] = new[i].flatten()
            trial = np.clip(x + eps * v / np.linalg.norm(v), 0, 1)
        margin = float(margins(model, torch.from_numpy(trial)[None], torch.tensor([y])))
        if margin > value:
            best, value = trial, margin
        if margin > 0:
            return trial
    return best


def naive_bump(s: int) -> Array:
    def peak(height: int, width: int) -> Array:
        total = np.zeros((height, width))
        for k in range(max(height // 2, width // 2) + 1):
            rows = slice(max(height // 2 - k, 0), height // 2 + k + 1)
            total[rows, max(width // 2 - k, 0) : width // 2 + k + 1] += 1 / (k + 1) ** 2
        return np.asarray(total / np.linalg.norm(total))

    both = np.concatenate((peak(s // 2, s), -peak(s - s // 2, s))) if s > 1 else -np.ones((1, 1))
    return np.asarray(both / np.linalg.norm(both))


def naive_rays(model: nn.Module, x: Tensor, y: int, queries: int) -> tuple[float, int]:
    """One sample's search in the published order, with its own loops: the distance, and the queries it took."""
    d, asked, nearest = x.numel(), 0, math.inf

    def adversarial(sign: Tensor, radius: float) -> bool:
        nonlocal asked, nearest
        if asked == queries:
            raise StopIteration
        asked += 1
        point = (x.flatten() + radius * sign).clamp(0, 1)
        with torch.no_grad():
            z = model(point.reshape(x.shape)[None])[0].tolist()
            wrong = bool(max(v for k, v in enumerate(z) if k != y) > z[y])  # a tie is no success
        if wrong:
            nearest = min(nearest, float((point - x.flatten()).abs().max()))
        return wrong

    sign, radius, blocks, wasted = torch.ones(d, dtype=x.dtype), math.inf, 1, 0
    try:
        if adversarial(sign, 0.0):
            return 0.0, asked
        while True:
            size = math.ceil(d / blocks)
            for first in [*([None] if asked == 1 else []), *range(0, d, size)]:
                trial = sign.clone()
                if first is not None:  # before all else, the ray of ones
                    trial[first : first + size] *= -1
                    wasted += size == 1
                if adversarial(trial, min(radius, 1.0)):
                    low, high = 0.0, min(radius, 1.0)
                    while True:
                        middle = (low + high) / 2
                        low, high = (low, middle) if adversarial(trial, middle) else (middle, high)
                        if high - low <= 1e-3 / math.sqrt(d):
                            break
                    if high < radius:
                        sign, radius, wasted = trial, high, 0
                if wasted == d:
                    return nearest, asked
            blocks = blocks if size == 1 else 2 * blocks
    except StopIteration:
        return nearest, asked


class TestNaive:
    @pytest.mark.parametrize("shape", [(1, 3, 4), (3, 2, 2), (1, 5, 4), (3, 3, 1), (1, 1, 1)])
    def test_square(self, shape: tuple[int, int, int]) -> None:
        model, x, y = samples(3, shape=shape)
        index = torch.tensor([4, 70, 900])
        for eps, queries in ((0.01, 100), (0.1, 40)):
            found = Square(queries=queries).run(model, x, y, ThreatModel(eps=eps), index=index, key=Key(3))
            for row in range(3):
                expected = naive_square(model, x[row], int(y[row]), eps, Key(3), int(index[row]), queries)
                assert torch.equal(found.x_adv[row], expected)

    @pytest.mark.parametrize("shape", [(1, 3, 4), (3, 5, 6), (2, 7, 7)])
    def test_windows(self, shape: tuple[int, int, int]) -> None:
        model, x, y = samples(3, shape=shape)
        found = Square(queries=60).run(model, x, y, ThreatModel(norm="l2", eps=0.2), key=Key(3))
        for row in range(3):
            expected = naive_windows(model, x[row].numpy(), int(y[row]), 0.2, Key(3), row, 60)
            np.testing.assert_allclose(found.x_adv[row].numpy(), expected, rtol=0, atol=1e-9)

    @pytest.mark.parametrize("side", [1, 2, 3, 4, 5, 9])
    def test_bump(self, side: int) -> None:
        expected = naive_bump(side)
        np.testing.assert_allclose(square_module.bump(side, rand(1)).numpy(), expected, atol=1e-12)

    @pytest.mark.parametrize("queries", [1, 2, 40, 400])
    def test_rays(self, queries: int) -> None:
        model, x, y = samples(6)
        y[2] = (y[2] + 1) % 4  # misclassified as it is
        found = RayS(queries=queries).run(model, x, y, ThreatModel(eps=0.1), distances=True)
        assert found.distance is not None
        expected = [naive_rays(model, x[row], int(y[row]), queries) for row in range(6)]
        assert found.distance.tolist() == [distance for distance, _ in expected]
        assert found.forwards.tolist() == [asked for _, asked in expected]
        assert found.distance[2] == 0


class Recorder:
    """Who was asked, when, and when each first fell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[list[int]] = []
        self.fell: dict[int, int] = {}
        logits = Problem.logits

        def recorded(problem: Problem, points: Tensor, rows: Tensor) -> Tensor:
            self.asked.append(rows.tolist())
            got = logits(problem, points, rows)
            for row in rows[got.argmax(dim=1) != problem.y[rows]].tolist():
                self.fell.setdefault(row, len(self.asked))
            return got

        monkeypatch.setattr(Problem, "logits", recorded)


class TestQueries:
    @both_norms
    def test_square_asks_what_it_may_and_stops_at_success(self, monkeypatch: pytest.MonkeyPatch, norm: Norm) -> None:
        model, x, y = samples(20)
        recorder = Recorder(monkeypatch)
        found = Square(queries=70).run(model, x, y, ThreatModel(norm=norm, eps=EPS[norm] / 2))
        assert 0 < int(found.success.sum()) < 20
        assert len({int(count) for count in found.forwards[found.success]}) > 1
        assert (found.forwards[~found.success] == 70).all()
        for row in range(20):
            steps = [step for step, rows in enumerate(recorder.asked, 1) if row in rows]
            assert len(steps) == int(found.forwards[row])
            assert bool(found.success[row]) is (row in recorder.fell)
            assert steps[-1] == recorder.fell.get(row, 70)
        assert not found.backwards.any()

    @both_norms
    def test_each_restart_has_its_own_queries(self, norm: Norm) -> None:
        model, x, y = samples(20)
        threat = ThreatModel(norm=norm, eps=EPS[norm] / 2)
        one, three = (Square(queries=20, restarts=restarts).run(model, x, y, threat) for restarts in (1, 3))
        assert (three.forwards[~three.success] == 60).all()
        assert (three.success >= one.success).all()
        assert torch.equal(three.x_adv[one.success], one.x_adv[one.success])

    def test_one_query_is_the_start(self) -> None:
        model, x, y = samples()
        threat = ThreatModel(eps=0.02)
        found = Square(queries=1).run(model, x, y, threat, key=Key(4))
        start = stripes(x, threat, torch.arange(8), Key(4).fold("square", 0).fold("start"))
        assert torch.equal(found.x_adv, start)
        assert (found.forwards == 1).all()

    def test_rays_leaves_within_eps_unless_distances_are_wanted(self) -> None:
        model, x, y = samples(12)
        threat = ThreatModel(eps=0.3)
        short = RayS(queries=300).run(model, x, y, threat)
        full = RayS(queries=300).run(model, x, y, threat, distances=True)
        assert (short.forwards <= full.forwards).all()
        assert int(short.forwards.sum()) < int(full.forwards.sum())
        assert (full.forwards <= 300).all()
        assert torch.equal(short.success, full.success)
        assert full.distance is not None
        assert full.success.tolist() == (full.distance <= 0.3).tolist()

    def test_rays_stops_when_a_pass_gains_nothing(self) -> None:
        model, x, y = samples(12)
        runs = [RayS(queries=q).run(model, x, y, ThreatModel(eps=0.3), distances=True) for q in (1000, 4000)]
        assert (runs[0].forwards < 1000).all()
        assert torch.equal(runs[0].forwards, runs[1].forwards)


class TestSquare:
    @both_norms
    def test_the_margin_never_falls(self, norm: Norm) -> None:
        model, x, y = samples(12)
        threat, last = ThreatModel(norm=norm, eps=EPS[norm] / 4), torch.full((12,), -math.inf)
        for queries in (1, 2, 5, 20, 60, 150):
            now = margins(model, Square(queries=queries)(model, x, y, threat), y)
            assert (now >= last).all()
            last = now

    def test_schedule(self) -> None:
        for step, halvings in ((0, 0), (10, 0), (11, 1), (50, 1), (51, 2), (4000, 6), (4001, 7), (6001, 8), (8001, 9)):
            assert share(step, 0.8, 10_000) == 0.8 / 2**halvings
            assert share(-(-step // 10), 0.8, 1000) == pytest.approx(share(-(-step // 10) * 10, 0.8, 10_000))
        assert share(30, 0.8, 100) == 0.8 / 2**6

    def test_rescaled_squares_end_small(self) -> None:
        model, x, y = samples(12, shape=(1, 6, 6))
        threat = ThreatModel(eps=0.004)
        plain, rescaled = (Square(queries=100, rescale=on)(model, x, y, threat) for on in (False, True))
        assert margins(model, rescaled, y).mean() > margins(model, plain, y).mean()

    def test_a_bump_of_the_whole_radius_holds_most_of_it(self) -> None:
        x = rand(6, 1, 64, seed=5) / 4 + 0.4
        threat, key = ThreatModel(norm="l2", eps=0.5), Key(6)
        best = bumps(x.view(6, 1, 8, 8), threat, torch.arange(6), key).flatten(2)
        draws = _draw(key, torch.arange(6), [3], (1, 8, 8), x.dtype)
        shares = []
        for norm in ("l2", "l2, whole"):
            delta = MOVES[norm][1](best, x, threat, (1, 8, 8), 3, _Draws(*(drawn[0] for drawn in draws))) - x
            inside = delta.gather(2, _pixels(draws.corner[0], 3, (1, 8, 8)))
            assert torch.allclose(delta.norm(dim=2), torch.tensor(0.5, dtype=x.dtype))
            shares.append(inside.norm(dim=2) / delta.norm(dim=2))
        assert (shares[1] > 0.7).all()
        assert (shares[1] > shares[0]).all()

    @both_norms
    def test_squares_asked_about_ahead_are_the_same_search(self, norm: Norm) -> None:
        model, x, y = samples(10, shape=(2, 5, 6))
        threat = ThreatModel(norm=norm, eps=EPS[norm] / 4)
        one = Square(queries=203, restarts=2).run(model, x, y, threat, key=Key(2))
        assert 0 < int(one.success.sum()) < len(x)
        for ahead in (2, 7, 64):
            found = Square(queries=203, restarts=2, ahead=ahead).run(model, x, y, threat, key=Key(2))
            assert torch.equal(found.x_adv, one.x_adv)
            assert torch.equal(found.success, one.success)
            assert (found.forwards >= one.forwards).all()
            assert found.forwards[~one.success].double().mean() < 3 * 406  # it looks less far where squares help

    def test_who_has_no_hope_resigns(self) -> None:
        """Two images of which each pixel is a logit: one whose rival is near, one whose rival nothing can lift."""
        model, threat = torch.nn.Flatten(), ThreatModel(eps=0.05)
        x, y = torch.full((2, 1, 8, 8), 0.5, dtype=torch.float64), torch.tensor([0, 0])
        x[0, 0, 0, 0], x[1, 0, 0, 0] = 0.59, 0.9
        one, two = (
            Square(queries=2000, p=0.05, resign=resign).run(model, x, y, threat, start=x.clone())
            for resign in (False, True)
        )
        assert one.success.tolist() == two.success.tolist() == [True, False]
        assert torch.equal(one.forwards[:1], two.forwards[:1])
        assert int(one.forwards[1]) == 2000
        assert int(two.forwards[1]) % (PACE * CHUNK) == 1  # it is let go at a place that is no other sample's doing
        assert int(two.forwards[1]) < 1000
        # Towards a target there is no height at which a sample falls.
        aimed = Square(queries=600, resign=True).run(model, x, y, threat, target=torch.tensor([5, 5]))
        assert int(aimed.forwards[1]) == 600

    def test_resigning_is_a_samples_own_affair(self) -> None:
        model, x, y = samples(10, shape=(2, 5, 6))
        threat = ThreatModel(eps=EPS["linf"] / 4)
        attack = Square(queries=900, p=0.05, ahead=8, resign=True)
        together = attack.run(model, x, y, threat, key=Key(2))
        assert len(set(together.forwards[~together.success].tolist())) > 1  # some resign, and not all at once
        for i in range(len(x)):
            index = torch.tensor([i])
            alone = attack.run(model, x[i : i + 1], y[i : i + 1], threat, key=Key(2), index=index)
            assert torch.equal(alone.x_adv[0], together.x_adv[i])
            assert bool(alone.success) == bool(together.success[i])

    def test_a_given_start_is_gone_on_from(self) -> None:
        model, x, y = samples(6)
        threat, rows = ThreatModel(eps=0.02), torch.tensor([1, 4, 5])
        problem = Problem(model, x, y, threat, key=Key(0))
        start = threat.project(x + 0.01, x)[rows]
        kept = start.clone()
        squares(problem, rows, start, Key(1), Square(queries=30))
        assert torch.equal(start, kept)
        with torch.no_grad():
            assert problem.forwards.tolist() == [0, 30, 0, 0, 30, 30]
        assert (margins(model, problem.best[rows], y[rows]) > margins(model, start, y[rows])).all()

    def test_a_square_that_changes_nothing_is_drawn_again(self) -> None:
        class Watched(Smooth):
            seen: list[Tensor] = []  # noqa: RUF012

            def forward(self, x: Tensor) -> Tensor:
                self.seen.append(x.clone())
                return torch.tensor([[1.0, 0.0]]).expand(len(x), 2)

        model = Watched(pixels=6)
        Square(queries=50)(model, rand(1, 1, 2, 3) / 2 + 0.25, torch.tensor([0]), ThreatModel(eps=0.1))
        start = model.seen[0]
        assert all(not torch.equal(point, start) for point in model.seen[1:])

    def test_shapes(self) -> None:
        assert image_shape((5,)) == (1, 1, 5)
        assert image_shape((4, 5)) == (1, 4, 5)
        with pytest.raises(UserError, match=r"channels, height, width"):
            image_shape((1, 2, 3, 4))

    @pytest.mark.parametrize("wrong", [{"queries": 0}, {"p": 0}, {"p": 1.5}, {"restarts": 0}, {"steps": 3}])
    def test_wrong_settings(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Square(**wrong)

    def test_unknown_norms(self) -> None:
        model, x, y = samples(2)
        with pytest.raises(UserError, match="linf, l2"):
            Square()(model, x, y, ThreatModel(norm="l1", eps=1.0))
        with pytest.raises(UserError, match="norms linf, got l2"):
            RayS()(model, x, y, ThreatModel(norm="l2", eps=1.0))


@pytest.mark.parametrize(("attack", "norm"), CASES[2:4])  # plain ones are in test_contract.py
def test_batch_size_and_order_do_not_matter(attack: Search, norm: Norm) -> None:
    model, x, y = samples()
    threat, index = ThreatModel(norm=norm, eps=EPS[norm]), torch.tensor([30, 4, 77, 12, 9, 1, 5, 600])
    whole = attack(model, x, y, threat, index=index, key=Key(2))
    order = torch.tensor([6, 0, 3, 7, 1, 2, 5, 4])
    assert torch.equal(attack(model, x[order], y[order], threat, index=index[order], key=Key(2)), whole[order])
    for row in range(len(x)):
        one = slice(row, row + 1)
        assert torch.equal(attack(model, x[one], y[one], threat, index=index[one], key=Key(2)), whole[one])


@every_case
class TestContract:
    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [
            *[((1, 1, 1), torch.float32), ((3, 1, 1), torch.float64), ((3, 3, 4), torch.float32)],
            *[((3, 4, 3), torch.float64), ((1, 7, 2), torch.float32), ((5,), torch.float64), ((2, 3), torch.float32)],
        ],
    )
    def test_any_shape_and_type(self, attack: Search, norm: Norm, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        model, x, y = samples(4, shape=shape)
        x = (1.4 * x - 0.2).clamp(0, 1).to(dtype)
        before = x.clone()
        for eps in (1e-6, EPS[norm], 2.0):
            threat = ThreatModel(norm=norm, eps=0).at(eps)
            found = attack.run(model, x, y, threat)
            assert found.x_adv.dtype == dtype
            assert threat.contains(found.x_adv, x).all()
            assert (sizes(found.x_adv.double() - x.double(), norm) <= eps + 1e-6).all()
            assert torch.equal(x, before)
            with torch.no_grad():
                wrong = model(found.x_adv).argmax(dim=1) != y
            # A nearest point just outside eps is brought inside, and may still be adversarial there, unseen.
            assert wrong[found.success].all()
            tied = margins(model, found.x_adv, y) == 0  # a black image has no logits here, and a tie is no success
            assert attack.minimum_norm or torch.equal(wrong & ~tied, found.success)

    @pytest.mark.parametrize("classes", [2, 10])
    def test_targets_and_classes(self, attack: Search, norm: Norm, classes: int) -> None:
        model, x, y = samples(6, classes)
        target = (y + 1) % classes
        found = attack.run(model, x, y, ThreatModel(norm=norm, eps=0).at(2.0), target=target)
        with torch.no_grad():
            assert torch.equal(model(found.x_adv).argmax(dim=1) == target, found.success)

    def test_no_gradient_is_asked_for(self, attack: Search, norm: Norm) -> None:
        class Wall(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                raise AssertionError("a gradient was asked for")

        class Guarded(Smooth):
            def forward(self, x: Tensor) -> Tensor:
                walled: Tensor = Wall.apply(x)  # type: ignore[no-untyped-call]
                return super().forward(walled)

        _, x, y = samples()
        assert attack.black_box
        assert not attack.run(Guarded(), x, y, ThreatModel(norm=norm, eps=EPS[norm])).backwards.any()

    def test_a_wrong_answer_is_never_claimed_of_a_constant_model(self, attack: Search, norm: Norm) -> None:
        class Constant(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.tensor([[1.0, 0.0]], dtype=x.dtype).expand(len(x), 2)

        x = rand(3, 1, 3, 4)
        threat = ThreatModel(norm=norm, eps=EPS[norm])
        found = attack.run(Constant(), x, torch.tensor([0, 0, 1]), threat)
        assert found.success.tolist() == [False, False, True]


class TestDistances:
    def found(self, *distances: float) -> Found:
        nothing = torch.zeros(len(distances))
        return Found(nothing, nothing > 0, nothing, nothing, nothing, torch.tensor(distances, dtype=torch.float64))

    def test_adbd_counts_the_misclassified_as_zero_and_the_unreached_as_the_width(self) -> None:
        found = self.found(0.0, 0.25, math.inf, 0.5)
        assert adbd(found) == (0 + 0.25 + 1 + 0.5) / 4
        assert adbd(found, width=2.0) == (0 + 0.25 + 2 + 0.5) / 4
        assert accuracy(found, 0.3) == 0.5
        assert accuracy(found, 0.25) == 0.5

    def test_without_distances(self) -> None:
        nothing = torch.zeros(2)
        for found in (Found(nothing, nothing > 0, nothing, nothing), self.found()):
            with pytest.raises(UserError, match="no distances"):
                adbd(found)
            with pytest.raises(UserError, match="no distances"):
                accuracy(found, 0.1)

    def test_a_model_never_fooled_is_infinitely_far(self) -> None:
        class Constant(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.tensor([[1.0, 0.0]], dtype=x.dtype).expand(len(x), 2)

        x = rand(2, 1, 2, 2)
        found = RayS(queries=100).run(Constant(), x, torch.tensor([0, 1]), ThreatModel(eps=0.1), distances=True)
        assert found.distance is not None
        assert found.distance.tolist() == [math.inf, 0.0]
        assert adbd(found) == 0.5
        assert torch.equal(found.x_adv, x)

    def test_distance_is_that_of_the_clamped_point(self) -> None:
        """A pixel at its bound cannot move: the ray is 0.8 long where its point is only 0.2 away."""
        model = LinearClassifier(torch.tensor([[0.0, 0.0], [1.0, 0.0]]).double(), torch.tensor([0.0, -0.95]).double())
        x = torch.tensor([[[[0.8, 1.0]]]], dtype=torch.float64)
        found = RayS(queries=200).run(model, x, torch.tensor([0]), ThreatModel(eps=0.5), distances=True)
        assert found.distance is not None
        assert float(found.distance) == pytest.approx(0.15, abs=1e-3)


class TestMutations:
    """The oracles go red when the attack is broken."""

    def broken(self, check: Callable[[], None], patch: Callable[[], None]) -> None:
        """TestClosedForm has seen each check green."""
        patch()
        assert red(check), "the break went unnoticed"

    def square(self, norm: Norm) -> Callable[[], None]:
        return partial(check_budget, SEARCH[norm, 2], norm, 2, SLACK[norm])

    @both_norms
    def test_loss_constant(self, monkeypatch: pytest.MonkeyPatch, norm: Norm) -> None:
        def constant(name: str, logits: Tensor, y: Tensor, **rest: Any) -> Tensor:
            return 0 * logits[:, 0]

        self.broken(self.square(norm), lambda: monkeypatch.setattr(square_module, "adversarial_loss", constant))

    @both_norms
    def test_acceptance_reversed(self, monkeypatch: pytest.MonkeyPatch, norm: Norm) -> None:
        right = square_module.climbed

        def down(*args: Any) -> Tensor:
            return -right(*args)

        self.broken(self.square(norm), lambda: monkeypatch.setattr(square_module, "climbed", down))

    def test_squares_of_no_size(self, monkeypatch: pytest.MonkeyPatch) -> None:
        move = square_module.MOVES["linf"][1]
        nothing = (lambda part, shape: 0, move)
        self.broken(self.square("linf"), lambda: monkeypatch.setitem(square_module.MOVES, "linf", nothing))

    @both_norms
    def test_candidate_never_moves(self, monkeypatch: pytest.MonkeyPatch, norm: Norm) -> None:
        still = (square_module.MOVES[norm][0], lambda best, *rest, **more: best.clone())
        self.broken(self.square(norm), lambda: monkeypatch.setitem(square_module.MOVES, norm, still))

    def test_rays_answers_reversed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = rays_module._Rays.learn

        def wrong(rays: Any, won: Tensor, narrow: float) -> None:
            right(rays, ~won, narrow)

        check = partial(check_distances, RayS(queries=400), "linf", 3, FACTOR)
        self.broken(check, lambda: monkeypatch.setattr(rays_module._Rays, "learn", wrong))

    def test_rays_flips_nothing_after_the_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        right = rays_module._Rays._next

        def stuck(rays: Any, ended: Tensor) -> None:
            right(rays, ended)
            rays.first = torch.full_like(rays.first, rays.pixels)

        check = partial(check_distances, RayS(queries=400), "linf", 3, FACTOR)
        self.broken(check, lambda: monkeypatch.setattr(rays_module._Rays, "_next", stuck))

    def test_rays_never_bisects(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert red(partial(check_distances, RayS(queries=400, tolerance=1e3), "linf", 3, FACTOR))
