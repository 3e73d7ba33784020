"""Auto-PGD: gradient ascent that adapts the step size of each sample or, in l1, also how many pixels a step moves."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from steelman.attacks.engine import Problem, Search
from steelman.attacks.pgd import begin
from steelman.errors import UserError
from steelman.losses import LOSSES, adversarial_loss
from steelman.settings import Count, Number, settings
from steelman.threat import ThreatModel

MOMENTUM = 0.75
# Checkpoints, in per cent of all steps: the first at 22. Each interval is 3 shorter than the one before, down to 6.
FIRST, SHORTER, SHORTEST = 22, 3, 6
# The default number of targets: all wrong classes of a model with ten classes.
TARGETS = 9
# l1: the share of pixels that the first step moves, and the per cent of steps between checkpoints. Then three divisors:
# of the number of pixels, of eta, and of eps for the smallest eta.
SPARSITY, LOOK, SPARSER, SHORTEN, LEAST = 0.2, 4, 1.5, 1.5, 10.0


def checkpoints(steps: int, norm: str) -> list[int]:
    """The numbers of the steps that have a checkpoint.

    In linf and l2 they are w_j = ceil(p_j steps), with p_(j+1) = p_j + max(p_j - p_(j-1) - 3%, 6%). In l1 there is one
    after every 4% of the steps.

    >>> checkpoints(100, "linf")
    [22, 41, 57, 70, 80, 87, 93, 99]
    """
    if norm == "l1":
        every = max(steps * LOOK // 100, 1)
        return list(range(every, steps + 1, every))
    found, at, interval = list[int](), 0, FIRST
    while at + interval <= 100:
        at, interval = at + interval, max(interval - SHORTER, SHORTEST)
        found.append(-(-at * steps // 100))
    return sorted(set(found))


def ranked(clean: Tensor, y: Tensor, count: int) -> Tensor:
    """The wrong classes of each sample, highest logit first: at most `count` columns.

    >>> ranked(torch.tensor([[5.0, 1.0, 3.0]]), torch.tensor([0]), 9)
    tensor([[2, 1]])
    """
    wrong = clean.scatter(1, y[:, None], float("-inf"))
    return wrong.argsort(dim=1, descending=True, stable=True)[:, : min(count, clean.shape[1] - 1)]


@settings
class APGD(Search):
    """Auto-PGD: z = P(x' + eta U_p(g)), x'' = P(x' + 0.75 (z - x') + 0.25 (x' - x'_before)), eta halved when stuck.

    eta starts at 2 eps. At a checkpoint, a sample is stuck in two cases. Its loss rose in at most the share `rho` of
    the steps since the last checkpoint. Or its eta was not halved there, and its best loss is still the same. A stuck
    sample halves eta and goes back to its best point.

    l1 has no momentum, and eta starts at eps. A step moves only the k pixels of largest gradient, all equally far. A
    checkpoint counts the pixels in which the best point differs from the image. k becomes this number divided by 1.5.
    If the number is more than 5% below that of the last checkpoint, eta becomes eps, and the sample goes back to its
    best point. Otherwise eta is divided by 1.5, but stays at least eps / 10.

    Arguments:
        loss: the loss to maximise. A targeted loss is maximised towards each of the `targets` in turn.
        targets: the number of target classes: the wrong classes of highest clean logit. None means 9, or all if there
            are fewer.
        start: "uniform" in the ball. "diversified" moves that draw twice along a random direction of the logits.
        together: whether the search runs towards all targets at once. This is quicker for a few samples. The result for
            robust samples is the same.

    With a target class in the call, the search runs towards that class alone. A run takes steps + 1 forward passes and
    `steps` backward passes. A diversified start takes two more of each. A targeted loss takes one clean forward pass
    more, to rank the classes.

    Deviations: The start is uniform in the ball; the authors' code scales the draw to the sphere. For images this makes
    little difference, because nearly all of the ball lies near its sphere. The projection is exact in all norms. Each
    loss is compared with the loss of the point that the step came from, as in the paper. After a return, that is the
    best point. AutoAttack begins its l1 search with larger radii; this attack does not. In l1, a pixel at its bound is
    not among the k, and k is rounded down. So no step is wasted, and a perturbation can shrink to one pixel. With two
    classes, the margin replaces the scale-invariant cross-entropy, which is flat except for a jump.

    Croce and Hein (2020), "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
    attacks", Algorithm 1; Croce and Hein (2021), "Mind the box: l1-APGD for sparse adversarial attacks on image
    classifiers", Algorithm 1.

    >>> from steelman.heads import linear
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), linear(4, 3))
    >>> x, y = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> threat = ThreatModel(norm="linf", eps=0.1)
    >>> bool(threat.contains(APGD(steps=5, loss="targeted-dlr")(net, x, y, threat), x).all())
    True
    """

    steps: Count = 100
    restarts: Count = 1
    loss: str = "cross-entropy"
    targets: Count | None = None
    start: Literal["uniform", "diversified"] = "uniform"
    rho: Annotated[Number, Field(gt=0, lt=1)] = 0.75
    together: bool = False

    @model_validator(mode="after")
    def _sensible(self) -> APGD:
        usable = sorted(name for name, loss in LOSSES.items() if loss.needs != "reference")
        if self.loss not in usable:
            raise UserError(f"loss: expected one of {', '.join(usable)}, got {self.loss!r}")
        if self.targets is not None and LOSSES[self.loss].needs != "target":
            raise UserError(f"targets are for the targeted losses; {self.loss!r} climbs away from the true class")
        return self

    @property
    def copies(self) -> int:
        return (self.targets or TARGETS) if self.together and LOSSES[self.loss].needs == "target" else 1

    def search(self, problem: Problem) -> None:
        targets = self._targets(problem)
        ranks = list(range(1 if targets is None else targets.shape[1]))
        for restart in range(self.restarts):
            for runs in [ranks] if self.together else [[rank] for rank in ranks]:
                rows = problem.remaining()
                if len(rows) == 0:
                    return
                keys = [problem.key.fold("restart", restart, *(("target", rank) if rank else ())) for rank in runs]
                points = torch.cat([begin(problem, rows, key, self.start) for key in keys])
                target = None if targets is None else torch.cat([targets[rows, rank] for rank in runs])
                copies = problem.spread(rows, len(runs))
                self._climb(copies, copies.remaining(), target, points)
                problem.gather(copies, rows)

    def _targets(self, problem: Problem) -> Tensor | None:
        """The target classes, one column for each run. None for a loss without targets."""
        if problem.target is not None:
            return problem.target[:, None]
        if LOSSES[self.loss].needs != "target":
            return None
        rows = problem.remaining()
        with torch.no_grad():
            clean = problem.logits(problem.x, rows)
        targets = ranked(clean, problem.y, self.targets or TARGETS)
        problem.keep(problem.x, clean, adversarial_loss(self.loss, clean, problem.y, target=targets[:, 0]), rows)
        return targets

    def _climbed(self, logits: Tensor) -> str:
        """The name of the loss in use.

        With two classes, the scale-invariant cross-entropy depends only on which class leads, so no point is the best.
        The margin's gradient has the same direction.
        """
        return "margin" if self.loss == "scale-invariant-cross-entropy" and logits.shape[1] == 2 else self.loss

    def _climb(self, problem: Problem, rows: Tensor, target: Tensor | None, points: Tensor) -> None:
        """Do one run from `points`. The logits that give the gradient also decide success."""
        threat, x = problem.threat, problem.x[rows]
        state, looks, before = _State.at(points, x, rows, target, threat), checkpoints(self.steps, threat.norm), 0
        for step in range(self.steps + 1):
            last = step == self.steps
            points = state.points.detach().requires_grad_(not last)
            with torch.set_grad_enabled(not last):
                logits = problem.logits(points, state.rows)
                losses = adversarial_loss(self._climbed(logits), logits, problem.y[state.rows], target=state.target)
            stay = ~problem.keep(points, logits, losses, state.rows)
            if last or not stay.any():
                return
            gradient = problem.gradient(losses, points, state.rows)
            losses = losses.detach()
            if not stay.all():
                state, gradient, losses = state.only(stay), gradient[stay], losses[stay]
            state.record(gradient, losses)
            if step in looks:
                if threat.norm == "l1":
                    state.sparsify(threat.eps)
                else:
                    state.halve(self.rho * (step - before))
                before = step
            state.move(threat, first=step == 0)


@dataclasses.dataclass
class _State:
    """The state of one run: a row for each sample that is still in it."""

    rows: Tensor
    target: Tensor | None
    x: Tensor
    points: Tensor
    previous: Tensor
    gradient: Tensor
    losses: Tensor
    best: Tensor
    best_gradient: Tensor
    best_losses: Tensor
    eta: Tensor
    rises: Tensor  # steps since the last checkpoint that raised the loss
    checked: Tensor  # the best loss at the last checkpoint
    halved: Tensor  # whether that checkpoint halved eta
    kept: Tensor  # l1: how many pixels a step moves
    changed: Tensor  # l1: in how many pixels the best point differed from the image at the last checkpoint

    @classmethod
    def at(cls, points: Tensor, x: Tensor, rows: Tensor, target: Tensor | None, threat: ThreatModel) -> _State:
        """The state before the first pass: no loss, no gradient, no best point yet."""
        lowest = torch.full((len(x),), float("-inf"), dtype=x.dtype, device=x.device)
        pixels = torch.full((len(x),), x[0].numel(), device=x.device)
        return cls(
            rows=rows,
            target=target,
            x=x,
            points=points,
            previous=points,
            gradient=points,
            losses=lowest,
            best=points.clone(),
            best_gradient=torch.zeros_like(points),
            best_losses=lowest.clone(),
            eta=torch.full_like(lowest, threat.eps if threat.norm == "l1" else 2 * threat.eps),
            rises=torch.full_like(pixels, -1),  # the first pass counts as a rise, but is none
            checked=lowest,
            halved=torch.zeros_like(pixels, dtype=torch.bool),
            kept=(pixels * SPARSITY).long().clamp_min(1),
            changed=pixels,
        )

    def only(self, stay: Tensor) -> _State:
        """The state of the samples in `stay`."""
        taken: dict[str, Any] = {name: None if value is None else value[stay] for name, value in vars(self).items()}
        return _State(**taken)

    def record(self, gradient: Tensor, losses: Tensor) -> None:
        """Record the gradients and losses of a pass at the current points, and update the best points."""
        self.rises = self.rises + (losses > self.losses)
        self.gradient, self.losses = gradient, losses
        better = losses > self.best_losses
        self.best[better], self.best_gradient[better] = self.points[better], gradient[better]
        self.best_losses = torch.where(better, losses, self.best_losses)

    def halve(self, enough: float) -> None:
        """Do the checkpoint of linf and l2. A sample with at most `enough` rises is stuck."""
        stuck = (self.rises <= enough) | (~self.halved & (self.best_losses == self.checked))
        self.eta = torch.where(stuck, self.eta / 2, self.eta)
        self._return(stuck)
        self.halved, self.checked, self.rises = stuck, self.best_losses, torch.zeros_like(self.rises)

    def sparsify(self, eps: float) -> None:
        """Do the checkpoint of l1: set the k and the eta of each sample."""
        changed = (self.best != self.x).flatten(1).sum(dim=1)
        sparser = changed < 0.95 * self.changed
        self.kept = (changed / SPARSER).long().clamp_min(1)
        self.eta = torch.where(sparser, eps, (self.eta / SHORTEN).clamp_min(eps / LEAST))
        self._return(sparser)
        self.changed = changed

    def _return(self, which: Tensor) -> None:
        """Move the samples `which` back to their best points. The gradients there are known."""
        at = which.view(-1, *[1] * (self.x.dim() - 1))
        self.points = torch.where(at, self.best, self.points)
        self.gradient = torch.where(at, self.best_gradient, self.gradient)
        self.losses = torch.where(which, self.best_losses, self.losses)

    def move(self, threat: ThreatModel, first: bool) -> None:
        """Make one step to the next points."""
        eta = self.eta.view(-1, *[1] * (self.x.dim() - 1))
        if threat.norm == "l1":
            self.points = threat.project(self.points + eta * self._sparse(threat), self.x)
            return
        towards = threat.project(self.points + eta * threat.steepest(self.gradient, self.points), self.x)
        if not first:
            pull = (1 - MOMENTUM) * (self.points - self.previous)
            towards = threat.project(self.points + MOMENTUM * (towards - self.points) + pull, self.x)
        self.previous, self.points = self.points, towards

    def _sparse(self, threat: ThreatModel) -> Tensor:
        """The step of l1 length 1 that moves the k pixels of largest gradient among those that can still move."""
        room = torch.where(self.gradient > 0, threat.high - self.points, self.points - threat.low).flatten(1)
        size = self.gradient.flatten(1).abs().where(room > 0, 0.0)
        cut = size.sort(dim=1, descending=True).values.gather(1, self.kept[:, None] - 1)
        step = self.gradient.flatten(1).sign() * ((size >= cut) & (size > 0))
        return (step / step.abs().sum(dim=1, keepdim=True).clamp_min(1)).reshape(self.x.shape)
