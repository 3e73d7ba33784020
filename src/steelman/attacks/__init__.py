"""Attacks by name. A new one needs a file here, a line in ATTACKS, and its settings in tests/settings.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from steelman.attacks.apgd import APGD
from steelman.attacks.base import Attack, untouched
from steelman.attacks.carlini_wagner import CarliniWagner
from steelman.attacks.deepfool import DeepFool
from steelman.attacks.engine import Found, Problem, Search
from steelman.attacks.eot import EOT
from steelman.attacks.estimated import Estimated
from steelman.attacks.fab import FAB
from steelman.attacks.feature import FeatureAttack
from steelman.attacks.fn import FNAttack
from steelman.attacks.multi_targeted import MultiTargeted
from steelman.attacks.pgd import PGD
from steelman.attacks.rays import RayS
from steelman.attacks.shaped import Shaped
from steelman.attacks.square import Square
from steelman.attacks.zoo import ZOO

FGSM = partial(PGD, steps=1, start="zero")
MIM = partial(PGD, steps=20, start="zero", momentum=1.0)


def _fixed(summary: str, kind: Callable[..., Search] = PGD, **fixed: object) -> Callable[..., Search]:
    """An entry of ATTACKS: `kind` with the settings `fixed` as new defaults, and a summary for the lists."""
    made: Any = kind if isinstance(kind, partial) else partial(kind, **fixed)
    made.summary = summary
    return cast(Callable[..., Search], made)


ATTACKS: dict[str, Callable[..., Search]] = {
    # White box: any point within eps.
    "fgsm": _fixed("One step of size eps from the clean image (Goodfellow et al., 2015).", FGSM),
    "bim": _fixed("Iterated FGSM from the clean image (Kurakin et al., 2017).", steps=10, start="zero"),
    "pgd": PGD,
    "mim": _fixed("BIM with momentum (Dong et al., 2018).", MIM),
    "cw-linf": _fixed("PGD on the margin, the loss of C&W (Carlini and Wagner, 2017).", steps=30, loss="margin"),
    "adaptive": _fixed("PGD on the training loss, the head's margin included (Pang et al., 2020).", head_margin=True),
    "apgd": APGD,
    "apgd-dlr": _fixed("Auto-PGD on the difference of logits ratio (Croce and Hein, 2020).", APGD, loss="dlr"),
    "apgd-t": _fixed("Auto-PGD towards the likeliest wrong classes (Croce and Hein, 2020).", APGD, loss="targeted-dlr"),
    "multi-targeted": MultiTargeted,
    "feature": FeatureAttack,
    "fn": FNAttack,
    "shaped": Shaped,
    # White box: the nearest point.
    "deepfool": DeepFool,
    "fab": FAB,
    "fab-t": _fixed("FAB towards each of nine wrong classes (Croce and Hein, 2020).", FAB, targets=9),
    "cw": CarliniWagner,
    # Black box.
    "square": Square,
    "rays": RayS,
    "nes": Estimated,
    "spsa": _fixed("Gradients from random signs (Uesato et al., 2018).", Estimated, noise="rademacher"),
    "zoo": ZOO,
    # Around any other attack.
    "eot": EOT,
}

__all__ = [
    "APGD",
    "ATTACKS",
    "FAB",
    "FGSM",
    "MIM",
    "PGD",
    "Attack",
    "CarliniWagner",
    "DeepFool",
    "Found",
    "MultiTargeted",
    "Problem",
    "RayS",
    "Search",
    "Square",
    "untouched",
]
