"""RAT against a float64 recomputation of its formula; its row sums against autograd of whole networks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import PGD
from steelman.errors import TrainingInterruptedError, UserError
from steelman.heads import HEADS
from steelman.models.features import features_of, last_layer
from steelman.objectives.base import Batch, objections
from steelman.objectives.pgd_at import PGDAT
from steelman.objectives.rat import RAT, row_sums, shaken, targets
from steelman.objectives.trades import TRADES
from steelman.rng import Key
from steelman.threat import ThreatModel
from steelman.training import AWP, Around
from tests.test_methods import Recomputed, every_head, given, mean_kl
from tests.test_objectives import CLASSES, Watched, a_small, check_gradients
from tests.training_helpers import a_batch, a_net, a_trainer, interrupted_at, newest, same, same_run

ZERO = torch.zeros((), dtype=torch.float64)


def naive_rows(naive: Recomputed, x: Tensor, y: Tensor) -> list[float]:
    """sum_i dCE/dW_ji by differentiating the whole naive network."""
    (gradient,) = torch.autograd.grad(naive.loss(x, y, margin=False), naive.values["head.weight"])
    return [float(sum(row)) for row in gradient.tolist()]


def naive_target(gap: list[float], y: int, spread: float) -> list[float]:
    """T(d) for the true class y."""
    low = min(gap)
    others = [gap[k] - low if k != y else 0.0 for k in range(len(gap))]
    total = sum(others)
    row = [spread * v / total if total > 0 else spread / (len(gap) - 1) for v in others]
    row[y] = 1 - spread
    return row


def soft(p: Tensor, y: Tensor, gap: list[float], spread: float) -> Tensor:
    """The mean over samples of KL(T(d)_y || p)."""
    total = ZERO
    for row, label in zip(p, y.tolist()):
        for a, b in zip(naive_target(gap, label, spread), row):
            if a > 0:
                total = total + a * (torch.tensor(a, dtype=torch.float64).log() - b.log())
    return total / len(p)


def expected(objective: RAT, naive: Recomputed, batch: Batch, x_adv: Tensor) -> Tensor:
    """The objective's loss, written out."""
    y, p, q = batch.y, naive.p(batch.x), naive.p(x_adv)
    r, s = naive_rows(naive, batch.x, y), naive_rows(naive, x_adv, y)
    spread = 1 - 2 / 3 if objective.spread is None else objective.spread
    one = [abs(a) - abs(b) for a, b in zip(r, s)] if objective.released else [a - b for a, b in zip(r, s)]
    two = [a * a - b * b for a, b in zip(r, s)]
    minus_one, minus_two = [-v for v in one], [-v for v in two]
    first = (soft(q, y, one, spread) + soft(p, y, minus_one, spread)) / 2
    second = (soft(q, y, minus_two if objective.released else two, spread) + soft(p, y, minus_two, spread)) / 2
    if objective.base == "trades":
        label, pair = naive.loss(batch.x, y, margin=True), objective.beta * mean_kl(p, q)
    else:
        label, pair = naive.loss(x_adv, y, margin=True), ZERO
    if objective.order == 0:
        return label + pair
    taylor = first + (objective.second * second if objective.order == 2 else 0)
    return (1 - objective.alpha) * label + pair + objective.alpha * taylor


@every_head
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"base": "at"},
        {"released": True},
        {"order": 1, "spread": 0.5},
        {"order": 0},
        {"alpha": 0.6, "second": 0.4, "beta": 2.0, "spread": 0.98},
    ],
    ids=str,
)
def test_loss_and_gradients(head: str, options: dict[str, Any]) -> None:
    net = a_small(head)
    batch, naive, x_adv = given(net, head)
    objective = RAT(**options)
    want = expected(objective, naive, batch, x_adv)  # whose targets are numbers, so constants to the gradient
    outcome = objective(batch)
    check_gradients(net, naive, outcome.loss, want)
    assert torch.equal(outcome.logits, net(x_adv))


@every_head
def test_row_sums_are_those_of_the_whole_network(head: str) -> None:
    net = a_small(head)
    batch = a_batch(net)
    with features_of(net) as seen:
        logits = net(batch.x)
    (full,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, batch.y), net.head.weight)
    found = row_sums(last_layer(net), seen[0], batch.y)
    torch.testing.assert_close(found, full.sum(dim=1), rtol=1e-11, atol=1e-14)
    assert not found.requires_grad
    assert found.abs().max() > 1e-3
    if head == "linear":
        gap = logits.softmax(dim=1) - torch.nn.functional.one_hot(batch.y, CLASSES)
        closed = (gap * seen[0].sum(dim=1, keepdim=True)).mean(dim=0)
        torch.testing.assert_close(found, closed, rtol=1e-11, atol=1e-14)


