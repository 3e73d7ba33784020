"""Each method's loss and parameter gradients against a float64 recomputation of its published formula."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from steelman.attacks import PGD
from steelman.heads import HEADS
from steelman.objectives import OBJECTIVES, Batch, Outcome
from steelman.objectives.alp import ALP
from steelman.objectives.awp import shift
from steelman.objectives.fast_at import FastAT
from steelman.objectives.free_at import FreeAT
from steelman.objectives.mart import MART
from steelman.objectives.trades import TRADES
from steelman.training import AWP, Around, Compute
from tests.test_objectives import CLASSES, HEAD_OPTIONS, Naive, a_small, check_gradients
from tests.training_helpers import Made, a_batch, a_net, plain_trainer

every_head = pytest.mark.parametrize("head", sorted(HEADS))


class Recomputed(Naive):
    """The probabilities of the same network, for formulas that speak of them."""

    def rows(self, x: Tensor) -> Tensor:
        return torch.stack([torch.stack([self.logit(one, k) for k in range(CLASSES)]) for one in x])

    def p(self, x: Tensor) -> Tensor:
        z = self.rows(x)
        return z.exp() / z.exp().sum(dim=1, keepdim=True)


def given(net: Any, head: str) -> tuple[Batch, Recomputed, Tensor]:
    """A batch with its adversarial images fixed, so that the loss alone is compared."""
    batch = a_batch(net)
    x_adv = (batch.x + 0.1 * torch.sin(37 * batch.x)).clamp(0, 1)
    return dataclasses.replace(batch, x_adv=x_adv), Recomputed(net, head), x_adv


def mean_kl(p: Tensor, q: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(p)):
        for k in range(CLASSES):
            total = total + p[row, k] * (p[row, k].log() - q[row, k].log())
    return total / len(p)


@every_head
def test_trades(head: str) -> None:
    net = a_small(head)
    batch, naive, x_adv = given(net, head)
    expected = naive.loss(batch.x, batch.y, margin=True) + 2.5 * mean_kl(naive.p(batch.x), naive.p(x_adv))
    check_gradients(net, naive, TRADES(beta=2.5)(batch).loss, expected)


@pytest.mark.parametrize(("head", "pair"), [*((head, "mse") for head in sorted(HEADS)), ("he", "norm"), ("fn", "norm")])
def test_alp_pairs_logits_before_the_scale(head: str, pair: Any) -> None:
    net = a_small(head)
    batch, naive, x_adv = given(net, head)
    scale = HEAD_OPTIONS[head].get("scale", 1.0)
    distance = torch.zeros((), dtype=torch.float64)
    for a, b in zip(naive.rows(batch.x), naive.rows(x_adv)):
        squares = sum((((a[k] - b[k]) / scale) ** 2 for k in range(CLASSES)), torch.zeros((), dtype=torch.float64))
        distance = distance + (squares / CLASSES if pair == "mse" else squares**0.5) / len(batch.x)
    both = naive.loss(batch.x, batch.y, margin=True) + naive.loss(x_adv, batch.y, margin=True)
    check_gradients(net, naive, ALP(weight=0.7, pair=pair)(batch).loss, both / 2 + 0.7 * distance)


@every_head
def test_mart(head: str) -> None:
    net = a_small(head)
    batch, naive, x_adv = given(net, head)
    p, q = naive.p(batch.x), naive.p(x_adv)
    expected = naive.loss(x_adv, batch.y, margin=True)
    for row, y in enumerate(batch.y.tolist()):
        others = [q[row, k] for k in range(CLASSES) if k != y]
        term = -torch.log(1.0001 - torch.stack(others).max() + 1e-12)
        term = term + 3 * mean_kl(p[row : row + 1], q[row : row + 1]) * (1.0000001 - p[row, y])
        expected = expected + term / len(batch.y)
    check_gradients(net, naive, MART(beta=3)(batch).loss, expected)


@pytest.mark.parametrize("objective", [TRADES(), ALP(), MART()])
def test_the_attack_of_each_climbs_what_its_paper_says(objective: Any) -> None:
    net = a_small("he")
    batch, naive = a_batch(net), Recomputed(net, "he")
    x_adv = objective(batch).x_adv
    attack = objective.attack
    assert attack.keep == "last"
    assert attack.loss == ("kl" if isinstance(objective, TRADES) else "cross-entropy")
    expected = attack(net, batch.x, batch.y, batch.threat, index=batch.index, key=batch.key)
    assert torch.equal(x_adv, expected)
    assert batch.threat.contains(x_adv, batch.x).all()
    if isinstance(objective, TRADES):
        noise = 1e-3 * batch.key.fold("restart", 0).normal(batch.index, tuple(batch.x.shape[1:]), torch.float64)
        start = (batch.x + noise).clamp(0, 1)
        assert mean_kl(naive.p(batch.x), naive.p(x_adv)) > 10 * mean_kl(naive.p(batch.x), naive.p(start))
    else:
        assert naive.loss(x_adv, batch.y, margin=False) > naive.loss(batch.x, batch.y, margin=False)


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_fast_at_is_one_step_from_the_ball(ratio: float) -> None:
    net = a_small("linear")
    eps = 0.2 * ratio
    batch = a_batch(net, eps=eps, ratio=ratio)
    outcome = FastAT(step=1.25)(batch)
    noise = batch.key.fold("restart", 0).uniform(batch.index, tuple(batch.x.shape[1:]), torch.float64)
    start = (batch.x + eps * (2 * noise - 1)).requires_grad_()  # outside the box where it falls there
    naive = Recomputed(net, "linear")
    (gradient,) = torch.autograd.grad(naive.loss(start, batch.y, margin=False), start)
    moved = start.detach() + 1.25 * eps * gradient.sign()
    expected = torch.max(torch.min(moved, batch.x + eps), batch.x - eps).clamp(0, 1)
    assert outcome.x_adv is not None
    torch.testing.assert_close(outcome.x_adv, expected)
    check_gradients(net, naive, outcome.loss, naive.loss(expected, batch.y, margin=True))


def test_fast_at_without_a_radius_trains_on_clean_images() -> None:
    net = a_small("linear")
    batch = a_batch(net, eps=0.0, ratio=0.0)
    outcome = FastAT()(batch)
    assert outcome.x_adv is not None
    assert torch.equal(outcome.x_adv, batch.x)


def test_free_at_carries_its_perturbation_as_a_hand_written_loop_does() -> None:
    """Batches of 6, 4 and 6 other rows, three replays each, with the optimiser's steps in between."""
    net, other = a_small("he"), a_small("he")
    full = a_batch(net)
    carry: dict[str, Tensor] = {}
    eps, delta = full.threat.eps, torch.zeros_like(full.x)
    for turn, n in enumerate((6, 4, 6)):
        x, y = full.x.roll(turn, 0)[:n], full.y[:n]  # what is carried to other images may lead out of the range
        for _ in range(3):
            batch = dataclasses.replace(full, x=x, y=y, index=full.index[:n], carry=carry)
            outcome = FreeAT(replays=3, step=0.5)(batch)
            net.zero_grad()
            torch.autograd.backward(outcome.loss)
            assert outcome.after is not None
            outcome.after()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]

            other.zero_grad()
            adversarial = (x + delta[:n]).clamp(0, 1).requires_grad_()
            logits = other(adversarial)
            lowered = logits - 15 * 0.2 * torch.nn.functional.one_hot(y, CLASSES)
            loss = torch.nn.functional.cross_entropy(lowered, y)
            torch.testing.assert_close(outcome.loss, loss)
            torch.autograd.backward(loss)
            assert adversarial.grad is not None
            moved = adversarial.detach() - x + 0.5 * eps * adversarial.grad.sign()
            delta[:n] = ((x + moved.clamp(-eps, eps)).clamp(0, 1) - x).detach()
            torch.testing.assert_close(carry["delta"], delta)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
    for ours, theirs in zip(net.parameters(), other.parameters()):
        torch.testing.assert_close(ours, theirs)
    assert delta.abs().max() > eps / 2


