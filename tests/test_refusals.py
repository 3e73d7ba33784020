"""What cannot be evaluated is refused with a sentence of its own, before any attack has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import PGD, Search
from steelman.attacks.eot import EOT
from steelman.data.source import ArraySource
from steelman.errors import UserError
from steelman.evaluation.checks import ContractError, check_contract, coarse
from steelman.evaluation.evaluate import evaluate
from steelman.evaluation.manners import check_manners
from steelman.threat import ThreatModel
from tests.training_helpers import SHAPE, a_net, some_data

CPU = torch.device("cpu")
THREAT = ThreatModel(eps=0.1)


class Answers(nn.Module):
    """A linear model, whose logits are passed through a function of (logits, images)."""

    def __init__(self, function: Callable[[Tensor, Tensor], Any] = lambda z, x: z, classes: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, 16, generator=torch.Generator().manual_seed(0)))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x.flatten(1) @ self.weight.T, x)


class Loose:
    """A source that checks nothing itself, as a user's own may not."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self._x, self.labels, self.classes = x, y, ("a", "b", "c")
        self.shape = (1, 4, 4)

    def __len__(self) -> int:
        return len(self._x)

    def images(self, index: Tensor, key: Any = None) -> Tensor:
        return self._x[index]


def data(n: int = 12) -> tuple[Tensor, Tensor]:
    source = some_data(n)
    return source.images(torch.arange(n)), source.labels


def changed(at: int, value: float, n: int = 12) -> Loose:
    x, y = data(n)
    x[at, 0, 1, 2] = value
    return Loose(x, y)


def labelled(at: int, value: int) -> Loose:
    x, y = data()
    y = y.clone()
    y[at] = value
    return Loose(x, y)


@pytest.fixture
def attacked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The attacks that ran."""
    ran: list[str] = []
    real = Search.run

    def run(self: Search, *arguments: Any, **options: Any) -> Any:
        ran.append(type(self).__name__)
        return real(self, *arguments, **options)

    monkeypatch.setattr(Search, "run", run)
    return ran


def noisy(z: Tensor, _: Tensor) -> Tensor:
    return z + 1e-3 * torch.randn_like(z)


def seldom(z: Tensor, _: Tensor) -> Tensor:
    return torch.where(torch.rand(len(z), 1) < 0.2, z + 1, z)


class Counting(nn.Module):
    """Another answer each time, without drawing a random number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.net = Answers()

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        out: Tensor = self.net(x) + 0.01 * self.calls * torch.arange(3)
        return out


def unrecorded(width: int = 12) -> nn.Module:
    norm = nn.BatchNorm1d(width, track_running_stats=False)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), norm, nn.Linear(width, 3)).eval()


MODELS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "NaN logits": (lambda: Answers(lambda z, x: z * torch.nan), "logits", "NaN or infinite logits for 4 of 4 clean"),
    "an infinite logit": (
        lambda: Answers(lambda z, x: torch.where(torch.arange(len(z))[:, None] == 3, torch.inf, z)),
        "logits",
        "NaN or infinite logits for 1 of 4",
    ),
    "one class": (lambda: Answers(classes=1), "classes", "at least two classes, got 1"),
    "labels beyond the classes": (lambda: Answers(classes=2), "labels", "label 2 at index 2, expected 0 .. 1"),
    "one logit a batch": (
        lambda: Answers(lambda z, x: z.mean(dim=0)),
        "shape",
        "expected logits of shape (4, classes)",
    ),
    "a map of logits": (lambda: Answers(lambda z, x: z[..., None]), "shape", "got (4, 3, 1)"),
    "answers instead of logits": (lambda: Answers(lambda z, x: z.argmax(1)[:, None].expand(-1, 3)), "shape", "int64"),
    "another image size": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(25, 3)), "shape", "cannot take images"),
    "noise": (lambda: Answers(noisy), "random", "eot"),
    "noise now and then": (lambda: Answers(seldom), "random", "eot"),
    "a counter": (Counting, "random", "the same images gave logits"),
    "dropout that is always on": (
        lambda: Answers(lambda z, x: nn.functional.dropout(z, 0.5, training=True)),
        "random",
        "eot",
    ),
    "train mode": (lambda: a_net("linear").train(), "train mode", "call model.eval()"),
    "half precision": (lambda: a_net("linear").half(), "precision", "weights are torch.float16"),
    "batch norm without statistics": (unrecorded, "batch", "another size"),
    "the batch's mean": (lambda: Answers(lambda z, x: z - 0.1 * z.mean(dim=0)), "batch", "depends on the others"),
    "tiny logits less the batch's mean": (
        lambda: Answers(lambda z, x: 1e-7 * (z - 0.1 * z.mean(dim=0))),
        "batch",
        "depends on the others",
    ),
    "the image before": (lambda: Answers(lambda z, x: z + 0.5 * z.roll(1, 0)), "batch", "depends on the others"),
    "the batch's size": (lambda: Answers(lambda z, x: z.roll(int(len(z) > 40), 1)), "batch", "depends on the others"),
    "noise of a fixed seed": (
        lambda: Answers(lambda z, x: z + torch.randn(z.shape, generator=torch.Generator().manual_seed(1))),
        "batch",
        "depends on the others",
    ),
    "an answer for attackers": (
        lambda: Answers(lambda z, x: -z if torch.is_grad_enabled() else z),
        "gradient mode",
        "another model",
    ),
    "an answer for points with a gradient": (
        lambda: Answers(lambda z, x: -z if x.requires_grad else z),
        "gradient mode",
        "another model",
    ),
    "a large offset": (lambda: Answers(lambda z, x: z + 1e7), "coarse", "roundings"),
}


