"""LLR and CURE, which descend an input gradient, against recomputations in float64; and the batch norm they need."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steelman.heads import HEADS, build_head
from steelman.models.batchnorm import fixed, recorded, routed, split_norms
from steelman.models.classifier import Classifier
from steelman.objectives import Batch
from steelman.objectives.cure import CURE
from steelman.objectives.llr import LLR
from steelman.objectives.standard import Standard
from steelman.schedules import Linear
from steelman.threat import ThreatModel, norms
from tests.test_methods import Recomputed, given
from tests.test_objectives import Naive, Watched, a_small, check_gradients
from tests.training_helpers import SHAPE, a_batch

every_head = pytest.mark.parametrize("head", sorted(HEADS))
both = pytest.mark.parametrize("objective", [LLR(steps=2), CURE(), CURE(squared=False)])


class Smooth(nn.Module):
    """Batch norm, a smooth activation and dropout; it fails at the forward numbered `fails_at`."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(math.prod(SHAPE), 8), nn.BatchNorm1d(8)
        self.act, self.drop = nn.Softplus(), nn.Dropout(dropout)
        self.forwards, self.fails_at = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        out: Tensor = self.drop(self.act(self.norm(self.one(x.flatten(1)))))
        if self.forwards == self.fails_at:
            raise RuntimeError("no more")
        return out


def a_smooth(dropout: float = 0.0) -> tuple[Classifier, Smooth]:
    """Running averages and affine parameters that no batch would give by chance."""
    torch.manual_seed(2)
    backbone = Smooth(dropout)
    net = Classifier(backbone, build_head("linear", 8, 3), SHAPE).double().train()
    backbone.norm.running_mean = torch.linspace(-1, 1, 8, dtype=torch.float64)
    backbone.norm.running_var = torch.linspace(0.5, 2, 8, dtype=torch.float64)
    nn.init.uniform_(backbone.norm.weight, 0.5, 1.5)
    nn.init.uniform_(backbone.norm.bias)
    return net, backbone


