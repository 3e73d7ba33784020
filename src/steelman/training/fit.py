"""Train your own model with one call."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from steelman.arguments import check_call, model_of, path_of
from steelman.attacks.base import logits_of, untouched
from steelman.attacks.eot import EOT
from steelman.data import Dataset
from steelman.data.augment import Augmentation, NoAugment
from steelman.data.source import ArraySource, Source, knows_classes, name_of, split
from steelman.data.torch_dataset import TorchSource, as_source
from steelman.errors import UserError, shown
from steelman.evaluation.checks import check_contract
from steelman.evaluation.evaluate import check_outputs
from steelman.evaluation.stages import Suite
from steelman.evaluation.suites import suite_of
from steelman.evidence.bundle import device_of
from steelman.evidence.ledger import locked
from steelman.models.batchnorm import AuxiliaryNorm, route, split_norms
from steelman.models.classifier import Classifier, Ensemble, build_described
from steelman.models.wrap import Wrapped, detected
from steelman.objectives.base import Objective, check_model
from steelman.objectives.criterion import bare, check_kinds
from steelman.objectives.pgd_at import PGDAT
from steelman.progress import showing
from steelman.schedules import Piecewise, Schedule
from steelman.threat import ThreatModel
from steelman.training.asked import asked_for, begin, exact
from steelman.training.checkpoint import checkpoints
from steelman.training.finish import Measured, finish
from steelman.training.folder import Run, export, load, mend
from steelman.training.records import Trained
from steelman.training.run import make_fabric
from steelman.training.settings import Adam, RunSettings, Training, Validation
from steelman.training.trainer import Trainer

# The default for any network: with Adam, a warm-up and a long decay are seldom far from the best.
LR = Piecewise(points=((0.0, 0.0), (0.2, 2e-3), (1.0, 0.0)))


def fit(
    model: nn.Module,
    data: object,
    threat: ThreatModel,
    objective: Objective | None = None,
    *,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | Schedule | None = None,
    seed: int | None = None,
    settings: RunSettings | None = None,
    augment: Augmentation | None = None,
    helper: nn.Module | None = None,
    test: object = None,
    suite: str | Suite = "fast",
    out: Path | str | None = None,
    resume: Literal["exact", "plain"] = "exact",
    console: Console | None = None,
) -> Run:
    """Train `model` against an attack, keep its best epoch, and measure it. The run holds the verdict.

    The model itself is trained. It ends with the kept weights, in eval mode. Without `settings`, Adam trains it for 10
    epochs. A tenth of the data, at most 1,000 samples, is held out to choose the epoch.

    Arguments:
        model: gives logits for images in [0, 1]. The answer may also be an object with ``.logits``, a dict or a tuple.
        data: (images, labels) as tensors, a map-style torch Dataset, or a dataset or source of steelman.
        threat: the norm, the radius and the range of the pixels.
        objective: the method; by default ``PGDAT()``.
        epochs, batch_size, lr, seed: replace those in `settings`.
        settings: everything else, such as optimiser, radius schedule, validation, guard and precision.
        augment: the augmentation of training images, such as ``CropFlip()``; by default none.
        helper: the other model that HAT learns from.
        test: the images of the verdict, in any form that `data` can have. By default they are the held-out images,
            which also choose the epoch.
        suite: the attacks that the verdict is measured with.
        out: the run's folder. The same call again resumes an interrupted run, with the same weights in the end, to the
            bit. Without a folder, no file is kept.
        resume: "exact", or "plain" for a Dataset with its own random numbers. Such a run resumes from its last
            checkpoint, but the images are not the same as without the interruption.
        console: where progress is shown; by default the terminal.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    >>> x, y = torch.rand(60, 1, 4, 4), torch.arange(60) % 3
    >>> run = fit(net, (x, y), ThreatModel(eps=0.1), epochs=1, console=Console(quiet=True))
    >>> run.verdict.total, run.model is net
    (6, True)
    """
    objective = PGDAT() if objective is None else objective
    console = Console() if console is None else console
    _check(model, threat, objective, settings, augment, helper, console, out, resume)
    chosen = suite_of(suite, threat)
    given = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed}
    train, held_out, tested, how = _data(data, test, threat, _settings(settings, given), console)
    x = train.images(torch.arange(min(2, len(train))))
    # The module without wrappers, because the trainer adds its own.
    net, sentence = detected(bare(model), x)
    if sentence:
        console.print(sentence, highlight=False, soft_wrap=True)
    classes = check_contract(net, train, threat, torch.device("cpu"), tiny_eps=chosen.tiny_eps)
    if not chosen.more_outputs:
        check_outputs(train, classes)
    _check_measurable(net, x, chosen)
    if how.around.auxiliary_norm is not None and not any(isinstance(one, AuxiliaryNorm) for one in net.modules()):
        split_norms(net)
    check_model(objective, net, x)
    asked = asked_for(net, train, tested, chosen, threat, objective, how, augment, helper)
    with contextlib.ExitStack() as stack:
        place = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        begun = begin(place, asked)
        if begun == "finished":
            return _again(place, net, model)
        if begun == "unfinished" and not exact(train) and resume == "exact" and checkpoints(place):
            raise UserError(
                f"{place} holds an interrupted run that cannot resume exactly: the Dataset has its own random "
                "generator, so its images are different the second time. resume='plain' goes on from the last "
                "checkpoint with other random numbers"
            )
        held_out, tested = _still(held_out, tested, place)
        started, fabric = time.monotonic(), make_fabric(how.compute)
        fabric.launch()
        if fabric.world_size > 1 and out is None:
            raise UserError("out: several processes need a common folder: expected one, got none")
        if fabric.is_global_zero:
            stack.enter_context(locked(place, "training"))
            mend(place)
        # Training draws from torch's global generator. The caller's own draws go on as if there had been no training.
        stack.enter_context(torch.random.fork_rng(devices=[fabric.device] if fabric.device.type == "cuda" else []))
        trainer = Trainer(
            net=net,
            train=train,
            validation=held_out,
            objective=objective,
            threat=threat,
            settings=how,
            fabric=fabric,
            folder=place,
            console=console if fabric.is_global_zero else Console(quiet=True),
            augment=augment or NoAugment(),
            fingerprint=asked["fingerprint"],
            helper=helper,
        )
        if begun == "new" and out is not None:
            trainer.save()  # a call that goes on begins with these very weights, and not with its own
        trained = trainer.fit(resume=begun == "unfinished")
        kept = _kept(net, trained, how)
        if not fabric.is_global_zero:
            fabric.barrier()  # wait until the first process has measured the model
            return _again(place, net, model)
        name = type(bare(model)).__name__
        export(place, trained, _description(net, train, threat, how, name))
        measured = Measured(
            source=tested, threat=threat, suite=chosen, attacks={}, batch_size=256, seed=how.training.seed
        )
        with showing(console):
            run = finish(
                place,
                kept.to(fabric.device),
                trained,
                measured,
                name=name,
                adversarial=objective.adversarial,
                console=console,
                started=started,
                keep=out is not None,
            )
        fabric.barrier()
        return dataclasses.replace(run, kept=_outer(model, kept, net))


def _settings(settings: RunSettings | None, given: Mapping[str, Any]) -> RunSettings:
    """The settings of a run: `settings`, or the defaults, changed by the arguments that were `given` to ``fit``."""
    how = settings or RunSettings(training=Training(optimizer=Adam(), lr=LR))
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(how, training=dataclasses.replace(how.training, **changes))


def _check(
    model: object,
    threat: object,
    objective: object,
    settings: object,
    augment: object,
    helper: object,
    console: object,
    out: object,
    resume: object,
) -> None:
    """Refuse arguments of another kind, before anything is read or written."""
    check_kinds(objective, model, threat)
    for name, value, kind, expected in (
        ("settings", settings, RunSettings, "a RunSettings, such as RunSettings(training=Training(epochs=20))"),
        ("helper", helper, nn.Module, "a torch.nn.Module"),
        ("console", console, Console, "a rich.console.Console"),
    ):
        if value is not None and not isinstance(value, kind):
            raise UserError(f"{name}: expected {expected}, got {type(value).__name__}")
    if augment is not None:
        check_call("augment", augment, "one such as CropFlip(), called with (x, index, key)", "x", "index", "key")
    if resume not in ("exact", "plain"):
        raise UserError(f"resume: expected 'exact' or 'plain', got {shown(resume)}")
    if out is not None:
        path_of("out", out)
    net = model_of("model", model)
    values = [*net.parameters(), *net.buffers()]
    if any(value.dtype == torch.float64 for value in values):
        raise UserError("the model is in float64, and images are in float32: call model.float()")


def _check_measurable(net: nn.Module, x: Tensor, suite: Suite) -> None:
    """Refuse now a model that could be trained, but whose verdict would be refused in the end."""
    x = x.to(device_of(net))
    with untouched(net), torch.no_grad():
        same = torch.equal(logits_of(net, x), logits_of(net, x))
    if not same and not all(isinstance(stage.attack, EOT) for stage in suite.stages):
        raise UserError(
            "the model is random: in eval mode the same images gave other logits the second time. Make it "
            "deterministic in eval mode, or measure it with a suite of eot attacks"
        )


def _data(
    data: object, test: object, threat: ThreatModel, how: RunSettings, console: Console
) -> tuple[Source, Source, Source, RunSettings]:
    """The images for training, for choosing the epoch and for the verdict; and the settings with the held-out size."""
    if isinstance(data, Dataset):
        test = data.test if test is None else test
    source = as_source(data.train if isinstance(data, Dataset) else data, bounds=(threat.low, threat.high))
    if isinstance(source, TorchSource) and source.eight_bit:
        console.print("the images have 8 bits: they are divided by 255", highlight=False)
    size = how.validation.size
    if how.validation == Validation():
        size = max(1, min(size, len(source) // 10))
    if len(source) <= len(set(source.labels.tolist())):
        raise UserError(f"data: expected at least two images of some class, got {len(source)} images in all")
    try:
        train, held_out = split(source, size, how.training.seed)
    except UserError as error:
        raise UserError(f"validation.size: {error}") from None
    if test is None:
        console.print(
            f"no test images were given: the verdict is on the {size} held-out images, which also choose the epoch; "
            "pass others as test=...",
            highlight=False,
            soft_wrap=True,
        )
        held_out.name = "held-out training images"
        tested: Source = held_out
    else:
        tested = as_source(test, "test", (threat.low, threat.high))
        if not exact(tested):
            raise UserError(
                "test: the Dataset has its own random generator, so its images are different the second time, and no "
                "verdict on them could be checked; expected one without random transforms"
            )
        if tested.shape != source.shape:
            raise UserError(f"test: expected images of shape {source.shape}, as in data, got {tested.shape}")
        if len(tested.classes) > len(source.classes):
            raise UserError(
                f"test: expected labels of the {len(source.classes)} classes of data, got {len(tested.classes)} classes"
            )
    how = dataclasses.replace(how, validation=dataclasses.replace(how.validation, size=size))
    return train, held_out, tested, how


def _still(held_out: Source, tested: Source, place: Path) -> tuple[Source, Source]:
    """Both sources with images that stay. A Dataset with its own random numbers would give others at each reading."""
    if exact(held_out):
        return held_out, tested
    shutil.rmtree(place / "verdict", ignore_errors=True)  # an unfinished verdict on images of an earlier call
    images = held_out.images(torch.arange(len(held_out)))
    kept = ArraySource(images, held_out.labels, held_out.classes, name=name_of(held_out))
    kept.named = knows_classes(held_out)
    return kept, kept if tested is held_out else tested


def _kept(net: nn.Module, trained: Trained, how: RunSettings) -> nn.Module:
    """The model with the kept weights, in eval mode. If several weights were kept, it is their ensemble."""
    if trained.members:
        from copy import deepcopy

        ensemble = Ensemble([deepcopy(net) for _ in range(trained.members)])
        ensemble.load_state_dict(trained.state)
        kept: nn.Module = ensemble
    else:
        net.load_state_dict(trained.state)
        kept = net
    if how.around.auxiliary_norm is not None:
        route(kept, how.around.auxiliary_norm)
    return kept.eval()


def _outer(model: nn.Module, kept: nn.Module, net: nn.Module) -> nn.Module:
    """The caller's own `model`, if it is the kept model or a wrapper around it; else the kept model."""
    return model.eval() if kept is net and bare(model) is net else kept


