"""The pilot: signs of masking and the curve, measured on a few samples before the attacks.

What its own attacks break is broken, and in a suite that has a place for it, it counts.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from steelman.attacks import Found
from steelman.errors import UserError
from steelman.evaluation.cascade import Runner
from steelman.evaluation.curve import accuracy_curve, levels_off
from steelman.evaluation.masking import signs
from steelman.evaluation.result import CurvePoint, Flag
from steelman.rng import Key
from steelman.settings import settings
from steelman.threat import ThreatModel


class Finds:
    """The first adversarial point that any of several attacks found for each sample, or else the first one's best, and
    what all of them cost."""

    def __init__(self, x: Tensor) -> None:
        self.x_adv = x.clone()
        self.success, self.tried = (torch.zeros(len(x), dtype=torch.bool, device=x.device) for _ in range(2))
        self.counts = torch.zeros(2, len(x), dtype=torch.int64, device=x.device)

    def keep(self, rows: Tensor, found: Found) -> None:
        """What an attack found for the samples `rows`, of which one may come several times."""
        rows = rows.to(self.x_adv.device)
        self.counts.index_add_(1, rows, torch.stack((found.forwards, found.backwards)))
        news = torch.where(self.tried[rows], found.success & ~self.success[rows], True)
        # Of several points of one sample the first that fools the model, or the first.
        order = (news.long() + found.success.long()).argsort(descending=True, stable=True)[: int(news.sum())]
        firsts = {int(row): int(at) for row, at in zip(rows[order].flip(0), order.flip(0), strict=True)}
        at, places = (torch.tensor(list(part), dtype=torch.int64) for part in (firsts, firsts.values()))
        self.x_adv[at], self.success[at] = found.x_adv[places], found.success[places]
        self.tried[at] = True


@settings
class Pilot:
    """The attacks that flags are measured with, as one attack."""

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: ThreatModel,
        *,
        index: Tensor | None = None,
        key: Key = Key(0),  # noqa: B008 - a Key is frozen
        target: Tensor | None = None,
    ) -> Tensor:
        if target is not None:
            raise UserError("a pilot looks for any wrong class, and knows no target")
        finds, index = Finds(x), torch.arange(len(x), device=x.device) if index is None else index
        signs(model, x, y, threat, index=index, key=key, keep=finds.keep)
        return finds.x_adv


def look_ahead(
    run: Runner, surrogates: Sequence[nn.Module] = (), *, curve: bool = True
) -> tuple[list[Flag], tuple[CurvePoint, ...]]:
    """The flags that can be raised before any stage, and accuracy against the radius; measured once, whatever
    interrupts the evaluation after."""
    run.tell("pilot", 0, 1)
    part = run.work.batch("pilot", lambda: _measure(run, surrogates, curve=curve))
    told = json.loads(bytes(part.pop("told").tolist()))
    points = tuple(CurvePoint(**point) for point in told["curve"])
    for number, stage in enumerate(run.suite.stages):
        if stage.pilot:
            run.take(number, part)
    return [*(Flag(**one) for one in told["flags"]), *levels_off(points, run.suite)], points


def _measure(run: Runner, surrogates: Sequence[nn.Module], *, curve: bool) -> dict[str, Tensor]:
    started, flags, part = time.perf_counter(), list[Flag](), dict[str, Tensor]()
    keep = None
    if not run.suite.protocol:
        rows = run.pilot()
        x, y = run.images(rows)
        finds = Finds(x)
        keep = finds.keep
        flags = signs(
            run.model,
            x,
            y,
            run.threat,
            index=run.index(rows),
            key=run.key.fold("signs"),
            surrogates=surrogates,
            batch_size=run.batch_size,
            keep=keep,
        )
    points = accuracy_curve(run, keep) if curve else ()
    if not run.suite.protocol:
        seconds = time.perf_counter() - started
        part = run.judged("pilot", rows, x, y, finds.x_adv, finds.success, finds.counts.cpu(), seconds)
    told = {"flags": [dataclasses.asdict(one) for one in flags], "curve": [dataclasses.asdict(one) for one in points]}
    return {**part, "told": torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)}