def test_the_sums_of_the_second_order_target_vanish_at_a_linear_layer() -> None:
    """Why r^2 stands in for Eq. (19): sum_ijk d2CE / dW_li dW_jk = 0 for each l."""
    net = a_small("linear")
    batch = a_batch(net)
    with features_of(net) as seen, torch.no_grad():
        net(batch.x)
    bias = net.head.bias

    def loss(weight: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(torch.nn.functional.linear(seen[0], weight, bias), batch.y)

    hessian = torch.autograd.functional.hessian(loss, net.head.weight.detach())  # type: ignore[no-untyped-call]
    assert isinstance(hessian, Tensor)
    assert hessian.abs().max() > 1e-3
    assert hessian.sum(dim=(1, 2, 3)).abs().max() < 1e-14


@pytest.mark.parametrize(
    "gap", [[1.0, 2.0, 4.0], [-3.0, 0.5, 0.5, 9.0], [2.0, 2.0, 2.0], [0.0, 0.0, 5.0], [1.0, -1.0], [3.0, 3.0]], ids=str
)
def test_targets_are_distributions_even_of_gaps_that_say_nothing(gap: list[float]) -> None:
    found = targets(torch.tensor(gap, dtype=torch.float64), 0.7)
    want = [naive_target(gap, y, 0.7) for y in range(len(gap))]
    torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64))
    torch.testing.assert_close(found.sum(dim=1), torch.ones(len(gap), dtype=torch.float64))


@pytest.mark.parametrize(("classes", "spread"), [(10, 0.8), (100, 0.98)])
def test_more_classes_get_more_of_the_target(classes: int, spread: float) -> None:
    net = a_net("linear", classes).double().eval()
    batch = a_batch(net, 2)
    assert RAT(sigma=0)(batch).loss == RAT(sigma=0, spread=spread)(batch).loss


def test_equal_images_give_finite_losses() -> None:
    net = a_small("he")
    batch = a_batch(net, eps=0.0, ratio=0.0)
    naive = Recomputed(net, "he")
    check_gradients(net, naive, RAT()(batch).loss, expected(RAT(), naive, batch, batch.x))


def test_what_the_released_code_does_otherwise() -> None:
    r, r_adv = torch.tensor([-3.0, 1.0, 2.0]), torch.tensor([1.0, -2.0, 1.0])
    (_, one, minus_one), (second, two, minus_two) = RAT().gaps(r, r_adv)
    assert (one.tolist(), two.tolist(), second) == ([-4, 3, 1], [8, -3, 3], 0.5)
    assert torch.equal(one, -minus_one)
    assert torch.equal(two, -minus_two)
    (_, one, minus_one), (_, two, minus_two) = RAT(released=True).gaps(r, r_adv)
    assert (one.tolist(), two.tolist()) == ([2, -1, 1], [-8, 3, -3])
    assert torch.equal(one, -minus_one)
    assert torch.equal(two, minus_two), "both second targets coincide"


class TestSigma:
    def test_the_adversary_is_made_at_noisy_weights(self) -> None:
        net = a_small("he")
        batch = a_batch(net)
        quiet = TRADES().attack(net, batch.x, batch.y, batch.threat, index=batch.index, key=batch.key)
        noisy = a_small("he")
        for name, weight in noisy.named_parameters():
            if weight.dim() > 1:
                noise = batch.key.fold("weights", name).normal(
                    torch.arange(len(weight)), tuple(weight.shape[1:]), torch.float64
                )
                weight.data += 0.3 * noise
        want = TRADES().attack(noisy, batch.x, batch.y, batch.threat, index=batch.index, key=batch.key)
        found = RAT(sigma=0.3)(batch).x_adv
        assert found is not None
        assert torch.equal(found, want)
        assert not torch.equal(found, quiet)
        assert batch.threat.contains(found, batch.x).all()
        for objective in (RAT(sigma=0), RAT(sigma=0.3, attack=None, order=0)):
            assert torch.equal(objective(batch).x_adv, quiet) == (objective.sigma == 0)  # type: ignore[arg-type]

    def test_the_loss_is_taken_at_the_weights_themselves(self) -> None:
        net = a_small("linear")
        batch = a_batch(net)
        outcome = RAT(sigma=0.3)(batch)
        assert outcome.x_adv is not None
        naive = Recomputed(net, "linear")
        check_gradients(net, naive, outcome.loss, expected(RAT(), naive, batch, outcome.x_adv))

    def test_weights_come_back_to_the_bit_even_after_an_exception(self) -> None:
        net = a_net("he")
        net.backbone.layers[0].weight.data[0, 0] = 1e-30  # type: ignore[union-attr,index]
        before = {name: value.clone() for name, value in net.state_dict().items()}

        def broken() -> None:
            with shaken(net, 0.5, Key(1)):
                moved = {name for name, value in net.state_dict().items() if not torch.equal(value, before[name])}
                assert moved == {"backbone.layers.0.weight", "head.weight"}
                raise RuntimeError("in the middle")

        with pytest.raises(RuntimeError, match="in the middle"):
            broken()
        same(dict(net.state_dict()), before)

    def test_without_an_attack_or_with_base_at_nothing_is_shaken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def never(*_: Any) -> None:
            raise AssertionError("shaken")

        monkeypatch.setattr("steelman.objectives.rat.shaken", never)
        net = a_small("linear")
        RAT(base="at")(a_batch(net))
        RAT()(a_batch(net, eps=0.0, ratio=0.0))
        RAT()(given(net, "linear")[0])
        with pytest.raises(AssertionError, match="shaken"):
            RAT()(a_batch(net))