def _again(place: Path, net: nn.Module, model: nn.Module) -> Run:
    """The finished run of the same call, with its weights in the caller's model."""
    run = load(place, net)
    return dataclasses.replace(run, kept=_outer(model, run.model, net))


def _built(net: nn.Module, train: Source) -> dict[str, Any] | None:
    """The names and options from which steelman can build this model again, or None."""
    if not isinstance(net, Classifier) or net.spec is None:
        return None
    with torch.random.fork_rng(devices=[]):
        again = build_described(net.spec["model"], net.spec["head"], train.shape, net.head.num_classes, ())
    # A user may have changed a layer or the head. Only the user's code can build such a model.
    same = repr(again) == repr(net) and again.state_dict().keys() == net.state_dict().keys()
    return net.spec if same and net.head.num_classes == len(train.classes) else None


def _description(net: nn.Module, train: Source, threat: ThreatModel, how: RunSettings, name: str) -> dict[str, Any]:
    """The content of model.json: how steelman can rebuild the model, or else the name of the model's class."""
    spec = _built(net, train)
    own = {"name": None, "class": name, "wrapped": isinstance(net, Wrapped)}
    return {
        "recipe": name,
        "model": own if spec is None else spec["model"],
        "head": {"name": "linear", "options": {}} if spec is None else spec["head"],
        "input_shape": train.shape,
        "classes": train.classes,
        "data": {"name": None, "options": {}},
        "threat": dataclasses.asdict(threat),
        "auxiliary_norm": how.around.auxiliary_norm,
    }
