"""NES, SPSA and ZOO: as strong as gradients on a linear model, and never a gradient nor a query too many."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import estimated as estimated_module
from steelman.attacks import zoo as zoo_module
from steelman.attacks.engine import Problem, Search
from steelman.attacks.estimated import Estimated, signs
from steelman.attacks.zoo import ZOO
from steelman.errors import UserError
from steelman.rng import Key
from steelman.threat import Norm, ThreatModel
from tests.oracles import LinearClassifier, check_budget, check_budget_in_box, rand, randn, random_problem, red

NORMS: tuple[Norm, ...] = ("linf", "l2", "l1")
EPS = {"linf": 0.1, "l2": 0.4, "l1": 1.0}
NES, SPSA = Estimated(steps=10, pairs=64), Estimated(steps=10, pairs=64, noise="rademacher")
ZEROTH = {"nes": NES, "spsa": SPSA, "zoo": ZOO(queries=400, coordinates=4)}
EVERY = [(name, norm) for name, attack in ZEROTH.items() for norm in attack.norms]
every_one = pytest.mark.parametrize(("name", "norm"), EVERY)
every_noise = pytest.mark.parametrize("attack", [NES, SPSA], ids=["nes", "spsa"])
# A fixed share over the least radius. With ten random classes the climb goes to the class that is nearest in logits,
# not to the one that is nearest in radius; PGD from the clean image needs nearly as much.
SLACK = {"linf": 0.8, "l2": 0.2, "l1": 0.35}


class Curved(nn.Module):
    """A curved classifier whose logits do not depend on the batch in the last bit; it records the batches it gets."""

    def __init__(self, classes: int = 4, pixels: int = 12) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(2 * randn(10, pixels, seed=1)), nn.Parameter(randn(classes, 10, seed=2))
        self.batches: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.batches.append(len(x))
        h = torch.tanh((x.flatten(1)[:, None, :] * self.a.to(x)).sum(dim=-1))
        return (h[:, None, :] * self.b.to(x)).sum(dim=-1)


class NoWayBack(torch.autograd.Function):
    """A forward that is its input and a backward that must not be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise AssertionError("a black-box attack asked for a gradient")


