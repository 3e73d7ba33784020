"""Auxiliary batch norm: two kinds of batches, two memories, and every forward through the right one."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from steelman import data
from steelman import recipe as recipes
from steelman.attacks import PGD
from steelman.errors import TrainingInterruptedError, UserError
from steelman.evaluation.result import Evaluation
from steelman.losses import kl
from steelman.models.batchnorm import AuxiliaryNorm, Branch, route, routed, split_norms
from steelman.models.classifier import Classifier
from steelman.objectives import OBJECTIVES, Batch, Outcome
from steelman.objectives.trades import TRADES
from steelman.training import Around, run, trainer
from steelman.training.folder import load_model
from tests.test_pgd import everything
from tests.training_helpers import OWN, a_batch, a_net, a_trainer, digits_net, interrupted_at, same_run

BRANCHES: tuple[Branch, Branch] = ("clean", "adversarial")
NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "2d": (lambda: nn.BatchNorm2d(4, eps=1e-3, momentum=0.3), (6, 4, 3, 2)),
    "3d": (lambda: nn.BatchNorm3d(4), (6, 4, 2, 2, 3)),
    "cumulative": (lambda: nn.BatchNorm2d(4, momentum=None), (6, 4, 3, 2)),
    "without scale": (lambda: nn.BatchNorm2d(4, affine=False), (6, 4, 3, 2)),
    "without memory": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (6, 4, 3, 2)),
}


def auxiliaries(model: nn.Module) -> list[AuxiliaryNorm]:
    return [module for module in model.modules() if isinstance(module, AuxiliaryNorm)]


def split_net(**options: Any) -> tuple[Classifier, AuxiliaryNorm]:
    """A network in train mode whose two branches differ in statistics, scale and shift."""
    net = a_net(dropout=0.0, **options)
    split_norms(net)
    (norm,) = auxiliaries(net)
    for branch, value in zip((norm.clean, norm.adversarial), (0.3, 0.8)):
        for name, buffer in branch.named_buffers():
            if name != "num_batches_tracked":
                buffer.copy_(value * torch.linspace(0.5, 1.5, 12))
        with torch.no_grad():
            branch.weight.mul_(1 + value * torch.linspace(-1, 1, 12))
            branch.bias.add_(value)
    return net.double().train(), norm


def plain(net: Classifier, branch: Branch) -> Classifier:
    """The same network with that branch alone, as an ordinary batch norm."""
    twin = copy.deepcopy(net)
    twin.backbone.layers[1] = getattr(twin.backbone.layers[1], branch)  # type: ignore[index,operator]
    return twin


# One layer


@pytest.mark.parametrize("kind", NORMS)
def test_each_branch_is_to_the_bit_a_batch_norm_fed_with_its_own_batches(kind: str) -> None:
    make, shape = NORMS[kind]
    first = make()
    split = split_norms(nn.Sequential(copy.deepcopy(first)))
    alone = {branch: copy.deepcopy(first) for branch in BRANCHES}
    order: list[Branch] = ["clean", "adversarial", "adversarial", "clean", "adversarial"]
    for step, branch in enumerate(order):
        x = (1 + step) * torch.randn(shape) + step
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        with routed(split, branch):
            out, expected = split(one), alone[branch](other)
        assert torch.equal(out, expected)
        torch.autograd.backward(out.square().sum())
        torch.autograd.backward(expected.square().sum())
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    (norm,) = auxiliaries(split)
    for branch in BRANCHES:
        kept, expected_norm = getattr(norm, branch), alone[branch]
        assert kept.state_dict().keys() == expected_norm.state_dict().keys()
        for name, value in expected_norm.state_dict().items():
            assert torch.equal(kept.state_dict()[name], value), (branch, name)
        for (name, p), q in zip(kept.named_parameters(), expected_norm.parameters()):
            assert p.grad is not None, name
            assert torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]
        split.eval()
        x = torch.randn(shape)
        with routed(split, branch):
            assert torch.equal(split(x), expected_norm.eval()(x))
    if "running_mean" in alone["clean"].state_dict():
        assert not torch.equal(norm.clean.running_mean, norm.adversarial.running_mean)  # type: ignore[arg-type]


# Whole models


class Deep(nn.Module):
    """Batch norms in lists, dicts and plain attributes, and layers that only look like one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(3)
        self.parts = nn.ModuleList(
            [nn.ModuleDict({"inner": nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())}), nn.Identity()]
        )
        self.instance = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
        self.group, self.layer = nn.GroupNorm(1, 3), nn.LayerNorm([3, 4, 4])
        self.top = nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.Sequential(nn.Sequential(nn.BatchNorm1d(5))))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.parts.get_submodule("0.inner")
        x = self.layer(self.group(self.instance(inner(self.first(x)))))
        out: Tensor = self.top(x)
        return out


