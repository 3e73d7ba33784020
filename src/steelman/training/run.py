"""The run of a recipe: build its model, train, keep the best weights, measure them, and write the report."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import time
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning_fabric import Fabric
from rich.console import Console
from torch import nn

from steelman import data
from steelman.corruptions.base import check_shape
from steelman.corruptions.published import PUBLISHED
from steelman.data.source import first
from steelman.errors import UserError, resume_command
from steelman.evaluation.checks import check_contract
from steelman.imports import check_allowed
from steelman.models.batchnorm import split_norms
from steelman.models.classifier import build_described, load_state, load_weights
from steelman.objectives import check_model
from steelman.progress import showing
from steelman.recipe import Recipe, fingerprint, parse, read
from steelman.rng import Key
from steelman.training.finish import Measured, finish
from steelman.training.folder import Run, export, load_model, make_folder, mend
from steelman.training.settings import Compute
from steelman.training.trainer import Trainer


def build_model(
    recipe: Recipe, shape: tuple[int, int, int], num_classes: int, allow_import: Collection[str] = ()
) -> nn.Module:
    """The recipe's model with its head. Its weights are drawn from the seed, or read from the recipe's file."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Key(recipe.training.seed).fold("init").integer() & (2**63 - 1))
        spec, head = dataclasses.asdict(recipe.model), dataclasses.asdict(recipe.head)
        model = build_described(spec, head, shape, num_classes, allow_import)
    if recipe.model.weights is not None:
        load_weights(model, load_state(recipe.model.weights), str(recipe.model.weights))
    if recipe.around.auxiliary_norm is not None:
        split_norms(model)
    return model


def _helper(recipe: Recipe, dataset: data.Dataset, allow_import: Collection[str]) -> tuple[nn.Module | None, str]:
    """The other model that the objective learns from, if it names one, and that model's checksum."""
    folder: Path | None = recipe.objective.setting("helper")
    if folder is None:
        return None, ""
    try:
        model, record = load_model(folder, allow_import)
    except UserError as error:
        raise UserError(f"objective.helper: {error}") from None
    found = (tuple(record["input_shape"]), list(record["classes"]))
    if found != (dataset.shape, list(dataset.classes)):
        raise UserError(
            f"objective.helper: the model in {folder} is for images of shape {found[0]} and {len(found[1])} classes; "
            f"expected the classes of {dataset.name}, {dataset.num_classes}, and images of {dataset.shape}"
        )
    return model, str(record["sha256"])


def make_fabric(compute: Compute) -> Fabric:
    """Lightning Fabric for the recipe's hardware. Several processes train by DistributedDataParallel."""
    several = compute.devices not in (1,) or compute.nodes > 1
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Lightning advises on workers and hardware; the recipe sets both
            fabric = Fabric(
                accelerator=compute.accelerator,
                devices=compute.devices,
                num_nodes=compute.nodes,
                precision=compute.precision,
                strategy="ddp" if several else "auto",
            )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"compute: this machine cannot do that: {error}") from None
    return fabric


def _is_first_process() -> bool:
    """Whether this is the first process, by the variables that torchrun or Fabric sets. It works before the launch."""
    if "RANK" in os.environ:
        return os.environ["RANK"] == "0"
    return os.environ.get("LOCAL_RANK", "0") == "0" and os.environ.get("NODE_RANK", "0") == "0"


def _plain(value: object) -> str:
    """A path or a date as text. Other objects are refused: a resume could not read them back."""
    if isinstance(value, (os.PathLike, datetime.date)):
        return str(value)
    raise UserError(f"a recipe is made of numbers, text, lists and mappings, so that it can be kept; got {value!r}")


def prepare(folder: Path, source: Mapping[str, Any]) -> None:
    """Make the run's folder with its recipe."""
    text = yaml.safe_dump(json.loads(json.dumps(source, default=_plain)), sort_keys=False)
    if (folder / "recipe.yaml").exists():
        done = (folder / "run.json").exists()
        hint = "choose another --out, or delete it" if done else f"go on with: {resume_command(folder)}, or delete it"
        raise UserError(f"{folder} already holds a run; {hint}")
    make_folder(folder, "recipe.yaml", text.encode())


