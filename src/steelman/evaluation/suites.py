"""Suites by name. To add one, write a function here, and add a line to SUITES. Protocols are in protocols.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from steelman.attacks import ATTACKS, Attack, Search
from steelman.errors import UserError, unknown
from steelman.evaluation.masking import Pilot
from steelman.evaluation.protocols import PROTOCOLS, autoattack
from steelman.evaluation.stages import Stage, Suite, protocol
from steelman.threat import ThreatModel

AHEAD = 8  # squares of one sample that the sentinel's Square tries in one batch
PILOT = Stage(name="pilot", attack=Pilot(), role="pilot")


def _cascade(name: str, threat: ThreatModel, stages: list[Stage], sentinel: float) -> Suite:
    """The given stages that work in the norm, then AutoAttack's attacks: as sentinels, and as escalations."""
    known = [stage for stage in stages if threat.norm in getattr(stage.attack, "norms", (threat.norm,))]
    official = autoattack(threat)
    watch = [
        dataclasses.replace(s, name=f"sentinel {s.name}", attack=_for_few(s.attack), share=sentinel, role="sentinel")
        for s in official
    ]
    doubt = [dataclasses.replace(s, name=f"escalated {s.name}", role="escalation") for s in official]
    return Suite(name=name, stages=(PILOT, *known, *watch, *doubt))


def _for_few(attack: Any) -> Search:
    """The same attack in fewer and larger batches. With few samples, this is faster."""
    changes = {name: value for name, value in (("together", True), ("ahead", AHEAD)) if hasattr(attack, name)}
    suited: Search = dataclasses.replace(attack, **changes)
    return suited


def _climb(threat: ThreatModel, name: str = "pgd", **options: Any) -> Search:
    """A gradient attack with steps that shrink from eps to a tenth of eps along a cosine."""
    return ATTACKS[name](step_size=threat.eps or None, decay=0.1, **options)


def _nearest(threat: ThreatModel, steps: int, start: str = "uniform") -> Search:
    """Steps towards the three classes with the nearest boundaries.

    They are chosen from the nine wrong classes with the highest logits. AutoAttack attacks all of these nine.
    """
    return _climb(threat, "multi-targeted", steps=steps, targets=3, candidates=9, start=start)


def _restarts(threat: ThreatModel, steps: int, loss: str) -> Search:
    return _for_few(_climb(threat, steps=steps, restarts=4, loss=loss, start="diversified"))


def _coarse(name: str, attack: Search, share: float = 1.0) -> Stage:
    """A stage that searches in bfloat16: exact enough for large steps, but not for small steps near the boundary."""
    return Stage(name=name, attack=attack, share=share, precision="bfloat16")


def _squares(queries: int, ahead: int) -> Search:
    """Square with small squares from the start, because it begins near the boundary, at points of other attacks."""
    return ATTACKS["square"](queries=queries, p=0.05, ahead=ahead, resign=True)


def _first(threat: ThreatModel) -> list[Stage]:
    """The first stages of `fast` and `standard`."""
    return [
        _coarse("cross-entropy", _climb(threat, steps=7, loss="scale-invariant-cross-entropy")),
        _coarse("margin", _climb(threat, steps=10, loss="probability-margin")),
        # An untargeted attack moves towards the class with the highest logit. Another class may have a nearer boundary,
        # even if its logit is lower, and even for a sample with a large margin. So this stage gets all samples.
        _coarse("short targets", _nearest(threat, steps=5)),
        _coarse("targets", _nearest(threat, steps=25), share=0.25),
        _coarse("diversified", _restarts(threat, 20, "probability-margin"), share=0.12),
        _coarse("restarts", _restarts(threat, 25, "margin"), share=0.06),
        Stage(name="near targets", attack=_for_few(ATTACKS["apgd-t"](steps=50, targets=5)), share=0.03),
        Stage(name="fine", attack=ATTACKS["apgd"](steps=50, loss="margin"), share=0.02),
        Stage(name="warm square", attack=_squares(1000, ahead=3), share=0.03, warm=True),
        Stage(name="nearest", attack=_squares(3000, ahead=6), share=0.008, warm=True),
    ]


def fast(threat: ThreatModel) -> Suite:
    """Attacks on all samples, longer ones on the smallest margins, AutoAttack on one robust sample in 250."""
    return _cascade("fast", threat, _first(threat), sentinel=0.004)


def standard(threat: ThreatModel) -> Suite:
    """`fast`, then other starts, longer attacks and more queries, AutoAttack on one robust sample in 50.

    The shares and budgets of `fast` and `standard` were chosen on training images, with two small models (MNIST,
    CIFAR-10).
    """
    more = [
        _coarse("other starts", _nearest(threat, steps=10, start="diversified"), share=0.5),
        Stage(name="dlr", attack=ATTACKS["apgd-t"](steps=50, targets=3), share=0.12),
        Stage(name="long dlr", attack=_for_few(ATTACKS["apgd-t"](steps=100)), share=0.015),
        Stage(name="warm square 2", attack=_squares(2000, ahead=3), share=0.05, warm=True),
    ]
    return _cascade("standard", threat, [*_first(threat), *more], sentinel=0.02)


def full(threat: ThreatModel) -> Suite:
    """The attacks and budgets of AutoAttack standard, each on the samples that the earlier ones did not break."""
    return Suite(name="full", stages=(PILOT, *autoattack(threat)))


SUITES: dict[str, Callable[[ThreatModel], Suite]] = {"fast": fast, "standard": standard, "full": full, **PROTOCOLS}


def suite_named(name: str, threat: ThreatModel, **changes: Any) -> Suite:
    """The suite called `name`, for a threat model. `changes` sets fields to other values.

    >>> suite_named("fast", ThreatModel(eps=0.1), precision="full").precision
    'full'
    """
    if name not in SUITES:
        raise unknown("suite", name, SUITES)
    return dataclasses.replace(SUITES[name](threat), **changes)


def suite_of(suite: str | Suite | Mapping[str, Attack], threat: ThreatModel, **changes: Any) -> Suite:
    """The suite itself, the suite of this name, or a protocol of attacks by label. `changes` sets other fields."""
    if isinstance(suite, str):
        return suite_named(suite, threat, **changes)
    if isinstance(suite, Mapping):
        return protocol(suite, **changes)
    if not isinstance(suite, Suite):
        raise UserError(f"suite: expected a name, a Suite or attacks by label, got {type(suite).__name__}")
    return dataclasses.replace(suite, **changes)
