"""What a suite is made of: stages, each an attack and the samples that are its own.

A *cascade* attacks ever fewer samples with ever dearer attacks: each stage takes the survivors that came nearest to
falling. A *protocol* attacks every sample with each attack, as a paper's table has it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import marshal
import types
from collections.abc import Mapping
from typing import Any

from steelman.attacks import Attack
from steelman.attacks.engine import Precision
from steelman.errors import UserError

RESERVED = {"clean", "worst case"}  # the scores that are no attack's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One attack of a suite, and whom it attacks.

    `share` is the share of the survivors that it is given, those with the smallest margin so far; `warm` begins at each
    sample's best point so far. A `sentinel` stage is given its share whatever the margins: it is there to find out
    whether the stages before it missed something. An `escalation` stage runs only when there is reason to doubt. A
    `pilot` stage is what flags and curve found while they were measured; it comes first. `precision` is what its search
    runs in, where machine and model are up to it; what it finds is judged in full.
    """

    name: str
    attack: Attack
    share: float = 1.0
    warm: bool = False
    sentinel: bool = False
    escalation: bool = False
    pilot: bool = False
    precision: Precision = "full"

    def __post_init__(self) -> None:
        if not callable(self.attack):
            raise UserError(f"{self.name}: expected an attack, got {self.attack!r}")
        if not 0 < self.share <= 1:
            raise UserError(f"{self.name}: expected a share above 0 and at most 1, got {self.share}")
        if self.warm and not getattr(self.attack, "warm", False):
            raise UserError(f"{self.name}: {type(self.attack).__name__} cannot begin from given points")

    def described(self) -> dict[str, Any]:
        """Its attack's settings as plain values, and what the search runs in if that is not full precision."""
        reduced = {} if self.precision == "full" else {"precision": self.precision}
        return {**describe(self.attack), **reduced}


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


def protocol(attacks: Mapping[str, Attack], name: str = "custom") -> Suite:
    """Each attack on every sample."""
    stages = tuple(Stage(name=label, attack=attack) for label, attack in attacks.items())
    return Suite(name=name, stages=stages, protocol=True)


def describe(attack: Attack) -> dict[str, Any]:
    """An attack's settings as plain values; those of an attack that it is put around are under `inner`.

    Of a function or an object that is no settings class, what can be told: a function's body and what it encloses, an
    object's attributes. Another value of these is another attack.
    """
    anything: Any = attack
    if isinstance(anything, types.FunctionType):  # its name says little; another body is another attack
        code = hashlib.sha256(marshal.dumps(anything.__code__)).hexdigest()[:16]
        cells = [_content(cell) for cell in anything.__closure__ or ()]
        held = {**dict(zip(anything.__code__.co_freevars, cells, strict=True)), **(anything.__kwdefaults__ or {})}
        return {"attack": anything.__qualname__, "code": code, **_held(held)}
    if isinstance(anything, functools.partial):
        held = {str(place): value for place, value in enumerate(anything.args)} | anything.keywords
        return {"attack": "partial", "inner": describe(anything.func), **_held(held)}
    described: dict[str, Any] = {"attack": type(attack).__name__}
    if not dataclasses.is_dataclass(anything):
        return {**described, **_held(getattr(attack, "__dict__", {}))}
    for field in dataclasses.fields(anything):
        value = getattr(attack, field.name)
        if isinstance(value, Attack):
            described["inner"] = describe(value)
        elif field.repr:
            described[field.name] = _plain(value)
    return described


def _held(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a function or an object has in it, under `values`; nothing of nothing."""
    return {"values": {name: _plain(value) for name, value in values.items()}} if values else {}


def _plain(value: Any) -> Any:
    """A value that can be written down, or its text; of an object without one, its type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__name__ if " at 0x" in str(value) else str(value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None
