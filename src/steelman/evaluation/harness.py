"""Evaluation: attack, then believe only what is checked here. No attack's word is taken for its own success."""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

import steelman
from steelman.attacks import PGD, Attack
from steelman.attacks.base import check_range
from steelman.data.source import ArraySource, Source, batches, stream
from steelman.errors import UserError
from steelman.evaluation.checks import check_contract, predictions
from steelman.evaluation.result import CurvePoint, Evaluation, Example, Score
from steelman.rng import Key
from steelman.threat import ThreatModel

DEFAULT_ATTACKS: dict[str, Attack] = {
    "FGSM": PGD(steps=1, start="zero"),
    "PGD-20": PGD(steps=20),
    "PGD-20 margin": PGD(steps=20, loss="margin"),
}
RESERVED = {"clean", "worst case"}  # the scores that are no attack's
CURVE_RATIOS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
CURVE_ATTACK = PGD(steps=20)
CURVE_SAMPLES = 500


@dataclasses.dataclass
class _Tally:
    """What is known so far of one attack, or of all together ("worst case")."""

    correct: int = 0
    seconds: float = 0.0
    outside: int = 0


def evaluate(
    model: nn.Module,
    data: Source | tuple[Tensor, Tensor],
    threat: ThreatModel,
    attacks: Mapping[str, Attack] | None = None,
    *,
    name: str = "model",
    data_name: str = "data",
    samples: int | None = None,
    batch_size: int = 256,
    seed: int = 0,
    curve: bool = True,
    gallery: int = 8,
    workers: int = 0,
    device: torch.device | None = None,
    console: Console | None = None,
) -> Evaluation:
    """Accuracy, clean and under each attack, with all that is needed to read it.

    Every attack works on the samples the model gets right; each point it returns is checked for range, radius and
    prediction in full precision, and one that breaks a rule does not count. "worst case" is a sample's worst fate.

    Arguments: `data` is a source, or images and labels; `samples` takes only the first that many.

    >>> from steelman.heads import linear
    >>> net = nn.Sequential(nn.Flatten(), linear(4, 2))
    >>> found = evaluate(net, (torch.rand(16, 1, 2, 2), torch.randint(2, (16,))), ThreatModel(eps=0.1))
    >>> found.score("worst case").correct <= found.score("clean").correct
    True
    """
    attacks = dict(DEFAULT_ATTACKS if attacks is None else attacks)
    if not attacks:
        raise UserError("expected at least one attack, got none")
    if reserved := attacks.keys() & RESERVED:
        raise UserError(f"an attack cannot be called {min(reserved)!r}: that is the name of another score")
    if samples is not None and samples < 1:
        raise UserError(f"samples: expected at least 1, got {samples}")
    source = data if not isinstance(data, tuple) else ArraySource(*data)
    device = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    classes = check_contract(model, source, threat, device)
    total = len(source) if samples is None else min(samples, len(source))
    names = source.classes if len(source.classes) == classes else tuple(map(str, range(classes)))
    key, tallies = Key(seed), {label: _Tally() for label in ("clean", *attacks, "worst case")}
    examples: list[Example] = []
    gallery = gallery if source.shape[0] in (1, 3) else 0  # there is no picture of other channels to show
    with _shown(console, f"evaluating {name}", total) as advance:
        for x, y, index in stream(source, batches(total, batch_size, None), None, workers):
            x, y, index = x.to(device), y.to(device), index.to(device)  # noqa: PLW2901
            check_range(x, threat)
            started = time.perf_counter()
            clean = predictions(model, x, "clean")
            tallies["clean"].seconds += time.perf_counter() - started
            right = clean == y
            tallies["clean"].correct += int(right.sum())
            alive, shown = right.clone(), _Shown(x.clone(), clean.clone())
            for label, attack in attacks.items():
                started = time.perf_counter()
                x_adv = attack(model, x[right], y[right], threat, index=index[right], key=key.fold(label))
                tallies[label].seconds += time.perf_counter() - started
                if x_adv.shape != x[right].shape:
                    raise UserError(f"{label}: expected points of shape {x[right].shape}, got {x_adv.shape}")
                inside = threat.contains(x_adv, x[right])
                # A point outside may be anything, NaN included: the clean one stands in for it.
                x_adv = torch.where(inside[:, None, None, None], x_adv, x[right])
                tallies[label].outside += int((~inside).sum())
                guess = predictions(model, x_adv, "adversarial")
                fallen = right.clone()
                fallen[right] = inside & (guess != y[right])
                tallies[label].correct += int((right & ~fallen).sum())
                news = inside & alive[right]
                shown.take(right.nonzero()[news, 0], x_adv[news], guess[news], label)
                alive &= ~fallen
            tallies["worst case"].correct += int(alive.sum())
            for row in right.nonzero()[: gallery - len(examples), 0].tolist():
                examples.append(shown.example(row, int(index[row]), int(y[row]), x[row], int(clean[row])))
            advance(len(x))
    tallies["worst case"].seconds = sum(tallies[label].seconds for label in attacks)
    blind = all(getattr(attack, "black_box", False) for attack in attacks.values())
    curve = curve and not blind  # the curve is PGD's, and whoever asks for black-box attacks alone may have no gradient
    first = min(total, CURVE_SAMPLES) if curve else 0
    images = stream(source, batches(first, batch_size, None), None, workers)
    points = _curve(model, images, threat, first, key, device) if curve else ()
    notes = [
        f"{label}: {tally.outside} points outside the threat model were not counted"
        for label, tally in tallies.items()
        if tally.outside
    ]
    return Evaluation(
        model=name,
        data=data_name,
        classes=names,
        norm=threat.norm,
        eps=threat.eps,
        low=threat.low,
        high=threat.high,
        seed=seed,
        total=total,
        versions=versions(),
        scores=tuple(
            Score(
                name=label,
                settings=describe(attacks[label]) if label in attacks else {},
                correct=tally.correct,
                total=total,
                seconds=tally.seconds,
            )
            for label, tally in tallies.items()
        ),
        curve=points,
        curve_attack=f"PGD-{CURVE_ATTACK.steps}",
        gallery=tuple(examples),
        notes=tuple(notes),
    )


