"""Write the table of methods in docs/methods.md from the registries: ``python docs/generate.py``."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from steelman.heads import HEADS
from steelman.objectives import OBJECTIVES, forwards_of, objections
from steelman.schedules import SCHEDULES
from steelman.settings import options_of, summary_of

PAGE = Path(__file__).parent / "methods.md"
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
        moves = ", then ".join({"clean": "x", "adversarial": "x*"}[one] for one in forwards_of(entry()))
        moves += " (each replay)" if hasattr(entry, "replays") else ""
        paper = said[-1] if len(said) > 1 else ""
        row = (f"`{name}`", cell(said[0]), cell(moves), where, composes(entry), cell(paper))
        rows.append(f"| {' | '.join(row)} |")
    return rows


def refusals() -> list[str]:
    """What is refused, in the words in which it is."""
    lines = []
    for entry in OBJECTIVES.values():
        for key, reason in objections(entry(), compiled=True, awp=True, auxiliary_norm=True):
            lines.append(f"- `{key}`: {reason}.")
    return lines


def registry(kind: str, entries: dict[str, Any], hidden: set[str]) -> list[str]:
    """One row for each entry of another registry."""
    rows = [f"| {kind} | what it is | options |", "|---|---|---|"]
    for name, entry in entries.items():
        options = ", ".join(f"`{option}`" for option in options_of(entry) if option not in hidden)
        rows.append(f"| `{name}` | {cell(summary_of(entry))} | {options} |")
    return rows


def text() -> str:
    """The page: what is written by hand above the mark, what is generated below it."""
    by_hand = PAGE.read_text().split(MARK)[0].rstrip() if PAGE.exists() else "# Methods"
    parts = [
        by_hand,
        "",
        MARK,
        "",
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
        "",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(text())
