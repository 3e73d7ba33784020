"""The demo trains the same small network in three ways, measures each one, and checks the evidence."""

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
    """Train, measure, check and explain. An earlier demo in this folder is replaced. Any other content is refused."""
    if folder.exists():
        if any(folder.iterdir()) and not (folder / MARK).exists():
            raise UserError(f"{folder} holds something other than a demo; choose another --out")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / MARK).touch()
    torch.set_num_threads(1)  # more threads make such small networks no faster, and much slower on a busy machine
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
    """Check the evidence of each verdict with its model and the images. Return a text for the report."""
    images = data.load("digits").test
    for name in RECIPES.values():
        model, _ = load_model(folder / name)
        done = verify(folder / name, model=model, source=images)
        console.print(
            f"evidence of {name} accepted: the model classified each of the {done.broken} adversarial images again "
            f"(seal {done.seal[:12]}...)",
            highlight=False,
            soft_wrap=True,
        )
    console.print()
    last = folder / list(RECIPES.values())[-1]
    return (
        f"Each verdict keeps its evidence: every adversarial image, every answer of the model, every count. The "
        f"evidence was checked just now. Check it yourself with: steelman verify {last}. If you change one byte in "
        f"{last / 'verdict'}, the evidence is rejected."
    )


def explain(found: dict[str, Evaluation]) -> str:
    """An explanation of the results, made from the measured numbers."""
    standard, *robust = found.items()

    def percent(evaluation: Evaluation, name: str) -> str:
        return f"{evaluation.score(name).accuracy:.0%}"

    label, plain = standard
    everyone = [evaluation for _, evaluation in found.items()]
    least = min(evaluation.score("clean").accuracy for evaluation in everyone)
    text = (
        f"What you see: every network is right on at least {least:.0%} of the clean digits. An attack may change every "
        f"pixel by at most {plain.eps:g} of its range. Under attack, the {label} network is right on "
        f"{percent(plain, 'worst case')} of the images; without an attack it is right on {percent(plain, 'clean')}"
    )
    parts = [f"{name} on {percent(ev, 'worst case')} (clean {percent(ev, 'clean')})" for name, ev in robust]
    text += ". The other networks are right under attack as follows: " + ", ".join(parts) + ". "
    reach = plain.score("worst case").interval[1]
    clear = all(ev.score("worst case").interval[0] > reach for _, ev in robust)
    text += (
        f"Their 95% intervals lie above that of the {label} network, so the choice of the test images does not explain "
        "the difference. "
        if clear
        else f"Their 95% intervals overlap with that of the {label} network: this run does not prove a difference. "
    )
    intervals = [ev.score("worst case").interval for _, ev in robust]
    if max(low for low, _ in intervals) <= min(high for _, high in intervals):
        text += "The intervals of these two overlap: the images do not prove which of the two networks is better. "
    else:
        text += "The intervals of these two do not overlap; another seed of the training may give another order. "
    if all(ev.verdict is not None and ev.verdict.trust == "sound" for ev in everyone):
        text += "All verdicts are sound: no check found a sign that the attacks were too weak. "
    if all(evaluation.curve and evaluation.curve[-1].correct == 0 for evaluation in everyone):
        text += "As the radius eps grows, accuracy falls to zero. This must happen if the attacks work. "
    return text + ("The images and the network are small: the table shows the effect, not a published result.")
