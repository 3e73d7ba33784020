"""The loop: what the optimiser and the objective are given at each step, what is validated and what is kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from steelman import data
from steelman import recipe as recipes
from steelman.attacks import PGD
from steelman.data import DATASETS, Dataset, NoAugment, Subset
from steelman.data.source import ArraySource, batches, first
from steelman.errors import UserError
from steelman.objectives import OBJECTIVES, Batch, Objective, Outcome
from steelman.objectives.pgd_at import PGDAT
from steelman.rng import Key
from steelman.schedules import SCHEDULES, value_at
from steelman.threat import ThreatModel
from steelman.training import OPTIMIZERS, Compute, Trainer, Validation, run
from steelman.training.averaging import Average
from steelman.training.checkpoint import checkpoint_path, checkpoints, load_checkpoint
from steelman.training.folder import load_model
from tests.training_helpers import Made, a_net, a_trainer, metrics, newest, plain_trainer, same, some_data

SCHEDULES_TRIED: dict[str, Any] = {
    "number": 0.07,
    "piecewise": SCHEDULES["piecewise"](points=[(0, 0), (0.4, 0.1), (1, 0.02)]),
    "multistep": SCHEDULES["multistep"](start=0.1, drops=[0.5, 0.75]),
    "cosine": SCHEDULES["cosine"](start=0.1, end=0.01),
}


@dataclasses.dataclass
class Recording(Objective):
    """Standard training that notes what it was given."""

    batches: list[Batch] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    trainer: Trainer | None = None

    def __call__(self, batch: Batch) -> Outcome:
        assert self.trainer is not None
        self.batches.append(batch)
        self.rates += [group["lr"] for group in self.trainer.optimizer.param_groups]
        assert batch.model.training
        outcome: Outcome = OBJECTIVES["standard"]()(batch)
        return outcome


def recorded(folder: Path, **changes: Any) -> tuple[Recording, Trainer]:
    recording = Recording()
    trainer = plain_trainer(folder, objective=recording, **changes)
    recording.trainer = trainer
    trainer.fit()
    return recording, trainer


@pytest.mark.parametrize("name", SCHEDULES_TRIED)
def test_learning_rate_at_every_step_is_the_schedule_at_steps_done_over_all(name: str, tmp_path: Path) -> None:
    schedule = SCHEDULES_TRIED[name]
    recording, _ = recorded(tmp_path, training={"lr": schedule})
    # 42 images in batches of 8: five of 8 and one of 2, thrice.
    assert [len(batch.x) for batch in recording.batches] == [8, 8, 8, 8, 8, 2] * 3
    assert recording.rates == [value_at(schedule, step / 18) for step in range(18)]
    used = [epoch["lr"] for epoch in metrics(tmp_path)]
    assert used == [recording.rates[step] for step in (5, 11, 17)], "an epoch reports the rate of its last step"


def test_the_step_really_uses_that_rate(tmp_path: Path) -> None:
    """Plain SGD by hand: w <- w - lr(t) g(t)."""
    schedule = SCHEDULES_TRIED["piecewise"]
    trainer = plain_trainer(
        tmp_path,
        net=a_net(dropout=0.0),
        training={"lr": schedule, "optimizer": OPTIMIZERS["sgd"](momentum=0.0), "epochs": 1},
    )
    inner, checked = trainer.criterion.objective, []
    expected: dict[str, Tensor] = {}

    def objective(batch: Batch) -> Outcome:
        for name, parameter in trainer.net.named_parameters():
            if name in expected:
                torch.testing.assert_close(parameter.detach(), expected[name], rtol=0, atol=1e-6)
                checked.append(name)
        outcome = inner(batch)
        rate = schedule(trainer.progress.step / trainer.total)
        gradients = torch.autograd.grad(outcome.loss, list(trainer.net.parameters()), retain_graph=True)
        for (name, parameter), gradient in zip(trainer.net.named_parameters(), gradients):
            expected[name] = parameter.detach() - rate * gradient
        return outcome

    trainer.criterion.objective = Made(objective)
    trainer.fit()
    assert len(checked) == 5 * len(expected)


def test_radius_and_its_ratio_reach_the_objective(tmp_path: Path) -> None:
    schedule = SCHEDULES["linear"](start=0.0, end=0.1, until=0.5)
    recording, _ = recorded(tmp_path, threat=ThreatModel(norm="l2", eps=0.2), training={"eps": schedule})
    expected = [0.1 * min(step / 9, 1) for step in range(18)]
    assert [batch.threat.eps for batch in recording.batches] == pytest.approx(expected, abs=1e-15)
    assert [batch.ratio for batch in recording.batches] == pytest.approx([eps / 0.2 for eps in expected], abs=1e-15)
    assert {batch.threat.norm for batch in recording.batches} == {"l2"}
    assert [epoch["eps"] for epoch in metrics(tmp_path)] == pytest.approx([expected[5], expected[11], expected[17]])


def test_without_a_schedule_the_radius_is_the_threats(tmp_path: Path) -> None:
    recording, _ = recorded(tmp_path, threat=ThreatModel(eps=0.2), training={"epochs": 1})
    assert {(batch.threat.eps, batch.ratio) for batch in recording.batches} == {(0.2, 1.0)}


def test_a_warm_up_from_zero_trains(tmp_path: Path) -> None:
    """Radius 0 at the first step, with a step size of the attack's own."""
    attack = PGD(steps=2, step_size=0.05, keep="last")
    schedule = SCHEDULES["linear"](start=0, end=0.1)
    plain_trainer(tmp_path, objective=PGDAT(attack=attack), training={"eps": schedule, "epochs": 1}).fit()
    assert len(metrics(tmp_path)) == 1


