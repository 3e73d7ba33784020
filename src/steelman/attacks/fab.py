"""FAB: steps onto the linearised boundary, biased towards the clean image."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from steelman.attacks.engine import Problem, Search
from steelman.attacks.hyperplane import column, leads, lengths, margins, nearest_boundary, step_onto, top_rivals
from steelman.settings import Count, Number, settings
from steelman.threat import ThreatModel


@settings
class FAB(Search):
    """Biased steps onto the nearest boundary: x' <- (1 - a)(x' + eta d(x')) + a (x + eta d(x)), within the box.

    d(u) is the shortest step, within the box, from u onto the boundary that is linearised at x'. The bias towards the
    clean image is a = min(||d(x')|| / (||d(x')|| + ||d(x)||), alpha_max). An adversarial x' is kept if it is the
    nearest so far. It is then moved back towards the image: x' <- x + beta (x' - x).

    Arguments:
        steps: the steps for each start and target.
        restarts: the first starts from the clean image. The others start uniformly in a ball of half the radius eps. If
            distances are asked for, that is half the nearest distance so far.
        targets: None looks at all wrong classes in each step, with K - 1 backward passes. A number n takes the n wrong
            classes of highest clean logit. It runs towards one after the other. A step then takes one backward pass
            (FAB-T).
        together: whether these classes are run side by side. This is quicker for a few samples.
        final_search: the number of secant steps on the line from the clean image to the nearest point.

    With a target t in the call there is one boundary, z_t = max over k != t of z_k.

    The search takes one forward pass for the clean image, two for each step, and one for each step of the final search.
    A sample with a point within eps leaves at once, unless distances are asked for.

    >>> net = torch.nn.Flatten()  # the pixels are the logits
    >>> x, y = torch.tensor([[[[0.6, 0.5], [0.3, 0.2]]]]), torch.tensor([0])
    >>> found = FAB(steps=5).run(net, x, y, ThreatModel(norm="l2", eps=0.1), distances=True)
    >>> round(float(found.distance), 4), int(found.forwards), int(found.backwards)
    (0.0707, 14, 15)

    Croce and Hein (2020), "Minimally distorted adversarial examples with a fast adaptive boundary attack", Algorithm 1;
    FAB-T: Croce and Hein (2020), "Reliable evaluation of adversarial robustness", section 5.
    """

    minimum_norm: ClassVar[bool] = True
    reduced: ClassVar[bool] = False

    steps: Count = 100
    restarts: Count = 1
    targets: Count | None = None
    alpha_max: Annotated[Number, Field(ge=0, le=1)] = 0.1
    eta: Annotated[Number, Field(ge=1)] = 1.05
    beta: Annotated[Number, Field(gt=0, le=1)] = 0.9
    final_search: Annotated[int, Field(ge=0)] = 3
    together: bool = False

    @property
    def copies(self) -> int:
        return (self.targets or 1) if self.together else 1

    def search(self, problem: Problem) -> None:
        rows = problem.remaining()
        with torch.no_grad():
            clean = problem.logits(problem.x, rows)
        problem.keep_nearest(problem.x, clean, rows)
        rivals = top_rivals(problem, clean, rows, self.targets)
        runs = (
            [rivals]
            if self.targets is None or problem.target is not None
            else [one[:, None] for one in rivals.unbind(1)]
        )
        before = margins(problem, clean, rows)
        rows = problem.remaining()
        if self.together and len(runs) > 1 and len(rows):
            copies = problem.spread(rows, len(runs))
            before = before[rows].repeat(len(runs))
            self._runs(copies, [torch.cat([towards[rows] for towards in runs])], before)
            problem.gather(copies, rows)
        else:
            self._runs(problem, runs, before)

    def _runs(self, problem: Problem, runs: list[Tensor], before: Tensor) -> None:
        """Run the remaining samples towards each entry of `runs` in turn, then do the final search.

        `before` are the margins of the clean images.
        """
        edge = before  # the margins of the nearest points
        for place, towards in enumerate(runs):
            for restart in range(self.restarts):
                rows = problem.remaining()
                if len(rows) == 0:
                    return
                edge = self._run(problem, rows, self._begin(problem, rows, place, restart), towards[rows], edge)
        self._final_search(problem, before, edge)

    def _begin(self, problem: Problem, rows: Tensor, place: int, restart: int) -> Tensor:
        x, threat = problem.x[rows], problem.threat
        if restart == 0:
            return x
        key = problem.key.fold("target", place, "restart", restart)
        drawn = threat.at(1.0).random_start(torch.zeros_like(x), problem.index[rows], key, box=False)
        radius = torch.full_like(problem.distance[rows], threat.eps)
        if problem.distances:
            radius = torch.where(problem.distance[rows].isfinite(), problem.distance[rows], radius)
        return (x + column(radius.to(x.dtype) / 2, x) * drawn).clamp(threat.low, threat.high)

    def _run(self, problem: Problem, rows: Tensor, points: Tensor, rivals: Tensor, edge: Tensor) -> Tensor:
        """Do all steps on the samples `rows`, and return the margins of the nearest points.

        A sample leaves when it has a point within eps.
        """
        x, edge = problem.x[rows], edge.clone()
        for _ in range(self.steps):
            points = points.detach().requires_grad_(True)
            between = leads(problem, problem.logits(points, rows), rows, rivals)
            lead, normal = nearest_boundary(problem, between, points, rows)
            points = self.step(points.detach(), x, lead, normal, problem.threat)
            before = problem.distance[rows]
            with torch.no_grad():
                logits = problem.logits(points, rows)
            adversarial = problem.keep_nearest(points, logits, rows)
            nearer = problem.distance[rows] < before
            edge[rows[nearer]] = margins(problem, logits, rows)[nearer]
            points = torch.where(column(adversarial, x), x + self.beta * (points - x), points)
            stay = ~problem.success[rows]
            if not stay.all():
                rows, points, x, rivals = rows[stay], points[stay], x[stay], rivals[stay]
                if len(rows) == 0:
                    break
        return edge

    def step(self, points: Tensor, x: Tensor, lead: Tensor, normal: Tensor, threat: ThreatModel) -> Tensor:
        """Make the biased step with overshoot from `points`. `lead` and `normal`: f and w of the nearest boundary."""
        offset = (normal * (points - x)).flatten(1).sum(dim=1)
        here = step_onto(points, normal, -lead, threat)
        there = step_onto(x, normal, offset - lead, threat)
        near, far = lengths(here, threat.p), lengths(there, threat.p)
        share = near / (near + far).clamp_min(torch.finfo(near.dtype).tiny)
        alpha = column(share.clamp_max(self.alpha_max), x)
        moved = (1 - alpha) * (points + self.eta * here) + alpha * (x + self.eta * there)
        return moved.clamp(threat.low, threat.high)

    def _final_search(self, problem: Problem, before: Tensor, beyond: Tensor) -> None:
        """Look for a nearer point by secant steps on the line from the clean image to the nearest point.

        `before` are the margins of the clean images, and `beyond` those of the nearest points.
        """
        rows = (~problem.success & (problem.distance > 0) & problem.distance.isfinite()).nonzero()[:, 0]
        if problem.nearest is None or len(rows) == 0:
            return
        x, before, beyond = problem.x[rows], before[rows], beyond[rows]
        line, low, high = problem.nearest[rows] - x, torch.zeros_like(before), torch.ones_like(before)
        for _ in range(self.final_search):
            # 0.99 aims just beyond the boundary: an exact aim would miss it half the time. Equal margins give no step.
            slope = beyond - before
            share = torch.where(slope > 0, beyond / slope, torch.zeros_like(slope))
            at = high - 0.99 * share * (high - low)
            points = (x + column(at.to(x.dtype), x) * line).clamp(problem.threat.low, problem.threat.high)
            with torch.no_grad():
                logits = problem.logits(points, rows)
            adversarial, margin = problem.keep_nearest(points, logits, rows), margins(problem, logits, rows)
            low, before = torch.where(adversarial, low, at), torch.where(adversarial, before, margin)
            high, beyond = torch.where(adversarial, at, high), torch.where(adversarial, margin, beyond)
