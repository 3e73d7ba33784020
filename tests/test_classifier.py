"""Classifiers by name and by import path, and weights from files that may be anyone's."""

from __future__ import annotations

import math
import pickle
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from steelman.attacks import PGD
from steelman.errors import UserError
from steelman.heads import Head, head_of
from steelman.imports import imported
from steelman.models.classifier import (
    Classifier,
    Ensemble,
    build_classifier,
    load_state,
    load_weights,
)
from steelman.threat import ThreatModel
from tests.oracles import LinearClassifier, rand, randn
from tests.test_pgd import everything
from tests.training_helpers import SHAPE, Backbone, a_net

HERE = "tests.test_classifier"


def factory(classes: int = 3) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, classes))


def not_a_model() -> int:
    return 3


def build(name: str = "mlp", **options: Any) -> nn.Module:
    return build_classifier(name, input_shape=SHAPE, num_classes=3, **options)


def test_logits_are_head_of_backbone_of_the_normalised_image() -> None:
    x = torch.rand(5, 2, 4, 4)
    net = build_classifier("linear", input_shape=(2, 4, 4), num_classes=3, mean=(0.5, 0.25), std=(0.2, 0.4))
    assert isinstance(net, Classifier)
    pixels = torch.stack(((x[:, 0] - 0.5) / 0.2, (x[:, 1] - 0.25) / 0.4), dim=1).flatten(1)
    weight, bias = net.head.weight, net.head.bias
    assert bias is not None
    torch.testing.assert_close(net(x), pixels @ weight.T + bias)


def test_one_mean_serves_all_channels() -> None:
    x = torch.rand(5, 2, 4, 4)
    torch.manual_seed(1)
    one = build_classifier("linear", input_shape=(2, 4, 4), num_classes=3, mean=(0.5,), std=(0.25,))
    torch.manual_seed(1)
    two = build_classifier("linear", input_shape=(2, 4, 4), num_classes=3, mean=(0.5, 0.5), std=(0.25, 0.25))
    assert torch.equal(one(x), two(x))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mean": (0.5, 0.5, 0.5)}, "mean: expected 1 or 1 values, one per channel, got 3"),
        ({"std": (0.5, 0.5)}, "std: expected 1 or 1 values"),
        ({"std": (0.0,)}, "std: expected values above 0"),
        ({"std": (-1.0,)}, "std: expected values above 0"),
        ({"head": "hee"}, "unknown head 'hee'"),
        ({"head": "he", "head_options": {"scal": 3}}, "unknown option of head 'he' 'scal'"),
        ({"widht": 3}, "unknown option of model 'mlp' 'widht'"),
        ({"name": "mpl"}, "unknown model 'mpl' .did you mean 'mlp'"),
        ({"width": -1}, "width"),
        ({"num_classes": 1}, "at least two classes"),
    ],
)
def test_a_classifier_that_cannot_be_built(options: dict[str, Any], expected: str) -> None:
    given = {"name": "mlp", "input_shape": SHAPE, "num_classes": 3, **options}
    with pytest.raises(UserError, match=expected):
        build_classifier(given.pop("name"), **given)


def test_images_of_another_shape_are_refused() -> None:
    with pytest.raises(UserError, match=r"expected images of shape \(N, 1, 4, 4\), got \(2, 3, 4, 4\)"):
        build()(torch.rand(2, 3, 4, 4))


def test_a_model_from_an_import_path() -> None:
    net = build(f"{HERE}:factory")
    assert net(torch.rand(2, *SHAPE)).shape == (2, 3)
    assert build(f"{HERE}:factory", classes=7)(torch.rand(2, *SHAPE)).shape == (2, 7)


