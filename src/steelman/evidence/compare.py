"""Compares verdicts: which of two models has more robust samples, among the samples that both evaluations share.

Only some samples tell two models apart: those that are robust for exactly one of them. If the models are equally
robust, such a sample is robust for the first model with probability 1/2. This is McNemar's test, in its exact form.
Among many tests, some p are small by chance. Holm's correction accounts for that.

McNemar (1947), "Note on the sampling error of the difference between correlated proportions or percentages"; Holm
(1979), "A simple sequentially rejective multiple test procedure".
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor

from steelman.arguments import path_of, text_of
from steelman.errors import UserError, shown
from steelman.evaluation.result import Score
from steelman.evidence.bundle import Bundle, read_bundle
from steelman.evidence.ledger import ROBUST
from steelman.evidence.verify import verify
from steelman.threat import ThreatModel

LEVEL = 0.05  # below this corrected p, one model counts as more robust than the other


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The counts and the trust of one model, from its evidence."""

    name: str
    clean: Score
    robust: Score
    suite: str
    protocol: bool
    trust: str
    complete: bool

    @property
    def word(self) -> str:
        """The trust in a few words. A protocol does not check whether its attacks work, so it gives a bound."""
        word = "upper bound" if self.protocol and self.trust == "sound" else self.trust
        return word if self.complete else f"{word}, not complete"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """Two models on their `common` samples: how many are robust for both, for the first only, for the second only.

    `p` is the probability of a split at least as uneven, if the models were equally robust. `corrected` is Holm's p
    over all pairs. `but` is a reason why nothing follows from p, or empty.
    """

    first: str
    second: str
    common: int
    both: int
    only_first: int
    only_second: int
    p: float
    corrected: float
    but: str = ""

    @property
    def text(self) -> str:
        """The result in one sentence."""
        counts = (
            f"of {self.common} samples in common, {self.only_first} are robust for {self.first} alone, "
            f"{self.only_second} for {self.second} alone"
        )
        if self.corrected < LEVEL:
            ahead, behind = (self.first, self.second)[:: 1 if self.only_first > self.only_second else -1]
            if self.but:
                return f"more samples of {ahead} than of {behind} are robust, but {self.but}: {counts}"
            return f"{ahead} is more robust than {behind}: {counts} ({self.figures})"
        neither = f"these samples do not settle which of {self.first} and {self.second} is the stronger"
        return f"{neither}: {counts} ({self.figures})"

    @property
    def figures(self) -> str:
        """p as text, with the corrected p if that is different."""
        return f"p = {self.p:.2g}" + (f", corrected {self.corrected:.2g}" if self.corrected != self.p else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Models under one threat model: their counts, a test for each pair, and notes."""

    threat: ThreatModel
    models: tuple[Measured, ...]
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]


def compare(folders: Mapping[str, Path], *more: object) -> Comparison:
    """Check the evidence in each folder, and compare every pair of models on their common samples.

    `more` only catches a call without names, such as ``compare("runs/mine", "runs/theirs")``: it is refused.
    """
    if more or not isinstance(folders, Mapping):
        raise UserError(
            "folders: expected folders by name, such as compare({'mine': 'runs/mine', 'theirs': 'runs/theirs'}), got "
            + ", ".join(map(shown, (folders, *more)))
        )
    folders = {text_of("name", name): path_of("folder", folder) for name, folder in folders.items()}
    if len(folders) < 2:
        raise UserError(f"expected at least two evaluations to compare, got {len(folders)}")
    bundles = {}
    for name, folder in folders.items():
        verify(folder)
        bundles[name] = read_bundle(folder)
    first, *others = bundles
    for name in others:
        ours, its = bundles[first].threat, bundles[name].threat
        if ours != its:
            raise UserError(
                f"expected evaluations of one threat model; {first} is for {_ball(ours)}, and {name} for {_ball(its)}"
            )
    held = {name: _held(bundle) for name, bundle in bundles.items()}
    tested = [_pair(one, other, held[one], held[other]) for one, other in itertools.combinations(bundles, 2)]
    corrected = holm([pair.p for pair in tested])
    models = tuple(_measured(name, bundle) for name, bundle in bundles.items())
    by_name = {model.name: model for model in models}
    pairs = tuple(
        dataclasses.replace(pair, corrected=p, but=_but(pair, bundles, by_name))
        for pair, p in zip(tested, corrected, strict=True)
    )
    return Comparison(
        threat=bundles[first].threat, models=models, pairs=pairs, notes=tuple(_notes(bundles, models, pairs))
    )


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p of a split at least as uneven as this one. 1 if both counts are 0.

    >>> mcnemar(0, 5)  # 2 / 2^5
    0.0625
    >>> mcnemar(3, 3), mcnemar(0, 0)
    (1.0, 1.0)
    """
    discordant = only_first + only_second
    return float(binomtest(only_first, discordant, 0.5).pvalue) if discordant else 1.0


def holm(values: Sequence[float]) -> list[float]:
    """Holm's corrected p for each of n values.

    The smallest p is multiplied by n, the next by n - 1, and so on. No result is below an earlier one, or above 1.

    >>> holm([0.5, 0.01, 0.25])
    [0.5, 0.03, 0.5]
    """
    found, least = [0.0] * len(values), 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        least = max(least, min(1.0, (len(values) - rank) * values[place]))
        found[place] = least
    return found


def _ball(threat: ThreatModel) -> str:
    return f"{threat.norm} {threat.eps:.6g} in {threat.low:g} .. {threat.high:g}"


def _held(bundle: Bundle) -> dict[tuple[int, int], bool]:
    """Whether each sample is robust, by (digest, k). The k tells equal samples apart: 0 for the first of them."""
    seen: Counter[int] = Counter()
    held = {}
    robust: Tensor = bundle.samples["broken_by"] == ROBUST
    for digest, one in zip(bundle.samples["digest"].tolist(), robust.tolist(), strict=True):
        held[digest, seen[digest]] = one
        seen[digest] += 1
    return held


def _pair(first: str, second: str, ours: Mapping[tuple[int, int], bool], its: Mapping[tuple[int, int], bool]) -> Pair:
    common = [key for key in ours if key in its]
    if not common:
        raise UserError(f"{first} and {second} have no sample in common; expected evaluations on the same data")
    one, other = torch.tensor([ours[key] for key in common]), torch.tensor([its[key] for key in common])
    only_first, only_second = int((one & ~other).sum()), int((other & ~one).sum())
    p = mcnemar(only_first, only_second)
    return Pair(
        first=first,
        second=second,
        common=len(common),
        both=int((one & other).sum()),
        only_first=only_first,
        only_second=only_second,
        p=p,
        corrected=p,
    )


def _but(pair: Pair, bundles: Mapping[str, Bundle], models: Mapping[str, Measured]) -> str:
    """The reason why a difference would not come from the models, or an empty text."""
    records = [bundles[name].record for name in (pair.first, pair.second)]
    if records[0]["weights"] == records[1]["weights"]:
        return "they have the same weights"
    if unlike := attacked_unlike(*records):
        return f"they were not attacked alike ({'; '.join(unlike)})"
    unsound = [name for name in (pair.first, pair.second) if models[name].trust != "sound"]
    if unsound:
        return f"the verdict on {unsound[0]} is {models[unsound[0]].trust}"
    given = any(models[name].protocol for name in (pair.first, pair.second))
    return "only given attacks were tried, and nobody asked whether they work on these models" if given else ""


def attacked_unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The differences between the suites of two records, in words. The seeds may differ.

    >>> a = {"name": "pgd", "attack": {"steps": 3}, "precision": "full"}
    >>> b = {"name": "pgd", "attack": {"steps": 5}, "precision": "bfloat16"}
    >>> attacked_unlike(*({"suite": {"name": "s", "protocol": True, "stages": [stage]}} for stage in (a, b)))
    ['pgd: steps 3 and 5', 'pgd: precision full and bfloat16']
    """
    suites = one["suite"], other["suite"]
    if suites[0]["name"] != suites[1]["name"]:
        return [f"suite {suites[0]['name']} and {suites[1]['name']}"]
    stages: list[dict[str, Any]] = [{stage["name"]: stage for stage in suite["stages"]} for suite in suites]
    if list(stages[0]) != list(stages[1]) or suites[0]["protocol"] != suites[1]["protocol"]:
        return [f"stages {' and '.join(', '.join(names) for names in stages)}"]
    found = []
    for name, here in stages[0].items():
        there = stages[1][name]
        for key in {**here, **there}:
            if key == "attack":
                found += [f"{name}: {what}" for what in _apart(here[key], there[key])]
            elif here.get(key) != there.get(key):
                found.append(f"{name}: {key} {here.get(key)} and {there.get(key)}")
    return found


def measured_unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The differences between the data and the versions of two records, in words."""
    data = [] if one["data"] == other["data"] else [f"data {one['data']} and {other['data']}"]
    return data + _apart(one["versions"], other["versions"])


def _apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [f"{key} {one.get(key)} and {other.get(key)}" for key in {**one, **other} if one.get(key) != other.get(key)]


def _measured(name: str, bundle: Bundle) -> Measured:
    record, verdict = bundle.record, bundle.record["verdict"]

    def score(what: str) -> Score:
        return Score(name=what, settings={}, correct=record[f"{what}_correct"], total=record["total"])

    return Measured(
        name=name,
        clean=score("clean"),
        robust=score("robust"),
        suite=record["suite"]["name"],
        protocol=record["suite"]["protocol"],
        trust=verdict["trust"],
        complete=verdict["complete"],
    )


def _notes(bundles: Mapping[str, Bundle], models: Sequence[Measured], pairs: Sequence[Pair]) -> list[str]:
    """Notes on what makes the numbers less comparable."""
    notes = []
    for pair in pairs:
        counts = [bundles[name].record["total"] for name in (pair.first, pair.second)]
        if pair.common < max(counts):
            notes.append(
                f"{pair.first} ({counts[0]} samples) and {pair.second} ({counts[1]}) have only {pair.common} in "
                "common; their test rests on these, the accuracies on all"
            )
        if bundles[pair.first].record["weights"] == bundles[pair.second].record["weights"]:
            notes.append(f"{pair.first} and {pair.second} have the same weights")
        one, other = (bundles[name].record for name in (pair.first, pair.second))
        if unlike := attacked_unlike(one, other):
            notes.append(
                f"{pair.first} and {pair.second} were not attacked alike ({'; '.join(unlike)}): weaker attacks leave "
                "more samples robust"
            )
        if unlike := measured_unlike(one, other):
            notes.append(f"{pair.first} and {pair.second} were not measured alike ({'; '.join(unlike)})")
    for model in models:
        if model.trust != "sound":
            notes.append(f"the verdict on {model.name} is {model.trust}: its robust samples may not be")
        if not model.complete:
            notes.append(f"the evaluation of {model.name} is not complete: more samples would be broken")
    return notes
