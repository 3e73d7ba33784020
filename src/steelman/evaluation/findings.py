"""What is found on a few samples before the attacks: the signs of masking, and accuracy against the radius."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from steelman.evaluation.result import CurvePoint, Flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """The flags and the curve, and what the attacks behind them did.

    `parts` holds, a batch at a time, what these attacks left of the samples; a suite with a pilot counts it. `cut` says
    of how many samples there was time for how many, if not for all. `question` names what was asked besides (no curve,
    other models): who is left to the stages depends on it, so the batches that are kept of them are named after it.
    """

    flags: tuple[Flag, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    parts: tuple[dict[str, Tensor], ...] = ()
    cut: tuple[int, int] | None = None
    question: str = ""

    @property
    def broken(self) -> Tensor:
        """The rows of the samples that these attacks broke."""
        found = [part["rows"][part["broken"]] for part in self.parts]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
