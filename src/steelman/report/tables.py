"""The scores as a table for the terminal, and the verdict as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from steelman.evaluation.result import Evaluation
from steelman.report.entry import Entry
from steelman.report.text import accuracy, ball, columns, groups

_COLOURS = {"sound": "bold green", "suspect": "bold yellow", "invalid": "bold red"}


def scores_table(entries: Sequence[Entry]) -> Table:
    """A table of models by attacks. A cell is an accuracy with its 95% Clopper-Pearson interval, in percent.

    The caption names the conditions of the evaluations. If these differ, it names them for each model.
    """
    names = columns(entries)
    table = Table(box=box.SIMPLE_HEAD, caption=_caption(entries), caption_justify="left")
    # Text, not markup: rich would not show a model called "[red]".
    table.add_column(Text("model"), overflow="fold")
    for name in names:
        table.add_column(Text(name), justify="right", min_width=len("[88.9, 93.1]"))
    for entry in entries:
        scores = [entry.score(name) for name in names]
        name = f"{entry.name} ({entry.doubt})" if entry.doubt else entry.name
        table.add_row(Text(name), *(Text(accuracy(score) if score else "–") for score in scores))
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


def verdict_text(evaluation: Evaluation) -> Text:
    """The verdict as text: robust accuracy, conditions, trust, reasons, notes, and what the attacks did.

    Without a verdict, the text is empty.
    """
    verdict = evaluation.verdict
    if verdict is None:
        return Text()
    # Text, not markup: rich would hide a part in brackets of a reason or of a suite's name.
    text = Text(f"Robust accuracy {accuracy(verdict)}", style="bold")
    text.append(
        f"  n = {verdict.total}, {ball(evaluation)}, suite {verdict.suite}, seed {evaluation.seed}\n", style="not bold"
    )
    bound = verdict.protocol and verdict.trust == "sound"
    word, colour = ("upper bound", "bold cyan") if bound else (verdict.trust, _COLOURS[verdict.trust])
    text.append("Trust: ", style="not bold")
    text.append(word, style=colour)
    if not verdict.complete:
        text.append(", not complete", style="not bold")
    if verdict.escalated:
        text.append(", escalated: all of AutoAttack on every robust sample", style="not bold")
    for reason in verdict.reasons:
        text.append(f"\n  - {reason}", style="not bold")
    for note in evaluation.notes:
        text.append(f"\n  note: {note}", style="not bold")
    if evaluation.stages and not verdict.protocol:
        broke = ", ".join(f"{stage.name} {stage.broken}" for stage in evaluation.stages if stage.broken)
        forwards = sum(stage.forwards for stage in evaluation.stages) / verdict.total
        backwards = sum(stage.backwards for stage in evaluation.stages) / verdict.total
        cost = f"{forwards:,.0f} F + {backwards:,.0f} B a sample"
        text.append(f"\nBroken by: {broke or 'nothing'}. Cost: {cost}.", style="not bold")
    return text
