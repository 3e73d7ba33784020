"""Write what the pages take from registries and settings: ``python docs/generate.py`` makes all that PAGES names."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import recipe_keys

import steelman
from steelman.attacks import ATTACKS
from steelman.attacks.engine import Search
from steelman.corruptions import CORRUPTIONS
from steelman.evaluation.suites import SUITES
from steelman.heads import HEADS
from steelman.losses import LOSSES
from steelman.models import ACTIVATIONS
from steelman.objectives import OBJECTIVES, objections
from steelman.schedules import SCHEDULES
from steelman.settings import options_of, summary_of

MARK = "<!-- written by docs/generate.py from the registries; do not edit below -->"


def paragraphs(entry: Any) -> list[str]:
    """A docstring's paragraphs, each on one line."""
    return [" ".join(part.split()) for part in (inspect.getdoc(entry) or "").split("\n\n")]


def cell(text: str) -> str:
    """Text as a cell of a table."""
    return text.replace("|", r"\|").replace("<", "&lt;").replace("*", r"\*")


def composes(entry: Any) -> str:
    """What an objective goes with, read from what it refuses."""
    refused = dict(objections(entry(), compiled=True, awp=True, auxiliary_norm=True))
    names = {"around.awp": "AWP", "around.auxiliary_norm": "auxiliary batch norm", "compute.compile": "torch.compile"}
    parts = ["every head, every schedule"] + [name for key, name in names.items() if key not in refused]
    return ", ".join(parts) + "".join(f"; not {name}" for key, name in names.items() if key in refused)


def methods() -> list[str]:
    """One row for each objective."""
    rows = [
        "| method | equation | batch norm moves with | lives in | composes with | paper |",
        "|---|---|---|---|---|---|",
    ]
    for name, entry in OBJECTIVES.items():
        said = paragraphs(entry)
        file = inspect.getsourcefile(entry)  # type: ignore[arg-type]
        where = f"`objectives/{Path(file or '').name}`"
        moves = ", then ".join({"clean": "x", "adversarial": "x*"}[one] for one in entry().forwards)
        moves += " (each replay)" if entry().repeats > 1 else ""
        paper = said[-1] if len(said) > 1 else ""
        row = (f"`{name}`", cell(said[0]), cell(moves), where, composes(entry), cell(paper))
        rows.append(f"| {' | '.join(row)} |")
    return rows


def refusals() -> list[str]:
    """One row for each reason of a refusal, in the words in which it is given, with all methods it holds for."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, entry in OBJECTIVES.items():
        for key, reason in objections(entry(), compiled=True, awp=True, auxiliary_norm=True):
            without_name = reason.removeprefix(f"{entry.__name__} ")
            reasons.setdefault((key, without_name), []).append(f"`{name}`")
    rows = [f"| `{key}` | {', '.join(names)} | {cell(reason)} |" for (key, reason), names in sorted(reasons.items())]
    return ["| key | refused by | for it |", "|---|---|---|", *rows]


def registry(kind: str, entries: dict[str, Any], hidden: set[str]) -> list[str]:
    """One row for each entry of another registry."""
    rows = [f"| {kind} | what it is | options |", "|---|---|---|"]
    for name, entry in entries.items():
        options = ", ".join(f"`{option}`" for option in options_of(entry) if option not in hidden)
        rows.append(f"| `{name}` | {cell(summary_of(entry))} | {options} |")
    return rows


def attacks(entries: dict[str, Any]) -> list[str]:
    """One row for each attack."""
    rows = ["| attack | what it does | kind | norms | lives in | paper |", "|---|---|---|---|---|---|"]
    for name, entry in entries.items():
        does, paper = summary_and_paper(entry)
        row = (f"`{name}`", cell(does), *kind_and_norms(entry), f"`{home_of(entry)}`", cell(paper))
        rows.append(f"| {' | '.join(row)} |")
    return rows


def kind_and_norms(entry: Any) -> tuple[str, str]:
    """What an attack may ask the model, what it looks for, and in which norms."""
    made_by = class_of(entry)
    black, minimum, norms = (
        getattr(made_by, name, getattr(Search, name)) for name in ("black_box", "minimum_norm", "norms")
    )
    if isinstance(norms, property):  # an attack around another has no kind of its own
        return "that of its attack", "those of its attack"
    kind = f"{'black' if black else 'white'} box, {'minimum norm' if minimum else 'budget'}"
    return kind, ", ".join(norms)


def summary_and_paper(entry: Any) -> tuple[str, str]:
    """What an attack does, and where that is from: a docstring's last paragraph that is no example, or the end of a
    summary, (Author, year)."""
    said = [part for part in paragraphs(class_of(entry)) if not part.startswith(">>>")]
    summary = getattr(entry, "summary", None) or said[0]
    if cited := re.fullmatch(r"(.*?) ?\(([^()]*, \d{4}[^()]*)\)\.", summary):
        return f"{cited[1]}.", re.sub(r", (\d{4})", r" (\1)", cited[2]) + "."
    return summary, said[-1] if len(said) > 1 else ""


def home_of(entry: Any) -> str:
    """The file that an entry is in, below the package."""
    file = Path(inspect.getsourcefile(class_of(entry)) or "").resolve()
    package = Path(steelman.__file__).resolve().parent
    return file.relative_to(package).as_posix() if file.is_relative_to(package) else file.name


def class_of(entry: Any) -> Any:
    """An entry's class, also where some of its settings are given."""
    return entry.func if isinstance(entry, functools.partial) else entry