@pytest.mark.parametrize(
    ("what", "suite"),
    [
        *((what, "fast") for what in MODELS),
        *((what, suite) for what in ("labels beyond the classes", "noise") for suite in ("standard", "full")),
    ],
)
def test_a_model_that_cannot_be_judged_is_refused(what: str, suite: str, attacked: list[str]) -> None:
    make, reason, words = MODELS[what]
    with pytest.raises(ContractError) as caught:
        evaluate(make(), *data(), THREAT, suite)
    assert (caught.value.reason, attacked) == (reason, [])
    assert words in str(caught.value)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("what", ["the batch's mean", "batch norm without statistics", "noise", "train mode"])
def test_a_single_image_is_enough_to_notice(what: str, n: int, attacked: list[str]) -> None:
    make, reason, _ = MODELS[what]
    with pytest.raises(ContractError) as caught:
        evaluate(make(), *data(n), THREAT, "fast")
    assert (caught.value.reason, attacked) == (reason, [])


IMAGES: dict[str, tuple[Callable[[], Any], str]] = {
    "above the range": (lambda: changed(3, 1.5), "expected pixels in [0, 1], got"),
    "below the range": (lambda: changed(0, -0.1), "expected pixels in [0, 1], got -0.1"),
    "NaN": (lambda: changed(1, float("nan")), "expected finite pixels, got 1"),
    "infinite": (lambda: changed(2, float("inf")), "expected finite pixels"),
    "labels too large": (lambda: labelled(11, 3), "label 3 at index 11, expected 0 .. 2"),
    "negative labels": (lambda: labelled(5, -1), "label -1 at index 5"),
    "none": (lambda: Loose(torch.zeros(0, *SHAPE), torch.zeros(0, dtype=torch.int64)), "at least one image, got none"),
}


@pytest.mark.parametrize("what", IMAGES)
def test_bad_images_and_labels_are_refused(what: str, attacked: list[str]) -> None:
    make, words = IMAGES[what]
    with pytest.raises(ContractError) as caught:
        evaluate(Answers(), make(), None, THREAT, "fast")
    assert words in str(caught.value)
    assert attacked == []


ARRAYS: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "NaN": (lambda: (data()[0] * torch.nan, data()[1]), "expected finite pixels"),
    "0 .. 255 as floats": (lambda: (255 * data()[0], data()[1]), "divide by 255"),
    "integers": (lambda: (data()[0].long(), data()[1]), "expected images as uint8, or as floating point"),
    "labels as floats": (lambda: (data()[0], data()[1].float()), "expected integer labels, got torch.float32"),
    "labels as a column": (lambda: (data()[0], data()[1][:, None]), "expected one label for each of 12 images"),
    "fewer labels": (lambda: (data()[0], data()[1][:-1]), "expected one label for each of 12 images"),
    "no labels": (lambda: (data()[0], None), "expected labels y with images x"),
    "negative labels": (lambda: (data()[0], data()[1] - 1), "label -1 at index 0"),
    "flat images": (lambda: (data()[0].flatten(1), data()[1]), "expected images of shape (N, C, H, W)"),
    "no images": (lambda: (data()[0][:0], data()[1][:0]), "expected at least one image"),
    "labels twice": (lambda: (ArraySource(*data()), data()[1]), "expected y None with a source"),
}


