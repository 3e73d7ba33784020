"""Objectives by name. A new one needs a file here, a line in OBJECTIVES, and a test in tests/test_methods.py."""

from __future__ import annotations

from collections.abc import Callable

from steelman.objectives.alp import ALP
from steelman.objectives.awp import AWP
from steelman.objectives.base import Batch, Objective, Outcome, check_model, objections
from steelman.objectives.criterion import Criterion
from steelman.objectives.cure import CURE
from steelman.objectives.fast_at import FastAT
from steelman.objectives.feature_scatter import FeatureScatter
from steelman.objectives.free_at import FreeAT
from steelman.objectives.gat import GAT
from steelman.objectives.hat import HAT
from steelman.objectives.llr import LLR
from steelman.objectives.mart import MART
from steelman.objectives.pgd_at import PGDAT
from steelman.objectives.rat import RAT
from steelman.objectives.standard import Standard
from steelman.objectives.tla import TLA
from steelman.objectives.trades import TRADES

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "standard": Standard,
    "pgd-at": PGDAT,
    "alp": ALP,
    "trades": TRADES,
    "mart": MART,
    "llr": LLR,
    "cure": CURE,
    "rat": RAT,
    "free-at": FreeAT,
    "fast-at": FastAT,
    "tla": TLA,
    "feature-scatter": FeatureScatter,
    "gat": GAT,
    "hat": HAT,
}

__all__ = [
    "ALP",
    "AWP",
    "CURE",
    "GAT",
    "HAT",
    "LLR",
    "MART",
    "OBJECTIVES",
    "PGDAT",
    "RAT",
    "TLA",
    "TRADES",
    "Batch",
    "Criterion",
    "FastAT",
    "FeatureScatter",
    "FreeAT",
    "Objective",
    "Outcome",
    "Standard",
    "check_model",
    "objections",
]
