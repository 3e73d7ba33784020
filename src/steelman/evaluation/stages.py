"""Suites and their stages. A stage is an attack, and a rule that chooses the samples for it.

In a *cascade*, later stages are more expensive and get fewer samples: robust ones with the smallest margins. In a
*protocol*, each attack gets every sample that the model gets right, as in a paper's table.
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
from steelman.errors import UserError, shown, unknown
from steelman.evaluation.result import Role

PRECISIONS = ("auto", "full", "bfloat16")
RESERVED = {"clean", "worst case"}  # names of scores that do not belong to an attack


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One attack of a suite, and the samples that it gets.

    `share` is the share of the robust samples that the stage attacks: those with the smallest margins so far. With
    `warm`, the attack starts from each sample's best point so far. `precision` is the precision of the search, if
    device and model allow it. Points are judged in full precision.

    `role` is the purpose of the stage. An "attack" breaks samples. The "pilot" comes first, and counts the samples that
    broke while flags and curve were measured. A "sentinel" gets its share at random, whatever the margins, and shows
    whether the stages before it missed samples. An "escalation" runs only if a flag is raised.
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
        """The attack's settings as plain values, with the precision of the search if it is not full."""
        reduced = {} if self.precision == "full" else {"precision": self.precision}
        return {**describe(self.attack), **reduced}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """Stages in their order. In a `protocol` each attacks every sample, else samples that earlier stages did not break.

    `precision` is the precision of the coarse searches: "auto" is bfloat16 if device and model allow it. `surrogates`
    are other models for the same task. Their adversarial points are tried on the model, to find misleading gradients.
    `curve` switches the curve on. `gallery` is the number of samples in the gallery. A model with more outputs than the
    data have classes is refused without `more_outputs`. A radius under half a grey level is refused without `tiny_eps`.
    """

    name: str
    stages: tuple[Stage, ...]
    protocol: bool = False
    precision: str = "auto"
    curve: bool = True
    gallery: int = 8
    surrogates: tuple[nn.Module, ...] = ()
    more_outputs: bool = False
    tiny_eps: bool = False

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
    """A suite that runs each attack on every sample. `changes` sets further fields of the suite."""
    stages = tuple(Stage(name=label, attack=attack) for label, attack in attacks.items())
    return Suite(name=name, stages=stages, protocol=True, **changes)


def described(suite: Suite) -> dict[str, Any]:
    """A suite as plain values, for the records."""
    stages = [
        {**{f.name: getattr(s, f.name) for f in dataclasses.fields(s)}, "attack": describe(s.attack)}
        for s in suite.stages
    ]
    return {"name": suite.name, "protocol": suite.protocol, "stages": stages}


def whole(name: str, value: int, least: int | None = None) -> int:
    """A whole number of any type as a Python int, which JSON can hold. A number below `least` is refused."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UserError(f"{name}: expected a whole number, got {shown(value)}") from None
    if least is not None and number < least:
        raise UserError(f"{name}: expected at least {least}, got {value}")
    if not -(2**63) <= number < 2**63:  # neither torch nor the evidence can hold it
        raise UserError(f"{name}: expected a whole number of at most 64 bits, got {shown(number)}")
    return number


def describe(attack: Attack) -> dict[str, Any]:
    """An attack's settings as plain values. If it contains another attack, those settings are under `inner`.

    For a function, the values are a hash of its code, and the variables that it encloses. For an object of another
    class, they are its attributes. Attacks that differ in these values count as different attacks.
    """
    anything: Any = attack
    if isinstance(anything, types.FunctionType):  # two functions with one name may have different bodies
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
    """The values as plain values under the key `values`; an empty dict for none."""
    return {"values": {name: _plain(value) for name, value in values.items()}} if values else {}


def _plain(value: Any) -> Any:
    """A plain value itself, else its text. If the text holds a memory address, the name of its type."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return type(value).__name__ if " at 0x" in str(value) else str(value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None
