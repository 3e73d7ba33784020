"""The findings of the pilot: flags and curve, measured on a few samples."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from steelman.evaluation.result import CurvePoint, Flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """The flags, the curve, and the samples that the attacks behind them broke.

    `parts` holds the result of these attacks for each batch. Its broken samples count in a suite with a pilot stage.
    `cut` is (samples measured, samples planned) if the time ran out, else None. `question` names the options that
    change the pilot: no curve, or surrogates. These options also change which samples the stages get. So the file names
    of the stages' batches contain `question`.
    """

    flags: tuple[Flag, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    parts: tuple[dict[str, Tensor], ...] = ()
    cut: tuple[int, int] | None = None
    question: str = ""

    @property
    def broken(self) -> Tensor:
        """The rows of the samples that the pilot's attacks broke."""
        found = [part["rows"][part["broken"]] for part in self.parts]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64)
