"""Every key of a recipe, from the settings classes: its dotted path, type, default, and what it does."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo

from steelman.attacks import ATTACKS, Attack
from steelman.data import AUGMENTATIONS, DATASETS, Augmentation
from steelman.heads import HEADS
from steelman.models import MODELS
from steelman.objectives import OBJECTIVES, Objective
from steelman.recipe import Recipe
from steelman.recipe_blocks import DataSpec, HeadSpec, ModelSpec
from steelman.schedules import SCHEDULES, Schedule
from steelman.settings import options_of
from steelman.training import OPTIMIZERS
from steelman.training.settings import Optimizer

# What a recipe names, by the type of the key it is named in: the heading of its table, and its registry.
NAMED: dict[Any, tuple[str, dict[str, Any]]] = {
    DataSpec: ("Datasets", DATASETS),
    ModelSpec: ("Models", MODELS),
    HeadSpec: ("Heads", HEADS),
    Objective: ("Objectives", OBJECTIVES),
    Attack: ("Attacks", ATTACKS),
    Schedule: ("Schedules", SCHEDULES),
    Optimizer: ("Optimizers", OPTIMIZERS),
    Augmentation: ("Augmentations", AUGMENTATIONS),
}
# What the program gives itself, or what no recipe can write.
HIDDEN = {"input_shape", "features", "num_classes", "guides"}
PLAIN = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path", type(None): "`null`"}
# What a key does, where neither the key's own description nor the docstring of its settings says it.
WORDS = {
    "base": "Another recipe, by name or path. What this one does not say is taken from there.",
    "name": "The run is called so. Without `--out`, its folder is `runs/NAME`.",
    "description": "One sentence for `steelman list recipes`.",
    "published": "The rows of a paper's tables that the recipe aims at.",
    "published[].paper": "Author and year.",
    "published[].table": "The table in the paper.",
    "published[].row": "The row of that table.",
    "published[].numbers": "A number for each column, or a mean and a standard deviation.",
    "published[].measure": "What the numbers are.",
    "published[].note": "What a reader must know to compare, such as a difference between a paper and its code.",
    "chosen": "Settings that no source states: the dotted key, and the reason for its value.",
    "data.name": "The dataset. `data: mnist` is short for `data: {name: mnist}`.",
    "data.OPTION": "An option of the dataset, such as `root`.",
    "data.augment": "What is done to training images.",
    "model": "A name, or the block below.",
    "model.name": "The architecture. A model of yours is named as `package.module:factory`.",
    "model.OPTION": "An option of the model, such as `width`, or an argument of your factory.",
    "model.mean": "The model subtracts it from the pixels: one number, or one for each channel.",
    "model.std": "The model divides the pixels by it, after the mean is subtracted.",
    "model.weights": "A file of weights to start from: safetensors, or a plain state dict.",
    "head.name": "The last layer, from features to logits.",
    "head.OPTION": "An option of the head, such as `scale`.",
    "threat": "What the adversary may do: the block below.",
    "threat.norm": "How the size of a change is measured.",
    "threat.eps": "The radius: the largest change that the adversary may make. It is above 0.",
    "threat.low": "The smallest value of a pixel.",
    "threat.high": "The largest value of a pixel.",
    "objective": "The training method. Most have an attack inside, which is an option of theirs.",
    "training.epochs": "How often all training images are gone through.",
    "training.batch_size": "Images in a step, of all processes together.",
    "training.optimizer": "What turns gradients into steps.",
    "training.lr": "The learning rate.",
    "training.eps": "The radius to train with. `null`: that of the threat. A schedule ends at or below that.",
    "training.eps_per": "Whether a scheduled radius moves with each step, or is held for an epoch.",
    "training.ema": "The decay of an exponential average of the weights, which is then validated and kept.",
    "training.select": "The epoch that is kept: the best by validation robustness, or the last. `cycles` makes an "
    "ensemble of the last ones of each cycle of a schedule with resets.",
    "training.save_minutes": "How often the run is saved, besides the end of each epoch.",
    "training.seed": "The same seed gives the same run.",
    "validation.size": "Training images that are held out to choose the epoch by.",
    "validation.samples": "How many of the held-out images are scored after each epoch.",
    "validation.attack": "The attack that they are scored under, at the radius of the threat.",
    "guard.drop": "The fall of validation robustness, below the best epoch, that counts as collapse.",
    "guard.on_collapse": "After a collapse: stop and keep the best epoch; stop and keep what `training.select` says; "
    "or go on.",
    "around.awp": "Adversarial weight perturbation: the block below.",
    "around.awp.gamma": "The size of the perturbation, as a share of each weight's length.",
    "around.awp.start": "The share of the run after which it begins.",
    "compute.accelerator": "What computes.",
    "compute.devices": "Processes on each machine, one for each device.",
    "compute.nodes": "Machines.",
    "compute.precision": "Full precision, or mixed with bfloat16 or float16.",
    "compute.channels_last": "Keep images in the order that is quicker for convolutions on some devices.",
    "compute.compile": "Compile the model with torch.compile.",
    "compute.workers": "Processes that read the images of a folder.",
    "evaluation.suite": "The [suite](#suites) that gives the verdict. `null`: none.",
    "evaluation.attacks": "A label of your choice for each attack. They run besides the suite, on every test image.",
    "evaluation.samples": "Only the first that many test images. `null`: all of them.",
    "evaluation.batch_size": "Images that are attacked together.",
    "evaluation.corruptions": "Measures the accuracy on corrupted test images. `true`, or the block below.",
    "evaluation.corruptions.corruptions": "Their names. By default the 15 of the benchmark.",
    "evaluation.corruptions.severities": "How severe, from 1 to 5.",
    "evaluation.corruptions.family": "Whose constants. `auto`: `imagenet` from 64 pixels on, else `cifar`.",
    "evaluation.corruptions.exact": "Cuts the images to 8 bits, as the published sets are.",
    "evaluation.corruptions.frost": "A folder with pictures of frost, or `generated`.",
    "evaluation.corruptions.seed": "The seed of the noise.",
    "evaluation.corruptions.samples": "Only the first that many test images. `null`: all of them.",
}


Row = tuple[str, str, str, str]


def every_key(settings: Any = Recipe, path: str = "") -> Iterator[Row]:
    """Every key below a settings class, in its order."""
    if not path:
        yield "base", "text", "`null`", WORDS["base"]
    hints = get_type_hints(settings, include_extras=True)
    for name, field in settings.__pydantic_fields__.items():
        inner, key = inside(hints[name]), f"{path}{name}"
        if name == "options":
            yield f"{path}OPTION", f"see {kind_of(settings)}", f"see {kind_of(settings)}", WORDS[f"{path}OPTION"]
            continue
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        default = "required" if field.is_required() else shown(value) if inner is None or value is None else ""
        many = any(get_origin(part) is tuple for part in flat(hints[name])) and inner is not None
        if default:
            plain_kind = kind_of(settings if settings in NAMED and name == "name" else hints[name])
            kind = plain_kind if inner is None else "list of mappings" if many else "mapping"
            yield key, kind, default, field.description or WORDS.get(key) or told(settings, name)
        if inner is not None:
            yield from every_key(inner, f"{key}{'[]' if many else ''}.")


def options(entry: Callable[..., object]) -> Iterator[str]:
    """The options of a registry's entry, with their defaults."""
    for name, one in options_of(entry).items():
        if name not in HIDDEN:
            yield name if one.default is one.empty else f"{name}: {plain(one.default)}"


