"""Evaluation: run attacks, verify every claim, keep the evidence."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from steelman.evaluation.result import Evaluation, Score, Verdict, interval
from steelman.evaluation.verify import verify

if TYPE_CHECKING:
    from steelman.evaluation.harness import DEFAULT_ATTACKS, evaluate
    from steelman.evaluation.stages import Stage, Suite
    from steelman.evaluation.suites import SUITES

# Imported on first use: who only checks evidence needs no attack.
_HOMES = {"DEFAULT_ATTACKS": "harness", "evaluate": "harness", "SUITES": "suites", "Stage": "stages", "Suite": "stages"}

__all__ = [
    "DEFAULT_ATTACKS",
    "SUITES",
    "Evaluation",
    "Score",
    "Stage",
    "Suite",
    "Verdict",
    "evaluate",
    "interval",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'steelman.evaluation' has no attribute {name!r}")
    return getattr(importlib.import_module(f"steelman.evaluation.{_HOMES[name]}"), name)