def test_batch_norms_are_split_wherever_they_are_and_nothing_else_is() -> None:
    net = Deep()
    before, old = net.state_dict(), list(net.named_modules())
    assert split_norms(net) is net
    places = ["first", "parts.0.inner.0", "top.2.0.0"]
    assert [name for name, module in net.named_modules() if isinstance(module, AuxiliaryNorm)] == places
    now = dict(net.named_modules())
    assert all(now[name] is module for name, module in old if name not in places)
    assert all(now[f"{name}.clean"] is module for name, module in old if name in places)
    expected = {name for name in before if not name.startswith(tuple(f"{place}." for place in places))}
    for place in places:
        parts = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        expected |= {f"{place}.{branch}.{part}" for branch in BRANCHES for part in parts}
    assert net.state_dict().keys() == expected
    assert len({value.data_ptr() for value in net.state_dict().values() if value.numel() > 1}) == len(
        [value for value in net.state_dict().values() if value.numel() > 1]
    ), "the branches share no memory"


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_split_model_starts_where_the_model_was(branch: Branch) -> None:
    net, x = Deep(), torch.rand(6, 3, 4, 4)
    net(x)
    twin = split_norms(copy.deepcopy(net))
    route(twin, branch)
    assert torch.equal(twin.eval()(x), net.eval()(x))
    assert torch.equal(twin.train()(x), net.train()(x))


def test_states_go_from_one_split_model_to_another() -> None:
    one, two = (split_norms(Deep()) for _ in range(2))
    for step, branch in enumerate((*BRANCHES, "clean")):
        with routed(one, branch):
            one(step + torch.rand(6, 3, 4, 4))
    two.load_state_dict(one.state_dict())
    x = torch.rand(2, 3, 4, 4)
    outs = []
    for branch in BRANCHES:
        route(one.eval(), branch)
        route(two.eval(), branch)
        outs.append(two(x))
        assert torch.equal(outs[-1], one(x))
    assert not torch.equal(*outs)


@pytest.mark.parametrize("net", [nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.GroupNorm(1, 4)), nn.ReLU()])
def test_a_model_without_batch_norm_is_refused(net: nn.Module) -> None:
    with pytest.raises(UserError, match="the model has no batch norm to split"):
        split_norms(net)


def test_routing_lasts_as_long_as_asked_even_after_an_exception() -> None:
    net = split_norms(Deep())
    norms = auxiliaries(net)

    def branches() -> list[Branch]:
        return [norm.branch for norm in norms]

    assert branches() == ["clean"] * 3
    route(net, "adversarial")
    assert branches() == ["adversarial"] * 3
    norms[1].branch = "clean"  # each one gets its own back
    with routed(net, "clean"):
        assert branches() == ["clean"] * 3
        with routed(net, "adversarial"):
            assert branches() == ["adversarial"] * 3
        assert branches() == ["clean"] * 3
    assert branches() == ["adversarial", "clean", "adversarial"]
    with pytest.raises(RuntimeError, match="broke"), routed(net, "clean"):
        raise RuntimeError("it broke")
    assert branches() == ["adversarial", "clean", "adversarial"]


def test_routing_leaves_other_models_alone() -> None:
    net = Deep()
    before = everything(net)
    route(net, "adversarial")
    with routed(net, "adversarial"):
        pass
    assert everything(net) == before


def test_a_compiled_model_follows_the_routing() -> None:
    net = split_norms(nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.BatchNorm1d(8)))
    compiled: nn.Module = torch.compile(net, backend="eager")  # type: ignore[assignment]
    order: list[Branch] = ["clean", "adversarial", "adversarial", "clean", "adversarial"]
    for branch in order:
        with routed(compiled, branch):
            compiled(torch.rand(5, 1, 2, 2))
    (norm,) = auxiliaries(net)
    assert {branch: int(norm.get_buffer(f"{branch}.num_batches_tracked")) for branch in BRANCHES} == {
        "clean": 2,
        "adversarial": 3,
    }


