"""A wrong kind of argument is one sentence, in every function of the public interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import steelman
from steelman.arguments import device_from, number_of, path_of
from steelman.attacks import ATTACKS, PGD
from steelman.data.source import ArraySource
from steelman.errors import UserError
from steelman.evaluation.distance import distance
from steelman.evaluation.stages import protocol
from steelman.models.classifier import build_classifier
from steelman.objectives.pgd_at import PGDAT
from steelman.recipe import parse, read
from steelman.settings import MOST
from steelman.threat import ThreatModel
from steelman.training import Training

X, Y, T = torch.rand(12, 1, 4, 4), torch.arange(12) % 3, ThreatModel(eps=0.1)
SUITE = {"one": PGD(steps=1)}
Call = Callable[..., object]


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()


def criterion(**given: Any) -> object:
    made = {name: given.pop(name) for name in ("objective", "model", "threat", "seed", "net") if name in given}
    one = steelman.Criterion(**{"objective": PGDAT(attack=PGD(steps=1)), "model": net().train(), "threat": T, **made})
    return one(**{"x": X, "y": Y, **given})


def evaluate(**given: Any) -> object:
    return steelman.evaluate(**{"model": net(), "x": X, "y": Y, "threat": T, "suite": SUITE, **given})


def fit(**given: Any) -> object:
    data = {"data": (given.pop("x", X), given.pop("y", Y)), **given}
    how = {"epochs": 1, "suite": protocol(SUITE), "console": Console(quiet=True)}
    return steelman.fit(**{"model": net(), "threat": T, **how, **data})


def near(**given: Any) -> object:
    attack = ATTACKS["deepfool"](steps=1)
    return distance(**{"model": net(), "x": X, "y": Y, "threat": T, "attack": attack, **given})


def transfer(**given: Any) -> object:
    data = (given.pop("x", X), given.pop("y", Y))
    models = {"a": given.pop("model")} if "model" in given else {"a": net()}
    attack = PGD(steps=1, keep="last")
    return steelman.transfer(
        **{"sources": models, "targets": None, "data": data, "threat": T, "attack": attack, **given}
    )


def attack(**given: Any) -> object:
    return PGD(steps=1)(**{"model": net(), "x": X, "y": Y, "threat": T, **given})


def verify(**given: Any) -> object:
    return steelman.verify(**{"folder": Path("none"), **given})


ALL = {
    "evaluate": evaluate,
    "fit": fit,
    "distance": near,
    "transfer": transfer,
    "criterion": criterion,
    "attack": attack,
}
WRONG: dict[str, list[object]] = {
    "model": [None, "mlp", nn.Linear, lambda x: x, net().to("meta")],
    "x": [X.to("meta"), X.to_sparse(), X.to(torch.complex64), X.to(torch.float8_e4m3fn), X > 0.5, X[:0], None, "x"],
    "y": [
        Y.to("meta"),
        Y.to_sparse(),
        torch.where(Y > 1, 2**62, Y),
        Y.float(),
        -Y,
        Y[:, None],
        None,
        np.array(["a"] * 12),
    ],
    "threat": [None, "linf", 0.1, ThreatModel, {"eps": 0.1}],
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("name", ALL)
def test_models_images_labels_and_threats(name: str, kind: str) -> None:
    for value in WRONG[kind]:
        with pytest.raises(UserError) as caught:
            ALL[name](**{kind: value})
        assert "\n" not in str(caught.value)


OTHERS: list[tuple[Call, dict[str, object], str]] = [
    (evaluate, {"out": 5}, "out: expected a path, got 5"),
    (evaluate, {"out": "a\0b"}, "out: expected a path"),
    (evaluate, {"out": "a" * 5000}, "out: expected a path"),
    (evaluate, {"name": 5}, "name: expected a text, got 5"),
    (evaluate, {"minutes": "x"}, "minutes: expected a time above 0, got 'x'"),
    (evaluate, {"minutes": float("nan")}, "minutes: expected a time above 0"),
    (evaluate, {"batch_size": 10**20}, "batch_size: expected a whole number of at most 64 bits"),
    (evaluate, {"seed": 2**70}, "seed: expected a whole number of at most 64 bits"),
    (evaluate, {"suite": 5}, "suite: expected a name, a Suite or attacks by label, got int"),
    (fit, {"epochs": 1e20}, "epochs: expected at most 1,000,000, got"),
    (fit, {"batch_size": 1e20}, "batch_size: expected at most 1,000,000, got 1e"),
    (fit, {"seed": 2**70}, "seed: expected at most 18,446,744,073,709,551,615"),
    (fit, {"augment": PGD(steps=1)}, "augment: expected one such as CropFlip"),
    (fit, {"helper": "x"}, "helper: expected a torch.nn.Module, got str"),
    (fit, {"out": ["x"]}, "out: expected a path"),
    (transfer, {"sources": net()}, "sources: expected models by name"),
    (transfer, {"targets": [net()]}, "targets: expected models by name"),
    (transfer, {"data": X}, r"data: expected \(images, labels\) or a source"),
    (transfer, {"attack": PGD}, "attack: expected one such as PGD"),
    (transfer, {"model": net().double()}, "a: the model is in float64"),
    (criterion, {"progress": "x"}, "progress: expected the share of the training that is done"),
    (criterion, {"eps": "x"}, "eps: expected a number, got 'x'"),
    (criterion, {"seed": "x"}, "seed: expected a whole number, got 'x'"),
    (criterion, {"net": "x"}, "net: expected a torch.nn.Module, got str"),
    (criterion, {"index": Y.to("meta")}, "expected index as a plain tensor of numbers, got a meta one"),
    (verify, {"folder": None}, "folder: expected a path, got None"),
    (verify, {"device": "nonsense"}, "device: expected a device of this machine"),
    (verify, {"device": "cuda:99"}, "device: expected a device of this machine"),
    (verify, {"device": 1j}, "device: expected a device of this machine"),
    (verify, {"source": X}, "source: expected a source, such as"),
    (verify, {"model": "x", "source": ArraySource(X, Y)}, "model: expected a torch.nn.Module, got str"),
    (steelman.load, {"place": 5}, "place: expected a path, got 5"),
    (steelman.load, {"place": "a" * 5000}, "place: expected a path"),
    (steelman.load, {"place": "x", "model": "mlp"}, "model: expected a torch.nn.Module, got str"),
    (steelman.load, {"place": "x", "allow_import": 5}, "allow_import: expected a list of modules, got 5"),
    (steelman.compare, {"folders": ["a", "b"]}, "folders: expected folders by name"),
    (steelman.compare, {"folders": {"a": 5, "b": 6}}, "folder: expected a path, got 5"),
    (steelman.embed, {"model": None}, "embed: expected a torch.nn.Module, got NoneType"),
    (steelman.embed, {"model": nn.Linear}, "got Linear; make one first"),
    (steelman.embed, {"model": net(), "layer": ["x"]}, "is not a linear layer of the model"),
    (steelman.embed, {"model": net(), "copy": X}, "copy: expected True or False"),
    (steelman.embed, {"model": net().to("meta")}, "they are on the meta device"),
    (steelman.wrap, {"model": "mlp"}, "wrap: expected a torch.nn.Module, got str"),
    (steelman.wrap, {"model": net(), "mean": X}, "mean: expected a number, or one for each channel"),
]


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_other_arguments(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call, given, expected = OTHERS[number]
    with pytest.raises(UserError, match=expected) as caught:
        call(**given)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert not list(tmp_path.iterdir())


def test_what_clearly_should_work(tmp_path: Path) -> None:
    evaluate(x=X.numpy(), y=Y.numpy(), out=str(tmp_path / "a"))
    evaluate(x=X.double(), y=Y.to(torch.int8), minutes=torch.tensor(3))
    assert steelman.verify(str(tmp_path / "a"), device="cpu").samples == 12  # type: ignore[arg-type]
    assert device_from("device", "cpu") == torch.device("cpu")
    assert number_of("minutes", np.float32(2)) == 2
    assert path_of("out", str(tmp_path)) == tmp_path


LIMITS = {
    "training.epochs": 1e20,
    "training.batch_size": 1e20,
    "training.seed": "1" * 19 + "00",
    "compute.devices": 10**9,
    "compute.nodes": 10**9,
    "compute.workers": 10**9,
    "validation.size": 1e11,
    "evaluation.samples": 1e20,
    "evaluation.batch_size": 1e20,
    "objective.attack.steps": 1e23,
    "objective.attack.restarts": 1e9,
    "around.patience": 1e20,
    "validation.attack": {"name": "square", "queries": 1e20},
    "evaluation.attacks": {"x": {"name": "rays", "queries": 1e20}},
}


@pytest.mark.parametrize("key", LIMITS)
def test_a_recipe_s_numbers_have_limits(key: str) -> None:
    source, origin = read("digits-pgd-at", ["data.name=digits"])
    *parents, last = key.split(".")
    place = source
    for parent in parents:
        place = place.setdefault(parent, {})
    place[last] = LIMITS[key]
    with pytest.raises(UserError, match=r"expected at most [0-9,]+, got"):
        parse(source, origin)


@pytest.mark.parametrize(
    ("name", "width", "expected"),
    [
        ("mlp", 10**11, "a width that is a positive integer of at most 65,536"),
        ("wrn-34-10", 60_000, "expected at most 4,294,967,296 weights, got"),
    ],
)
def test_a_model_has_a_limit(name: str, width: int, expected: str) -> None:
    """The model is refused before any memory is set aside."""
    with pytest.raises(UserError, match=expected):
        build_classifier(name, input_shape=(3, 32, 32), num_classes=10, width=width)


def test_the_limits_are_named() -> None:
    with pytest.raises(UserError, match=rf"steps: expected at most {MOST:,}, got 1e\+23"):
        PGD(steps=1e23)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="epochs: expected at most 1,000,000, got"):
        Training(epochs=10**9)
