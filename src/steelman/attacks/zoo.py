"""ZOO: one coordinate at a time, by finite differences."""

from __future__ import annotations

import itertools
import math
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from steelman.attacks.engine import Problem, Search
from steelman.attacks.estimated import at_once, climbed
from steelman.settings import Count, Number, settings
from steelman.threat import Norm, ThreatModel

# Adam's constants, as published with ZOO.
BETA1, BETA2, TINY = 0.9, 0.999, 1e-8


@settings
class ZOO(Search):
    """Coordinate ascent by differences of answers: g_i = [L(P(x' + h e_i)) - L(P(x' - h e_i))] / 2h, stepped by Adam.

    L is the margin max_{j != y} z_j - z_y. With a target it is z_t - max_{j != t} z_j. P is the projection onto the
    threat model, and the coordinate i is random.

    Arguments:
        queries: the most queries for each sample.
        sigma: h.
        step_size: None means eps for linf, and 2 eps / sqrt(pixels) for l2.
        coordinates: how many are measured at one point, and then moved together.

    Queries are projected, so a query may be a success itself. A difference costs two queries. The clean image and the
    last point cost one more each. In l2, a point on the sphere is pushed out by h before its queries are projected.
    They then measure the slope along the sphere, which is zero at the best point of the ball.

    In float32, rounding hides a difference over 1e-4 if logits are large and slopes small. Then raise `sigma`.

    Deviations: The published attack searches for the nearest point, by a penalty on the distance and a search on its
    weight. This attack climbs the same margin inside a given radius. The order of the coordinates is random, and each
    comes once before any comes again; in the paper, draws are independent. Two parts are left out. One is the Newton
    variant: it needs a third query for a curvature, which piecewise linear networks lack. The other are the
    coarse-to-fine image grids.

    Chen et al. (2017), "ZOO: Zeroth Order Optimization Based Black-box Attacks", Eq. (6), Algorithms 1 and 2.

    >>> from steelman.heads import linear
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), linear(4, 3))
    >>> x, y = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> found = ZOO(queries=40).run(net, x, y, ThreatModel(norm="linf", eps=0.1))
    >>> bool((found.forwards <= 40).all()), int(found.backwards.sum())
    (True, 0)
    """

    queries: Count = 20000
    sigma: Annotated[Number, Field(gt=0)] = 1e-4
    step_size: Annotated[Number, Field(gt=0)] | None = None
    coordinates: Count = 1

    norms: ClassVar[tuple[Norm, ...]] = ("linf", "l2")
    black_box: ClassVar[bool] = True
    reduced: ClassVar[bool] = False

    def eta(self, threat: ThreatModel, pixels: int) -> float:
        """The step size in use."""
        if self.step_size is not None:
            return self.step_size
        return threat.eps if threat.norm == "linf" else 2 * threat.eps / math.sqrt(pixels)

    @torch.no_grad()
    def search(self, problem: Problem) -> None:
        rows = problem.remaining()
        x_adv = problem.x[rows]
        stay = ~_ask(problem, x_adv, rows)
        rows, x_adv, pixels = rows[stay], x_adv[stay], math.prod(problem.x.shape[1:])
        mean, square = (torch.zeros_like(x_adv.flatten(1)) for _ in range(2))
        eta, left = self.eta(problem.threat, pixels), self.queries - 2
        for visit in itertools.count(1):
            order = problem.key.fold("visit", visit).bits(problem.index[rows], pixels).argsort(dim=1, stable=True)
            for first in range(0, pixels, self.coordinates):
                if len(rows) == 0:
                    return
                if left < 2:
                    if left < self.queries - 2:
                        _ask(problem, x_adv, rows)
                    return
                places = order[:, first : first + min(self.coordinates, left // 2)]
                left -= 2 * places.shape[1]
                slopes, broken = self.slopes(problem, x_adv, rows, places)
                if broken.any():
                    rows, x_adv, places, slopes, mean, square, order = (
                        kept[~broken] for kept in (rows, x_adv, places, slopes, mean, square, order)
                    )
                # Each visit measures every coordinate once. So `visit` is the number of Adam's steps on it.
                m = BETA1 * mean.gather(1, places) + (1 - BETA1) * slopes
                v = BETA2 * square.gather(1, places) + (1 - BETA2) * slopes.square()
                mean, square = mean.scatter_(1, places, m), square.scatter_(1, places, v)
                step = (
                    eta
                    * (m / (1 - BETA1**visit))
                    / ((v / (1 - BETA2**visit)).sqrt() + max(TINY, torch.finfo(m.dtype).tiny))
                )
                moved = x_adv.flatten(1).scatter_add(1, places, step).view_as(x_adv)
                x_adv = problem.threat.project(moved, problem.x[rows])

    def slopes(self, problem: Problem, x_adv: Tensor, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """The slope of the margin along each of the coordinates `places`, and whether each sample is broken now."""
        x, threat = problem.x[rows], problem.threat
        centre = x_adv if threat.norm == "linf" else x_adv + (self.sigma / threat.eps) * (x_adv - x)
        found, best, best_logits = [], x_adv, None
        value = torch.full_like(x_adv.flatten(1)[:, 0], float("-inf"))
        ends = torch.tensor([self.sigma, -self.sigma], dtype=x.dtype, device=x.device)
        n, chunk = len(rows), at_once(x, copies=2)
        for some in torch.split(places, chunk, dim=1):
            copies = 2 * some.shape[1]
            points = centre.flatten(1).repeat_interleave(copies, dim=0)
            at = some.repeat_interleave(2, dim=1).view(-1, 1)
            points.scatter_add_(1, at, ends.repeat(n * some.shape[1])[:, None])
            points = threat.project(points.view(-1, *x.shape[1:]), x.repeat_interleave(copies, dim=0))
            asked = rows.repeat_interleave(copies)
            logits = problem.logits(points, asked)
            values = climbed(problem, logits, asked).view(n, copies)
            found.append((values[:, 0::2] - values[:, 1::2]) / (2 * self.sigma))
            top = torch.arange(n, device=x.device) * copies + values.argmax(dim=1)
            better = values.amax(dim=1) > value
            value = torch.where(better, values.amax(dim=1), value)
            best = torch.where(better.view(-1, *[1] * (x.dim() - 1)), points[top], best)
            best_logits = logits[top] if best_logits is None else torch.where(better[:, None], logits[top], best_logits)
        assert best_logits is not None
        return torch.cat(found, dim=1).to(x.dtype).nan_to_num(0.0, 0.0, 0.0), problem.keep(
            best, best_logits, value, rows
        )


def _ask(problem: Problem, points: Tensor, rows: Tensor) -> Tensor:
    """Ask one query for each sample. Return whether each sample is broken, by this point or before."""
    logits = problem.logits(points, rows)
    return problem.keep(points, logits, climbed(problem, logits, rows), rows)
