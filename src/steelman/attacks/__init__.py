"""Attacks by name. To add one: a file here, a line in ATTACKS, a line in tests/settings.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from steelman.attacks.base import Attack, untouched
from steelman.attacks.engine import Found, Problem, Search
from steelman.attacks.pgd import PGD


def _fixed(summary: str, kind: Callable[..., Search] = PGD, **fixed: object) -> Callable[..., Search]:
    """An attack with some settings given other defaults."""
    made = partial(kind, **fixed)
    made.summary = summary  # type: ignore[attr-defined]
    return made


ATTACKS: dict[str, Callable[..., Search]] = {
    "fgsm": _fixed("One step of size eps from the clean image (Goodfellow et al., 2015).", steps=1, start="zero"),
    "bim": _fixed("Iterated FGSM from the clean image (Kurakin et al., 2017).", steps=10, start="zero"),
    "pgd": PGD,
    "mim": _fixed("BIM with momentum (Dong et al., 2018).", steps=20, start="zero", momentum=1.0),
    "adaptive": _fixed("PGD on the training loss, the head's margin included (Pang et al., 2020).", head_margin=True),
}

__all__ = ["ATTACKS", "PGD", "Attack", "Found", "Problem", "Search", "untouched"]
