"""MultiTargeted: PGD towards each other class in turn."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from steelman.attacks.apgd import ranked
from steelman.attacks.engine import Problem, Search
from steelman.attacks.hyperplane import nearest_first
from steelman.attacks.pgd import Climbed, begin, climb, step_sizes
from steelman.losses import targeted_margin
from steelman.settings import Count, Number, settings


@settings
class MultiTargeted(Search):
    """PGD on z_t - z_y towards each other class t in turn, each time from a new start. Broken samples leave.

    Arguments:
        targets: the number of classes: those of highest clean logit, the highest first. None means all K - 1 other
            classes.
        candidates: a number n sorts the n classes of highest logit by distance, the nearest first. As in DeepFool, the
            distance to a linearised boundary is (z_y - z_t) / ||grad (z_y - z_t)||_q. The boundary of a class of low
            logit may be near.
        steps, step_size, decay, start: as in PGD.

    With a target class in the call, the search runs towards that class alone. A run takes steps + 1 forward passes and
    `steps` backward passes. A diversified start takes two more of each. To rank the classes takes one clean forward
    pass. With `candidates`, it takes another one, and a backward pass for each candidate.

    Deviation: The paper attacks the classes in a fixed order. The order changes only the cost.

    Gowal et al. (2019), "An Alternative Surrogate Loss for PGD-based Adversarial Testing", Algorithm 1.

    >>> import torch
    >>> from steelman.heads import linear
    >>> from steelman.threat import ThreatModel
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), linear(4, 3))
    >>> x, y = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> threat = ThreatModel(norm="linf", eps=0.1)
    >>> bool(threat.contains(MultiTargeted(steps=5)(net, x, y, threat), x).all())
    True
    """

    steps: Count = 20
    step_size: Annotated[Number, Field(gt=0)] | None = None
    decay: Annotated[Number, Field(gt=0, le=1)] = 1.0
    restarts: Count = 1
    targets: Count | None = None
    candidates: Count | None = None
    start: Literal["uniform", "diversified"] = "uniform"

    def search(self, problem: Problem) -> None:
        targets = self._targets(problem)
        sizes = step_sizes(problem.threat, self.steps, self.step_size, self.decay)
        for restart, rank in itertools.product(range(self.restarts), range(targets.shape[1])):
            rows = problem.remaining()
            if len(rows) == 0:
                return
            key = problem.key.fold("restart", restart, *(("target", rank) if rank else ()))
            climb(problem, towards(problem, targets[:, rank]), rows, begin(problem, rows, key, self.start), sizes)

    def _targets(self, problem: Problem) -> Tensor:
        """The target classes, one column for each run."""
        if problem.target is not None:
            return problem.target[:, None]
        rows = problem.remaining()
        with torch.no_grad():
            clean = problem.logits(problem.x, rows)
        classes = ranked(clean, problem.y, self.candidates or clean.shape[1])
        targets = (nearest_first(problem, classes) if self.candidates else classes)[:, : self.targets]
        problem.keep(problem.x, clean, targeted_margin(clean, problem.y, targets[:, 0]), rows)
        return targets


def towards(problem: Problem, target: Tensor) -> Climbed:
    """The function that one run climbs. It gives the logits and z_t - z_y."""

    def climbed(points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        logits = problem.logits(points, rows)
        return logits, targeted_margin(logits, problem.y[rows], target[rows])

    return climbed
