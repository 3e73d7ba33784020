"""The attacks through features: FeatureAttack and FNAttack, against naive losses, closed forms and PGD."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import PGD
from steelman.attacks import feature as feature_module
from steelman.attacks import fn as fn_module
from steelman.attacks import pgd as pgd_module
from steelman.attacks.carlini_wagner import CarliniWagner
from steelman.attacks.engine import Problem
from steelman.attacks.feature import FeatureAttack, reading, training_images
from steelman.attacks.fn import FNAttack, normalised
from steelman.attacks.pgd import ascend
from steelman.data import load
from steelman.errors import UserError
from steelman.heads import he, wn
from steelman.models.classifier import Ensemble
from steelman.rng import Key
from steelman.threat import Norm, ThreatModel
from tests.oracles import LinearClassifier, check_budget, naive_losses, rand, randn, red

NORMS: tuple[Norm, ...] = ("linf", "l2", "l1")
EPS = {"linf": 0.1, "l2": 0.5, "l1": 2.0}
every_norm = pytest.mark.parametrize("norm", NORMS)


class Net(nn.Module):
    """A curved model with a last linear layer, batch-free in the last bit up to that layer."""

    last: Any

    def __init__(self, last: nn.Module, pixels: int = 12) -> None:
        super().__init__()
        self.a, self.last = nn.Parameter(2 * randn(10, pixels, seed=1)), last

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh((x.flatten(1)[:, None, :] * self.a.to(x)).sum(dim=-1)))
        return out


class Rowwise(nn.Linear):
    """A linear layer whose answer for a sample does not depend on the batch in the last bit."""

    def forward(self, z: Tensor) -> Tensor:
        return (z[:, None, :] * self.weight).sum(dim=-1) + self.bias


def a_net(classes: int = 4) -> tuple[Net, Tensor, Tensor]:
    last = Rowwise(10, classes).double()
    last.weight.data, last.bias.data = randn(classes, 10, seed=2), 0.1 * randn(classes, seed=3)
    net, x = Net(last), rand(8, 1, 3, 4, seed=3)
    return net, x, net(x).argmax(dim=1)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What each backward saw: losses, points and rows, and the gradient it gave."""
    kept: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    gradient = Problem.gradient

    def spy(self: Problem, losses: Tensor, points: Tensor, rows: Tensor) -> Tensor:
        got = gradient(self, losses, points, rows)
        kept.append((losses.detach(), points.detach(), rows, got))
        return got

    monkeypatch.setattr(Problem, "gradient", spy)
    return kept


FEATURE = FeatureAttack(steps=30, copies=1)
FN = FNAttack(steps=30, step_size=0.2)  # long steps: a start on the far side has the whole ball to cross
ATTACKS: dict[str, FeatureAttack | FNAttack] = {"feature": FEATURE, "fn": FN}
every_attack = pytest.mark.parametrize("name", sorted(ATTACKS))


