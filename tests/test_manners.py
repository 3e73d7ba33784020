"""A model's answer to an image depends on that image alone; and models for which this is nearly so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import PGD
from steelman.attacks.shaped import SHAPES, Shaped, largest, on_grid
from steelman.data.source import ArraySource
from steelman.evaluation.checks import ContractError, check_radius
from steelman.evaluation.evaluate import evaluate
from steelman.evaluation.manners import Manners, Witness, check_manners, differ, otherwise
from steelman.evidence.bundle import read_bundle
from steelman.heads import linear
from steelman.threat import Norm, ThreatModel

CPU = torch.device("cpu")


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()


def data(n: int = 20) -> ArraySource:
    x = torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return ArraySource(x, torch.arange(n) % 4)


class After(nn.Module):
    """A network whose logits pass through a function of the logits and the images."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.function = net(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.net(x), x)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.mul_(0.5).sub_(0.1))
        return out


def test_a_model_that_changes_its_images_is_called_so() -> None:
    with pytest.raises(ContractError, match="changes its images in place") as caught:
        check_manners(InPlace().eval(), data(), CPU)
    assert caught.value.reason == "in place"


def rounded_by_company(z: Tensor, x: Tensor) -> Tensor:
    """Moves by about 2% of the spread from batch to batch, as half precision may."""
    return z * (1 + 0.02 * torch.sin(torch.tensor(float(len(x)))))


def test_a_model_that_computes_coarsely_is_let_in_with_its_grain() -> None:
    manners = check_manners(After(rounded_by_company).eval(), data(), CPU)
    assert not manners.random
    assert 0.002 < manners.grain < 0.05
    assert check_manners(net(), data(), CPU) == Manners()


def test_a_verdict_says_how_coarse_its_model_is(tmp_path: Path) -> None:
    found = evaluate(
        After(rounded_by_company).eval(), data(), None, ThreatModel(eps=0.1), {"pgd": PGD(steps=2)}, out=tmp_path / "o"
    )
    assert found.verdict is not None
    assert found.verdict.word == "upper bound"
    (note,) = (note for note in found.notes if "computes coarsely" in note)
    grain = read_bundle(tmp_path / "o").record["grain"]
    assert f"by up to {grain:.2%} of their spread" in note


def test_a_larger_influence_of_the_batch_is_refused() -> None:
    with pytest.raises(ContractError, match="depends on the others in its batch"):
        check_manners(After(lambda z, x: z + 0.2 * z.mean(dim=0)).eval(), data(), CPU)


def test_a_grain_excuses_no_other_answer() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0], [1.0, 0.99, -1.0]])
    near = logits + torch.tensor([[0.0, 0.03, 0.0]])
    assert differ(near, logits).tolist() == [True, True]
    assert differ(near, logits, 0.02).tolist() == [False, False], "the second changes its answer, but led by less"
    assert differ(logits.flip(1), logits, 0.02).tolist() == [True, True]


def test_weights_in_half_precision_are_let_in_if_the_model_converts_the_images() -> None:
    class Converts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net().bfloat16()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x.bfloat16())
            return out.float()

    assert not check_manners(Converts().eval(), data(), CPU).random
    with pytest.raises(ContractError, match="convert the images inside the model") as caught:
        check_manners(net().bfloat16(), data(), CPU)
    assert caught.value.reason == "precision"


def test_asking_otherwise_finds_company_and_gradient() -> None:
    points = data().images(torch.arange(20))
    honest = otherwise(net(), points, 0.0, 8)
    assert not any(bool(found.any()) for found in honest.values())
    company = otherwise(After(lambda z, x: z + z[:1]).eval(), points, 0.0, 8)
    assert bool(company["company"].double().mean() > 0.5)
    watched = otherwise(After(lambda z, x: -z if torch.is_grad_enabled() else z).eval(), points, 0.0, 8)
    assert bool(watched["gradient"].all())
    assert not bool(watched["company"].any())


