"""Rebuilds an evaluation from its evidence. No other file records an evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steelman.bounded import read_json
from steelman.errors import UserError
from steelman.evaluation.result import CurvePoint, Evaluation, Example, Flag, StageRecord, Verdict, scores_of
from steelman.evidence.bundle import TIMES, Bundle, DamagedError, read_bundle
from steelman.evidence.gallery import gallery_of
from steelman.evidence.ledger import ROBUST, WRONG


def evaluation_of(folder: Path) -> Evaluation:
    """The evaluation whose evidence is at `folder` (see `bundle_at`)."""
    bundle = read_bundle(folder)
    record, samples, threat, verdict = bundle.record, bundle.samples, bundle.threat, bundle.record["verdict"]
    times, classes = times_in(bundle.folder), len(record["classes"])
    plan = {stage["name"]: _settings(stage) for stage in record["suite"]["stages"]}
    if stranger := next((one["name"] for one in record["stages"] if one["name"] not in plan), None):
        raise DamagedError(f"{stranger} is not a stage of the suite")
    stages = tuple(
        StageRecord(**one, settings=plan[one["name"]], seconds=times.get(one["name"])) for one in record["stages"]
    )
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
        ),
        stages=stages,
        right=right_of(samples, classes),
        confusion=confusion_of(samples, classes),
        margins=margins_of(samples),
    )


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
