"""One call that trains, resumes, measures and reports; and a run that is read back."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import steelman
from steelman.data.torch_dataset import TorchSource, as_source
from steelman.errors import TrainingInterruptedError, UserError
from steelman.evaluation.stages import protocol
from steelman.evidence.verify import verify
from steelman.heads import HEADS
from steelman.models.classifier import build_classifier
from steelman.rng import Key
from steelman.schedules import Resets
from steelman.threat import ThreatModel
from steelman.training import Around, Guard, RunSettings, Trainer, Training, Validation
from tests.training_helpers import SHAPE, a_net, some_data

THREAT = ThreatModel(eps=0.1)
QUICK = protocol({"PGD": steelman.PGD(steps=2)}, curve=False)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=300)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def settings(**changes: Any) -> RunSettings:
    training = {"epochs": 2, "batch_size": 8, "lr": 0.05, **changes.pop("training", {})}
    given: dict[str, Any] = {
        "training": Training(**training),
        "validation": Validation(size=6, samples=6, attack=steelman.PGD(steps=1)),
        "guard": Guard(on_collapse="ignore"),
        **changes,
    }
    return RunSettings(**given)


def fit(net: nn.Module, data: Any = None, **options: Any) -> steelman.Run:
    given: dict[str, Any] = {"settings": settings(), "suite": QUICK, "console": quiet(), **options}
    return steelman.fit(net, some_data(42) if data is None else data, THREAT, given.pop("objective", None), **given)


class Images(Dataset[tuple[Tensor, int]]):
    """A map-style Dataset; `noise` draws random numbers, from the global generators or from one of its own."""

    classes = ("round", "square", "other")

    def __init__(self, n: int = 42, noise: str = "", eight_bit: bool = False) -> None:
        source = some_data(n)
        self.x, self.y = source.images(torch.arange(n)), source.labels
        self.noise, self.own = noise, torch.Generator().manual_seed(5)
        self.eight_bit = eight_bit

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = self.x[index]
        if self.noise == "global":
            x = (x * (0.5 + 0.5 * random.random()) * float(np.random.uniform(0.9, 1)) * torch.rand(()) ** 0.1).clamp(
                0, 1
            )
        if self.noise == "own":
            x = x * torch.rand((), generator=self.own)
        return (x * 255).to(torch.uint8) if self.eight_bit else x, int(self.y[index])


def test_a_run_is_trained_measured_kept_and_read_back(tmp_path: Path) -> None:
    net = a_net()
    run = fit(net, out=tmp_path / "run", suite="fast")
    assert run.model is net
    assert not net.training
    assert [epoch["epoch"] for epoch in run.history] == [1, 2]
    assert run.verdict.total == 6
    assert run.path == tmp_path / "run"
    assert run.report is not None
    assert "Content-Security-Policy" in run.report.read_text()
    assert verify(tmp_path / "run").robust == run.verdict.correct
    assert (tmp_path / "run" / "tensorboard").is_dir()
    again = steelman.load(tmp_path / "run", a_net(seed=9))
    assert (again.history, again.verdict) == (run.history, run.verdict)
    x = torch.rand(3, *SHAPE)
    assert torch.equal(again.model(x), net(x))


def test_the_same_call_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fit(a_net(), out=tmp_path / "whole")
    step = Trainer.step

    def interrupted(trainer: Trainer, *batch: Tensor) -> float:
        if trainer.progress.step == 7:
            signal.raise_signal(signal.SIGTERM)
        return step(trainer, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(TrainingInterruptedError):
            fit(a_net(), out=tmp_path / "parts")
    with pytest.raises(UserError, match=r"not finished; go on with: the same call of steelman\.fit"):
        steelman.load(tmp_path / "parts")
    parts = fit(a_net(seed=4), out=tmp_path / "parts")  # the weights are those of the checkpoint
    for name, value in whole.model.state_dict().items():
        assert torch.equal(parts.model.state_dict()[name], value), name
    monkeypatch.setattr(Trainer, "step", lambda *_: pytest.fail("trained again"))
    finished = fit(net := a_net(seed=5), out=tmp_path / "parts")
    assert finished.model is net
    assert torch.equal(net.head.weight, whole.model.head.weight)  # type: ignore[arg-type,union-attr]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"objective": steelman.TRADES(beta=2)}, "objective is PGDAT"),
        ({"settings": settings(training={"seed": 3})}, r"training\.seed is 0, and that of this call is 3"),
        ({"data": some_data(41)}, "data is 36 images"),
        ({"net": a_net(features=13)}, "model is Classifier of"),
    ],
)
def test_another_call_on_a_folder_is_told_what_differs(change: dict[str, Any], what: str, tmp_path: Path) -> None:
    fit(a_net(), out=tmp_path / "run")
    before = (tmp_path / "run" / "fit.json").read_bytes()
    with pytest.raises(UserError, match=f"holds the run of another call: its {what}"):
        fit(**{"net": a_net(), **change}, out=tmp_path / "run")
    assert (tmp_path / "run" / "fit.json").read_bytes() == before


def test_nothing_is_left_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    run = fit(a_net())
    assert (run.path, run.report, list(tmp_path.iterdir())) == (None, None, [])
    with pytest.raises(UserError, match="call fit with out=FOLDER"):
        run.push_to_hub("me/it")


class TestData:
    def test_tensors_arrays_sources_and_datasets_are_the_same_images(self) -> None:
        source = some_data(42)
        x, y = source.images(torch.arange(42)), source.labels
        forms: list[Any] = [(x, y), (x.numpy(), y.numpy()), source, TensorDataset(x, y), Images()]
        kept = [fit(a_net(), form).model.state_dict() for form in forms]
        for state in kept[1:]:
            assert all(torch.equal(value, kept[0][name]) for name, value in state.items())

    def test_test_images_of_a_data_set_are_what_the_verdict_is_on(self) -> None:
        console = quiet()
        data = steelman.DATASETS["digits"]()
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        run = fit(net, data, console=console, settings=settings(training={"epochs": 1, "batch_size": 256}))
        assert run.verdict.total == 360
        assert run.evaluation.data == "digits test"
        assert "no test images" not in said(console)

    def test_without_test_images_it_is_said(self) -> None:
        console = quiet()
        run = fit(a_net(), console=console)
        assert run.evaluation.data == "held-out training images"
        assert "no test images were given: the verdict is on the 6 held-out images" in said(console)

    def test_eight_bits_are_scaled_and_said(self) -> None:
        console = quiet()
        fit(a_net(), Images(eight_bit=True), console=console)
        assert "the images have 8 bits: they are divided by 255" in said(console)

    def test_noise_of_the_global_generators_belongs_to_the_sample(self) -> None:
        source = TorchSource(Images(noise="global"))
        assert source.exact
        rows, key = torch.tensor([3, 5]), Key(0).fold("decode", 1)
        torch.manual_seed(1)
        state = torch.get_rng_state()
        both = source.images(rows, key)
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(source.images(rows[1:], key), both[1:])
        assert not torch.equal(source.images(rows, Key(0).fold("decode", 2)), both)
        assert torch.equal(source.images(rows), source.images(rows))

    def test_noise_of_another_generator_refuses_exact_resume(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        step = Trainer.step

        def interrupted(trainer: Trainer, *batch: Tensor) -> float:
            if trainer.progress.step == 7:
                signal.raise_signal(signal.SIGTERM)
            return step(trainer, *batch)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "step", interrupted)
            with pytest.raises(TrainingInterruptedError):
                fit(a_net(), Images(noise="own"), out=tmp_path / "run", test=some_data(6))
        with pytest.raises(UserError, match=r"cannot resume exactly: .* resume='plain' goes on from"):
            fit(a_net(), Images(noise="own"), out=tmp_path / "run", test=some_data(6))
        run = fit(a_net(), Images(noise="own"), out=tmp_path / "run", test=some_data(6), resume="plain")
        assert len(run.history) == 2

    def test_noise_of_another_generator_leaves_the_held_out_images_as_they_are(self, tmp_path: Path) -> None:
        run = fit(a_net(), Images(noise="own"), out=tmp_path / "run")
        assert run.verdict.total == 6
        with pytest.raises(UserError, match="test: the Dataset has its own random generator"):
            fit(a_net(), some_data(30), out=tmp_path / "other", test=Images(noise="own"))

    def test_names_of_classes_come_along(self, tmp_path: Path) -> None:
        run = fit(a_net(), Images(), out=tmp_path / "run")
        assert run.evaluation.classes == Images.classes

    def test_pictures(self) -> None:
        class Pictures(Images):
            def __getitem__(self, index: int) -> Any:
                return Image.fromarray((self.x[index, 0].numpy() * 255).astype(np.uint8)), np.int64(self.y[index])

        assert as_source(Pictures()).images(torch.tensor([0])).shape == (1, *SHAPE)

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (DataLoader(Images()), "a run must choose the order of the samples itself, so .*; give loader.dataset"),
            (
                type("Stream", (IterableDataset,), {"__iter__": lambda _: iter(())})(),
                "expected a Dataset with a length and samples by index",
            ),
            (torch.rand(4, 1, 4, 4), r"expected \(images, labels\), got images alone"),
            ((torch.rand(4, 1, 4, 4),), r"expected \(images, labels\), got 1 values"),
            (([1, 2], [0, 1]), "expected images as a tensor or an array"),
            ("mnist", "expected a Dataset with a length|expected"),
            (TensorDataset(torch.rand(4, 1, 4, 4)), r"sample 0: expected \(image, label\)"),
            (TensorDataset(255 * torch.rand(9, 1, 4, 4), torch.zeros(9).long()), "divide by 255"),
            (TensorDataset(torch.randn(9, 1, 4, 4), torch.zeros(9).long()), "model must normalise its own images"),
            (TensorDataset(torch.rand(9, 1, 4, 4), torch.rand(9)), "expected a label that is a whole number"),
            (TensorDataset(torch.empty(0, 1, 4, 4), torch.empty(0).long()), "empty Dataset"),
        ],
    )
    def test_what_is_no_data(self, data: Any, message: str) -> None:
        with pytest.raises(UserError, match=message):
            as_source(data)

    def test_images_of_several_sizes(self) -> None:
        class Sizes(Images):
            def __getitem__(self, index: int) -> Any:
                return torch.rand(1, 4, 4 + index // 20), int(self.y[index])

        with pytest.raises(UserError, match=r"sample 20: expected an image of shape \(1, 4, 4\), as the first has"):
            as_source(Sizes()).images(torch.arange(42))


class TestModels:
    def test_a_model_that_steelman_built_is_read_back_without_its_code(self, tmp_path: Path) -> None:
        net = build_classifier("digits-cnn", input_shape=(1, 8, 8), num_classes=10, head="he", width=4)
        quick = settings(training={"epochs": 1, "batch_size": 256})
        run = fit(net, steelman.DATASETS["digits"](), out=tmp_path / "run", settings=quick)
        again = steelman.load(str(tmp_path / "run"))
        x = torch.rand(2, 1, 8, 8)
        assert torch.equal(again.model(x), run.model(x))

    def test_an_ingredient_changed_by_hand_is_not_built_from_its_old_names(self, tmp_path: Path) -> None:
        net = build_classifier("digits-cnn", input_shape=(1, 8, 8), num_classes=10, width=4)
        steelman.embed(net, "he", scale=3)
        quick = settings(training={"epochs": 1, "batch_size": 256})
        run = fit(net, steelman.DATASETS["digits"](), out=tmp_path / "run", settings=quick)
        with pytest.raises(UserError, match=r"only your own code can build .* \(class Classifier\)"):
            _ = steelman.load(tmp_path / "run").model
        assert run.verdict.total == 360

    def test_a_model_of_ones_own_is_asked_for(self, tmp_path: Path) -> None:
        fit(a_net(), out=tmp_path / "run")
        run = steelman.load(tmp_path / "run")
        assert run.verdict.total == 6
        with pytest.raises(UserError, match=r"only your own code .* steelman\.load\('.*', model=MyModel\(\)\)"):
            _ = run.model
        with pytest.raises(UserError, match="belongs to another model"):
            steelman.load(tmp_path / "run", a_net(features=13))

    def test_an_answer_that_is_an_object(self, tmp_path: Path) -> None:
        class Answer:
            def __init__(self, logits: Tensor) -> None:
                self.logits = logits

        class Wordy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = a_net()

            def forward(self, x: Tensor) -> Answer:
                return Answer(self.inner(x))

        console = quiet()
        net = Wordy()
        run = fit(net, out=tmp_path / "run", console=console)
        assert "its .logits are used" in said(console)
        x = torch.rand(2, *SHAPE)
        assert torch.equal(run.model(x), net(x).logits)
        again = steelman.load(tmp_path / "run", Wordy())
        assert torch.equal(again.model(x), run.model(x))

    def test_ends_of_cycles(self, tmp_path: Path) -> None:
        how = settings(training={"lr": Resets(schedule=0.05, at=(0.5,)), "select": "cycles"})
        run = fit(a_net(), settings=how)
        assert type(run.model).__name__ == "Ensemble"

    def test_auxiliary_batch_norm(self) -> None:
        how = settings(around=Around(auxiliary_norm="adversarial"))
        run = fit(a_net(), settings=how, objective=steelman.TRADES())
        assert any(getattr(module, "branch", "") == "adversarial" for module in run.model.modules())

    @pytest.mark.parametrize("head", sorted(HEADS))
    def test_every_head(self, head: str) -> None:
        assert fit(a_net(head)).verdict.total == 6

    def test_more_outputs_than_classes(self) -> None:
        with pytest.raises(UserError, match="the model has 4 outputs, and the data have 3 classes"):
            fit(a_net(classes=4))
        assert fit(a_net(classes=4), suite=dataclasses.replace(QUICK, more_outputs=True)).verdict.total == 6


def test_a_folder_with_something_else(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        fit(a_net(), out=tmp_path / "run")
    with pytest.raises(UserError, match="it is not a run"):
        steelman.load(tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "fit.json").write_text("{")
    with pytest.raises(UserError, match="is damaged"):
        fit(a_net(), out=tmp_path / "other")


def test_what_was_asked_for_is_written_down(tmp_path: Path) -> None:
    fit(a_net(), out=tmp_path / "run", objective=steelman.TRADES(beta=2))
    asked = json.loads((tmp_path / "run" / "fit.json").read_text())
    assert asked["objective"].startswith("TRADES(beta=2.0")
    assert asked["data"].startswith("36 images of shape (1, 4, 4)")
    assert asked["training.epochs"] == "2"


class Shifting:
    """An augmentation with a setting that is not part of its text."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, x: Tensor, index: Tensor, key: Key) -> Tensor:
        return (x * self.by).clamp(0, 1)