def test_every_epoch_shows_each_image_once_in_a_new_order(tmp_path: Path) -> None:
    recording, trainer = recorded(tmp_path, train=some_data(40), training={"epochs": 2})
    orders = [torch.cat([batch.index for batch in recording.batches[k : k + 5]]).tolist() for k in (0, 5)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(40))
    assert orders[0] != orders[1]
    for batch in recording.batches:
        assert torch.equal(batch.x, trainer.train.images(batch.index))
        assert torch.equal(batch.y, trainer.train.labels[batch.index])
    keys = [batch.key for batch in recording.batches]
    assert len(set(keys)) == len(keys), "each step has noise of its own"


@pytest.mark.parametrize(("n", "expected"), [(41, [8] * 5), (42, [8] * 5 + [2]), (40, [8] * 5), (3, [3])])
def test_a_last_batch_of_one_image_is_dropped(tmp_path: Path, n: int, expected: list[int]) -> None:
    """Batch norm has no statistics for a single image."""
    recording, _ = recorded(tmp_path, train=some_data(n), training={"epochs": 1})
    assert [len(batch.x) for batch in recording.batches] == expected


def test_metrics_of_an_epoch_are_means_over_its_samples(tmp_path: Path) -> None:
    losses: list[Tensor] = []
    right = count = 0
    trainer = plain_trainer(tmp_path, training={"epochs": 1})
    inner = trainer.criterion.objective

    def objective(batch: Batch) -> Outcome:
        nonlocal right, count
        outcome = inner(batch)
        losses.append(outcome.loss.detach() * len(batch.y))
        right, count = right + int((outcome.logits.argmax(dim=1) == batch.y).sum()), count + len(batch.y)
        return outcome

    trainer.criterion.objective = Made(objective)
    trainer.fit()
    (epoch,) = metrics(tmp_path)
    assert epoch["loss"] == pytest.approx(float(sum(losses)) / 42, rel=1e-6)
    assert epoch["train_accuracy"] == right / count
    assert (epoch["epoch"], epoch["step"]) == (1, 6)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        torch.manual_seed(int.from_bytes(name.encode(), "little"))  # what came before must not matter
        a_trainer(tmp_path / name, training={"seed": seed, "epochs": 1}).fit()
    a, b, c = (newest(tmp_path / name)["model"]["head.weight"] for name in "abc")
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


# What is validated, and what is kept.


def test_validation_is_at_the_target_radius_in_full_precision_of_the_split(tmp_path: Path) -> None:
    seen: list[tuple[float, int]] = []

    def attack(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, **given: Any) -> Tensor:
        seen.append((threat.eps, len(x)))
        return PGD(steps=2)(model, x, y, threat, **given)

    schedule = SCHEDULES["linear"](start=0.0, end=0.05)
    a_trainer(
        tmp_path, watch=Validation(size=24, samples=17, attack=attack), training={"eps": schedule, "epochs": 2}
    ).fit()
    assert seen == [(0.1, 17)] * 2


@pytest.mark.parametrize("ema", [None, 0.9])
def test_what_is_validated_is_what_would_be_kept(tmp_path: Path, ema: float | None) -> None:
    seen: list[dict[str, Tensor]] = []

    def attack(model: nn.Module, x: Tensor, *_: Any, **__: Any) -> Tensor:
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return x

    a_trainer(tmp_path, watch=Validation(size=24, samples=24, attack=attack), training={"ema": ema, "epochs": 1}).fit()
    state = newest(tmp_path)
    same(seen, [state["model"] if ema is None else state["average"]["values"]])