def methods_part() -> list[str]:
    """The generated part of methods.md."""
    return [
        "## Objectives",
        "",
        *methods(),
        "",
        "## What is refused, and why",
        "",
        *refusals(),
        "",
        "## Heads",
        "",
        *registry("head", HEADS, {"features", "num_classes"}),
        "",
        "## Schedules",
        "",
        *registry("schedule", SCHEDULES, set()),
    ]


def attacks_part() -> list[str]:
    """The generated part of attacks.md."""
    return ["## All attacks", "", *attacks(ATTACKS)]


def corruptions_part() -> list[str]:
    """The generated part of corruptions.md: a row for each corruption, and its constants in both families."""
    rows = ["| corruption | what it does | constants | lives in |", "|---|---|---|---|"]
    tables = ["| corruption | CIFAR-10-C, severity 1 to 5 | ImageNet-C, severity 1 to 5 |", "|---|---|---|"]
    for name, entry in CORRUPTIONS.items():
        made_by = class_of(entry)
        names = ", ".join(f"`{one}`" for one in made_by.NAMES)
        rows.append(f"| `{name}` | {cell(paragraphs(entry)[0])} | {names} | `{home_of(entry)}` |")
        both = (
            "; ".join(", ".join(f"{value:.4g}" for value in row) for row in table)
            for table in (made_by.CIFAR, made_by.IMAGENET)
        )
        tables.append(f"| `{name}` | {' | '.join(both)} |")
    return ["## All corruptions", "", *rows, "", "## Constants", "", *tables]


def recipe_part() -> list[str]:
    """The generated part of recipe.md: a table for each block of keys, then one for each registry."""
    blocks: dict[str, list[str]] = {}
    for key, kind, default, does in recipe_keys.every_key():
        block = re.split(r"[.\[]", key)[0]
        block = block if block not in (key, "published") else "The run itself"
        rows = blocks.setdefault(block, ["| key | type | default | what it does |", "|---|---|---|---|"])
        rows.append(f"| `{key}` | {kind} | {default} | {cell(does)} |")
    lines = ["## All keys"]
    for block, rows in blocks.items():
        lines += ["", f"### {block}", "", *rows]
    for title, entries in recipe_keys.NAMED.values():
        lines += ["", f"## {title}", "", *choices(title.lower().removesuffix("s"), entries)]
    for title, entries, what in (
        ("Suites", SUITES, "What `evaluation.suite` can be."),
        ("Losses", {name: loss.function for name, loss in LOSSES.items()}, "What an attack's `loss` can be."),
        ("Activations", ACTIVATIONS, "What a model's `activation` can be."),
    ):
        names = (f"| `{name}` | {cell(summary_of(entry))} |" for name, entry in entries.items())
        lines += ["", f"## {title}", "", what, "", "| name | what it is |", "|---|---|", *names]
    return lines


def choices(kind: str, entries: dict[str, Any]) -> list[str]:
    """One row for each name of a registry: what it is, and its options with their defaults."""
    rows = [f"| {kind} | what it is | options and their defaults |", "|---|---|---|"]
    for name, entry in entries.items():
        options = ", ".join(f"`{option}`" for option in recipe_keys.options(entry))
        rows.append(f"| `{name}` | {cell(summary_of(entry))} | {options} |")
    return rows


PAGES: dict[str, Callable[[], list[str]]] = {
    "methods.md": methods_part,
    "attacks.md": attacks_part,
    "corruptions.md": corruptions_part,
    "recipe.md": recipe_part,
}


def page(name: str) -> Path:
    """Where a page is."""
    return Path(__file__).parent / name


def text(name: str) -> str:
    """A page: what is written by hand above the mark, what is generated below it."""
    title = f"# {Path(name).stem.capitalize()}"
    by_hand = page(name).read_text().split(MARK)[0].rstrip() if page(name).exists() else title
    return "\n".join([by_hand, "", MARK, "", *PAGES[name](), ""])


if __name__ == "__main__":
    for name in PAGES:
        page(name).write_text(text(name))
