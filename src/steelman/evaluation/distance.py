"""The distance from each sample to its nearest adversarial point. A verdict, in contrast, is about one radius."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from steelman.arguments import text_of
from steelman.attacks import ATTACKS, Attack
from steelman.attacks.engine import Search
from steelman.data.source import Source, batches, name_of, stream
from steelman.errors import UserError
from steelman.evaluation.checks import as_model, check_contract, check_model, predictions, source_of, threat_of
from steelman.evaluation.evaluate import versions
from steelman.evaluation.manners import check_manners
from steelman.evaluation.result import interval
from steelman.evaluation.stages import describe, whole
from steelman.evidence.bundle import device_of
from steelman.files import write_atomic
from steelman.precision import full_precision
from steelman.progress import Ticker
from steelman.rng import Key
from steelman.threat import ThreatModel, norms

RESAMPLES = 2000  # more would move the ends of an interval by less than a hundredth of its width
CHUNK = 2**22  # numbers drawn at a time: the memory needed does not grow with the number of samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distances:
    """The distance from each sample to the nearest adversarial point that an attack found, with the settings.

    `values` has one distance for each sample. It is 0 for a sample that the model gets wrong without an attack; `wrong`
    counts these samples. It is `widest` for a sample without an adversarial point; `unreached` counts these samples. No
    distance exceeds `widest`. `forwards` and `backwards` are the passes of all samples together.
    """

    model: str
    data: str
    norm: str
    eps: float
    widest: float
    seed: int
    attack: dict[str, Any]
    values: tuple[float, ...]
    wrong: int
    unreached: int
    forwards: int
    backwards: int
    seconds: float
    versions: dict[str, str]

    @property
    def total(self) -> int:
        return len(self.values)

    @property
    def mean(self) -> float:
        """The mean over all samples. With RayS in linf, it is the average decision boundary distance (ADBD)."""
        return float(np.mean(self.values))

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @functools.cached_property
    def mean_interval(self) -> tuple[float, float]:
        """The mean's 95% bootstrap interval."""
        return bootstrap(self.values, np.mean)

    @functools.cached_property
    def median_interval(self) -> tuple[float, float]:
        """The median's 95% bootstrap interval."""
        return bootstrap(self.values, np.median)

    def above(self, eps: float | None = None) -> int:
        """How many samples have a distance above `eps`. By default, `eps` is the threat model's radius."""
        return sum(value > (self.eps if eps is None else eps) for value in self.values)

    def table(self) -> Table:
        """The results as a table for the terminal."""
        table = Table(box=box.SIMPLE_HEAD, caption=Text(self._caption()), caption_justify="left")
        table.add_column(Text(f"{self.norm} distance of {self.model}"), overflow="fold")
        table.add_column("value", justify="right")
        table.add_column("95% interval", justify="right")
        adbd = " (ADBD)" if (self.attack["attack"], self.norm) == ("RayS", "linf") else ""
        for name, value, ends in (
            (f"mean{adbd}", self.mean, self.mean_interval),
            ("median", self.median, self.median_interval),
        ):
            table.add_row(name, f"{value:.5g}", "[{:.5g}, {:.5g}]".format(*ends))
        count = self.above()
        low, high = interval(count, self.total)
        share = f"[{100 * low:.1f}, {100 * high:.1f}]"
        table.add_row(Text(f"farther than eps = {self.eps:.4g}"), f"{100 * count / self.total:.1f}%", Text(share))
        table.add_row("wrong without an attack, distance 0", str(self.wrong), "")
        table.add_row(Text(f"boundary not reached, counted as {self.widest:.4g}"), str(self.unreached), "")
        return table

    def _caption(self) -> str:
        settings = ", ".join(f"{key} = {value}" for key, value in self.attack.items() if key != "attack")
        built = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        passes = f"{self.forwards / self.total:,.1f} forward and {self.backwards / self.total:,.1f} backward passes"
        lines = [
            f"{self.data}, n = {self.total}, seed {self.seed}; {built}.",
            f"{self.attack['attack']}: {settings}." if settings else f"{self.attack['attack']}.",
            f"{passes} a sample, {self.seconds:.1f} s.",
            "Each distance is an upper bound: another attack may find a nearer point.",
            "Intervals: bootstrap over the samples for mean and median, Clopper-Pearson for the share.",
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values, with the mean, the median and their intervals added."""
        record = dataclasses.asdict(self)
        record["values"] = list(self.values)
        found = {
            "total": self.total,
            "mean": self.mean,
            "mean_interval": list(self.mean_interval),
            "median": self.median,
            "median_interval": list(self.median_interval),
            "above_eps": self.above(),
        }
        return {**found, **record}

    def save(self, folder: Path) -> None:
        """Write ``distances.json`` into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "distances.json", json.dumps(self.to_dict(), indent=1).encode())