class Closed(Curved):
    def forward(self, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        passed: Tensor = NoWayBack.apply(super().forward(x))  # type: ignore[no-untyped-call]
        return passed


def samples(n: int = 8, classes: int = 4) -> tuple[Curved, Tensor, Tensor]:
    model, x = Curved(classes), rand(n, 1, 3, 4, seed=3)
    y = model(x).argmax(dim=1)
    model.batches.clear()
    return model, x, y


def slack_of(norm: str, classes: int) -> float:
    return SLACK[norm] if classes == 10 else 0.1


class TestOracle:
    @pytest.mark.parametrize(
        ("name", "norm", "classes"),
        [*((name, norm, 3) for name, norm in EVERY), ("nes", "linf", 10), ("spsa", "l1", 10), ("zoo", "l2", 10)],
    )
    def test_closed_form(self, name: str, norm: Norm, classes: int) -> None:
        check_budget(ZEROTH[name], norm, classes, slack=slack_of(norm, classes))

    @every_one
    def test_solver_in_the_box(self, name: str, norm: Norm) -> None:
        check_budget_in_box(ZEROTH[name], norm, slack=0.1)

    @every_one
    def test_a_target_is_reached(self, name: str, norm: Norm) -> None:
        problem = random_problem(4)
        threat = ThreatModel(norm=norm, eps={"linf": 3.0, "l2": 10.0, "l1": 40.0}[norm], low=-100, high=100)
        for shift in (1, 2, 3):
            target = (problem.y + shift) % 4
            found = ZEROTH[name].run(problem.model, problem.x, problem.y, threat, target=target)
            assert found.success.all()
            assert torch.equal(problem.model(found.x_adv).argmax(dim=1), target)


class TestContract:
    @pytest.mark.parametrize(("name", "norm"), [("nes", "linf"), ("spsa", "l1"), ("zoo", "l2")])
    def test_a_sample_alone_or_among_others(self, name: str, norm: Norm) -> None:
        model, x, y = samples()
        threat, index = ThreatModel(norm=norm, eps=EPS[norm] / 2), torch.tensor([30, 4, 77, 12, 9, 1, 5, 600])
        whole = ZEROTH[name].run(model, x, y, threat, index=index, key=Key(2))
        assert whole.success.any()
        assert not whole.success.all()
        order = torch.tensor([6, 0, 3, 7, 1, 2, 5, 4])
        shuffled = ZEROTH[name].run(model, x[order], y[order], threat, index=index[order], key=Key(2))
        assert torch.equal(shuffled.x_adv, whole.x_adv[order])
        assert torch.equal(shuffled.forwards, whole.forwards[order])
        for row in (0, 5):
            one = slice(row, row + 1)
            alone = ZEROTH[name].run(model, x[one], y[one], threat, index=index[one], key=Key(2))
            assert torch.equal(alone.x_adv, whole.x_adv[one])

    @pytest.mark.parametrize(("name", "norm"), [("nes", "linf"), ("spsa", "l1"), ("zoo", "l2")])
    def test_never_a_gradient(self, name: str, norm: Norm) -> None:
        model, x, y = samples()
        found = ZEROTH[name].run(Closed(), x, y, ThreatModel(norm=norm, eps=EPS[norm]))
        assert torch.equal(found.x_adv, ZEROTH[name](model, x, y, ThreatModel(norm=norm, eps=EPS[norm])))
        assert int(found.backwards.sum()) == 0
        assert ZEROTH[name].black_box

    @every_one
    def test_what_is_already_wrong_costs_one_query(self, name: str, norm: Norm) -> None:
        model, x, y = samples()
        found = ZEROTH[name].run(model, x, (y + 1) % 4, ThreatModel(norm=norm, eps=EPS[norm]))
        assert torch.equal(found.x_adv, x)
        assert found.forwards.tolist() == [1] * 8

    @pytest.mark.parametrize(("name", "images"), [("nes", 1), ("spsa", 50), ("zoo", 1), ("zoo", 100_000)])
    def test_how_many_share_a_forward_changes_nothing(
        self, monkeypatch: pytest.MonkeyPatch, name: str, images: int
    ) -> None:
        attack = ZOO(queries=200, coordinates=5) if name == "zoo" else ZEROTH[name]
        model, x, y = samples()
        threat = ThreatModel(norm="l2", eps=0.2)
        expected = attack.run(model, x, y, threat)
        model.batches.clear()
        monkeypatch.setattr(estimated_module, "IMAGES_AT_ONCE", images)
        found = attack.run(model, x, y, threat)
        assert torch.equal(found.x_adv, expected.x_adv)
        assert torch.equal(found.forwards, expected.forwards)
        assert max(model.batches) <= max(images, 2 * len(x))

    def test_settings_that_cannot_be(self) -> None:
        model, x, y = samples()
        with pytest.raises(UserError, match="linf, l2, got l1"):
            ZOO()(model, x, y, ThreatModel(norm="l1", eps=1.0))
        wrong: list[Callable[[], Search]] = [
            lambda: Estimated(noise="uniform"),  # type: ignore[arg-type]
            lambda: Estimated(sigma=0),
            lambda: Estimated(pairs=0),
            lambda: ZOO(sigma=-1),
            lambda: ZOO(coordinates=0),
        ]
        for make in wrong:
            with pytest.raises(ValueError, match=r"noise|sigma|pairs|coordinates"):
                make()


class TestEstimate:
    def problem(self, n: int = 4, classes: int = 2) -> tuple[Problem, Tensor, Tensor]:
        model = LinearClassifier(randn(classes, 12, seed=1), torch.zeros(classes, dtype=torch.float64))
        x = rand(1, 1, 3, 4, seed=2).expand(n, -1, -1, -1)
        y = model(x).argmax(dim=1)
        true = model.weight[1 - y[0]] - model.weight[y[0]]
        return Problem(model, x, y, ThreatModel(eps=0.1), key=Key(0)), torch.arange(n), true.detach()

    @every_noise
    @torch.no_grad()
    def test_points_along_the_gradient(self, attack: Estimated) -> None:
        problem, rows, true = self.problem()
        got = Estimated(noise=attack.noise, pairs=400).gradient(problem, problem.x, rows, Key(1)).flatten(1)
        assert (torch.cosine_similarity(got, true[None], dim=1) > 0.95).all()
        assert got.norm(dim=1).tolist() == pytest.approx([float(true.norm())] * 4, rel=0.25)

    @every_noise
    @torch.no_grad()
    def test_right_on_average(self, attack: Estimated) -> None:
        """The mean over samples is the gradient, to four times its own uncertainty."""
        problem, rows, true = self.problem(n=800)
        got = Estimated(noise=attack.noise, pairs=4).gradient(problem, problem.x, rows, Key(1)).flatten(1)
        error = (got.mean(dim=0) - true) / (got.std(dim=0) / 800**0.5)
        assert error.abs().max() < 4
        assert got.mean(dim=0).tolist() == pytest.approx(true.tolist(), abs=0.05 * float(true.norm()))

    @every_noise
    @torch.no_grad()
    def test_the_published_sum(self, attack: Estimated) -> None:
        """Against the formula in a loop, one sample and one pair at a time, on a curved model."""
        model, x, y = samples(3)
        problem, rows, key = Problem(model, x, y, ThreatModel(eps=0.1), key=Key(0)), torch.arange(3), Key(4)
        got = attack.gradient(problem, x, rows, key)
        for row in range(3):
            total = np.zeros((1, 3, 4))
            for pair in range(attack.pairs):
                number = torch.tensor([row * attack.pairs + pair])
                draw = key.normal if attack.noise == "gaussian" else partial(signs, key)
                u = draw(number, (1, 3, 4), torch.float64)[0]
                margins = []
                for side in (1, -1):
                    z = model((x[row] + side * attack.sigma * u)[None])[0].tolist()
                    margins.append(max(z[k] for k in range(4) if k != y[row]) - z[int(y[row])])
                total += (margins[0] - margins[1]) / (2 * attack.sigma * attack.pairs) * u.numpy()
            np.testing.assert_allclose(got[row].numpy(), total, rtol=1e-9, atol=1e-12)

    def test_signs(self) -> None:
        drawn = signs(Key(3), torch.arange(50), (10, 20), torch.float32)
        assert set(drawn.flatten().tolist()) == {-1, 1}
        assert abs(float(drawn.mean())) < 0.04
        assert float((drawn[:-1] * drawn[1:]).mean().abs()) < 0.04
        assert torch.equal(signs(Key(3), torch.tensor([7]), (10, 20), torch.float32)[0], drawn[7])
        assert signs(Key(3), torch.tensor([7]), (), torch.float32).shape == (1,)


class TestQueries:
    @every_noise
    @pytest.mark.parametrize("restarts", [1, 2])
    def test_of_estimates(self, attack: Estimated, restarts: int) -> None:
        model, x, y = samples()
        attack = Estimated(noise=attack.noise, steps=3, pairs=5, restarts=restarts, start="uniform")
        found = attack.run(model, x, y, ThreatModel(eps=1e-6))
        assert not found.success.any()
        assert found.forwards.tolist() == [restarts * (3 * 11 + 1)] * 8
        assert sum(model.batches) == int(found.forwards.sum())

    @pytest.mark.parametrize(
        ("queries", "coordinates", "expected"),
        [(1, 1, 1), (3, 1, 1), (4, 1, 4), (101, 1, 100), (200, 5, 200), (101, 7, 100), (100, 50, 100), (32, 50, 32)],
    )
    def test_of_zoo(self, queries: int, coordinates: int, expected: int) -> None:
        model, x, y = samples()
        found = ZOO(queries=queries, coordinates=coordinates).run(model, x, y, ThreatModel(eps=1e-6))
        assert found.forwards.tolist() == [expected] * 8
        assert sum(model.batches) == 8 * expected

    @every_one
    def test_stop_at_success(self, name: str, norm: Norm) -> None:
        model, x, y = samples()
        found = ZEROTH[name].run(model, x, y, ThreatModel(norm=norm, eps=EPS[norm] / 2))
        most = 400 if name == "zoo" else 10 * 129 + 1
        assert sum(model.batches) == int(found.forwards.sum())
        assert (found.forwards[~found.success] == most).all()
        assert (found.forwards[found.success] < most).any()
        if name != "zoo":
            assert (found.forwards % 129 == 1).all()
        assert torch.equal(model(found.x_adv).argmax(dim=1) != y, found.success)


class TestZOO:
    @pytest.mark.parametrize("norm", ["linf", "l2"])
    @pytest.mark.parametrize("coordinates", [1, 5])
    def test_the_published_update(self, norm: Norm, coordinates: int) -> None:
        """Against Adam on one coordinate after another, in a loop, one sample at a time."""
        model, x, y = samples(3)
        threat, key, attack = ThreatModel(norm=norm, eps=0.02), Key(6), ZOO(queries=102, coordinates=coordinates)
        found = attack.run(model, x, y, threat, key=key)
        assert not found.success.any()

        def margin(point: Tensor, row: int) -> float:
            z = model(point[None])[0].tolist()
            return float(max(z[k] for k in range(4) if k != y[row]) - z[int(y[row])])

        for row in range(3):
            point, m, v, left = x[row].clone(), np.zeros(12), np.zeros(12), 50
            best, value = point, margin(point, row)
            for visit in (1, 2, 3, 4, 5):
                order = np.argsort(key.fold("visit", visit).bits(torch.tensor([row]), 12)[0].numpy())
                for first in range(0, 12, coordinates):
                    chosen = order[first : first + coordinates][:left]
                    left -= len(chosen)
                    step = torch.zeros(12, dtype=torch.float64)
                    for i in chosen:
                        asked = []
                        for side in (1, -1):
                            moved = point if norm == "linf" else x[row] + (1 + 1e-4 / 0.02) * (point - x[row])
                            e = torch.zeros(12, dtype=torch.float64)
                            e[i] = side * 1e-4
                            near = threat.project((moved + e.view(1, 3, 4))[None], x[row][None])[0]
                            asked.append(margin(near, row))
                            if asked[-1] > value:
                                best, value = near, asked[-1]
                        g = (asked[0] - asked[1]) / 2e-4
                        m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g * g
                        eta = 0.02 if norm == "linf" else 2 * 0.02 / 12**0.5
                        step[i] = eta * m[i] / (1 - 0.9**visit) / ((v[i] / (1 - 0.999**visit)) ** 0.5 + 1e-8)
                    point = threat.project((point + step.view(1, 3, 4))[None], x[row][None])[0]
            if margin(point, row) > value:
                best = point
            np.testing.assert_allclose(found.x_adv[row].detach(), best.detach(), atol=1e-9)

    def test_every_coordinate_before_any_again(self) -> None:
        class Watch(Curved):
            def forward(self, x: Tensor) -> Tensor:
                seen.append(x.detach().flatten(1).clone())
                return super().forward(x)

        seen: list[Tensor] = []
        _, x, y = samples(1)
        ZOO(queries=26, step_size=1e-12).run(Watch(), x, y, ThreatModel(eps=0.01))
        moved = [(pair[0] - pair[1]).abs().argmax().item() for pair in seen if len(pair) == 2]
        assert sorted(moved) == list(range(12))


class TestMutations:
    """Each break of the code turns the oracle red."""

    def check(self, name: str, norm: Norm) -> Callable[[], None]:
        return partial(check_budget, ZEROTH[name], norm, 3, slack=0.1)

    @pytest.mark.parametrize(("name", "norm"), [("nes", "linf"), ("spsa", "l1"), ("zoo", "l2")])
    def test_constant_loss(self, monkeypatch: pytest.MonkeyPatch, name: str, norm: Norm) -> None:
        module = zoo_module if name == "zoo" else estimated_module
        monkeypatch.setattr(module, "climbed", lambda problem, logits, rows: 0 * logits[:, 0])
        assert red(self.check(name, norm))

    @every_one
    def test_loss_of_the_wrong_sign(self, monkeypatch: pytest.MonkeyPatch, name: str, norm: Norm) -> None:
        module, right = zoo_module if name == "zoo" else estimated_module, estimated_module.climbed
        monkeypatch.setattr(module, "climbed", lambda *args: -right(*args))
        assert red(self.check(name, norm))

    @pytest.mark.parametrize(("name", "norm"), [("nes", "l2"), ("spsa", "linf"), ("zoo", "linf")])
    def test_step_of_zero(self, monkeypatch: pytest.MonkeyPatch, name: str, norm: Norm) -> None:
        if name == "zoo":
            monkeypatch.setattr(ZOO, "eta", lambda *args: 0.0)
        else:
            monkeypatch.setattr(estimated_module, "ascend", lambda x_adv, *rest: x_adv)
        assert red(self.check(name, norm))

    @pytest.mark.parametrize("norm", NORMS)
    @every_noise
    def test_one_noise_for_all_pairs(self, monkeypatch: pytest.MonkeyPatch, attack: Estimated, norm: Norm) -> None:
        def same(self: Estimated, points: Tensor, index: Tensor, pairs: range, key: Key) -> Tensor:
            u = Key(0).normal(index, tuple(points.shape[1:]), points.dtype)
            return u[:, None].expand(-1, len(pairs), *points.shape[1:])

        monkeypatch.setattr(Estimated, "directions", same)
        assert red(partial(check_budget, attack, norm, 3, slack=0.1))

    def test_l2_slope_off_the_sphere(self) -> None:
        """Adam on slopes that ignore the sphere ends at the sign vector, a fifth short of the radius."""

        class Free(ZOO):
            def slopes(self, problem: Problem, x_adv: Tensor, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
                free = Problem(
                    problem.model, problem.x, problem.y, ThreatModel(eps=1e3, low=-1e3, high=1e3), key=Key(0)
                )
                return ZOO.slopes(self, free, x_adv, rows, places)[0], torch.zeros_like(rows, dtype=torch.bool)

        assert red(partial(check_budget, Free(queries=400), "l2", 3, slack=0.1))