def train(
    source: Mapping[str, Any],
    folder: Path,
    *,
    resume: bool = False,
    console: Console | None = None,
    origin: str = "recipe",
    show: bool = True,
    allow_import: Collection[str] = (),
) -> Run | None:
    """Train by a recipe's mapping, measure the model on the test set, and write everything to `folder`.

    A model that the recipe names as ``package.module:factory`` is imported only if `allow_import` has its module.
    `show` prints the table and the report's path. Only the first of several processes returns the run.
    """
    console = console or Console()
    recipe = parse(source, origin)
    if ":" in recipe.model.name:  # refused before the data are read
        check_allowed(recipe.model.name, allow_import, f"the model of {origin}")
    # Errors of the machine, the data or the model come here, before a folder is made.
    fabric = make_fabric(recipe.compute)
    dataset = data.load(recipe.data.name, **recipe.data.options)
    if recipe.evaluation.corruptions is not None:
        check_shape(dataset.shape, "evaluation.corruptions")
    try:
        training, validation = data.split(dataset.train, recipe.validation.size, recipe.training.seed)
    except UserError as error:
        raise UserError(f"validation.size: {error}") from None
    net = build_model(recipe, dataset.shape, dataset.num_classes, allow_import)
    helper, checksum = _helper(recipe, dataset, allow_import)
    check_contract(net, training, recipe.threat, torch.device("cpu"))
    check_model(recipe.objective, net, training.images(torch.arange(2)))
    if _is_first_process():
        if resume:
            mend(folder)
        else:
            prepare(folder, source)
    fabric.launch()
    if fabric.device.type == "cuda":
        # Without these settings, the same run would give other weights each time on a GPU. They cost a little speed.
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
    trainer = Trainer(
        net=net,
        train=training,
        validation=validation,
        objective=recipe.objective,
        threat=recipe.threat,
        settings=recipe.settings,
        augment=recipe.data.augment,
        fabric=fabric,
        folder=folder,
        console=console if fabric.is_global_zero else Console(quiet=True),
        # With the helper's checksum in the fingerprint, a resume with another helper is refused.
        fingerprint=fingerprint({**source, "helper": checksum} if checksum else source),
        helper=helper,
    )
    started = time.monotonic()
    try:
        trained = trainer.fit(resume)
    except RuntimeError as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        reason = str(error).splitlines()[0]
        raise UserError(f"compute.compile: torch.compile failed ({reason}); train without it") from None
    if not fabric.is_global_zero:
        return None
    export(folder, trained, _description(recipe, dataset))
    model, _ = load_model(folder, allow_import)
    test = first(dataset.test, recipe.evaluation.samples)
    test.workers = recipe.compute.workers
    measured = Measured(
        source=test,
        threat=recipe.threat,
        suite=recipe.evaluation.suite,
        attacks=recipe.evaluation.attacks,
        batch_size=recipe.evaluation.batch_size,
        seed=recipe.training.seed,
        corruptions=recipe.evaluation.corruptions,
        clean=dataset.test,
        published=tuple(row.row for row in recipe.published or () if row.row in PUBLISHED and "mCA" in row.numbers),
    )
    with showing(console):
        return finish(
            folder,
            model.to(fabric.device),
            trained,
            measured,
            name=recipe.name,
            adversarial=recipe.objective.adversarial,
            console=console,
            started=started,
            show=show,
        )


def _description(recipe: Recipe, dataset: data.Dataset) -> dict[str, Any]:
    """How to rebuild a recipe's model, and what it is for."""
    return {
        "recipe": recipe.name,
        "model": {**dataclasses.asdict(recipe.model), "weights": None},
        "head": dataclasses.asdict(recipe.head),
        "input_shape": dataset.shape,
        "classes": dataset.classes,
        "data": {"name": recipe.data.name, "options": {k: str(v) for k, v in recipe.data.options.items()}},
        "threat": dataclasses.asdict(recipe.threat),
        "auxiliary_norm": recipe.around.auxiliary_norm,
    }


def resume(folder: Path, console: Console | None = None, *, allow_import: Collection[str] = ()) -> Run | None:
    """Resume an interrupted run. A finished run is refused. `allow_import` is that of ``train``."""
    if not (folder / "recipe.yaml").is_file():
        raise UserError(f"{folder} is not a run: it has no recipe.yaml")
    if (folder / "run.json").is_file():
        raise UserError(f"{folder} is finished; its report is {folder / 'report.html'}")
    source, origin = read(str(folder / "recipe.yaml"))
    return train(source, folder, resume=True, console=console, origin=origin, allow_import=allow_import)
