"""The blocks of a recipe: data, model, head, evaluation and published rows. An error names the wrong key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field, model_validator

from steelman.attacks import ATTACKS, Attack
from steelman.corruptions.plan import CorruptionsSpec
from steelman.data import AUGMENTATIONS, DATASETS, Augmentation
from steelman.data.augment import NoAugment
from steelman.errors import UserError, shown, unknown
from steelman.evaluation.stages import RESERVED
from steelman.evaluation.suites import SUITES
from steelman.heads import HEADS, build_head
from steelman.models import MODELS
from steelman.settings import Count, Number, SettingsError, named, number, options_of, settings
from steelman.training.settings import BatchSize


def _with_options(value: object, own: set[str]) -> object:
    """Move the options of a mapping into a block ``options``. In a recipe they stand beside ``name``.

    `own` are the keys that are no options.
    """
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, Mapping) and "options" not in value:
        plain = {key: item for key, item in value.items() if key in own}
        return {**plain, "options": {key: item for key, item in value.items() if key not in own}}
    return value


def _check_options(kind: str, registry: Mapping[str, Any], spec: Any, given: set[str]) -> Any:
    """Refuse an unknown name, and options that its registry entry does not take."""
    if spec.name not in registry:
        raise SettingsError([(("name",), str(unknown(kind, spec.name, registry)))])
    known = options_of(registry[spec.name]).keys() - given
    wrong = [key for key in spec.options if key not in known]
    if wrong:
        raise SettingsError([((key,), str(unknown(f"option of {kind} {spec.name!r}", key, known))) for key in wrong])
    return spec


@settings
class DataSpec:
    """The dataset (`name` and its options, such as `root`), and the augmentation of the training images."""

    name: str = "digits"
    options: dict[str, Any] = Field(default_factory=dict)
    augment: Annotated[Augmentation, named("augmentation", AUGMENTATIONS)] = NoAugment()


@settings
class ModelSpec:
    """The architecture, the input normalisation, and the weights to start from.

    The architecture is a `name` with options, or ``package.module:factory``.
    """

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    mean: tuple[Number, ...] = (0.0,)
    std: tuple[Number, ...] = (1.0,)
    weights: Path | None = None


@settings
class HeadSpec:
    """The head and its options."""

    name: str = "linear"
    options: dict[str, Any] = Field(default_factory=dict)


def model_block(value: object) -> object:
    if isinstance(value, ModelSpec):
        return value
    spec = _validated(ModelSpec, _with_options(value, {"name", "mean", "std", "weights"}))
    return spec if ":" in spec.name else _check_options("model", MODELS, spec, {"input_shape"})


def data_block(value: object) -> object:
    if isinstance(value, DataSpec):
        return value
    spec = _validated(DataSpec, _with_options(value, {"name", "augment"}))
    return _check_options("dataset", DATASETS, spec, set())


def head_block(value: object) -> object:
    if isinstance(value, HeadSpec):
        return value
    spec = _validated(HeadSpec, _with_options(value, {"name"}))
    _check_options("head", HEADS, spec, {"features", "num_classes"})
    options = {key: number(item) for key, item in spec.options.items()}
    try:
        with torch.random.fork_rng(devices=[]):  # or else reading a recipe would change the global random numbers
            build_head(spec.name, 2, 2, **options)  # refuses wrong options now, not when the run starts
    except TypeError as error:
        raise UserError(str(error)) from None
    return HeadSpec(name=spec.name, options=options)


def _validated(cls: Any, value: object) -> Any:
    if not isinstance(value, Mapping):
        raise UserError(f"expected a mapping of keys to values, got {shown(value)}")
    return cls(**{str(key): item for key, item in value.items()})


def _each(items: Iterable[tuple[object, object]], build: Callable[[object, str], Any]) -> dict[str, Any]:
    """The result of `build` for each labelled item. An error in an item names its label."""
    built = {}
    for key, item in items:
        label = str(key)
        try:
            built[label] = build(item, label)
        except SettingsError as error:
            raise SettingsError([((label, *path), text) for path, text in error.problems]) from None
        except UserError as error:
            raise SettingsError([((label,), str(error))]) from None
    return built


def _attacks(value: object) -> object:
    def build(spec: object, label: str) -> object:
        if label in RESERVED:
            raise UserError("is the name of another score of the evaluation; expected another label")
        return named("attack", ATTACKS).func(spec)  # type: ignore[call-arg]

    return _each(value.items(), build) if isinstance(value, Mapping) else value


def _suite(value: object) -> object:
    if value is not None and (not isinstance(value, str) or value not in SUITES):
        raise unknown("suite", value, SUITES)
    return value


def _corruptions(value: object) -> object:
    if isinstance(value, bool):
        return CorruptionsSpec() if value else None
    if value is None or isinstance(value, CorruptionsSpec):
        return value
    if not isinstance(value, Mapping):
        raise UserError(f"expected true, false or a block of settings, got {shown(value)}")
    return _validated(CorruptionsSpec, value)


@settings
class EvaluationSpec:
    """How the finished model is measured on the test set.

    `suite` gives the verdict. None: no verdict. `attacks` run one by one, each on every sample, as for a paper's table.
    `samples` is the number of test images that are used. None: all of them. `corruptions` measures the accuracy on
    corrupted test images. It is true, or a block of settings.
    """

    suite: Annotated[str | None, BeforeValidator(_suite)] = "fast"
    attacks: Annotated[dict[str, Attack], BeforeValidator(_attacks)] = Field(default_factory=dict)
    samples: Count | None = None
    batch_size: BatchSize = 256
    corruptions: Annotated[CorruptionsSpec | None, BeforeValidator(_corruptions)] = None

    @model_validator(mode="after")
    def _something(self) -> EvaluationSpec:
        if self.suite is None and not self.attacks:
            raise SettingsError([(("suite",), f"expected a suite or attacks; suites: {', '.join(sorted(SUITES))}")])
        return self


@settings
class Published:
    """One `row` of a `table` in a `paper`: the result that the recipe aims at.

    `numbers` has a number for each column, or a mean and a standard deviation. `measure` says what the numbers are.
    `note` is what a reader must know to compare, such as a difference between the paper and its released code.
    """

    paper: str
    table: str
    row: str
    numbers: Annotated[dict[str, Number | tuple[Number, Number]], Field(min_length=1)]
    measure: str = "accuracy %"
    note: str = ""


def rows(value: object) -> object:
    def build(row: object, _: str) -> object:
        return row if isinstance(row, Published) else _validated(Published, row)

    return tuple(_each(enumerate(value), build).values()) if isinstance(value, list | tuple) else value
