"""Gradient attacks whose every query has a shape: whole grey levels, few pixels, small moves, or large patches.

Other attacks move all pixels by fractions of a grey level. A model that notices such moves could answer them otherwise
than it answers the images of a real adversary.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from steelman.attacks.engine import Problem, Search
from steelman.attacks.pgd import ascend, mean_size
from steelman.losses import margin, targeted_margin
from steelman.settings import Count, settings
from steelman.threat import ThreatModel

Shape = Literal["grid", "few", "growing", "patches"]
SHAPES: tuple[Shape, ...] = get_args(Shape)

LEVELS = 255  # grey levels of an 8-bit file
FEWEST, MOST = 0.01, 0.32  # the share of pixels that "few" moves in its first and in its last step
PATCHES = 8  # patches along a side of the image, if it has at least two pixels for each


@settings
class Shaped(Search):
    """Steps along the gradient of the margin, from the clean image: x' <- shape(project(x' + eta U_p(g))).

    The attack asks the model only about points that have the shape. The point that it returns has the shape too.

    Arguments:
        shape: "grid": all pixels are whole grey levels, as in an 8-bit file. "few": only the pixels with the largest
            gradients move, as far as the radius allows; their share grows from 1% to 32%. "growing": all pixels move,
            in a radius that grows from eps / steps to eps. "patches": the pixels of a patch move together.

    On the grid, an image that is not on it is rounded first. If this alone leaves the radius, no point is found.

    >>> from steelman.heads import linear
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), linear(16, 3))
    >>> x, y = torch.full((2, 1, 4, 4), 0.4), torch.tensor([0, 1])
    >>> points = Shaped(shape="grid")(net, x, y, ThreatModel(eps=0.1))
    >>> bool((points * 255 == (points * 255).round()).all())
    True

    Carlini et al. (2019), "On Evaluating Adversarial Robustness": its advice to attack also what a defense may detect.
    """

    shape: Shape = "growing"
    steps: Count = 20

    def search(self, problem: Problem) -> None:
        threat, rows = problem.threat, problem.remaining()
        x = problem.x[rows]
        points = free = on_grid(x, x, threat) if self.shape == "grid" else x
        trail = torch.zeros_like(x)  # the sum of the gradients so far, each divided by its size
        for step in range(self.steps + 1):
            points = points.detach().requires_grad_(True)
            logits = problem.logits(points, rows)
            values = self._values(problem, logits, rows)
            # If no point of the grid is in the ball, the nearest one is asked about for its gradient, but not kept.
            broken = threat.contains(points.detach(), problem.x[rows])
            broken[broken.clone()] = problem.keep(points.detach()[broken], logits[broken], values[broken], rows[broken])
            if step == self.steps or bool(broken.all()):
                return
            gradient = problem.gradient(values, points, rows)
            stay = ~broken
            rows, free, gradient = rows[stay], free[stay], gradient[stay]
            trail = trail[stay] + gradient / mean_size(gradient)
            free, points = self._move(free, gradient, trail, problem.x[rows], threat, (step + 1) / self.steps)

    def _values(self, problem: Problem, logits: Tensor, rows: Tensor) -> Tensor:
        if problem.target is not None:
            return targeted_margin(logits, problem.y[rows], problem.target[rows])
        return margin(logits, problem.y[rows])

    def _move(
        self, free: Tensor, gradient: Tensor, trail: Tensor, x: Tensor, threat: ThreatModel, done: float
    ) -> tuple[Tensor, Tensor]:
        """The next point, and the same point in its shape. `done` is the share of the steps that are made."""
        eta = 2.5 * threat.eps / self.steps
        if self.shape == "grid":
            # The steps add up in `free`. Rounded at once, a step below half a grey level would always be lost.
            free = ascend(free, gradient, x, threat, max(eta, _level(threat)) if threat.norm == "linf" else eta)
            return free, on_grid(free, x, threat)
        if self.shape == "few":
            chosen = trail * largest(trail, FEWEST * (MOST / FEWEST) ** done)
            points = threat.project(x + threat.steepest(chosen, x, threat.eps), x)
            return points, points
        if self.shape == "growing":
            smaller = threat.at(threat.eps * done)
            points = ascend(free, gradient, x, smaller, eta)
            return points, points
        points = ascend(free, patched(gradient), x, threat, eta)
        return points, points


def _level(threat: ThreatModel) -> float:
    """The size of a grey level."""
    return (threat.high - threat.low) / LEVELS


def on_grid(points: Tensor, x: Tensor, threat: ThreatModel) -> Tensor:
    """The points with every pixel rounded to a grey level of an 8-bit file, inside the ball if that is possible.

    >>> on_grid(torch.tensor([[[[0.49]]]]), torch.tensor([[[[0.5]]]]), ThreatModel(eps=0.1)) * 255
    tensor([[[[125.]]]])
    """
    low, level = threat.low, _level(threat)
    middle = ((x - low) / level).round()
    if threat.norm == "linf":
        room = 1e-4  # of a grey level: a bound that is a whole level must not be lost to a rounding
        least = ((x - threat.eps - low) / level - room).ceil().clamp(0, LEVELS)
        most = ((x + threat.eps - low) / level + room).floor().clamp(0, LEVELS)
        steps = torch.minimum(torch.maximum(((points - low) / level).round(), least), most)
        return _at(torch.where(least <= most, steps, middle), threat)
    way = (points - low) / level - middle
    found = _at(middle + way.trunc(), threat)  # each pixel towards the image: surely no further away than `points`
    for share in (0.7, 0.8, 0.9, 1.0):
        rounded = _at((middle + (share * way).round()).clamp(0, LEVELS), threat)
        inside = threat.contains(rounded, x)[:, None, None, None]
        found = torch.where(inside, rounded, found)
    return found


def _at(steps: Tensor, threat: ThreatModel) -> Tensor:
    """The pixels of these grey levels, to the bit as a file's bytes are read: level / 255."""
    values = steps / LEVELS
    if (threat.low, threat.high) != (0, 1):
        values = threat.low + values * (threat.high - threat.low)
    return values.clamp(threat.low, threat.high)


def largest(gradient: Tensor, share: float) -> Tensor:
    """1 at the pixels with the largest gradients, all channels together, and 0 elsewhere. At least one pixel is chosen.

    >>> largest(torch.tensor([[[[1.0, -3.0], [2.0, 0.0]]]]), 0.5)
    tensor([[[[0., 1.],
              [1., 0.]]]])
    """
    size = gradient.abs().sum(dim=1).flatten(1)
    count = max(round(share * size.shape[1]), 1)
    chosen = torch.zeros_like(size).scatter(1, size.topk(count, dim=1).indices, 1.0)
    return chosen.view(len(gradient), 1, *gradient.shape[2:])


def patched(gradient: Tensor) -> Tensor:
    """The gradient with each patch's mean in place of its pixels."""
    height, width = gradient.shape[2:]
    sides = min(PATCHES, max(height // 2, 1)), min(PATCHES, max(width // 2, 1))
    return F.interpolate(F.adaptive_avg_pool2d(gradient, sides), (height, width), mode="nearest")
