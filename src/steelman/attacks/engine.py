"""The engine all attacks run on: frozen weights, counted passes, fallen samples that leave, the best point of each.

An attack is a settings class with a ``search(problem)``; the call, the bracket around the model, the counting and the
answer are here, once. An attack never decides that it has succeeded otherwise than by ``Problem.fooled``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from steelman.attacks.base import Mode, input_gradient, logits_of, untouched
from steelman.errors import UserError
from steelman.rng import Key
from steelman.threat import Norm, ThreatModel, norms

Precision = Literal["full", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True)
class Found:
    """What an attack found, a row a sample.

    `x_adv` lies in the threat model; `success` says whether it is misclassified (or, with a target, classified as
    that). A minimum-norm attack also gives `nearest`, its nearest adversarial point wherever that lies, and `distance`,
    how far it is (infinity where it found none, and then `nearest` is the clean image). `forwards` and `backwards`
    count the passes each sample took through the model.
    """

    x_adv: Tensor
    success: Tensor
    forwards: Tensor
    backwards: Tensor
    nearest: Tensor | None = None
    distance: Tensor | None = None


class Problem:
    """One call of an attack: its samples, what each has cost so far, and the best point found for each.

    `rows` are always places in this problem's samples, as an int64 tensor. Samples that have fallen are not in
    ``alive()``; a search that drops them does no work for them.
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
        distances: bool = False,
        precision: Precision = "full",
    ) -> None:
        self.model, self.x, self.y, self.threat = model, x.detach(), y, threat
        self.index = torch.arange(len(x), device=x.device) if index is None else index.to(x.device)
        self.key, self.target, self.distances = key, target, distances
        self.precision, self.memory_format = precision, torch.contiguous_format
        n, device = len(x), x.device
        self.forwards = torch.zeros(n, dtype=torch.int64, device=device)
        self.backwards = torch.zeros(n, dtype=torch.int64, device=device)
        self.best = self.x.clone()
        self.value = torch.full((n,), float("-inf"), dtype=torch.float64, device=device)
        self.success = torch.zeros(n, dtype=torch.bool, device=device)
        self.nearest: Tensor | None = None
        self.distance = torch.full((n,), float("inf"), dtype=torch.float64, device=device)

    def alive(self) -> Tensor:
        """The rows still to be attacked."""
        return (~self.success & (self.distance > 0)).nonzero()[:, 0]

    def logits(self, points: Tensor, rows: Tensor) -> Tensor:
        """The model's logits at points of the samples `rows`, one forward each; a row may come several times."""
        self._count(self.forwards, rows)
        if self.precision == "full":
            return logits_of(self.model, points.contiguous(memory_format=self.memory_format))
        with torch.autocast(points.device.type, dtype=getattr(torch, self.precision)):
            return logits_of(self.model, points.contiguous(memory_format=self.memory_format))

    def gradient(self, losses: Tensor, points: Tensor, rows: Tensor, *, retain: bool = False) -> Tensor:
        """Each sample's gradient of its loss at its point, one backward each; with `retain`, more may follow."""
        self._count(self.backwards, rows)
        return input_gradient(losses, points, retain=retain)

    def fooled(self, logits: Tensor, points: Tensor, rows: Tensor) -> Tensor:
        """Whether each point is what the attack looks for; after a search in reduced precision, full has to agree."""
        won = self._wanted(logits, rows)
        if self.precision != "full" and won.any():
            at = won.nonzero()[:, 0]
            self._count(self.forwards, rows[at])
            with torch.no_grad():
                won[at] = self._wanted(logits_of(self.model, points.detach()[at]), rows[at])
        return won

    def keep(self, points: Tensor, logits: Tensor, values: Tensor, rows: Tensor) -> Tensor:
        """Keep each point that succeeds, or that has the highest value so far; whether each row has fallen now.

        No row may come twice. The points lie in the threat model.
        """
        won = self.fooled(logits, points, rows)
        values = values.detach().to(self.value.dtype)
        better = (won & ~self.success[rows]) | (~self.success[rows] & (values > self.value[rows]))
        at = rows[better]
        self.best[at] = points.detach()[better]
        self.value[at] = values[better]
        self.success[rows] |= won
        return self.success[rows]

    def keep_nearest(self, points: Tensor, logits: Tensor, rows: Tensor) -> Tensor:
        """Keep each adversarial point that is its sample's nearest so far; whether each is adversarial.

        No row may come twice. The points lie in the box. Rows whose point lies in the threat model have fallen, unless
        the caller wants distances: then none leaves.
        """
        won = self.fooled(logits, points, rows)
        if self.nearest is None:
            self.nearest = self.x.clone()
        points = points.detach()
        distance = norms(points - self.x[rows], self.threat.p)
        better = won & (distance < self.distance[rows])
        at = rows[better]
        self.nearest[at] = points[better]
        self.distance[at] = distance[better]
        if not self.distances:
            self.success[at] |= self.threat.contains(points[better], self.x[at])
        return won

    def found(self) -> Found:
        """The answer."""
        if self.nearest is None:
            return Found(self.best, self.success, self.forwards, self.backwards)
        inside = torch.isfinite(self.distance) & self.threat.contains(self.nearest, self.x)
        shape = (-1, *[1] * (self.x.dim() - 1))
        x_adv = torch.where(inside.view(shape), self.nearest, self.threat.project(self.nearest, self.x))
        return Found(x_adv, inside, self.forwards, self.backwards, self.nearest, self.distance)

    def _wanted(self, logits: Tensor, rows: Tensor) -> Tensor:
        predicted = logits.detach().argmax(dim=1)
        return predicted != self.y[rows] if self.target is None else predicted == self.target[rows]

    def _count(self, counter: Tensor, rows: Tensor) -> None:
        counter.index_add_(0, rows, torch.ones_like(rows))