def test_validation_scores_are_those_of_the_kept_weights(tmp_path: Path) -> None:
    """Recomputed from the average, for the images that are right both before and after the attack."""
    trainer = a_trainer(tmp_path)
    trained = trainer.fit()
    best = max(metrics(tmp_path), key=lambda epoch: float(epoch["validation_robust"]))
    assert trained.epoch == best["epoch"]
    net = a_net()
    net.load_state_dict(trained.state)
    net.eval()
    source = trainer.validation
    x, y = source.images(torch.arange(24)), source.labels
    x_adv = trainer.settings.validation.attack(
        net, x, y, trainer.threat, index=torch.arange(24), key=Key(trainer.training.seed).fold("validation")
    )
    right = net(x).argmax(dim=1) == y
    assert float(right.double().mean()) == best["validation_clean"]
    assert float((right & (net(x_adv).argmax(dim=1) == y)).double().mean()) == best["validation_robust"]


def scripted(trainer: Trainer, scores: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter(scores)
    monkeypatch.setattr(trainer, "validate", lambda: next(left))


@pytest.mark.parametrize(
    ("robust", "select", "kept"),
    [
        ([0.2, 0.5, 0.4], "best", 2),
        ([0.2, 0.5, 0.4], "last", 3),
        ([0.3, 0.3, 0.3], "best", 1),
        ([0.0, 0.0, 0.1], "best", 3),
    ],
)
def test_the_epoch_kept_is_the_one_with_the_best_robustness(
    tmp_path: Path, robust: list[float], select: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clean accuracy points the other way, and does not decide."""
    trainer = a_trainer(tmp_path, training={"select": select})
    scripted(trainer, [(1 - value, value) for value in robust], monkeypatch)
    trained = trainer.fit()
    assert trained.epoch == kept
    assert trained.stopped is None
    saved = load_checkpoint(checkpoint_path(tmp_path, 6 * kept))["average"]["values"]
    assert all(torch.equal(trained.state[name], value) for name, value in saved.items())


def test_checkpoints_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest two, the last finished epoch's, and the best: at any moment, and with a save at every step."""
    trainer = a_trainer(tmp_path, training={"save_minutes": 1e-9, "epochs": 4})
    scripted(trainer, [(0.5, value) for value in (0.1, 0.9, 0.2, 0.3)], monkeypatch)
    inner, counts = trainer.criterion.objective, []

    def objective(batch: Batch) -> Outcome:
        counts.append(len(checkpoints(tmp_path)))
        return inner(batch)

    trainer.criterion.objective = Made(objective)
    trainer.fit()
    assert max(counts) <= 4
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000024", "step-00000023", "step-00000012"]


class Trap:
    """A source that raises when it is read before evaluation, and notes what is read for what."""

    def __init__(self, source: ArraySource, closed: bool = False) -> None:
        self._source, self.closed = source, closed
        self.classes, self.shape, self.name, self.workers = source.classes, source.shape, "trap", 0
        self.trained: set[int] = set()
        self.watched: set[int] = set()

    def __len__(self) -> int:
        return len(self._source)

    @property
    def labels(self) -> Tensor:
        assert not self.closed, "the test labels were read"
        return self._source.labels

    def images(self, index: Tensor, key: Key | None = None) -> Tensor:
        assert not self.closed, "the test images were read"
        (self.watched if key is None else self.trained).update(index.tolist())
        return self._source.images(index, key)


def test_the_test_set_is_not_read_before_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = Trap(some_data(60)), Trap(some_data(20, seed=2), closed=True)
    monkeypatch.setitem(DATASETS, "trap", lambda: Dataset("trap", train, test))
    opened = []

    def opening(*args: Any) -> Any:
        assert (tmp_path / "run" / "model.json").exists(), "the weights are chosen before the test set is looked at"
        test.closed = False
        opened.append(True)
        return first(*args)

    monkeypatch.setattr(run, "first", opening)
    source = {
        "name": "trapped",
        "data": "trap",
        "model": "linear",
        "threat": {"eps": 0.1},
        "objective": "pgd-at",
        "training": {"epochs": 2, "batch_size": 8},
        "validation": {"size": 12},
        "evaluation": {"suite": None, "attacks": {"fgsm": "fgsm"}},
        "compute": {"accelerator": "cpu"},
    }
    run.train(source, tmp_path / "run", console=Console(quiet=True))
    assert opened == [True]
    training, validation = data.split(some_data(60), 12, 0)
    held_out = set(validation.index.tolist())
    assert len(held_out) == 12
    assert train.trained == set(training.index.tolist()), "every training image is used, and none held out"
    # Before training, a few training images are tried on the model; with no key nothing else is.
    assert train.watched - held_out <= set(training.index[:32].tolist())
    assert held_out <= train.watched


def test_split_holds_out_the_same_images_after_a_resume_and_others_with_another_seed() -> None:
    source = some_data(60)
    one, again, other = (data.split(source, 12, seed)[1].index.tolist() for seed in (0, 0, 1))
    assert one == again != other


# Averages.


def test_average_is_the_recursion(tmp_path: Path) -> None:
    """avg <- d avg + (1 - d) w with d = min(decay, (1 + t) / (10 + t)), in float64; counters are copied."""
    net = a_net()
    average = Average(net, 0.5)
    expected = {name: value.double().clone() for name, value in net.state_dict().items()}
    for step in range(20):
        with torch.no_grad():
            for value in net.state_dict().values():
                value.add_(torch.randn_like(value.float()).to(value.dtype) if value.is_floating_point() else 1)
        average.update(net)
        decay = min(0.5, (1 + step) / (10 + step))
        for name, value in net.state_dict().items():
            floating = value.is_floating_point()
            expected[name] = decay * expected[name] + (1 - decay) * value.double() if floating else value.double()
    for name, value in average.values.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-5)


def test_the_run_averages_after_every_step_and_keeps_the_average(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, training={"ema": 0.8, "epochs": 1})
    expected = {name: value.double().clone() for name, value in trainer.net.state_dict().items()}
    steps = 0
    inner = trainer.criterion.objective

    def catch_up() -> None:
        nonlocal steps
        decay = min(0.8, (1 + steps) / (10 + steps))
        for name, value in trainer.net.state_dict().items():
            floating = value.is_floating_point()
            expected[name] = decay * expected[name] + (1 - decay) * value.double() if floating else value.double()
        steps += 1

    def objective(batch: Batch) -> Outcome:
        if trainer.progress.step:  # the weights are now those after the step before
            catch_up()
        return inner(batch)

    trainer.criterion.objective = Made(objective)
    trained = trainer.fit()
    catch_up()
    assert steps == 6
    for name, value in trained.state.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert not torch.equal(trained.state["head.weight"], trainer.net.state_dict()["head.weight"])


# Hardware settings.


def conv_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def test_bf16_trains_and_stays_finite(tmp_path: Path) -> None:
    seen: list[torch.dtype] = []
    trainer = plain_trainer(
        tmp_path,
        net=conv_net(),
        compute=Compute(accelerator="cpu", precision="bf16-mixed"),
        objective=PGDAT(attack=PGD(steps=2, keep="last")),
        training={"epochs": 5},
    )
    handle = trainer.net[0].register_forward_hook(lambda *given: seen.append(given[2].dtype))  # type: ignore[index]
    trained = trainer.fit()
    handle.remove()
    assert {torch.bfloat16, torch.float32} == set(seen), "half in training, full in validation"
    assert all(value.dtype != torch.bfloat16 and torch.isfinite(value).all() for value in trained.state.values())
    history = metrics(tmp_path)
    assert history[-1]["loss"] < history[0]["loss"]
    assert history[-1]["validation_clean"] > 0.5


def test_channels_last_trains_to_the_same_weights(tmp_path: Path) -> None:
    states = []
    for name, channels_last in (("plain", False), ("last", True)):
        trainer = plain_trainer(
            tmp_path / name,
            net=conv_net(),
            augment=NoAugment(),
            compute=Compute(accelerator="cpu", channels_last=channels_last),
        )
        states.append(trainer.fit().state)
    layout = trainer.net[0].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[index]
    assert layout
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-3, atol=1e-4)


