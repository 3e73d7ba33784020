"""Heads against their formulas, their gradients against closed forms, and a head put on models of many shapes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steelman.errors import UserError
from steelman.heads import ANGLE_GUARD, HEADS, Head, build_head, embed, head_of, with_margin
from tests.oracles import randn
from tests.settings import HEAD_SETTINGS


def made(name: str, features: int = 6, classes: int = 4, **options: Any) -> Head:
    return build_head(name, features, classes, **{**HEAD_SETTINGS[name], **options}).double()


def naive(name: str, head: Head, z: Tensor) -> list[list[float]]:
    """The head's formula, one class and one sample at a time."""
    weight = head.weight.detach().numpy()
    bias = np.zeros(len(weight)) if head.bias is None else head.bias.detach().numpy()
    rows = []
    for sample in z.detach().numpy():
        row = []
        for w, b in zip(weight, bias):
            dot = sum(float(i) * float(j) for i, j in zip(w, sample))
            long_z, long_w = math.sqrt(sum(float(i) ** 2 for i in sample)), math.sqrt(sum(float(i) ** 2 for i in w))
            cos = dot / long_z / long_w
            row.append(
                {
                    "linear": dot + b,
                    "fn": head.scale * dot / long_z + b,
                    "wn": head.scale * dot / long_w,
                    "he": head.scale * cos,
                    "m-he": -head.scale * math.acos(cos),
                }[name]
            )
        rows.append(row)
    return rows


def test_every_head_has_small_settings() -> None:
    assert HEAD_SETTINGS.keys() == HEADS.keys()


@pytest.mark.parametrize("name", sorted(HEADS))
def test_formula(name: str) -> None:
    head, z = made(name), 5 * randn(7, 6)
    np.testing.assert_allclose(head(z).detach().numpy(), naive(name, head, z), rtol=1e-12)


def test_fn_may_keep_its_bias_unscaled() -> None:
    head, z = made("fn", bias=True), randn(3, 6)
    np.testing.assert_allclose(head(z).detach().numpy(), naive("fn", head, z), rtol=1e-12)


@pytest.mark.parametrize("name", sorted(HEADS))
def test_gradients_are_those_of_the_values(name: str) -> None:
    head, z = made(name), randn(3, 6).requires_grad_()
    assert torch.autograd.gradcheck(head, (z,))

    def of_weight(weight: Tensor) -> Tensor:
        return torch.func.functional_call(head, {"weight": weight}, (z.detach(),))  # type: ignore[no-any-return]

    assert torch.autograd.gradcheck(of_weight, (head.weight.detach().requires_grad_(),))


def test_he_gradients_match_the_closed_form() -> None:
    """d cos / dz = (W~ - cos z~) / ||z|| and d cos / dW = (z~ - cos W~) / ||W||."""
    head, z = made("he"), (3 * randn(1, 6)).requires_grad_()
    logits = head(z)[0]
    for k in range(4):
        by_z, by_w = torch.autograd.grad(logits[k], (z, head.weight), retain_graph=True)
        w = head.weight[k].detach()
        unit_z, unit_w = z[0].detach() / z.norm().detach(), w / w.norm()
        cos = unit_z @ unit_w
        torch.testing.assert_close(by_z[0], head.scale * (unit_w - cos * unit_z) / z.norm().detach())
        torch.testing.assert_close(by_w[k], head.scale * (unit_z - cos * unit_w) / w.norm())
        assert float(by_z[0] @ unit_z) == pytest.approx(0, abs=1e-12)  # no gradient along the feature's length
        by_w[k] = 0
        assert float(by_w.abs().max()) == 0  # a class's logit depends on its own weights alone


def test_he_ignores_lengths_and_ranks_by_angle() -> None:
    head, z = made("he"), randn(50, 6)
    before = head(z).detach()
    torch.testing.assert_close(head(100 * z), before)
    cos = nn.functional.cosine_similarity(z[:, None, :], head.weight.detach()[None], dim=-1)
    assert torch.equal(before.argmax(dim=1), cos.argmax(dim=1))
    assert torch.equal(made_like(head, "m-he")(z).argmax(dim=1), cos.argmax(dim=1))
    with torch.no_grad():
        head.weight.mul_(torch.tensor([[1.0], [7.0], [0.1], [30.0]]))
    torch.testing.assert_close(head(z), before)
    assert float(before.abs().max()) <= head.scale


def made_like(head: Head, name: str) -> Head:
    other = made(name, head.features, head.num_classes)
    other.load_state_dict(head.state_dict(), strict=False)
    return other


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_angles_at_the_poles_are_finite(sign: float, dtype: torch.dtype) -> None:
    head = made("m-he").to(dtype)
    z = (sign * 2 * head.weight.detach()[1:2]).requires_grad_()
    logits = head(z)
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    edge = math.acos(sign * (1 - ANGLE_GUARD))
    loose = 0.2 if dtype == torch.bfloat16 else 1e-4
    assert float(logits.detach()[0, 1]) == pytest.approx(-head.scale * edge, abs=15 * loose)
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(logits, torch.tensor([1])), z)
    assert torch.isfinite(gradient).all()
    near = (z.detach() + 1e-4 * torch.randn_like(z)).requires_grad_()
    (gradient,) = torch.autograd.grad(head(near)[0, 1], near)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", sorted(HEADS))
def test_zero_features_give_finite_logits_and_gradients(name: str) -> None:
    head, z = made(name), torch.zeros(2, 6, dtype=torch.float64, requires_grad=True)
    logits = head(z)
    (gradient,) = torch.autograd.grad(logits.sum(), z)
    assert torch.isfinite(logits).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", ["fn", "wn", "he", "m-he"])
