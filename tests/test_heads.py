"""Heads against their formulas, their gradients against closed forms, and a head put on models of many shapes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning_fabric import Fabric
from torch import Tensor, nn

from steelman import recipe as recipes
from steelman.errors import UserError
from steelman.heads import ANGLE_GUARD, HEADS, Head, build_head, embed, head_of, with_margin
from steelman.models.classifier import Classifier
from steelman.models.features import features_of, last_layer
from steelman.objectives import OBJECTIVES
from steelman.objectives.base import Batch, Outcome
from steelman.training import AWP, Around
from tests.oracles import randn
from tests.settings import HEAD_SETTINGS
from tests.training_helpers import SHAPE, Backbone, a_net, plain_trainer


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


# How normalised weights are learned


WEIGHT_NORMALISING = ["wn", "he", "m-he"]
weight_normalising = pytest.mark.parametrize("name", WEIGHT_NORMALISING)


def pair(name: str) -> tuple[Head, Head]:
    """The same unit weights in both modes."""
    free, through = made(name, wn_mode="project"), made(name, wn_mode="autograd")
    weight = F.normalize(randn(4, 6, seed=8), dim=1)
    with torch.no_grad():
        free.weight.copy_(weight)
        through.weight.copy_(weight)
    return free, through


def test_these_heads_can_be_projected_and_no_others() -> None:
    for name in HEADS:
        if name in WEIGHT_NORMALISING:
            assert build_head(name, 4, 3, wn_mode="project").wn_mode == "project"
            assert build_head(name, 4, 3).wn_mode == "autograd"
        else:
            with pytest.raises(UserError, match=f"unknown option of head '{name}' 'wn_mode'"):
                build_head(name, 4, 3, wn_mode="project")


@weight_normalising
@pytest.mark.parametrize("length", [1.0, 3.0])
def test_both_modes_give_the_same_logits(name: str, length: float) -> None:
    """Also where an average or a perturbation took the weights off the sphere."""
    free, through = pair(name)
    with torch.no_grad():
        free.weight.mul_(length)
        through.weight.mul_(length)
    z = randn(7, 6)
    torch.testing.assert_close(free(z), through(z), rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(free(z).detach().numpy(), naive(name, free, z), rtol=1e-12)


@weight_normalising
@pytest.mark.parametrize("length", [1.0, 3.0])
def test_project_mode_takes_the_gradient_at_free_unit_weights(name: str, length: float) -> None:
    head, z, y = made(name, wn_mode="project"), randn(7, 6, seed=5), torch.arange(7) % 4
    with torch.no_grad():
        head.weight.mul_(length)
    loss = F.cross_entropy(head.with_margin(head(z), y), y)
    unit = F.normalize(head.weight.detach(), dim=1).requires_grad_()
    product = (z if name == "wn" else z / z.norm(dim=1, keepdim=True)) @ unit.T
    logits = head.scale * (-torch.arccos(product) if name == "m-he" else product)
    expected = F.cross_entropy(logits - head.scale * head.margin * F.one_hot(y, 4), y)
    torch.testing.assert_close(loss, expected)
    (ours,), (theirs,) = torch.autograd.grad(loss, head.weight), torch.autograd.grad(expected, unit)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    along = (ours * unit.detach()).sum(dim=1)
    assert (along.abs() > 1e-6).all(), "autograd mode has no gradient along the weights; this one has"


@weight_normalising
def test_the_input_gradient_is_the_same_in_both_modes(name: str) -> None:
    """So that an attack cannot tell them apart."""
    z = randn(3, 6).requires_grad_()
    one, other = (torch.autograd.grad(head(z).square().sum(), z)[0] for head in pair(name))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@weight_normalising
def test_project_puts_the_weights_on_the_sphere_and_keeps_their_directions(name: str) -> None:
    head = made(name, wn_mode="project")
    torch.testing.assert_close(head.weight.detach().norm(dim=1), torch.ones(4).double(), rtol=0, atol=1e-6)
    moved = head.weight.detach() + randn(4, 6)
    parameter = head.weight
    with torch.no_grad():
        head.weight.copy_(moved)
    head.project()
    assert head.weight is parameter
    assert head.weight.requires_grad
    torch.testing.assert_close(head.weight.detach(), moved / moved.norm(dim=1, keepdim=True))
    twin = made(name)
    before = twin.weight.detach().clone()
    twin.project()
    assert torch.equal(twin.weight, before), "in autograd mode there is nothing to project"


@pytest.mark.parametrize("name", sorted(HEADS))
def test_first_weights_and_the_numbers_drawn_for_them(name: str) -> None:
    """As PyTorch's linear layer draws them, in either mode: seeds keep giving the runs they gave."""
    torch.manual_seed(3)
    layer = nn.Linear(6, 4, bias=name == "linear")
    after = torch.rand(1)
    torch.manual_seed(3)
    head = build_head(name, 6, 4)
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(head.weight, layer.weight)
    assert (head.bias is None) == (name != "linear")
    if head.bias is not None:
        assert torch.equal(head.bias, layer.bias)
    if name in WEIGHT_NORMALISING:
        torch.manual_seed(3)
        projected = build_head(name, 6, 4, wn_mode="project")
        assert torch.equal(torch.rand(1), after)
        torch.testing.assert_close(
            projected.weight.detach(), layer.weight.detach() / layer.weight.detach().norm(dim=1, keepdim=True)
        )
        assert projected.state_dict().keys() == head.state_dict().keys()