class Remembers(nn.Module):
    """Adds the number of earlier questions."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.asked = net(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.asked += 1
        out: Tensor = self.net(x) + self.asked * torch.arange(4.0)
        return out


def test_a_witness_knows_of_no_question() -> None:
    points = data().images(torch.arange(20))
    honest = net()
    found = Witness(honest).contradicts(points, honest(points).detach(), 0.0)
    assert found is not None
    assert not found.any()
    model = Remembers().eval()
    witness = Witness(model)
    for _ in range(5):
        logits = model(points).detach()
    for _ in range(2):  # the witness forgets its own questions, too
        found = witness.contradicts(points, logits, 0.0)
        assert found is not None
        assert bool(found.all())
    fresh = witness.answers(points)
    assert fresh is not None
    first = Remembers().eval()(points[-7:].flip(0)).flip(0)
    assert torch.equal(fresh[-7:], first), "the last points come first, in batches of seven"


def test_a_model_that_cannot_be_copied_has_no_witness() -> None:
    model = net()
    model.scratch = (torch.ones(1, requires_grad=True) * 2,)  # type: ignore[assignment]
    witness = Witness(model)
    assert witness.kept is None
    assert witness.contradicts(torch.rand(2, 1, 4, 4), torch.zeros(2, 4), 0.0) is None


# Shapes.


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_question_has_its_shape(shape: str, norm: Norm) -> None:
    threat = ThreatModel(norm=norm, eps={"linf": 0.1, "l2": 1.0, "l1": 6.0}[norm])
    x = (255 * torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(2))).round() / 255
    asked: list[Tensor] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = linear(3 * 256, 4)

        def forward(self, points: Tensor) -> Tensor:
            asked.append(points.detach().clone())
            out: Tensor = self.head(points.flatten(1)) + torch.tensor([100.0, 0, 0, 0])  # no sample ever leaves
            return out

    model, y = Watched().eval(), torch.zeros(6, dtype=torch.int64)
    Shaped(shape=shape, steps=20)(model, x, y, threat)  # type: ignore[arg-type]
    whole = [points for points in asked if points.shape == x.shape]
    assert len(whole) >= 21
    whole = whole[-21:]
    for number, points in enumerate(whole):
        moved = (points - x).abs()
        assert bool(threat.contains(points, x).all())
        if shape == "grid":
            assert torch.equal((255 * points).round() / 255, points)
        if shape == "few":
            assert float((moved.amax(dim=1) > 1e-7).double().mean()) <= 0.33
        if shape == "growing" and norm == "linf":
            assert float(moved.max()) <= threat.eps * number / 20 + 1e-6
        if shape == "patches" and norm == "linf":
            inside = ((x > 0.2) & (x < 0.8)).all(dim=1).view(6, 8, 2, 8, 2).all(dim=4).all(dim=2)
            patches = (points - x).view(6, 3, 8, 2, 8, 2)
            apart = (patches - patches[:, :, :, :1, :, :1]).abs().amax(dim=(1, 3, 5))
            assert float(apart[inside].max()) < 1e-6
    assert float((whole[-1] - x).abs().max()) > 0


def test_a_point_that_no_file_can_hold_is_not_found() -> None:
    threat, x = ThreatModel(eps=0.4 / 255), torch.full((1, 1, 4, 4), 100.5 / 255)
    model = nn.Sequential(nn.Flatten(), linear(16, 2)).eval()
    found = Shaped(shape="grid").run(model, x, 1 - model(x).argmax(dim=1), threat)
    assert not found.success.any()
    assert torch.equal(found.x_adv, x)
    assert not threat.contains(on_grid(x, x, threat), x).any()


def test_the_largest_pixels_have_all_their_channels() -> None:
    gradient = torch.zeros(1, 3, 2, 2)
    gradient[0, 2, 1, 0] = -5
    assert largest(gradient, 0.25).nonzero().tolist() == [[0, 0, 1, 0]]


# Ranges.


@pytest.mark.parametrize(
    ("threat", "words"),
    [
        (ThreatModel(eps=0.15, low=0, high=255), "0.15 of 255 grey levels in a range of 0 .. 255; did you mean 38.25"),
        (ThreatModel(eps=0.001), "at least half a grey level, got 0.001, which is 0.26 of 255 grey levels"),
        (ThreatModel(norm="l2", eps=0.001), "at least half a grey level"),
    ],
)
def test_a_radius_under_half_a_grey_level_is_refused_unless_said(threat: ThreatModel, words: str) -> None:
    with pytest.raises(ContractError, match="--tiny-eps") as caught:
        check_radius(threat)
    assert words in str(caught.value)
    check_radius(threat, tiny_eps=True)
    check_radius(threat.at(0.6 / 255 * (threat.high - threat.low)))


@pytest.mark.parametrize("make", ["trace", "script"])
def test_a_model_of_torch_s_compiler_can_be_judged(make: str) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval(), torch.rand(20, 1, 4, 4)
    y = net(x).argmax(dim=1)
    compiled: Any = torch.jit.trace(net, x[:2]) if make == "trace" else torch.jit.script(net)  # type: ignore[no-untyped-call]
    plain, other = (
        evaluate(one.eval(), x, y, ThreatModel(eps=0.1), {"pgd": PGD(steps=3)}).verdict for one in (net, compiled)
    )
    assert plain == other


WAYS: dict[str, tuple[str, Callable[[Tensor], bool]]] = {
    "alone": ("company", lambda x: len(x) == 1),
    "twice the same": ("company", lambda x: len(x) > 1 and bool((x == x[:1]).all())),
    "beside a clean image": ("company", lambda x: len(x) == 2 and float(x[0].max()) <= 1 < float(x[1].max())),
    "in another layout": ("company", lambda x: not x.is_contiguous()),
    "in inference mode": ("gradient", lambda x: torch.is_inference_mode_enabled()),
    "with gradients, to plain images": ("gradient", lambda x: torch.is_grad_enabled() and not x.requires_grad),
    "computed images": ("gradient", lambda x: x.grad_fn is not None),
}


def test_a_model_that_takes_one_layout_alone_is_no_liar() -> None:
    model = After(lambda z, x: z + x.view(len(x), -1)[:, :4]).eval()
    points = torch.rand(5, 1, 4, 4)
    with pytest.raises(RuntimeError):
        model(points.transpose(2, 3))
    assert not bool(otherwise(model, points, 0.0, 20)["company"].any())


@pytest.mark.parametrize("name", WAYS)
def test_each_way_of_asking_is_tried(name: str) -> None:
    what, odd = WAYS[name]
    model = After(lambda z, x: z.roll(1, 1) if odd(x) else z).eval()
    points = torch.rand(40, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    points[1:] += 0.5  # the first is clean
    found = otherwise(model, points, 0.0, 20)
    assert bool(found[what].any())
    other = "gradient" if what == "company" else "company"
    assert not bool(found[other].any())
    honest = otherwise(net(), points, 0.0, 20)
    assert not bool(honest["company"].any() | honest["gradient"].any())


def test_a_memory_in_the_weights_is_no_secret_of_the_copies() -> None:
    """Copies that share it, or that are asked in a batch, would begin with it."""

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = net(), nn.Parameter(torch.zeros(1), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            z: Tensor = self.net(x)
            answers = []
            for one in z:
                answers.append(one if self.seen.item() else one.roll(1))
                self.seen.data.add_(1)
            return torch.stack(answers)

    model = Remembers().eval()
    witness, points = Witness(model), torch.rand(20, 1, 4, 4)
    model(points)
    for _ in range(2):  # the second time, the copies are as new as the first
        other = witness.contradicts(points, model(points), 0.0)
        assert other is not None
        assert bool(other[:2].all())
