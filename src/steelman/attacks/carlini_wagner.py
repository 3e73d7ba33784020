"""Carlini and Wagner's attack: Adam looks for the nearest adversarial image, over a variable without bounds."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from steelman.attacks.engine import Problem, Search
from steelman.losses import adversarial_loss
from steelman.settings import Count, Number, settings
from steelman.threat import Norm, ThreatModel

# A pixel at an end of its range would have an infinite w. It is moved towards the middle by this share first.
SHRINK = 1e-6
# A sample leaves a descent if a tenth of the steps has not brought its loss down to this share of it.
PROGRESS = 0.9999
# Adam's published constants.
BETA_1, BETA_2, TINY = 0.9, 0.999, 1e-8


def to_free(x: Tensor, threat: ThreatModel) -> Tensor:
    """The w with middle + half tanh(w) = x. First, x is moved towards the middle by the share SHRINK."""
    half, middle = (threat.high - threat.low) / 2, (threat.high + threat.low) / 2
    r = (x - middle) / half * (1 - max(SHRINK, torch.finfo(x.dtype).eps))
    return ((1 + r) / (1 - r)).log() / 2  # torch's atanh would round differently in another batch


def to_box(w: Tensor, threat: ThreatModel) -> Tensor:
    """x' = middle + half tanh(w)."""
    half, middle = (threat.high - threat.low) / 2, (threat.high + threat.low) / 2
    return (middle + half * torch.tanh(w)).clamp(threat.low, threat.high)  # rounding may put the sum outside the box


def adam(w: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: int, lr: float) -> None:
    """Do Adam's step number `step` (from 1) downhill, in place. Samples share no state, so any sample may leave.

    Kingma and Ba (2015), "Adam: A Method for Stochastic Optimization", Algorithm 1.
    """
    mean.lerp_(gradient, 1 - BETA_1)
    square.mul_(BETA_2).addcmul_(gradient, gradient, value=1 - BETA_2)
    root = (square / (1 - BETA_2**step)).sqrt_().add_(TINY)
    w.addcdiv_(mean, root, value=-lr / (1 - BETA_1**step))


@settings
class CarliniWagner(Search):
    """Minimise ||x' - x||_2^2 + c max(z_y - max_{j != y} z_j + confidence, 0) over w, where x' = (tanh w + 1) / 2.

    With a target t, the second term is max(max_{j != t} z_j - z_t + confidence, 0). Each sample has its own weight c.
    It begins at the setting `c`, grows tenfold until a descent succeeds, and is then bisected.

    Arguments:
        search_steps: the number of values of c that are tried.
        steps: Adam's steps for each value of c.
        lr: Adam's rate, in units of w. A width of 4 in w covers 96% of the range of pixels.
        confidence: a point counts as found only if the wanted class leads by at least this much in logits.

    Deviations: There are 1,000 steps, and 10,000 in the paper. A sample without progress leaves its descent; the
    published code waits until the whole batch has no progress. Distances are measured from the image itself, and not
    from its shrunk copy. The model's own prediction decides success. If distances are not asked for, a sample leaves at
    its first point within eps.

    >>> from torch import nn
    >>> from steelman.heads import linear
    >>> net = nn.Sequential(nn.Flatten(), linear(4, 3))
    >>> x = torch.full((2, 1, 2, 2), 0.5)
    >>> threat = ThreatModel(norm="l2", eps=1.0)
    >>> found = CarliniWagner(steps=100, search_steps=6).run(net, x, net(x).argmax(dim=1), threat, distances=True)
    >>> found.distance.shape
    torch.Size([2])

    Carlini and Wagner (2017), "Towards Evaluating the Robustness of Neural Networks", sections V and VI.A.
    """

    norms: ClassVar[tuple[Norm, ...]] = ("l2",)
    minimum_norm: ClassVar[bool] = True

    steps: Count = 1000
    search_steps: Count = 9
    c: Annotated[Number, Field(gt=0, le=1e10)] = 1e-3
    lr: Annotated[Number, Field(gt=0, le=1e3)] = 0.01
    confidence: Annotated[Number, Field(ge=0)] = 0.0

    def search(self, problem: Problem) -> None:
        n = len(problem.x)
        rows = torch.arange(n, device=problem.x.device)
        with torch.no_grad():  # a sample that is misclassified without an attack has distance 0, and leaves
            problem.keep_nearest(problem.x, problem.logits(problem.x, rows), rows)
        c = torch.full((n,), self.c, dtype=problem.x.dtype, device=problem.x.device)
        below, above = torch.zeros_like(c), torch.full_like(c, math.inf)
        for _ in range(self.search_steps):
            rows = problem.remaining()
            if len(rows) == 0:
                return
            succeeded = self._descend(problem, rows, c[rows])
            above[rows] = torch.where(succeeded, c[rows], above[rows])
            below[rows] = torch.where(succeeded, below[rows], c[rows])
            c = torch.where(above.isfinite(), (below + above) / 2, 10 * below)

    def _descend(self, problem: Problem, rows: Tensor, c: Tensor) -> Tensor:
        """Do one descent with fixed `c` on the samples `rows`. Return whether it succeeded, for each sample."""
        threat, everyone = problem.threat, rows
        succeeded = torch.zeros(len(problem.x), dtype=torch.bool, device=rows.device)
        x = problem.x[rows]
        w, before = to_free(x, threat), torch.full_like(c, math.inf)
        mean, square = torch.zeros_like(w), torch.zeros_like(w)
        for step in range(self.steps + 1):
            last = step == self.steps
            w.requires_grad_(not last)
            with torch.set_grad_enabled(not last):
                points = to_box(w, threat)
                logits = problem.logits(points, rows)
                lead = self._lead(problem, logits, rows)
                losses = (points - x).square().flatten(1).sum(dim=1) + c * (self.confidence - lead).clamp_min(0)
            succeeded[rows] |= self._keep(problem, points.detach(), logits.detach(), lead.detach(), rows)
            if last:
                break
            gradient, w = problem.gradient(losses, w, rows), w.detach()
            stay = ~problem.success[rows]
            if step % math.ceil(self.steps / 10) == 0:
                stay &= losses.detach() <= PROGRESS * before
                before = losses.detach()
            if not stay.all():
                rows, x, c, before, w = rows[stay], x[stay], c[stay], before[stay], w[stay]
                gradient, mean, square = gradient[stay], mean[stay], square[stay]
                if len(rows) == 0:
                    break
            adam(w, gradient, mean, square, step + 1, self.lr)
        return succeeded[everyone]

    def _lead(self, problem: Problem, logits: Tensor, rows: Tensor) -> Tensor:
        """How far the wanted class leads in logits: max_{j != y} z_j - z_y, or z_t - max_{j != t} z_j."""
        target = None if problem.target is None else problem.target[rows]
        return adversarial_loss("margin", logits, problem.y[rows], target=target)

    def _keep(self, problem: Problem, points: Tensor, logits: Tensor, lead: Tensor, rows: Tensor) -> Tensor:
        """Give the problem the points that lead by at least `confidence`. Return which of them are adversarial."""
        enough = lead >= self.confidence
        at = enough.nonzero()[:, 0]
        if len(at):
            enough[at] = problem.keep_nearest(points[at], logits[at], rows[at])
        return enough
