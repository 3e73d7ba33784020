"""The self-test lets honest suites through in every setting, and none whose attack was weakened."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import ATTACKS, PGD
from steelman.attacks.base import input_gradient
from steelman.attacks.square import Square
from steelman.evaluation.checks import ContractError
from steelman.evaluation.selftest import Line, Planted, reach, self_test
from steelman.evaluation.stages import Stage, Suite
from steelman.evaluation.suites import suite_named
from steelman.threat import ThreatModel
from tests.oracles import sizes

CPU = torch.device("cpu")


class Images:
    """A source of any range and shape."""

    classes = ("a", "b")

    def __init__(self, threat: ThreatModel, shape: tuple[int, int, int], n: int = 5) -> None:
        self.shape, self.labels = shape, torch.zeros(n, dtype=torch.int64)
        drawn = torch.rand(n, *shape, generator=torch.Generator().manual_seed(0))
        self._x = threat.low + (threat.high - threat.low) * drawn

    def __len__(self) -> int:
        return len(self._x)

    def images(self, index: Tensor, key: Any = None) -> Tensor:
        return self._x[index]


def a_model(classes: int, shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (nn.Flatten(), nn.Linear(math.prod(shape), 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes))
        return nn.Sequential(*layers).to(dtype).eval()


def check(suite: Suite, threat: ThreatModel, model: nn.Module | None = None, **options: Any) -> None:
    shape, classes = options.get("shape", (1, 4, 4)), options.get("classes", 3)
    model = model or a_model(classes, shape, options.get("dtype", torch.float32))
    self_test(suite, model, Images(threat, shape), threat, classes, CPU)


def one(attack: Any, name: str = "weak") -> Suite:
    return Suite(name="own", stages=(Stage(name=name, attack=attack),))


def shortened(suite: Suite, queries: int = 400) -> Suite:
    """The same with fewer queries: what is tested here is that they are enough."""

    def less(attack: Any) -> Any:
        return (
            dataclasses.replace(attack, queries=min(attack.queries, queries)) if hasattr(attack, "queries") else attack
        )

    return dataclasses.replace(suite, stages=tuple(dataclasses.replace(s, attack=less(s.attack)) for s in suite.stages))


@pytest.mark.parametrize("classes", [2, 3, 4, 10])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("name", ["fast", "standard", "full"])
def test_honest_suites_pass_in_all_norms_for_any_number_of_classes(name: str, norm: str, classes: int) -> None:
    threat = ThreatModel(norm=norm, eps={"linf": 0.1, "l2": 0.5, "l1": 2.0}[norm])  # type: ignore[arg-type]
    check(shortened(suite_named(name, threat)), threat, classes=classes)


ODD: dict[str, tuple[dict[str, float], dict[str, Any]]] = {
    "-1 .. 1": ({"low": -1.0, "high": 1.0, "eps": 0.1}, {}),
    "0 .. 255": ({"low": 0.0, "high": 255.0, "eps": 8.0}, {}),
    "far from 0": ({"low": 100.0, "high": 101.0, "eps": 0.1}, {"dtype": torch.float64}),
    "more than half the box": ({"eps": 0.7}, {}),
    "more than the box": ({"eps": 50.0}, {}),
    "a tiny radius": ({"eps": 1e-4}, {}),
    "float64": ({"eps": 0.1}, {"dtype": torch.float64}),
    "one pixel": ({"eps": 0.1}, {"shape": (1, 1, 1)}),
    "one row": ({"eps": 0.1}, {"shape": (1, 1, 7)}),
    "many channels": ({"eps": 0.1}, {"shape": (12, 3, 3)}),
    "colour": ({"eps": 8 / 255}, {"shape": (3, 32, 32)}),
}


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("what", ODD)
def test_honest_suites_pass_in_odd_settings(what: str, norm: str) -> None:
    given, options = ODD[what]
    threat = ThreatModel(norm=norm, **{**given, "eps": 0.0}).at(given["eps"])  # type: ignore[arg-type]
    check(shortened(suite_named("fast", threat)), threat, **options)


class Nothing:
    """An attack that gives up."""

    black_box = False

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **_: Any) -> Tensor:
        return x.clone()


class Boasting(Nothing):
    """One that goes where it may not."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **options: Any) -> Tensor:
        return PGD(steps=10)(model, x, y, threat.at(2 * threat.eps), **options)


