"""The criterion: the loss of any objective in anybody's loop, the same to the bit as in `fit`."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from lightning_fabric import Fabric
from rich.console import Console
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import steelman
from steelman.data.source import ArraySource, batches, split
from steelman.errors import UserError
from steelman.evaluation.stages import protocol
from steelman.heads import Head
from steelman.models.batchnorm import split_norms
from steelman.objectives import AWP, CURE, GAT, HAT, OBJECTIVES, PGDAT, TRADES, Criterion, FreeAT
from steelman.objectives.criterion import bare
from steelman.rng import Key
from steelman.schedules import Linear
from steelman.threat import ThreatModel
from steelman.training import Around, Guard, RunSettings, Training, Validation
from steelman.training.settings import SGD
from tests.training_helpers import SHAPE, Helper, a_net, some_data

THREAT = ThreatModel(eps=0.1)
RATE, EPOCHS, SIZE = 0.01, 2, 8


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def some_batch(n: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(n, *SHAPE, generator=g), torch.arange(n) % 3


def of(name: str) -> Any:
    return OBJECTIVES[name]()


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    mine, its = one.state_dict(), other.state_dict()
    return mine.keys() == its.keys() and all(torch.equal(mine[key], its[key]) for key in mine)


def own_loop(net: nn.Module, name: str, source: ArraySource, around: dict[str, Any]) -> nn.Module:
    """What somebody writes who has a model, data and an optimiser."""
    train, _ = split(source, 6, seed=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    per_epoch = of(name).repeats * 5
    criterion = Criterion(
        of(name),
        net,
        THREAT,
        eps=Linear(start=0.02, end=0.1, until=0.5),
        steps=EPOCHS * per_epoch,
        helper=Helper() if name == "hat" else None,
        optimizer=optimizer,
        **around,
    )
    torch.manual_seed(Key(0).fold("global", 0).integer() & (2**63 - 1))  # dropout draws what it draws in `fit`
    net.train()
    for epoch in range(EPOCHS):
        order = batches(len(train), SIZE, Key(0).fold("order", epoch))[:5]
        loader = [(train.images(index), train.labels[index], index) for index in order]
        for x, y, index in criterion.batches(loader):
            loss = criterion(x, y, index=index)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    criterion.finish()
    return net.eval()


def by_fit(net: nn.Module, name: str, source: ArraySource, around: dict[str, Any]) -> nn.Module:
    how = RunSettings(
        training=Training(
            epochs=EPOCHS,
            batch_size=SIZE,
            optimizer=SGD(momentum=0.9),
            lr=RATE,
            eps=Linear(start=0.02, end=0.1, until=0.5),
            select="last",
        ),
        validation=Validation(size=6, samples=6, attack=steelman.PGD(steps=1)),
        guard=Guard(on_collapse="ignore"),
        around=Around(**around),
    )
    helper = Helper() if name == "hat" else None
    suite = protocol({"FGSM": steelman.FGSM()}, curve=False)
    return steelman.fit(net, source, THREAT, of(name), settings=how, helper=helper, suite=suite, console=quiet()).model


def test_an_own_loop_is_fit_to_the_bit_for_every_objective(capsys: pytest.CaptureFixture[str]) -> None:
    """Hypersphere head, batch norm, dropout, momentum and a growing radius; weight perturbation where it is allowed."""
    source, rows = some_data(46), []
    for name in OBJECTIVES:
        around: dict[str, Any] = {"label_smoothing": 0.1}
        if not of(name).single_pass:
            around["awp"] = AWP(gamma=0.01)
        net = a_net("he")
        before = copy.deepcopy(net)
        mine, its = own_loop(copy.deepcopy(net), name, source, around), by_fit(copy.deepcopy(net), name, source, around)
        moved = float((mine.state_dict()["head.weight"] - before.state_dict()["head.weight"]).abs().max())
        rows.append((name, "awp" in around, moved, same_weights(mine, its)))
    with capsys.disabled():
        print("\nobjective         weight perturbation  moved by  equal to fit")
        for name, awp, moved, equal in rows:
            print(f"{name:17} {'yes' if awp else 'refused':20} {moved:.4f}    {'to the bit' if equal else 'NO'}")
    assert all(moved > 1e-3 and equal for _, _, moved, equal in rows)


class TestWrappers:
    def losses(self, model: nn.Module, net: nn.Module, name: str = "trades") -> list[float]:
        criterion = Criterion(of(name), model, THREAT)
        net.train()
        torch.manual_seed(0)
        return [float(criterion(*some_batch(seed=turn)).detach()) for turn in range(2)]

    @pytest.mark.parametrize("name", ["trades", "pgd-at", "tla"])
    def test_distributed_data_parallel(self, name: str, tmp_path: Path) -> None:
        plain = self.losses(net := a_net(dropout=0.0), net, name)
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
        try:
            net = a_net(dropout=0.0)
            assert self.losses(DistributedDataParallel(net), net, name) == plain
        finally:
            torch.distributed.destroy_process_group()

    def test_fabric(self) -> None:
        plain = self.losses(net := a_net(dropout=0.0), net)
        net = a_net(dropout=0.0)
        model = Fabric(accelerator="cpu", devices=1).setup(net)
        assert bare(model) is net
        assert self.losses(model, net) == plain

    def test_compiled(self) -> None:
        plain = self.losses(net := a_net(dropout=0.0), net)
        net = a_net(dropout=0.0)
        compiled = torch.compile(net, backend="eager")
        assert isinstance(compiled, nn.Module)
        found = self.losses(compiled.train(), net)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=1e-5, atol=1e-6)

    def test_a_model_that_is_compiled_in_place_is_refused_too(self) -> None:
        net = a_net()
        net.compile(backend="eager")
        with pytest.raises(UserError, match=r"which compiled models cannot do: expected the model without torch\.comp"):
            Criterion(CURE(), net, THREAT)

    def test_what_cannot_be_compiled_is_refused(self) -> None:
        compiled = torch.compile(a_net(), backend="eager")
        with pytest.raises(UserError, match="CURE differentiates an input gradient, which compiled models cannot do"):
            Criterion(CURE(), compiled, THREAT)  # type: ignore[arg-type]


class TestNothingIsLostSilently:
    def test_the_margin_is_in_the_loss(self) -> None:
        found = []
        for margin in (0.0, 0.3):
            net = a_net(dropout=0.0).train()
            for head in (module for module in net.modules() if isinstance(module, Head)):
                head.margin = margin
            found.append(float(Criterion(of("standard"), net, THREAT)(*some_batch()).detach()))
        assert found[1] > found[0] + 0.5

    def test_each_step_draws_its_own_noise(self) -> None:
        criterion = Criterion(of("fast-at"), a_net(dropout=0.0).train(), THREAT)
        seen = []
        for _ in range(2):
            criterion(*some_batch())
            seen.append(criterion.outcome.x_adv)
        assert seen[0] is not None
        assert seen[1] is not None
        assert not torch.equal(seen[0], seen[1])

    def test_the_seed_decides(self) -> None:
        def first(seed: int) -> Tensor:
            criterion = Criterion(of("fast-at"), a_net(dropout=0.0).train(), THREAT, seed=seed)
            criterion(*some_batch())
            assert criterion.outcome.x_adv is not None
            return criterion.outcome.x_adv

        assert torch.equal(first(1), first(1))
        assert not torch.equal(first(1), first(2))

    def test_no_two_samples_share_their_number(self) -> None:
        criterion = Criterion(of("standard"), a_net().train(), THREAT)
        seen: list[int] = []
        plain = criterion.objective

        class Noting(type(plain)):  # type: ignore[misc]
            def __call__(self, batch: Any) -> Any:
                seen.extend(batch.index.tolist())
                return plain(batch)

        criterion.objective = Noting()
        for n in (8, 5, 8):
            criterion(*some_batch(n))
        assert seen == list(range(21))

    def test_replays_that_are_forgotten(self) -> None:
        criterion = Criterion(FreeAT(replays=3), a_net().train(), THREAT)
        criterion(*some_batch())
        with pytest.raises(
            UserError, match=r"FreeAT trains 3 times in a row on each batch, and this is another batch "
        ):
            criterion(*some_batch(seed=1))

    def test_replays_carry_the_perturbation(self) -> None:
        criterion = Criterion(FreeAT(replays=3), a_net().train(), THREAT)
        seen = []
        for x, y in criterion.batches([some_batch(), some_batch(seed=1)]):
            criterion(x, y).backward()  # type: ignore[no-untyped-call]
            seen.append(criterion.outcome.x_adv)
        assert len(seen) == 6
        assert not torch.equal(seen[0], seen[1])  # type: ignore[arg-type]
        assert not torch.equal(seen[3], some_batch(seed=1)[0])  # type: ignore[arg-type]

    def test_a_loss_that_was_never_differentiated_changes_nothing(self) -> None:
        criterion = Criterion(GAT(), a_net().train(), THREAT)
        criterion(*some_batch())
        criterion(*some_batch())
        assert criterion.carry == {}
        criterion.outcome.loss.backward()  # type: ignore[no-untyped-call]
        criterion.finish()
        assert int(criterion.carry["turn"]) == 1

    def test_the_weight_perturbation_is_gone_after_the_step(self) -> None:
        net = a_net(dropout=0.0).train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        before = {name: value.clone() for name, value in net.named_parameters()}
        criterion = Criterion(PGDAT(), net, THREAT, awp=AWP(gamma=0.1), optimizer=optimizer)
        criterion(*some_batch()).backward()  # type: ignore[no-untyped-call]
        assert any(float((value - before[name]).detach().abs().max()) > 1e-3 for name, value in net.named_parameters())
        optimizer.step()
        for name, value in net.named_parameters():
            torch.testing.assert_close(value.detach(), before[name], rtol=0, atol=1e-6)

    def test_the_weight_perturbation_is_gone_at_the_next_call_where_a_step_was_left_out(self) -> None:
        net = a_net(dropout=0.0).train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
        before = {name: value.clone() for name, value in net.named_parameters()}
        criterion = Criterion(PGDAT(), net, THREAT, awp=AWP(gamma=0.1), optimizer=optimizer)
        criterion(*some_batch())
        criterion.finish()
        for name, value in net.named_parameters():
            torch.testing.assert_close(value.detach(), before[name], rtol=0, atol=1e-6)

    def test_weights_on_the_sphere_are_put_back(self) -> None:
        net = a_net(dropout=0.0).train()
        head = next(module for module in net.modules() if isinstance(module, Head))
        head.wn_mode = "project"
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        criterion = Criterion(PGDAT(), net, THREAT)
        criterion(*some_batch()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        criterion.finish()
        torch.testing.assert_close(head.weight.detach().norm(dim=1), torch.ones(3))


@pytest.mark.parametrize("name", ["free-at", "gat", "tla", "fast-at"])
def test_a_saved_state_goes_on_to_the_bit(name: str) -> None:
    def steps(criterion: Criterion, optimizer: torch.optim.Optimizer, turns: range) -> None:
        for turn in turns:
            x, y = some_batch(seed=turn // criterion.objective.repeats)
            loss = criterion(x, y)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    whole = a_net(dropout=0.0).train()
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    criterion = Criterion(of(name), whole, THREAT)
    steps(criterion, optimizer, range(5))
    state, weights = copy.deepcopy(criterion.state_dict()), copy.deepcopy(whole.state_dict())
    steps(criterion, optimizer, range(5, 10))

    parts = a_net(dropout=0.0, seed=1).train()
    parts.load_state_dict(weights)
    criterion = Criterion(of(name), parts, THREAT)
    criterion.load_state_dict(state)
    steps(criterion, torch.optim.SGD(parts.parameters(), lr=0.1), range(5, 10))
    assert same_weights(whole, parts)


def test_a_radius_for_each_step() -> None:
    criterion = Criterion(PGDAT(), a_net().train(), THREAT, eps=Linear(start=0, end=0.1), steps=10)
    for turn in range(3):
        x, y = some_batch()
        criterion(x, y)
        assert criterion.outcome.x_adv is not None
        assert float((criterion.outcome.x_adv - x).abs().max()) == pytest.approx(0.01 * turn, abs=1e-6)
    x, y = some_batch()
    criterion(x, y, progress=0.8)
    assert float((criterion.outcome.x_adv - x).abs().max()) == pytest.approx(0.08, abs=1e-6)  # type: ignore[operator]
    criterion(x, y, eps=0.05)
    assert float((criterion.outcome.x_adv - x).abs().max()) == pytest.approx(0.05, abs=1e-6)  # type: ignore[operator]


def test_more_calls_than_steps_are_said() -> None:
    criterion = Criterion(PGDAT(), a_net().train(), THREAT, eps=Linear(start=0, end=0.1), steps=1)
    criterion(*some_batch())
    with pytest.warns(UserWarning, match="made for 1 steps, and this is one more"):
        criterion(*some_batch())


def test_features_that_start_almost_parallel_are_said() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 64), nn.Softplus(beta=0.1), nn.Linear(64, 3))
    criterion = Criterion(PGDAT(), steelman.embed(net, "he"), THREAT)
    with pytest.warns(UserWarning, match=r"almost parallel \(mean cosine 0.99"):
        criterion(*some_batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        criterion(*some_batch())
        Criterion(PGDAT(), a_net().train(), THREAT)(*some_batch())


def no_gradient(net: nn.Module) -> nn.Module:
    return net.requires_grad_(False)


class TestRefusals:
    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"objective": PGDAT}, "expected one such as steelman.PGDAT(), got PGDAT; call it first"),
            ({"objective": print}, "expected one such as steelman.PGDAT(), got builtin_function_or_method"),
            ({"model": print}, "model: expected a torch.nn.Module, got builtin_function_or_method"),
            ({"threat": 0.1}, "threat: expected a steelman.ThreatModel, got float"),
            ({"label_smoothing": 1}, "label_smoothing: expected a share of at least 0 and below 1, got 1"),
            ({"steps": 0}, "steps: expected a number of steps of at least 1, got 0"),
            ({"objective": HAT()}, "HAT learns from another model: expected it as `helper`, got none"),
            ({"awp": AWP()}, "expected `optimizer` with `awp`"),
            ({"awp": AWP}, "awp: expected one such as steelman.AWP(), got <class"),
            ({"objective": FreeAT(), "awp": AWP()}, "FreeAT makes its perturbation while it trains"),
            ({"model": split_norms(a_net())}, "PGDAT trains on adversarial images alone"),
        ],
    )
    def test_at_once(self, given: dict[str, Any], message: str) -> None:
        parts: dict[str, Any] = {"objective": PGDAT(), "model": a_net(), "threat": THREAT, **given}
        with pytest.raises(UserError) as caught:
            Criterion(parts.pop("objective"), parts.pop("model"), parts.pop("threat"), **parts)
        assert message in str(caught.value)

    def test_a_helper_that_is_the_model_itself(self) -> None:
        net = a_net()
        with pytest.raises(UserError, match="helper: expected another model"):
            Criterion(HAT(), net, THREAT, helper=net)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda x, y: (x * 255, y), r"expected pixels in \[0, 1\]|pixels go up to 255"),
            (lambda x, y: ((x - 0.5) / 0.2, y), r"The model must normalise its own images: steelman\.wrap"),
            (
                lambda x, y: (x.double(), y),
                r"expected images in torch\.float32, as the model's weights are, got torch\.fl",
            ),
            (lambda x, y: (x, y.float()), "expected 8 labels in int64, got torch.float32"),
            (lambda x, y: (x, y[:3]), r"expected 8 labels in int64, got torch.int64 of shape \(3,\)"),
            (lambda x, y: ((x * 255).byte(), y), "expected floating-point images"),
            (lambda x, y: (x.numpy(), y), "expected images as a tensor, got ndarray"),
        ],
    )
    def test_bad_batches(self, change: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            Criterion(PGDAT(), a_net().train(), THREAT)(*change(*some_batch()))

    def test_eval_mode_and_no_grad(self) -> None:
        with pytest.raises(UserError, match=r"call model\.train\(\)"):
            Criterion(PGDAT(), a_net().eval(), THREAT)(*some_batch())
        with pytest.raises(UserError, match="gradients are off"), torch.no_grad():
            Criterion(PGDAT(), a_net().train(), THREAT)(*some_batch())
        with pytest.raises(UserError, match="depends on no weight that requires a gradient"):
            Criterion(of("standard"), no_gradient(a_net().train()), THREAT)(*some_batch())

    @pytest.mark.parametrize(
        ("objective", "options", "what"),
        [
            (TRADES(), {"eps": Linear(start=0, end=0.1)}, "eps"),
            (CURE(h=Linear(start=0, end=1)), {}, r"CURE\.h"),
            (GAT(weight=Linear(start=0, end=1)), {}, r"GAT\.weight"),
        ],
    )
    def test_a_schedule_without_progress(self, objective: Any, options: dict[str, Any], what: str) -> None:
        with pytest.raises(UserError, match=f"{what} changes with the progress of the training: give Criterion the"):
            Criterion(objective, a_net().train(), THREAT, **options)(*some_batch())

    @pytest.mark.parametrize(("options", "message"), [({"progress": 2}, "0 .. 1, got 2"), ({"eps": 0.2}, "got 0.2")])
    def test_a_step_out_of_range(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(UserError, match=message):
            Criterion(PGDAT(), a_net().train(), THREAT)(*some_batch(), **options)

    def test_another_state(self) -> None:
        with pytest.raises(UserError, match="expected the state of a criterion"):
            Criterion(PGDAT(), a_net(), THREAT).load_state_dict({"step": 1})
        with pytest.raises(UserError, match="got none"):
            Criterion(PGDAT(), a_net(), THREAT).load_state_dict({})


class TestFoundByAReview:
    def test_every_batch_is_in_the_range(self) -> None:
        criterion = Criterion(PGDAT(), a_net().train(), THREAT)
        x, y = some_batch()
        criterion(x, y)
        with pytest.raises(UserError, match=r"expected pixels in \[0, 1\]"):
            criterion(1.5 * x, y)

    def test_labels_to_be_ignored_are_refused(self) -> None:
        x, y = some_batch()
        with pytest.raises(UserError, match="expected labels of 0 or more, got -100"):
            Criterion(of("standard"), a_net().train(), THREAT)(x, torch.where(y == 0, -100, y))

    def test_an_overflow_does_not_stay_in_the_perturbation(self) -> None:
        criterion = Criterion(FreeAT(replays=2), a_net(dropout=0.0).train(), ThreatModel(norm="l2", eps=0.5))
        for turn in range(4):
            loss = criterion(*some_batch())
            (loss * (float("inf") if turn == 1 else 1)).backward()  # type: ignore[no-untyped-call]
        assert torch.isfinite(criterion(*some_batch()))

    def test_gradients_of_the_weights_alone_are_not_enough_for_free_at(self) -> None:
        net = a_net().train()
        criterion = Criterion(FreeAT(replays=2), net, THREAT)
        criterion(*some_batch()).backward(inputs=list(net.parameters()))  # type: ignore[no-untyped-call]
        with pytest.raises(UserError, match=r"call loss\.backward\(\) without `inputs`"):
            criterion(*some_batch())

    def test_an_optimizer_of_other_weights(self) -> None:
        other = torch.optim.SGD(a_net().parameters(), 0.1)
        for optimizer, said in (("adam", "got str"), (other, "got one that steps none of them")):
            with pytest.raises(UserError, match=said):
                Criterion(PGDAT(), a_net(), THREAT, awp=AWP(), optimizer=optimizer)  # type: ignore[arg-type]

    def test_the_state_of_another_objective(self) -> None:
        state = Criterion(TRADES(), a_net(), THREAT).state_dict()
        with pytest.raises(UserError, match="expected the state of a criterion of PGDAT, got one of TRADES"):
            Criterion(PGDAT(), a_net(), THREAT).load_state_dict(state)

    def test_places_of_samples(self) -> None:
        x, y = some_batch()
        with pytest.raises(UserError, match="index: expected a tensor with the place of each of the 8 samples"):
            Criterion(PGDAT(), a_net().train(), THREAT)(x, y, index=torch.arange(3))