class TestBoth:
    @every_attack
    @pytest.mark.parametrize(("norm", "targeted"), [("linf", False), ("l2", True), ("l1", False)])
    def test_alone_or_in_a_batch(self, name: str, norm: Norm, targeted: bool) -> None:
        attack = {"feature": FeatureAttack(steps=4, copies=2), "fn": FNAttack(steps=4, restarts=2)}[name]
        net, x, y = a_net()
        if name == "fn":  # which multiplies by the last layer's weights itself; its logits stand for features here
            net.last = LinearClassifier(net.last.weight.detach(), net.last.bias.detach())
        threat, index = ThreatModel(norm=norm, eps=EPS[norm] / 3), torch.tensor([30, 4, 77, 12, 9, 1, 5, 600])
        target = (y + 1) % 4 if targeted else None
        whole = attack.run(net, x, y, threat, index=index, key=Key(2), target=target)
        assert threat.contains(whole.x_adv, x).all()
        for row in range(len(x)):
            at = slice(row, row + 1)
            one = None if target is None else target[at]
            alone = attack.run(net, x[at], y[at], threat, index=index[at], key=Key(2), target=one)
            assert torch.equal(alone.x_adv, whole.x_adv[at])
            assert torch.equal(alone.success, whole.success[at])
            assert torch.equal(alone.forwards, whole.forwards[at])
        assert not whole.success.all()
        predicted = net(whole.x_adv).argmax(dim=1)
        assert torch.equal(whole.success, predicted != y if target is None else predicted == target)

    @every_attack
    def test_leaves_no_hook(self, name: str) -> None:
        net, x, y = a_net()
        ATTACKS[name](net, x, y, ThreatModel(eps=0.05))
        assert not net.last._forward_pre_hooks

    @every_attack
    def test_models_that_cannot_be_read_are_refused(self, name: str) -> None:
        net, x, y = a_net()
        threat = ThreatModel(eps=0.05)
        with pytest.raises(UserError, match="last linear layer"):  # its linear layer is not the last
            ATTACKS[name](
                nn.Sequential(net, nn.Linear(4, 4).double(), LinearClassifier(randn(3, 4), randn(3))), x, y, threat
            )
        two = Ensemble([Net(wn(10, 4).double()), Net(wn(10, 4).double())])
        with pytest.raises(UserError, match="at most one"):
            ATTACKS[name](two, x, y, threat)

    @every_attack
    @every_norm
    def test_passes(self, name: str, norm: Norm) -> None:
        net, x, y = a_net()
        attack = {"feature": FeatureAttack(steps=5, copies=3), "fn": FNAttack(steps=5, restarts=3)}[name]
        found = attack.run(net, x, y, ThreatModel(norm=norm, eps=1e-6))
        # Three restarts, or three other classes at once.
        assert found.forwards.tolist() == [18] * 8
        assert found.backwards.tolist() == [15] * 8
        wrong = attack.run(net, x, (y + 1) % 4, ThreatModel(norm=norm, eps=1e-6))
        assert wrong.forwards.tolist() == [3 if name == "feature" else 1] * 8
        assert wrong.success.all()