class Short(Nothing):
    """One that keeps to 80% of the radius."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **options: Any) -> Tensor:
        return PGD(steps=10)(model, x, y, threat.at(0.8 * threat.eps), **options)


class Losing(Nothing):
    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **_: Any) -> Tensor:
        return x[:1]


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("attack", [Nothing(), Boasting(), Short(), Losing()])
def test_an_attack_of_ones_own_that_fails_is_refused(attack: Any, norm: str) -> None:
    threat = ThreatModel(norm=norm, eps=0.2)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="weak misses a linear model whose boundary is at 90% of the radius") as got:
        check(one(attack), threat)
    assert got.value.reason == "self-test"


@pytest.mark.parametrize("position", ["first", "last"])
def test_one_bad_attack_among_good_ones_is_named(position: str) -> None:
    threat = ThreatModel(eps=0.1)
    good, bad = Stage(name="good", attack=PGD(steps=10)), Stage(name="the bad one", attack=Nothing())
    stages = (bad, good) if position == "first" else (good, bad)
    with pytest.raises(ContractError, match="the bad one misses"):
        check(Suite(name="own", stages=stages), threat)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("name", ["fast", "standard", "full"])
@pytest.mark.parametrize("factor", [-1.0, 0.0])
def test_a_gradient_that_is_flipped_or_lost_is_noticed(
    name: str, norm: str, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def weakened(*arguments: Any, **options: Any) -> Tensor:
        return factor * input_gradient(*arguments, **options)

    monkeypatch.setattr("steelman.attacks.problem.input_gradient", weakened)
    threat = ThreatModel(norm=norm, eps=0.1)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="misses a linear model"):
        check(shortened(suite_named(name, threat)), threat)


def test_steps_of_size_zero_are_noticed() -> None:
    threat = ThreatModel(eps=0.1)
    for attack in (PGD(steps=10, step_size=1e-9), PGD(steps=2, step_size=0.01)):
        with pytest.raises(ContractError, match="weak misses"):
            check(one(attack), threat, shape=(1, 20, 20))
    check(one(PGD(steps=10)), threat)


def test_a_weakness_planted_in_the_model_must_be_found() -> None:
    """An attack that knows the linear model, and nothing else."""

    class Knowing(Nothing):
        def __call__(self, model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **options: Any) -> Tensor:
            return PGD(steps=10)(model, x, y, threat, **options) if isinstance(model, Line) else x.clone()

    with pytest.raises(ContractError, match="a weakness planted in a copy of the model was not found"):
        check(one(Knowing()), ThreatModel(eps=0.1))


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("eps", [0.1, 0.7, 30.0])
def test_the_line_lies_where_it_says(norm: str, eps: float) -> None:
    """The nearest point beyond it, in closed form: equal steps in all pixels are the shortest way in every norm."""
    threat = ThreatModel(norm=norm, eps=0).at(eps)  # type: ignore[arg-type]
    centre = torch.full((2, 3, 3), 0.5, dtype=torch.float64)
    distance = 0.9 * reach(threat, 18)
    line = Line(centre, distance, 3, threat.p)
    step = line.weight.sign().reshape(centre.shape)
    step = step * distance / float(sizes(step[None], norm)[0])
    for factor, answer in ((0.999, 0), (1.001, 1)):
        point = centre + factor * step
        assert threat.contains(point[None], centre[None]).all()
        assert int(line(point[None]).argmax()) == answer
    random = torch.randn(500, *centre.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    random = random / torch.from_numpy(sizes(random, norm)).view(-1, 1, 1, 1) * 0.999 * distance
    assert (line(centre + random).argmax(dim=1) == 0).all(), "nothing nearer is beyond it"


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_the_planted_weakness_is_there_and_the_image_itself_is_untouched(norm: str, scale: float) -> None:
    threat = ThreatModel(norm=norm, eps=0.3)  # type: ignore[arg-type]
    model, x = a_model(3, (1, 4, 4)), Images(threat, (1, 4, 4)).images(torch.arange(5))
    last = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        last.weight.copy_(scale * torch.eye(3))
    loud = nn.Sequential(model, last).eval()
    for seed in x:
        label = int(loud(seed[None]).argmax())
        weak = Planted(loud, seed, label, threat)
        assert torch.equal(weak(seed[None]), loud(seed[None]))
        there = threat.project(seed[None] + 100 * weak.direction, seed[None])
        assert int(weak(there).argmax()) != label


def test_undefined_answers_within_the_radius_are_named_as_such() -> None:
    class Undefined(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            z = x.flatten(1)[:, :3]
            return torch.where((x - x.round(decimals=1)).abs().flatten(1).amax(dim=1, keepdim=True) > 2, z, z.log())

    threat = ThreatModel(eps=0.9, low=-1.0)
    with pytest.raises(ContractError) as caught:
        check(one(PGD(steps=3)), threat, Undefined())
    assert caught.value.reason == "logits"


class Stateful(nn.Module):
    """Counts its images, in a buffer and beside it, and draws random numbers that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.net, self.seen = a_model(3, (1, 4, 4)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.seen += len(x)
        torch.rand(3)
        out: Tensor = self.net(x)
        return out


@pytest.mark.parametrize("fails", [False, True])
def test_it_leaves_no_trace_and_costs_the_users_model_little(fails: bool) -> None:
    model, threat = Stateful().train(), ThreatModel(eps=0.1)
    model.net[2].eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    modes = [module.training for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    suite = one(Nothing()) if fails else shortened(suite_named("standard", threat))
    if fails:
        with pytest.raises(ContractError):
            check(suite, threat, model)
    else:
        check(suite, threat, model)
        assert 0 < model.seen < 200
    assert torch.equal(torch.rand(4), expected)
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is not None and (p.grad == 1).all() for p in model.parameters())


def test_black_box_attacks_alone_need_no_gradient() -> None:
    class Detached(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.detach().flatten(1)[:, :3]

    threat = ThreatModel(eps=0.1)
    check(one(Square(queries=300)), threat, Detached())
    with pytest.raises(ContractError, match="no gradient with respect to its input") as caught:
        check(one(PGD(steps=5)), threat, Detached())
    assert caught.value.reason == "gradient"


@pytest.mark.parametrize("seed", range(10))
def test_honest_models_of_any_temper_pass(seed: int) -> None:
    """Loud, quiet, rough and saturated networks: the planted weakness is found in each."""
    generator = torch.Generator().manual_seed(seed)
    threat = ThreatModel(eps=0.05 * (1 + seed % 4))
    model = a_model(3 + seed % 3, (1, 4, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(10 ** (seed % 5 - 1) * torch.randn(parameter.shape, generator=generator))
    check(one(ATTACKS["pgd"](steps=15, loss="scale-invariant-cross-entropy")), threat, model, classes=3 + seed % 3)


def test_the_whole_of_a_suite_is_cheap() -> None:
    """Passes through the planted models of all its attacks together, each of them four samples."""
    spent: list[int] = []
    real = Line.forward

    def counted(self: Line, x: Tensor) -> Tensor:
        spent.append(len(x))
        return real(self, x)

    threat = ThreatModel(eps=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Line, "forward", counted)
        check(suite_named("standard", threat), threat)
    assert 0 < sum(spent) < 10_000
