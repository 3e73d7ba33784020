"""Objectives against a recomputation in float64 that shares nothing with them but the parameters."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import PGD
from steelman.heads import HEADS, build_head
from steelman.models.classifier import Classifier
from steelman.objectives import OBJECTIVES, Batch, Outcome
from steelman.objectives.pgd_at import PGDAT
from steelman.objectives.standard import Standard
from steelman.threat import ThreatModel
from tests.training_helpers import SHAPE, a_batch, a_net

FEATURES, CLASSES, STEPS, STEP, EPS = 5, 3, 3, 0.04, 0.1
HEAD_OPTIONS: dict[str, dict[str, Any]] = {
    "linear": {},
    "fn": {"scale": 4.0, "margin": 0.3},
    "wn": {"scale": 2.0, "margin": 0.4},
    "he": {"scale": 15.0, "margin": 0.2},
    "m-he": {"scale": 15.0, "margin": 0.1},
}


class Small(nn.Module):
    """Pixels to features, without batch norm; biased, so that features are off centre."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.one = nn.Flatten(), nn.Linear(math.prod(SHAPE), FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.one(self.flat(x)))


def a_small(head: str) -> Classifier:
    torch.manual_seed(4)
    return Classifier(
        Small(), build_head(head, FEATURES, CLASSES, **HEAD_OPTIONS[head]), SHAPE, (0.5,), (0.25,)
    ).double()


class Naive:
    """The same network, head and attack, sample by sample and class by class."""

    def __init__(self, net: Classifier, head: str, *, scaled: bool = True) -> None:
        self.values = {name: value.detach().clone().requires_grad_() for name, value in net.named_parameters()}
        self.head, self.options = head, HEAD_OPTIONS[head]
        self.scale = self.options.get("scale", 1.0) if scaled else 1.0

    def logit(self, x: Tensor, k: int) -> Any:
        w1, b1 = self.values["backbone.one.weight"], self.values["backbone.one.bias"]
        pixels = [(value - 0.5) / 0.25 for value in x.flatten()]
        z = [torch.tanh(sum(w * p for w, p in zip(w1[j], pixels)) + b1[j]) for j in range(FEATURES)]
        w = list(self.values["head.weight"][k])
        long_z, long_w = (sum(v * v for v in vector) ** 0.5 for vector in (z, w))
        dot = sum(a * b for a, b in zip(z, w))
        if self.head == "linear":
            return dot + self.values["head.bias"][k]
        if self.head == "fn":
            return self.scale * dot / long_z
        if self.head == "wn":
            return self.scale * dot / long_w
        cos = dot / (long_z * long_w)
        return self.scale * (cos if self.head == "he" else -torch.acos(cos))

    def loss(self, x: Tensor, y: Tensor, margin: bool) -> Tensor:
        """The mean over samples of log sum_k exp(z_k) - z_y, with s m off the true class if asked."""
        total = torch.zeros((), dtype=torch.float64)
        for one, label in zip(x, y.tolist()):
            z = [self.logit(one, k) for k in range(CLASSES)]
            if margin:
                z[label] = z[label] - self.scale * self.options.get("margin", 0.0)
            total = total + torch.stack([v.exp() for v in z]).sum().log() - z[label]
        return total / len(x)

    def adversary(self, batch: Batch, step: float) -> Tensor:
        eps = batch.threat.eps
        if batch.threat.norm == "l2":  # from the clean image, and in the middle of the box
            return self.adversary_l2(batch, step)
        noise = batch.key.fold("restart", 0).uniform(batch.index, SHAPE, torch.float64)
        x_adv = (batch.x + eps * (2 * noise - 1)).clamp(0, 1)
        for _ in range(STEPS):
            x_adv = x_adv.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.loss(x_adv, batch.y, margin=False), x_adv)
            moved = x_adv.detach() + step * gradient.sign()
            x_adv = torch.max(torch.min(moved, batch.x + eps), batch.x - eps).clamp(0, 1)
        return x_adv.detach()

    def adversary_l2(self, batch: Batch, step: float) -> Tensor:
        delta = torch.zeros_like(batch.x)
        for _ in range(STEPS):
            x_adv = (batch.x + delta).requires_grad_()
            (gradient,) = torch.autograd.grad(self.loss(x_adv, batch.y, margin=False), x_adv)
            for row in range(len(delta)):
                moved = delta[row] + step * gradient[row] / gradient[row].square().sum().sqrt()
                delta[row] = moved * min(1.0, batch.threat.eps / float(moved.square().sum().sqrt()))
        return batch.x + delta