class TestAWP:
    def test_it_works_in_mixed_precision(self, tmp_path: Path) -> None:
        """The loss is taken at the moved weights even where autocast keeps copies of them."""
        losses = []
        for name, awp in (("without", None), ("with", AWP(gamma=0.5))):
            trainer = plain_trainer(
                tmp_path / name,
                net=a_net(dropout=0.0),
                objective=OBJECTIVES["pgd-at"](),
                around=Around(awp=awp),
                compute=Compute(accelerator="cpu", precision="bf16-mixed"),
                training={"lr": 0.0, "epochs": 1},
            )
            losses.append(trainer.fit().history[0]["loss"])
        assert losses[1] > 1.05 * losses[0]

    def test_a_loss_that_is_not_finite_moves_nothing(self) -> None:
        net = a_small("linear")
        before = {name: value.clone() for name, value in net.state_dict().items()}

        def broken(batch: Batch) -> Outcome:
            logits = batch.clean()
            return Outcome(loss=logits.sum() * float("nan"), logits=logits.detach())

        assert AWP(gamma=0.1).shifted(Made(broken), a_batch(net)) is None
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())

    def test_the_step_is_each_weights_own_length_along_its_gradient(self) -> None:
        net = a_small("linear")
        batch, naive, x_adv = given(net, "linear")
        step = AWP(gamma=0.01).direction(net, OBJECTIVES["pgd-at"]()(batch).loss)
        gradients = torch.autograd.grad(naive.loss(x_adv, batch.y, margin=True), list(naive.values.values()))
        expected = dict(zip(naive.values, gradients))
        assert step.keys() == {"backbone.one.weight", "head.weight"}, "vectors are left alone"
        for name, move in step.items():
            weight = naive.values[name].detach()
            ratio = float((weight**2).sum() ** 0.5 / (expected[name] ** 2).sum() ** 0.5)
            torch.testing.assert_close(move, 0.01 * ratio * expected[name])

    def test_the_loss_rises_along_it(self) -> None:
        net = a_small("linear")
        batch, _, _ = given(net, "linear")
        objective = OBJECTIVES["pgd-at"]()
        before = objective(batch).loss
        shift(net, AWP(gamma=0.01).direction(net, before), 1)
        assert objective(batch).loss > before

    def test_a_step_of_zero_leaves_weights_as_they_are_to_the_bit(self) -> None:
        net = a_small("he")
        batch, _, _ = given(net, "he")
        before = {name: value.clone() for name, value in net.state_dict().items()}
        step = AWP(gamma=0).direction(net, OBJECTIVES["trades"]()(batch).loss)
        shift(net, step, 1)
        shift(net, step, -1)
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_label_smoothing_spreads_the_label() -> None:
    net = a_small("linear")
    batch = dataclasses.replace(a_batch(net), smoothing=0.3)
    naive = Recomputed(net, "linear")
    expected = torch.zeros((), dtype=torch.float64)
    for row, y in zip(naive.p(batch.x), batch.y.tolist()):
        for k in range(CLASSES):
            expected = expected - (0.7 * (k == y) + 0.3 / CLASSES) * row[k].log() / len(batch.y)
    check_gradients(net, naive, OBJECTIVES["standard"]()(batch).loss, expected)


def test_a_recipe_attack_keeps_what_the_method_needs_of_it() -> None:
    attack = TRADES(attack={"name": "pgd", "steps": 4}).attack  # type: ignore[arg-type]
    assert isinstance(attack, PGD)
    assert (attack.steps, attack.loss, attack.start, attack.keep) == (4, "kl", "gaussian", "last")


@pytest.mark.parametrize("wrong", [{"replays": 0}, {"step": 0}, {"step": -1}, {"replays": 1.5}, {"replays": True}])
def test_free_at_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"replays|step"):
        FreeAT(**wrong)
