"""PGD on the logits of normalised features, for models whose head does not normalise its features."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from steelman.attacks.engine import Problem, Search
from steelman.attacks.feature import Reader, reading
from steelman.attacks.pgd import begin, climb, step_sizes
from steelman.errors import UserError, unknown
from steelman.heads import Head
from steelman.losses import LOSSES, adversarial_loss
from steelman.settings import Count, Number, SettingsError, settings


def normalised(features: Tensor, weight: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    """s W z / ||z||_2 + b. With scale None, s is ||z||_2 as a constant, so the logits keep their size.

    >>> normalised(torch.tensor([[3.0, 4.0]]), torch.eye(2), None, 1.0)
    tensor([[0.6000, 0.8000]])
    """
    length = torch.linalg.vector_norm(features, dim=1, keepdim=True).clamp_min(1e-12)
    size = length.detach() if scale is None else scale
    logits: Tensor = F.linear(features, weight) * (size / length)
    return logits if bias is None else logits + bias


@settings
class FNAttack(Search):
    """PGD on the loss of s W z / ||z||_2, where z are the features that enter the last layer.

    The model's own logits decide success. The gradient has no part along z, so no step is spent on the
    length of the features. Without a bias, this length changes a plain model's confidence, but not its answer.

    Arguments:
        steps, step_size, restarts: as in PGD.
        start: "uniform" or "zero".
        loss: any loss that needs only logits and labels.
        scale: s. "length" is the sample's own ||z||_2, as a constant.
        bias: whether the last layer's bias is added.

    Deviations: The paper gives neither s, eta nor eps for its table. "length" is each sample's own length: a mean over
    the batch would make samples depend on each other. A model without a linear layer is attacked through its normalised
    logits.

    >>> from torch import nn
    >>> from steelman.threat import ThreatModel
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> x, y = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 1])
    >>> FNAttack(steps=2)(net, x, y, ThreatModel(eps=0.1)).shape
    torch.Size([2, 1, 2, 2])

    Pang et al. (2020), "Boosting Adversarial Training with Hypersphere Embedding", Eq. (12) and Table 7.
    """

    steps: Count = 20
    step_size: Annotated[Number, Field(gt=0)] | None = None
    restarts: Count = 1
    loss: str = "cross-entropy"
    start: Literal["uniform", "zero"] = "uniform"
    scale: Annotated[Number, Field(gt=0)] | Literal["length"] = 1.0
    bias: bool = False

    @model_validator(mode="after")
    def _sensible(self) -> FNAttack:
        plain = [name for name, loss in LOSSES.items() if loss.needs == "nothing"]
        if self.loss not in plain:
            raise SettingsError([(("loss",), str(unknown("loss", self.loss, plain)))])
        if self.start == "zero" and self.restarts > 1:
            raise UserError(
                f"restarts from the same point repeat one another: start 'zero' with {self.restarts} restarts"
            )
        return self

    def search(self, problem: Problem) -> None:
        sizes = step_sizes(problem.threat, self.steps, self.step_size)
        with reading(problem) as read:
            if isinstance(read.layer, Head) and read.layer.normalise_features:
                raise UserError(
                    "expected a model whose last layer takes features as they are; this one's head "
                    "normalises them, and pgd attacks it as it is"
                )
            for restart in range(self.restarts):
                rows = problem.remaining()
                if len(rows) == 0:
                    return
                points = begin(problem, rows, problem.key.fold("restart", restart), self.start)
                climb(problem, partial(self._climbed, problem, read), rows, points, sizes)

    def _climbed(self, problem: Problem, read: Reader, points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The model's logits, and the loss of the normalised ones, from one forward pass."""
        logits, features = read(points, rows)
        bias = read.layer.bias if self.bias and read.layer is not None else None
        scale = None if self.scale == "length" else self.scale
        seen = normalised(features, read.weight(logits), bias, scale)
        target = None if problem.target is None else problem.target[rows]
        return logits, adversarial_loss(self.loss, seen, problem.y[rows], target=target)
