"""The fields of ``evidence.json``, their types and their limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from steelman.arguments import MOST_LETTERS
from steelman.evaluation.result import Role, Trust

Count = Annotated[int, Field(ge=0, le=1 << 53)]
Name = Annotated[str, Field(max_length=MOST_LETTERS)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Part(pydantic.BaseModel):
    # `verify` cannot check a field that it does not know. So unknown fields are refused.
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")


class _Threat(_Part):
    # A part that is left out would get a default, and the same claim could be written in two ways.
    norm: str
    eps: float
    low: float
    high: float


class _Planned(_Part):
    name: Name
    attack: dict[str, Any]
    share: Annotated[float, Field(gt=0, le=1)]
    warm: bool
    role: Role
    precision: Literal["full", "bfloat16"]


class _Suite(_Part):
    name: Name
    protocol: bool
    stages: Annotated[list[_Planned], Field(min_length=1)]


class _Stage(_Part):
    name: Name
    attacked: Count
    broken: Count
    left: Count
    forwards: Count
    backwards: Count
    outside: Count
    refuted: Count
    nonfinite: Count
    witnessed: Count
    contradicted: Count


class _Flag(_Part):
    name: Name
    figure: float
    limit: float
    raised: bool
    trust: Trust
    text: str


class _Verdict(_Part):
    trust: Trust
    reasons: list[str]
    flags: list[_Flag]
    complete: bool
    escalated: bool


class _Point(_Part):
    eps: Annotated[float, Field(ge=0)]
    correct: Count
    total: Count


class Claims(_Part):
    """The fields of ``evidence.json``."""

    format: int
    model: Name
    weights: Hash
    data: Name
    total: Annotated[Count, Field(gt=0)]
    threat: _Threat
    suite: _Suite
    seed: int
    batch_size: Annotated[Count, Field(gt=0)]
    versions: dict[str, str]
    classes: Annotated[list[Name], Field(min_length=2)]
    data_digest: Hash
    clean_correct: Count
    robust_correct: Count
    stages: list[_Stage]
    verdict: _Verdict
    curve: list[_Point]
    curve_attack: str
    notes: list[str]
    random: bool
    grain: Annotated[float, Field(ge=0, le=0.05)]
    cut: dict[str, Annotated[list[Count], Field(min_length=2, max_length=2)]]
    look_cut: Annotated[list[Count], Field(min_length=2, max_length=2)] | None
    shape: Annotated[list[Annotated[Count, Field(gt=0)]], Field(min_length=3, max_length=3)]
    files: dict[str, Hash]
    seal: Hash