def test_scale_is_inside_the_head_and_margin_is_not(name: str) -> None:
    z, y = randn(5, 6), torch.tensor([0, 1, 2, 3, 1])
    head = made(name, scale=12.0, margin=0.3)
    plain = made_like(head, name)
    plain.scale, plain.margin = 1.0, 0.0
    torch.testing.assert_close(head(z), 12 * plain(z))
    shifted = head.with_margin(head(z), y)
    expected = head(z).detach().clone()
    expected[torch.arange(5), y] -= 12 * 0.3
    torch.testing.assert_close(shifted, expected)
    assert torch.equal(plain.with_margin(plain(z), y), plain(z))


def test_with_margin_finds_the_head_of_a_model() -> None:
    net = embed(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), "he", scale=10, margin=0.5)
    x, y = torch.rand(2, 1, 2, 2), torch.tensor([0, 2])
    logits = net(x)
    lowered = torch.tensor([[5.0, 0, 0], [0, 0, 5]])
    torch.testing.assert_close(with_margin(net, logits, y), logits - lowered)
    assert torch.equal(with_margin(nn.Flatten(), logits, y), logits)
    with pytest.raises(UserError, match="at most one"):
        head_of(nn.Sequential(made("he"), made("he")))


class Nested(nn.Module):
    """A model of a user's own making, whose classifier is neither named nor defined as one would guess."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Flatten(), nn.Linear(4, 8, bias=False), nn.ReLU())
        self.top = nn.ModuleDict({"classify": nn.Linear(8, 3), "other": nn.Sequential(nn.Linear(8, 2))})

    def forward(self, x: Tensor) -> Tensor:
        classify = self.top.get_submodule("classify")
        logits: Tensor = classify(self.stem(x))
        return logits


class TestEmbed:
    x = torch.rand(3, 1, 2, 2, generator=torch.Generator().manual_seed(0))

    def test_last_linear_layer_of_a_sequence(self) -> None:
        old = nn.Linear(8, 3)
        net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), old)
        kept = old.weight.detach().clone()
        features = net[:3](self.x)
        assert embed(net, "he", scale=10, margin=0.1) is net
        head = net[3]
        assert isinstance(head, Head)
        assert isinstance(net[1], nn.Linear)
        assert torch.equal(head.weight, kept)
        assert (head.scale, head.margin) == (10, 0.1)
        expected = 10 * nn.functional.cosine_similarity(features[:, None], kept[None], dim=-1)
        torch.testing.assert_close(net(self.x), expected)

    def test_named_layer_of_a_nested_model(self) -> None:
        net = Nested()
        embed(net, "he", layer="top.classify")
        assert isinstance(net.top["classify"], Head)
        assert float(net(self.x).detach().abs().max()) <= 15
        last = embed(Nested(), "fn").get_submodule("top.other.0")  # the last one defined
        assert isinstance(last, Head)

    @pytest.mark.parametrize("bias", [True, False])
    def test_a_linear_head_changes_nothing(self, bias: bool) -> None:
        net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=bias))
        before = net(self.x)
        assert torch.equal(embed(net, "linear")(self.x), before)

    def test_dtype_and_mode_are_kept(self) -> None:
        net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)).double().eval()
        embed(net, "m-he")
        assert net[1].weight.dtype == torch.float64
        assert not net[1].training
        assert net(self.x.double()).dtype == torch.float64

    def test_mistakes_are_answered(self) -> None:
        with pytest.raises(UserError, match="got ReLU without one"):
            embed(nn.ReLU())
        with pytest.raises(UserError, match="wrap it"):
            embed(nn.Linear(4, 3))
        net = Nested()
        with pytest.raises(
            UserError, match=r"'top' is not a linear layer.*choices: stem\.1, top\.classify, top\.other\.0"
        ):
            embed(net, layer="top")
        with pytest.raises(UserError, match=r"unknown head 'hee' \(did you mean 'he'\?\)"):
            embed(net, "hee")
        with pytest.raises(UserError, match=r"unknown option of head 'he' 'scael' \(did you mean 'scale'\?\)"):
            embed(net, scael=3)
        assert isinstance(net.top["classify"], nn.Linear)  # a refused head leaves the model as it was


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": 0}, "head scale: expected a number above 0, got 0"),
        ({"scale": -1}, "head scale"),
        ({"scale": math.nan}, "head scale"),
        ({"scale": math.inf}, "head scale"),
        ({"scale": "big"}, "head scale: expected a number above 0, got 'big'"),
        ({"margin": -0.1}, "head margin: expected a number of at least 0, got -0.1"),
        ({"margin": math.nan}, "head margin"),
        ({"margin": None}, "head margin"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_head("he", 4, 3, **options)


@pytest.mark.parametrize("classes", [1, 0, -1, 2.5])
def test_bad_class_counts(classes: Any) -> None:
    with pytest.raises(UserError, match="expected at least two classes, got"):
        build_head("linear", 4, classes)


def test_numbers_of_other_libraries_are_numbers() -> None:
    head = build_head("he", 4, np.int64(3), scale=np.float32(2.0), margin=np.float64(0.5))  # type: ignore[arg-type]
    assert head(torch.ones(1, 4)).shape == (1, 3)


def test_zero_init_needs_weights_that_keep_their_length() -> None:
    assert not build_head("linear", 4, 3, zero_init=True).weight.any()
    with pytest.raises(UserError, match="zero_init"):
        Head(4, 3, normalise_weights=True, zero_init=True)