def by_hand(net: Classifier, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """The logits of a smooth network whose batch norm uses the given statistics."""
    p = dict(net.named_parameters())
    hidden = x.flatten(1) @ p["backbone.one.weight"].T + p["backbone.one.bias"]
    normed = (hidden - mean) / (var + 1e-5).sqrt() * p["backbone.norm.weight"] + p["backbone.norm.bias"]
    return (1 + normed.exp()).log() @ p["head.weight"].T + p["head.bias"]


def hidden_of(net: Classifier, x: Tensor) -> Tensor:
    p = dict(net.named_parameters())
    return x.flatten(1) @ p["backbone.one.weight"].T + p["backbone.one.bias"]


def slope(naive: Naive, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """One sample's loss, and its input gradient with the graph that leads to the parameters."""
    x = x.detach().clone().requires_grad_()
    loss = naive.loss(x, y, margin=True)
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss, gradient


def parts(naive: Naive, batch: Batch, x_adv: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """l(x), l(x + delta) - l(x) - delta . grad l(x) and delta . grad l(x): samples one by one, all with their sign."""
    losses, gaps, rises = [], [], []
    for row in range(len(batch.x)):
        x, y, moved = batch.x[row : row + 1], batch.y[row : row + 1], x_adv[row : row + 1]
        clean, gradient = slope(naive, x, y)
        rise = sum(d * g for d, g in zip((moved - x).flatten(), gradient.flatten()))
        assert isinstance(rise, Tensor)
        losses.append(clean)
        rises.append(rise)
        gaps.append(naive.loss(moved, y, margin=True) - clean - rise)
    return losses, gaps, rises


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).sum() / len(values)


class TestLLR:
    @every_head
    def test_loss_and_gradients_are_the_papers(self, head: str) -> None:
        net = a_small(head)
        batch, naive, x_adv = given(net, head)
        losses, gaps, rises = parts(naive, batch, x_adv)
        expected = mean([a + 2.5 * b.abs() + 0.7 * c.abs() for a, b, c in zip(losses, gaps, rises)])
        outcome = LLR(weight=2.5, mu=0.7)(batch)
        assert outcome.x_adv is x_adv, "the images of the first pass serve the second"
        check_gradients(net, naive, outcome.loss, expected)
        torch.testing.assert_close(outcome.logits, naive.rows(x_adv).detach())
        assert not outcome.logits.requires_grad

    @every_head
    def test_the_norm_of_the_gradient_may_stand_for_the_rise_along_delta(self, head: str) -> None:
        net = a_small(head)
        batch, naive, x_adv = given(net, head)
        losses, gaps, _ = parts(naive, batch, x_adv)
        norms = []
        for row in range(len(batch.x)):
            _, gradient = slope(naive, batch.x[row : row + 1], batch.y[row : row + 1])
            norms.append((gradient**2).sum() ** 0.5)
        expected = mean([a + 2.5 * b.abs() + 0.7 * c for a, b, c in zip(losses, gaps, norms)])
        check_gradients(net, naive, LLR(weight=2.5, mu=0.7, penalty="norm")(batch).loss, expected)

    def test_the_loss_tells_the_known_mistakes_apart(self) -> None:
        net = a_small("linear")
        batch, naive, x_adv = given(net, "linear")
        losses, gaps, rises = parts(naive, batch, x_adv)
        assert all(min(values) < 0 < max(values) for values in (gaps, rises))
        loss = float(LLR(weight=2, mu=1)(batch).loss.detach())
        gap, rise = mean([value.abs() for value in gaps]), mean([value.abs() for value in rises])
        assert loss == pytest.approx(float((mean(losses) + 2 * gap + rise).detach()))
        for wrong in (
            2 * gap + rise,  # l(x) dropped
            mean(losses) + 2 * mean(gaps).abs() + rise,  # the absolute value of the batch mean
            mean(losses) + 2 * gap + mean(rises),  # none on the second term
            mean(losses) + 2 * gap + mean(rises).abs(),
        ):
            assert abs(float(wrong.detach()) - loss) > 1e-4

    def test_finite_differences_agree(self) -> None:
        """delta . grad l(x) as a difference quotient: no second derivative is taken on this side."""
        net = a_small("he")
        batch, naive, x_adv = given(net, "he")
        delta, t = x_adv - batch.x, 1e-3
        expected = torch.zeros((), dtype=torch.float64)
        for row in range(len(batch.x)):
            one = slice(row, row + 1)
            clean, moved = (naive.loss(x[one], batch.y[one], margin=True) for x in (batch.x, x_adv))
            ahead, behind = (
                naive.loss(batch.x[one] + step * delta[one], batch.y[one], margin=True) for step in (t, -t)
            )
            rise = (ahead - behind) / (2 * t)
            expected = expected + (clean + 4 * (moved - clean - rise).abs() + 3 * rise.abs()) / len(batch.x)
        loss = LLR()(batch).loss
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        torch.autograd.backward(loss)
        gradients = torch.autograd.grad(expected, list(naive.values.values()))
        for parameter, gradient in zip(net.parameters(), gradients):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("head", ["linear", "he"])
    @pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
    def test_delta_is_found_by_adam_on_each_sample_alone(self, norm: Any, head: str) -> None:
        net = a_small(head)
        eps = {"linf": 0.1, "l2": 0.4, "l1": 1.0}[norm]
        batch = a_batch(net, n=3, threat=ThreatModel(norm=norm, eps=eps))
        naive = Recomputed(net, head)
        outcome = LLR(steps=4, lr=0.05)(batch)
        assert outcome.x_adv is not None
        assert batch.threat.contains(outcome.x_adv, batch.x).all()
        assert not outcome.x_adv.requires_grad
        for row in range(len(batch.x)):
            one = slice(row, row + 1)
            x, y = batch.x[one], batch.y[one]
            clean, gradient = (value.detach() for value in slope(naive, x, y))
            if norm == "linf":
                noise = batch.key.fold("llr").uniform(batch.index[one], SHAPE, torch.float64)
                moved = (x + eps * (2 * noise - 1)).clamp(0, 1)
            else:
                moved = batch.threat.random_start(x, batch.index[one], batch.key.fold("llr"))
            first, m, v = moved, torch.zeros_like(x), torch.zeros_like(x)
            for t in range(1, 5):
                moved = moved.detach().requires_grad_()
                g = (naive.loss(moved, y, margin=True) - clean - ((moved - x) * gradient).sum()).abs()
                (up,) = torch.autograd.grad(g, moved)
                m, v = 0.9 * m + 0.1 * up, 0.999 * v + 0.001 * up**2
                step = 0.05 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-9)
                moved = moved.detach() + step
                if norm == "linf":
                    moved = torch.max(torch.min(moved, x + eps), x - eps).clamp(0, 1)
                else:
                    moved = batch.threat.project(moved, x)
            torch.testing.assert_close(outcome.x_adv[one], moved, rtol=0, atol=1e-9)
            alone = dataclasses.replace(batch, x=x, y=y)
            before, after = (parts(naive, alone, at)[1][0].detach().abs() for at in (first, moved))
            assert after > 2 * before

    def test_other_samples_do_not_matter(self) -> None:
        net = a_small("he")
        batch = a_batch(net)
        rows = torch.tensor([4, 1])
        fewer = dataclasses.replace(batch, x=batch.x[rows], y=batch.y[rows], index=batch.index[rows])
        all_rows, two = (LLR()(given_batch).x_adv for given_batch in (batch, fewer))
        assert all_rows is not None
        assert two is not None
        torch.testing.assert_close(all_rows[rows], two, rtol=0, atol=1e-9)

    def test_without_a_radius_it_is_cross_entropy(self) -> None:
        net = a_small("he")
        batch = a_batch(net, eps=0.0, ratio=0.0)
        outcome = LLR()(batch)
        naive = Naive(net, "he")
        check_gradients(net, naive, outcome.loss, naive.loss(batch.x, batch.y, margin=True))
        assert outcome.x_adv is batch.x

    def test_without_a_radius_a_penalty_on_the_norm_stays(self) -> None:
        net = a_small("he")
        batch = a_batch(net, eps=0.0, ratio=0.0)
        plain = LLR(mu=0.0, penalty="norm")(batch).loss
        torch.testing.assert_close(plain, Standard()(batch).loss)
        assert LLR(mu=1.0, penalty="norm")(batch).loss > plain + 1e-3

    def test_label_smoothing_is_in_every_term(self) -> None:
        """With all of the label spread, the loss does not depend on the label, nor does delta."""
        net = a_small("linear")
        batch = dataclasses.replace(a_batch(net), smoothing=1.0)
        other = dataclasses.replace(batch, y=(batch.y + 1) % 3)
        one, two = LLR()(batch), LLR()(other)
        torch.testing.assert_close(one.loss, two.loss)
        assert one.x_adv is not None
        assert two.x_adv is not None
        torch.testing.assert_close(one.x_adv, two.x_adv, rtol=0, atol=1e-9)

    @pytest.mark.parametrize("statistics", ["live", "constant"])
    def test_batch_norm_uses_the_clean_batch(self, statistics: Any) -> None:
        """Live statistics carry gradients, to the weights and to the clean images; constant ones are numbers."""
        net, _ = a_smooth()
        batch, _, _ = given(net, "linear")
        outcome = LLR(weight=2, mu=0.5, statistics=statistics)(batch)
        assert outcome.x_adv is not None
        x, x_adv = batch.x.clone().requires_grad_(), outcome.x_adv
        hidden = hidden_of(net, x)
        own = hidden.mean(dim=0), hidden.var(dim=0, correction=0)
        if statistics == "constant":
            own = own[0].detach(), own[1].detach()
        clean = F.cross_entropy(by_hand(net, x, *own), batch.y, reduction="none")
        (gradient,) = torch.autograd.grad(clean.sum(), x, create_graph=True)
        rise = ((x_adv - batch.x) * gradient).flatten(1).sum(dim=1)
        moved = F.cross_entropy(by_hand(net, x_adv, *own), batch.y, reduction="none")
        hidden = hidden_of(net, batch.x)  # the nominal term differentiates its statistics, as training does
        logits = by_hand(net, batch.x, hidden.mean(dim=0), hidden.var(dim=0, correction=0))
        nominal = F.cross_entropy(logits, batch.y)
        expected = nominal + 2 * (moved - clean - rise).abs().mean() + 0.5 * rise.abs().mean()
        torch.testing.assert_close(outcome.loss, expected, rtol=1e-10, atol=1e-12)
        parameters = list(net.parameters())
        ours, theirs = torch.autograd.grad(outcome.loss, parameters), torch.autograd.grad(expected, parameters)
        for one, two in zip(ours, theirs):
            torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-11)

    def test_live_and_constant_statistics_differ(self) -> None:
        """A weight before batch norm keeps its scale invariance with live statistics alone: its gradient is then at a
        right angle to it."""
        net, backbone = a_smooth()
        batch, _, _ = given(net, "linear")
        weight = next(parameter for parameter in backbone.parameters() if parameter.dim() == 2)
        leans = []
        for statistics in ("live", "constant"):
            loss = LLR(weight=2, mu=0.5, statistics=statistics)(batch).loss
            (gradient,) = torch.autograd.grad(loss, [weight])
            leans.append(float(((gradient * weight).sum(dim=1)).abs().max() / gradient.norm()))
        assert leans[0] < 1e-3 < 10 * leans[0] < leans[1]

    @pytest.mark.parametrize("wrong", [{"weight": -1}, {"mu": -1}, {"steps": 0}, {"lr": 0}, {"eps": 1}])
    def test_refuses(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            LLR(**wrong)


class TestCURE:
    def expected(self, naive: Naive, batch: Batch, weight: float, h: float, squared: bool) -> Tensor:
        terms = []
        for x, y in zip(batch.x[:, None], batch.y[:, None]):
            loss, gradient = slope(naive, x, y)
            sign = gradient.detach().sign()
            _, ahead = slope(naive, x + h * sign / math.sqrt(sign.count_nonzero()), y)
            size = sum((a - b) ** 2 for a, b in zip(ahead.flatten(), gradient.flatten()))
            terms.append(loss + weight * size ** (1 if squared else 0.5))
        return mean(terms)

    @every_head
    @pytest.mark.parametrize("squared", [True, False])
    def test_loss_and_gradients_are_the_papers(self, head: str, squared: bool) -> None:
        net = a_small(head)
        batch, naive = a_batch(net), Recomputed(net, head)
        outcome = CURE(weight=0.7, h=0.9, squared=squared)(batch)
        check_gradients(net, naive, outcome.loss, self.expected(naive, batch, 0.7, 0.9, squared))
        torch.testing.assert_close(outcome.logits, naive.rows(batch.x).detach())
        assert not outcome.logits.requires_grad
        assert outcome.x_adv is None

    def test_finite_differences_agree(self) -> None:
        """grad l as difference quotients: no second derivative is taken on this side."""
        net = a_small("linear")
        batch = a_batch(net, n=2)
        values = {name: value.detach().clone().requires_grad_() for name, value in net.named_parameters()}

        def losses(x: Tensor) -> Tensor:
            hidden = (x.flatten(1) - 0.5) / 0.25 @ values["backbone.one.weight"].T + values["backbone.one.bias"]
            logits = torch.tanh(hidden) @ values["head.weight"].T + values["head.bias"]
            return F.cross_entropy(logits, batch.y, reduction="none")

        def quotient(x: Tensor, t: float = 1e-4) -> Tensor:
            steps = t * torch.eye(math.prod(SHAPE), dtype=torch.float64).reshape(-1, 1, *SHAPE)
            return torch.stack([(losses(x + step) - losses(x - step)) / (2 * t) for step in steps], dim=1)

        gradient = quotient(batch.x)
        z = (gradient.detach().sign() / math.sqrt(math.prod(SHAPE))).reshape(batch.x.shape)
        bend = quotient(batch.x + 1.5 * z) - gradient
        expected = (losses(batch.x) + 4 * bend.square().sum(dim=1)).mean()
        loss = CURE()(batch).loss
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
        torch.autograd.backward(loss)
        for parameter, value in zip(net.parameters(), torch.autograd.grad(expected, list(values.values()))):
            torch.testing.assert_close(parameter.grad, value, rtol=1e-5, atol=1e-6)

    def test_h_may_be_a_schedule(self) -> None:
        net = a_small("linear")
        batch = dataclasses.replace(a_batch(net), progress=0.25)
        scheduled = CURE(h=Linear(start=0, end=2))(batch)
        torch.testing.assert_close(scheduled.loss, CURE(h=0.5)(batch).loss)
        assert abs(float(scheduled.loss - CURE(h=2)(batch).loss)) > 1e-3

    def test_the_radius_plays_no_part(self) -> None:
        net = a_small("he")
        one, two = (CURE()(a_batch(net, eps=eps)).loss for eps in (0.0, 0.7))
        assert torch.equal(one, two)

    def test_the_norm_of_no_difference_has_a_gradient(self) -> None:
        net = a_small("linear")
        batch = a_batch(net)
        loss = CURE(h=0, squared=False)(batch).loss
        check_gradients(net, naive := Naive(net, "linear"), loss, naive.loss(batch.x, batch.y, margin=True))

    def test_a_flat_sample_stays_where_it_is(self) -> None:
        """A zero gradient has no direction: neither z nor the loss may become undefined."""
        net = a_small("linear")
        with torch.no_grad():
            net.head.weight.zero_()
        loss = CURE(squared=False)(a_batch(net)).loss
        torch.autograd.backward(loss)
        assert torch.isfinite(loss)
        assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in net.parameters())

    def test_batch_norm_uses_running_averages_that_the_clean_batch_has_moved(self) -> None:
        net, backbone = a_smooth()
        batch = a_batch(net)
        loss = CURE(weight=3)(batch).loss
        running = backbone.norm.running_mean, backbone.norm.running_var
        assert running[0] is not None
        assert running[1] is not None
        fixed = running[0].clone(), running[1].clone()

        def gradient(x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            losses = F.cross_entropy(by_hand(net, x, *fixed), batch.y, reduction="sum")
            return torch.autograd.grad(losses, x, create_graph=True)[0]

        at = gradient(batch.x)
        bend = gradient(batch.x + 1.5 * at.detach().sign() / math.sqrt(math.prod(SHAPE))) - at
        hidden = hidden_of(net, batch.x)
        logits = by_hand(net, batch.x, hidden.mean(dim=0), hidden.var(dim=0, correction=0))
        expected = F.cross_entropy(logits, batch.y) + 3 * bend.square().flatten(1).sum(dim=1).mean()
        torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
        parameters = list(net.parameters())
        ours, theirs = torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)
        for one, two in zip(ours, theirs):
            torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-11)

    @pytest.mark.parametrize(
        "wrong", [{"weight": -1}, {"h": -0.5}, {"h": {"name": "linear", "start": 1, "end": -1}}, {"squared": 3}]
    )
    def test_refuses(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CURE(**wrong)


@both
def test_one_forward_in_train_mode_moves_batch_norm(objective: Any) -> None:
    net, backbone = a_smooth(dropout=0.5)
    batch = a_batch(net)
    norm = backbone.norm
    buffers = dict(net.named_buffers())
    before = {name: value.clone() for name, value in buffers.items()}
    watched = Watched(net)
    objective(dataclasses.replace(batch, model=watched))  # type: ignore[arg-type]
    assert [training for _, training in watched.seen] == [True]
    assert torch.equal(watched.seen[0][0], batch.x)
    assert all(value is buffers[name] for name, value in net.named_buffers())
    hidden = hidden_of(net, batch.x).detach()
    mean_before, var_before = before["backbone.norm.running_mean"], before["backbone.norm.running_var"]
    torch.testing.assert_close(norm.running_mean, 0.9 * mean_before + 0.1 * hidden.mean(dim=0))
    torch.testing.assert_close(norm.running_var, 0.9 * var_before + 0.1 * hidden.var(dim=0, correction=1))
    assert int(norm.num_batches_tracked or 0) == 1
    assert not any(module._forward_pre_hooks for module in net.modules())
    assert all(parameter.grad is None for parameter in net.parameters())


@both
@pytest.mark.parametrize("fails_at", [0, 1, 2, 3])
def test_modes_and_averages_are_restored_even_after_a_failure(objective: Any, fails_at: int) -> None:
    """The forwards are the nominal one, then those of the regulariser."""
    net, backbone = a_smooth(dropout=0.5)
    backbone.drop.eval()
    modes = [module.training for module in net.modules()]
    averages = backbone.norm.running_mean, backbone.norm.running_var
    backbone.fails_at = fails_at
    if fails_at:
        with pytest.raises(RuntimeError, match="no more"):
            objective(a_batch(net))
    else:
        objective(a_batch(net))
    assert [module.training for module in net.modules()] == modes
    assert backbone.norm.running_mean is averages[0]
    assert backbone.norm.running_var is averages[1]
    assert int(backbone.norm.num_batches_tracked or 0) == 1
    assert not any(module._forward_pre_hooks for module in net.modules())


@both
def test_dropout_is_in_the_nominal_term_alone(objective: Any) -> None:
    net, _ = a_smooth(dropout=0.5)

    def terms(seed: int) -> tuple[float, float]:
        """The nominal term, and the rest."""
        torch.manual_seed(seed)
        state = {name: value.clone() for name, value in net.state_dict().items()}
        whole = float(objective(a_batch(net)).loss.detach())
        net.load_state_dict(state)
        torch.manual_seed(seed)
        nominal = float(Standard()(a_batch(net)).loss.detach())
        net.load_state_dict(state)
        return nominal, whole - nominal

    one, two = terms(0), terms(1)
    assert abs(one[0] - two[0]) > 1e-3
    assert one[1] == pytest.approx(two[1], rel=1e-9)


@both
def test_the_regulariser_is_in_full_precision_under_autocast(objective: Any) -> None:
    net = a_small("he").float()
    batch = a_batch(net)
    batch = dataclasses.replace(batch, x=batch.x.float(), x_adv=(batch.x + 0.02).clamp(0, 1).float())

    def regulariser() -> float:
        plain = dataclasses.replace(objective, weight=0.0, **({"mu": 0.0} if isinstance(objective, LLR) else {}))
        return float((objective(batch).loss - plain(batch).loss).detach())

    exact = regulariser()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert regulariser() == pytest.approx(exact, rel=1e-5)


def test_cure_has_no_attack_and_neither_runs_compiled() -> None:
    assert CURE.adversarial is False
    assert getattr(LLR, "adversarial", True)
    assert LLR.forwards == CURE.forwards == ("clean",)
    assert "input gradient" in LLR.eager
    assert "input gradient" in CURE.eager


def flat(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 16), *layers).double()