@pytest.mark.timeout(280)
def test_compiled_training_matches_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)
    states = []
    for name, compiled in (("plain", False), ("compiled", True)):
        torch.manual_seed(0)
        trainer = plain_trainer(
            tmp_path / name,
            net=nn.Sequential(nn.Flatten(), nn.Linear(16, 3, bias=False)),  # one product: nothing for a C++ compiler
            compute=Compute(accelerator="cpu", compile=compiled),
            objective=PGDAT(attack=PGD(steps=1, keep="last")),
            train=some_data(16),
            training={"epochs": 1},
        )
        try:
            states.append(trainer.fit().state)
        except Exception as error:
            if compiled and "compiler" in str(error).lower():
                pytest.skip(f"torch.compile finds no C++ toolchain here: {str(error).splitlines()[0]}")
            raise
    assert list(states[0]) == list(states[1]), "a compiled run's weights load into a plain model"
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-4, atol=1e-5)


def test_a_machine_that_cannot_compile_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch says it without a C++ compiler; other errors are not dressed up."""
    source, _ = recipes.read("digits-standard", ["compute.accelerator=cpu", "compute.compile=true"])
    kinds = [type(name, (RuntimeError,), {"__module__": name}) for name in ("torch._inductor.exc", "elsewhere")]
    for kind in kinds:
        error = kind("no working C++ compiler\nSet TORCHDYNAMO_VERBOSE=1")
        monkeypatch.setattr(Trainer, "fit", lambda *_, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(UserError if kind is kinds[0] else kind, match="no working C"):
            run.train(source, tmp_path / kind.__name__, console=Console(quiet=True))


def test_a_machine_without_the_hardware_is_told() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"compute: .*(cuda|CUDA)"):
            run.make_fabric(Compute(accelerator="cuda"))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_trains(name: str, tmp_path: Path) -> None:
    rate = 0.1 if name == "sgd" else 0.02
    trainer = plain_trainer(tmp_path, training={"optimizer": OPTIMIZERS[name](), "lr": rate})
    trainer.fit()
    history = metrics(tmp_path)
    assert history[-1]["loss"] < history[0]["loss"]


# A whole run from a recipe.


def test_a_run_leaves_what_it_promises(tmp_path: Path) -> None:
    source, origin = recipes.read(
        "digits-pgd-at",
        ["training.epochs=2", "objective.attack.steps=1", "evaluation.samples=20", "compute.accelerator=cpu"],
    )
    found = run.train(source, tmp_path / "run", console=Console(quiet=True), origin=origin)
    assert found is not None
    assert found.evaluation.total == 20
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"recipe.yaml", "environment.json", "metrics.jsonl", "model.safetensors", "model.json", "run.json"} <= names
    assert {"report.html", "verdict", "checkpoints"} <= names
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["status"] == "finished"
    best = max(metrics(tmp_path / "run"), key=lambda epoch: float(epoch["validation_robust"]))
    assert record["kept_epoch"] == best["epoch"]
    model, described = load_model(tmp_path / "run")
    assert not model.training
    assert described["threat"]["eps"] == 0.15
    kept = load_checkpoint(checkpoint_path(tmp_path / "run", best["step"]))["model"]
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    source = Subset(data.load("digits").test, torch.arange(20))  # type: ignore[assignment]
    right = model(source.images(torch.arange(20))).argmax(dim=1) == source.labels  # type: ignore[attr-defined]
    assert int(right.sum()) == found.evaluation.score("clean").correct


def test_a_recipe_made_in_python_is_kept_so_that_it_can_be_read_again(tmp_path: Path) -> None:
    source, _ = recipes.read("digits-pgd-at", ["published={when: 2018-06-19}"])
    source["model"] = {"name": "mlp", "weights": tmp_path / "w.safetensors", "mean": (0.5,)}
    run.prepare(tmp_path / "run", source)
    kept, _ = recipes.read(str(tmp_path / "run" / "recipe.yaml"))
    assert recipes.parse({**kept, "published": None}) == recipes.parse({**source, "published": None})
    assert recipes.fingerprint(kept) == recipes.fingerprint(source)
    source["objective"] = PGDAT()
    with pytest.raises(UserError, match=r"made of numbers, text, lists and mappings.*got PGDAT"):
        run.prepare(tmp_path / "other", source)
    assert not (tmp_path / "other").exists()


def test_the_seed_decides_the_initial_weights(tmp_path: Path) -> None:
    def first(seed: int) -> Tensor:
        source, _ = recipes.read("digits-pgd-at-he", [f"training.seed={seed}"])
        before = torch.get_rng_state()
        net = run.build_model(recipes.parse(source), (1, 8, 8), 10)
        assert torch.equal(torch.get_rng_state(), before), "building a model leaves the global generator alone"
        weight: Tensor = net.state_dict()["head.weight"]
        return weight

    assert torch.equal(first(0), first(0))
    assert not torch.equal(first(0), first(1))


def test_batches_are_a_function_of_the_key() -> None:
    order = torch.cat(batches(10, 4, Key(0).fold("order", 0)))
    assert sorted(order.tolist()) == list(range(10))