@weight_normalising
def test_first_steps_agree_to_second_order(name: str) -> None:
    """From unit weights, normalised after the step: the two differ by eta^2 (w.g) Pg, the step itself by eta Pg."""
    z, y = randn(7, 6, seed=5), torch.arange(7) % 4

    def after(head: Head, eta: float) -> Tensor:
        loss = F.cross_entropy(head.with_margin(head(z), y), y)
        (gradient,) = torch.autograd.grad(loss, head.weight)
        return F.normalize(head.weight.detach() - eta * gradient, dim=1)

    free, through = pair(name)
    start = free.weight.detach()
    gaps, steps = [], []
    for eta in (1e-4, 1e-5):
        one, other = after(free, eta), after(through, eta)
        gaps.append(float((one - other).norm()))
        steps.append(float((one - start).norm()))
    assert steps[0] / steps[1] == pytest.approx(10, rel=0.01)
    assert gaps[0] / gaps[1] == pytest.approx(100, rel=0.05)
    assert 0 < gaps[0] < 0.01 * steps[0]


def a_projected_net(name: str) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Classifier(Backbone(), build_head(name, 12, 3, wn_mode="project"), SHAPE)


@weight_normalising
@pytest.mark.parametrize("around", [Around(), Around(awp=AWP(gamma=0.05))])
def test_training_in_project_mode_keeps_the_weights_on_the_sphere(name: str, around: Around, tmp_path: Path) -> None:
    net = a_projected_net(name)
    lengths: list[Tensor] = []

    class Watching:
        inner = OBJECTIVES["standard"]()

        def __call__(self, batch: Batch) -> Outcome:
            lengths.append(net.head.weight.detach().norm(dim=1))
            return self.inner(batch)

    first = net.head.weight.detach().clone()
    state = plain_trainer(tmp_path, net=net, objective=Watching(), around=around).fit().state
    on = [one for one in lengths if torch.allclose(one, torch.ones(3), rtol=0, atol=1e-6)]
    # Weight perturbation takes the loss a second time, off the sphere.
    assert (len(lengths), len(on)) == ((36, 18) if around.awp else (18, 18))
    for weight in (state["head.weight"], net.head.weight.detach()):
        torch.testing.assert_close(weight.norm(dim=1), torch.ones(3), rtol=0, atol=1e-6)
        assert float((weight - first).norm()) > 0.01, "and they have moved"


def test_training_in_autograd_mode_does_not(tmp_path: Path) -> None:
    net = a_net("he")
    plain_trainer(tmp_path, net=net).fit()
    assert float((net.head.weight.detach().norm(dim=1) - 1).abs().max()) > 1e-3


def test_one_step_of_the_trainer_is_projected_gradient_descent(tmp_path: Path) -> None:
    net = a_projected_net("he")
    seen: list[tuple[Tensor, Tensor]] = []

    class Watching:
        inner = OBJECTIVES["standard"]()

        def __call__(self, batch: Batch) -> Outcome:
            before = net.head.weight.detach().clone()
            with features_of(net) as features:
                outcome = self.inner(batch)
            unit = before.clone().requires_grad_()
            z = F.normalize(features[0].detach(), dim=1)
            logits = 15 * z @ unit.T - 15 * 0.2 * F.one_hot(batch.y, 3)
            (gradient,) = torch.autograd.grad(F.cross_entropy(logits, batch.y), unit)
            seen.append((before, gradient))
            return outcome

    optimizer = {"name": "sgd", "momentum": 0}
    plain_trainer(tmp_path, net=net, objective=Watching(), training={"epochs": 1, "optimizer": optimizer}).fit()
    ends = [*(before for before, _ in seen[1:]), net.head.weight.detach()]
    for (before, gradient), end in zip(seen, ends):
        torch.testing.assert_close(end, F.normalize(before - 0.1 * gradient, dim=1), rtol=1e-4, atol=1e-5)


