"""The public checks bite: each promise is broken by an ingredient of its own, and the sentence names that promise."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steelman import testing
from steelman.attacks import ATTACKS, PGD, Found, Problem, Search, untouched
from steelman.heads import Head
from steelman.losses import margin
from steelman.objectives import OBJECTIVES, Batch, Objective, Outcome
from steelman.objectives.pgd_at import PGDAT
from steelman.rng import Key
from steelman.settings import settings
from steelman.testing import ContractBrokenError, check_attack, check_head, check_objective
from steelman.threat import ThreatModel

INNER = PGD(steps=5)


def honest(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: ThreatModel,
    *,
    index: Tensor | None = None,
    key: Key = Key(0),  # noqa: B008 - a Key is frozen
    target: Tensor | None = None,
) -> Tensor:
    """One sign step from a random point: a third party's attack, which is no class of ours."""
    index = torch.arange(len(x)) if index is None else index
    with untouched(model), torch.enable_grad():
        points = threat.random_start(x, index, key).requires_grad_()
        (gradient,) = torch.autograd.grad(margin(model(points), y).sum(), points)
    return threat.project(points.detach() + 2 * threat.eps * gradient.sign(), x)


def test_an_attack_that_is_a_function_keeps_them() -> None:
    check_attack(honest, norms=["linf"])


@settings
class Tiny(Search):
    """The smallest attack of a third party that is a class of ours."""

    black_box: ClassVar[bool] = False

    def search(self, problem: Problem) -> None:
        rows = problem.remaining()
        points = problem.x[rows].requires_grad_()
        logits = problem.logits(points, rows)
        losses = margin(logits, problem.y[rows])
        points = points.detach() + 2 * problem.threat.eps * problem.gradient(losses, points, rows).sign()
        points = problem.threat.project(points, problem.x[rows])
        with torch.no_grad():
            logits = problem.logits(points, rows)
        problem.keep(points, logits, margin(logits, problem.y[rows]), rows)


@pytest.mark.parametrize("made", [Tiny, Tiny(), partial(Tiny)], ids=["class", "object", "partial"])
def test_an_attack_may_be_given_as_a_factory(made: Any) -> None:
    check_attack(made, norms=["linf"])


# Attacks: what they do, the promise that it breaks, and words of the sentence.