def test_a_head_on_an_imported_model_takes_the_place_of_its_last_layer() -> None:
    net = build(f"{HERE}:factory", head="he", head_options={"scale": 7.0})
    head = head_of(net)
    assert isinstance(head, Head)
    assert head.scale == 7
    assert float(net(torch.rand(20, *SHAPE)).abs().max()) <= 7


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        ("no.such.module:factory", {}, "cannot import 'no.such.module:factory' .expected package.module:factory."),
        (f"{HERE}:nothing", {}, "cannot import .*nothing"),
        (f"{HERE}:", {}, "cannot import"),
        (":factory", {}, "cannot import"),
        (f"{HERE}:not_a_model", {}, "should give a torch.nn.Module, got int"),
        (f"{HERE}:HERE", {}, "should be a function or a class"),
        (f"{HERE}:factory", {"depth": 3}, "could not be called with {'depth': 3}: .*unexpected keyword"),
        (f"{HERE}:factory", {"mean": (0.5,)}, "normalises its own input"),
        (f"{HERE}:factory", {"std": (0.5,)}, "normalises its own input"),
    ],
)
def test_an_import_path_that_gives_no_model(path: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        build(path, **options)


def test_a_module_that_is_broken_shows_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the user's code: hiding where it fails would not help."""
    (tmp_path / "broken_module_for_steelman.py").write_text("raise ZeroDivisionError('mine')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ZeroDivisionError, match="mine"):
        imported("broken_module_for_steelman:factory", {}, ["broken_module_for_steelman"])
    sys.modules.pop("broken_module_for_steelman", None)


# Weights.


def same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(value, b[name]) for name, value in a.items())


def test_weights_from_safetensors_and_from_torch_files(tmp_path: Path) -> None:
    state = a_net().state_dict()
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pt")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "nested.pth")
    torch.save({f"module.{name}": value for name, value in state.items()}, tmp_path / "wrapped.tar")
    for name in ("w.safetensors", "w.pt", "nested.pth", "wrapped.tar"):
        same_state(load_state(tmp_path / name), state)


class Bomb:
    """What a pickle of a stranger may hold."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploded"),))


def test_a_pickle_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bomb.pt").write_bytes(pickle.dumps(Bomb()))
    torch.save({"weight": Bomb()}, tmp_path / "zipped.pt")
    for name in ("bomb.pt", "zipped.pt"):
        with pytest.raises(UserError, match=f"{name} is not a plain state dict"):
            load_state(tmp_path / name)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
@pytest.mark.parametrize("content", [b"", b"garbage", b"\x00" * 64])
def test_a_file_that_holds_no_weights(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"is damaged or is not a safetensors file|is not a plain state dict"):
        load_state(tmp_path / name)


def test_other_things_in_a_torch_file(tmp_path: Path) -> None:
    for content in ([1, 2], torch.rand(3), {"lr": 0.1}, {"state_dict": {"w": 3}}):
        torch.save(content, tmp_path / "w.pt")
        with pytest.raises(UserError, match="expected a state dict of tensors"):
            load_state(tmp_path / "w.pt")
    with pytest.raises(UserError, match="no weights at"):
        load_state(tmp_path / "none.safetensors")
    with pytest.raises(UserError, match="no weights at"):
        load_state(tmp_path)


def test_weights_of_another_model_are_refused_with_what_differs() -> None:
    net = a_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = dict(a_net(seed=1).state_dict())
    moved = state.pop("head.weight")
    state["fc.weight"] = moved
    state["mean"] = torch.zeros(3)
    with pytest.raises(UserError) as caught:
        load_weights(net, state, "w.pt")
    message = str(caught.value)
    assert message.startswith("w.pt belongs to another model: ")
    assert "1 missing (head.weight)" in message
    assert "1 unknown (fc.weight)" in message
    assert "1 of another shape (mean is (3,), expected (1, 1, 1, 1))" in message
    same_state(before, net.state_dict())


def test_long_lists_of_differences_are_cut() -> None:
    with pytest.raises(UserError, match=r"missing \(.*, \.\.\.\)"):
        load_weights(a_net(), {}, "w.pt")


def test_weights_are_put_where_they_belong() -> None:
    one, two = a_net(seed=0), a_net(seed=1)
    load_weights(two, one.state_dict(), "w")
    same_state(one.state_dict(), two.state_dict())
    assert isinstance(two.backbone, Backbone)


# Ensembles


def members(n: int = 3) -> list[nn.Module]:
    return [a_net("linear", seed=seed).double().eval() for seed in range(n)]


def naive_log_mean(nets: list[nn.Module], x: Tensor) -> Tensor:
    """log of the mean probability, by exponentials and divisions."""
    rows = []
    for one in x:
        z = [net(one[None])[0] for net in nets]
        probabilities = [logits.exp() / logits.exp().sum() for logits in z]
        rows.append(torch.stack(probabilities).mean(dim=0).log())
    return torch.stack(rows)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_an_ensemble_is_the_log_of_the_mean_probability(n: int) -> None:
    nets, x = members(n), rand(6, *SHAPE)
    logits = Ensemble(nets)(x)
    torch.testing.assert_close(logits, naive_log_mean(nets, x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits.exp().sum(dim=1), torch.ones(6).double())
    assert torch.equal(logits.softmax(dim=1).argmax(dim=1), logits.argmax(dim=1))
    torch.testing.assert_close(Ensemble(nets[::-1])(x), logits)


def test_sure_members_do_not_overflow() -> None:
    class Fixed(nn.Module):
        def __init__(self, *logits: float) -> None:
            super().__init__()
            self.logits = logits

        def forward(self, x: Tensor) -> Tensor:
            return torch.tensor(self.logits).expand(len(x), -1)

    one, two = Fixed(1e4, 0.0, -1e4), Fixed(-1e4, 0.0, 1e4)
    out = Ensemble([one, two])(torch.rand(1, 2))[0]
    assert out.isfinite().all()
    assert out[[0, 2]].tolist() == pytest.approx([math.log(0.5)] * 2)
    assert float(out[1]) == pytest.approx(-1e4)


def test_probabilities_are_averaged_and_not_logits() -> None:
    """Two members that lean to class 1, and one that is sure of class 0: by logits it would be class 0."""
    nets: list[nn.Module] = []
    for first in (60.0, -1.0, -1.0):
        net = nn.Linear(1, 2)
        nn.init.zeros_(net.weight)
        net.bias.data = torch.tensor([first, 0.0])
        nets.append(net)
    x = torch.zeros(1, 1)
    assert int(sum(net(x) for net in nets).argmax()) == 0
    p = 1 / (1 + math.e)
    torch.testing.assert_close(Ensemble(nets)(x).exp()[0], torch.tensor([(1 + 2 * p) / 3, 2 * (1 - p) / 3]))


def test_the_gradient_an_attack_follows_is_the_naive_one() -> None:
    nets, x, y = members(), rand(6, *SHAPE), torch.arange(6) % 3
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    (ours,) = torch.autograd.grad(F.cross_entropy(Ensemble(nets)(one), y), one)
    (theirs,) = torch.autograd.grad(F.nll_loss(naive_log_mean(nets, other), y), other)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)
    threat = ThreatModel(norm="l2", eps=10, low=-50, high=50)
    got = PGD(steps=1, step_size=0.3, start="zero", keep="last")(Ensemble(nets), x, y, threat)
    torch.testing.assert_close(got, x + 0.3 * F.normalize(theirs.flatten(1), dim=1).view_as(x))


def test_an_attack_finds_what_there_is_to_find_on_linear_members() -> None:
    """Two classes, and members whose weights point the same way: the ensemble's probability is monotone in every
    pixel, so the worst point of a cube is a corner. Those of 2x2 images are few enough to try them all."""
    weight = randn(2, 4, seed=1)
    nets: list[nn.Module] = [
        LinearClassifier(factor * weight, bias - factor * weight.sum(dim=1) / 2)
        for factor, bias in ((1.0, torch.tensor([0.2, 0.0])), (0.5, torch.tensor([-0.4, 0])), (2.0, torch.zeros(2)))
    ]
    net, x = Ensemble(nets), 0.3 + 0.4 * rand(40, 1, 2, 2, seed=2)
    y = net(x).argmax(dim=1)
    threat = ThreatModel(norm="linf", eps=0.1)
    corners = torch.tensor(list(product((-1.0, 1.0), repeat=4))).double().view(16, 1, 2, 2)
    reachable = torch.stack([(net(one + 0.1 * corners).argmax(dim=1) != label).any() for one, label in zip(x, y)])
    assert 0 < int(reachable.sum()) < 40, "both fates are meant to occur"
    x_adv = PGD(steps=10, step_size=0.1)(net, x, y, threat)
    assert torch.equal(net(x_adv).argmax(dim=1) != y, reachable)
    assert threat.contains(x_adv, x).all()


def test_an_attack_leaves_every_member_as_it_was() -> None:
    net = Ensemble([a_net("he", seed=0).train(), a_net("linear", seed=1).eval()])
    x, y = torch.rand(6, *SHAPE), torch.arange(6) % 3
    before = everything(net)
    PGD(steps=3, keep="last", mode="train")(net, x, y, ThreatModel(eps=0.1))
    assert everything(net) == before


def test_members_keep_their_modes_names_and_weights() -> None:
    net = Ensemble(members(2))
    assert not any(module.training for member in net.members for module in member.modules())
    state = net.state_dict()
    assert {name.split(".", 2)[1] for name in state} == {"0", "1"}
    other = Ensemble([a_net("linear", seed=7).double(), a_net("linear", seed=8).double()]).eval()
    load_weights(other, dict(state), "w")
    x = rand(3, *SHAPE)
    assert torch.equal(other(x), net.eval()(x))


@pytest.mark.parametrize("options", [{"head_scale": False}, {"head_margin": True}])
def test_head_options_on_an_ensemble_of_heads_are_refused(options: dict[str, bool]) -> None:
    net, x, y = Ensemble([a_net("he", seed=0), a_net("he", seed=1)]), torch.rand(3, *SHAPE), torch.arange(3)
    before = everything(net)
    with pytest.raises(UserError, match="head_margin and head_scale are for a model with one head; this one has 2"):
        PGD(**options)(net, x, y, ThreatModel(eps=0.1))  # type: ignore[arg-type]
    assert everything(net) == before
    PGD(steps=2)(net, x, y, ThreatModel(eps=0.1))  # without them it is a model as any other
