"""Runs a suite: each stage on its own samples, batch by batch. Every point is checked."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from steelman.attacks import Search
from steelman.attacks.base import check_range, logits_of, reseed, untouched
from steelman.data.source import Source, stream
from steelman.errors import UserError
from steelman.evaluation.checks import ContractError, as_model, check_finite
from steelman.evaluation.findings import Findings
from steelman.evaluation.manners import Witness
from steelman.evaluation.result import StageRecord
from steelman.evaluation.stages import Stage, Suite
from steelman.evidence.ledger import (
    ROBUST,
    WRONG,
    Ledger,
    Work,
    digests,
    drawn,
    nearness,
    pilot_size,
    sentinel_size,
    share_size,
)
from steelman.losses import magnitude, margin, spread
from steelman.rng import Key
from steelman.threat import ThreatModel

JUDGED = 32  # points in one forward of `answers` on a CPU
WITNESSED = 16  # points of each batch of a stage that the witness is asked about


@dataclasses.dataclass
class Runner:
    """One suite on one model: the ledger of the samples, and a record of each stage."""

    model: nn.Module
    source: Source
    threat: ThreatModel
    suite: Suite
    key: Key
    device: torch.device
    batch_size: int
    work: Work
    tell: Callable[[str, int, int], None]  # tell(what, done, total) shows progress
    witness: Witness | None = None  # a copy of the model from before the first question
    grain: float = 0.0  # see `Manners`

    def __post_init__(self) -> None:
        dtype = as_model(self.model, torch.zeros(1), torch.device("cpu")).dtype
        self.ledger = Ledger(self.work.folder, self.total, self.source.shape, dtype)
        self.records: list[StageRecord] = []
        # Described before they run: an attack from outside may change its own attributes while it runs.
        self.described = [stage.described() for stage in self.suite.stages]
        self.clean_seconds = 0.0
        self.complete, self.escalated = True, False
        self.advanced = False  # True after the first new batch; until then, the time limit stops nothing
        self.cut: dict[str, tuple[int, int]] = {}  # stage: (samples attacked, samples planned), where the time ran out
        self.watched: Tensor | None = None  # the sentinel's samples

    @property
    def total(self) -> int:
        return len(self.source)

    # Before the attacks.

    def clean(self) -> None:
        """Enter the model's answers to the clean images into the ledger."""
        self._same_data()
        ledger = self.ledger
        for rows, part in self.batches("clean", torch.arange(self.total), self._look):
            ledger.label[rows], ledger.digest[rows] = self.source.labels[rows], part["digest"]
            ledger.clean[rows] = ledger.guess[rows] = part["guess"]
            ledger.margin[rows], ledger.lead[rows] = part["margin"], part["lead"]
            ledger.forwards[rows] += 1
            ledger.broken_by[rows] = torch.where(part["guess"] == ledger.label[rows], ROBUST, WRONG)
            self.clean_seconds += float(part["seconds"])
            self.tell("clean", int(rows[-1]) + 1, self.total)

    def _same_data(self) -> None:
        """Refuse to continue an interrupted evaluation if the data or the model's answers have changed."""
        parts = dict(enumerate(self.parts(torch.arange(self.total))))
        done = {f"clean-{batch:05d}": part for batch, part in parts.items() if self.work.has(f"clean-{batch:05d}")}
        for name, (x, y, rows) in zip(done, stream(self.source, list(done.values()), None), strict=True):
            kept = self.work.batch(name, dict)
            other = rows[digests(x, y) != kept["digest"]]
            if len(other):
                raise UserError(f"the data have changed since this evaluation began: sample {int(other[0])} is another")
            x, y = self._ready(x, y)  # noqa: PLW2901
            lead = -margin(self.answers(x), y).double().cpu()
            if not torch.allclose(lead, kept["lead"], rtol=1e-2, atol=1e-3 * float(kept["lead"].abs().max())):
                raise UserError("the model answers otherwise than when this evaluation began")

    def _look(self, x: Tensor, y: Tensor, _: Tensor) -> dict[str, Tensor]:
        started = time.perf_counter()
        logits = self.answers(x)
        check_finite(logits, "clean")
        return {
            "digest": digests(x, y),
            "guess": logits.argmax(dim=1),
            "margin": nearness(logits, y),
            "lead": -margin(logits, y).double(),
            "seconds": torch.tensor(time.perf_counter() - started),
        }

    def pilot(self) -> Tensor:
        """A few samples that the model gets right. The draw does not depend on the order of the data."""
        rows = self.ledger.right.nonzero()[:, 0]
        return self._drawn(rows, "pilot")[: pilot_size(self.total)].sort().values

    # The attacks.

    def stages(self, findings: Findings, deadline: float | None, doubtful: Callable[[], bool]) -> None:
        """Run the stages in order, until the time runs out. Escalation stages only run if `doubtful()` is true."""
        self.complete = findings.cut is None or self.suite.protocol
        for number, stage in enumerate(self.suite.stages):
            if stage.role == "pilot":
                self.take(number)
                for part in findings.parts:
                    self.take(number, part)
            elif self.complete and self._wanted(stage, doubtful):
                self.complete = self._stage(number, stage, findings.question, deadline)

    def _wanted(self, stage: Stage, doubtful: Callable[[], bool]) -> bool:
        """Whether a stage runs. After the first doubt, every escalation stage runs."""
        if stage.role == "escalation":
            self.escalated = self.escalated or doubtful()
        return stage.role != "escalation" or self.escalated

    def _stage(self, number: int, stage: Stage, question: str, deadline: float | None) -> bool:
        """Run one stage on its samples. Returns False if the time ran out."""
        rows, done = self._whom(stage), 0
        attack, copies = functools.partial(self._attack, stage), getattr(stage.attack, "copies", 1)
        parts = self.batches(f"{number:02d}{question}", rows, attack, deadline, most=self.batch_size // copies)
        self.take(number)
        for part_rows, part in parts:
            self.take(number, part)
            done += len(part_rows)
            self.tell(stage.name, done, len(rows))
        if done < len(rows):
            self.cut[stage.name] = (done, len(rows))
        return done == len(rows)

    def take(self, number: int, part: dict[str, Tensor] | None = None) -> None:
        """Enter a stage's result for one batch into ledger and records. Without a batch, enter that the stage began."""
        stage, ledger = self.suite.stages[number], self.ledger
        if not self.records or self.records[-1].name != stage.name:
            left = ledger.right if self.suite.protocol else ledger.robust
            self.records.append(
                StageRecord(
                    name=stage.name,
                    settings=self.described[number],
                    attacked=0,
                    broken=0,
                    left=int(left.sum()),
                    forwards=0,
                    backwards=0,
                    seconds=0.0,
                )
            )
        if part is None:
            return
        before = int(ledger.robust.sum())
        ledger.record(number, part)
        broken = int(part["broken"].sum()) if self.suite.protocol else before - int(ledger.robust.sum())
        so_far = self.records[-1]
        self.records[-1] = dataclasses.replace(
            so_far,
            attacked=so_far.attacked + len(part["rows"]),
            broken=so_far.broken + broken,
            left=so_far.left - broken,
            forwards=so_far.forwards + int(part["forwards"].sum()),
            backwards=so_far.backwards + int(part["backwards"].sum()),
            outside=so_far.outside + int(part["outside"]),
            refuted=so_far.refuted + int(part["refuted"]),
            nonfinite=so_far.nonfinite + int(part["nonfinite"]),
            witnessed=so_far.witnessed + int(part["witnessed"]),
            contradicted=so_far.contradicted + int(part["contradicted"]),
            seconds=(so_far.seconds or 0.0) + float(part["seconds"]),
        )

    def _whom(self, stage: Stage) -> Tensor:
        """The samples that a stage attacks, in rising order."""
        ledger = self.ledger
        if self.suite.protocol:
            return ledger.right.nonzero()[:, 0]
        rows = ledger.robust.nonzero()[:, 0]
        if stage.role == "sentinel":
            if self.watched is None:
                self.watched = self._drawn(rows, "sentinel")[: sentinel_size(stage.share, len(rows), self.total)]
            return self.watched[ledger.robust[self.watched]].sort().values
        if stage.share >= 1:
            return rows
        # Without this draw, the order of the data would decide among samples of equal margin.
        rows = self._drawn(rows, "ties")
        nearest = ledger.margin[rows].argsort(stable=True)[: share_size(stage.share, len(rows))]
        return rows[nearest].sort().values

    def _attack(self, stage: Stage, x: Tensor, y: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Attack one batch, and return the judged result."""
        if not torch.equal(digests(x, y), self.ledger.digest[rows]):
            raise UserError("the data have changed since this evaluation began")
        key, index, attack = self.key.fold(stage.name), self.index(rows), stage.attack
        started = time.perf_counter()
        given = x.clone(), y.clone()  # an attack that changes its input in place must not change these
        counts, claimed = torch.zeros(2, len(rows), dtype=torch.int64), torch.zeros_like(y, dtype=torch.bool)
        if isinstance(attack, Search):
            start = self.ledger.points(rows, x) if stage.warm else None
            found = attack.run(
                self.model, *given, self.threat, index=index, key=key, start=start, precision=stage.precision
            )
            x_adv, claimed, counts = found.x_adv, found.success, torch.stack((found.forwards, found.backwards)).cpu()
        else:
            x_adv = attack(self.model, *given, self.threat, index=index, key=key)
        return self.judged(stage.name, rows, x, y, x_adv, claimed, counts, time.perf_counter() - started)

    def judged(
        self,
        name: str,
        rows: Tensor,
        x: Tensor,
        y: Tensor,
        x_adv: Tensor,
        claimed: Tensor,
        counts: Tensor,
        seconds: float,
    ) -> dict[str, Tensor]:
        """Check the points of an attack, and return what counts.

        `claimed` are the samples that the attack itself reports as broken. `counts` are its forwards and backwards.
        """
        if not isinstance(x_adv, Tensor) or x_adv.shape != x.shape:
            got = x_adv.shape if isinstance(x_adv, Tensor) else type(x_adv).__name__
            raise UserError(f"{name}: expected points of shape {x.shape}, got {got}")
        x_adv = x_adv.detach().to(x)
        inside = self.threat.contains(x_adv, x)
        # A point outside may even be NaN. The clean image takes its place.
        x_adv = torch.where(inside[:, None, None, None], x_adv, x)
        logits = self.answers(x_adv)
        asked = self._witness(x_adv, logits)
        finite = torch.isfinite(logits).all(dim=1)
        logits = torch.where(finite[:, None], logits, 0)
        lead = -margin(logits, y).double()
        # Rounding differs from batch to batch. A lead within rounding might not be confirmed by `verify`.
        clear = lead < -16 * torch.finfo(logits.dtype).eps * magnitude(logits)
        return {
            "rows": rows,
            "x_adv": x_adv,
            "broken": inside & finite & clear,
            "unclear": inside & finite & (lead < 0) & ~clear,
            "guess": logits.argmax(dim=1),
            "margin": torch.where(finite, nearness(logits, y), math.inf),
            "lead": lead,
            "forwards": counts[0],
            "backwards": counts[1],
            "outside": (~inside).sum(),
            "nonfinite": (~finite).sum(),
            # A success within the model's grain is a matter of the batch, and says nothing against the model.
            "refuted": (
                claimed & inside & finite & (logits.argmax(dim=1) == y) & (lead >= self.grain * spread(logits))
            ).sum(),
            "seconds": torch.tensor(seconds),
            **asked,
        }

    def _witness(self, points: Tensor, logits: Tensor) -> dict[str, Tensor]:
        """How many of the points the witness was asked about, and how many of its answers are not `logits`."""
        some = slice(None, WITNESSED)
        other = None if self.witness is None else self.witness.contradicts(points[some], logits[some], self.grain)
        counts = (0, 0) if other is None else (len(other), int(other.sum()))
        return {"witnessed": torch.tensor(counts[0]), "contradicted": torch.tensor(counts[1])}

    # Batches and answers.

    def parts(self, rows: Tensor, most: int | None = None) -> tuple[Tensor, ...]:
        """Batches of `rows`. Their size is the batch size, or `most` if that is smaller."""
        size = self.batch_size if most is None else min(max(most, 1), self.batch_size)
        return torch.split(rows, size) if len(rows) else ()

    def _drawn(self, rows: Tensor, why: str) -> Tensor:
        """`rows` in an order that depends on the seed and on each sample's content."""
        return drawn(self.key, self.ledger.digest, rows, why)

    def index(self, rows: Tensor) -> Tensor:
        return self.ledger.digest[rows].to(self.device)

    def batches(
        self,
        name: str,
        rows: Tensor,
        compute: Callable[..., dict[str, Tensor]],
        deadline: float | None = None,
        most: int | None = None,
    ) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """(rows, result) for each batch, with the result of `compute(images, labels, rows)`.

        A result that an interrupted call saved is read, not computed. The batches end when the time runs out.
        """
        parts = dict(enumerate(self.parts(rows, most)))
        todo = [part for batch, part in parts.items() if not self.work.has(f"{name}-{batch:05d}")]
        images = stream(self.source, todo, None)

        def fresh() -> dict[str, Tensor]:
            x, y, part = next(images)
            return compute(*self._ready(x, y), part)

        for batch, part in parts.items():
            done = self.work.has(f"{name}-{batch:05d}")
            late = deadline is not None and time.monotonic() > deadline
            if late and not done and self.advanced:
                return
            self.advanced = self.advanced or (deadline is not None and not done)
            found = self.work.batch(f"{name}-{batch:05d}", fresh)
            if "rows" in found and not torch.equal(found["rows"], part):
                where = self.work.folder / f"{name}-{batch:05d}.batch"
                raise UserError(
                    f"{where} is damaged: it is of other samples. Delete this folder, and the same call begins anew"
                )
            yield part, found

    def images(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self._ready(self.source.images(rows), self.source.labels[rows])

    def _ready(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = as_model(self.model, x, self.device)
        try:
            if len(x):
                check_range(x, self.threat)
        except UserError as error:
            raise ContractError("range", str(error)) from None
        return x, y.to(self.device)

    def answers(self, x: Tensor) -> Tensor:
        """The model's logits for `x`, in eval mode and full precision."""
        if len(x) == 0:  # some models cannot take an empty batch
            return torch.empty(0, 2, device=x.device)
        with untouched(self.model), torch.no_grad():
            # Without this seed, a random model would answer differently in a repeated run.
            reseed(self.model, self.key.fold("answers").integer())
            # A larger batch is slower on a CPU, because its values do not fit into the caches.
            parts = torch.split(x, JUDGED) if x.device.type == "cpu" else (x,)
            return torch.cat([logits_of(self.model, part) for part in parts])