class TestFeatureAttack:
    def test_loss_is_the_cosine_to_each_guide(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = recorded(monkeypatch)
        net, x, y = a_net()
        guides = rand(30, 1, 3, 4, seed=9)
        attack = FeatureAttack(steps=2, copies=2, targets=2, guides=guides, step_size=0.01)
        attack(net, x, y, ThreatModel(eps=0.02), key=Key(3))
        a = net.a.detach().numpy()
        labels = net(guides).argmax(dim=1).tolist()
        features = [np.tanh(a @ g.flatten().numpy()) for g in guides]
        losses, points, rows, _ = kept[0]
        assert len(losses) == 2 * len(set(rows.tolist()))
        for loss, point, row in zip(losses.tolist(), points, rows.tolist(), strict=True):
            f = np.tanh(a @ point.flatten().numpy())
            cosines = {
                k: float(f @ g / math.sqrt(float(f @ f) * float(g @ g)))
                for k, g in enumerate(features)
                if labels[k] != int(y[row])
            }
            assert min(abs(loss - cosine) for cosine in cosines.values()) < 1e-12
        first, second = kept[0], kept[1]
        rows_kept = [r for r in first[2].tolist() if r in second[2].tolist()]
        assert rows_kept
        # One step later each copy is nearer to its guide, and one step of the one gradient step away.
        some = [at for at, r in enumerate(first[2].tolist()) if r in rows_kept]
        moved = ascend(first[1][some], first[3][some], x[first[2][some]], ThreatModel(eps=0.02), 0.01)
        assert torch.equal(moved, second[1])
        assert (second[0] > first[0][some]).all()

    def test_without_guides_the_classes_weights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = recorded(monkeypatch)
        net, x, y = a_net()
        FeatureAttack(steps=1, copies=3)(net, x, y, ThreatModel(eps=1e-6))
        losses, points, rows, _ = kept[0]
        f = torch.tanh(points.flatten(1) @ net.a.detach().T)
        cosines = torch.nn.functional.normalize(f, dim=1) @ torch.nn.functional.normalize(net.last.weight, dim=1).T
        for row in range(8):
            expected = sorted(cosines[rows == row][0, [k for k in range(4) if k != y[row]]].tolist())
            assert sorted(losses[rows == row].tolist()) == pytest.approx(expected, abs=1e-4)

    def test_guides_are_of_the_target_class(self) -> None:
        net, x, y = a_net()
        guides, target = rand(40, 1, 3, 4, seed=9), (y + 1) % 4
        labels = net(guides).argmax(dim=1)
        problem = Problem(net, x, y, ThreatModel(eps=0.1), key=Key(0), target=target)
        attack = FeatureAttack(guides=guides, targets=6)
        with reading(problem) as read:
            features, classes, images = attack._guides(problem, read)
        count, order = attack._order(problem, classes, images)
        assert images == 40
        assert features.shape == (44, 10)
        assert int(problem.forwards.sum()) == 0
        for row in range(8):
            suited = [k for k in range(40) if labels[k] == target[row]] or [40 + int(target[row])]
            assert int(count[row]) == min(6, len(suited))
            assert set(order[row, : len(suited)].tolist()) == set(suited)
        untargeted = Problem(net, x, y, ThreatModel(eps=0.1), key=Key(0))
        count, order = attack._order(untargeted, classes, images)
        assert (classes[order[:, :6]] != y[:, None]).all()
        assert (order[:, :6] < 40).all()
        assert len({tuple(row) for row in order[:, :6].tolist()}) == 8, "each sample has its own order"

    def test_a_sample_without_a_suitable_image(self) -> None:
        net, x, y = a_net()
        found = FeatureAttack(steps=10, guides=x[:1].expand(5, -1, -1, -1)).run(net, x, y, ThreatModel(eps=0.3))
        assert (found.forwards > 0).all()
        assert found.success[y == y[0]].any()

    def test_a_guide_is_reached_where_the_radius_allows(self) -> None:
        """With the guide itself in the ball, the features become the guide's, and so does the class."""
        net, x, y = a_net()
        other = torch.stack([x[y != label][0] for label in y])
        for row in range(len(x)):
            attack = FeatureAttack(steps=100, copies=2, guides=other[row : row + 1])
            at = slice(row, row + 1)
            assert attack.run(net, x[at], y[at], ThreatModel(eps=1.0)).success.all()

    def test_images_of_a_dataset(self) -> None:
        images = training_images("digits", 30)
        assert images.shape == (30, 1, 8, 8)
        assert torch.equal(images[0], load("digits").train.images(torch.tensor([0]))[0])
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        x = load("digits").test.images(torch.arange(3))
        found = FeatureAttack(steps=2, data="digits", targets=12, copies=5).run(
            net, x, net(x).argmax(dim=1), ThreatModel(eps=0.01)
        )
        assert found.x_adv.shape == x.shape

    def test_mistakes(self) -> None:
        net, x, y = a_net()
        with pytest.raises(ValueError, match="got both"):
            FeatureAttack(guides=x, data="digits")
        with pytest.raises(ValueError, match="batch of images"):
            FeatureAttack(guides=x[:0])
        with pytest.raises(UserError, match=r"guides of shape \(1, 3, 4\), got \(1, 8, 8\)"):
            FeatureAttack(data="digits")(net, x, y, ThreatModel(eps=0.1))
        with pytest.raises(UserError, match="unknown dataset"):
            FeatureAttack(data="digit")(net, x, y, ThreatModel(eps=0.1))

    def test_settings_can_be_compared_and_shown(self) -> None:
        one, other = FeatureAttack(guides=rand(3, 1, 2, 2)), FeatureAttack(guides=rand(4, 1, 2, 2))
        assert one == other
        assert "guides" not in repr(one)


class TestFN:
    @pytest.mark.parametrize("scale", [1.0, 3.0, "length"])
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("loss", ["cross-entropy", "margin", "dlr"])
    def test_loss(self, monkeypatch: pytest.MonkeyPatch, scale: Any, bias: bool, loss: str) -> None:
        kept = recorded(monkeypatch)
        net, x, y = a_net()
        FNAttack(steps=1, start="zero", scale=scale, bias=bias, loss=loss)(net, x, y, ThreatModel(eps=0.1))
        losses, points, rows, _ = kept[0]
        assert rows.tolist() == list(range(8))
        a, w, b = (t.detach().numpy() for t in (net.a, net.last.weight, net.last.bias))
        for value, point, label in zip(losses.tolist(), points, y.tolist(), strict=True):
            z = np.tanh(a @ point.flatten().numpy())
            length = math.sqrt(sum(float(v) ** 2 for v in z))
            logits = w @ z / length * (length if scale == "length" else scale) + (b if bias else 0)
            assert value == pytest.approx(naive_losses(logits, label, 0, logits)[loss], rel=1e-9)

    @pytest.mark.parametrize("scale", [1.0, 3.0, "length"])
    def test_gradient_is_the_closed_form_across_the_features(self, monkeypatch: pytest.MonkeyPatch, scale: Any) -> None:
        """d CE(s W z~) / dz = s / ||z|| (I - z~ z~') W' (p - e_y): the plain gradient without its part along z."""
        kept = recorded(monkeypatch)
        layer = nn.Linear(12, 4).double()
        net, x = nn.Sequential(nn.Flatten(), layer), rand(5, 1, 3, 4, seed=4) + 0.1
        y = net(x).argmax(dim=1)
        FNAttack(steps=1, start="zero", scale=scale)(net, x, y, ThreatModel(eps=0.1, high=2))
        z, w = x.flatten(1), layer.weight.detach()
        length = z.norm(dim=1, keepdim=True)
        unit, s = z / length, length if scale == "length" else scale
        error = torch.softmax(s * unit @ w.T, dim=1) - torch.eye(4, dtype=torch.float64)[y]
        plain = error @ w
        expected = s / length * (plain - (plain * unit).sum(dim=1, keepdim=True) * unit)
        assert torch.allclose(kept[0][3].flatten(1), expected, atol=1e-12)
        assert (kept[0][3].flatten(1) * z).sum(dim=1).abs().max() < 1e-12

    def test_success_is_the_models_own(self) -> None:
        """A bias that decides alone: normalised logits would call every point another class."""
        net, x, y = a_net()
        net.last.bias.data = torch.tensor([1e3, 0.0, 0.0, 0.0], dtype=torch.float64)
        zero = torch.zeros_like(y)
        found = FNAttack(steps=5).run(net, x, zero, ThreatModel(eps=0.3))
        assert not found.success.any()
        assert found.forwards.tolist() == [6] * 8

    def test_heads(self) -> None:
        _, x, y = a_net()
        with pytest.raises(UserError, match="head normalises them"):
            FNAttack()(Net(he(10, 4).double()), x, y, ThreatModel(eps=0.1))
        head = wn(10, 4, scale=5.0).double()
        problem = Problem(Net(head), x, y, ThreatModel(eps=0.1), key=Key(0))
        with reading(problem) as read:
            logits, features = read(x, torch.arange(8))
            assert torch.allclose(features @ read.weight(logits).T, logits)
            assert torch.allclose(normalised(features, read.weight(logits), None, None), logits)

    def test_mistakes(self) -> None:
        with pytest.raises(ValueError, match="choices: cross-entropy"):
            FNAttack(loss="kl")
        with pytest.raises(ValueError, match="repeat one another"):
            FNAttack(start="zero", restarts=2)
        for bad in (0, -1, "mean", True):
            with pytest.raises(ValueError, match="scale"):
                FNAttack(scale=bad)  # type: ignore[arg-type]
        assert FNAttack(scale="8/4").scale == 2  # type: ignore[arg-type]


@functools.cache
def trained() -> tuple[nn.Module, Tensor, Tensor]:
    """A small network that knows its digits, and digits that it knows."""
    data = load("digits")
    train, test = (part.images(torch.arange(len(part))) for part in (data.train, data.test))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(80):
        optimiser.zero_grad()
        torch.autograd.backward(nn.functional.cross_entropy(net(train), data.train.labels))
        optimiser.step()
    right = (net(test).argmax(dim=1) == data.test.labels).nonzero()[:40, 0]
    assert len(right) == 40
    return net, test[right], data.test.labels[right]


class TestTrained:
    """On a trained network each attack finds about what PGD finds."""

    @every_norm
    def test_finds_what_pgd_finds(self, norm: Norm) -> None:
        net, x, y = trained()
        threat = ThreatModel(norm=norm, eps={"linf": 0.08, "l2": 0.5, "l1": 2.0}[norm])
        pgd = int(PGD(steps=20).run(net, x, y, threat).success.sum())
        assert 10 < pgd < 38
        for attack in (
            FeatureAttack(steps=20, targets=10, copies=5, data="digits"),
            FeatureAttack(steps=20, copies=9),
            FNAttack(steps=20),
            FNAttack(steps=20, scale="length", bias=True),
        ):
            found = int(attack.run(net, x, y, threat).success.sum())
            assert found >= pgd - 8, attack

    def test_carlini_wagner(self) -> None:
        net, x, y = trained()
        threat = ThreatModel(norm="l2", eps=0.5)
        pgd = PGD(steps=20, loss="margin").run(net, x, y, threat)
        found = CarliniWagner(steps=100, search_steps=5, c=0.1, lr=0.05).run(net, x, y, threat, distances=True)
        assert found.distance is not None
        assert torch.isfinite(found.distance).all()
        assert int((pgd.success & ~found.success).sum()) <= 2


class TestMutations:
    """Each break is seen; the check is seen green first."""

    def red(self, monkeypatch: pytest.MonkeyPatch, name: str, norm: str, owner: Any, what: str, broken: Any) -> None:
        check: Callable[[], None] = partial(check_budget, ATTACKS[name], norm, 2)
        check()
        monkeypatch.setattr(owner, what, broken)
        assert red(check), "the break went unnoticed"

    @every_attack
    @pytest.mark.parametrize("norm", ["l2", "l1"])  # linf is in test_mutations.py
    def test_step_downhill(self, monkeypatch: pytest.MonkeyPatch, name: str, norm: str) -> None:
        owner = {"feature": feature_module, "fn": pgd_module}[name]
        self.red(monkeypatch, name, norm, owner, "ascend", lambda x_adv, g, *rest: ascend(x_adv, -g, *rest))

    @every_attack
    def test_step_of_zero(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        owner = {"feature": feature_module, "fn": pgd_module}[name]
        self.red(monkeypatch, name, "linf", owner, "ascend", lambda x_adv, *_: x_adv)

    @every_attack
    def test_gradient_of_zero(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        gradient = Problem.gradient
        self.red(monkeypatch, name, "linf", Problem, "gradient", lambda *args: 0 * gradient(*args))

    def test_fn_loss_constant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def constant(name: str, z: Tensor, y: Tensor, target: Tensor | None = None) -> Tensor:
            return 0 * z.sum(dim=1)

        self.red(monkeypatch, "fn", "linf", fn_module, "adversarial_loss", constant)

    def test_feature_drawn_to_its_own_class(self, monkeypatch: pytest.MonkeyPatch) -> None:
        weight = feature_module.Reader.weight

        def swapped(self: feature_module.Reader, logits: Tensor) -> Tensor:
            return weight(self, logits).flip(0)

        self.red(monkeypatch, "feature", "linf", feature_module.Reader, "weight", swapped)
