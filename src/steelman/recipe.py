"""Recipes: one YAML file describes one run. An error names the wrong key, its value and the choices."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field

from steelman.attacks import Search
from steelman.bounded import read_yaml
from steelman.data import DATASETS
from steelman.errors import UserError, shown, unknown
from steelman.heads import HEADS, build_head
from steelman.models import MODELS
from steelman.objectives import OBJECTIVES, Objective, objections
from steelman.recipe_blocks import (
    DataSpec,
    EvaluationSpec,
    HeadSpec,
    ModelSpec,
    Published,
    data_block,
    head_block,
    model_block,
    rows,
)
from steelman.recipe_files import find, load, setting
from steelman.schedules import value_at
from steelman.settings import SettingsError, make, named, options_of, settings
from steelman.threat import ThreatModel
from steelman.training import Around, Compute, Guard, RunSettings, Training, Validation

MOST_PARTS, MOST_LETTERS = 20, 100  # of a dotted key, and of a key that is compared with others
GIVEN = ("options", "input_shape", "features", "num_classes")  # fields and arguments that are no keys of a recipe


@settings
class Recipe:
    """All settings of one run.

    `published` holds the rows of papers' tables that the recipe aims at. `chosen` holds the settings that no source
    states: dotted keys, each with the reason for its value.
    """

    name: str
    description: str = ""
    published: Annotated[tuple[Published, ...], BeforeValidator(rows)] | None = None
    chosen: dict[str, str] = Field(default_factory=dict)
    data: Annotated[DataSpec, BeforeValidator(data_block)] = DataSpec()
    model: Annotated[ModelSpec, BeforeValidator(model_block)]
    head: Annotated[HeadSpec, BeforeValidator(head_block)] = HeadSpec()
    threat: ThreatModel
    objective: Annotated[Objective, named("objective", OBJECTIVES)]
    training: Training = Training()
    validation: Validation = Validation()
    guard: Guard = Guard()
    around: Around = Around()
    compute: Compute = Compute()
    evaluation: EvaluationSpec = Field(default_factory=EvaluationSpec)

    @property
    def settings(self) -> RunSettings:
        """The training settings, as the trainer takes them."""
        return RunSettings(
            training=self.training,
            validation=self.validation,
            guard=self.guard,
            around=self.around,
            compute=self.compute,
        )


def fingerprint(source: Mapping[str, Any]) -> str:
    """A short hash of everything in a recipe that can change the trained weights."""
    words = ("description", "published", "chosen", "evaluation")
    content = {key: value for key, value in source.items() if key not in words}
    content = json.loads(json.dumps(content, default=str))  # now all keys are texts, and can be sorted
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def parse(source: Mapping[str, Any], origin: str = "recipe") -> Recipe:
    """The recipe that a mapping describes. `origin` is the name of the mapping in errors."""
    known = set(options_of(Recipe))
    wrong = [str(key) for key in source if key not in known]
    try:
        if wrong:
            meant = _meant({key: source[key] for key in source if key in known}, wrong)
            raise SettingsError([((key,), str(unknown("key", key, known, meant=meant.get(key, ())))) for key in wrong])
        recipe: Recipe = make("recipe", {"recipe": Recipe}, "recipe", source)
    except SettingsError as error:
        raise UserError(f"{origin}:\n" + "\n".join(f"  {line}" for line in str(error).splitlines())) from None
    eps, devices = recipe.threat.eps, recipe.compute.devices
    if not eps > 0:
        raise UserError(f"{origin}:\n  threat.eps: expected a radius above 0, got {eps}")
    if recipe.training.eps is not None and (last := value_at(recipe.training.eps, 1.0)) > eps * (1 + 1e-9):
        raise UserError(f"{origin}:\n  training.eps: expected to end at or below threat.eps, {eps:g}, got {last:g}")
    if strange := _other_norms(recipe):
        raise UserError(f"{origin}:\n" + "\n".join(f"  {line}" for line in strange))
    clashes = objections(
        recipe.objective,
        compiled=recipe.compute.compile,
        awp=recipe.around.awp is not None,
        auxiliary_norm=recipe.around.auxiliary_norm is not None,
    )
    if clashes:
        raise UserError(f"{origin}:\n" + "\n".join(f"  {key}: {reason}" for key, reason in clashes))
    if recipe.objective.helped and recipe.objective.setting("helper") is None:
        raise UserError(
            f"{origin}:\n  objective.helper: expected the folder of a finished run, whose model "
            f"{type(recipe.objective).__name__} learns from, got none"
        )
    if recipe.training.select == "cycles" and (labels := _single_headed(recipe)):
        raise UserError(
            f"{origin}:\n  evaluation.attacks: {', '.join(labels)}: head_margin and head_scale are for a model with "
            "one head, and training.select cycles makes an ensemble of several"
        )
    if devices != "auto" and recipe.training.batch_size % (devices * recipe.compute.nodes):
        raise UserError(
            f"{origin}:\n  training.batch_size: expected a multiple of the number of processes, "
            f"{devices * recipe.compute.nodes}, got {recipe.training.batch_size}"
        )
    return recipe


def _meant(source: Mapping[str, Any], wrong: Iterable[str]) -> dict[str, list[str]]:
    """For each of the `wrong` keys of a recipe, the dotted keys that end with it, or with a name that is like it."""
    try:
        recipe: Recipe = make("recipe", {"recipe": Recipe}, "recipe", source)
    except UserError:  # without its sections, nobody knows their keys
        return {}
    places: dict[str, list[str]] = {}
    for place in _places(recipe):
        if (name := place.rpartition(".")[2]) not in GIVEN:
            places.setdefault(name, []).append(place)
    close = {key: difflib.get_close_matches(key[:MOST_LETTERS], places, n=1, cutoff=0.8) for key in wrong}
    return {key: places[names[0]] for key, names in close.items() if names}


def _places(recipe: Recipe) -> Iterator[str]:
    """The dotted keys that a recipe can set, at any depth."""

    def fields(part: Any, path: str) -> Iterator[str]:
        for field in dataclasses.fields(part):
            yield (place := path + field.name)
            if dataclasses.is_dataclass(value := getattr(part, field.name)):
                yield from fields(value, f"{place}.")

    yield from fields(recipe, "")
    registries: dict[str, Mapping[str, Any]] = {"model": MODELS, "head": HEADS, "data": DATASETS}
    for section, registry in registries.items():
        own = options_of(registry[name]) if (name := getattr(recipe, section).name) in registry else ()
        yield from (f"{section}.{option}" for option in own)


def _other_norms(recipe: Recipe) -> list[str]:
    """A sentence for each attack that does not know the recipe's norm.

    Without this check, the attacks of the evaluation would fail after the training.
    """
    attacks: dict[str, Any] = {f"evaluation.attacks.{label}": a for label, a in recipe.evaluation.attacks.items()}
    attacks["validation.attack"] = recipe.validation.attack
    attacks["objective.attack"] = recipe.objective.setting("attack")
    norm = recipe.threat.norm
    return [
        f"{key}: {type(attack).__name__} knows the norms {', '.join(attack.norms)}, and threat.norm is {norm}"
        for key, attack in attacks.items()
        if isinstance(attack, Search) and norm not in attack.norms
    ]


def _single_headed(recipe: Recipe) -> list[str]:
    """The labels of the attacks that need the recipe's head itself: they use its margin, or undo its scale."""
    with torch.random.fork_rng(devices=[]):
        head = build_head(recipe.head.name, 2, 2, **recipe.head.options)
    return [
        label
        for label, attack in recipe.evaluation.attacks.items()
        if (getattr(attack, "head_margin", False) and head.margin)
        or (not getattr(attack, "head_scale", True) and head.scale != 1)
    ]


