"""The problem that an attack works on: its samples, their passes so far, and the best point found for each."""

from __future__ import annotations

import dataclasses
import threading
from typing import Literal

import torch
from torch import Tensor, nn

from steelman.attacks.base import input_gradient, logits_of
from steelman.attacks.parallel import StoppedError
from steelman.errors import UserError
from steelman.losses import magnitude
from steelman.rng import Key
from steelman.threat import ThreatModel, norms

Precision = Literal["full", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Found:
    """What an attack found. Each tensor has a row for each sample.

    `x_adv`: a point in the threat model.
    `success`: whether the attack saw it misclassified or, with a target, classified as that target.
    `forwards`, `backwards`: the passes of each sample. The passes that set up a search, on test images, belong to no
    sample.
    `nearest`: the nearest adversarial point of a minimum-norm attack, wherever it lies. It is the clean image if none
    was found.
    `distance`: how far `nearest` is, or infinity if none was found. Other attacks have None for both.
    """

    x_adv: Tensor
    success: Tensor
    forwards: Tensor
    backwards: Tensor
    nearest: Tensor | None = None
    distance: Tensor | None = None


class Problem:
    """One call of an attack: its samples, what each has cost so far, and the best point found for each.

    `rows` is always an int64 tensor of places in this problem's samples. ``remaining()`` leaves out broken samples, so
    that a search does no work for them.
    """

    def __init__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: ThreatModel,
        *,
        index: Tensor | None = None,
        key: Key,
        target: Tensor | None = None,
        start: Tensor | None = None,
        distances: bool = False,
        precision: Precision = "full",
    ) -> None:
        self.model, self.x, self.y, self.threat = model, x.detach(), y, threat
        self.index = torch.arange(len(x), device=x.device) if index is None else index.to(x.device)
        self.key, self.target, self.start, self.distances = key, target, start, distances
        self.precision, self.memory_format, self.checked = precision, torch.contiguous_format, False
        self.stop: threading.Event | None = None
        n, device = len(x), x.device
        self.forwards = torch.zeros(n, dtype=torch.int64, device=device)
        self.backwards = torch.zeros(n, dtype=torch.int64, device=device)
        self.best = self.x.clone()
        self.value = torch.full((n,), float("-inf"), dtype=torch.float64, device=device)
        self.success = torch.zeros(n, dtype=torch.bool, device=device)
        self.nearest: Tensor | None = None
        self.distance = torch.full((n,), float("inf"), dtype=torch.float64, device=device)

    def part(self, rows: Tensor, model: nn.Module, stop: threading.Event | None) -> Problem:
        """The problem of the samples `rows` alone, for one thread, with its own copy of the model.

        A row may come several times.
        """
        part = Problem(
            model,
            self.x[rows],
            self.y[rows],
            self.threat,
            index=self.index[rows],
            key=self.key,
            target=None if self.target is None else self.target[rows],
            start=None if self.start is None else self.start[rows],
            distances=self.distances,
            precision=self.precision,
        )
        part.memory_format, part.stop = self.memory_format, stop
        part.nearest = None if self.nearest is None else self.nearest[rows]
        return part

    def take(self, part: Problem, rows: Tensor) -> None:
        """Take over what a part found. `rows` are the places of the part's samples in this problem."""
        for name in ("forwards", "backwards", "best", "value", "success", "distance"):
            getattr(self, name)[rows] = getattr(part, name)
        if self.nearest is not None and part.nearest is not None:
            self.nearest[rows] = part.nearest

    def spread(self, rows: Tensor, copies: int) -> Problem:
        """A problem with several copies of the samples `rows`, such as one for each target."""
        part = self.part(rows.repeat(copies), self.model, self.stop)
        part.checked = self.checked
        return part

    def gather(self, part: Problem, rows: Tensor) -> None:
        """Take over the best result of the copies of each of `rows` in a ``spread``. The passes of all copies count."""
        copies, n = len(part.x) // max(len(rows), 1), len(rows)
        for mine, theirs in ((self.forwards, part.forwards), (self.backwards, part.backwards)):
            mine[rows] += theirs.view(copies, n).sum(dim=0)
        value = part.value.masked_fill(part.success, float("inf"))
        if part.nearest is not None and self.nearest is not None:
            value = -part.distance
        chosen = value.view(copies, n).argmax(dim=0) * n + torch.arange(n, device=rows.device)
        if part.nearest is not None and self.nearest is not None:
            better = part.distance[chosen] < self.distance[rows]
            self.nearest[rows[better]] = part.nearest[chosen[better]]
            self.distance[rows[better]] = part.distance[chosen[better]]
        else:
            better = ~self.success[rows] & (value[chosen] > self.value[rows])
            self.best[rows[better]] = part.best[chosen[better]]
            self.value[rows[better]] = part.value[chosen[better]]
        self.success[rows] |= part.success[chosen]

    def remaining(self) -> Tensor:
        """The rows of samples that are neither broken nor at distance 0."""
        return (~self.success & (self.distance > 0)).nonzero()[:, 0]

    def logits(self, points: Tensor, rows: Tensor) -> Tensor:
        """The model's logits at points of the samples `rows`. Each point costs a forward pass.

        A row may come several times.
        """
        if self.stop is not None and self.stop.is_set():
            raise StoppedError
        self._count(self.forwards, rows)
        points = points.contiguous(memory_format=self.memory_format)
        if self.precision == "full":
            logits = logits_of(self.model, points)
        else:
            with torch.autocast(points.device.type, dtype=getattr(torch, self.precision)):
                logits = logits_of(self.model, points)
        if not self.checked:
            self._check(logits, len(points))
        return logits

    def gradient(self, losses: Tensor, points: Tensor, rows: Tensor, *, retain: bool = False) -> Tensor:
        """The gradient of each sample's loss at its point. Each costs a backward pass.

        With `retain`, the graph is kept for another gradient.
        """
        self._count(self.backwards, rows)
        return input_gradient(losses, points, retain=retain)

    def adversarial(self, logits: Tensor, points: Tensor, rows: Tensor) -> Tensor:
        """Whether each point is adversarial: the model's answer is what the attack looks for.

        A tie is not enough. The answer must lead by more than rounding, which differs in another batch or layout.
        Otherwise a later check could find the true class there. After a search in reduced precision, the model must
        give the same answer in full precision. A point that is not finite, or an answer with NaN, is never adversarial.
        """
        adversarial = self._wanted(logits, rows)
        if adversarial.any():
            at = adversarial.nonzero()[:, 0]
            asked, judged = points.detach()[at], logits[at]
            adversarial[at] = asked.flatten(1).isfinite().all(dim=1)
            if self.precision != "full":
                self._count(self.forwards, rows[at])
                with torch.no_grad():
                    judged = logits_of(self.model, asked)
                adversarial[at] &= self._wanted(judged, rows[at])
            adversarial[at] &= self._clear(judged, rows[at])
        return adversarial

    def keep(self, points: Tensor, logits: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        """Keep each sample's first success, or else its point of highest value. Return whether each is broken now.

        No row may come twice. The points must lie in the threat model.
        """
        broken = self.adversarial(logits, points, rows)
        values = values.detach().to(self.value.dtype)
        better = (broken & ~self.success[rows]) | (~self.success[rows] & (values > self.value[rows]))
        at = rows[better]
        self.best[at] = points.detach()[better]
        self.value[at] = values[better]
        self.success[rows] |= broken
        return self.success[rows]

    def keep_nearest(self, points: Tensor, logits: Tensor, rows: Tensor) -> Tensor:
        """Keep each adversarial point that is its sample's nearest so far. Return whether each point is adversarial.

        No row may come twice. The points must lie in the box. A sample with a point in the threat model is broken, and
        leaves. If the caller asks for distances, no sample leaves.
        """
        adversarial = self.adversarial(logits, points, rows)
        if self.nearest is None:
            self.nearest = self.x.clone()
        points = points.detach()
        distance = norms(points - self.x[rows], self.threat.p)
        better = adversarial & (distance < self.distance[rows])
        at = rows[better]
        self.nearest[at] = points[better]
        self.distance[at] = distance[better]
        if not self.distances:
            self.success[at] |= self.threat.contains(points[better], self.x[at])
        return adversarial

    def found(self) -> Found:
        """What the attack found."""
        if self.nearest is None:
            return Found(self.best, self.success, self.forwards, self.backwards)
        inside = torch.isfinite(self.distance) & self.threat.contains(self.nearest, self.x)
        shape = (-1, *[1] * (self.x.dim() - 1))
        x_adv = torch.where(inside.view(shape), self.nearest, self.threat.project(self.nearest, self.x))
        return Found(x_adv, inside, self.forwards, self.backwards, self.nearest, self.distance)

    def _wanted(self, logits: Tensor, rows: Tensor) -> Tensor:
        logits = logits.detach()
        predicted = logits.argmax(dim=1)
        wanted = predicted != self.y[rows] if self.target is None else predicted == self.target[rows]
        return wanted & ~logits.isnan().any(dim=1)

    def _clear(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Whether the wanted class leads by more than rounding.

        The limit is twice that of an evaluation, so that a point found in one layout is adversarial in another one too.
        """
        logits = logits.detach()
        label = (self.y if self.target is None else self.target)[rows][:, None]
        lead = (logits.gather(1, label) - logits.scatter(1, label, float("-inf")).amax(dim=1, keepdim=True))[:, 0]
        return lead.abs() > 32 * torch.finfo(logits.dtype).eps * magnitude(logits)

    def _check(self, logits: Tensor, count: int) -> None:
        """Refuse wrong labels, and a model with wrong logits, at the first answer."""
        if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != count:
            shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UserError(f"expected logits of shape ({count}, classes) for {count} images, got {shape}")
        classes = logits.shape[1]
        if classes < 2:
            raise UserError(f"expected a model of at least two classes, got {classes}")
        for name, labels in (("label", self.y), ("target", self.target)):
            if labels is not None and bool(((labels < 0) | (labels >= classes)).any()):
                wrong = labels[(labels < 0) | (labels >= classes)]
                raise UserError(f"expected a {name} in 0 .. {classes - 1}, got {int(wrong[0])}")
        self.checked = True

    def _count(self, counter: Tensor, rows: Tensor) -> None:
        counter.index_add_(0, rows, torch.ones_like(rows))
