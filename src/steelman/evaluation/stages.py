"""What a suite is made of: stages, each an attack and the samples that are its own.

A *cascade* attacks ever fewer samples with ever dearer attacks: each stage takes the robust samples that came nearest
to being broken. A *protocol* attacks every sample with each attack, as a paper's table has it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import marshal
import operator
import types
from collections.abc import Mapping
from typing import Any, get_args

from torch import nn

from steelman.attacks import Attack
from steelman.attacks.engine import Precision
from steelman.errors import UserError, unknown
from steelman.evaluation.result import Role

PRECISIONS = ("auto", "full", "bfloat16")
RESERVED = {"clean", "worst case"}  # the scores that are no attack's


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One attack of a suite, and whom it attacks.

    `share` is the share of the robust samples that it is given, those with the smallest margin so far; `warm` begins at
    each sample's best point so far. `precision` is what its search runs in, where machine and model are up to it; what
    it finds is judged in full.

    `role` is what the stage is for. An "attack" breaks what it can. The "pilot" is what was broken while flags and
    curve were measured; it comes first. A "sentinel" is given its share whatever the margins, to find out whether the
    stages before it missed something. An "escalation" runs only when there is reason to doubt.
    """

    name: str
    attack: Attack
    share: float = 1.0
    warm: bool = False
    role: Role = "attack"
    precision: Precision = "full"

    def __post_init__(self) -> None:
        if not callable(self.attack):
            raise UserError(f"{self.name}: expected an attack, got {self.attack!r}")
        if self.role not in get_args(Role):
            raise unknown("role of a stage", self.role, get_args(Role))
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
    """Stages in their order; in a `protocol` each attacks every sample, else those that the stages before left.

    `precision` is what the coarse searches run in: "auto" takes bfloat16 where machine and model are up to it.
    `surrogates` are other models for the same task. Points made for them are tried too, to see whether the model's own
    gradients mislead. `curve` measures accuracy against the radius; `gallery` is how many samples are kept to look at.
    A model with more outputs than the data have classes is refused without `more_outputs`.
    """

    name: str
    stages: tuple[Stage, ...]
    protocol: bool = False
    precision: str = "auto"
    curve: bool = True
    gallery: int = 8
    surrogates: tuple[nn.Module, ...] = ()
    more_outputs: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise UserError(f"precision: expected one of {', '.join(PRECISIONS)}, got {self.precision!r}")
        object.__setattr__(self, "gallery", whole("gallery", self.gallery, 0))
        object.__setattr__(self, "surrogates", tuple(self.surrogates))
        names = [stage.name for stage in self.stages]
        if not names:
            raise UserError(f"suite {self.name}: expected at least one attack, got none")
        for name in names:
            if name in RESERVED:
                raise UserError(f"an attack cannot be called {name!r}: that is the name of another score")
            if names.count(name) > 1:
                raise UserError(f"suite {self.name}: two attacks are called {name!r}")
        pilots = [number for number, stage in enumerate(self.stages) if stage.role == "pilot"]
        if self.protocol and pilots:
            raise UserError(f"suite {self.name}: a protocol has no pilot, for nothing else breaks its samples")
        if pilots not in ([], [0]):
            raise UserError(f"suite {self.name}: expected one pilot at most, and as the first stage")


def protocol(attacks: Mapping[str, Attack], name: str = "custom", **changes: Any) -> Suite:
    """Each attack on every sample; `changes` are further fields of the suite."""
    stages = tuple(Stage(name=label, attack=attack) for label, attack in attacks.items())
    return Suite(name=name, stages=stages, protocol=True, **changes)


def whole(name: str, value: int, least: int | None = None) -> int:
    """A whole number of any kind as Python's own, for it is written down."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UserError(f"{name}: expected a whole number, got {value!r}") from None
    if least is not None and number < least:
        raise UserError(f"{name}: expected at least {least}, got {value}")
    return number


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