def inside(hint: Any) -> Any:
    """The settings class that a type is, or is a list of; None for a plain value or something that is named."""
    found = [one for one in flat(hint) if hasattr(one, "__pydantic_fields__")]
    return found[0] if found else None


def flat(hint: Any) -> list[Any]:
    """A type's parts, however they are nested."""
    inner = get_args(hint) if get_origin(hint) is not Annotated else get_args(hint)[:1]
    return [hint, *(one for part in inner for one in flat(part))]


def kind_of(hint: Any) -> str:
    """A type in words, with its limits; what a registry names is a link to its table."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint in NAMED:
        title = NAMED[hint][0].lower()
        return f"[{title.removesuffix('s')}](#{title})"
    if origin is Annotated:
        limits = [text for extra in parts[1:] for text in limits_of(extra)]
        return " and ".join([" ".join([kind_of(parts[0]), *limits[:1]]), *limits[1:]])
    if origin in (Union, types.UnionType):
        return " or ".join(kind_of(part) for part in parts)
    if origin is tuple and parts[-1] is ...:
        return f"list of {kind_of(parts[0])}s"
    words = {
        Literal: ", ".join(f"`{part}`" for part in parts),
        tuple: f"[{', '.join(kind_of(part) for part in parts)}]",
        dict: " to ".join(["mapping of text", *(kind_of(part) for part in parts[1:])]),
    }
    return words[origin] if origin in words else PLAIN.get(hint, str(hint))


def limits_of(extra: Any) -> Iterator[str]:
    """What a validator asks of a number."""
    signs = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    for one in extra.metadata if isinstance(extra, FieldInfo) else [extra]:
        for sign, word in signs.items():
            if getattr(one, sign, None) is not None:
                yield f"{word} {getattr(one, sign):g}"


def shown(value: Any) -> str:
    """A default as a recipe would have it."""
    return "empty" if value in ("", {}, ()) else f"`{plain(value)}`"


def plain(value: Any) -> str:
    """A value as YAML on one line; an ingredient as its name and what differs from its defaults."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {plain(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(plain, value)) + "]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if not hasattr(value, "__pydantic_fields__"):
        return str(value)
    for _, entries in NAMED.values():
        for name, entry in entries.items():
            if entry is type(value):
                usual = {key: one.default for key, one in options_of(entry).items()}
                options = {key: getattr(value, key) for key in usual if getattr(value, key) != usual[key]}
                return plain({"name": name, **options}) if options else name
    raise ValueError(f"{value!r} has no name in a registry")


def told(settings: Any, name: str) -> str:
    """What a docstring says of one field: the clause that begins with its name, or else the first that has it."""
    text = " ".join((inspect.getdoc(settings) or "").replace("``", "").split())
    clauses = [one for part in re.split(r"(?<=[.:]) (?=[A-Z`])", text) for one in re.split(r"; (?=`)", part)]
    found = [one for one in clauses if one.startswith(f"`{name}`")] or [one for one in clauses if f"`{name}`" in one]
    clause = found[0].removeprefix(f"`{name}` ").removeprefix("is ").rstrip(".") if found else ""
    return f"{clause[:1].upper()}{clause[1:]}." if found else ""
