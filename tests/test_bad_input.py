"""A user's mistakes on the command line end in one sentence and exit code 2, and leave nothing behind."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn

from steelman import cli
from steelman import recipe as recipes
from steelman.attacks import ATTACKS
from steelman.cli import demo
from steelman.data import DATASETS
from steelman.data.source import ArraySource
from steelman.errors import UserError
from steelman.evaluation.distance import distance
from steelman.evaluation.evaluate import evaluate
from steelman.threat import ThreatModel
from steelman.training import run

Fails = Callable[..., str]
TINY = (
    "training.epochs=1",
    "objective.attack.steps=1",
    "validation.samples=20",
    "evaluation.samples=20",
    "evaluation.suite=null",
    "evaluation.attacks={FGSM: fgsm}",
    "compute.accelerator=cpu",
)
RECIPE = "digits-pgd-at"


def five_classes() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5))


def other_images() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 10))


def two_answers() -> nn.Module:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    return Both()


def not_finite() -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with torch.no_grad():
        net[1].bias.fill_(float("nan"))  # type: ignore[operator]
    return net


@pytest.fixture
def fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fails:
    """Run ``steelman ...`` in an empty folder and expect a sentence; returns it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEELMAN_DATA", str(tmp_path / "data"))
    # No test here may go to the network, whatever it asks for.
    monkeypatch.setattr("socket.create_connection", _no_network)
    monkeypatch.setattr("socket.getaddrinfo", _no_network)

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["steelman", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        _, err = capsys.readouterr()
        assert ended.value.code == 2, err
        assert err.startswith("error: "), err
        assert err.count("error:") == 1, err
        assert "Traceback" not in err
        assert "site-packages" not in err
        return err.removeprefix("error: ")

    return call


def _no_network(*_: object, **__: object) -> None:
    raise OSError("there is no network in this test")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    source, origin = recipes.read(RECIPE, TINY)
    run.train(source, folder, console=Console(quiet=True), origin=origin)
    return folder


@pytest.fixture
def own(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to be spoiled."""
    shutil.copytree(finished, tmp_path / "own")
    return tmp_path / "own"


TRAINING: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown key": (("training.epoch=3",), "training.epoch: unknown key"),
    "misspelt attack": (("objective.attack.name=pdg",), "unknown training attack 'pdg' (did you mean 'pgd'?)"),
    "misspelt option": (("objective.attack.step=3",), "(did you mean 'steps'?)"),
    "negative eps": (("threat.eps=-1",), "threat.eps: input should be greater than or equal to 0, got -1"),
    "zero eps": (("threat.eps=0",), "threat.eps: expected a radius above 0"),
    "eps in 0..255": (
        ("threat.eps=8",),
        "threat.eps: expected a radius of at most 1 in a range of 0 .. 1, got 8; did you",
    ),
    "eps beyond every image": (("threat={norm: l1, eps: 65}",), "for images of shape (1, 8, 8) in l1, got 65"),
    "no number": (("training.epochs=many",), "training.epochs: "),
    "negative rate": (("training.lr=-1",), "training.lr: expected at least 0"),
    "no override": (("epochs",), "expected key=value"),
    "no yaml": (("training.lr={",), "is not YAML: line"),
    "unknown recipe model": (("model=mpl",), "(did you mean 'mlp'?)"),
    "a model too large for the images": (("model=smallcnn",), "at least 16x16, got 8x8"),
    "a bad width": (("model.width=-1",), "width"),
    "no such module": (("model=no.such:thing",), "cannot import 'no.such:thing'"),
    "a model of other classes": (
        ("model=tests.test_bad_input:five_classes",),
        "expected 0 .. 4 (the model has 5 classes)",
    ),
    "a model of other images": (
        ("model=tests.test_bad_input:other_images",),
        "the model cannot take images of shape (1, 8, 8)",
    ),
    "a model with two answers": (("model=tests.test_bad_input:two_answers",), "no logits are found in it"),
    "no weights": (("model={name: mlp, weights: none.safetensors}",), "no weights at none.safetensors"),
    "too large a validation set": (("validation.size=100000",), "expected a validation set of 1 .. "),
    "three means": (("model={name: mlp, mean: [0.1, 0.2, 0.3]}",), "mean: expected 1 or 1 values"),
    "a batch that does not divide": (("training.batch_size=33", "compute.devices=2"), "multiple of the number of"),
    "a dataset that is not here": (("data=cifar10",), "cifar10 is not on this machine; run: steelman data get cifar10"),
    "a folder without a root": (("data=folder",), "needs root=PATH"),
    "a root that is not there": (("data={name: folder, root: nowhere}",), "nowhere"),
    "an attack of a reserved name": (
        ("evaluation.attacks={clean: fgsm}",),
        "attacks.clean: is the name of another",
    ),
}
if not torch.cuda.is_available():
    TRAINING["no such hardware"] = (("compute.accelerator=cuda",), "compute: this machine cannot do that")


@pytest.mark.parametrize("name", TRAINING)
def test_training_that_cannot_start_leaves_no_folder(name: str, fails: Fails, tmp_path: Path) -> None:
    overrides, expected = TRAINING[name]
    message = fails("train", RECIPE, *TINY, *overrides, "--out", "run")
    assert expected in message
    assert not (tmp_path / "run").exists(), "the next try must not trip over this one"


def test_recipes_that_are_not_there(fails: Fails, tmp_path: Path) -> None:
    assert "unknown recipe 'digits' " in fails("train", "digits")
    assert "no recipe at none.yaml" in fails("train", "none.yaml")
    (tmp_path / "bad.yaml").write_text("name: [")
    assert "bad.yaml is not YAML" in fails("train", "bad.yaml")
    (tmp_path / "folder.yaml").mkdir()
    assert "folder.yaml" in fails("train", "folder.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert "expected a mapping" in fails("train", "empty.yaml")


def test_folders_that_are_taken(fails: Fails, finished: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert "already holds a run; choose another --out" in fails("train", RECIPE, *TINY, "--out", str(finished))
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("mine")
    assert "taken is not empty" in fails("train", RECIPE, *TINY, "--out", "taken")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["thesis.txt"]


def test_an_interrupted_run_says_how_to_go_on(fails: Fails, own: Path) -> None:
    (own / "run.json").unlink()
    assert f"go on with: steelman resume {own}" in fails("train", RECIPE, *TINY, "--out", str(own))


def test_folders_that_cannot_be_written(fails: Fails, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot write the run to file/run: Not a directory" in fails("train", RECIPE, *TINY, "--out", "file/run")
    assert "cannot write the run to file: File exists" in fails("train", RECIPE, *TINY, "--out", "file")
    message = fails("evaluate", str(finished), "--samples", "5", "--attack", "fgsm", "--out", "file/there")
    assert "file" in message


def test_a_full_disk_while_training(fails: Fails, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("steelman.training.checkpoint._write", full)
        message = fails("train", RECIPE, *TINY, "--out", "run")
    assert "No space left on device" in message
    assert "steelman resume run" in message
    run.resume(tmp_path / "run", Console(quiet=True))
    assert (tmp_path / "run" / "run.json").is_file()


def test_resuming_what_is_no_run(fails: Fails, finished: Path, tmp_path: Path) -> None:
    assert "nowhere is not a run: it has no recipe.yaml" in fails("resume", "nowhere")
    (tmp_path / "empty").mkdir()
    assert "empty is not a run" in fails("resume", "empty")
    assert "is finished; its report is" in fails("resume", str(finished))


def test_resuming_a_run_whose_recipe_is_damaged(fails: Fails, own: Path) -> None:
    (own / "run.json").unlink()
    (own / "recipe.yaml").write_text("name: [")
    assert "recipe.yaml is not YAML" in fails("resume", str(own))
    (own / "recipe.yaml").write_text("")
    assert "expected a mapping" in fails("resume", str(own))
    (own / "recipe.yaml").write_text("name: x\n")
    assert "threat: is required and missing" in fails("resume", str(own))


def damage_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(bytes(content))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit in the weights": (damage_weights, "model.safetensors is damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is damaged"),
    "a description cut off": (lambda f: (f / "model.json").write_text('{"format": 1,'), "model.json is damaged"),
    "an empty description": (lambda f: (f / "model.json").write_text("{}"), "model.json is damaged"),
    "a description that is a list": (lambda f: (f / "model.json").write_text("[]"), "model.json is damaged"),
    "no model yet": (lambda f: (f / "model.json").unlink(), "the run is not finished; go on with: steelman resume"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_evaluating_a_damaged_run(name: str, fails: Fails, own: Path) -> None:
    damage, expected = DAMAGES[name]
    damage(own)
    assert expected in fails("evaluate", str(own), "--samples", "5")


def test_evaluating_what_is_no_run_and_no_model(fails: Fails, finished: Path, tmp_path: Path) -> None:
    assert "no run at runs/nowhere" in fails("evaluate", "runs/nowhere", "--data", "digits", "--eps", "0.1")
    (tmp_path / "empty").mkdir()
    assert "no model in empty: it is not a run" in fails("evaluate", "empty")
    named = ("--data", "digits", "--eps", "0.1")
    assert "unknown model 'mpl' (did you mean 'mlp'?)" in fails("evaluate", "mpl", *named)
    assert "--weights: expected a file of trained weights" in fails("evaluate", "mlp", *named)
    assert "--data: expected a dataset" in fails("evaluate", "mlp", "--eps", "0.1")
    assert "--eps: expected a radius" in fails("evaluate", "mlp", "--data", "digits")
    assert "unknown dataset 'digit'" in fails("evaluate", "mlp", "--data", "digit", "--eps", "0.1")
    assert "no weights at w.pt" in fails("evaluate", "mlp", *named, "--weights", "w.pt")
    factory = ("evaluate", "tests.test_bad_input:five_classes", *named)
    assert "--layout" in fails(*factory, "--random-weights", "--layout", "trades-smallcnn")
    assert "five_classes makes a model with new random weights" in fails(*factory)


QUESTIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "misspelt attack": (("--attack", "pdg"), "unknown attack 'pdg' (did you mean 'pgd'?)"),
    "misspelt option": (("--attack", "pgd:step=3"), "(did you mean 'steps'?)"),
    "no option": (("--attack", "pgd:steps"), "key=value"),
    "not yaml": (("--attack", "pgd:steps=["), "is not YAML: line"),
    "negative eps": (("--eps", "-1"), "threat model: eps: input should be greater than or equal to 0"),
    "zero eps": (("--eps", "0"), "eps: expected a radius above 0"),
    "eps in 0..255": (
        ("--eps", "8"),
        "expected a radius of at most 1 in a range of 0 .. 1, got 8; did you mean 8/255?",
    ),
    "eps beyond every image": (("--norm", "l2", "--eps", "9"), "in l2, got 9; did you mean 9/255?"),
    "no number": (("--eps", "small"), "threat model: eps: "),
    "NaN": (("--eps", "nan"), "threat model: eps: "),
    "unknown norm": (("--norm", "l3", "--eps", "1"), "--norm: unknown norm "),
    "another norm at the same radius": (("--norm", "l2"), "--eps: expected a radius for norm l2"),
    "no samples": (("--samples", "0"), "samples: expected at least 1, got 0"),
    "a root that the dataset has not": (("--root", "here"), "root"),
    "weights beside a run": (("--weights", "w.pt"), "a run has its own"),
    "a head beside a run": (("--head", "he"), "a run has its own"),
    "a dataset that is not here": (("--data", "mnist"), "mnist is not on this machine"),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_to_a_run_that_cannot_be_answered(name: str, fails: Fails, finished: Path) -> None:
    options, expected = QUESTIONS[name]
    before = sorted(path.name for path in finished.rglob("*"))
    assert expected in fails("evaluate", str(finished), *options)
    assert sorted(path.name for path in finished.rglob("*")) == before


def test_an_evaluation_is_not_overwritten(fails: Fails, own: Path, tmp_path: Path) -> None:
    report = (own / "report.html").read_bytes()
    assert "already holds a report" in fails("evaluate", str(own), "--samples", "5", "--out", str(own))
    assert "already holds a report" in fails("evaluate", str(own), "--samples", "5", "--out", str(own / "attacks"))
    assert (own / "report.html").read_bytes() == report


def test_models_that_cannot_be_evaluated(fails: Fails, tmp_path: Path) -> None:
    named = ("--data", "digits", "--eps", "0.1", "--samples", "8")
    here, untrained = "tests.test_bad_input", "--random-weights"
    assert "the model has 5 classes" in fails("evaluate", f"{here}:five_classes", *named, untrained)
    assert "cannot take images of shape (1, 8, 8)" in fails("evaluate", f"{here}:other_images", *named, untrained)
    assert "NaN or infinite logits" in fails("evaluate", f"{here}:not_finite", *named, untrained)
    assert "the model has 5 classes" in fails("distance", f"{here}:five_classes", *named, untrained)
    assert "should give a torch.nn.Module" in fails("evaluate", f"{here}:_no_module", *named)
    save_file({"w": torch.zeros(3)}, tmp_path / "w.safetensors")
    assert "belongs to another model" in fails("evaluate", "mlp", *named, "--weights", "w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"garbage")
    assert "is damaged or is not a safetensors file" in fails("evaluate", "mlp", *named, "--weights", "w.safetensors")


def _no_module() -> str:
    return "no module"


def test_ones_own_arrays(fails: Fails, finished: Path, tmp_path: Path) -> None:
    """Images in 0..255 as floats, a label 37, images of another size."""
    rng = np.random.default_rng(0)
    good = rng.random((20, 1, 8, 8), dtype=np.float32)
    labels = np.arange(20) % 10

    def save(images: np.ndarray, y: np.ndarray) -> str:
        path = tmp_path / "arrays.npz"
        np.savez(path, train_images=images, train_labels=y, test_images=images, test_labels=y)
        return str(path)

    ask = ("evaluate", str(finished), "--data", "arrays", "--samples", "5", "--root")
    assert re.search(r"got 0.* \.\. 25\d.*; divide by 255", fails(*ask, save(good * 255, labels)))
    assert "NaN" in fails(*ask, save(np.where(good > 0.9, np.nan, good), labels))
    assert "label 37 at index 3" in fails(*ask, save(good, np.where(labels == 3, 37, labels)))
    large = rng.random((20, 1, 12, 12), dtype=np.float32)
    assert "and those of arrays are (1, 12, 12)" in fails(*ask, save(large, labels))
    (tmp_path / "arrays.npz").write_bytes(b"garbage")
    assert "arrays.npz" in fails(*ask, str(tmp_path / "arrays.npz"))


def test_pixels_up_to_255_are_named_as_such() -> None:
    """By an attack, by an evaluation of a source that does not look, and by a distance; other ranges are not."""

    class Raw(ArraySource):
        def images(self, index: Tensor, key: object = None) -> Tensor:
            return super().images(index) * 255

    net, threat = five_classes(), ThreatModel(eps=0.1)
    x, y = torch.rand(4, 1, 8, 8), torch.arange(4)
    said = r"expected pixels in \[0, 1\], got .*; pixels go up to 2\d\d.*: divide by 255"
    with pytest.raises(UserError, match=said):
        ATTACKS["pgd"](steps=1)(net, x * 255, y, threat)
    with pytest.raises(UserError, match=said):
        evaluate(net, Raw(x, y), None, threat, "fast")
    with pytest.raises(UserError, match=said):
        distance(net, Raw(x, y), None, threat, ATTACKS["fab"]())
    with pytest.raises(UserError, match=r"got .*; divide by 255"):
        ArraySource(x * 255, y)
    for other in (x + 0.5, x * 1000):
        with pytest.raises(UserError, match=r"expected pixels in \[0, 1\], got [\d.]+ \.\. [\d.]+$"):
            ATTACKS["pgd"](steps=1)(net, other, y, threat)
    with pytest.raises(UserError, match=r"got -[\d.]+ .*; if they were normalised, leave that to the model"):
        ATTACKS["pgd"](steps=1)(net, (x - 0.5) / 0.25, y, threat)
    assert ATTACKS["pgd"](steps=1)(net, x * 255, y, ThreatModel(eps=8, high=255)).max() > 2


def test_data_that_cannot_be_had(fails: Fails, tmp_path: Path) -> None:
    assert "imagenet" in fails("data", "get", "imagenet")
    assert "mnist" in fails("data", "get", "mnist", "--source", "official")
    (tmp_path / "empty").mkdir()
    assert "empty" in fails("data", "get", "mnist", "--source", "empty")


def test_the_demo_leaves_other_folders_alone(fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("mine")
    assert "thesis holds something other than a demo" in fails("demo", "--out", "thesis")
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "mine"
    (tmp_path / "file").write_text("")
    fails("demo", "--out", "file")
    assert (tmp_path / "file").is_file()


def test_the_demo_replaces_an_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made small: what is tested is the folder and the words, not the training."""
    read = recipes.read
    small = [*(item for item in TINY if not item.startswith("objective")), "evaluation.samples=40"]
    monkeypatch.setattr(recipes, "read", lambda name: read(name, small))
    (tmp_path / "demo" / "digits-standard").mkdir(parents=True)
    (tmp_path / "demo" / demo.MARK).touch()
    (tmp_path / "demo" / "digits-standard" / "recipe.yaml").write_text("of an earlier demo")
    found = demo.run_demo(tmp_path / "demo", Console(quiet=True))
    assert list(found) == ["standard", "PGD-AT", "PGD-AT + HE"]
    assert (tmp_path / "demo" / "report.html").is_file()
    text = demo.explain(found)
    assert f"{found['standard'].score('clean').accuracy:.0%}" in text
    overlap = "this run does not prove a difference" in text
    low = found["standard"].score("worst case").interval[1]
    separate = all(found[name].score("worst case").interval[0] > low for name in list(found)[1:])
    assert overlap != separate
    one, two = (found[name].score("worst case").interval for name in list(found)[1:])
    assert ("which of the two networks is better" in text) == (one[0] <= two[1] and two[0] <= one[1])


def test_a_wrong_type_is_no_internal_error() -> None:
    """Whatever a YAML file can hold, the answer is a UserError."""
    nonsense: list[object] = [None, [], {}, 3, 2.5, True, "x", [[]], {"name": None}, {"name": []}, {"name": {}}, {1: 2}]
    source, _ = recipes.read(RECIPE)
    for key in (*source, "compute", "guard", "evaluation", "published"):
        for value in nonsense:
            try:
                recipes.parse({**source, key: value})
            except UserError:
                continue
    for block in ("threat", "training", "validation", "objective", "data", "model", "head", "evaluation"):
        inner = source.get(block) if isinstance(source.get(block), dict) else {}
        assert isinstance(inner, dict)
        for key in (*inner, "attack", "attacks", "augment", "options", "optimizer", "lr", "eps", "mean", "weights"):
            for value in nonsense:
                try:
                    recipes.parse({**source, block: {**inner, key: value}})
                except UserError:
                    continue


def test_the_record_of_a_run_names_its_data(finished: Path) -> None:
    described = json.loads((finished / "model.json").read_text())
    assert described["data"] == {"name": "digits", "options": {}}
    assert described["classes"] == list(DATASETS["digits"]().classes)
