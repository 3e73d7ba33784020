"""The demo: three ways to train the same small network, a verdict on each, and its evidence checked."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch
from rich.console import Console

from steelman import data
from steelman import recipe as recipes
from steelman.errors import UserError
from steelman.evaluation.result import Evaluation
from steelman.evidence.verify import verify
from steelman.report import Entry, html, tables
from steelman.training import run
from steelman.training.folder import load_model

RECIPES = {"standard": "digits-standard", "PGD-AT": "digits-pgd-at", "PGD-AT + HE": "digits-pgd-at-he"}
MARK = ".steelman-demo"


def run_demo(folder: Path, console: Console) -> dict[str, Evaluation]:
    """Train, judge, check and explain. An earlier demo in this folder is replaced; anything else is left alone."""
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
        console.print(str(made.verdict), highlight=False, soft_wrap=True)
        found[label] = made.evaluation
        entries.append(Entry(name=label, evaluation=made.evaluation, history=made.history))
    console.print()
    console.print(tables.scores_table(entries))
    checked = check(folder, console)
    explanation = f"{explain(found)}\n\n{checked}"
    html.write(folder / "report.html", entries, title="steelman demo: three ways to train", intro=explanation)
    console.print(explanation, highlight=False)
    console.print(
        f"\n{time.monotonic() - started:.0f} seconds. Open the report: {folder / 'report.html'}", soft_wrap=True
    )
    return found


def check(folder: Path, console: Console) -> str:
    """Check the evidence of each verdict with its model and the images, and say what that means."""
    images = data.load("digits").test
    for name in RECIPES.values():
        model, _ = load_model(folder / name)
        done = verify(folder / name, model=model, source=images)
        console.print(
            f"evidence of {name} accepted: each of the {done.broken} adversarial images was put to the model again "
            f"(seal {done.seal[:12]}...)",
            highlight=False,
            soft_wrap=True,
        )
    console.print()
    last = folder / list(RECIPES.values())[-1]
    return (
        f"Each verdict leaves its evidence behind: every adversarial image, every answer, every count. It was checked "
        f"just now. Check it yourself with: steelman verify {last}. Change one byte in {last / 'verdict'}, and it is "
        "rejected."
    )


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
        f"change every pixel by at most {plain.eps:g} of its range. Then the {label} network is right on "
        f"{percent(plain, 'worst case')} of the images, where it was right on {percent(plain, 'clean')}"
    )
    parts = [f"{name} on {percent(ev, 'worst case')} (clean {percent(ev, 'clean')})" for name, ev in robust]
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
        text += "Among themselves they overlap: these images do not settle which of the robust ones is stronger. "
    else:
        text += "Among themselves the robust ones differ too; another seed of the training may differ otherwise. "
    if all(ev.verdict is not None and ev.verdict.trust == "sound" for ev in everyone):
        text += "All verdicts are sound: no sign was seen that the attacks failed where a network did not hold. "
    if all(evaluation.curve and evaluation.curve[-1].correct == 0 for evaluation in everyone):
        text += "Accuracy against eps falls to zero as the radius grows, as it must for an attack that works. "
    return text + ("These are small images and a small network: the table shows the effect, not a published result.")
