"""The demo: three ways to train the same small network, the same attacks on all of them, and what to make of it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch
from rich.console import Console

from steelman import recipe as recipes
from steelman.errors import UserError
from steelman.evaluation.result import Evaluation
from steelman.report import Entry, html, tables
from steelman.training import run

RECIPES = {"standard": "digits-standard", "PGD-AT": "digits-pgd-at", "PGD-AT + HE": "digits-pgd-at-he"}
MARK = ".steelman-demo"


def run_demo(folder: Path, console: Console) -> dict[str, Evaluation]:
    """Train, attack and explain; a demo made before in the same folder is replaced, anything else is left alone."""
    if folder.exists():
        if any(folder.iterdir()) and not (folder / MARK).exists():
            raise UserError(f"{folder} holds something other than a demo; choose another --out")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
    torch.set_num_threads(1)  # networks this small gain nothing from a second one, and lose much on a busy machine
    started, found, entries = time.monotonic(), {}, []
    for place, (label, name) in enumerate(RECIPES.items(), 1):
        console.print(f"\n[bold]{place} of {len(RECIPES)}: {label}[/bold]")
        source, origin = recipes.read(name)
        console.print(source["description"], style="dim", highlight=False)
        made = run.train(source, folder / name, console=console, origin=origin, show=False)
        assert made is not None  # the demo is a single process
        found[label] = made.evaluation
        entries.append(Entry(name=label, evaluation=made.evaluation, history=made.history))
    explanation = explain(found)
    console.print()
    console.print(tables.scores_table(entries))
    html.write(folder / "report.html", entries, title="steelman demo: three ways to train", intro=explanation)
    console.print(explanation, highlight=False)
    console.print(
        f"\n{time.monotonic() - started:.0f} seconds. Open the report: {folder / 'report.html'}", soft_wrap=True
    )
    return found


def explain(found: dict[str, Evaluation]) -> str:
    """What the reader sees, from the numbers as they came."""
    standard, *robust = found.items()

    def percent(evaluation: Evaluation, name: str) -> str:
        return f"{evaluation.score(name).accuracy:.0%}"

    label, plain = standard
    everyone = [evaluation for _, evaluation in found.items()]
    least = min(evaluation.score("clean").accuracy for evaluation in everyone)
    text = (
        f"What you see: on clean digits every network is right at least {least:.0%} of the time. An adversary may "
        f"change every pixel by at most {plain.eps:g} of its range. The {label} network keeps "
        f"{percent(plain, 'clean')} on clean images but only {percent(plain, 'worst case')} once the strongest of the "
        "attacks has had its turn"
    )
    parts = [f"{name} keeps {percent(ev, 'worst case')} (clean {percent(ev, 'clean')})" for name, ev in robust]
    text += "; " + ", ".join(parts) + ". "
    reach = plain.score("worst case").interval[1]
    clear = all(ev.score("worst case").interval[0] > reach for _, ev in robust)
    text += (
        f"Their 95% intervals lie above that of the {label} network, so the difference is no accident of which images "
        "were tested. "
        if clear
        else f"Their 95% intervals overlap with that of the {label} network: this run does not settle the difference. "
    )
    intervals = [ev.score("worst case").interval for _, ev in robust]
    if max(low for low, _ in intervals) <= min(high for _, high in intervals):
        text += "Among themselves they overlap: which of the robust ones is stronger, one seed does not settle. "
    if all(evaluation.curve[-1].correct == 0 for evaluation in everyone):
        text += "Accuracy against eps falls to zero as the radius grows, as it must for an attack that works. "
    return text + ("These are small images and a small network: the table shows the effect, not a published result.")
