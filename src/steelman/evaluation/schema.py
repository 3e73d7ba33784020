"""What evidence.json must hold to be read at all. Whether it is true is for `verify` to find out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

Count = Annotated[int, Field(ge=0, le=1 << 53)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)


class _Planned(_Part):
    name: str
    attack: dict[str, Any]
    share: Annotated[float, Field(gt=0, le=1)]
    sentinel: bool
    escalation: bool
    pilot: bool


class _Suite(_Part):
    name: str
    protocol: bool
    stages: Annotated[list[_Planned], Field(min_length=1)]


class _Stage(_Part):
    name: str
    settings: dict[str, Any]
    attacked: Count
    broken: Count
    left: Count
    forwards: Count
    backwards: Count


class _Flag(_Part):
    name: str
    figure: float
    limit: float
    raised: bool
    trust: Literal["sound", "suspect", "invalid"]
    text: str


class _Verdict(_Part):
    correct: Count
    total: Count
    suite: str
    trust: Literal["sound", "suspect", "invalid"]
    reasons: list[str]
    flags: list[_Flag]
    complete: bool
    escalated: bool
    protocol: bool


class Claims(_Part):
    """The claims of an evaluation; what more is written there is settings."""

    model: str
    weights: Hash
    data: str
    total: Annotated[Count, Field(gt=0)]
    threat: dict[str, Any]
    suite: _Suite
    seed: int
    batch_size: Annotated[Count, Field(gt=0)]
    versions: dict[str, str]
    classes: Annotated[list[str], Field(min_length=2)]
    data_digest: Hash
    clean_correct: Count
    robust_correct: Count
    stages: list[_Stage]
    verdict: _Verdict | None
    confusion: list[list[Count]]
    right: list[Count]
    curve: list[dict[str, Any]]
    curve_attack: str
    notes: list[str]
    gallery: Hash
    files: dict[str, Hash]
    seal: Hash