def images_changed_at_the_end() -> tuple[Tensor, Tensor]:
    source = some_data(42)
    x = source.images(torch.arange(42)).clone()
    x[20:] = x[20:].flip(-1)
    return x, source.labels


def with_tanh() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))


def with_relu() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ({}, {"data": images_changed_at_the_end()}, "data"),
        ({"net": with_relu()}, {"net": with_tanh()}, "model"),
        ({"test": some_data(9)}, {"test": some_data(9, seed=4)}, "test"),
        ({}, {"suite": "fast"}, "suite"),
        ({"augment": Shifting(1.0)}, {"augment": Shifting(0.5)}, "augment"),
        ({"lr": lambda share: 0.01 + 0 * share}, {"lr": lambda share: 0.02 + 0 * share}, r"training\.lr"),
        ({}, {"settings": settings(training={"seed": 1})}, r"training\.seed"),
    ],
)
def test_what_another_call_asks_for_is_never_overlooked(
    first: dict[str, Any], second: dict[str, Any], what: str, tmp_path: Path
) -> None:
    fit(**{"net": a_net(), **first}, out=tmp_path / "run")
    with pytest.raises(UserError, match=f"holds the run of another call: its {what} is"):
        fit(**{"net": a_net(), **first, **second}, out=tmp_path / "run")