def distance(
    model: nn.Module,
    x: Tensor | Source,
    y: Tensor | None,
    threat: ThreatModel,
    attack: Attack,
    *,
    name: str = "model",
    batch_size: int = 256,
    seed: int = 0,
) -> Distances:
    """Mean and median over the samples of min { ||x' - x||_p : f(x') != y }.

    `attack` may miss the minimum, so each distance is an upper bound.

    A sample that the model gets wrong without an attack has distance 0. The attack's own claims do not count.
    Each of its points goes through the model again in full precision, and its distance is measured here. A point
    outside the range does not count, and neither does a point that the model gets right.

    Arguments: `x` and `y` are images and labels, or `x` is a source and `y` is None. `attack` looks for the nearest
    point, as RayS, DeepFool, FAB and C&W do. `threat` sets the norm and the range. Only ``above`` and the restarts of
    FAB use its radius. `name` is the model's name in the record. The model is attacked on its own device.

    ``first(source, 1000)`` takes a part of a source. A block ``with showing(console)`` shows progress.

    With RayS in linf, the mean is the average decision boundary distance (ADBD).

    Chen and Gu (2020), "RayS: A Ray Searching Method for Hard-label Adversarial Attack", section 5.

    >>> from steelman.attacks.rays import RayS
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).eval()
    >>> _ = net[1].weight.data.copy_(torch.tensor([[1.0, -1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))
    >>> _ = net[1].bias.data.copy_(torch.tensor([-0.2, 0.0]))
    >>> x, y = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> found = distance(net, x, y, ThreatModel(eps=0.1), RayS(queries=200))
    >>> [round(value, 2) for value in found.values], round(found.mean, 2), found.wrong, found.above()
    ([0.2, 0.0], 0.1, 1, 1)
    """
    if not isinstance(attack, Search) or not attack.minimum_norm:
        raise UserError(
            f"attack: expected one that looks for the nearest point, got {type(attack).__name__}; "
            f"choices: {', '.join(able())}"
        )
    threat_of(threat)
    if threat.norm not in attack.norms:
        raise UserError(
            f"attack: {type(attack).__name__} knows the norms {', '.join(attack.norms)}, and the norm is {threat.norm}"
        )
    seed, batch_size, name = whole("seed", seed), whole("batch_size", batch_size, 1), text_of("name", name)
    check_model(model)
    source, device = source_of(x, y, threat), device_of(model)
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False), full_precision():
        check_contract(model, source, threat, device)
        check_manners(model, source, device, most=batch_size)
        started, key = time.perf_counter(), Key(seed).fold("distance")
        total, widest = len(source), threat.widest(source.shape)
        values, wrong, forwards, backwards = list[float](), 0, 0, 0
        with Ticker(name) as tell:
            for images, labels, rows in stream(source, batches(total, batch_size, None), None):
                clean, label, index = as_model(model, images, device), labels.to(device), rows.to(device)
                right = predictions(model, clean, "clean") == label
                at = right.nonzero()[:, 0]
                found = attack.run(model, clean[at], label[at], threat, index=index[at], key=key, distances=True)
                far = torch.zeros(len(label), dtype=torch.float64, device=device)
                far[at] = _checked(model, clean[at], label[at], threat, found.nearest)
                values += far.tolist()
                wrong += int((~right).sum())
                forwards, backwards = forwards + int(found.forwards.sum()), backwards + int(found.backwards.sum())
                tell("distance", len(values), total)
    return Distances(
        model=name,
        data=name_of(source),
        norm=threat.norm,
        eps=threat.eps,
        widest=widest,
        seed=seed,
        attack=describe(attack),
        values=tuple(value if math.isfinite(value) else widest for value in values),
        wrong=wrong,
        unreached=sum(not math.isfinite(value) for value in values),
        forwards=forwards,
        backwards=backwards,
        seconds=time.perf_counter() - started,
        versions=versions(),
    )


def able() -> list[str]:
    """The names of the attacks that look for the nearest adversarial point."""
    return [name for name, entry in ATTACKS.items() if entry().minimum_norm]


def bootstrap(
    values: tuple[float, ...], statistic: Callable[..., Any], confidence: float = 0.95
) -> tuple[float, float]:
    """The percentile bootstrap interval of a statistic. The same values give the same interval.

    >>> low, high = bootstrap((0.0, 1.0) * 200, np.mean)
    >>> low < 0.5 < high, round(high - low, 2)
    (True, 0.1)
    """
    known, draw = np.asarray(values, dtype=np.float64), np.random.default_rng(0)
    rows = max(1, CHUNK // len(known))
    found = [
        statistic(known[draw.integers(len(known), size=(min(rows, RESAMPLES - done), len(known)))], axis=1)
        for done in range(0, RESAMPLES, rows)
    ]
    tail = 50 * (1 - confidence)
    low, high = np.percentile(np.concatenate(found), (tail, 100 - tail))
    return float(low), float(high)


def _checked(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, points: Tensor | None) -> Tensor:
    """The distance of each point from its image: infinity if it is out of range, or if the model gets it right."""
    if points is None or points.shape != x.shape:
        raise UserError(f"expected nearest points of shape {tuple(x.shape)} from the attack")
    # NaN fails both comparisons. A test for pixels outside the range would let NaN through.
    boxed = ((points >= threat.low) & (points <= threat.high)).flatten(1).all(dim=1)
    safe = torch.where(boxed.view(-1, *[1] * (x.dim() - 1)), points, x)
    broken = predictions(model, safe, "adversarial") != y
    return torch.where(boxed & broken, norms(safe.double() - x.double(), threat.p), math.inf)
