"""TLA against a float64 recomputation with plain loops; its pool from batch to batch, and over a resume."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import PGD
from steelman.errors import TrainingInterruptedError, UserError
from steelman.models.batchnorm import AuxiliaryNorm, split_norms
from steelman.objectives.base import Batch, objections
from steelman.objectives.tla import TLA, Pool
from steelman.rng import Key
from steelman.training import AWP, Around
from tests.test_methods import Recomputed, every_head
from tests.test_objectives import FEATURES, Watched, a_small, check_gradients
from tests.training_helpers import a_batch, a_net, a_trainer, interrupted_at, newest, same_run

ZERO = torch.zeros((), dtype=torch.float64)


class Triplets(Recomputed):
    """Features of the same network, and the loss of chosen triplets, image by image."""

    def z(self, x: Tensor) -> list[Tensor]:
        w1, b1 = self.values["backbone.one.weight"], self.values["backbone.one.bias"]
        pixels = [(value - 0.5) / 0.25 for value in x.flatten()]
        return [torch.tanh(sum((w * p for w, p in zip(w1[j], pixels)), ZERO) + b1[j]) for j in range(FEATURES)]

    def d(self, a: list[Tensor], b: list[Tensor], distance: str) -> Tensor:
        if distance == "euclidean":
            return sum(((v - w) ** 2 for v, w in zip(a, b)), ZERO).sqrt()
        dot = sum((v * w for v, w in zip(a, b)), ZERO)
        cos = dot / (sum((v * v for v in a), ZERO).sqrt() * sum((v * v for v in b), ZERO).sqrt())
        return 1 - (cos.abs() if distance == "absolute" else cos)

    def nearest(self, x: Tensor, y: int, pool: list[tuple[Tensor, int, int]], by: str) -> int:
        a, best, place = self.z(x), float("inf"), -1
        for i, (other, label, _) in enumerate(pool):
            distance = float(self.d(a, self.z(other), by).detach())
            if label != y and distance < best:
                best, place = distance, i
        return place


def another(batch: Batch, row: int, pool: list[tuple[Tensor, int, int]]) -> int:
    """One of the images of the row's class with another index, by the counter-based draw; itself if there is none."""
    own = int(batch.index[row])
    found = [i for i, (_, label, index) in enumerate(pool) if label == int(batch.y[row]) and index != own]
    draw = float(batch.key.fold("positive").uniform(torch.tensor([own]), (1,))[0, 0])
    return found[int(draw * len(found))] if found else row


def images(x: Tensor, y: Tensor, index: Tensor) -> list[tuple[Tensor, int, int]]:
    return list(zip(x, y.tolist(), index.tolist()))