@pytest.mark.parametrize("what", ARRAYS)
def test_bad_arrays_are_refused(what: str, attacked: list[str]) -> None:
    make, words = ARRAYS[what]
    model = Answers()
    with pytest.raises(UserError) as caught:
        evaluate(model, *make(), THREAT, "fast")
    assert words in str(caught.value)
    assert attacked == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"suite": "standart"}, "unknown suite 'standart' (did you mean 'standard'?)"),
        ({"suite": {}}, "expected at least one attack"),
        ({"minutes": 0}, "minutes: expected a time above 0, got 0"),
        ({"minutes": -1.0}, "minutes: expected a time above 0, got -1.0"),
        ({"minutes": float("nan")}, "minutes: expected a time above 0"),
        ({"threat": ThreatModel(eps=0)}, "eps: expected a radius above 0, got 0"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], words: str, attacked: list[str]) -> None:
    given = {"threat": THREAT, "suite": "fast", **options}
    with pytest.raises(UserError) as caught:
        evaluate(Answers(), *data(), given.pop("threat"), given.pop("suite"), **given)
    assert words in str(caught.value)
    assert attacked == []


@pytest.mark.parametrize("eps", [-0.1, float("nan"), float("inf")])
def test_a_radius_that_is_none_makes_no_threat_model(eps: float) -> None:
    with pytest.raises(ValueError, match="eps"):
        ThreatModel(eps=eps)


@pytest.mark.parametrize("thing", [lambda x: x, None, "a model", {"weight": torch.zeros(3)}])
def test_what_is_no_module_is_refused(thing: Any) -> None:
    with pytest.raises(ContractError, match=r"expected a torch\.nn\.Module") as caught:
        check_contract(thing, ArraySource(*data()), THREAT, CPU)
    assert caught.value.reason == "model"


def test_an_eot_suite_may_ask_a_random_model_and_is_told_that_it_is_one() -> None:
    source = ArraySource(*data())
    assert check_manners(Answers(noisy), source, CPU, random=True).random
    assert not check_manners(Answers(), source, CPU, random=True).random
    found = evaluate(Answers(noisy), *data(), THREAT, {"eot": EOT(attack=PGD(steps=3), draws=2)})
    assert found.verdict is not None
    assert found.verdict.trust == "suspect"
    assert any("random" in reason for reason in found.verdict.reasons)


@pytest.mark.parametrize(
    "make",
    [
        lambda: a_net("linear").eval(),
        lambda: a_net("he").eval(),
        lambda: a_net("linear").double().eval(),
        lambda: Answers(lambda z, x: 1e6 * z),
        lambda: Answers(lambda z, x: 1e-12 * z),
        lambda: Answers(lambda z, x: z + 1000),
        lambda: Answers(lambda z, x: z.bfloat16()),
        lambda: Answers().train(),  # in which mode it answers is all one
    ],
)
def test_an_honest_model_is_let_in_and_left_as_it_was(make: Callable[[], nn.Module]) -> None:
    model, source = make(), some_data(12)
    state, modes = {k: v.clone() for k, v in model.state_dict().items()}, [m.training for m in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert check_contract(model, source, THREAT, CPU) == 3
    assert not check_manners(model, source, CPU).random
    assert torch.equal(torch.rand(4), expected), "the global generator has moved"
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_a_stateful_model_is_left_as_it_was_when_it_is_refused() -> None:
    model = Counting()
    with pytest.raises(ContractError):
        evaluate(model, *data(), THREAT, "fast")
    assert model.calls == 0


def test_the_contract_costs_a_few_forwards() -> None:
    seen: list[int] = []

    def counted(z: Tensor, x: Tensor) -> Tensor:
        seen.append(len(x))
        return z

    model = Answers(counted)
    source = some_data(300)
    check_contract(model, source, THREAT, CPU)
    check_manners(model, source, CPU)
    assert sum(seen) < 200


def test_what_is_lost_in_roundings_depends_on_the_precision() -> None:
    z = torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    assert coarse(z).tolist() == [False, False]
    assert coarse(z + 1e6).tolist() == [True, True]
    assert coarse(z.double() + 1e6).tolist() == [False, True]
