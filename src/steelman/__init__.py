"""Train image classifiers to withstand adversaries, and tell the truth about how well they do."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from steelman.attacks import (
        APGD,
        ATTACKS,
        FAB,
        FGSM,
        MIM,
        PGD,
        Attack,
        CarliniWagner,
        DeepFool,
        MultiTargeted,
        RayS,
        Square,
    )
    from steelman.corruptions import CORRUPTIONS
    from steelman.corruptions.accuracy import CorruptionAccuracy
    from steelman.corruptions.measure import evaluate_corruptions
    from steelman.data import AUGMENTATIONS, DATASETS
    from steelman.errors import UserError
    from steelman.evaluation.distance import Distances, distance
    from steelman.evaluation.evaluate import evaluate
    from steelman.evaluation.result import Evaluation, Verdict
    from steelman.evaluation.stages import Suite
    from steelman.evaluation.suites import SUITES, suite_named
    from steelman.evaluation.transfer import transfer
    from steelman.evidence.compare import compare
    from steelman.evidence.verify import verify
    from steelman.heads import HEADS, embed, with_margin
    from steelman.models import MODELS
    from steelman.models.wrap import wrap
    from steelman.objectives import (
        ALP,
        AWP,
        CURE,
        GAT,
        HAT,
        LLR,
        MART,
        OBJECTIVES,
        PGDAT,
        RAT,
        TLA,
        TRADES,
        Batch,
        Criterion,
        FastAT,
        FeatureScatter,
        FreeAT,
        Objective,
        Outcome,
        Standard,
    )
    from steelman.recipe_files import RECIPES
    from steelman.rng import Key
    from steelman.schedules import SCHEDULES, Schedule
    from steelman.threat import ThreatModel
    from steelman.training.fit import fit
    from steelman.training.folder import Run, load
    from steelman.training.settings import OPTIMIZERS, RunSettings

# Where each public name lives. They are imported on first use: torch takes seconds, and `steelman --help` needs none.
_HOMES = {
    "attacks": (
        *("APGD", "ATTACKS", "FAB", "FGSM", "MIM", "PGD", "Attack", "CarliniWagner", "DeepFool", "MultiTargeted"),
        *("RayS", "Square"),
    ),
    "corruptions": ("CORRUPTIONS",),
    "corruptions.accuracy": ("CorruptionAccuracy",),
    "corruptions.measure": ("evaluate_corruptions",),
    "data": ("AUGMENTATIONS", "DATASETS"),
    "errors": ("UserError",),
    "evaluation.distance": ("Distances", "distance"),
    "evaluation.evaluate": ("evaluate",),
    "evaluation.result": ("Evaluation", "Verdict"),
    "evaluation.stages": ("Suite",),
    "evaluation.suites": ("SUITES", "suite_named"),
    "evaluation.transfer": ("transfer",),
    "evidence.compare": ("compare",),
    "evidence.verify": ("verify",),
    "heads": ("HEADS", "embed", "with_margin"),
    "models": ("MODELS",),
    "models.wrap": ("wrap",),
    "objectives": (
        *("ALP", "AWP", "CURE", "GAT", "HAT", "LLR", "MART", "OBJECTIVES", "PGDAT", "RAT", "TLA", "TRADES", "Batch"),
        *("Criterion", "FastAT", "FeatureScatter", "FreeAT", "Objective", "Outcome", "Standard"),
    ),
    "recipe_files": ("RECIPES",),
    "rng": ("Key",),
    "schedules": ("SCHEDULES", "Schedule"),
    "threat": ("ThreatModel",),
    "training.fit": ("fit",),
    "training.folder": ("Run", "load"),
    "training.settings": ("OPTIMIZERS", "RunSettings"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "ALP",
    "APGD",
    "ATTACKS",
    "AUGMENTATIONS",
    "AWP",
    "CORRUPTIONS",
    "CURE",
    "DATASETS",
    "FAB",
    "FGSM",
    "GAT",
    "HAT",
    "HEADS",
    "LLR",
    "MART",
    "MIM",
    "MODELS",
    "OBJECTIVES",
    "OPTIMIZERS",
    "PGD",
    "PGDAT",
    "RAT",
    "RECIPES",
    "SCHEDULES",
    "SUITES",
    "TLA",
    "TRADES",
    "Attack",
    "Batch",
    "CarliniWagner",
    "CorruptionAccuracy",
    "Criterion",
    "DeepFool",
    "Distances",
    "Evaluation",
    "FastAT",
    "FeatureScatter",
    "FreeAT",
    "Key",
    "MultiTargeted",
    "Objective",
    "Outcome",
    "RayS",
    "Run",
    "RunSettings",
    "Schedule",
    "Square",
    "Standard",
    "Suite",
    "ThreatModel",
    "UserError",
    "Verdict",
    "compare",
    "distance",
    "embed",
    "evaluate",
    "evaluate_corruptions",
    "fit",
    "load",
    "suite_named",
    "transfer",
    "verify",
    "with_margin",
    "wrap",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'steelman' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"steelman.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
