"""Feature scatter, GAT and HAT: losses, attacks and what they carry, against float64 recomputations."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

from steelman.errors import TrainingInterruptedError, UserError
from steelman.models.batchnorm import AuxiliaryNorm, split_norms
from steelman.objectives import Batch
from steelman.objectives.feature_scatter import FeatureScatter, distances, transport
from steelman.objectives.gat import GAT, signs
from steelman.objectives.hat import HAT
from steelman.objectives.trades import TRADES
from steelman.schedules import MultiStep
from steelman.threat import ThreatModel
from steelman.training import AWP, Around, Compute
from tests.test_methods import Recomputed, every_head, given, mean_kl
from tests.test_objectives import CLASSES, HEAD_OPTIONS, Watched, a_small, check_gradients
from tests.training_helpers import Helper, a_batch, a_net, a_trainer, interrupted_at, newest, same_run

ALL = [FeatureScatter(), GAT(), HAT()]
every_objective = pytest.mark.parametrize("objective", ALL, ids=lambda objective: type(objective).__name__)
every_norm = pytest.mark.parametrize("norm", ["linf", "l2", "l1"])


def zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def randoms(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def textbook(cost: Tensor, regularisation: float, iterations: int) -> list[list[float]]:
    """T = diag(a) K diag(b), a and b in turn such that rows and columns have equal mass."""
    rows, columns = cost.shape
    kernel = [[math.exp(-float(cost[i, j]) / regularisation) for j in range(columns)] for i in range(rows)]
    a, b = [1.0] * rows, [1.0] * columns
    for _ in range(iterations):
        a = [1 / rows / sum(kernel[i][j] * b[j] for j in range(columns)) for i in range(rows)]
        b = [1 / columns / sum(kernel[i][j] * a[i] for i in range(rows)) for j in range(columns)]
    return [[a[i] * kernel[i][j] * b[j] for j in range(columns)] for i in range(rows)]


def costs(clean: Tensor, moved: Tensor) -> list[list[Tensor]]:
    """1 - cos of every pair of rows."""
    return [[1 - (a * b).sum() / ((a * a).sum() * (b * b).sum()).sqrt() for b in moved] for a in clean]


def apart(clean: Tensor, moved: Tensor, regularisation: float = 0.01, iterations: int = 100) -> Tensor:
    """The transport distance of two sets of logits, with the plan as a constant."""
    cost = costs(clean, moved)
    plan = textbook(torch.tensor([[float(c.detach()) for c in row] for row in cost]), regularisation, iterations)
    return sum((t * c for ts, cs in zip(plan, cost) for t, c in zip(ts, cs)), zero())


class TestTransport:
    def test_textbook_iterations(self) -> None:
        cost = 2 * randoms(5, 7)
        plan = transport(cost, 0.1, 13)
        torch.testing.assert_close(plan, torch.tensor(textbook(cost, 0.1, 13), dtype=torch.float64), rtol=1e-10, atol=0)
        assert not torch.allclose(plan, transport(cost, 0.1, 12), rtol=1e-6, atol=0), "the rounds matter here"

    @pytest.mark.parametrize("seed", [1, 2, 3])
    def test_a_small_regularisation_solves_the_linear_program(self, seed: int) -> None:
        n = 6
        cost = 2 * randoms(n, n, seed=seed)
        sums = np.zeros((2 * n, n * n))
        for i in range(n):
            sums[i, i * n : (i + 1) * n] = 1
            sums[n + i, i::n] = 1
        best = linprog(cost.flatten().numpy(), A_eq=sums, b_eq=np.full(2 * n, 1 / n), bounds=(0, None))
        plan = transport(cost, 0.005, 1000)
        torch.testing.assert_close(plan.sum(dim=1), torch.full((n,), 1 / n, dtype=torch.float64), rtol=5e-3, atol=0)
        assert float((plan * cost).sum()) == pytest.approx(best.fun, abs=1e-3)
        torch.testing.assert_close(plan.flatten(), torch.tensor(best.x), rtol=0, atol=0.01)

    @pytest.mark.parametrize("regularisation", [0.01, 1e-4])
    def test_marginals_in_single_precision_at_the_extremes_of_the_cost(self, regularisation: float) -> None:
        """exp(-2 / 1e-4) is 0 in any precision; on logarithms it does no harm."""
        cost = torch.full((64, 64), 2.0)
        cost[torch.arange(64), torch.arange(64).flip(0)] = 0.0
        cost = cost + 1e-3 * randoms(64, 64).float()
        plan = transport(cost, regularisation, 100)
        for side in (0, 1):
            torch.testing.assert_close(plan.sum(dim=side), torch.full((64,), 1 / 64), rtol=1e-3, atol=0)
        assert plan.dtype == torch.float32

    def test_the_plan_is_the_gradient_of_the_regularised_distance(self) -> None:
        """The envelope theorem, which lets the attack treat the plan as a constant."""
        cost, regularisation, h = randoms(3, 3), 0.1, 1e-5

        def value(cost: Tensor) -> float:
            plan = transport(cost, regularisation, 500)
            return float((plan * cost).sum() + regularisation * (plan * plan.log()).sum())

        plan = transport(cost, regularisation, 500)
        for i in range(3):
            for j in range(3):
                step = torch.zeros_like(cost)
                step[i, j] = h
                assert (value(cost + step) - value(cost - step)) / (2 * h) == pytest.approx(float(plan[i, j]), abs=1e-8)

    def test_distances_and_their_gradient(self) -> None:
        clean, moved = randoms(5, 3) - 0.5, (randoms(5, 3, seed=1) - 0.5).requires_grad_()
        ours, naive = distances(clean, moved, 0.05, 40).mean(), apart(clean, moved, 0.05, 40)
        torch.testing.assert_close(ours, naive)
        torch.testing.assert_close(*(torch.autograd.grad(value, moved)[0] for value in (ours, naive)))

    def test_mixed_precision_does_not_round_the_costs(self) -> None:
        clean, moved = randoms(8, 10).float(), randoms(8, 10, seed=1).float()
        exact = distances(clean, moved, 0.01, 100)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(distances(clean, moved, 0.01, 100), exact)


class TestFeatureScatter:
    @pytest.mark.parametrize("smoothing", [0.0, 0.2])
    @every_head
    def test_loss(self, head: str, smoothing: float) -> None:
        """The other smoothing spreads these labels once more."""
        net = a_small(head)
        batch, naive, x_adv = given(net, head)
        lowered = HEAD_OPTIONS[head].get("scale", 1.0) * HEAD_OPTIONS[head].get("margin", 0.0)
        expected = zero()
        for logits, y in zip(naive.rows(x_adv), batch.y.tolist()):
            z = torch.stack([logits[k] - lowered * (k == y) for k in range(CLASSES)])
            for k in range(CLASSES):
                label = (0.7 if k == y else 0.15) * (1 - smoothing) + smoothing / CLASSES
                expected = expected - label * (z[k] - z.exp().sum().log()) / len(batch.y)
        outcome = FeatureScatter(delta=0.3)(dataclasses.replace(batch, smoothing=smoothing))
        torch.testing.assert_close(outcome.logits, naive.rows(x_adv).detach())
        check_gradients(net, naive, outcome.loss, expected)

    @pytest.mark.parametrize(("steps", "step"), [(1, 1.0), (3, 0.4)])
    @every_head
    def test_attack(self, head: str, steps: int, step: float) -> None:
        net = a_small(head)
        batch, naive = a_batch(net), Recomputed(net, head)
        eps = batch.threat.eps
        noise = batch.key.uniform(batch.index, tuple(batch.x.shape[1:]), torch.float64)
        x_adv = start = batch.x + eps * (2 * noise - 1)
        assert start.min() < 0 or start.max() > 1, "the start ignores the box"
        clean = naive.rows(batch.x).detach()
        for _ in range(steps):
            x_adv = x_adv.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(apart(clean, naive.rows(x_adv)), x_adv)
            moved = x_adv.detach() + step * eps * gradient.sign()
            x_adv = torch.max(torch.min(moved, batch.x + eps), batch.x - eps).clamp(0, 1)
        outcome = FeatureScatter(steps=steps, step=step)(batch)
        assert outcome.x_adv is not None
        torch.testing.assert_close(outcome.x_adv, x_adv, rtol=0, atol=1e-9)
        assert apart(clean, naive.rows(outcome.x_adv)) > 3 * apart(clean, naive.rows(start)), "further by far"

    def test_it_uses_no_labels(self) -> None:
        net = a_small("he")
        batch = a_batch(net)
        other = dataclasses.replace(batch, y=(batch.y + 1) % 3)
        assert torch.equal(FeatureScatter().scattered(batch), FeatureScatter().scattered(other))

    def test_a_label_that_says_nothing_is_refused(self) -> None:
        net = a_net(classes=2).double()
        batch = dataclasses.replace(a_batch(net), y=torch.arange(6) % 2)
        with pytest.raises(UserError, match=r"below 0\.5, .* 2 classes .*; got 0\.5"):
            FeatureScatter()(batch)
        assert torch.isfinite(FeatureScatter(delta=0.4)(batch).loss)

    @pytest.mark.parametrize(
        "wrong", [{"delta": 1}, {"delta": -0.1}, {"steps": 0}, {"step": 0}, {"regularisation": 0}, {"iterations": 0}]
    )
    def test_settings_out_of_range(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            FeatureScatter(**wrong)


def guided(naive: Recomputed, batch: Batch, weight: float, step: float = 1.0, start: float = 0.5) -> Tensor:
    """GAT's adversary in linf."""
    eps = batch.threat.eps
    up = batch.key.fold("signs").uniform(batch.index, tuple(batch.x.shape[1:]), torch.float64) < 0.5
    x_adv = torch.where(up, batch.x + start * eps, batch.x - start * eps).clamp(0, 1).requires_grad_()
    p = naive.p(batch.x).detach()
    loss = naive.loss(x_adv, batch.y, margin=False) + weight * ((p - naive.p(x_adv)) ** 2).sum() / len(p)
    (gradient,) = torch.autograd.grad(loss, x_adv)
    moved = x_adv.detach() + step * eps * gradient.sign()
    return torch.max(torch.min(moved, batch.x + eps), batch.x - eps).clamp(0, 1)