def test_a_projected_head_put_on_a_model_starts_on_the_sphere() -> None:
    net = embed(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), "he", wn_mode="project")
    torch.testing.assert_close(net[1].weight.detach().norm(dim=1), torch.ones(3))  # type: ignore[index]


@pytest.mark.parametrize("mode", ["projected", "", None, 3, ["project"]])
@weight_normalising
def test_an_unknown_mode_is_refused(name: str, mode: Any) -> None:
    with pytest.raises(UserError, match="wn_mode: expected one of autograd, project, got"):
        build_head(name, 4, 3, wn_mode=mode)


def test_an_unknown_mode_in_a_recipe_is_refused() -> None:
    source, _ = recipes.read("digits-pgd-at", ["head={name: wn, wn_mode: projected}"])
    with pytest.raises(UserError, match="head: wn_mode: expected one of autograd, project, got 'projected'"):
        recipes.parse(source)
    source["head"]["wn_mode"] = "project"
    assert recipes.parse(source).head.options == {"wn_mode": "project"}


# Features


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


class TestFeatures:
    x = torch.rand(3, *SHAPE, generator=torch.Generator().manual_seed(0))

    @pytest.mark.parametrize("name", sorted(HEADS))
    def test_what_enters_the_head_however_the_model_is_wrapped(self, name: str) -> None:
        net = a_net(name).eval()
        fabric = Fabric(accelerator="cpu", devices=1).setup(net)
        for model in (net, nn.Sequential(net), Wrapped(nn.Sequential(nn.Identity(), Wrapped(net))), fabric):
            assert last_layer(model) is net.head
            with features_of(model) as seen:
                assert seen == []
                logits = model(self.x)
                model(self.x[:2])
            assert [len(one) for one in seen] == [3, 2], "one entry for each forward, in order"
            assert torch.equal(seen[0], net.backbone((self.x - net.mean) / net.std))
            assert torch.equal(net.head(seen[0]), logits)
            (gradient,) = torch.autograd.grad(logits.square().sum(), seen[0])
            assert gradient.any(), "the logits are a function of these very features"
            model(self.x)
            assert len(seen) == 2, "and nothing is seen any more"
            assert hooks(net) == 0

    def test_the_last_linear_layer_of_other_models(self) -> None:
        one, two = nn.Linear(16, 8), nn.Linear(8, 3)
        net = Wrapped(nn.Sequential(nn.Flatten(), one, nn.ReLU(), two, nn.Identity()))
        assert last_layer(net) is two
        with features_of(net) as seen:
            net(self.x)
        assert torch.equal(seen[0], one(self.x.flatten(1)).relu())
        assert last_layer(two) is two

    def test_a_head_goes_before_a_linear_layer_that_is_defined_later(self) -> None:
        head = build_head("he", 16, 3)
        assert last_layer(nn.Sequential(nn.Flatten(), head, nn.Linear(3, 3))) is head

    @pytest.mark.parametrize("net", [nn.Flatten(), nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())])
    def test_a_model_with_neither_is_refused(self, net: nn.Module) -> None:
        words = f"linear layer or a steelman head, got {type(net).__name__} without either"
        with pytest.raises(UserError, match=words):
            last_layer(net)
        with pytest.raises(UserError, match=words), features_of(net):
            pass

    def test_a_model_with_two_heads_is_refused(self) -> None:
        net = nn.Sequential(a_net(), a_net())
        with pytest.raises(UserError, match="at most one steelman head in the model, found 2"), features_of(net):
            pass
        assert hooks(net) == 0

    def test_nothing_is_left_after_an_exception(self) -> None:
        net = a_net()
        with pytest.raises(ZeroDivisionError), features_of(net):
            raise ZeroDivisionError
        assert hooks(net) == 0
        with pytest.raises(UserError, match="expected images"), features_of(net):
            net(torch.rand(2, 3, 9, 9))
        assert hooks(net) == 0

    def test_one_inside_another(self) -> None:
        net = a_net().eval()
        with features_of(net) as outer:
            net(self.x)
            with features_of(net) as inner:
                net(self.x)
            net(self.x)
        assert (len(outer), len(inner)) == (3, 1)
