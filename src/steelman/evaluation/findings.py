"""The findings of the pilot: signs of masking and the curve, measured on a few samples."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from steelman.evaluation.result import CurvePoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """The signs of masking, the curve, and the samples that the attacks behind them broke.

    `signs` holds what ``masking.measure`` measured, for each batch. `parts` holds the result of these attacks for each
    batch. Its broken samples count in a suite with a pilot stage.
    `cut` is (samples measured, samples planned) if the time ran out, else None. `question` names the options that
    change the pilot: no curve, or surrogates. These options also change which samples the stages get. So the file names
    of the stages' batches contain `question`.
    """

    signs: tuple[dict[str, Tensor], ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    parts: tuple[dict[str, Tensor], ...] = ()
    cut: tuple[int, int] | None = None
    question: str = ""

    @property
    def columns(self) -> dict[str, Tensor]:
        """All batches together: the samples' `rows`, which of them the pilot's attacks `broken`, and each sign."""
        empty = {"rows": torch.empty(0, dtype=torch.int64), "broken": torch.empty(0, dtype=torch.bool)}
        found = {name: torch.cat([part[name] for part in self.parts] or [none]) for name, none in empty.items()}
        signs = {name: torch.cat([part[name] for part in self.signs]) for name in (self.signs[0] if self.signs else ())}
        return {**found, **signs}