class _Shown:
    """For the gallery: each sample's adversarial image, the first that fooled the model or else the last tried.

    Only points inside the threat model are shown.
    """

    def __init__(self, x: Tensor, guess: Tensor) -> None:
        self.x, self.guess, self.label = x, guess, [""] * len(x)

    def take(self, rows: Tensor, x_adv: Tensor, guess: Tensor, label: str) -> None:
        """Note the points of `rows`, none of which fell to an earlier attack."""
        self.x[rows], self.guess[rows] = x_adv, guess
        for row in rows.tolist():
            self.label[row] = label

    def example(self, row: int, index: int, label: int, clean: Tensor, prediction: int) -> Example:
        return Example(
            index=index,
            label=label,
            clean_prediction=prediction,
            adversarial_prediction=int(self.guess[row]),
            attack=self.label[row],
            clean=clean.cpu(),
            adversarial=self.x[row].cpu(),
        )


def _curve(
    model: nn.Module,
    images: Iterator[tuple[Tensor, Tensor, Tensor]],
    threat: ThreatModel,
    n: int,
    key: Key,
    device: torch.device,
) -> tuple[CurvePoint, ...]:
    """Accuracy at radii around eps. A sample that fell at a smaller radius has fallen at a larger one: balls nest."""
    correct = dict.fromkeys((0.0, *CURVE_RATIOS), 0)
    for x, y, index in images:
        x, y, index = x.to(device), y.to(device), index.to(device)  # noqa: PLW2901
        alive = predictions(model, x, "clean") == y
        correct[0.0] += int(alive.sum())
        for ratio in CURVE_RATIOS:
            wider = threat.at(threat.eps * ratio)
            x_adv = CURVE_ATTACK(model, x[alive], y[alive], wider, index=index[alive], key=key.fold("curve"))
            fooled = predictions(model, x_adv, "adversarial") != y[alive]
            alive[alive.clone()] = ~(fooled & wider.contains(x_adv, x[alive]))
            correct[ratio] += int(alive.sum())
    return tuple(CurvePoint(eps=threat.eps * ratio, correct=count, total=n) for ratio, count in correct.items())


def describe(attack: Attack) -> dict[str, Any]:
    """An attack's settings as plain values; those of an attack that it is put around are under `inner`."""
    described: dict[str, Any] = {"attack": type(attack).__name__}
    fields: Any = dataclasses.fields(attack) if dataclasses.is_dataclass(attack) else ()
    for field in fields:
        value = getattr(attack, field.name)
        if isinstance(value, Attack):
            described["inner"] = describe(value)
        elif field.repr:
            plain = value is None or isinstance(value, (bool, int, float, str))
            described[field.name] = value if plain else str(value)
    return described


def versions() -> dict[str, str]:
    """What a number depends on besides settings."""
    return {
        "steelman": steelman.__version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


@contextmanager
def _shown(console: Console | None, title: str, total: int) -> Iterator[Any]:
    if console is None or not console.is_terminal:
        yield lambda _: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