class TestStatistics:
    @pytest.mark.parametrize(
        "net",
        [
            flat(nn.Tanh()),
            flat(nn.BatchNorm1d(16), nn.Tanh()),
            flat(nn.BatchNorm1d(16, momentum=None), nn.Tanh()),
            flat(nn.BatchNorm1d(16, track_running_stats=False)),
            nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Softplus()).double(),
            split_norms(flat(nn.BatchNorm1d(16))),
        ],
    )
    def test_a_fixed_model_repeats_the_batch_and_ties_no_sample_to_another(self, net: nn.Module) -> None:
        x = a_batch(net).x
        with routed(net, "adversarial"):
            with recorded(net) as moments:
                expected = net.train()(x)
            before = {name: value.clone() for name, value in net.state_dict().items()}
            with fixed(net, moments):
                for rows in (slice(None), slice(2), slice(2, 3)):
                    torch.testing.assert_close(net(x[rows]), expected[rows])
        assert net.state_dict().keys() == before.keys()
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    def test_a_frozen_batch_norm_keeps_its_running_averages(self) -> None:
        """One that its owner put in eval mode within a model that trains."""
        net = flat(nn.BatchNorm1d(16)).train()
        net[2].eval()  # type: ignore[index]
        x = a_batch(net).x
        with recorded(net) as moments:
            expected = net(x)
        assert moments == {}
        with fixed(net, moments):
            torch.testing.assert_close(net(x), expected)
        assert net.training
        assert not net[2].training  # type: ignore[index]

    def test_gradients_flow_to_weights_and_not_to_statistics(self) -> None:
        net = flat(nn.BatchNorm1d(16))
        x = a_batch(net).x.requires_grad_()
        with recorded(net) as moments:
            net(x)
        assert all(not value.requires_grad for uses in moments.values() for pair in uses for value in pair)
        with fixed(net, moments):
            net(x)[0].sum().backward()
        assert x.grad is not None
        assert norms(x.grad, 2.0).count_nonzero() == 1, "the other samples have no part in it"
        assert all(parameter.grad is not None for parameter in net.parameters())
