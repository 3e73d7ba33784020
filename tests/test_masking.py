"""The flags one by one: each with a model made to raise it, and an honest one that raises none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelman.evaluation.masking import measure
from steelman.evaluation.result import Flag
from steelman.evaluation.signs import flags_of
from steelman.rng import Key
from steelman.threat import ThreatModel
from tests.test_liars import LIARS, Base, images

THREAT = ThreatModel(eps=0.2)


def flags(model: nn.Module, threat: ThreatModel = THREAT, n: int = 32, **options: Any) -> dict[str, Flag]:
    x = images(n)
    with torch.no_grad():
        y = model(x).nan_to_num().argmax(dim=1)
    found = signs(model, x, y, threat, index=torch.arange(n), key=Key(0), **options)
    return {one.name: one for one in found}


def signs(*arguments: Any, **options: Any) -> list[Flag]:
    return flags_of([measure(*arguments, **options)])


def raised(model: nn.Module, **options: Any) -> set[str]:
    return {name for name, one in flags(model, **options).items() if one.raised}


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_an_honest_model_raises_none_at_any_scale(norm: str) -> None:
    threat = ThreatModel(norm=norm, eps={"linf": 0.1, "l2": 0.4, "l1": 1.0}[norm])  # type: ignore[arg-type]
    for seed in range(2):
        assert raised(Base(seed=seed).eval(), threat=threat) == set()
    for name in ("x 1e-6", "x 1e30", "offset 100", "HE of scale 15"):
        assert raised(LIARS[name].make().eval(), threat=threat) == set(), name


EXPECTED = {
    "gradient zeroed": {"zero gradients", "loss does not rise", "black box stronger"},
    "gradient tiny": {"zero gradients"},
    "flat near the data": {"zero gradients"},
    "gradient reversed": {"loss does not rise", "black box stronger"},
    "scrambled gradient": {"black box stronger"},
    "hashed logits": {"black box stronger"},
    "noise near a boundary": {"random answers"},
    "NaN where it would be wrong": {"undefined answers"},
    "lost in roundings once moved": {"coarse answers"},
    "no gradient": {"zero gradients", "black box stronger"},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_liar_raises_the_flags_that_are_its_own(name: str) -> None:
    found = flags(LIARS[name].make().eval())
    assert {flag for flag in EXPECTED[name] if not found[flag].raised} == set()
    for one in found.values():
        assert one.raised == (one.figure > one.limit)
        assert one.text


def test_without_a_gradient_there_is_no_flag_that_needs_one() -> None:
    assert set(flags(LIARS["no gradient"].make().eval())) == {
        "zero gradients",
        "black box stronger",
        "random answers",
        "undefined answers",
        "coarse answers",
        "company answers",
        "gradient answers",
    }


def test_undefined_answers_make_a_verdict_invalid() -> None:
    assert flags(LIARS["NaN where it would be wrong"].make().eval())["undefined answers"].trust == "invalid"


def test_what_transfers_from_another_model_shows_that_gradients_mislead() -> None:
    """The base's own gradients, on a copy of it that hides them."""
    hiding, base = LIARS["gradient reversed"].make().eval(), Base().eval()
    assert "transfer stronger" not in flags(hiding)
    assert flags(hiding, surrogates=[base])["transfer stronger"].figure > 0.5
    assert not flags(base, surrogates=[Base().eval()])["transfer stronger"].raised
    assert not flags(base, surrogates=[Base(seed=3).eval()])["transfer stronger"].raised


def test_one_step_stronger_than_many() -> None:
    class Ditch(nn.Module):
        """Right and climbing the wrong way up to nine tenths of eps, wrong beyond."""

        def forward(self, x: Tensor) -> Tensor:
            moved = (x - 0.5).flatten(1).mean(dim=1)
            wave = torch.where(moved.abs() < 0.1, moved * 0.1, 0 * moved)
            over = (moved.abs() > 0.19).double().to(x)
            first = 1 + 0.1 * (moved * 200).cos() + wave - 2 * over
            return torch.stack((first, -first), dim=1)

    x = torch.full((8, 1, 4, 4), 0.5) + 0.0005
    y = torch.zeros(8, dtype=torch.int64)
    found = {f.name: f for f in signs(Ditch(), x, y, THREAT, index=torch.arange(8), key=Key(0))}
    assert found["one step stronger"].figure == 1.0
    assert found["one step stronger"].raised


def test_nothing_is_said_of_no_samples() -> None:
    assert flags_of([]) == []


@pytest.mark.parametrize("name", ["gradient reversed", "NaN where it would be wrong", "lost in roundings once moved"])
def test_what_is_measured_in_parts_is_weighed_as_one(name: str) -> None:
    """Shares of all samples, not means of shares; the limit allows one sample of all."""
    model, x = LIARS[name].make().eval(), images(30)
    with torch.no_grad():
        y = model(x).argmax(dim=1)
    parts = [
        measure(model, x[part], y[part], THREAT, index=part, key=Key(0))
        for part in torch.split(torch.arange(30), [23, 7])
    ]
    whole = signs(model, x, y, THREAT, index=torch.arange(30), key=Key(0))
    assert flags_of(parts) == whole
    assert all(0 <= one.figure <= 1 for one in whole)


def test_the_model_is_left_as_it_was() -> None:
    model = Base().train()
    state, modes = {k: v.clone() for k, v in model.state_dict().items()}, [m.training for m in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    x = images(8)
    signs(model, x, torch.zeros(8, dtype=torch.int64), THREAT, index=torch.arange(8), key=Key(0))
    assert torch.equal(torch.rand(4), expected)
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


class Counted(nn.Module):
    """An honest model that knows the largest batch it was asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.sizes = Base(), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        out: Tensor = self.model(x)
        return out


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_no_batch_is_larger_than_asked_for(norm: str) -> None:
    threat, model = ThreatModel(norm=norm, eps=0.2), Counted().eval()  # type: ignore[arg-type]
    at_once = flags(Base().eval(), threat, 30)
    model.sizes.clear()
    in_parts = flags(model, threat, 30, batch_size=30)
    assert {name: one.figure for name, one in in_parts.items()} == {name: one.figure for name, one in at_once.items()}
    model.sizes.clear()
    x = images(30)
    found = signs(model, x, model(x).argmax(dim=1), threat, index=torch.arange(30), key=Key(0), batch_size=7)
    assert max(model.sizes[1:]) == 7
    assert {one.name: one.figure for one in found} == {name: one.figure for name, one in at_once.items()}
