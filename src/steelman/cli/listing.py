"""The terminal, plain tables, and ``steelman list``: the entries of each registry, and their options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from glob import escape
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

console = Console()
if not console.is_terminal:
    console = Console(width=140)  # the default width for a log file, 80, is too narrow for tables

AllowImport = Annotated[
    list[str] | None,
    typer.Option(
        help="A module that a folder or a recipe file may name: package.module. To build such a model imports and "
        "calls its code. Repeat for more."
    ),
]


class Kind(StrEnum):
    """What ``steelman list`` can list."""

    attacks = "attacks"
    suites = "suites"
    corruptions = "corruptions"
    objectives = "objectives"
    models = "models"
    heads = "heads"
    datasets = "datasets"
    augmentations = "augmentations"
    optimizers = "optimizers"
    schedules = "schedules"
    losses = "losses"
    activations = "activations"
    recipes = "recipes"


# The names that the shell completes. They are copied here, because the registries import torch, which takes a second.
FETCHABLE = ("cifar10", "cifar100", "fashion-mnist", "mnist")
ATTACKS = (
    *("adaptive", "apgd", "apgd-dlr", "apgd-t", "bim", "cw", "cw-linf", "deepfool", "eot", "fab", "fab-t", "feature"),
    *("fgsm", "fn", "mim", "multi-targeted", "nes", "pgd", "rays", "shaped", "spsa", "square", "zoo"),
)
DATASETS = ("arrays", "cifar10", "cifar100", "digits", "fashion-mnist", "folder", "mnist")
NEAREST = ("cw", "deepfool", "fab", "fab-t", "rays")  # the attacks of ``steelman distance``
CORRUPTIONS = (
    *("brightness", "contrast", "defocus-blur", "elastic-transform", "fog", "frost", "gaussian-blur", "gaussian-noise"),
    *("glass-blur", "impulse-noise", "jpeg-compression", "motion-blur", "pixelate", "saturate", "shot-noise", "snow"),
    *("spatter", "speckle-noise", "zoom-blur"),
)
SUITES = ("fast", "full", "he-adaptive", "he-blackbox", "he-whitebox", "llr", "pas", "rat", "standard")


def complete_recipe(incomplete: str) -> list[str]:
    """Built-in recipes, YAML files and folders that begin with `incomplete`."""
    from steelman.recipe_files import recipes

    places = sorted(Path().glob(f"{escape(incomplete)}*")) if not incomplete.startswith(("/", "~")) else []
    files = [str(path) for path in places if path.suffix in (".yaml", ".yml")]
    folders = [f"{path}/" for path in places if path.is_dir() and not path.name.startswith(".")]
    return [name for name in recipes() if name.startswith(incomplete)] + files + folders


def completing(names: Sequence[str]) -> Callable[[str], list[str]]:
    """A function that gives those of `names` that begin with what is typed."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


complete_attack, complete_dataset, complete_nearest = map(completing, (ATTACKS, DATASETS, NEAREST))
complete_fetchable, complete_suite, complete_corruption = map(completing, (FETCHABLE, SUITES, CORRUPTIONS))


def print_table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows under headings. Square brackets in a cell are text, not markup of Rich."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for place, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=place == 0)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def registries() -> dict[Kind, dict[str, Any]]:
    """Every registry that can be listed. Recipes are files, and have no registry here."""
    from steelman.attacks import ATTACKS
    from steelman.corruptions import CORRUPTIONS
    from steelman.data import AUGMENTATIONS, DATASETS
    from steelman.evaluation.suites import SUITES
    from steelman.heads import HEADS
    from steelman.losses import LOSSES
    from steelman.models import ACTIVATIONS, MODELS
    from steelman.objectives import OBJECTIVES
    from steelman.schedules import SCHEDULES
    from steelman.training import OPTIMIZERS

    return {
        Kind.attacks: ATTACKS,
        Kind.suites: SUITES,
        Kind.corruptions: CORRUPTIONS,
        Kind.objectives: OBJECTIVES,
        Kind.models: MODELS,
        Kind.heads: HEADS,
        Kind.datasets: DATASETS,
        Kind.augmentations: AUGMENTATIONS,
        Kind.optimizers: OPTIMIZERS,
        Kind.schedules: SCHEDULES,
        Kind.losses: {name: loss.function for name, loss in LOSSES.items()},
        Kind.activations: ACTIVATIONS,
    }


def print_list(kind: Kind) -> None:
    """Print one registry: each name, what it is, and its options."""
    if kind is Kind.recipes:
        _print_recipes()
        return
    from steelman.settings import summary_of

    entries = registries()[kind].items()
    one = "loss" if kind is Kind.losses else kind.value.removesuffix("s")
    if kind in (Kind.losses, Kind.suites, Kind.activations):
        print_table((one, "what it is"), [(name, summary_of(entry)) for name, entry in entries])
        return
    # The settings that all corruptions have would hide their constants.
    hidden = {"input_shape", "features", "num_classes", "guides", "severity", "family", "exact"}
    print_table(
        (one, "what it is", "options"),
        [
            (name, summary_of(entry) + (_kind_of(entry()) if kind is Kind.attacks else ""), _options(entry, hidden))
            for name, entry in entries
        ],
    )


def _kind_of(attack: Any) -> str:
    """The kind and the norms of an attack, in brackets."""
    words = [*(["black box"] if attack.black_box else []), *(["minimum norm"] if attack.minimum_norm else [])]
    return f" ({'; '.join([*words, ', '.join(attack.norms)])})"


def _options(entry: Any, hidden: set[str]) -> str:
    from steelman.settings import options_of

    shown = []
    for name, parameter in options_of(entry).items():
        if name in hidden:
            continue
        default = parameter.default
        plain = isinstance(default, (int, float, str, bool, tuple)) or default is None
        shown.append(f"{name}={default}" if plain and default is not parameter.empty else name)
    return ", ".join(shown)


def _print_recipes() -> None:
    from steelman.recipe_files import load, recipes

    sources = {name: load(path) for name, path in recipes().items()}
    print_table(
        ("recipe", "what it does", "published in"),
        [(name, str(source.get("description", "")).strip(), _published(source)) for name, source in sources.items()],
    )


def _published(source: dict[str, Any]) -> str:
    """The papers and tables of a recipe's numbers, such as: Pang et al. (2020), Tables 2, 5, rebuttal."""
    papers: dict[str, dict[str, None]] = {}
    for row in source.get("published") or []:
        papers.setdefault(row["paper"], {})[row["table"]] = None
    texts = []
    for paper, tables in papers.items():
        numbered = [table.removeprefix("Table ") for table in tables if table.startswith("Table ")]
        first = [f"Table{'s' * (len(numbered) > 1)} {', '.join(numbered)}"] if numbered else []
        texts.append(", ".join([paper, *first, *(table for table in tables if not table.startswith("Table "))]))
    return "; ".join(texts)
