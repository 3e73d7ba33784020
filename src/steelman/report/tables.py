"""The scores as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from steelman.report.entry import Entry
from steelman.report.text import accuracy, columns, groups


def scores_table(entries: Sequence[Entry]) -> Table:
    """Models by attacks; each cell an accuracy and its 95% Clopper-Pearson interval, in percent.

    The caption carries what is needed to read the numbers. Where models were evaluated under different conditions it
    says so for each.
    """
    names = columns(entries)
    table = Table(box=box.SIMPLE_HEAD, caption=_caption(entries), caption_justify="left")
    # Text, not markup: a model may be called "[red]".
    table.add_column(Text("model"), overflow="fold")
    for name in names:
        table.add_column(Text(name), justify="right", min_width=len("[88.9, 93.1]"))
    for entry in entries:
        scores = [entry.score(name) for name in names]
        table.add_row(Text(entry.name), *(Text(accuracy(score) if score else "–") for score in scores))
    return table


def _caption(entries: Sequence[Entry]) -> Text:
    found = groups(entries)
    if not found:
        return Text("no model has been evaluated")
    if len(found) == 1:
        return Text(f"{next(iter(found))}. Brackets: 95% Clopper-Pearson interval.")
    lines = ["Not evaluated alike; compare with care."]
    lines += [f"{', '.join(names)}: {text}." for text, names in found.items()]
    return Text("\n".join([*lines, "Brackets: 95% Clopper-Pearson interval."]))