@dataclasses.dataclass
class Watched:
    """The model an objective is called with, and what it was shown in which mode."""

    net: nn.Module
    seen: list[tuple[Tensor, bool]] = dataclasses.field(default_factory=list)

    def __call__(self, x: Tensor) -> Any:
        self.seen.append((x.detach().clone(), self.net.training))
        return self.net(x)

    def modules(self) -> Any:
        return self.net.modules()


def check_gradients(net: Classifier, naive: Naive, loss: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-10, atol=1e-12)
    torch.autograd.backward(loss)
    gradients = torch.autograd.grad(expected, list(naive.values.values()))
    for (name, parameter), gradient in zip(net.named_parameters(), gradients):
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-11)


def test_every_head_is_tried() -> None:
    assert HEAD_OPTIONS.keys() == HEADS.keys()


@pytest.mark.parametrize("head", sorted(HEADS))
def test_standard_is_cross_entropy_with_margin(head: str) -> None:
    net = a_small(head)
    batch, naive = a_batch(net), Naive(net, head)
    outcome = Standard()(batch)
    check_gradients(net, naive, outcome.loss, naive.loss(batch.x, batch.y, margin=True))
    # The accuracy shown while training is that of the logits a user will meet: scaled, without the margin.
    expected = torch.stack([torch.stack([naive.logit(x, k) for k in range(CLASSES)]) for x in batch.x])
    torch.testing.assert_close(outcome.logits, expected.detach())
    assert not outcome.logits.requires_grad


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("head", sorted(HEADS))
def test_pgd_at_attacks_scaled_logits_without_margin_and_trains_with_it(
    head: str, norm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = a_small(head)
    plain = net.head.with_margin
    margins: list[int] = []

    def with_margin(logits: Tensor, y: Tensor) -> Tensor:
        margins.append(len(logits))
        return plain(logits, y)

    monkeypatch.setattr(net.head, "with_margin", with_margin)
    batch, naive = a_batch(net, threat=ThreatModel(norm=norm, eps=EPS)), Naive(net, head)
    if norm == "l2":
        batch = dataclasses.replace(batch, x=0.3 + 0.4 * batch.x)
    attack = PGD(steps=STEPS, step_size=STEP, start="zero" if norm == "l2" else "uniform", keep="last")
    watched = Watched(net)
    outcome = PGDAT(attack=attack)(dataclasses.replace(batch, model=watched))  # type: ignore[arg-type]
    x_adv = naive.adversary(batch, STEP)
    assert len(watched.seen) == 1, "one forward of the wrapped model: the attack works on the bare one"
    torch.testing.assert_close(watched.seen[0][0], x_adv, rtol=0, atol=1e-9)
    check_gradients(net, naive, outcome.loss, naive.loss(x_adv, batch.y, margin=True))
    # In the loss and nowhere else. (Cross-entropy climbs the same way with it: only this count can tell.)
    assert margins == [len(batch.x)]
    if norm == "l2" and head != "linear":
        # The check of x_adv can tell: an adversary that saw logits without the scale would go elsewhere.
        unscaled = Naive(net, head, scaled=False).adversary(batch, STEP)
        assert float((unscaled - x_adv).abs().max()) > 1e-4


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0])
def test_step_size_follows_the_radius(ratio: float) -> None:
    net = a_small("linear")
    batch = a_batch(net, eps=EPS * ratio, ratio=ratio)
    watched = Watched(net)
    PGDAT(attack=PGD(steps=STEPS, step_size=STEP, keep="last"))(dataclasses.replace(batch, model=watched))  # type: ignore[arg-type]
    naive = Naive(net, "linear")
    torch.testing.assert_close(watched.seen[0][0], naive.adversary(batch, STEP * ratio), rtol=0, atol=1e-12)
    if ratio < 1:
        assert not torch.equal(naive.adversary(batch, STEP), naive.adversary(batch, STEP * ratio))


