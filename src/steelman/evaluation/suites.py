"""Suites by name: which attacks are run, on whom, in which order. To add one: a function here and a line in SUITES.

A *cascade* attacks ever fewer samples with ever dearer attacks: each stage takes the survivors that came nearest to
falling. A *protocol* attacks every sample with each attack, as a paper's table has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from steelman.attacks import ATTACKS, Attack, Search
from steelman.errors import UserError, unknown
from steelman.threat import ThreatModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One attack of a suite, and whom it attacks.

    `share` is the share of the survivors that it is given, those with the smallest margin so far; `warm` begins at each
    sample's best point so far. A `sentinel` stage is given its share whatever the margins: it is there to find out
    whether the stages before it missed something. An `escalation` stage runs only when there is reason to doubt.
    """

    name: str
    attack: Attack
    share: float = 1.0
    warm: bool = False
    sentinel: bool = False
    escalation: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """Stages in their order; in a `protocol` each attacks every sample, else those that the stages before left."""

    name: str
    stages: tuple[Stage, ...]
    protocol: bool = False

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        if not names:
            raise UserError(f"suite {self.name}: expected at least one attack, got none")
        for name in names:
            if name in RESERVED:
                raise UserError(f"an attack cannot be called {name!r}: that is the name of another score")
            if names.count(name) > 1:
                raise UserError(f"suite {self.name}: two attacks are called {name!r}")


RESERVED = {"clean", "worst case"}  # the scores that are no attack's


def protocol(attacks: Mapping[str, Attack], name: str = "custom") -> Suite:
    """Each attack on every sample."""
    stages = tuple(Stage(name=label, attack=attack) for label, attack in attacks.items())
    return Suite(name=name, stages=stages, protocol=True)


def _cascade(name: str, threat: ThreatModel, stages: list[Stage], sentinel: float) -> Suite:
    """The stages that know the norm; then AutoAttack's own attacks, on a few and, when there is doubt, on all."""
    known = [stage for stage in stages if threat.norm in getattr(stage.attack, "norms", (threat.norm,))]
    official = full(threat).stages
    watch = [dataclasses.replace(s, name=f"sentinel {s.name}", share=sentinel, sentinel=True) for s in official]
    doubt = [dataclasses.replace(s, name=f"escalated {s.name}", escalation=True) for s in official]
    return Suite(name=name, stages=(*known, *watch, *doubt))


def _climb(threat: ThreatModel, name: str = "pgd", **options: Any) -> Search:
    """Steps that shrink from eps to a tenth of it along a cosine."""
    return ATTACKS[name](step_size=threat.eps or None, decay=0.1, **options)


def _first(threat: ThreatModel) -> list[Stage]:
    """What both profiles begin with."""
    return [
        Stage(name="cross-entropy", attack=_climb(threat, steps=15, loss="scale-invariant-cross-entropy")),
        Stage(name="margin", attack=_climb(threat, steps=15, loss="probability-margin")),
        Stage(name="targets", attack=_climb(threat, "multi-targeted", steps=15, targets=3), share=0.5),
        Stage(
            name="diversified",
            attack=_climb(threat, steps=25, restarts=4, loss="probability-margin", start="diversified"),
            share=0.1,
        ),
        Stage(name="warm square", attack=ATTACKS["square"](queries=1000), share=0.05, warm=True),
    ]


def fast(threat: ThreatModel) -> Suite:
    """Gradient attacks for all, ever dearer ones for those nearest to falling; AutoAttack's on one survivor in 200."""
    return _cascade("fast", threat, _first(threat), sentinel=0.005)


def standard(threat: ThreatModel) -> Suite:
    """`fast`, then more restarts and targets for every survivor; AutoAttack's attacks on one survivor in 50."""
    more = [
        Stage(name="all targets", attack=_climb(threat, "multi-targeted", steps=10, start="diversified"), share=0.5),
        Stage(name="dlr", attack=ATTACKS["apgd-t"](steps=50, targets=3), share=0.2),
        Stage(name="warm square 2", attack=ATTACKS["square"](queries=2000), share=0.05, warm=True),
        Stage(name="cold square", attack=ATTACKS["square"](queries=5000), share=0.02),
    ]
    return _cascade("standard", threat, [*_first(threat), *more], sentinel=0.02)


def full(threat: ThreatModel) -> Suite:
    """The components and budgets of AutoAttack standard, each on the samples that the ones before left.

    Croce and Hein (2020). In l1, which Square here does not know, the other three.
    """
    stages = [
        Stage(name="APGD-CE", attack=ATTACKS["apgd"](steps=100)),
        Stage(name="APGD-T", attack=ATTACKS["apgd-t"](steps=100, targets=9)),
        Stage(name="FAB-T", attack=ATTACKS["fab-t"](steps=100, targets=9)),
        Stage(name="Square", attack=ATTACKS["square"](queries=5000)),
    ]
    return Suite(name="full", stages=tuple(s for s in stages if threat.norm in getattr(s.attack, "norms", ())))


SUITES: dict[str, Callable[[ThreatModel], Suite]] = {"fast": fast, "standard": standard, "full": full}


def describe(attack: Attack) -> dict[str, Any]:
    """An attack's settings as plain values; those of an attack that it is put around are under `inner`."""
    described: dict[str, Any] = {"attack": type(attack).__name__}
    fields: Any = dataclasses.fields(attack) if dataclasses.is_dataclass(attack) else ()
    for field in fields:
        value = getattr(attack, field.name)
        if isinstance(value, Attack):
            described["inner"] = describe(value)
        elif field.repr:
            plain = value is None or isinstance(value, (bool, int, float, str))
            described[field.name] = value if plain else str(value)
    return described


def suite_named(name: str, threat: ThreatModel) -> Suite:
    """The suite called `name`, made for a threat model."""
    if name not in SUITES:
        raise unknown("suite", name, SUITES)
    return SUITES[name](threat)
