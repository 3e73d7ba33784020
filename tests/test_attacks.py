"""The contract every attack keeps, and the linear model on which the right answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import ATTACKS, PGD, Search
from steelman.losses import LOSSES
from steelman.rng import Key
from steelman.threat import Norm, ThreatModel
from tests.oracles import (
    DUALS,
    LinearClassifier,
    check_budget,
    check_inside,
    check_linear,
    check_linear_in_box,
    linear_problem,
    rand,
    randn,
)
from tests.settings import ATTACK_SETTINGS, EXACT_ATTACKS, EXACT_ATTACKS_IN_BOX, ORACLE_ATTACKS

NORMS: tuple[Norm, ...] = ("linf", "l2", "l1")
EPS = {"linf": 0.1, "l2": 0.4, "l1": 1.0}
every_attack = pytest.mark.parametrize(
    ("name", "norm"),
    [(name, norm) for name in sorted(ATTACKS) for norm in ATTACKS[name](**ATTACK_SETTINGS.get(name, {})).norms],
)
every_norm = pytest.mark.parametrize("norm", NORMS)


class Smooth(nn.Module):
    """A curved classifier whose logits do not depend on the batch in the last bit."""

    def __init__(self, classes: int = 4, pixels: int = 12) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(2 * randn(10, pixels, seed=1)), nn.Parameter(randn(classes, 10, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh((x.flatten(1)[:, None, :] * self.a.to(x)).sum(dim=-1))
        return (h[:, None, :] * self.b.to(x)).sum(dim=-1)


def small(name: str) -> Search:
    return ATTACKS[name](**ATTACK_SETTINGS[name])


def samples(n: int = 8, classes: int = 4) -> tuple[Smooth, Tensor, Tensor]:
    model, x = Smooth(classes), rand(n, 1, 3, 4, seed=3)
    return model, x, model(x).argmax(dim=1)


def test_every_attack_has_small_settings() -> None:
    assert ATTACK_SETTINGS.keys() == ATTACKS.keys() == ORACLE_ATTACKS.keys()
    assert set(EXACT_ATTACKS) <= set(ATTACKS)
    assert set(EXACT_ATTACKS_IN_BOX) <= set(ATTACKS)


@every_attack
class TestContract:
    def test_radius_box_shape_and_type(self, name: str, norm: Norm) -> None:
        check_inside(name, norm, **ATTACK_SETTINGS[name])

    def test_same_key_same_answer(self, name: str, norm: Norm) -> None:
        model, x, y = samples()
        threat = ThreatModel(norm=norm, eps=EPS[norm])
        before = x.clone()
        one = small(name)(model, x, y, threat, key=Key(5))
        torch.manual_seed(99)  # the global generator plays no part
        assert torch.equal(small(name)(model, x, y, threat, key=Key(5)), one)
        assert torch.equal(x, before)
        assert not one.requires_grad

    def test_batch_size_and_order_do_not_matter(self, name: str, norm: Norm) -> None:
        model, x, y = samples()
        threat, index = ThreatModel(norm=norm, eps=EPS[norm]), torch.tensor([30, 4, 77, 12, 9, 1, 5, 600])
        whole = small(name)(model, x, y, threat, index=index, key=Key(2))
        order = torch.tensor([6, 0, 3, 7, 1, 2, 5, 4])
        shuffled = small(name)(model, x[order], y[order], threat, index=index[order], key=Key(2))
        assert torch.equal(shuffled, whole[order])
        for row in range(len(x)):
            one = slice(row, row + 1)
            alone = small(name)(model, x[one], y[one], threat, index=index[one], key=Key(2))
            assert torch.equal(alone, whole[one])

    def test_no_samples_one_sample_and_no_radius(self, name: str, norm: Norm) -> None:
        model, x, y = samples()
        threat = ThreatModel(norm=norm, eps=EPS[norm])
        assert small(name)(model, x[:0], y[:0], threat).shape == x[:0].shape
        assert small(name)(model, x[:1], y[:1], threat).shape == x[:1].shape
        assert torch.equal(small(name)(model, x, y, threat.at(0.0)), x)

    def test_two_classes(self, name: str, norm: Norm) -> None:
        model, x, y = samples(classes=2)
        threat = ThreatModel(norm=norm, eps=EPS[norm])
        x_adv = small(name)(model, x, y, threat)
        assert threat.contains(x_adv, x).all()
        assert (model(x_adv).argmax(dim=1) != y).any()

    def test_the_answer_and_what_it_cost(self, name: str, norm: Norm) -> None:
        model, x, y = samples()
        calls = torch.zeros(2, dtype=torch.int64)

        class Counting(nn.Module):
            def forward(self, points: Tensor) -> Tensor:
                calls[0] += len(points)
                if points.requires_grad:
                    points.register_hook(lambda _: calls[1].add_(len(points)) and None)  # type: ignore[no-untyped-call]
                return model(points)  # type: ignore[no-any-return]

        threat, attack = ThreatModel(norm=norm, eps=EPS[norm]), small(name)
        found = attack.run(Counting(), x, y, threat, key=Key(5))
        assert int(found.forwards.sum()) == calls[0]
        assert int(found.backwards.sum()) == calls[1]
        assert not (attack.black_box and calls[1])
        if not (isinstance(attack, PGD) and attack.keep == "last"):
            assert torch.equal(found.success, model(found.x_adv).argmax(dim=1) != y)
        assert torch.equal(attack(model, x, y, threat, key=Key(5)), found.x_adv)
        assert (found.distance is not None) == attack.minimum_norm

    def test_an_interrupted_attack_leaves_the_model_as_it_was(self, name: str, norm: Norm) -> None:
        class Stopping(Smooth):
            calls = 0

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                if self.calls == 2:
                    raise KeyboardInterrupt
                return super().forward(x)

        model, x = Stopping(), rand(8, 1, 3, 4, seed=3)
        weights, pointers = [p.clone() for p in model.parameters()], [p.data_ptr() for p in model.parameters()]
        state = torch.get_rng_state()
        with pytest.raises(KeyboardInterrupt):
            small(name)(model, x, Smooth()(x).argmax(dim=1), ThreatModel(norm=norm, eps=1e-3))
        assert model.training
        assert all(p.requires_grad and p.grad is None for p in model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
        assert pointers == [p.data_ptr() for p in model.parameters()]
        assert torch.equal(state, torch.get_rng_state())

    def test_one_pixel(self, name: str, norm: Norm) -> None:
        model = LinearClassifier(torch.tensor([[1.0], [-1.0]]), torch.tensor([0.0, 0.5]))
        x, y = torch.tensor([0.3, 0.6]).reshape(2, 1, 1, 1), torch.tensor([0, 0])  # the boundary is at 0.25
        x_adv = small(name)(model, x, y, ThreatModel(norm=norm, eps=0.1))
        assert (model(x_adv).argmax(dim=1) != y).tolist() == [True, False]

    def test_works_where_gradients_are_off_and_inputs_track_them(self, name: str, norm: Norm) -> None:
        model, x, y = samples()
        threat = ThreatModel(norm=norm, eps=EPS[norm])
        expected = small(name)(model, x, y, threat, key=Key(1))
        with torch.no_grad():
            assert torch.equal(small(name)(model, x, y, threat, key=Key(1)), expected)
            assert not torch.is_grad_enabled()
        tracked = x.clone().requires_grad_()
        assert torch.equal(small(name)(model, tracked, y, threat, key=Key(1)), expected)
        assert not small(name)(model, tracked, y, threat.at(0.0)).requires_grad

    def test_broken_derivatives_do_not_stop_it(self, name: str, norm: Norm) -> None:
        class Broken(LinearClassifier):
            def forward(self, x: Tensor) -> Tensor:
                first = x.flatten(1)[:, :1]
                return super().forward(x) + (0 * first).sqrt()  # its derivative is 0 * infinity

        problem = linear_problem(3)
        model = Broken(problem.model.weight.detach(), problem.model.bias.detach())
        threat = ThreatModel(norm=norm, eps=2 * problem.distances(norm).max(), low=-100, high=100)
        x_adv = small(name)(model, problem.x, problem.y, threat)
        assert torch.isfinite(x_adv).all()
        assert threat.contains(x_adv, problem.x).all()
        if name != "feature":  # what looks most like a guide need not be beyond the boundary
            assert (model(x_adv).argmax(dim=1) != problem.y).all()


@every_attack
def test_succeeds_exactly_where_it_can(name: str, norm: Norm) -> None:
    options, slack = ORACLE_ATTACKS[name]
    check_budget(ATTACKS[name](**options), norm, 2, slack=slack[norm])


class TestLinearOracle:
    """Success exactly where the closed form allows it, to within 3% of the radius."""

    @pytest.mark.parametrize("name", sorted(EXACT_ATTACKS))
    @every_norm
    @pytest.mark.parametrize("loss", sorted(LOSSES.keys() - {"kl"}))
    @pytest.mark.parametrize("classes", [2, 3, 10])
    def test_closed_form(self, name: str, norm: Norm, loss: str, classes: int) -> None:
        check_linear(name, norm, loss, classes, **EXACT_ATTACKS[name])

    @every_norm
    @pytest.mark.parametrize("classes", [2, 3])
    def test_closed_form_for_kl(self, norm: Norm, classes: int) -> None:
        # KL grows on both sides of the clean image; restarts find the right one.
        check_linear("pgd", norm, "kl", classes, steps=8, restarts=8)

    @pytest.mark.parametrize("name", sorted(EXACT_ATTACKS_IN_BOX))
    @every_norm
    def test_solver_in_the_box(self, name: str, norm: Norm) -> None:
        check_linear_in_box(name, norm, **EXACT_ATTACKS_IN_BOX[name])

    @pytest.mark.parametrize("norm", ["linf", "l1"])
    def test_one_step_is_enough_in_the_box(self, norm: Norm) -> None:
        # From the clean image, both norms have a best step that stays in the box; l2 has none.
        check_linear_in_box("fgsm", norm, slack=1e-6)

    @every_norm
    @pytest.mark.parametrize("size", [12, 900])
    def test_value_towards_each_target(self, norm: Norm, size: int) -> None:
        """z_t - z_y at the last point is its clean value plus eps ||w_t - w_y||_q, whatever the image size."""
        model = LinearClassifier(randn(5, size), randn(5))
        x = rand(4, 1, 3, size // 3)
        y = model(x).argmax(dim=1)
        threat = ThreatModel(norm=norm, eps=0.5, low=-1e3, high=1e3)
        attack = PGD(steps=5, step_size=200.0, loss="targeted-margin", keep="last")
        for shift in range(1, 5):
            target = (y + shift) % 5
            z = model(attack(model, x, y, threat, target=target))
            across = (model.weight[target] - model.weight[y]).detach().numpy()
            clean = model(x).gather(1, target[:, None]) - model(x).gather(1, y[:, None])
            best = clean[:, 0].detach().numpy() + 0.5 * np.linalg.norm(across, ord=DUALS[norm], axis=1)
            got = z.gather(1, target[:, None]) - z.gather(1, y[:, None])
            assert got[:, 0].tolist() == pytest.approx(best.tolist(), rel=1e-6)

    @every_norm
    def test_all_targets_together_find_the_nearest_boundary(self, norm: Norm) -> None:
        """No favoured rival here: ten arbitrary classes, and the minimum over all of them."""
        model = LinearClassifier(randn(10, 12, seed=4), torch.zeros(10, dtype=torch.float64))
        x = rand(5, 1, 3, 4, seed=5)
        y = model(x).argmax(dim=1)
        w, z = model.weight.detach(), model(x).detach()
        attack = PGD(steps=5, step_size=200.0, loss="targeted-margin", keep="last")
        for row in range(5):
            gaps = [float(z[row, y[row]] - z[row, k]) for k in range(10) if k != y[row]]
            slopes = [
                float(np.linalg.norm((w[k] - w[y[row]]).numpy(), ord=DUALS[norm])) for k in range(10) if k != y[row]
            ]
            distance = min(gap / slope for gap, slope in zip(gaps, slopes))
            for ratio, expected in ((0.999, False), (1.001, True)):
                threat = ThreatModel(norm=norm, eps=distance * ratio, low=-1e3, high=1e3)
                one, targets = (
                    x[row : row + 1].expand(9, -1, -1, -1),
                    torch.tensor([k for k in range(10) if k != y[row]]),
                )
                x_adv = attack(model, one, y[row].expand(9), threat, target=targets)
                assert bool((model(x_adv).argmax(dim=1) != y[row]).any()) is expected

    @pytest.mark.parametrize("name", sorted(EXACT_ATTACKS_IN_BOX))
    @every_norm
    # The probability margin is flat where the target's probability is near 0, and may stop at another class on the way.
    @pytest.mark.parametrize(
        "loss", sorted({k for k, v in LOSSES.items() if v.needs == "nothing"} - {"probability-margin"})
    )
    def test_a_target_is_reached(self, name: str, norm: Norm, loss: str) -> None:
        model, x = LinearClassifier(randn(4, 12), torch.zeros(4, dtype=torch.float64)), rand(4, 1, 3, 4)
        y = model(x).argmax(dim=1)
        attack = ATTACKS[name](**{**ATTACK_SETTINGS[name], "loss": loss})
        threat = ThreatModel(norm=norm, eps={"linf": 3.0, "l2": 10.0, "l1": 40.0}[norm], low=-100, high=100)
        for shift in (1, 2, 3):
            target = (y + shift) % 4
            assert torch.equal(model(attack(model, x, y, threat, target=target)).argmax(dim=1), target)

    @pytest.mark.parametrize("name", sorted(EXACT_ATTACKS))
    @every_norm
    @pytest.mark.parametrize("loss", sorted(LOSSES.keys() - {"kl"}))
    def test_a_target_of_two_is_reached_just_beyond_the_boundary(self, name: str, norm: Norm, loss: str) -> None:
        problem = linear_problem(2)
        attack = ATTACKS[name](**{**EXACT_ATTACKS[name], "loss": loss})
        threat = ThreatModel(norm=norm, eps=1.03 * problem.distances(norm).max(), low=-100, high=100)
        x_adv = attack(problem.model, problem.x, problem.y, threat, target=1 - problem.y)
        assert torch.equal(problem.model(x_adv).argmax(dim=1), 1 - problem.y)


@pytest.mark.parametrize("name", ["fgsm", "bim", "mim"])
def test_what_is_already_wrong_is_left_alone(name: str) -> None:
    model, x, y = samples()
    assert torch.equal(small(name)(model, x, (y + 1) % 4, ThreatModel(eps=0.1)), x)


def test_defaults_are_the_published_ones() -> None:
    threat = ThreatModel(eps=0.1)
    assert ATTACKS["fgsm"]() == PGD(steps=1, start="zero")
    assert ATTACKS["mim"]() == PGD(steps=20, start="zero", momentum=1.0)
    assert PGD(steps=1).eta(threat) == 0.1
    assert PGD(steps=10).eta(threat) == pytest.approx(0.025)
    assert PGD(steps=10, step_size=0.3).eta(threat) == 0.3
    assert PGD(step_size=0.02).at(0.5) == PGD(step_size=0.01)
    assert PGD().at(0.5) == PGD()
    assert math.isclose(PGD(step_size=2 / 255).at(2).eta(threat), 4 / 255)