def remembered(seed: int, n: int, classes: int = 3) -> dict[str, Tensor]:
    """A pool from batches before; its indices overlap with those of the batch, as in a later epoch."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, 4, 4, generator=g, dtype=torch.float64)
    return {"pool_x": x, "pool_y": torch.arange(n) % classes, "pool_index": 7 + 3 * torch.arange(n)}


def a_case(net: nn.Module, carry: dict[str, Tensor], **changes: Any) -> tuple[Batch, Tensor]:
    batch = a_batch(net, carry=carry, **changes)
    x_adv = (batch.x + 0.1 * torch.sin(37 * batch.x)).clamp(0, 1)
    return dataclasses.replace(batch, x_adv=x_adv), x_adv


@every_head
@pytest.mark.parametrize("positive", ["class", "own", "both"])
@pytest.mark.parametrize("distance", ["cosine", "absolute", "euclidean"])
@pytest.mark.parametrize("past", [0, 4])
def test_loss_and_gradients(head: str, positive: Any, distance: Any, past: int) -> None:
    net = a_small(head)
    batch, x_adv = a_case(net, remembered(1, past) if past else {}, n=5)
    alpha = 2.0 if distance == "euclidean" else 0.3
    objective = TLA(alpha=alpha, weight=1.5, norm_weight=0.2, positive=positive, distance=distance)
    naive = Triplets(net, head)
    pool = images(batch.x, batch.y, batch.index)
    if past:
        pool += images(*(batch.carry[f"pool_{name}"] for name in ("x", "y", "index")))
    expected = naive.loss(x_adv, batch.y, margin=True)
    hinges = []
    for row, one in enumerate(x_adv):
        a = naive.z(one)
        n = naive.z(pool[naive.nearest(one, int(batch.y[row]), pool, distance)][0])
        places = {"class": [another(batch, row, pool)], "own": [row], "both": [another(batch, row, pool), row]}[
            positive
        ]
        for place in places:
            p = naive.z(pool[place][0])
            hinge = naive.d(a, p, distance) - naive.d(a, n, distance) + alpha
            hinges.append(float(hinge.detach()))
            squares = sum((v * v for v in (*a, *p, *n)), ZERO) / FEATURES
            term = (hinge if hinge > 0 else ZERO) + 0.2 * squares
            expected = expected + 1.5 * term / len(places) / len(x_adv)
    assert max(hinges) > 0, "otherwise the hinge would not be tried"
    outcome = objective(batch)
    check_gradients(net, naive, outcome.loss, expected)
    assert torch.equal(outcome.logits, net(x_adv))
    assert outcome.x_adv is x_adv


def test_the_negative_is_the_most_similar_of_another_class_in_the_whole_pool() -> None:
    """One network, many images: some negatives come from the batch and some from the memory."""
    net = a_small("linear")
    batch, x_adv = a_case(net, remembered(2, 9), n=6)
    naive, pool = Triplets(net, "linear"), Pool.of(batch)
    want = [naive.nearest(x, int(y), images(pool.x, pool.y, pool.index), "cosine") for x, y in zip(x_adv, batch.y)]
    found = pool.most_similar(batch, x_adv, "cosine").tolist()
    assert found == want
    assert min(found) < 6 <= max(found)


def test_an_image_is_never_its_own_positive() -> None:
    """Neither from the batch nor, from an epoch before, out of the memory; any other image of the class may come."""
    net = a_small("linear")
    batch, _ = a_case(net, remembered(3, 12), n=6)
    pool, drawn = Pool.of(batch), set()
    for step in range(60):
        chosen = pool.same_class(batch, Key(step))
        assert torch.equal(pool.y[chosen], batch.y)
        assert (pool.index[chosen] != batch.index).all()
        drawn.add(int(chosen[0]))
    # Class 0 in a pool of 6 + 12: rows 0 3 | 6 9 12 15, of which 0 and 6 are the first image itself.
    assert drawn == {3, 9, 12, 15}


def test_without_another_image_of_the_class_the_positive_is_the_clean_image() -> None:
    net = a_small("linear")
    batch, _ = a_case(net, {}, n=3)
    assert torch.equal(Pool.of(batch).same_class(batch, batch.key), torch.arange(3))
    assert TLA()(batch).loss == TLA(positive="own")(batch).loss
    batch, _ = a_case(net, {}, n=6)
    assert TLA()(batch).loss != TLA(positive="own")(batch).loss


def test_the_choice_of_a_positive_depends_on_key_and_index_alone() -> None:
    net = a_small("linear")
    batch, _ = a_case(net, remembered(3, 12), n=6)
    chosen = Pool.of(batch).same_class(batch, batch.key)
    torch.manual_seed(1)
    assert torch.equal(Pool.of(batch).same_class(batch, batch.key), chosen)


def test_the_pool_changes_after_the_step_alone_and_keeps_the_newest() -> None:
    net = a_small("linear")
    carry: dict[str, Tensor] = {}
    history: list[int] = []
    full = a_batch(net)
    for step, (n, rows) in enumerate([(6, 6), (6, 12), (6, 18), (6, 18), (2, 18), (6, 18)]):
        x = (full.x[:n] + 0.01 * step) % 1
        batch = dataclasses.replace(full, x=x, y=full.y[:n], index=100 * step + torch.arange(n), carry=carry)
        before = {name: (value, value.clone()) for name, value in carry.items()}
        for _ in range(2):
            outcome = TLA(pool=4)(batch)
        assert carry.keys() == before.keys()
        for name, (value, copy) in before.items():
            assert carry[name] is value
            assert torch.equal(value, copy)
        assert outcome.after is not None
        outcome.after()
        history = [*batch.index.tolist(), *history]
        assert carry["pool_index"].tolist() == history[:rows]
        assert torch.equal(carry["pool_x"][:n], x)
        assert torch.equal(carry["pool_y"][:n], batch.y)
        assert len(carry["pool_x"]) == len(carry["pool_y"]) == rows


def test_a_pool_of_one_batch_remembers_nothing() -> None:
    net = a_small("linear")
    batch, _ = a_case(net, {})
    outcome = TLA(pool=1)(batch)
    assert outcome.after is not None
    outcome.after()
    assert all(len(value) == 0 for value in batch.carry.values())
    assert TLA(pool=1)(batch).loss == outcome.loss


def test_mining_is_in_eval_mode_and_leaves_no_trace() -> None:
    net = a_net("he").double().train()
    batch, x_adv = a_case(net, remembered(4, 9))
    modes: list[tuple[bool, bool, int]] = []
    net.backbone.register_forward_pre_hook(
        lambda module, inputs: modes.append((module.training, torch.is_grad_enabled(), len(inputs[0])))
    )
    state, generator = {name: value.clone() for name, value in net.state_dict().items()}, torch.get_rng_state()
    Pool.of(batch).most_similar(batch, x_adv, "cosine")
    assert modes == [(False, False, 6), (False, False, 6), (False, False, 6), (False, False, 3)]
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert net.training


@pytest.mark.parametrize(("positive", "rows"), [("class", 12), ("own", 12), ("both", 18)])
def test_two_forwards_in_train_mode_move_batch_norm(positive: Any, rows: int) -> None:
    net = a_net("he").double().train()
    watched = Watched(net)
    outcome = TLA(positive=positive)(dataclasses.replace(a_batch(net), model=watched))  # type: ignore[arg-type]
    assert outcome.x_adv is not None
    assert [(len(x), training) for x, training in watched.seen] == [(6, True), (rows, True)]
    assert torch.equal(watched.seen[0][0], outcome.x_adv)
    assert int(net.backbone.layers[1].num_batches_tracked) == 2  # type: ignore[union-attr,index]


def test_each_forward_goes_through_its_own_batch_norm() -> None:
    net = split_norms(a_net("he").double()).train()
    norm = next(module for module in net.modules() if isinstance(module, AuxiliaryNorm))
    taken: list[tuple[str, bool]] = []
    norm.register_forward_pre_hook(lambda module, _: taken.append((module.branch, module.training)))
    TLA(attack=PGD(steps=1, keep="last"))(a_batch(net))
    assert taken[-4:] == [("adversarial", False), ("clean", False), ("adversarial", True), ("clean", True)]
    assert tuple(branch for branch, _ in taken[-2:]) == TLA.forwards


def test_one_class_has_no_negatives() -> None:
    net = a_small("linear")
    batch, _ = a_case(net, {}, y=torch.ones(6, dtype=torch.long))
    with pytest.raises(
        UserError, match="at least two classes among the 6 images of the batch and of the pool, got one"
    ):
        TLA()(batch)
    carry = remembered(1, 3)
    assert torch.isfinite(TLA()(dataclasses.replace(batch, carry=carry)).loss), "the memory has other classes"


def test_models_it_cannot_work_on() -> None:
    convolution = nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()).double()
    with pytest.raises(UserError, match="linear layer"):
        TLA()(a_batch(convolution))
    [(key, reason)] = objections(TLA(), compiled=True, awp=True, auxiliary_norm=True)
    assert key == "compute.compile"
    assert "reads features" in reason


@pytest.mark.parametrize(
    "wrong", [{"alpha": -1}, {"pool": 0}, {"weight": -1}, {"distance": "l2"}, {"positive": "none"}, {"norm_weight": -1}]
)
def test_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TLA(**wrong)


def test_the_attack_is_seven_steps_on_the_cross_entropy() -> None:
    attack = TLA(attack={"name": "pgd"}).attack  # type: ignore[arg-type]
    assert isinstance(attack, PGD)
    assert attack.keep == "last"
    assert TLA().attack == PGD(steps=7, keep="last", loss="cross-entropy", start="uniform")


def test_half_precision() -> None:
    net = a_net("he", dropout=0.0).train()
    batch, x_adv = a_case(net, {})
    batch = dataclasses.replace(batch, x=batch.x.float(), x_adv=x_adv.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = TLA(positive="own", norm_weight=1)(batch).loss
    torch.testing.assert_close(rough.float(), TLA(positive="own", norm_weight=1)(batch).loss, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("around", [Around(), Around(awp=AWP(gamma=0.01, start=0.3))], ids=["plain", "awp"])
@pytest.mark.parametrize("pool", [1, 3])
def test_an_interrupted_run_ends_with_the_same_bits(around: Around, pool: int, tmp_path: Path) -> None:
    objective = TLA(pool=pool, positive="both", attack=PGD(steps=2, keep="last"))
    a_trainer(tmp_path / "whole", objective=objective, around=around).fit()
    trainer = a_trainer(tmp_path / "parts", objective=objective, around=around)
    with interrupted_at({8}, trainer), pytest.raises(TrainingInterruptedError):
        trainer.fit()
    a_trainer(tmp_path / "parts", objective=objective, around=around).fit(resume=True)
    same_run(tmp_path / "whole", tmp_path / "parts")
    # Five batches of 8 and one of 2 an epoch: the short one leaves the pool full.
    assert newest(tmp_path / "whole")["carry"]["pool_x"].shape == (1, 8 * (pool - 1), 1, 4, 4)