def test_the_attack_is_the_bases_own_unless_named() -> None:
    net = a_small("he")
    batch = a_batch(net)
    for base, own in (("trades", TRADES().attack), ("at", PGDAT().attack)):
        want = own(net, batch.x, batch.y, batch.threat, index=batch.index, key=batch.key)
        assert torch.equal(RAT(base=base, sigma=0)(batch).x_adv, want)  # type: ignore[arg-type]
        named = RAT(base=base, attack={"name": "pgd", "steps": 4}).attack  # type: ignore[arg-type]
        assert isinstance(named, PGD)
        assert (named.steps, named.keep) == (4, "last")
        assert (named.loss, named.start) == (("kl", "gaussian") if base == "trades" else ("cross-entropy", "uniform"))
    given_one = PGD(steps=3, keep="last", loss="margin")
    assert RAT(attack=given_one).attack is given_one


@pytest.mark.parametrize("base", ["trades", "at"])
def test_two_forwards_in_train_mode_move_batch_norm(base: Any) -> None:
    net = a_net("he").double().train()
    batch = a_batch(net)
    watched = Watched(net)
    outcome = RAT(base=base)(dataclasses.replace(batch, model=watched))  # type: ignore[arg-type]
    assert [training for _, training in watched.seen] == [True, True]
    assert outcome.x_adv is not None
    assert torch.equal(watched.seen[0][0], batch.x)
    assert torch.equal(watched.seen[1][0], outcome.x_adv)
    assert int(net.backbone.layers[1].num_batches_tracked) == 2  # type: ignore[union-attr,index]
    assert RAT.forwards == ("clean", "adversarial")


def test_models_it_cannot_work_on() -> None:
    convolution = nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()).double()
    with pytest.raises(UserError, match="linear layer"):
        RAT()(a_batch(convolution))
    narrow = nn.Sequential(
        nn.Flatten(), nn.Linear(16, 5), nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 1, (1, 3)), nn.Flatten()
    )
    with pytest.raises(UserError, match="give its 3 logits, got one with 5 outputs"):
        RAT()(a_batch(narrow.double()))
    [(key, reason)] = objections(RAT(), compiled=True, awp=True, auxiliary_norm=True)
    assert key == "compute.compile"
    assert "reads features" in reason


@pytest.mark.parametrize("wrong", [{"alpha": 1.5}, {"order": 3}, {"sigma": -1}, {"spread": 2}, {"base": "mart"}])
def test_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        RAT(**wrong)


def test_plain_models_and_l2() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    outcome = RAT()(a_batch(net, threat=ThreatModel(norm="l2", eps=0.5)))
    assert torch.isfinite(outcome.loss)


@pytest.mark.parametrize("head", sorted(HEADS))
def test_half_precision(head: str) -> None:
    net = a_net(head, dropout=0.0).train()
    batch = a_batch(net)
    batch = dataclasses.replace(batch, x=batch.x.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = RAT(sigma=0)(batch)
    batch = dataclasses.replace(batch, x_adv=rough.x_adv)
    torch.testing.assert_close(rough.loss.float(), RAT(sigma=0)(batch).loss, rtol=0.05, atol=0.05)


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    objective = RAT(sigma=0.05, attack=PGD(steps=2, keep="last", loss="kl", start="gaussian"))
    a_trainer(tmp_path / "whole", objective=objective).fit()
    trainer = a_trainer(tmp_path / "parts", objective=objective)
    with interrupted_at({8}, trainer), pytest.raises(TrainingInterruptedError):
        trainer.fit()
    a_trainer(tmp_path / "parts", objective=objective).fit(resume=True)
    same_run(tmp_path / "whole", tmp_path / "parts")


def test_weight_perturbation_trains_on_the_same_images(tmp_path: Path) -> None:
    seen: list[tuple[Tensor | None, Tensor]] = []

    class Watching:
        def __call__(self, batch: Batch) -> Any:
            outcome = RAT()(batch)
            assert outcome.x_adv is not None
            seen.append((batch.x_adv, outcome.x_adv))
            return outcome

    a_trainer(tmp_path, objective=Watching(), around=Around(awp=AWP(gamma=0.01)), training={"epochs": 1}).fit()
    assert len(seen) == 12
    for (none, made), (passed, used) in zip(seen[::2], seen[1::2]):
        assert none is None
        assert passed is made
        assert used is made
    assert all(torch.isfinite(value).all() for value in newest(tmp_path)["model"].values())
