"""DeepFool: steps onto the nearest linearised boundary, until the point has crossed it."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field

from steelman.attacks.engine import Problem, Search
from steelman.attacks.hyperplane import leads, nearest_boundary, step_onto, top_rivals
from steelman.settings import Count, Number, settings


@settings
class DeepFool(Search):
    """Newton steps to the nearest boundary: x' <- x' + (1 + overshoot) r, where r is shortest with f_k + w_k.r = 0.

    f_k = z_k - z_y, and w_k is its gradient. k is the class with the least |f_k| / ||w_k||_q. A sample leaves when it
    is adversarial, or when a step does not move it. After s steps it has taken s (candidates - 1)
    backward passes and 2 s + 1 forward passes.

    Arguments:
        steps: the most steps.
        candidates: the number of classes to look at: the true one, and those of the next highest clean logits. None
            means all.

    With a target there is one boundary, z_t = max over k != t of z_k.

    Deviations: r is the shortest step that stays in the box. Without a box, r is the step of the paper: |f| / ||w||_q
    times the steepest direction. With a box, a pixel at its bound moves less, and the other pixels move more. The
    overshoot is clipped to the box.

    >>> from steelman.threat import ThreatModel
    >>> net = torch.nn.Flatten()  # the pixels are the logits
    >>> x, y = torch.tensor([[[[0.6, 0.5], [0.3, 0.2]]]]), torch.tensor([0])
    >>> found = DeepFool().run(net, x, y, ThreatModel(norm="l2", eps=0.1), distances=True)
    >>> round(float(found.distance) / 0.1 * 2**0.5, 4), int(found.forwards), int(found.backwards)
    (1.02, 3, 3)

    Moosavi-Dezfooli et al. (2016), "DeepFool: a simple and accurate method to fool deep neural networks", Algorithm 2
    and Eq. (11).
    """

    minimum_norm: ClassVar[bool] = True
    reduced: ClassVar[bool] = False

    steps: Count = 50
    candidates: Annotated[Count, Field(ge=2)] | None = 10
    overshoot: Annotated[Number, Field(ge=0)] = 0.02

    def search(self, problem: Problem) -> None:
        threat, rows = problem.threat, problem.remaining()
        points, rivals = problem.x[rows], None
        for step in range(self.steps + 1):
            with torch.no_grad():
                logits = problem.logits(points, rows)
            if rivals is None:
                rivals = top_rivals(problem, logits, rows, None if self.candidates is None else self.candidates - 1)
            stay = ~problem.keep_nearest(points, logits, rows)
            if step == self.steps or not stay.any():
                return
            # Without this second forward pass, the backward passes would include the broken samples, which costs more.
            points, rows, rivals = points[stay].requires_grad_(True), rows[stay], rivals[stay]
            between = leads(problem, problem.logits(points, rows), rows, rivals)
            lead, normal = nearest_boundary(problem, between, points, rows)
            points = points.detach()
            r = step_onto(points, normal, -lead, threat)
            points = (points + (1 + self.overshoot) * r).clamp(threat.low, threat.high)
            moved = (r != 0).flatten(1).any(dim=1)
            if not moved.all():  # no gradient, or a corner of the box: no later step would move the sample
                points, rows, rivals = points[moved], rows[moved], rivals[moved]
                if len(rows) == 0:
                    return
