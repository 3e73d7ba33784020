"""Transfer: craft points on one model, and score them on another. Every point is checked."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from steelman.arguments import check_call, model_of
from steelman.attacks import PGD, Attack
from steelman.attacks.base import check_range
from steelman.attacks.engine import Search
from steelman.bounded import read_json
from steelman.data.source import ArraySource, Source, batches, name_of, stream
from steelman.errors import UserError, shown, unknown
from steelman.evaluation.checks import check_contract, predictions, threat_of
from steelman.evaluation.evaluate import versions
from steelman.evaluation.result import Score, interval
from steelman.evaluation.stages import describe, whole
from steelman.evidence.bundle import device_of
from steelman.files import write_atomic
from steelman.progress import Ticker
from steelman.rng import Key
from steelman.threat import ThreatModel

# The published attacks, but each keeps its last point: see `transfer`.
TRANSFER_ATTACKS: dict[str, Attack] = {
    "PGD-20": PGD(steps=20, keep="last"),
    "MIM-20": PGD(steps=20, start="zero", momentum=1.0, keep="last"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """The counts of one target on the points crafted on one source.

    `clean` counts the samples that the target gets right. `correct` counts those of them that it also gets right at the
    crafted point. The accuracy is correct / total, so it never exceeds the clean accuracy. The success rate of the
    attack is (clean - correct) / clean.
    """

    source: str
    target: str
    correct: int
    clean: int
    total: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """The accuracy's 95% Clopper-Pearson interval."""
        return interval(self.correct, self.total)

    @property
    def success(self) -> float | None:
        """The share of broken samples among those that the target got right. None if it got none right."""
        return (self.clean - self.correct) / self.clean if self.clean else None

    @property
    def success_interval(self) -> tuple[float, float] | None:
        """The success rate's 95% Clopper-Pearson interval."""
        return interval(self.clean - self.correct, self.clean) if self.clean else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """A matrix of sources and targets, with settings, seed, number of samples and versions.

    `clean` has a score for each target. `cells` has a cell for each source and target, source by source. `seconds` is
    the time of crafting on each source.
    """

    data: str
    norm: str
    eps: float
    low: float
    high: float
    seed: int
    total: int
    attack: dict[str, Any]
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    clean: tuple[Score, ...]
    cells: tuple[Cell, ...]
    seconds: tuple[float, ...]
    versions: dict[str, str]
    notes: tuple[str, ...] = ()

    def cell(self, source: str, target: str) -> Cell:
        """The cell of `source` and `target`."""
        if source not in self.sources:
            raise unknown("source", source, self.sources)
        if target not in self.targets:
            raise unknown("target", target, self.targets)
        return self.cells[self.sources.index(source) * len(self.targets) + self.targets.index(target)]

    def table(self) -> Table:
        """A table of sources by targets: the accuracy and the success rate, each with its 95% interval, in percent."""
        table = Table(box=box.SIMPLE_HEAD, caption=Text(self._caption()), caption_justify="left")
        # Text, not markup: rich would not show a model called "[red]".
        table.add_column(Text("crafted on \\ scored on"), overflow="fold")
        for target in self.targets:
            table.add_column(Text(target), justify="right", min_width=len("88.9% [88.9, 93.1]"))
        table.add_row(Text("(clean)"), *(Text(_percent(score.accuracy, score.interval)) for score in self.clean))
        for source in self.sources:
            cells = [self.cell(source, target) for target in self.targets]
            table.add_row(Text(source), *(Text(_cell(cell)) for cell in cells))
        return table

    def _caption(self) -> str:
        settings = ", ".join(f"{key} = {value}" for key, value in self.attack.items() if key != "attack")
        built = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [
            f"{self.data}, n = {self.total}, {self.norm}, eps = {self.eps:.4g}, seed {self.seed}; {built}.",
            f"{self.attack['attack']}: {settings}." if settings else f"{self.attack['attack']}.",
            "Accuracy over all n; broken: of those the target gets right. * the model itself was attacked (white box).",
            "Brackets: 95% Clopper-Pearson interval.",
            *(f"Note: {note}." for note in self.notes),
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values, with rates and intervals added. `from_dict` computes these from the counts."""
        record = dataclasses.asdict(self)
        record["clean"] = [
            {**dataclasses.asdict(score), "accuracy": score.accuracy, "interval": list(score.interval)}
            for score in self.clean
        ]
        record["cells"] = [
            {
                **dataclasses.asdict(cell),
                "accuracy": cell.accuracy,
                "interval": list(cell.interval),
                "success": cell.success,
                "success_interval": cell.success_interval and list(cell.success_interval),
            }
            for cell in self.cells
        ]
        for key in ("sources", "targets", "seconds", "notes"):
            record[key] = list(record[key])
        return record

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Transfer:
        """The transfer in a record of ``to_dict``."""
        given = dict(record)
        try:
            for key in ("sources", "targets", "seconds", "notes"):
                given[key] = tuple(given[key])
            given["clean"] = tuple(Score(**_fields(Score, one)) for one in given["clean"])
            given["cells"] = tuple(Cell(**_fields(Cell, one)) for one in given["cells"])
            found = cls(**given)
            expected = [(source, target) for source in found.sources for target in found.targets]
            whole = [(cell.source, cell.target) for cell in found.cells] == expected
            counts = all(0 <= cell.correct <= cell.clean <= cell.total == found.total for cell in found.cells)
        except (KeyError, TypeError) as error:
            raise UserError(f"not a transfer's record: {error}") from None
        if not whole or not counts or [score.name for score in found.clean] != list(found.targets):
            raise UserError("not a transfer's record: its cells do not fit its sources, targets and counts")
        return found

    def save(self, folder: Path) -> None:
        """Write ``transfer.json`` into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "transfer.json", json.dumps(self.to_dict(), indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> Transfer:
        """The transfer that ``save`` wrote into `folder`."""
        path = folder / "transfer.json"
        if not path.is_file():
            raise UserError(f"no transfer in {folder}: {path} is missing")
        try:
            record = read_json(path, what="the file")
            if not isinstance(record, dict):
                raise UserError("not a transfer's record: expected a mapping")
            return cls.from_dict(record)
        except ValueError as error:
            raise UserError(f"{path} is damaged: {error}") from None


def transfer(
    sources: Mapping[str, nn.Module],
    targets: Mapping[str, nn.Module] | None,
    data: Source | tuple[Tensor, Tensor],
    threat: ThreatModel,
    attack: Attack = TRANSFER_ATTACKS["PGD-20"],
    *,
    batch_size: int = 256,
    seed: int = 0,
) -> Transfer:
    """Accuracy of every target t on points crafted on every source s: mean [f_t(x) = y and f_t(x*_s) = y].

    The attack gets all samples, including those that the source gets wrong already. The range and the radius of each
    point are checked. For a point that breaks a rule, the clean image is scored instead, and a note counts such points.
    A sample that the target gets wrong without an attack counts as wrong. So a target's clean accuracy bounds its
    column. A model that is both source and target is the white-box case.

    An attack that stops at its first success ends just past the source's boundary. Such points transfer badly. So the
    default is PGD-20 with ``keep="last"``: it runs all its steps, of size 2.5 eps / 20. The other published attack is
    ``TRANSFER_ATTACKS["MIM-20"]``. A note says if an attack stops early.

    Arguments: `sources` and `targets` are models by name. None for `targets` means the sources. `data` is a source of
    images, or images and labels. Noise depends on the seed and the sample alone, so all sources start from the same
    points. All models must be on the device of the first source. A block ``with showing(console)`` shows progress.

    >>> from steelman.heads import linear
    >>> nets = {name: nn.Sequential(nn.Flatten(), linear(4, 2)) for name in "ab"}
    >>> found = transfer(nets, None, (torch.rand(16, 1, 2, 2), torch.randint(2, (16,))), ThreatModel(eps=0.1))
    >>> found.cell("a", "b").correct <= found.cell("a", "b").clean
    True

    Papernot et al. (2016), "Transferability in Machine Learning: from Phenomena to Black-Box Attacks using Adversarial
    Samples".
    """
    targets = sources if targets is None else targets
    threat_of(threat)
    seed, batch_size = whole("seed", seed), whole("batch_size", batch_size, 1)
    check_call("attack", attack, "one such as PGD(steps=20)", "model", "x", "y", "threat", index="index", key="key")
    _check_models("source", sources)
    _check_models("target", targets)
    if two := [name for name in sources if name in targets and sources[name] is not targets[name]]:
        raise UserError(f"the source and the target called {two[0]!r} are two models; give them different names")
    if not isinstance(data, Source) and not (isinstance(data, tuple) and len(data) == 2):
        raise UserError(f"data: expected (images, labels) or a source, got {shown(data)}")
    source = ArraySource(*data) if isinstance(data, tuple) else data
    device = device_of(next(iter(sources.values())))
    _check_alike({**sources, **targets}, source, threat, device)
    total = len(source)
    key = Key(seed).fold("transfer")
    right_at, seconds = dict.fromkeys(targets, 0), dict.fromkeys(targets, 0.0)
    correct = {(one, other): 0 for one in sources for other in targets}
    crafting, outside = dict.fromkeys(sources, 0.0), dict.fromkeys(sources, 0)
    done = 0
    with Ticker(f"{len(sources)} x {len(targets)} models") as tell:
        for x, y, index in stream(source, batches(total, batch_size, None), None):
            x, y, index = x.to(device), y.to(device), index.to(device)  # noqa: PLW2901
            check_range(x, threat)
            right: dict[str, Tensor] = {}
            for name, model in targets.items():
                started = time.perf_counter()
                right[name] = _right(name, model, x, y, "clean")
                seconds[name] += time.perf_counter() - started
                right_at[name] += int(right[name].sum())
            for origin, crafted_on in sources.items():
                started = time.perf_counter()
                # Clones: an attack that changes its input in place would change the check of its own points.
                x_adv = attack(crafted_on, x.clone(), y.clone(), threat, index=index.clone(), key=key)
                crafting[origin] += time.perf_counter() - started
                if x_adv.shape != x.shape:
                    raise UserError(f"{origin}: expected points of shape {tuple(x.shape)}, got {tuple(x_adv.shape)}")
                inside = threat.contains(x_adv, x)
                outside[origin] += int((~inside).sum())
                x_adv = torch.where(inside[:, None, None, None], x_adv, x)
                for name, model in targets.items():
                    still = _right(name, model, x_adv, y, "adversarial")
                    correct[origin, name] += int((right[name] & still).sum())
            done += len(x)
            tell("transfer", done, total)
    notes = [
        f"{name}: {count} points outside the threat model were not counted" for name, count in outside.items() if count
    ]
    within = getattr(attack, "attack", attack)  # EOT holds another attack, which decides when to stop
    if isinstance(within, Search) and getattr(within, "keep", None) != "last":
        notes.append(
            "this attack stops at its first success on the source, so its points transfer less than they could"
        )
    return Transfer(
        data=name_of(source),
        norm=threat.norm,
        eps=threat.eps,
        low=threat.low,
        high=threat.high,
        seed=seed,
        total=total,
        attack=describe(attack),
        sources=tuple(sources),
        targets=tuple(targets),
        clean=tuple(
            Score(name=name, settings={}, correct=right_at[name], total=total, seconds=seconds[name])
            for name in targets
        ),
        cells=tuple(
            Cell(source=one, target=other, correct=count, clean=right_at[other], total=total)
            for (one, other), count in correct.items()
        ),
        seconds=tuple(crafting.values()),
        versions=versions(),
        notes=tuple(notes),
    )


def _check_models(what: str, models: object) -> None:
    """Refuse what is not models by name, and a model in float64."""
    if not isinstance(models, Mapping) or not all(isinstance(name, str) for name in models):
        raise UserError(f"{what}s: expected models by name, such as {{'mine': model}}, got {shown(models)}")
    if not models:
        raise UserError(f"expected at least one {what}, got none")
    for name, model in models.items():
        if any(one.dtype == torch.float64 for one in model_of(name, model).parameters()):
            raise UserError(f"{name}: the model is in float64, and points are crafted in float32: call model.float()")


def _check_alike(models: Mapping[str, nn.Module], source: Source, threat: ThreatModel, device: torch.device) -> None:
    """Refuse models that cannot take these images, and models with different numbers of classes."""
    classes = {}
    for name, model in models.items():
        with _about(name):
            classes[name] = check_contract(model, source, threat, device)
    first = next(iter(classes))
    for name, count in classes.items():
        if count != classes[first]:
            raise UserError(
                f"expected models of the same classes; {first} has {classes[first]}, and {name} has {count}"
            )


def _right(name: str, model: nn.Module, x: Tensor, y: Tensor, what: str) -> Tensor:
    with _about(name):
        return predictions(model, x, what) == y


@contextlib.contextmanager
def _about(name: str) -> Iterator[None]:
    """Put the name of a model before the message of any error in this block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def _fields(kind: type[Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a record that are fields of `kind`. The other values were computed from these."""
    return {field.name: record[field.name] for field in dataclasses.fields(kind)}


def _percent(share: float, ends: tuple[float, float]) -> str:
    return f"{100 * share:.1f}% [{100 * ends[0]:.1f}, {100 * ends[1]:.1f}]"


def _cell(cell: Cell) -> str:
    white = "* " if cell.source == cell.target else ""
    text = f"{white}{_percent(cell.accuracy, cell.interval)}"
    if cell.success is None or cell.success_interval is None:
        return f"{text}\nnone to break"
    return f"{text}\nbroken {_percent(cell.success, cell.success_interval)}"