class Search:
    """What all attacks share: the call. A subclass is a settings class with its own ``search``.

    `norms` are those it knows; `minimum_norm` says that it looks for the nearest adversarial point rather than for any
    within eps; `black_box` that it asks the model for logits only, never for a gradient.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2", "l1")
    minimum_norm: ClassVar[bool] = False
    black_box: ClassVar[bool] = False

    def search(self, problem: Problem) -> None:
        """Look for adversarial points and hand them to the problem to keep."""
        raise NotImplementedError

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
        return self.run(model, x, y, threat, index=index, key=key, target=target).x_adv

    def run(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: ThreatModel,
        *,
        index: Tensor | None = None,
        key: Key = Key(0),  # noqa: B008 - a Key is frozen
        target: Tensor | None = None,
        distances: bool = False,
        precision: Precision = "full",
    ) -> Found:
        """Attack, and tell what was found and what it cost.

        Arguments: those of every attack, and `distances`: a minimum-norm attack then goes on for each sample to the end
        of its budget, where else it stops at the first point within eps; `precision`: what the search runs in. Every
        success is one in full precision.
        """
        name = type(self).__name__
        if threat.norm not in self.norms:
            raise UserError(f"{name}: expected one of the norms {', '.join(self.norms)}, got {threat.norm}")
        if distances and not self.minimum_norm:
            raise UserError(f"{name} looks for any point within eps, and knows no distances")
        mode: Mode = getattr(self, "mode", "eval")
        with untouched(model, mode), torch.enable_grad():
            problem = Problem(
                model, x, y, threat, index=index, key=key, target=target, distances=distances, precision=precision
            )
            if self.minimum_norm:
                problem.nearest = problem.x.clone()
            if len(x) and (threat.eps > 0 or distances):
                with _laid_out(problem):
                    self.search(problem)
        return problem.found()


@contextlib.contextmanager
def _laid_out(problem: Problem) -> Iterator[None]:
    """Inside, images and convolutions are channels_last where the model can take them so: the same numbers, sooner."""
    x, model = problem.x, problem.model
    kernels = [parameter for parameter in model.parameters() if parameter.dim() == 4]
    if x.dim() != 4 or not kernels:
        yield
        return
    kept = [kernel.data for kernel in kernels]
    try:
        with torch.no_grad():
            expected = logits_of(model, x[:1])
            for kernel in kernels:
                kernel.data = _channels_last(kernel.data)
            try:
                got = logits_of(model, x[:1].contiguous(memory_format=torch.channels_last))
                agreed = bool(torch.allclose(got, expected, rtol=1e-3, atol=1e-4))
            except RuntimeError:  # a model that views its features as rows takes the one layout only
                agreed = False
        if agreed:
            problem.memory_format = torch.channels_last
        else:
            for kernel, data in zip(kernels, kept, strict=True):
                kernel.data = data
        yield
    finally:
        for kernel, data in zip(kernels, kept, strict=True):
            kernel.data = data


def _channels_last(kernel: Tensor) -> Tensor:
    """The kernel laid out channels_last, also where one channel leaves the layout open: strides are what counts."""
    _, channels, height, width = kernel.shape
    strides = (height * width * channels, 1, width * channels, channels)
    return torch.empty_strided(kernel.shape, strides, dtype=kernel.dtype, device=kernel.device).copy_(kernel)
