"""RayS: the distance to the boundary along rays to the corners, from predicted labels only. Also its metric ADBD."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from steelman.attacks.engine import Found, Problem, Search
from steelman.errors import UserError
from steelman.settings import Count, Number, settings
from steelman.threat import Norm


@settings
class RayS(Search):
    """Find the signs s in {-1, 1}^d for which x + r s is misclassified at the smallest radius r.

    The attack flips the signs of blocks of pixels. After each round the blocks have half the size. Each flip is first
    tried at the best radius so far. If it is adversarial there, a bisection finds its own radius.

    Arguments:
        queries: the most queries for each sample, the clean image included.
        tolerance: where a bisection ends. It is measured on the l2 length of the ray, as in the published code:
            tolerance / sqrt(d) for a pixel.

    Each sample follows its own blocks and bisections, with one query a step. A sample stops early after a round over
    all single pixels without a gain: another round would ask the same questions. The first query is the clean image. A
    sample that is misclassified without an attack has distance 0.

    Chen and Gu (2020), "RayS: A Ray Searching Method for Hard-label Adversarial Attack", Algorithms 1 to 3.

    >>> from steelman.threat import ThreatModel
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    >>> _ = net[1].weight.data.copy_(torch.tensor([[1.0, -1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))
    >>> _ = net[1].bias.data.copy_(torch.tensor([-0.2, 0.0]))
    >>> x, threat = torch.full((1, 1, 2, 2), 0.5), ThreatModel(norm="linf", eps=0.3)
    >>> found = RayS(queries=200).run(net, x, torch.tensor([0]), threat, distances=True)
    >>> round(adbd(found), 2), accuracy(found, 0.3)
    (0.2, 0.0)
    """

    norms: ClassVar[tuple[Norm, ...]] = ("linf",)
    minimum_norm: ClassVar[bool] = True
    black_box: ClassVar[bool] = True

    queries: Count = 10_000
    tolerance: Annotated[Number, Field(gt=0)] = 1e-3

    def search(self, problem: Problem) -> None:
        rays = _Rays(problem, problem.remaining())
        narrow = self.tolerance / math.sqrt(max(rays.pixels, 1))
        with torch.no_grad():
            for step in range(self.queries):
                if len(rays.rows) == 0:
                    return
                points = rays.points() if step > 0 else problem.x[rays.rows]
                adversarial = problem.keep_nearest(points, problem.logits(points, rays.rows), rays.rows)
                if step > 0:
                    rays.learn(adversarial, narrow)
                # A sample leaves with a point within eps, at distance 0, or after a round without a gain.
                stay = ~problem.success[rays.rows] & (problem.distance[rays.rows] > 0) & (rays.idle < rays.pixels)
                if not stay.all():
                    rays.keep(stay)


class _Rays:
    """The best ray of each sample, the block of it that is flipped now, and the state of its bisection."""

    def __init__(self, problem: Problem, rows: Tensor) -> None:
        x = problem.x[rows]
        self.threat, self.shape = problem.threat, tuple(x.shape[1:])
        self.rows, self.x = rows, x.flatten(1)
        self.pixels = self.x.shape[1]
        self.places = torch.arange(self.pixels, device=x.device)
        self.sign = self.tried = torch.ones_like(self.x)
        n, width = len(rows), self.threat.high - self.threat.low
        self.radius = x.new_full((n,), width)  # at this radius, every ray has reached a corner of the box
        self.found = torch.zeros(n, dtype=torch.bool, device=x.device)
        self.lower, self.upper, self.bisecting = torch.zeros_like(self.radius), self.radius.clone(), self.found.clone()
        # The first block is empty. Without it, no query would ask about the ray of ones.
        self.size, self.first = torch.zeros_like(rows), torch.zeros_like(rows)
        self.blocks, self.idle = torch.ones_like(rows), torch.zeros_like(rows)

    def points(self) -> Tensor:
        """The next query of each sample, in the box: a point of its best ray, with the block flipped."""
        inside = (self.places >= self.first[:, None]) & (self.places < (self.first + self.size)[:, None])
        self.tried = torch.where(inside, -self.sign, self.sign)
        at = torch.where(self.bisecting, (self.lower + self.upper) / 2, self.radius)
        points = torch.addcmul(self.x, at[:, None], self.tried)
        return points.clamp_(self.threat.low, self.threat.high).view(-1, *self.shape)

    def learn(self, adversarial: Tensor, narrow: float) -> None:
        """Use the answers: narrow the bisections, begin those of adversarial flips, and end the other flips."""
        halving, middle = self.bisecting, (self.lower + self.upper) / 2
        spent = (middle <= self.lower) | (middle >= self.upper)  # no float is left between the two
        self.upper = torch.where(halving, torch.where(adversarial, middle, self.upper), self.radius)
        self.lower = torch.where(halving & ~adversarial, middle, self.lower)
        done = halving & ((self.upper - self.lower <= narrow) | spent)
        gained = done & ((self.upper < self.radius) | ~self.found)
        at = gained.nonzero()[:, 0]
        if len(at):
            self.sign[at] = self.tried[at]
            self.radius[at], self.found[at] = self.upper[at], True
        ended = done | (~halving & ~adversarial)
        self.bisecting = (halving | adversarial) & ~done
        self.lower = torch.where(self.bisecting, self.lower, 0)
        # Count the flips of single pixels without a gain. After one for each pixel, the sample leaves.
        self.idle = torch.where(gained, 0, self.idle + (ended & (self.size == 1)))
        self._next(ended)

    def _next(self, ended: Tensor) -> None:
        """Give each ray whose flip has ended its next block. After the last block, blocks have half the size."""
        first = self.first + self.size
        over = ended & (first >= self.pixels)
        self.first = torch.where(over, 0, torch.where(ended, first, self.first))
        self.blocks = torch.where(over & (self.size > 1), 2 * self.blocks, self.blocks)
        self.size = torch.where(ended, (self.pixels + self.blocks - 1) // self.blocks, self.size)

    def keep(self, stay: Tensor) -> None:
        """Keep only the samples in `stay`."""
        for name in ("rows", "x", "sign", "radius", "found", "lower", "upper", "bisecting", "size", "first"):
            setattr(self, name, getattr(self, name)[stay])
        self.blocks, self.idle = self.blocks[stay], self.idle[stay]


def adbd(found: Found, *, width: float = 1.0) -> float:
    """Average decision boundary distance: the mean over all samples of the distance found.

    A sample that is misclassified without an attack counts as 0. A sample without an adversarial point counts as
    `width`, the width of the valid range: no distance is larger. `found` must come from ``run(..., distances=True)``.
    Otherwise a sample stops at its first point within eps.

    Chen and Gu (2020), section 5.
    """
    distance = _distances(found)
    return float(torch.where(torch.isfinite(distance), distance, width).mean())


def accuracy(found: Found, eps: float) -> float:
    """The share of samples whose distance is above eps."""
    return float((_distances(found) > eps).double().mean())


def _distances(found: Found) -> Tensor:
    if found.distance is None or len(found.distance) == 0:
        raise UserError("expected the answer of a minimum-norm attack on at least one sample, got no distances")
    return found.distance
