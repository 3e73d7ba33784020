"""Attacks on the linear model, on which the right answer is known, and on odd ones; what a name sets."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import ATTACKS, PGD, Search
from steelman.attacks.apgd import APGD
from steelman.attacks.estimated import Estimated
from steelman.attacks.fab import FAB
from steelman.attacks.pgd import step_sizes
from steelman.losses import LOSSES
from steelman.threat import Norm, ThreatModel
from tests.oracles import (
    DUALS,
    LinearClassifier,
    check_budget,
    check_linear,
    check_linear_in_box,
    linear_problem,
    rand,
    randn,
)
from tests.settings import ATTACK_SETTINGS, EXACT_ATTACKS, EXACT_ATTACKS_IN_BOX, ORACLE_ATTACKS

NORMS: tuple[Norm, ...] = ("linf", "l2", "l1")
EPS = {"linf": 0.1, "l2": 0.4, "l1": 1.0}
PLAIN = sorted(LOSSES.keys() - {"kl"})
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


def test_the_tables_name_attacks() -> None:
    assert set(EXACT_ATTACKS) <= set(ATTACKS)
    assert set(EXACT_ATTACKS_IN_BOX) <= set(ATTACKS)


# What every attack promises is checked in test_contract.py. These are cases of our own beside it.
@pytest.mark.parametrize("name", sorted(ATTACKS))
class TestOddModels:
    def test_one_pixel(self, name: str) -> None:
        model = LinearClassifier(torch.tensor([[1.0], [-1.0]]), torch.tensor([0.0, 0.5]))
        x, y = torch.tensor([0.3, 0.6]).reshape(2, 1, 1, 1), torch.tensor([0, 0])  # the boundary is at 0.25
        for norm in small(name).norms:
            x_adv = small(name)(model, x, y, ThreatModel(norm=norm, eps=0.1))
            assert (model(x_adv).argmax(dim=1) != y).tolist() == [True, False], norm

    def test_broken_derivatives_do_not_stop_it(self, name: str) -> None:
        class Broken(LinearClassifier):
            def forward(self, x: Tensor) -> Tensor:
                first = x.flatten(1)[:, :1]
                return super().forward(x) + (0 * first).sqrt()  # its derivative is 0 * infinity

        problem, norm = linear_problem(3), small(name).norms[-1]
        model = Broken(problem.model.weight.detach(), problem.model.bias.detach())
        threat = ThreatModel(norm=norm, eps=2 * problem.distances(norm).max(), low=-100, high=100)
        x_adv = small(name)(model, problem.x, problem.y, threat)
        assert torch.isfinite(x_adv).all()
        assert threat.contains(x_adv, problem.x).all()
        if name != "feature":  # what looks most like a guide need not be beyond the boundary
            assert (model(x_adv).argmax(dim=1) != problem.y).all()

    def test_inputs_that_track_gradients(self, name: str) -> None:
        model, x, y = samples()
        threat = ThreatModel(norm=small(name).norms[0], eps=EPS[small(name).norms[0]])
        tracked = x.clone().requires_grad_()
        assert torch.equal(small(name)(model, tracked, y, threat), small(name)(model, x, y, threat))
        assert not small(name)(model, tracked, y, threat.at(0.0)).requires_grad


# A name with fixed settings is the class under it, and two classes make all its losses one; these differ from it.
APART = [name for name in sorted(ATTACKS) if not isinstance(ATTACKS[name], partial)] + ["fgsm", "mim", "apgd-t", "spsa"]


@pytest.mark.parametrize(("name", "norm"), [(name, norm) for name in APART for norm in ORACLE_ATTACKS[name][1]])
def test_succeeds_exactly_where_it_can(name: str, norm: Norm) -> None:
    options, slack = ORACLE_ATTACKS[name]
    check_budget(ATTACKS[name](**options), norm, 2, slack=slack[norm])


class TestLinearOracle:
    """Success exactly where the closed form allows it, to within 3% of the radius."""

    @pytest.mark.parametrize("i", range(3), ids=NORMS)
    @pytest.mark.parametrize("j", range(len(PLAIN)), ids=PLAIN)
    def test_closed_form(self, i: int, j: int) -> None:
        """Each loss in each norm, and with each number of classes."""
        check_linear("pgd", NORMS[i], PLAIN[j], (2, 3, 10)[(i + j) % 3], **EXACT_ATTACKS["pgd"])

    @pytest.mark.parametrize("name", ["fgsm", "mim"])
    @every_norm
    @pytest.mark.parametrize("loss", ["cross-entropy", "margin"])
    def test_closed_form_in_one_step_and_with_momentum(self, name: str, norm: Norm, loss: str) -> None:
        check_linear(name, norm, loss, 3, **EXACT_ATTACKS[name])

    @pytest.mark.parametrize(("norm", "classes"), [("linf", 2), ("l2", 3), ("l1", 2)])
    def test_closed_form_for_kl(self, norm: Norm, classes: int) -> None:
        # KL grows on both sides of the clean image; restarts find the right one.
        check_linear("pgd", norm, "kl", classes, steps=8, restarts=8)

    @pytest.mark.parametrize("name", ["pgd", "mim"])
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

    @pytest.mark.parametrize("name", ["pgd", "mim"])
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

    @pytest.mark.parametrize("loss", PLAIN)
    @every_norm
    def test_a_target_of_two_is_reached_just_beyond_the_boundary(self, norm: Norm, loss: str) -> None:
        problem = linear_problem(2)
        attack = PGD(**EXACT_ATTACKS["pgd"], loss=loss)
        threat = ThreatModel(norm=norm, eps=1.03 * problem.distances(norm).max(), low=-100, high=100)
        x_adv = attack(problem.model, problem.x, problem.y, threat, target=1 - problem.y)
        assert torch.equal(problem.model(x_adv).argmax(dim=1), 1 - problem.y)


@pytest.mark.parametrize("name", ["fgsm", "bim", "mim"])
def test_what_is_already_wrong_is_left_alone(name: str) -> None:
    model, x, y = samples()
    assert torch.equal(small(name)(model, x, (y + 1) % 4, ThreatModel(eps=0.1)), x)


def test_a_name_is_a_class_with_settings() -> None:
    """So each class is tested once, and its names by what they set."""
    assert ATTACKS["fgsm"]() == PGD(steps=1, start="zero")
    assert ATTACKS["bim"]() == PGD(steps=10, start="zero")
    assert ATTACKS["pgd"]() == PGD()
    assert ATTACKS["mim"]() == PGD(steps=20, start="zero", momentum=1.0)
    assert ATTACKS["cw-linf"]() == PGD(steps=30, loss="margin")
    assert ATTACKS["adaptive"]() == PGD(head_margin=True)
    assert ATTACKS["apgd-dlr"]() == APGD(loss="dlr")
    assert ATTACKS["apgd-t"]() == APGD(loss="targeted-dlr")
    assert ATTACKS["fab-t"]() == FAB(targets=9)
    assert ATTACKS["spsa"]() == Estimated(noise="rademacher")


def test_the_size_of_a_step() -> None:
    threat = ThreatModel(eps=0.1)
    assert step_sizes(threat, 1) == [0.1]
    assert step_sizes(threat, 10) == pytest.approx([0.025] * 10)
    assert step_sizes(threat, 3, 0.3) == [0.3] * 3
    assert PGD(step_size=0.02).at(0.5) == PGD(step_size=0.01)
    assert PGD().at(0.5) == PGD()
    assert PGD(step_size=2 / 255).at(2).step_size == pytest.approx(4 / 255)