def nothing(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    return x.clone()


def too_far(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    delta = honest(model, x, y, threat, **rest) - x
    return (x + 1.01 * delta).clamp(threat.low, threat.high)


def out_of_the_range(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    return x + 2 * (honest(model, x, y, threat.at(threat.eps / 2), **rest) - x) - threat.eps / 100


def unit_range(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    return honest(model, x, y, threat, **rest).clamp(0, 0.999)


def not_a_number(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    return honest(model, x, y, threat, **rest) / (x != x.max())


def another_shape(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    return honest(model, x, y, threat, **rest).flatten(1)


def another_type(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    return honest(model, x, y, threat, **rest).double()


def a_pair(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Any:
    return honest(model, x, y, threat, **rest), True


def tracked(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    return honest(model, x, y, threat, **rest).requires_grad_()


def in_place(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    return x.copy_(honest(model, x, y, threat, **rest))


def draws(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    return honest(model, threat.project(x + 1e-3 * torch.randn_like(x), x), y, threat.at(0.9 * threat.eps), **rest)


def draws_and_puts_back(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        return threat.project(draws(model, x, y, threat, **rest), x)


def to_train_mode(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    x_adv = honest(model, x, y, threat, **rest)
    model.train()
    return x_adv


def no_finally(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    model(x)
    for module, training in modes:
        module.training = training
    return honest(model, x, y, threat, **rest)


def records(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model(x)
    return honest(model, x, y, threat, **rest)


def moves_weights(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    with torch.no_grad():
        next(model.parameters()).add_(1e-6)
    return honest(model, x, y, threat, **rest)


def freezes(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    return honest(model.requires_grad_(False), x, y, threat, **rest)


def leaves_gradients(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    return honest(model, x, y, threat, **rest)


def leaves_a_hook(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    model.register_forward_hook(lambda *_: None)
    return honest(model, x, y, threat, **rest)


def hides(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    try:
        return honest(model, x, y, threat, **rest)
    except BaseException:
        return x.clone()


def by_place(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    return honest(model, x, y, threat, **{**rest, "index": None})


def by_batch(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    return honest(model, x, y, threat.at(threat.eps * (0.9 + 0.01 * len(x))), **rest)


def no_empty_batch(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    return honest(model, x, y, threat.at(min(threat.eps, float(x.max()))), **rest)


def at_least(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    return honest(model, x, y, threat.at(max(threat.eps, 1e-3)), **rest)


def three_classes(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    with untouched(model), torch.no_grad():
        model(x).topk(3)
    return honest(model, x, y, threat, **rest)


def where_gradients_are_on(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    if not torch.is_grad_enabled():
        threat = threat.at(threat.eps / 2)
    return honest(model, x, y, threat, **rest)


def switches_gradients_on(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
    torch.set_grad_enabled(True)
    return honest(model, x, y, threat, **rest)


class Wrong(Tiny):
    """The honest class, with an answer that is changed."""

    def run(self, *args: Any, **rest: Any) -> Found:
        found = super().run(*args, **rest)
        return dataclasses.replace(found, **self.changed(found))

    def __call__(self, *args: Any, **rest: Any) -> Tensor:
        return super().run(*args, **rest).x_adv

    def changed(self, found: Found) -> dict[str, Any]:
        raise NotImplementedError


class Uncounted(Wrong):
    def changed(self, found: Found) -> dict[str, Any]:
        return {"forwards": found.forwards - 1}


class Unpaid(Wrong):
    def changed(self, found: Found) -> dict[str, Any]:
        return {"backwards": 0 * found.backwards}


class Boaster(Wrong):
    def changed(self, found: Found) -> dict[str, Any]:
        return {"success": found.success | True}


class Modest(Wrong):
    def changed(self, found: Found) -> dict[str, Any]:
        return {"success": found.success & False}


class Another(Wrong):
    def changed(self, found: Found) -> dict[str, Any]:
        return {"x_adv": found.x_adv.roll(1, 0)}


class Far(Wrong):
    def changed(self, found: Found) -> dict[str, Any]:
        return {"distance": found.value if hasattr(found, "value") else torch.zeros(len(found.x_adv))}


class Blind(Tiny):
    black_box: ClassVar[bool] = True


BROKEN_ATTACKS: dict[Callable[..., Any], tuple[str, str]] = {
    nothing: (
        "finds",
        "breaks 0 of 4 samples of a linear model whose boundary is 90% of the radius away; expected all",
    ),
    too_far: ("radius", "leaves the ball: a point is 0.101 away, and the radius is 0.1"),
    out_of_the_range: ("box", r"leaves the range \[0, 1\]: its pixels are -0.0\d+ .. 1.0"),
    unit_range: ("zero", "moves images at a radius of zero, by up to 0.001"),
    not_a_number: ("finite", r"gives \d+ pixels that are NaN or infinite"),
    another_shape: ("shape", r"gives points of shape \(8, 12\) for images of shape \(8, 1, 3, 4\)"),
    another_type: ("dtype", "gives points in torch.float64 for images in torch.float32"),
    a_pair: ("tensor", "gives tuple, not a tensor of images"),
    tracked: ("constants", "gives points that require a gradient"),
    in_place: ("input", "changes the images or labels that it was given"),
    draws: ("generator", r"moves a global random generator \(such as 'torch'\) when it ran on 8 images"),
    draws_and_puts_back: ("key", r"gives other points for the same key, by up to 0\.\d+"),
    to_train_mode: ("modes", r"leaves 1 of 9 modules in another mode \(such as '1'\) when it ran"),
    no_finally: ("modes", r"leaves 8 of 9 modules in another mode.* when forward 1 of the model raised an error"),
    records: ("buffers", r"changes 3 of 6 buffers of the model \(such as '5.running_mean'\) when it ran on 8 images"),
    moves_weights: ("weights", "changes 1 of 10 weights of the model"),
    freezes: ("requires_grad", "leaves 8 of 10 weights with another requires_grad"),
    leaves_gradients: ("gradients", "leaves other gradients on 10 of 10 weights"),
    leaves_a_hook: ("hooks", "leaves hooks on 1 of 9 modules when it ran on 8 images"),
    hides: ("errors", "hides that forward 1 of the model was interrupted"),
    by_place: ("order", r"gives other points in another order, by up to 0\.\d+"),
    by_batch: ("batch", "gives image 0 another point alone than among 8"),
    no_empty_batch: ("runs", "fails on an empty batch: "),
    at_least: ("zero", "moves images at a radius of zero, by up to 0.001"),
    three_classes: ("runs", "fails on two classes: RuntimeError"),
    where_gradients_are_on: ("no_grad", "gives other points inside torch.no_grad"),
    switches_gradients_on: ("no_grad", "leaves gradients switched on"),
    Uncounted: ("passes", "counts 8 forwards of samples, and the model saw 16"),
    Unpaid: ("passes", "counts 0 backwards of samples, and the model saw 8"),
    Boaster: ("success", r"claims 8 successes of 8, and on \d of them the model is right"),
    Modest: ("success", r"claims no success, and the model is wrong on \d of 8 samples"),
    Another: ("run", "gives other points in run"),
    Far: ("distances", "or `minimum_norm` without `distance`"),
    Blind: ("black_box", "says that it is a black box, and asked for 8 gradients"),
}


@pytest.mark.parametrize("broken", BROKEN_ATTACKS, ids=lambda broken: broken.__name__)
def test_a_broken_attack_is_caught(broken: Callable[..., Any]) -> None:
    promise, words = BROKEN_ATTACKS[broken]
    with pytest.raises(ContractBrokenError, match=words) as caught:
        check_attack(broken, norms=["linf"])
    assert caught.value.promise == promise
    assert str(caught.value).startswith(f"{broken.__name__} (linf) ")


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_one_that_is_a_little_too_weak_or_too_far_is_caught_in_each_norm(norm: Any) -> None:
    def weak(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
        return INNER(model, x, y, threat.at(0.85 * threat.eps), **rest)

    def far(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
        return INNER(model, x, y, threat.at(1.01 * threat.eps), **rest)

    check_attack(INNER, norms=[norm])
    for broken, promise in ((weak, "finds"), (far, "radius")):
        with pytest.raises(ContractBrokenError) as caught:
            check_attack(broken, norms=[norm])
        assert caught.value.promise == promise


def test_where_the_boundary_must_be_found_can_be_said() -> None:
    def weak(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **rest: Any) -> Tensor:
        return honest(model, x, y, threat.at(0.5 * threat.eps), **rest)

    check_attack(weak, norms=["linf"], boundary=0.45)
    with pytest.raises(ContractBrokenError, match="whose boundary is 55% of the radius away"):
        check_attack(weak, norms=["linf"], boundary=0.55)
    check_attack(nothing, norms=["linf"], boundary=0)
    weak.black_box = True  # type: ignore[attr-defined]
    check_attack(weak, norms=["linf"])


def test_the_norms_are_the_attacks_own() -> None:
    check_attack(ATTACKS["rays"](queries=20), boundary=0)
    with pytest.raises(ContractBrokenError, match=r"RayS \(l2\) fails on 8 images: UserError: .* norms linf"):
        check_attack(ATTACKS["rays"](queries=20), norms=["l2"])


def test_an_attack_may_need_a_model_of_its_own() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(3.0))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * torch.stack((x[..., 0].sum(dim=(1, 2)), x[..., 1].sum(dim=(1, 2))), dim=1)

    def picky(model: nn.Module, x: Tensor, *args: Any, **rest: Any) -> Tensor:
        assert isinstance(model, Halves) or hasattr(model, "model")
        return honest(model, x, *args, **rest)

    with pytest.raises(ContractBrokenError, match="AssertionError"):
        check_attack(picky, norms=["linf"], shape=(3, 2, 2))
    check_attack(picky, norms=["linf"], model=Halves(), shape=(3, 2, 2), boundary=0)


# Objectives


@settings
class Mine(Objective):
    """The smallest objective of a third party."""

    attack: PGD = PGD(steps=3, keep="last")

    def __call__(self, batch: Batch) -> Outcome:
        x_adv = batch.attacked(self.attack)
        logits = batch.adversarial(x_adv)
        return Outcome(loss=batch.cross_entropy(logits).mean(), logits=logits.detach(), x_adv=x_adv)


def plain(change: Callable[[Batch, Tensor, Tensor], Any]) -> type[Objective]:
    """An objective whose outcome is made of the batch, its adversarial images and their logits."""

    class Changed(Mine):
        def __call__(self, batch: Batch) -> Outcome:
            x_adv = batch.attacked(self.attack)
            logits = batch.adversarial(x_adv)
            changes = change(batch, x_adv, logits)
            loss = batch.cross_entropy(logits).mean()
            return Outcome(**{"loss": loss, "logits": logits.detach(), "x_adv": x_adv, **(changes or {})})

    return Changed


class Stateful(Mine):
    def __call__(self, batch: Batch) -> Outcome:
        outcome = super().__call__(batch)
        seen = getattr(self, "seen", 0) + 1
        object.__setattr__(self, "seen", seen)
        return dataclasses.replace(outcome, loss=outcome.loss * (1 + 0.1 * seen))


class Twice(Mine):
    def __call__(self, batch: Batch) -> Outcome:
        batch.clean()
        return super().__call__(batch)


class WrongBranch(Mine):
    forwards: ClassVar[Any] = ("clean", "adversarial")

    def __call__(self, batch: Batch) -> Outcome:
        batch.adversarial(batch.x)
        return super().__call__(batch)


class Deaf(Mine):
    def __call__(self, batch: Batch) -> Outcome:
        return super().__call__(dataclasses.replace(batch, x_adv=None))


class OneSeed(Mine):
    def __call__(self, batch: Batch) -> Outcome:
        return super().__call__(dataclasses.replace(batch, key=Key(batch.key.seed)))


class DoublesTheRadius(Mine):
    def __call__(self, batch: Batch) -> Outcome:
        return super().__call__(dataclasses.replace(batch, threat=batch.threat.at(2 * batch.threat.eps)))


class Shaking(Mine):
    """RAT without its `finally`."""

    def __call__(self, batch: Batch) -> Outcome:
        weight = next(batch.net.parameters())
        before = weight.detach().clone()
        with torch.no_grad():
            weight.add_(1)
        x_adv = batch.attacked(self.attack)
        with torch.no_grad():
            weight.copy_(before)
        return super().__call__(dataclasses.replace(batch, x_adv=x_adv))


class LinearOnly(Mine):
    def __call__(self, batch: Batch) -> Outcome:
        head = next(module for module in batch.net.modules() if isinstance(module, Head))
        if head.angular:
            raise RuntimeError("no angles")
        return super().__call__(batch)


class ThreeClasses(Mine):
    def __call__(self, batch: Batch) -> Outcome:
        outcome = super().__call__(batch)
        outcome.logits.topk(3)
        return outcome


class EvalMode(Mine):
    def __call__(self, batch: Batch) -> Outcome:
        outcome = super().__call__(batch)
        batch.net.eval()
        return outcome


class HeadOnly(Mine):
    def __call__(self, batch: Batch) -> Outcome:
        for name, weight in batch.net.named_parameters():
            weight.requires_grad_("4" in name)
        outcome = super().__call__(batch)
        batch.net.requires_grad_(True)
        return outcome


class Hiding(Mine):
    def __call__(self, batch: Batch) -> Outcome:
        try:
            x_adv = batch.attacked(self.attack)
        except BaseException:
            x_adv = batch.x
        return super().__call__(dataclasses.replace(batch, x_adv=x_adv))


def carrying(value: Callable[[Tensor], Any], *, late: bool = True) -> type[Objective]:
    def change(batch: Batch, x_adv: Tensor, logits: Tensor) -> dict[str, Any]:
        def after() -> None:
            batch.carry["seen"] = value(logits)

        if not late:
            after()
        return {"after": after if late else None}

    return plain(change)


def entropy(logits: Tensor, y: Tensor, **rest: Any) -> Tensor:
    return F.cross_entropy(logits, y, **rest)


def unsmoothed(b: Batch, _: Tensor, z: Tensor) -> dict[str, Any]:
    return {"loss": dataclasses.replace(b, smoothing=0.0).cross_entropy(z).mean()}


BROKEN_OBJECTIVES: dict[str, tuple[Any, str, str]] = {
    "no objective": (lambda: INNER, "kind", "is a PGD, expected a subclass of steelman.objectives.Objective"),
    "a loss a sample": (plain(lambda b, _, z: {"loss": b.cross_entropy(z)}), "scalar", r"a loss of shape \(6,\)"),
    "NaN": (plain(lambda b, _, z: {"loss": z.sum() * float("nan")}), "finite", "gives a loss of nan on a batch"),
    "no gradient": (HeadOnly, "gradient", "gives no gradient for 1.weight on a batch"),
    "no weight at all": (plain(lambda b, _, z: {"loss": torch.tensor(1.0)}), "runs", "depends on no weight"),
    "margin forgotten": (
        plain(lambda b, _, z: {"loss": entropy(z, b.y, label_smoothing=b.smoothing)}),
        "margin",
        r"forgets the head's margin: its loss is [\d.]+ with margin 0 and 0.5; use batch.cross_entropy",
    ),
    "smoothing forgotten": (
        plain(unsmoothed),
        "smoothing",
        r"forgets the label smoothing: its loss is [\d.]+ with 0 and 0.3",
    ),
    "batch norm twice": (Twice, "forwards", r"declares 1 forwards \(adversarial\), and batch norm moved 2 times"),
    "the wrong branch": (WrongBranch, "forwards", "declares 1 clean forwards, and clean batch norm moved 0 times"),
    "images changed": (
        plain(lambda b, *_: {} if b.x.mul_(0.5).sum() else None),
        "input",
        "changes the images or labels",
    ),
    "the global generator": (
        plain(lambda b, _, z: {"loss": b.cross_entropy(z + torch.randn_like(z)).mean()}),
        "generator",
        r"moves a global random generator \(such as 'torch'\) when its loss was computed",
    ),
    "hidden draws": (None, "seed", r"gives another loss for the same seed, .*: its noise must come from `batch.key`"),
    "the same noise": (OneSeed, "noise", "draws the same noise in the next step"),
    "twice the radius": (DoublesTheRadius, "ball", "gives x_adv outside the threat model"),
    "no radius": (None, "zero", "moves images at a radius of zero, by up to 0.05"),
    "shape of logits": (plain(lambda b, _, z: {"logits": z[:, 0].detach()}), "logits", r"logits of shape \(6,\)"),
    "logits with a graph": (plain(lambda b, _, z: {"logits": z}), "logits", "detach them"),
    "eval mode": (EvalMode, "modes", "leaves 6 of 6 modules in another mode"),
    "not one head": (LinearOnly, "runs", "fails with the head 'm-he': RuntimeError: no angles"),
    "not two classes": (ThreeClasses, "runs", "fails with two classes: RuntimeError"),
    "weights after an error": (Shaking, "weights", "changes 1 of 5 weights .* when forward 2 of the model raised"),
    "an error hidden": (Hiding, "errors", "hides that forward 2 of the model was interrupted"),
    "a number carried": (
        carrying(lambda z: float(z.detach().sum())),
        "carry",
        "carries 'seen' as float; a checkpoint holds only tensors",
    ),
    "a graph carried": (carrying(lambda z: z.sum()), "carry", "carries 'seen' with its graph: detach it"),
    "carried too soon": (carrying(lambda z: z.detach().sum(), late=False), "carry", "before the backward pass"),
    "state of its own": (Stateful, "resume", "does not resume from a saved state: .* keep state in batch.carry"),
    "deaf to AWP": (Deaf, "awp", "makes new images although weight perturbation gives it `batch.x_adv`"),
}


class HiddenDraws(Mine):
    def __call__(self, batch: Batch) -> Outcome:
        with torch.random.fork_rng(devices=[]):
            noise = torch.randn(())
        outcome = super().__call__(batch)
        return dataclasses.replace(outcome, loss=outcome.loss * (1 + 0.01 * noise))


class AlwaysSome(Mine):
    """At a radius of zero it still moves."""

    def __call__(self, batch: Batch) -> Outcome:
        if batch.threat.eps == 0:
            batch = dataclasses.replace(batch, x_adv=(batch.x - 0.05).clamp_min(0))
        return super().__call__(batch)


BROKEN_OBJECTIVES["hidden draws"] = (HiddenDraws, *BROKEN_OBJECTIVES["hidden draws"][1:])
BROKEN_OBJECTIVES["no radius"] = (AlwaysSome, *BROKEN_OBJECTIVES["no radius"][1:])


def test_a_small_objective_keeps_them() -> None:
    check_objective(Mine)


@pytest.mark.parametrize("what", BROKEN_OBJECTIVES)
def test_a_broken_objective_is_caught(what: str) -> None:
    broken, promise, words = BROKEN_OBJECTIVES[what]
    with pytest.raises(ContractBrokenError, match=words) as caught:
        check_objective(broken)
    assert caught.value.promise == promise


def test_an_objective_on_a_model_of_ones_own() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))

    check_objective(PGDAT(attack=PGD(steps=2, keep="last")), model=net, shape=(3, 4, 4), classes=5, heads=["linear"])


def test_an_objective_that_learns_from_a_helper_takes_the_given_one() -> None:
    asked = []

    class Noted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            asked.append(len(x))
            return x.flatten(1)[:, :2]

    check_objective(OBJECTIVES["hat"](), helper=Noted(), heads=["he"])
    assert asked


# Heads


class Bare(Head):
    """Without a bias, for heads that have no use for one."""

    def __init__(self, features: int, num_classes: int) -> None:
        super().__init__(features, num_classes, bias=False)


class Unscaled(Bare):
    def forward(self, z: Tensor) -> Tensor:
        return F.linear(z, self.weight)


class Squared(Head):
    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z) * self.scale


class MarginInside(Head):
    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z) - self.scale * self.margin


class MarginOfAll(Head):
    def with_margin(self, logits: Tensor, y: Tensor) -> Tensor:
        return logits - self.scale * self.margin


class MarginUnscaled(Head):
    def with_margin(self, logits: Tensor, y: Tensor) -> Tensor:
        return logits - self.margin * F.one_hot(y, logits.shape[1])


class AnyMargin(Head):
    def with_margin(self, logits: Tensor, y: Tensor) -> Tensor:
        return super().with_margin(logits, y) + 1


class Unguarded(Bare):
    def forward(self, z: Tensor) -> Tensor:
        cos = F.normalize(z, dim=1) @ F.normalize(self.weight, dim=1).T
        return -self.scale * torch.arccos(cos.clamp(-1, 1))


class Unbounded(Bare):
    def forward(self, z: Tensor) -> Tensor:
        return self.scale * F.linear(z / z.norm(dim=1, keepdim=True), self.weight)


class Tall(Head):
    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z).T


class Crowd(Head):
    def forward(self, z: Tensor) -> Tensor:
        return super().forward(z - (z.mean(dim=0) if len(z) > 1 else 0))


class Constant(Bare):
    def forward(self, z: Tensor) -> Tensor:
        return self.scale * F.linear(z, self.weight.detach())


class Idle(Head):
    def forward(self, z: Tensor) -> Tensor:
        return self.scale * F.linear(z, self.weight)


class FullOnly(Bare):
    def forward(self, z: Tensor) -> Tensor:
        if z.dtype == torch.bfloat16:
            z = z.float()
        return self.scale * F.linear(z, self.weight)


class Rough(Head):
    def forward(self, z: Tensor) -> Tensor:
        logits = super().forward(z)
        return logits.round() if logits.dtype == torch.bfloat16 else logits


class Shared(Head):
    def __deepcopy__(self, memo: Any) -> Head:
        return self


class Secret(Head):
    """A setting that is drawn and not in the state."""

    def __init__(self, *args: Any, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.secret = 1 + float(torch.rand(()))

    def forward(self, z: Tensor) -> Tensor:
        return self.secret * super().forward(z)


class Shrinking(Head):
    @torch.no_grad()
    def project(self) -> None:
        self.weight.mul_(0.5)


class Replacing(Head):
    def project(self) -> None:
        self.weight = nn.Parameter(self.weight.detach().clone())


class FailsHalf(Head):
    def forward(self, z: Tensor) -> Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("no autocast")
        return super().forward(z)


BROKEN_HEADS: dict[Any, tuple[str, str]] = {
    nn.Linear: ("kind", "Linear makes a Linear, expected a steelman Head"),
    Tall: ("shape", r"gives logits of shape \(4, 5\) on 5 rows of features, expected \(5, 4\)"),
    Crowd: ("batch", r"gives a sample other logits alone than among 5, by up to \d"),
    Constant: ("gradient", "gives logits without a gradient for any weight"),
    Idle: ("gradient", "gives no gradient for bias"),
    Unscaled: ("scale", "ignores its scale: logits at scale 3 and 6 are the same"),
    Squared: ("scale", "does not multiply by its scale"),
    MarginInside: ("margin", "has its margin in the logits that an attack sees, by up to 0.75"),
    MarginOfAll: ("margin", "by another amount than scale . margin = 0.75, off by up to 0.75"),
    MarginUnscaled: ("margin", "by another amount than scale . margin = 0.75, off by up to 0.5"),
    AnyMargin: ("margin", "changes logits in with_margin although its margin is 0"),
    Unguarded: (
        "gradient",
        r"gives \d+ gradients of features that are NaN or infinite on features parallel to a weight",
    ),
    Unbounded: ("finite", "gives 8 logits that are NaN or infinite on zero features"),
    FailsHalf: ("runs", "fails under autocast to bfloat16: RuntimeError: no autocast"),
    FullOnly: ("runs", "fails in bfloat16: RuntimeError"),
    Rough: ("half", r"gives logits .*bfloat16 that are wrong by 0\.\d+; the largest logit is "),
    Shared: ("copy", "deep copy"),
    Secret: ("state", "gives other logits after state_dict and load_state_dict"),
    Shrinking: ("project", r"changes logits in project\(\)"),
    Replacing: ("project", r"replaces or freezes weights in project\(\)"),
}


@pytest.mark.parametrize("broken", BROKEN_HEADS, ids=lambda broken: broken.__name__)
def test_a_broken_head_is_caught(broken: Any) -> None:
    promise, words = BROKEN_HEADS[broken]
    with pytest.raises(ContractBrokenError, match=words) as caught:
        check_head(broken)
    assert caught.value.promise == promise


# The checks themselves


def test_they_leave_the_global_generator_and_the_threads_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    threads = torch.get_num_threads()
    check_attack(Tiny, norms=["linf"])
    check_objective(Mine, heads=["he"])
    check_head(Head)
    assert torch.equal(torch.rand(2), expected)
    assert torch.get_num_threads() == threads


def test_a_broken_promise_is_an_assertion_and_needs_no_pytest() -> None:
    assert issubclass(ContractBrokenError, AssertionError)
    for path in Path(testing.__path__[0]).glob("*.py"):
        imports = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE)
        assert not {"pytest", "hypothesis", "tests"} & set(imports), path