def test_a_batch_norm_used_in_two_places_is_split_in_both() -> None:
    shared = nn.BatchNorm1d(4)
    inside = nn.Sequential(nn.Linear(4, 4), shared)
    net = split_norms(nn.Sequential(shared, nn.Linear(4, 4), shared, inside))
    with routed(net, "adversarial"):
        net(torch.rand(5, 4))
    assert int(shared.num_batches_tracked or 0) == 0, "the clean statistics are not for adversarial batches"
    assert len(auxiliaries(net)) == 1, "it was one batch norm, and is one pair"


# Attacks


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("branch", BRANCHES)
def test_an_attack_leaves_both_branches_as_they_were(branch: Branch, mode: Any) -> None:
    net, norm = split_net()
    batch = a_batch(net)
    before = everything(net)
    with routed(net, branch):
        x_adv = PGD(steps=3, keep="last", mode=mode)(net, batch.x, batch.y, batch.threat)
    assert everything(net) == before
    assert norm.branch == "clean"
    expected = PGD(steps=3, keep="last", mode=mode)(plain(net, branch), batch.x, batch.y, batch.threat)
    assert torch.equal(x_adv, expected), "and saw the branch it was sent through"


# Objectives


def moved(mean: Tensor, var: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Running statistics after one batch."""
    return 0.9 * mean + 0.1 * hidden.mean(dim=0), 0.9 * var + 0.1 * hidden.var(dim=0, correction=1)


def test_trades_sends_x_through_the_clean_branch_and_x_adv_through_the_adversarial_one() -> None:
    net, norm = split_net()
    batch, twins = a_batch(net), {branch: plain(net, branch) for branch in BRANCHES}
    statistics = {name: value.clone() for name, value in norm.named_buffers()}
    attack = PGD(steps=3, keep="last", loss="kl", start="gaussian")
    outcome = TRADES(beta=2.0, attack=attack)(batch)
    assert outcome.x_adv is not None
    seen = {
        branch: attack(twin, batch.x, batch.y, batch.threat, index=batch.index, key=batch.key)
        for branch, twin in twins.items()
    }
    assert torch.equal(outcome.x_adv, seen["adversarial"]), "the attack is made against the adversarial branch"
    assert not torch.equal(outcome.x_adv, seen["clean"])
    layer = net.backbone.layers[0]  # type: ignore[index]
    for branch, x in (("clean", batch.x), ("adversarial", outcome.x_adv)):
        hidden = x.flatten(1) @ layer.weight.detach().T + layer.bias.detach()  # type: ignore[union-attr]
        mean, var = moved(statistics[f"{branch}.running_mean"], statistics[f"{branch}.running_var"], hidden)
        torch.testing.assert_close(norm.get_buffer(f"{branch}.running_mean"), mean)
        torch.testing.assert_close(norm.get_buffer(f"{branch}.running_var"), var)
        assert int(norm.get_buffer(f"{branch}.num_batches_tracked")) == 1
    assert norm.branch == "clean"
    clean, adversarial = twins["clean"](batch.x), twins["adversarial"](outcome.x_adv)
    lowered = clean - 15 * 0.2 * F.one_hot(batch.y, 3)
    loss = (F.cross_entropy(lowered, batch.y, reduction="none") + 2.0 * kl(adversarial, clean)).mean()
    torch.testing.assert_close(outcome.loss, loss)
    torch.autograd.backward(outcome.loss)
    torch.autograd.backward(loss)
    for branch in BRANCHES:
        for part in ("weight", "bias"):
            ours = norm.get_parameter(f"{branch}.{part}").grad
            theirs = twins[branch].get_parameter(f"backbone.layers.1.{part}").grad
            assert ours is not None
            assert theirs is not None
            torch.testing.assert_close(ours, theirs)
            assert ours.any()


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_objective_moves_the_branches_it_names(name: str) -> None:
    net, norm = split_net()
    objective = OBJECTIVES[name]()
    objective(a_batch(net))
    counts = {branch: int(norm.get_buffer(f"{branch}.num_batches_tracked")) for branch in BRANCHES}
    assert counts == {branch: objective.forwards.count(branch) for branch in BRANCHES}
    assert norm.branch == "clean"


# Runs


QUIET = [
    "validation={size: 200, samples: 40, attack: {name: pgd, steps: 2}}",
    "evaluation.suite=null",
    "evaluation.attacks={PGD: {name: pgd, steps: 2}}",
    "training.batch_size=128",
    "training.epochs=2",
]
AUXILIARY = ["objective=trades", "model=tests.training_helpers:digits_net", "around.auxiliary_norm=adversarial", *QUIET]


def recipe(*overrides: str) -> dict[str, Any]:
    return recipes.read("digits-pgd-at", overrides)[0]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auxiliary") / "run"
    torch.manual_seed(0)
    run.train(recipe(*AUXILIARY), folder, console=Console(quiet=True), allow_import=OWN)
    return folder


def test_a_reloaded_model_predicts_through_the_branch_the_recipe_names(whole: Path) -> None:
    model, record = load_model(whole, OWN)
    assert record["auxiliary_norm"] == "adversarial"
    (norm,) = auxiliaries(model)
    assert norm.branch == "adversarial"
    test = data.load("digits").test
    x = test.images(torch.arange(len(test)))
    ours = model(x).detach()
    others = {}
    for branch in BRANCHES:
        bare = digits_net()
        state = model.state_dict()
        kept = {
            name: value for name, value in state.items() if ".1.clean." not in name and ".1.adversarial." not in name
        }
        kept |= {name.replace(f".{branch}", ""): value for name, value in state.items() if f".1.{branch}." in name}
        bare.load_state_dict(kept)
        others[branch] = bare.eval()(x).detach()
    assert torch.equal(ours, others["adversarial"])
    assert float((ours - others["clean"]).abs().max()) > 1e-3
    assert (
        int(norm.get_buffer("clean.num_batches_tracked")) == int(norm.get_buffer("adversarial.num_batches_tracked")) > 0
    )
    right = int((ours.argmax(dim=1) == test.labels).sum())
    assert Evaluation.load(whole / "attacks").score("clean").correct == right, "what was measured is what is loaded"


def test_an_interrupted_run_ends_with_the_same_weights(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    inner = TRADES.__call__

    def stopping(self: TRADES, batch: Batch) -> Outcome:
        calls.append(1)
        if len(calls) == 13:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(TRADES, "__call__", stopping)
        with pytest.raises(TrainingInterruptedError):
            run.train(recipe(*AUXILIARY), tmp_path / "run", console=Console(quiet=True), allow_import=OWN)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    run.resume(tmp_path / "run", Console(quiet=True), allow_import=OWN)
    name = "model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (whole / name).read_bytes()


def test_an_interrupted_run_with_averages_ends_with_the_same_bits(tmp_path: Path) -> None:
    def one(folder: str) -> Any:
        return a_trainer(
            tmp_path / folder,
            net=split_norms(a_net()),
            objective=OBJECTIVES["trades"](),
            around=Around(auxiliary_norm="adversarial"),
        )

    one("whole").fit()
    stopped = one("parts")
    with interrupted_at({5, 9}, stopped), pytest.raises(TrainingInterruptedError):
        stopped.fit()
    one("parts").fit(resume=True)
    same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("ema", [None, 0.9])
def test_validation_scores_the_branch_that_is_kept(
    branch: Branch, ema: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Branch] = []

    def score(net: nn.Module, *_: Any) -> tuple[float, float]:
        seen.extend(norm.branch for norm in auxiliaries(net))
        return 0.5, 0.5

    monkeypatch.setattr(trainer, "score", score)
    net = split_norms(a_net())
    a_trainer(
        tmp_path,
        net=net,
        objective=OBJECTIVES["trades"](),
        around=Around(auxiliary_norm=branch),
        training={"epochs": 2, "ema": ema},
    ).fit()
    assert seen == [branch] * 2
    assert [norm.branch for norm in auxiliaries(net)] == ["clean"], "training goes on as it was"


@pytest.mark.parametrize(
    ("name", "only"),
    [("pgd-at", "PGDAT trains on adversarial images"), ("standard", "Standard trains on clean images")],
)
@pytest.mark.parametrize("branch", BRANCHES)
def test_an_objective_with_one_kind_of_batch_is_refused(name: str, only: str, branch: Branch) -> None:
    with pytest.raises(UserError, match=rf"around\.auxiliary_norm: {only} alone.*such as trades"):
        recipes.parse(recipe(f"objective={name}", f"around.auxiliary_norm={branch}"))


def test_a_branch_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match=r"around\.auxiliary_norm: .*'clean' or 'adversarial'.*got 'both'"):
        recipes.parse(recipe("objective=trades", "around.auxiliary_norm=both"))


def test_a_model_without_batch_norm_is_refused_before_a_folder_is_made(tmp_path: Path) -> None:
    source = recipe("objective=trades", "model=mlp", "around.auxiliary_norm=clean", *QUIET)
    with pytest.raises(UserError, match="the model has no batch norm to split"):
        run.train(source, tmp_path / "run", console=Console(quiet=True), allow_import=OWN)
    assert not (tmp_path / "run").exists()