class TestGAT:
    @every_head
    def test_loss(self, head: str) -> None:
        net = a_small(head)
        batch, naive, x_adv = given(net, head)
        pair = ((naive.p(batch.x) - naive.p(x_adv)) ** 2).sum() / len(batch.y)
        expected = naive.loss(batch.x, batch.y, margin=True) + 7 * pair
        check_gradients(net, naive, GAT(weight=7)(batch).loss, expected)

    @every_head
    def test_loss_of_trades(self, head: str) -> None:
        net = a_small(head)
        batch, naive, x_adv = given(net, head)
        expected = naive.loss(batch.x, batch.y, margin=True) + 2.5 * mean_kl(naive.p(batch.x), naive.p(x_adv))
        check_gradients(net, naive, GAT(distance="kl", beta=2.5)(batch).loss, expected)

    def test_the_weight_follows_the_progress_in_loss_and_attack(self) -> None:
        objective = GAT(weight=MultiStep(start=10, drops=(0.85,), factor=4))
        net = a_small("he")
        naive = Recomputed(net, "he")
        for progress, weight in ((0.84, 10), (0.85, 40)):
            batch = a_batch(net, eps=0.3, progress=progress, carry={"turn": torch.tensor(1)})
            x_adv = guided(naive, batch, weight)
            outcome = objective(batch)
            assert outcome.x_adv is not None
            torch.testing.assert_close(outcome.x_adv, x_adv, rtol=0, atol=1e-9)
            pair = ((naive.p(batch.x) - naive.p(x_adv)) ** 2).sum() / len(batch.y)
            torch.testing.assert_close(outcome.loss, naive.loss(batch.x, batch.y, margin=True) + weight * pair)
        assert not torch.equal(guided(naive, batch, 10), guided(naive, batch, 40)), "the attack's share is to be seen"

    @pytest.mark.parametrize("distance", ["squared", "kl"])
    @pytest.mark.parametrize("turn", [0, 1])
    @every_head
    def test_attack(self, head: str, turn: int, distance: Any) -> None:
        net = a_small(head)
        batch, naive = a_batch(net, carry={"turn": torch.tensor(turn)}), Recomputed(net, head)
        outcome = GAT(distance=distance, step=0.7, start=0.8)(batch)
        assert outcome.x_adv is not None
        torch.testing.assert_close(outcome.x_adv, guided(naive, batch, 10 * turn, 0.7, 0.8), rtol=0, atol=1e-9)

    def test_the_start_is_half_the_radius_in_every_pixel(self) -> None:
        net = a_small("linear")
        batch = a_batch(net, n=200)
        batch = dataclasses.replace(batch, x=0.3 + 0.4 * batch.x)  # where the box cuts nothing
        seen: list[Tensor] = []
        handle = net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
        GAT()(batch)
        handle.remove()
        clean, start, *training = seen
        assert torch.equal(clean, batch.x)
        assert len(training) == 2
        torch.testing.assert_close((start - batch.x).abs(), torch.full_like(start, 0.05), rtol=0, atol=1e-15)
        share = float((start > batch.x).double().mean())
        assert share == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(start.numel()))
        alone = dataclasses.replace(batch, x=batch.x[3:4], index=batch.index[3:4])
        assert torch.equal(signs(alone)[0], signs(batch)[3]), "a sample's signs are its own"

    @every_norm
    def test_signs_have_the_radius_for_their_length(self, norm: Any) -> None:
        batch = a_batch(a_small("linear"), threat=ThreatModel(norm=norm, eps=0.6))
        lengths = torch.linalg.vector_norm(signs(batch).flatten(1), ord=batch.threat.p, dim=1)
        torch.testing.assert_close(lengths, torch.full_like(lengths, 0.6))

    def test_turns_alternate_and_only_after_the_backward(self) -> None:
        net = a_small("he")
        batch, naive = a_batch(net, eps=0.3), Recomputed(net, "he")
        both = guided(naive, batch, 0), guided(naive, batch, 10)
        assert not torch.equal(*both), "the turns are to be told apart"
        for turn in (0, 1, 0, 1):
            before = dict(batch.carry)
            GAT()(batch)
            outcome = GAT()(batch)
            assert batch.carry == before, "a loss taken twice, as weight perturbation does, is one batch"
            assert outcome.x_adv is not None
            torch.testing.assert_close(outcome.x_adv, both[turn], rtol=0, atol=1e-9)
            assert outcome.after is not None
            outcome.after()
            assert all(isinstance(value, Tensor) for value in batch.carry.values())

    @pytest.mark.parametrize("around", [Around(), Around(awp=AWP(gamma=0.01))], ids=["plain", "awp"])
    def test_an_interrupted_run_ends_with_the_same_bits(self, around: Around, tmp_path: Path) -> None:
        changes: dict[str, Any] = {"objective": GAT(), "around": around}
        a_trainer(tmp_path / "whole", **changes).fit()
        for place, step in enumerate((2, 6, 12)):
            trainer = a_trainer(tmp_path / "parts", **changes)
            with interrupted_at({step}, trainer), pytest.raises(TrainingInterruptedError):
                trainer.fit(resume=place > 0)
            assert newest(tmp_path / "parts")["carry"]["turn"].tolist() == [1], "the odd turn is the one to remember"
        a_trainer(tmp_path / "parts", **changes).fit(resume=True)
        same_run(tmp_path / "whole", tmp_path / "parts")

    @pytest.mark.parametrize(
        "wrong",
        [
            {"weight": -1},
            {"weight": {"name": "linear", "start": 1, "end": -1}},
            {"weight": {"name": "piecewise", "points": [[0, 1], [0.5, -1], [1, 1]]}},
            {"step": 0},
            {"start": 1.5},
            {"beta": -1},
            {"distance": "l1"},
        ],
    )
    def test_settings_out_of_range(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            GAT(**wrong)


class Recording(nn.Module):
    """A helper with weights of its own that keeps what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randoms(3, 16, seed=8) - 0.5)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        return x.flatten(1) @ self.weight.T


class TestHAT:
    @every_head
    def test_loss(self, head: str) -> None:
        net = a_small(head)
        batch, naive, x_adv = given(net, head)
        labels = []
        for one in x_adv:
            values = [sum((k + 1) * math.sin((k + 1) * float(pixel)) for pixel in one.flatten()) for k in range(3)]
            labels.append(values.index(max(values)))
        assert labels != batch.y.tolist(), "the helper's labels are to be told from the true ones"
        expected = naive.loss(batch.x, batch.y, margin=True) + 1.5 * mean_kl(naive.p(batch.x), naive.p(x_adv))
        beyond = batch.x + 2 * (x_adv - batch.x)
        expected = expected + 0.3 * naive.loss(beyond, torch.tensor(labels), margin=True)
        check_gradients(net, naive, HAT(beta=1.5, gamma=0.3)(batch).loss, expected)

    def test_the_label_comes_from_the_adversarial_image_and_the_example_is_twice_as_far(self) -> None:
        net, helper = a_net("he").double().train(), Recording()
        batch = a_batch(net, helper=helper)
        watched = Watched(net)
        outcome = HAT()(dataclasses.replace(batch, model=watched))  # type: ignore[arg-type]
        assert outcome.x_adv is not None
        (asked,) = helper.seen
        assert torch.equal(asked, outcome.x_adv)
        clean, adversarial, beyond = (x for x, _ in watched.seen)
        assert torch.equal(clean, batch.x)
        assert torch.equal(adversarial, outcome.x_adv)
        torch.testing.assert_close(beyond - batch.x, 2 * (outcome.x_adv - batch.x))
        assert beyond.min() < 0 or beyond.max() > 1, "the box does not cut it"
        torch.autograd.backward(outcome.loss)
        assert helper.weight.grad is None

    def test_the_attack_is_that_of_trades(self) -> None:
        net = a_small("he")
        ours, theirs = HAT()(a_batch(net)).x_adv, TRADES()(a_batch(net)).x_adv
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)
        named: Any = {"name": "pgd", "steps": 4}
        assert HAT(attack=named).attack == TRADES(attack=named).attack

    def test_without_a_helper(self) -> None:
        net = a_small("linear")
        with pytest.raises(UserError, match=r"expected a model from standard training .*objective\.helper.* got none"):
            HAT()(a_batch(net, helper=None))

    def test_the_helper_is_a_folder(self) -> None:
        assert HAT().helper is None
        folder: Any = "runs/standard"
        assert HAT(helper=folder).helper == Path("runs/standard")


@every_objective
def test_batch_norm_moves_once_for_each_forward_in_train_mode(objective: Any) -> None:
    net = a_net("he").double().train()
    batch, rng = a_batch(net), torch.get_rng_state()
    layer = net.backbone.layers[1]  # type: ignore[index]
    modes: list[bool] = []
    handle = layer.register_forward_hook(lambda module, *_: modes.append(module.training))  # type: ignore[union-attr]
    objective(batch)
    handle.remove()
    forwards = len(objective.forwards)
    assert int(layer.num_batches_tracked) == forwards  # type: ignore[union-attr]
    assert modes == [False] * (len(modes) - forwards) + [True] * forwards, "the attack runs in eval mode"
    assert len(modes) > forwards
    assert not torch.equal(rng, torch.get_rng_state()), "dropout of the training forwards draws"
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())


@every_objective
def test_the_auxiliary_batch_norm_sees_all_that_is_adversarial(objective: Any) -> None:
    net = a_net("he", dropout=0.0).double().train()
    split_norms(net)
    (norm,) = (module for module in net.modules() if isinstance(module, AuxiliaryNorm))
    seen: list[str] = []
    norm.clean.register_forward_hook(lambda *_: seen.append("clean"))
    norm.adversarial.register_forward_hook(lambda *_: seen.append("adversarial"))
    objective(a_batch(net))
    forwards = list(objective.forwards)
    attack, training = seen[: -len(forwards)], seen[-len(forwards) :]
    assert training == forwards
    assert set(attack) == {"adversarial"}
    assert norm.branch == "clean"


@every_objective
def test_images_given_are_used_and_nothing_is_attacked(objective: Any) -> None:
    """The second pass of weight perturbation; and no second turn of GAT."""
    net = a_small("linear")
    batch, _, x_adv = given(net, "linear")
    watched = Watched(net)
    bare: list[int] = []
    net.register_forward_hook(lambda *_: bare.append(1))
    outcome = objective(dataclasses.replace(batch, model=watched))  # type: ignore[arg-type]
    assert outcome.x_adv is x_adv
    assert len(bare) == len(watched.seen) == len(objective.forwards)


@every_objective
def test_a_radius_of_zero_leaves_the_images_as_they_are(objective: Any) -> None:
    net = a_small("he")
    batch = a_batch(net, eps=0.0, ratio=0.0)
    outcome = objective(batch)
    assert torch.equal(outcome.x_adv, batch.x)
    assert torch.isfinite(outcome.loss)


@every_objective
@every_norm
def test_images_stay_in_every_threat_and_do_not_stay_where_they_were(objective: Any, norm: Any) -> None:
    net = a_net("he").double().train()
    batch = a_batch(net, threat=ThreatModel(norm=norm, eps=0.4))
    twin = copy.deepcopy(net)  # before batch norm moves
    first, second = objective(batch).x_adv, objective(dataclasses.replace(batch, model=twin, net=twin)).x_adv
    assert torch.equal(first, second)
    assert batch.threat.contains(first, batch.x).all()
    moved = torch.linalg.vector_norm((first - batch.x).flatten(1), ord=batch.threat.p, dim=1)
    assert (moved > 0.2).all(), "one step of the radius goes far"
    assert not first.requires_grad


@every_objective
@pytest.mark.parametrize(
    "changes",
    [
        {"compute": Compute(accelerator="cpu", precision="bf16-mixed")},
        {"around": Around(awp=AWP(), label_smoothing=0.1)},
    ],
    ids=["mixed", "around"],
)
def test_it_trains(objective: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    trained = a_trainer(tmp_path, objective=objective, helper=Helper(), training={"epochs": 2}, **changes).fit()
    assert trained.stopped is None
    assert all(math.isfinite(epoch["loss"]) for epoch in trained.history)


def test_each_is_made_without_arguments() -> None:
    makes: list[Callable[[], Any]] = [FeatureScatter, GAT, HAT]
    assert [make() for make in makes] == ALL
