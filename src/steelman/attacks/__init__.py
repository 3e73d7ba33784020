"""Attacks by name. To add one: a file here, a line in ATTACKS, a line in tests/settings.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from steelman.attacks.base import Attack, untouched
from steelman.attacks.pgd import PGD


def _fixed(summary: str, **fixed: object) -> Callable[..., Attack]:
    """PGD with some settings given other defaults."""
    made = partial(PGD, **fixed)  # type: ignore[arg-type]
    made.summary = summary  # type: ignore[attr-defined]
    return made


ATTACKS: dict[str, Callable[..., Attack]] = {
    "fgsm": _fixed("One step of size eps from the clean image (Goodfellow et al., 2015).", steps=1, start="zero"),
    "bim": _fixed("Iterated FGSM from the clean image (Kurakin et al., 2017).", steps=10, start="zero"),
    "pgd": PGD,
    "mim": _fixed("BIM with momentum (Dong et al., 2018).", steps=20, start="zero", momentum=1.0),
    "adaptive": _fixed("PGD on the training loss, the head's margin included (Pang et al., 2020).", head_margin=True),
}

__all__ = ["ATTACKS", "PGD", "Attack", "untouched"]
