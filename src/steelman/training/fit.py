"""Train your own model with one call."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from torch import nn

from steelman.data import Dataset
from steelman.data.augment import Augmentation, NoAugment
from steelman.data.source import Source, split
from steelman.data.torch_dataset import TorchSource, as_source
from steelman.errors import UserError
from steelman.evaluation.checks import check_contract
from steelman.evaluation.evaluate import check_outputs
from steelman.evaluation.stages import Suite
from steelman.evidence.bundle import weights_digest
from steelman.models.batchnorm import AuxiliaryNorm, route, split_norms
from steelman.models.classifier import Classifier, Ensemble, build_classifier
from steelman.models.wrap import Wrapped, detected
from steelman.objectives.base import Objective, check_model
from steelman.objectives.criterion import bare
from steelman.objectives.pgd_at import PGDAT
from steelman.progress import showing
from steelman.schedules import Piecewise, Schedule
from steelman.threat import ThreatModel
from steelman.training.checkpoint import checkpoints
from steelman.training.folder import Measured, Run, export, finish, load, make_folder
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
    objective, console = objective or PGDAT(), console or Console()
    given = {"epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed}
    train, held_out, tested, how = _data(data, test, _settings(settings, given), console)
    x = train.images(torch.arange(min(2, len(train))))
    # The module without wrappers, because the trainer adds its own.
    net, sentence = detected(bare(model), x)
    if sentence:
        console.print(sentence, highlight=False, soft_wrap=True)
    classes = check_contract(net, train, threat, torch.device("cpu"))
    if not (isinstance(suite, Suite) and suite.more_outputs):
        check_outputs(train, classes)
    if how.around.auxiliary_norm is not None and not any(isinstance(one, AuxiliaryNorm) for one in net.modules()):
        split_norms(net)
    check_model(objective, net, x)
    asked = _asked(net, train, threat, objective, how, augment, helper)
    with contextlib.ExitStack() as stack:
        place = Path(out) if out is not None else Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        begun = _begin(place, asked)
        if begun == "finished":
            return _again(place, net, model)
        if begun == "unfinished" and not _exact(train) and resume == "exact" and checkpoints(place):
            raise UserError(
                f"{place} holds an interrupted run that cannot resume exactly: the Dataset has its own random "
                "generator, so its images are different the second time. resume='plain' goes on from the last "
                "checkpoint with other random numbers"
            )
        started, fabric = time.monotonic(), make_fabric(how.compute)
        fabric.launch()
        if fabric.world_size > 1 and out is None:
            raise UserError("out: several processes need a common folder: expected one, got none")
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
        trained = trainer.fit(resume=begun == "unfinished")
        kept = _kept(net, trained, how)
        if not fabric.is_global_zero:
            fabric.barrier()  # wait until the first process has measured the model
            return _again(place, net, model)
        name = type(bare(model)).__name__
        export(place, trained, _description(net, train, threat, how, name))
        measured = Measured(
            source=tested, threat=threat, suite=suite, attacks={}, batch_size=256, seed=how.training.seed
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


def _data(data: object, test: object, how: RunSettings, console: Console) -> tuple[Source, Source, Source, RunSettings]:
    """The images for training, for choosing the epoch and for the verdict; and the settings with the held-out size."""
    if isinstance(data, Dataset):
        test = data.test if test is None else test
    source = as_source(data.train if isinstance(data, Dataset) else data)
    if isinstance(source, TorchSource) and source.eight_bit:
        console.print("the images have 8 bits: they are divided by 255", highlight=False)
    size = how.validation.size
    if how.validation == Validation():
        size = max(1, min(size, len(source) // 10))
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
        tested = as_source(test, "test")
        if tested.shape != source.shape:
            raise UserError(f"test: expected images of shape {source.shape}, as in data, got {tested.shape}")
        if len(tested.classes) > len(source.classes):
            raise UserError(
                f"test: expected labels of the {len(source.classes)} classes of data, got {len(tested.classes)} classes"
            )
    how = dataclasses.replace(how, validation=dataclasses.replace(how.validation, size=size))
    return train, held_out, tested, how


def _exact(source: Source) -> bool:
    """Whether the images are the same when they are read a second time."""
    while (inner := getattr(source, "source", None)) is not None:
        source = inner
    return bool(getattr(source, "exact", True))


def _asked(
    net: nn.Module,
    train: Source,
    threat: ThreatModel,
    objective: Objective,
    how: RunSettings,
    augment: Augmentation | None,
    helper: nn.Module | None,
) -> dict[str, Any]:
    """The arguments of a call, as texts. A later call with the same folder is compared with them."""
    rows = torch.arange(min(16, len(train)))
    images = train.images(rows).numpy().tobytes() if _exact(train) else b""
    layers = [(name, tuple(value.shape)) for name, value in net.state_dict().items()]
    said = {
        "format": 1,
        "objective": _text(objective),
        "threat": _text(threat),
        **{name: _text(value) for name, value in vars(how).items()},
        "augment": _text(augment or NoAugment()),
        "data": f"{len(train)} images of shape {train.shape}, {_digest(images + train.labels.numpy().tobytes())}",
        "model": f"{type(net).__name__} of {sum(value.numel() for value in net.state_dict().values()):,} numbers, "
        f"{_digest(repr(layers).encode())}",
        "helper": "none" if helper is None else weights_digest(helper)[:16],
    }
    return {**said, "fingerprint": _digest(json.dumps(said, sort_keys=True).encode())}


def _text(value: object) -> str:
    """A setting as text. For an object whose text contains its address, it is the name of its class."""
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _begin(place: Path, asked: Mapping[str, Any]) -> Literal["new", "unfinished", "finished"]:
    """Make the run's folder, or find the run of the same call in it."""
    mark = place / "fit.json"
    if not mark.exists():
        if (place / "recipe.yaml").exists():
            raise UserError(f"{place} holds a run of a recipe; choose another folder")
        make_folder(place, "fit.json", json.dumps(asked, indent=1).encode())
        return "new"
    try:
        kept = json.loads(mark.read_text())
        different = [key for key in asked if key != "fingerprint" and kept.get(key) != asked[key]]
    except (ValueError, AttributeError) as error:
        raise UserError(f"{mark} is damaged: {error}") from None
    if different:
        key = different[0]
        more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
        raise UserError(
            f"{place} holds the run of another call: its {key} is {kept.get(key)}, and that of this call is "
            f"{asked[key]}{more}; choose another folder, or delete it"
        )
    return "finished" if (place / "run.json").exists() else "unfinished"


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
    spec, head = net.spec["model"], net.spec["head"]
    with torch.random.fork_rng(devices=[]):
        again = build_classifier(
            spec["name"],
            input_shape=train.shape,
            num_classes=net.head.num_classes,
            head=head["name"],
            head_options=head["options"],
            mean=spec["mean"],
            std=spec["std"],
            **spec["options"],
        )
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
