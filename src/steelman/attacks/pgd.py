"""The gradient step, and the loop around it: FGSM, BIM, PGD and MIM are settings of this one file."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal, cast

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from steelman.attacks.base import Mode, untouched
from steelman.attacks.engine import Problem, Search
from steelman.errors import UserError, unknown
from steelman.heads import Head, heads_of
from steelman.losses import LOSSES, adversarial_loss
from steelman.rng import Key
from steelman.settings import Count, Number, SettingsError, settings
from steelman.threat import ThreatModel

# The standard deviation of the Gaussian start, from the published code of TRADES.
GAUSSIAN_START = 1e-3

Start = Literal["uniform", "ball", "gaussian", "zero", "diversified"]

# A function that an attack climbs: from points and the `rows` of their samples to logits and losses.
Climbed = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def ascend(x_adv: Tensor, gradient: Tensor, x: Tensor, threat: ThreatModel, step_size: float) -> Tensor:
    """Make one gradient step: x' <- project(x' + step_size * U_p(gradient))."""
    return threat.project(x_adv + threat.steepest(gradient, x_adv, step_size), x)


def climb(
    problem: Problem,
    climbed: Climbed,
    rows: Tensor,
    points: Tensor,
    sizes: Sequence[float],
    *,
    momentum: float = 0.0,
    keep: Literal["best", "last"] | None = "best",
) -> Tensor:
    """Climb from `points` of the samples `rows`: x' <- project(x' + eta U_p(g)), one step for each eta of `sizes`.

    Without momentum, g is the gradient. With momentum mu, g <- mu g + gradient / mean|gradient|. A step takes one
    forward and one backward pass.

    With `keep` "best", the problem judges every point by the logits that also give the gradient. A broken sample leaves
    the loop. With "last", the problem judges the last points alone. With None, it judges no point. Return the last
    points of the samples that are still in the loop.
    """
    g = torch.zeros_like(points)
    for eta in sizes:
        points = points.detach().requires_grad_()
        logits, losses = climbed(points, rows)
        if keep == "best":
            stay = ~problem.keep(points, logits, losses, rows)
            if not stay.any():
                return points[:0]
        gradient = problem.gradient(losses, points, rows)
        g = momentum * g + gradient / mean_size(gradient) if momentum else gradient
        points = points.detach()
        if keep == "best" and not stay.all():
            rows, points, g = rows[stay], points[stay], g[stay]
        points = ascend(points, g, problem.x[rows], problem.threat, eta)
    if keep is not None:
        with torch.no_grad():
            problem.keep(points, *climbed(points, rows), rows)
    return points.detach()


def mean_size(gradient: Tensor) -> Tensor:
    """mean|gradient| of each sample, never zero."""
    size = gradient.flatten(1).abs().mean(dim=1).clamp_min(torch.finfo(gradient.dtype).tiny)
    return size.view(-1, *[1] * (gradient.dim() - 1))


def step_sizes(threat: ThreatModel, steps: int, size: float | None = None, decay: float = 1.0) -> list[float]:
    """The size of each step: `size`, or 2.5 eps / steps, or eps for a single step.

    A cosine takes it from there down to the share `decay` of it.

    >>> step_sizes(ThreatModel(eps=0.1), 1), step_sizes(ThreatModel(eps=0.1), 3, 8.0, decay=0.5)
    ([0.1], [8.0, 6.0, 4.0])
    """
    if size is None:
        size = threat.eps if steps == 1 else 2.5 * threat.eps / steps
    if decay == 1 or steps == 1:
        return [size] * steps
    return [size] + [
        size * (decay + (1 - decay) * (1 + math.cos(math.pi * step / (steps - 1))) / 2) for step in range(1, steps)
    ]


def begin(problem: Problem, rows: Tensor, key: Key, start: Start) -> Tensor:
    """The points from which the samples `rows` start."""
    x, threat, index = problem.x[rows], problem.threat, problem.index[rows]
    if start == "zero":
        return x
    if start == "gaussian":
        return threat.project(x + GAUSSIAN_START * key.normal(index, tuple(x.shape[1:]), x.dtype), x)
    points = threat.random_start(x, index, key, box=start != "ball")
    return diversified(problem, rows, points, key) if start == "diversified" else points


def diversified(problem: Problem, rows: Tensor, points: Tensor, key: Key, steps: int = 2) -> Tensor:
    """Points moved along a random direction in the space of logits: x' <- project(x' + eps U_p(grad w . z(x'))).

    Tashiro et al. (2020), "Diversity can be transferred: output diversification for white- and black-box attacks".
    """
    x, threat, w = problem.x[rows], problem.threat, None
    for _ in range(steps):
        points = points.detach().requires_grad_(True)
        logits = problem.logits(points, rows)
        if w is None:
            w = 2 * key.fold("diversified").uniform(problem.index[rows], (logits.shape[1],), logits.dtype) - 1
        gradient = problem.gradient((w * logits).sum(dim=1), points, rows)
        points = ascend(points.detach(), gradient, x, threat, threat.eps)
    return points


@settings
class PGD(Search):
    """Projected gradient ascent on a loss, with momentum and restarts: x' <- project(x' + eta U_p(g)).

    Without momentum, g is the gradient. With momentum mu, g <- mu g + grad / mean|grad| (MIM).

    Arguments:
        step_size: None means 2.5 eps / steps, or eps for a single step.
        decay: the size of the last step, as a share of the first. In between, the size follows a cosine.
        start: "uniform" in the threat model. "ball": uniform in the ball, and so perhaps outside the box until the
            first step, as FastAT trains. "gaussian": a small Gaussian. "zero": the clean image. "diversified": a
            uniform draw, moved twice along a random direction of the logits.
        keep: "best" returns each sample's first success, or else its point of highest loss. Broken samples leave the
            loop. "last" returns the last point, which a training needs.
        mode: the mode of the model during the attack. Batch-norm statistics never move.
        together: whether all restarts run side by side. This is quicker for a few samples. The result for robust
            samples is the same.
        head_scale: False divides the logits by the head's scale before the loss, as the published evaluation of
            hypersphere embedding did. That makes the attack weaker.
        head_margin: True climbs the training loss, with the margin. This is the adaptive attack.

    Madry et al. (2018), Eq. (2); Dong et al. (2018), "Boosting Adversarial Attacks with Momentum", Eq. (6).

    >>> from steelman.heads import linear
    >>> net = nn.Sequential(nn.Flatten(), linear(4, 3))
    >>> x, y = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> threat = ThreatModel(norm="linf", eps=0.1)
    >>> bool(threat.contains(PGD(steps=5)(net, x, y, threat), x).all())
    True
    """

    warm: ClassVar[bool] = True

    steps: Count = 20
    step_size: Annotated[Number, Field(gt=0)] | None = None
    decay: Annotated[Number, Field(gt=0, le=1)] = 1.0
    restarts: Count = 1
    loss: str = "cross-entropy"
    start: Start = "uniform"
    momentum: Annotated[Number, Field(ge=0)] = 0.0
    keep: Literal["best", "last"] = "best"
    mode: Mode = "eval"
    together: bool = False
    head_scale: bool = True
    head_margin: bool = False

    @model_validator(mode="after")
    def _sensible(self) -> PGD:
        if self.loss not in LOSSES:
            raise SettingsError([(("loss",), str(unknown("loss", self.loss, LOSSES)))])
        if self.start == "zero" and LOSSES[self.loss].needs == "reference":
            raise UserError(f"loss {self.loss!r} is flat at the clean image: start 'zero' would never leave it")
        if self.head_margin and LOSSES[self.loss].needs == "reference":
            raise UserError(f"loss {self.loss!r} has no true class for a head's margin to lower")
        if self.start == "ball" and self.keep != "last":
            raise UserError("start 'ball' may leave the valid range, so it is for training attacks (keep 'last') alone")
        if self.start == "zero" and self.restarts > 1:
            raise UserError(
                f"restarts from the same point repeat one another: start 'zero' with {self.restarts} restarts"
            )
        if self.mode == "train" and (self.keep == "best" or self.restarts > 1):
            raise UserError(
                "mode 'train' ties a batch's samples together through batch norm, so none may leave it early: "
                f"expected keep 'last' and 1 restart, got keep {self.keep!r} and {self.restarts}"
            )
        return self

    @property
    def copies(self) -> int:
        return self.restarts if self.together else 1

    def at(self, ratio: float) -> PGD:
        """The attack for a radius that is `ratio` times as large: a given step size is multiplied by `ratio`."""
        if self.step_size is None or ratio == 1:
            return self
        return dataclasses.replace(self, step_size=self.step_size * ratio)

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
        if self.keep != "last" or self.restarts > 1:
            return self.run(model, x, y, threat, index=index, key=key, target=target).x_adv
        if len(x) == 0 or threat.eps == 0:
            return x.detach().clone()
        self.warn_of_repeats(model, index, key)
        # A training attack needs only the last points. Judging them would cost another forward pass.
        with untouched(model, self.mode), torch.enable_grad():
            return self._last(Problem(model, x, y, threat, index=index, key=key, target=target))

    def search(self, problem: Problem) -> None:
        if self.keep == "last" and self.restarts == 1:
            self._look(problem, self._last(problem))
            return
        climbed, each = _Climbed(self, problem), range(self.restarts)
        for runs in [each] if self.together else [[restart] for restart in each]:
            rows = problem.remaining()
            if len(rows) == 0:
                return
            points = torch.cat([self._begin(problem, rows, restart) for restart in runs])
            copies = problem.spread(rows, len(runs))
            self._climb(copies, climbed.of(copies, rows.repeat(len(runs))), points, self.keep)
            problem.gather(copies, rows)

    def _last(self, problem: Problem) -> Tensor:
        """The last point of each sample. It is not judged."""
        return self._climb(problem, _Climbed(self, problem), self._begin(problem, problem.remaining(), 0), None)

    def _climb(
        self, problem: Problem, climbed: Climbed, points: Tensor, keep: Literal["best", "last"] | None
    ) -> Tensor:
        sizes = step_sizes(problem.threat, self.steps, self.step_size, self.decay)
        return climb(problem, climbed, problem.remaining(), points, sizes, momentum=self.momentum, keep=keep)

    def _begin(self, problem: Problem, rows: Tensor, restart: int) -> Tensor:
        if problem.start is not None and restart == 0:
            return problem.start[rows]
        return begin(problem, rows, problem.key.fold("restart", restart), self.start)


class _Climbed:
    """The loss that one call climbs, with the attack's settings for the head's scale and margin."""

    def __init__(self, attack: PGD, problem: Problem) -> None:
        self.attack, self.problem = attack, problem
        self.head = self.head_that_matters()
        self.target, self.reference = problem.target, cast(Tensor | None, None)
        needs = LOSSES[attack.loss].needs
        if needs == "reference" or (needs == "target" and problem.target is None):
            rows = torch.arange(len(problem.x), device=problem.x.device)
            with torch.no_grad():
                clean = problem.logits(problem.x, rows)
            self.reference = clean
            if needs == "target":  # the wrong class of highest logit
                self.target = clean.scatter(1, problem.y[:, None], float("-inf")).argmax(dim=1)

    def of(self, copies: Problem, rows: Tensor) -> _Climbed:
        """The same loss for the problem `copies`, which is made of the samples `rows` of this one."""
        climbed = copy.copy(self)
        climbed.problem = copies
        climbed.target = None if self.target is None else self.target[rows]
        climbed.reference = None if self.reference is None else self.reference[rows]
        return climbed

    def head_that_matters(self) -> Head | None:
        """The head whose scale the loss removes or whose margin it adds, or None."""
        heads = [
            head
            for head in heads_of(self.problem.model)
            if (self.attack.head_margin and head.margin) or (not self.attack.head_scale and head.scale != 1)
        ]
        if len(heads) > 1:
            raise UserError(
                f"head_margin and head_scale are for a model with one head; this one has {len(heads)}, and gives the "
                "mean of their probabilities: attack it with pgd"
            )
        return heads[0] if heads else None

    def __call__(self, points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.problem.logits(points, rows)
        target = None if self.target is None else self.target[rows]
        reference = None if self.reference is None else self.seen(self.reference[rows], rows)
        y, seen = self.problem.y[rows], self.seen(logits, rows)
        return logits, adversarial_loss(self.attack.loss, seen, y, target=target, reference=reference)

    def seen(self, logits: Tensor, rows: Tensor) -> Tensor:
        """The logits that enter the loss: with the head's margin, or without its scale, as the settings say."""
        if self.head is None:
            return logits
        if self.attack.head_margin:
            logits = self.head.with_margin(logits, self.problem.y[rows])
        return logits if self.attack.head_scale else logits / self.head.scale
