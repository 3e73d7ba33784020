"""Rebuilds an evaluation from its evidence. No other file records an evaluation.

`kept_in` reads what the verdict follows from. `evaluation_of` reads the verdict as it is claimed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import steelman
from steelman.bounded import read_json
from steelman.errors import UserError
from steelman.evaluation.result import CurvePoint, Evaluation, Example, Flag, StageRecord, Verdict, scores_of
from steelman.evaluation.signs import SIGNS
from steelman.evaluation.verdict import Kept
from steelman.evidence.bundle import SIGNS_FILE, TIMES, Bundle, DamagedError, read_bundle
from steelman.evidence.gallery import gallery_of
from steelman.evidence.ledger import ROBUST, WRONG


def evaluation_of(folder: Path) -> Evaluation:
    """The evaluation whose evidence is at `folder` (see `bundle_at`). Claims that contradict each other are refused."""
    from steelman.evidence.consistency import check_consistency  # it imports this file

    bundle = read_bundle(folder)
    check_consistency(bundle)
    record, samples, threat, verdict = bundle.record, bundle.samples, bundle.threat, bundle.record["verdict"]
    times, classes = times_in(bundle.folder), len(record["classes"])
    stages = stages_in(bundle, times)
    correct = {"clean": record["clean_correct"], "robust": record["robust_correct"]}
    return Evaluation(
        model=record["model"],
        data=record["data"],
        classes=tuple(record["classes"]),
        norm=threat.norm,
        eps=threat.eps,
        low=threat.low,
        high=threat.high,
        seed=record["seed"],
        total=record["total"],
        versions=record["versions"],
        scores=scores_of(stages, record["total"], **correct, clean_seconds=times.get("clean")),
        curve=tuple(CurvePoint(**point) for point in record["curve"]),
        curve_attack=record["curve_attack"],
        gallery=_gallery(bundle),
        notes=tuple(record["notes"]),
        verdict=Verdict(
            correct=record["robust_correct"],
            total=record["total"],
            clean=record["clean_correct"],
            norm=threat.norm,
            eps=threat.eps,
            suite=record["suite"]["name"],
            trust=verdict["trust"],
            reasons=tuple(verdict["reasons"]),
            flags=tuple(Flag(**flag) for flag in verdict["flags"]),
            complete=verdict["complete"],
            escalated=verdict["escalated"],
            protocol=record["suite"]["protocol"],
            low=threat.low,
            high=threat.high,
        ),
        stages=stages,
        right=right_of(samples, classes),
        confusion=confusion_of(samples, classes),
        margins=margins_of(samples),
    )


def stages_in(bundle: Bundle, times: Mapping[str, float] = MappingProxyType({})) -> tuple[StageRecord, ...]:
    """The stages that ran, each with its settings, and its time if that is among `times`."""
    plan = {stage["name"]: _settings(stage) for stage in bundle.record["suite"]["stages"]}
    if stranger := next((one["name"] for one in bundle.record["stages"] if one["name"] not in plan), None):
        raise DamagedError(f"{stranger} is not a stage of the suite")
    return tuple(
        StageRecord(**one, settings=plan[one["name"]], seconds=times.get(one["name"]))
        for one in bundle.record["stages"]
    )


def kept_in(bundle: Bundle) -> Kept:
    """What the verdict in `bundle` follows from."""
    record, plan = bundle.record, bundle.record["suite"]
    return Kept(
        suite=plan["name"],
        protocol=plan["protocol"],
        roles={stage["name"]: stage["role"] for stage in plan["stages"]},
        threat=bundle.threat,
        classes=tuple(record["classes"]),
        samples=bundle.samples,
        stages=stages_in(bundle),
        signs=_signs_in(bundle),
        curve=tuple(CurvePoint(**point) for point in record["curve"]),
        random=record["random"],
        grain=record["grain"],
        escalated=record["verdict"]["escalated"],
        cut={name: (done, planned) for name, (done, planned) in record["cut"].items()},
        look_cut=None if record["look_cut"] is None else (record["look_cut"][0], record["look_cut"][1]),
    )


def _signs_in(bundle: Bundle) -> dict[str, Tensor]:
    """The columns of signs.safetensors. Empty for a protocol, whose attacks nothing checks."""
    if (SIGNS_FILE in bundle.record["files"]) == bundle.record["suite"]["protocol"]:
        there = "a protocol measures no sign" if bundle.record["suite"]["protocol"] else "it is not there"
        raise DamagedError(f"{SIGNS_FILE}: expected it for a cascade alone, and {there}")
    if bundle.record["suite"]["protocol"]:
        return {}
    part, n = bundle.tensors(SIGNS_FILE), bundle.record["total"]
    rows, broken = part.get("rows"), part.get("broken")
    if rows is None or rows.dtype != torch.int64 or rows.dim() != 1 or not bool(((rows >= 0) & (rows < n)).all()):
        raise DamagedError(f"{SIGNS_FILE}: expected a list of rows between 0 and {n - 1}")
    if broken is None or broken.dtype != torch.bool or broken.shape != rows.shape:
        raise DamagedError(f"{SIGNS_FILE}: expected for each row whether the pilot broke it")
    for name, column in part.items():
        if name in ("rows", "broken"):
            continue
        if name.removesuffix(", of") not in SIGNS and bundle.version == steelman.__version__:
            raise DamagedError(f"{SIGNS_FILE}: no sign is called {name[:40]!r}")
        of = part.get(name if name.endswith(", of") else f"{name}, of")
        good = column.dim() == 1 and column.dtype == (torch.bool if of is None else torch.int64)
        # A sign has a value for each sample or point, or a count for each batch.
        enough = column.numel() >= (len(rows) if of is None else min(len(rows), 1))
        if not good or not enough or bool((column.long() < 0).any()) or (of is not None and of.shape != column.shape):
            raise DamagedError(f"{SIGNS_FILE}: expected a list of what was measured as {name!r}")
    return part


def right_of(samples: dict[str, Tensor], classes: int) -> tuple[int, ...]:
    """How many samples of each class are right without an attack."""
    return tuple(torch.bincount(samples["label"][samples["broken_by"] != WRONG], minlength=classes).tolist())


def confusion_of(samples: dict[str, Tensor], classes: int) -> tuple[tuple[int, ...], ...]:
    """How often the model gives each answer under attack, by true class (rows) and answer (columns).

    For a sample that is wrong without an attack, it is the clean answer.
    """
    said = torch.where(samples["broken_by"] == ROBUST, samples["label"], samples["guess"])
    said = torch.where(samples["broken_by"] == WRONG, samples["clean"], said)
    table = torch.bincount(samples["label"] * classes + said, minlength=classes**2).view(classes, classes)
    return tuple(tuple(row) for row in table.tolist())


def margins_of(samples: dict[str, Tensor]) -> tuple[float, ...]:
    """The smallest margin of each robust sample, in rising order."""
    found = samples["margin"][samples["broken_by"] == ROBUST].sort().values
    return tuple(round(value, 6) for value in found.tolist())


def times_in(folder: Path) -> dict[str, float]:
    """The seconds of each stage, and of the clean answers. Empty if the file is missing or damaged."""
    try:
        found = read_json(folder / TIMES)
    except (OSError, UserError):
        return {}
    if not isinstance(found, dict) or not all(_is_time(value) for value in found.values()):
        return {}
    return found


def check_times(bundle: Bundle) -> None:
    """Raise if times.json is there, and holds anything but a time for the clean answers and for each stage."""
    path, names = bundle.folder / TIMES, {"clean", *(stage["name"] for stage in bundle.record["stages"])}
    if path.exists() and times_in(bundle.folder).keys() != names:
        raise DamagedError(f"{path}: expected a time for each of {', '.join(sorted(names))[:200]}")


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _settings(planned: dict[str, Any]) -> dict[str, Any]:
    """A stage's settings as a score shows them: with the precision of its search if that is not full."""
    reduced = {} if planned["precision"] == "full" else {"precision": planned["precision"]}
    return {**planned["attack"], **reduced}


def _gallery(bundle: Bundle) -> tuple[Example, ...]:
    shown, samples, stages = gallery_of(bundle), bundle.samples, bundle.record["suite"]["stages"]
    if shown is None:
        return ()
    return tuple(
        Example(
            index=row,
            label=int(samples["label"][row]),
            clean_prediction=int(samples["clean"][row]),
            adversarial_prediction=int(samples["guess"][row]),
            attack=stages[tried]["name"] if 0 <= tried < len(stages) else "",
            clean=shown.clean[at],
            adversarial=shown.adversarial[at],
        )
        for at, (row, tried) in enumerate(zip(shown.rows.tolist(), shown.tried.tolist(), strict=True))
    )
