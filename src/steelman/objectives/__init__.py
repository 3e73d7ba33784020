"""Objectives by name. To add one: a file here, a line in OBJECTIVES, a line in tests/settings.py."""

from __future__ import annotations

from collections.abc import Callable

from steelman.objectives.base import Batch, Objective, Outcome
from steelman.objectives.pgd_at import PGDAT
from steelman.objectives.standard import Standard

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "standard": Standard,
    "pgd-at": PGDAT,
}

__all__ = ["OBJECTIVES", "Batch", "Objective", "Outcome"]
