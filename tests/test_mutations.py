"""The oracles bite: each is shown a deliberately broken library, and has to go red.

Every check is first seen green on the library as it is, so that red means the break and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from steelman import threat as threat_module
from steelman.attacks import ATTACKS, Problem
from steelman.attacks import pgd as pgd_module
from steelman.losses import adversarial_loss
from steelman.threat import ThreatModel
from tests.oracles import (
    check_budget,
    check_inside,
    check_linear,
    check_linear_in_box,
    check_projection,
    check_unit_step,
    randn,
    red,
)
from tests.settings import ATTACK_SETTINGS, EXACT_ATTACKS, EXACT_ATTACKS_IN_BOX, ORACLE_ATTACKS

NORMS = ["linf", "l2", "l1"]
every_norm = pytest.mark.parametrize("norm", NORMS)
climbing = pytest.mark.parametrize("name", ["pgd", "mim"])  # with a memory and without
ascend, project = pgd_module.ascend, ThreatModel.project


def linear(name: str, norm: str, loss: str = "margin", classes: int = 3) -> Callable[[], None]:
    return partial(check_linear, name, norm, loss, classes, **EXACT_ATTACKS[name])


def green_then_red(check: Callable[[], None], patch: Callable[[], None]) -> None:
    check()
    patch()
    assert red(check), "the break went unnoticed"


class TestStep:
    @climbing
    @every_norm
    def test_gradient_sign_flipped(self, monkeypatch: pytest.MonkeyPatch, name: str, norm: str) -> None:
        def down(x_adv: Tensor, gradient: Tensor, *rest: Any) -> Tensor:
            return ascend(x_adv, -gradient, *rest)

        green_then_red(linear(name, norm), lambda: monkeypatch.setattr(pgd_module, "ascend", down))

    @climbing
    @every_norm
    def test_step_of_zero(self, monkeypatch: pytest.MonkeyPatch, name: str, norm: str) -> None:
        def stay(x_adv: Tensor, *rest: Any) -> Tensor:
            return x_adv

        green_then_red(linear(name, norm), lambda: monkeypatch.setattr(pgd_module, "ascend", stay))

    @every_norm
    def test_step_without_the_gradient(self, monkeypatch: pytest.MonkeyPatch, norm: str) -> None:
        def noise(x_adv: Tensor, gradient: Tensor, *rest: Any) -> Tensor:
            return ascend(x_adv, torch.randn_like(gradient), *rest)

        green_then_red(linear("bim", norm), lambda: monkeypatch.setattr(pgd_module, "ascend", noise))

    @pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, float("inf")])
    def test_steepest_not_normalised(self, monkeypatch: pytest.MonkeyPatch, p: float) -> None:
        check = partial(check_unit_step, p, 3 * randn(4, 6))
        green_then_red(check, lambda: monkeypatch.setattr(threat_module, "steepest", lambda u, p: u))

    @pytest.mark.parametrize("norm", ["linf", "l2"])
    def test_steepest_of_another_norm(self, monkeypatch: pytest.MonkeyPatch, norm: str) -> None:
        right = threat_module.steepest

        def wrong(u: Tensor, p: float) -> Tensor:
            return right(u, 2.0 if p != 2 else float("inf"))

        green_then_red(linear("fgsm", norm), lambda: monkeypatch.setattr(threat_module, "steepest", wrong))

    def test_l1_step_that_does_not_know_the_box(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def blind(self: ThreatModel, gradient: Tensor, x_adv: Tensor, length: float = 1.0) -> Tensor:
            return length * threat_module.steepest(gradient, 1.0)

        check = partial(check_linear_in_box, "pgd", "l1", **EXACT_ATTACKS_IN_BOX["pgd"])
        green_then_red(check, lambda: monkeypatch.setattr(ThreatModel, "steepest", blind))


# Each class once, in its first norm: a name with fixed settings is the class under it, and most classes have breaks of
# their own in their own file.
WHITE_BOX = [
    (name, next(iter(slack)), broken)
    for name, (options, slack) in ORACLE_ATTACKS.items()
    if not (ATTACKS[name](**options).black_box or isinstance(ATTACKS[name], partial))
    for broken in ((-1.0, 0.0) if name == "pgd" else (-1.0,))
]


@pytest.mark.parametrize(("name", "norm", "broken"), WHITE_BOX)
def test_gradient_broken(monkeypatch: pytest.MonkeyPatch, name: str, norm: str, broken: float) -> None:
    """Every attack that asks for gradients needs the right ones."""
    options, slack = ORACLE_ATTACKS[name]
    check = partial(check_budget, ATTACKS[name](**options), norm, 2, slack=slack[norm])
    right = Problem.gradient

    def wrong(self: Problem, *args: Any, **rest: Any) -> Tensor:
        return broken * right(self, *args, **rest)

    green_then_red(check, lambda: monkeypatch.setattr(Problem, "gradient", wrong))


class TestLoss:
    @climbing
    @every_norm
    def test_loss_constant(self, monkeypatch: pytest.MonkeyPatch, name: str, norm: str) -> None:
        def constant(name: str, logits: Tensor, y: Tensor, **rest: Any) -> Tensor:
            return 0 * logits.sum(dim=1)

        green_then_red(linear(name, norm), lambda: monkeypatch.setattr(pgd_module, "adversarial_loss", constant))

    @pytest.mark.parametrize("loss", ["cross-entropy", "margin", "dlr", "scale-invariant-cross-entropy"])
    def test_loss_negated(self, monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
        def negated(*args: Any, **rest: Any) -> Tensor:
            return -adversarial_loss(*args, **rest)

        check = linear("bim", "linf", loss)
        green_then_red(check, lambda: monkeypatch.setattr(pgd_module, "adversarial_loss", negated))


class TestProjection:
    def wide(self, ratio: float) -> Callable[[ThreatModel, Tensor, Tensor], Tensor]:
        return lambda threat, x_adv, x: project(threat.at(ratio * threat.eps), x_adv, x)

    def unboxed(self, threat: ThreatModel, x_adv: Tensor, x: Tensor) -> Tensor:
        return project(ThreatModel(norm=threat.norm, eps=threat.eps, low=-1e3, high=1e3), x_adv, x)

    @every_norm
    @pytest.mark.parametrize("ratio", [2.0, 1.1, 0.9, 0.5])
    def test_radius_wrong(self, monkeypatch: pytest.MonkeyPatch, norm: str, ratio: float) -> None:
        broken = self.wide(ratio)
        green_then_red(partial(check_projection, norm), lambda: monkeypatch.setattr(ThreatModel, "project", broken))
        monkeypatch.undo()
        green_then_red(linear("bim", norm), lambda: monkeypatch.setattr(ThreatModel, "project", broken))
        if ratio > 1:
            monkeypatch.undo()
            check = partial(check_inside, "bim", norm, **ATTACK_SETTINGS["bim"])
            green_then_red(check, lambda: monkeypatch.setattr(ThreatModel, "project", broken))

    @every_norm
    @pytest.mark.parametrize("what", ["projection", "attack"])
    def test_box_forgotten(self, monkeypatch: pytest.MonkeyPatch, norm: str, what: str) -> None:
        def unboxed(threat: ThreatModel, x_adv: Tensor, x: Tensor) -> Tensor:
            return self.unboxed(threat, x_adv, x)

        inside = partial(check_inside, "pgd", norm, **ATTACK_SETTINGS["pgd"])
        check = inside if what == "attack" else partial(check_projection, norm)
        green_then_red(check, lambda: monkeypatch.setattr(ThreatModel, "project", unboxed))

    @pytest.mark.parametrize("norm", ["l2", "l1"])
    def test_ball_first_and_box_afterwards(self, monkeypatch: pytest.MonkeyPatch, norm: str) -> None:
        def in_turn(threat: ThreatModel, x_adv: Tensor, x: Tensor) -> Tensor:
            return self.unboxed(threat, x_adv, x).clamp(threat.low, threat.high)

        check = partial(check_projection, norm)
        green_then_red(check, lambda: monkeypatch.setattr(ThreatModel, "project", in_turn))

    def test_l1_rescaled_instead_of_projected(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def rescaled(threat: ThreatModel, x_adv: Tensor, x: Tensor) -> Tensor:
            delta = x_adv.clamp(threat.low, threat.high) - x
            size = threat_module.norms(delta, threat.p).clamp_min(1e-12).to(x.dtype)
            return x + delta * (threat.eps / size).clamp_max(1).view(-1, *[1] * (x.dim() - 1))

        check = partial(check_projection, "l1")
        green_then_red(check, lambda: monkeypatch.setattr(ThreatModel, "project", rescaled))
