"""The pilot: signs of masking and the curve, measured on a few samples before the attacks.

What its own attacks break is broken, and in a suite that has a place for it, it counts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from steelman.attacks import Found
from steelman.errors import UserError
from steelman.evaluation.cascade import Runner
from steelman.evaluation.curve import accuracy_curve, correct_at, curve_rows, levels_off, ratios
from steelman.evaluation.evidence import weights_digest
from steelman.evaluation.masking import SIGNS, flags_of, measure
from steelman.evaluation.result import CurvePoint, Flag
from steelman.rng import Key
from steelman.settings import settings
from steelman.threat import ThreatModel

BATCH = 64  # samples at most that are looked at before what was seen is kept


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
        if len(x):
            measure(model, x, y, threat, index=index, key=key, keep=finds.keep)
        return finds.x_adv


def look_ahead(
    run: Runner, deadline: float | None, surrogates: Sequence[nn.Module] = (), *, curve: bool = True
) -> tuple[list[Flag], tuple[CurvePoint, ...]]:
    """The flags that need no stage, and accuracy against the radius: a batch at a time, each kept whatever interrupts
    the evaluation, and no more of them than the time allows."""
    rows = curve_rows(run)
    seen, correct, done = list[dict[str, Tensor]](), torch.zeros(len(ratios(run)) + 1, dtype=torch.int64), 0
    numbers = [number for number, stage in enumerate(run.suite.stages) if stage.pilot]
    for number in numbers:
        run.take(number)
    if run.suite.protocol and not curve:
        return [], ()
    looking = functools.partial(_measure, run, surrogates, curve=curve)
    # What was kept is what would be measured now.
    asked = [*([] if curve else ["plain"]), *(weights_digest(one)[:16] for one in surrogates)]
    run.question = "".join(f"-{what}" for what in asked)
    for part_rows, part in run.batches(f"pilot{run.question}", rows, looking, deadline, most=BATCH):
        if curve:
            correct += part.pop("curve")[0]
        if not run.suite.protocol:
            seen.append({name: part.pop(name) for name in list(part) if name.split(",")[0] in SIGNS})
        run.piloted[part_rows] = part.get("broken", torch.tensor(False))
        for number in numbers:
            run.take(number, part)
        done += len(part_rows)
        run.tell("pilot", done, len(rows))
    if done < len(rows):
        run.cut["curve" if run.suite.protocol else "pilot"] = (done, len(rows))
        run.complete = run.complete and run.suite.protocol  # a curve of fewer samples says so itself
    points = accuracy_curve(run, correct, done) if curve and (done or not len(rows)) else ()
    return [*flags_of(seen), *levels_off(points, run.suite)], points


def _measure(
    run: Runner, surrogates: Sequence[nn.Module], x: Tensor, y: Tensor, rows: Tensor, *, curve: bool
) -> dict[str, Tensor]:
    started, seen, counts = time.perf_counter(), dict[str, Tensor](), dict[str, Tensor]()
    finds = None if run.suite.protocol else Finds(x)
    if finds is not None:
        seen = measure(
            run.model,
            x,
            y,
            run.threat,
            index=run.index(rows),
            key=run.key.fold("signs"),
            surrogates=surrogates,
            batch_size=run.batch_size,
            keep=finds.keep,
        )
    if curve and finds is None:
        counts["curve"] = correct_at(run, x, y, rows)
    elif curve and finds is not None:
        wrong = (run.answers(finds.x_adv).argmax(dim=1) != y) & run.threat.contains(finds.x_adv, x)
        counts["curve"] = correct_at(
            run, x, y, rows, keep=finds.keep, fallen=finds.success & wrong, withstood=finds.tried & ~finds.success
        )
    if finds is None:
        return counts
    seconds = time.perf_counter() - started
    judged = run.judged("pilot", rows, x, y, finds.x_adv, finds.success, finds.counts.cpu(), seconds)
    return {**judged, **seen, **counts}
