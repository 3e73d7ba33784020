"""The gradient step, and the loop around it: FGSM, BIM, PGD and MIM are settings of this one file."""

from __future__ import annotations

import copy
import dataclasses
import math
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

# The spread of the Gaussian start of the published TRADES code.
GAUSSIAN_START = 1e-3


def ascend(x_adv: Tensor, gradient: Tensor, x: Tensor, threat: ThreatModel, step_size: float) -> Tensor:
    """x' <- project(x' + step_size * U_p(gradient)): the one gradient step of the repository."""
    return threat.project(x_adv + threat.steepest(gradient, x_adv, step_size), x)


@settings
class PGD(Search):
    """Projected gradient ascent on a loss, with momentum and restarts: x' <- project(x' + eta U_p(g)).

    With momentum mu, g <- mu g + grad / mean|grad| (MIM); without, g = grad.

    Arguments: `step_size` None means 2.5 eps / steps, or eps for a single step; `decay` is the last step's size as a
    share of the first's, with a cosine in between; `start` is uniform in the threat model, uniform in its ball (outside
    the box until the first step, as FastAT trains), a small Gaussian, zero, or diversified (two steps from a uniform
    draw along a random direction of the logits); `keep` "best" returns each sample's first success, or else its point
    of highest loss, and drops fallen samples from the loop, while "last" returns the last point, as a training attack
    wants it; `mode` is the mode the model is attacked in (its batch-norm statistics never move); `together` takes all
    restarts side by side, which is quicker for a few samples, and the same for those that withstand. `head_scale` False
    divides logits by the head's scale before the loss, as the published evaluation of hypersphere embedding did, and is
    a weaker attack for it; `head_margin` True climbs the training loss, margin included: the adaptive attack.

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
    start: Literal["uniform", "ball", "gaussian", "zero", "diversified"] = "uniform"
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
        """The attack for a radius `ratio` times the one its step size was made for."""
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
        # A training attack: nobody asks whether it succeeds, so nothing but the climb is done.
        with untouched(model, self.mode), torch.enable_grad():
            return self._climb(Problem(model, x, y, threat, index=index, key=key, target=target))

    def search(self, problem: Problem) -> None:
        if self.keep == "last" and self.restarts == 1:
            points, rows = self._climb(problem), problem.alive()
            with torch.no_grad():
                logits = problem.logits(points, rows)
            problem.keep(points, logits, torch.zeros_like(logits[:, 0]), rows)
            return
        climbed, each = _Climbed(self, problem), range(self.restarts)
        for runs in [each] if self.together else [[restart] for restart in each]:
            rows = problem.alive()
            if len(rows) == 0:
                return
            begins = [
                self._begin(problem, rows, problem.key.fold("restart", restart), first=restart == 0) for restart in runs
            ]
            if len(runs) == 1:
                self._search(problem, climbed, rows, begins[0])
                continue
            copies = problem.spread(rows, len(runs))
            self._search(copies, climbed.of(copies, rows.repeat(len(runs))), copies.alive(), torch.cat(begins))
            problem.gather(copies, rows)

    def _begin(self, problem: Problem, rows: Tensor, key: Key, *, first: bool = True) -> Tensor:
        x, threat, index = problem.x[rows], problem.threat, problem.index[rows]
        if problem.start is not None and first:
            return problem.start[rows]
        if self.start == "gaussian":
            return threat.project(x + GAUSSIAN_START * key.normal(index, tuple(x.shape[1:]), x.dtype), x)
        if self.start == "zero":
            return x.clone()
        points = threat.random_start(x, index, key, box=self.start != "ball")
        return diversified(problem, rows, points, key) if self.start == "diversified" else points

    def eta(self, threat: ThreatModel, step: int = 0) -> float:
        """The size of a step."""
        size = self.step_size
        if size is None:
            size = threat.eps if self.steps == 1 else 2.5 * threat.eps / self.steps
        if self.decay == 1 or step == 0:
            return size
        return size * (self.decay + (1 - self.decay) * (1 + math.cos(math.pi * step / (self.steps - 1))) / 2)

    def _direction(self, gradient: Tensor, velocity: Tensor | None) -> Tensor:
        """The gradient, or its accumulated, normalised form under momentum."""
        if velocity is None:
            return gradient
        size = gradient.flatten(1).abs().mean(dim=1).clamp_min(torch.finfo(gradient.dtype).tiny)
        return self.momentum * velocity + gradient / size.view(-1, *[1] * (gradient.dim() - 1))

    def _climb(self, problem: Problem) -> Tensor:
        """All steps on all samples; the last point."""
        rows = torch.arange(len(problem.x), device=problem.x.device)
        climbed = _Climbed(self, problem)
        x_adv = self._begin(problem, rows, problem.key.fold("restart", 0))
        velocity = torch.zeros_like(x_adv) if self.momentum else None
        for step in range(self.steps):
            x_adv.requires_grad_(True)
            losses = climbed(problem.logits(x_adv, rows), rows)
            gradient = self._direction(problem.gradient(losses, x_adv, rows), velocity)
            velocity = gradient if velocity is not None else None
            x_adv = ascend(x_adv.detach(), gradient, problem.x, problem.threat, self.eta(problem.threat, step))
        return x_adv.detach()

    def _search(self, problem: Problem, climbed: _Climbed, rows: Tensor, x_adv: Tensor) -> None:
        """All steps on the samples `rows`, each leaving when it falls.

        Success is read from the logits that also give the gradient: one forward and one backward a step.
        """
        velocity = torch.zeros_like(x_adv) if self.momentum else None
        for step in range(self.steps + 1):
            last = step == self.steps
            x_adv = x_adv.detach().requires_grad_(not last)
            with torch.set_grad_enabled(not last):
                logits = problem.logits(x_adv, rows)
                losses = climbed(logits, rows)
            if self.keep == "best" or last:
                stay = ~problem.keep(x_adv, logits, losses, rows)
                if last or not stay.any():
                    return
            gradient = self._direction(problem.gradient(losses, x_adv, rows), velocity)
            velocity = gradient if velocity is not None else None
            x_adv = x_adv.detach()
            if self.keep == "best" and not stay.all():
                rows, x_adv, gradient = rows[stay], x_adv[stay], gradient[stay]
                velocity = velocity[stay] if velocity is not None else None
            x_adv = ascend(x_adv, gradient, problem.x[rows], problem.threat, self.eta(problem.threat, step))


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


class _Climbed:
    """The loss that one call climbs, with the head's scale and margin as the attack wants them."""

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
            if needs == "target":  # towards the runner-up class
                self.target = clean.scatter(1, problem.y[:, None], float("-inf")).argmax(dim=1)

    def of(self, copies: Problem, rows: Tensor) -> _Climbed:
        """The same for a problem made of the samples `rows` of this one."""
        climbed = copy.copy(self)
        climbed.problem = copies
        climbed.target = None if self.target is None else self.target[rows]
        climbed.reference = None if self.reference is None else self.reference[rows]
        return climbed

    def head_that_matters(self) -> Head | None:
        """The head whose scale or margin the attack sees otherwise than the model shows it, if there is one."""
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

    def __call__(self, logits: Tensor, rows: Tensor) -> Tensor:
        target = None if self.target is None else self.target[rows]
        reference = None if self.reference is None else self.seen(self.reference[rows], rows)
        y, seen = self.problem.y[rows], self.seen(logits, rows)
        return adversarial_loss(self.attack.loss, seen, y, target=target, reference=reference)

    def seen(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Logits as the loss sees them."""
        if self.head is None:
            return logits
        if self.attack.head_margin:
            logits = self.head.with_margin(logits, self.problem.y[rows])
        return logits if self.attack.head_scale else logits / self.head.scale