@pytest.mark.parametrize("step", [None, STEP])
def test_a_radius_of_zero_trains_on_clean_images(step: float | None) -> None:
    """The first step of a warm-up of the radius."""
    net = a_small("he")
    batch = a_batch(net, eps=0.0, ratio=0.0)
    outcome = PGDAT(attack=PGD(steps=STEPS, step_size=step, keep="last"))(batch)
    torch.testing.assert_close(outcome.loss, Standard()(batch).loss)


def test_without_a_step_size_it_comes_from_the_scheduled_radius() -> None:
    net = a_small("linear")
    batch = a_batch(net, eps=EPS / 4, ratio=0.25)
    watched = Watched(net)
    PGDAT(attack=PGD(steps=STEPS, keep="last"))(dataclasses.replace(batch, model=watched))  # type: ignore[arg-type]
    expected = Naive(net, "linear").adversary(batch, 2.5 * (EPS / 4) / STEPS)
    torch.testing.assert_close(watched.seen[0][0], expected, rtol=0, atol=1e-12)


def norm_of(net: Classifier) -> nn.BatchNorm1d:
    (norm,) = (module for module in net.modules() if isinstance(module, nn.BatchNorm1d))
    return norm


def test_pgd_at_moves_batch_norm_by_one_forward_on_the_adversarial_images() -> None:
    net = a_net().double().train()
    batch = a_batch(net)
    norm = norm_of(net)
    norm.running_mean = torch.linspace(-1, 1, 12, dtype=torch.float64)
    norm.running_var = torch.linspace(0.5, 2, 12, dtype=torch.float64)
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    attack = PGD(steps=3, keep="last")
    # In eval mode, so that the statistics in use are the running ones and dropout is off.
    x_adv = attack(net.eval(), batch.x, batch.y, batch.threat, index=batch.index, key=batch.key)
    watched = Watched(net.train())
    PGDAT(attack=attack)(dataclasses.replace(batch, model=watched))  # type: ignore[arg-type]
    assert [training for _, training in watched.seen] == [True]
    assert torch.equal(watched.seen[0][0], x_adv)
    layer = net.backbone.layers[0]  # type: ignore[index]
    hidden = x_adv.flatten(1) @ layer.weight.detach().T + layer.bias.detach()  # type: ignore[union-attr]
    torch.testing.assert_close(norm.running_mean, 0.9 * mean + 0.1 * hidden.mean(dim=0))
    torch.testing.assert_close(norm.running_var, 0.9 * var + 0.1 * hidden.var(dim=0, correction=1))
    assert int(norm.num_batches_tracked or 0) == 1


def test_a_train_mode_attack_uses_batch_statistics_and_records_none() -> None:
    net = a_net(dropout=0.0).double().train()
    batch = a_batch(net)
    norm = norm_of(net)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    seen: list[bool] = []
    handle = norm.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    PGD(steps=3, keep="last", mode="train")(net, batch.x, batch.y, batch.threat, index=batch.index, key=batch.key)
    handle.remove()
    assert seen == [True] * 3
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_named_attack_in_an_objective_returns_its_last_point() -> None:
    """An attack that stops at its first success would train on the weakest adversary that works."""
    for name in ("pgd", "fgsm", "bim", "mim"):
        objective = OBJECTIVES["pgd-at"](attack=name)
        assert objective.attack.keep == "last", name  # type: ignore[attr-defined]
    assert OBJECTIVES["pgd-at"](attack={"name": "pgd", "keep": "best"}).attack.keep == "best"  # type: ignore[attr-defined]
    assert OBJECTIVES["pgd-at"]().attack.keep == "last"  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_contract_of_every_objective(name: str) -> None:
    """A finite loss with gradients, one row of logits a sample, the bare net left as it was but for batch norm."""
    net = a_net("he", dropout=0.0).train()
    batch = a_batch(net, n=2)
    batch = dataclasses.replace(batch, x=batch.x.float(), threat=ThreatModel(norm="l2", eps=0.5))
    outcome = OBJECTIVES[name]()(batch)
    assert isinstance(outcome, Outcome)
    assert outcome.loss.shape == ()
    assert torch.isfinite(outcome.loss)
    assert outcome.logits.shape == (2, 3)
    assert net.training
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())
    torch.autograd.backward(outcome.loss)
    assert all(parameter.grad is not None for parameter in net.parameters())