def read(name: str, overrides: Iterable[str] = ()) -> tuple[dict[str, Any], str]:
    """A recipe's mapping, and the path it was read from.

    `name` is a built-in recipe or a file. `overrides` are texts such as ``training.epochs=3``. The mapping contains
    what the recipe takes from its ``base``; the key ``base`` itself is removed.
    """
    path = find(name)
    source = load(path)
    for override in overrides:
        _override(source, override)
    return source, str(path)


def named_by(overrides: Iterable[str]) -> tuple[str, ...]:
    """The import path of the model that `overrides` name, if they name one. Whoever types it allows its import.

    >>> named_by(["training.epochs=3", "model=mynets.small:make"])
    ('mynets.small:make',)
    """
    typed: dict[str, Any] = {}
    for override in overrides:
        _override(typed, override)
    name = typed.get("model") if isinstance(typed.get("model"), str) else setting(typed, "model.name")
    return (name,) if isinstance(name, str) and ":" in name else ()


def check_root(source: Mapping[str, Any], origin: str) -> None:
    """Refuse a recipe for the user's own images that does not say where they are."""
    name = source.get("data") if isinstance(source.get("data"), str) else setting(source, "data.name")
    if name in ("folder", "arrays") and not isinstance(setting(source, "data.root"), str | Path):
        raise UserError(
            f"{origin}:\n  data.root: dataset {name!r} needs root=PATH, where your images are: data.root=PATH"
        )


def _override(source: dict[str, Any], text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"expected key=value, such as training.epochs=3, got {shown(text)}")
    place: dict[str, Any] = source
    *parents, last = key.split(".")
    if len(parents) > MOST_PARTS:
        raise UserError(f"{shown(key)}: expected a key of at most {MOST_PARTS} parts, got {len(parents) + 1}")
    for part in parents:
        inner = place.get(part)
        if inner is None or not isinstance(inner, dict):
            inner = {} if inner is None else {"name": inner}
            place[part] = inner
        place = inner
    place[last] = read_yaml(value, what=f"{shown(key)[1:-1]}: {shown(value)}") if value else None
