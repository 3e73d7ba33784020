"""Gradients estimated from logits alone. NES and SPSA are settings of this one file."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from steelman.attacks.engine import Problem, Search
from steelman.attacks.pgd import ascend, step_sizes
from steelman.losses import adversarial_loss
from steelman.rng import Key
from steelman.settings import Count, Number, settings

# The most images, and the most pixel values, in one forward pass. Otherwise memory would grow with pairs times samples.
IMAGES_AT_ONCE = 1024
VALUES_AT_ONCE = 1 << 23


def at_once(x: Tensor, copies: int) -> int:
    """How many sets of `copies` points for each of the samples `x` fit into one forward pass; at least one."""
    images = min(IMAGES_AT_ONCE, VALUES_AT_ONCE // max(1, math.prod(x.shape[1:])))
    return max(1, images // max(1, copies * len(x)))


def climbed(problem: Problem, logits: Tensor, rows: Tensor) -> Tensor:
    """The margin by which the best wrong class leads the true one. With a target: by which the target leads."""
    target = None if problem.target is None else problem.target[rows]
    return adversarial_loss("margin", logits, problem.y[rows], target=target)


def signs(key: Key, index: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random signs of shape (N, *shape): -1 or 1 with equal chances, each from one random bit."""
    count = math.prod(shape)
    bits = key.bits(index, (count + 63) // 64)
    places = torch.arange(64, device=index.device)
    drawn = ((bits[:, :, None] >> places) & 1).flatten(1)[:, :count]
    return (2 * drawn - 1).to(dtype).reshape(len(index), *shape)


@settings
class Estimated(Search):
    """Projected ascent along g = 1/(2 q sigma) sum_i [L(x' + sigma u_i) - L(x' - sigma u_i)] u_i, from logits alone.

    L is the margin max_{j != y} z_j - z_y. With a target it is z_t - max_{j != t} z_j. u_i is Gaussian (NES) or has
    random signs (SPSA). The step is that of PGD: x' <- project(x' + eta U_p(g)).

    Arguments:
        pairs: q. A step asks 2 q queries for each sample.
        sigma: how far the queries of a pair are from x', in units of u_i.
        step_size: None means 2.5 eps / steps, or eps for a single step.
        start: "zero" is the clean image, "uniform" a uniform draw from the threat model.

    Each point of the search costs one query more: only the model's answer there says whether it succeeds. So a robust
    sample asks steps (2 q + 1) + 1 queries in a restart. A sample stops at its first success.

    The queries x' +- sigma u_i may be adversarial, but they never count as a success. Most of them lie outside the ball
    or the box. If they were projected, the estimate would be biased. If the model takes no values outside the box,
    start from images that lie a few sigma inside it.

    Deviations: Some papers print L with the opposite sign beside an ascent step, which would climb towards the true
    class. This attack climbs away from it. The papers step with Adam or momentum; this attack has the step of PGD.
    Every step and every sample draws new directions.

    Ilyas et al. (2018), "Black-box Adversarial Attacks with Limited Queries and Information", section 2.1; Uesato et
    al. (2018), "Adversarial Risk and the Dangers of Evaluating Against Weak Attacks", section 4.

    >>> from steelman.heads import linear
    >>> from steelman.threat import ThreatModel
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), linear(4, 3))
    >>> x, y = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> threat = ThreatModel(norm="linf", eps=0.1)
    >>> found = Estimated(steps=5, pairs=8).run(net, x, y, threat)
    >>> bool(threat.contains(found.x_adv, x).all()), int(found.backwards.sum())
    (True, 0)
    """

    noise: Literal["gaussian", "rademacher"] = "gaussian"
    steps: Count = 50
    pairs: Count = 128
    sigma: Annotated[Number, Field(gt=0)] = 0.001
    step_size: Annotated[Number, Field(gt=0)] | None = None
    restarts: Count = 1
    start: Literal["zero", "uniform"] = "zero"

    black_box: ClassVar[bool] = True
    reduced: ClassVar[bool] = False

    @torch.no_grad()
    def search(self, problem: Problem) -> None:
        threat, sizes = problem.threat, step_sizes(problem.threat, self.steps, self.step_size)
        for restart in range(self.restarts):
            rows, key = problem.remaining(), problem.key.fold("restart", restart)
            x_adv = problem.x[rows]
            if self.start == "uniform":
                x_adv = threat.random_start(x_adv, problem.index[rows], key)
            for step in range(self.steps + 1):
                if len(rows) == 0:
                    return
                logits = problem.logits(x_adv, rows)
                stay = ~problem.keep(x_adv, logits, climbed(problem, logits, rows), rows)
                if step == self.steps:
                    break
                rows, x_adv = rows[stay], x_adv[stay]
                gradient = self.gradient(problem, x_adv, rows, key.fold("step", step))
                x_adv = ascend(x_adv, gradient, problem.x[rows], threat, sizes[step])

    def gradient(self, problem: Problem, points: Tensor, rows: Tensor, key: Key) -> Tensor:
        """The estimate of each sample's gradient at its point.

        The number of a pair decides its draw and its place in the sum. So it does not matter how many pairs share a
        pass.
        """
        total = torch.zeros_like(points)
        chunk = at_once(points, copies=2)
        for first in range(0, self.pairs if len(rows) else 0, chunk):
            count = min(chunk, self.pairs - first)
            u = self.directions(points, problem.index[rows], range(first, first + count), key)
            both = torch.stack((points[:, None] + self.sigma * u, points[:, None] - self.sigma * u), dim=2)
            asked = rows.repeat_interleave(2 * count)
            losses = climbed(problem, problem.logits(both.flatten(0, 2), asked), asked).view(len(rows), count, 2)
            # Outside the box, a model may answer with NaN or infinity. Such a pair counts as zero.
            slopes = (losses[..., 0] - losses[..., 1]).to(u.dtype).nan_to_num(0.0, 0.0, 0.0)
            slopes = slopes / (2 * self.sigma * self.pairs)
            slopes = slopes.view(len(rows), count, *[1] * (points.dim() - 1))
            for pair in range(count):
                total.addcmul_(u[:, pair], slopes[:, pair])
        return total

    def directions(self, points: Tensor, index: Tensor, pairs: range, key: Key) -> Tensor:
        """The directions u_i of each sample for each i in `pairs`, of shape (N, pairs, *shape)."""
        shape, dtype = tuple(points.shape[1:]), points.dtype
        numbers = torch.arange(pairs.start, pairs.stop, device=index.device)
        each = (index[:, None] * self.pairs + numbers).flatten()  # one number for each sample and pair
        u = key.normal(each, shape, dtype) if self.noise == "gaussian" else signs(key, each, shape, dtype)
        return u.view(len(index), len(pairs), *shape)