def test_a_run_goes_on_from_its_own_first_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the first save of the training, it does not begin with the weights of the second call."""
    whole = fit(a_net(), out=tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            fit(a_net(), out=tmp_path / "parts")
    parts = fit(a_net(seed=7), out=tmp_path / "parts")
    for name, value in whole.model.state_dict().items():
        assert torch.equal(parts.model.state_dict()[name], value), name


def test_two_batch_norms_predict_alike_when_they_are_read_back(tmp_path: Path) -> None:
    how = settings(around=Around(auxiliary_norm="adversarial"))
    run = fit(a_net(), settings=how, objective=steelman.TRADES(), out=tmp_path / "run")
    again = steelman.load(tmp_path / "run", a_net(seed=2))
    x = torch.rand(9, *SHAPE)
    assert torch.equal(again.model(x), run.model(x))


def test_an_ensemble_is_read_back(tmp_path: Path) -> None:
    how = settings(training={"lr": Resets(schedule=0.05, at=(0.5,)), "select": "cycles"})
    run = fit(a_net(), settings=how, out=tmp_path / "run")
    again = steelman.load(tmp_path / "run", a_net(seed=2))
    x = torch.rand(9, *SHAPE)
    assert torch.equal(again.model(x), run.model(x))


def test_frozen_batch_norm_stays_frozen() -> None:
    net = a_net().train()
    norm = net.backbone.layers[1]  # type: ignore[index]
    norm.eval()  # type: ignore[union-attr]
    before = norm.running_mean.clone()  # type: ignore[union-attr]
    fit(net)
    assert torch.equal(norm.running_mean, before)  # type: ignore[union-attr]


def test_the_callers_random_numbers_go_on_as_if_there_had_been_no_training() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    fit(a_net())
    assert torch.equal(torch.get_rng_state(), state)


def test_the_history_is_that_of_the_run_whatever_became_of_the_metrics(tmp_path: Path) -> None:
    run = fit(a_net(), out=tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert steelman.load(tmp_path / "run", a_net()).history == run.history


def test_two_at_once_in_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, seen = Trainer.step, list[bool]()

    def meeting(trainer: Trainer, *batch: Tensor) -> float:
        if not seen:
            seen.append(True)
            with pytest.raises(UserError, match="another process is training into"):
                fit(a_net(), out=tmp_path / "run")
        return step(trainer, *batch)

    monkeypatch.setattr(Trainer, "step", meeting)
    assert fit(a_net(), out=tmp_path / "run").verdict.total == 6


def test_what_a_killed_process_had_begun_to_write_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".fit.json.abcd1234").write_text("{")
    assert fit(a_net(), out=tmp_path / "run").verdict.total == 6


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = a_net()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out + 0.1 * torch.randn_like(out)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"objective": steelman.PGDAT}, "objective: expected one such as steelman.PGDAT"),
        ({"objective": "pgd-at"}, "objective: expected one such as steelman.PGDAT"),
        ({"settings": Training()}, "settings: expected a RunSettings"),
        ({"augment": "crop-flip"}, "augment: expected one such as CropFlip"),
        ({"helper": "x"}, "helper: expected a torch.nn.Module, got str"),
        ({"console": True}, "console: expected a rich.console.Console, got bool"),
        ({"out": 5}, "out: expected a path, got"),
        ({"resume": "yes"}, "resume: expected 'exact' or 'plain'"),
        ({"suite": "fastt"}, "unknown suite 'fastt'"),
        ({"net": a_net().double()}, r"call model\.float\(\)"),
        ({"net": a_net().to("meta")}, "the model has no weights: they are on the meta device"),
        ({"net": Noisy()}, "the model is random: in eval mode"),
        ({"data": (torch.rand(3, *SHAPE), torch.arange(3))}, "expected at least two images of some class"),
    ],
)
def test_refused_before_anything_is_trained(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"net": a_net(), "out": tmp_path / "run", **given}
    with pytest.raises(UserError, match=message):
        fit(**options)
    assert not (tmp_path / "run").exists()


def test_an_interrupted_call_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Trainer.step

    def interrupted(trainer: Trainer, *batch: Tensor) -> float:
        if trainer.progress.step == 3:
            signal.raise_signal(signal.SIGTERM)
        return step(trainer, *batch)

    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(TrainingInterruptedError, match=r"go on with: the same call of steelman\.fit"):
        fit(a_net(), out=tmp_path / "run")
