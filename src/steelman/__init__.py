"""Train image classifiers to withstand adversaries, and tell the truth about how well they do."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from steelman.attacks import ATTACKS, PGD, Attack
    from steelman.errors import UserError
    from steelman.evaluation.evaluate import evaluate
    from steelman.evaluation.result import Evaluation
    from steelman.heads import HEADS, embed
    from steelman.objectives import OBJECTIVES, Objective
    from steelman.rng import Key
    from steelman.schedules import SCHEDULES, Schedule
    from steelman.threat import ThreatModel
    from steelman.training.run import load_model

# Where each public name lives. They are imported on first use: torch takes seconds, and `steelman --help` needs none.
_HOMES = {
    "attacks": ("ATTACKS", "PGD", "Attack"),
    "errors": ("UserError",),
    "evaluation.evaluate": ("evaluate",),
    "evaluation.result": ("Evaluation",),
    "heads": ("HEADS", "embed"),
    "objectives": ("OBJECTIVES", "Objective"),
    "rng": ("Key",),
    "training.run": ("load_model",),
    "schedules": ("SCHEDULES", "Schedule"),
    "threat": ("ThreatModel",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ATTACKS",
    "HEADS",
    "OBJECTIVES",
    "PGD",
    "SCHEDULES",
    "Attack",
    "Evaluation",
    "Key",
    "Objective",
    "Schedule",
    "ThreatModel",
    "UserError",
    "embed",
    "evaluate",
    "load_model",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'steelman' has no attribute {name!r}")
    return getattr(importlib.import_module(f"steelman.{_MODULE_OF[name]}"), name)
