"""The papers' protocols: the columns of their tables, with the published settings, and attacks that work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steelman.attacks import ATTACKS
from steelman.errors import UserError
from steelman.evaluation.protocols import PROTOCOLS, InTurn, autoattack
from steelman.evaluation.stages import Suite, describe
from steelman.evaluation.suites import SUITES
from steelman.rng import Key
from steelman.threat import ThreatModel
from tests.evidence_helpers import evaluate
from tests.oracles import linear_problem
from tests.training_helpers import a_net, some_data

TRADES, PIXELS = ThreatModel(eps=0.031), ThreatModel(eps=8 / 255)
# Column by column, what the tables or the code behind them say: (threat, column: settings).
PUBLISHED: dict[str, tuple[ThreatModel, dict[str, dict[str, Any]]]] = {
    "he-whitebox": (
        TRADES,
        {
            "PGD-20": {"attack": "PGD", "steps": 20, "step_size": 0.003, "start": "uniform", "head_scale": False},
            "PGD-500": {"attack": "PGD", "steps": 500, "step_size": 0.003, "start": "uniform", "head_scale": False},
            "MIM-20": {"attack": "PGD", "steps": 20, "step_size": 0.003, "momentum": 1.0, "start": "zero"},
            "FGSM": {"attack": "PGD", "steps": 1, "step_size": None, "start": "zero", "head_scale": False},
            "DeepFool": {"attack": "DeepFool", "steps": 100, "overshoot": 0.02},
            "C&W": {"attack": "PGD", "loss": "margin", "step_size": 0.003},
            "FeaAtt": {"attack": "FeatureAttack", "steps": 50, "step_size": pytest.approx(0.031 / 8), "targets": 500},
            "FAB": {"attack": "FAB", "steps": 20, "restarts": 1, "alpha_max": 0.1, "eta": 1.05, "beta": 0.9},
        },
    ),
    "he-adaptive": (
        TRADES,
        {
            "PGD-20": {"attack": "PGD", "steps": 20, "step_size": 0.003, "head_margin": True, "head_scale": True},
            "PGD-500": {"attack": "PGD", "steps": 500, "step_size": 0.003, "head_margin": True, "head_scale": True},
        },
    ),
    "he-blackbox": (
        TRADES,
        {
            "ZOO": {"attack": "ZOO", "queries": 20_000, "sigma": 1e-4, "coordinates": 1},
            **{
                f"{name}-{steps}": {
                    "attack": "Estimated",
                    "noise": noise,
                    "steps": steps,
                    "pairs": 128,
                    "sigma": 0.001,
                    "step_size": 0.003,
                    "start": "zero",
                }
                for name, noise in (("SPSA", "rademacher"), ("NES", "gaussian"))
                for steps in (20, 50, 80)
            },
        },
    ),
    "pas": (
        PIXELS,
        {
            "PGD100": {"attack": "PGD", "steps": 100, "restarts": 10, "step_size": pytest.approx(1 / 255)},
            "APGD100-CE": {"attack": "APGD", "steps": 100, "loss": "cross-entropy", "rho": 0.75},
            "APGD100-DLR": {"attack": "APGD", "steps": 100, "loss": "dlr", "rho": 0.75},
            "Square5K": {"attack": "Square", "queries": 5000},
        },
    ),
    "llr": (
        PIXELS,
        {
            "PGD-50 margin": {"attack": "PGD", "steps": 50, "loss": "margin", "step_size": pytest.approx(2 / 255)},
            "MultiTargeted": {"attack": "MultiTargeted", "steps": 50, "targets": None},
            "DeepFool": {"attack": "DeepFool"},
        },
    ),
    "rat": (
        TRADES,
        {
            "PGD-20": {"attack": "PGD", "steps": 20, "step_size": 0.003, "loss": "cross-entropy"},
            "CW-20": {"attack": "PGD", "steps": 20, "step_size": 0.003, "loss": "margin"},
            "AA": {"attack": "InTurn"},
            "RayS acc": {"attack": "RayS", "queries": 10_000},
        },
    ),
}


def attacks(suite: Suite) -> dict[str, Any]:
    return {stage.name: stage.attack for stage in suite.stages}


def test_every_protocol_is_checked_here() -> None:
    assert PUBLISHED.keys() == PROTOCOLS.keys()
    assert {"he-whitebox", "he-blackbox", "pas", "llr", "rat"} <= PROTOCOLS.keys()


@pytest.mark.parametrize("name", PROTOCOLS)
def test_columns_and_settings_are_the_published_ones(name: str) -> None:
    threat, published = PUBLISHED[name]
    suite = PROTOCOLS[name](threat)
    assert (suite.name, suite.protocol) == (name, True)
    assert [stage.name for stage in suite.stages] == list(published)
    for label, attack in attacks(suite).items():
        found = describe(attack)
        assert {key: found[key] for key in published[label]} == published[label], label
    assert "et al." in (PROTOCOLS[name].__doc__ or "")
    assert "Table" in (PROTOCOLS[name].__doc__ or "") or name in ("llr", "he-adaptive")  # published in words


@pytest.mark.parametrize("name", PROTOCOLS)
def test_step_sizes_grow_with_the_radius(name: str) -> None:
    threat, _ = PUBLISHED[name]
    small, large = attacks(PROTOCOLS[name](threat)), attacks(PROTOCOLS[name](threat.at(2 * threat.eps)))
    steps = [(getattr(small[label], "step_size", None), getattr(large[label], "step_size", None)) for label in small]
    given = [(one, other) for one, other in steps if one is not None]
    assert given
    assert all(other == pytest.approx(2 * one) for one, other in given)


def test_pas_has_two_published_step_sizes() -> None:
    for eps in (0.3, 0.4):
        assert attacks(PROTOCOLS["pas"](ThreatModel(eps=eps)))["PGD100"].step_size == 0.01
    assert attacks(PROTOCOLS["pas"](ThreatModel(norm="l2", eps=4)))["PGD100"].step_size == pytest.approx(0.5)


def test_the_aa_column_is_autoattack_standard() -> None:
    assert attacks(PROTOCOLS["rat"](PIXELS))["AA"].attacks == tuple(stage.attack for stage in autoattack(PIXELS))


@pytest.mark.parametrize(("name", "norm"), [("rat", "l2"), ("he-blackbox", "l1"), ("pas", "l1")])
def test_a_norm_that_a_column_does_not_know_is_refused_at_once(name: str, norm: Any) -> None:
    with pytest.raises(UserError, match=rf"protocol {name}: .* cannot attack in {norm}"):
        PROTOCOLS[name](ThreatModel(norm=norm, eps=0.5))


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_column_breaks_what_can_be_broken(name: str) -> None:
    """With twice the radius to the boundary an attack that works breaks all; one that does nothing, none."""
    problem = linear_problem(3, seed=1, n=3)
    y = problem.y.clone()
    y[0] = 1  # wrong already: no attack's merit
    threat = ThreatModel(eps=2 * float(problem.distances_in_box("linf", 0.0, 1.0).max()))
    found = evaluate(problem.model, problem.x, y, threat, PROTOCOLS[name](threat), curve=False)
    assert [score.name for score in found.scores] == ["clean", *PUBLISHED[name][1], "worst case"]
    assert [score.correct for score in found.scores] == [2, *[0] * (len(found.scores) - 1)]
    assert [stage.attacked for stage in found.stages] == [2] * len(found.stages)


def test_the_whitebox_protocol_runs_on_the_head_it_is_for() -> None:
    net, data = a_net("he").eval(), some_data(12)
    x = data.images(torch.arange(12))
    y = net(x).argmax(dim=1)
    threat = ThreatModel(eps=0.05)
    weak, strong = (
        evaluate(net, x, y, threat, PROTOCOLS[name](threat), curve=False) for name in ("he-whitebox", "he-adaptive")
    )
    assert all(score.correct < 12 for score in (*weak.scores[1:], *strong.scores[1:]))


def test_attacks_in_turn_share_the_work() -> None:
    problem = linear_problem(4, seed=1, n=6)
    distances = torch.tensor(problem.distances_in_box("linf", 0.0, 1.0))
    eps = float(distances.sort().values[3:5].mean())
    threat, falls = ThreatModel(eps=eps), distances < eps
    # A weak first attack takes the nearest alone; a black-box and a minimum-norm attack the others.
    weak = ATTACKS["bim"](steps=1, step_size=float(distances.sort().values[:2].mean()))
    strong = ATTACKS["fab"](steps=10)
    first, second = (
        attack.run(problem.model, problem.x, problem.y, threat, key=Key(1).fold("turn", turn))
        for turn, attack in enumerate((weak, strong))
    )
    assert 0 < int(first.success.sum()) < int(falls.sum())
    found = InTurn(attacks=(weak, strong)).run(problem.model, problem.x, problem.y, threat, key=Key(1))
    assert torch.equal(found.success, falls)
    assert torch.equal(problem.model(found.x_adv).argmax(dim=1) != problem.y, falls)
    assert threat.contains(found.x_adv, problem.x).all()
    assert torch.equal(found.x_adv[first.success], first.x_adv[first.success])
    assert torch.equal(found.forwards, first.forwards + torch.where(first.success, 0, second.forwards))
    assert torch.equal(found.backwards, first.backwards + torch.where(first.success, 0, second.backwards))
    assert InTurn(attacks=(ATTACKS["rays"](), strong)).norms == ("linf",)


def test_no_protocol_has_the_name_of_another_suite() -> None:
    assert all(SUITES.get(name, made) is made for name, made in PROTOCOLS.items())
