"""CURE: curvature regularisation."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from steelman.models.batchnorm import Branch, fixed
from steelman.objectives.base import Batch, Objective, Outcome
from steelman.schedules import Scheduled, lowest, value_at
from steelman.settings import Number, SettingsError, settings
from steelman.threat import steepest


@settings
class CURE(Objective):
    """mean [ l(x) + weight * ||grad l(x + h z) - grad l(x)||^2 ], with z = sign(grad l(x)) / ||sign(grad l(x))||_2.

    l is the training cross-entropy, with the head's margin and the label smoothing. z is a constant. x + h z may leave
    the valid range. The threat's radius has no effect: `h` takes its place. It is an l2 length in pixel values, and may
    be a schedule.

    The released code differs. It raises h over the first epochs, and measures it on normalised images. It fine-tunes a
    trained model. It does not square the norm: `squared` False.

    Use a smooth activation, such as softplus or silu: the loss needs the derivative of grad l. The second derivative of
    ReLU is zero, so only the softmax would have a curvature. Cross-entropy attacks overrate these models. Measure them
    with the margin attack.

    One forward in train mode, of x, moves batch norm. The gradients are taken in eval mode, with the averages after
    that forward. They move no statistics.

    Moosavi-Dezfooli et al. (2019), "Robustness via Curvature Regularization, and Vice Versa".
    """

    forwards: ClassVar[tuple[Branch, ...]] = ("clean",)
    adversarial: ClassVar[bool] = False
    eager: ClassVar[str] = "differentiates an input gradient, which compiled models cannot do"
    weight: Annotated[Number, Field(ge=0)] = 4.0
    h: Scheduled = 1.5
    squared: bool = True

    @model_validator(mode="after")
    def _sensible(self) -> CURE:
        if lowest(self.h) < 0:
            raise SettingsError([(("h",), f"expected a length of at least 0, got {self.h}")])
        return self

    def scheduled(self) -> str:
        return "h" if callable(self.h) else ""

    def __call__(self, batch: Batch) -> Outcome:
        clean = batch.clean()

        def gradient(x: Tensor) -> Tensor:
            """Each sample's own input gradient, which can be differentiated again."""
            x = x.detach().requires_grad_(True)
            losses = batch.cross_entropy(batch.net(x))
            return torch.autograd.grad(losses.sum(), x, create_graph=True)[0]

        # In half precision, the difference of two gradients would be rounding error alone.
        with fixed(batch.net), torch.autocast(batch.x.device.type, enabled=False):
            here = gradient(batch.x)
            z = steepest(here.detach().sign(), 2.0)
            bend = (gradient(batch.x + value_at(self.h, batch.progress) * z) - here).flatten(1)
        # The gradient of a plain square root would be infinite at zero. That of vector_norm is zero there.
        curvature = bend.square().sum(dim=1) if self.squared else torch.linalg.vector_norm(bend, dim=1)
        loss = (batch.cross_entropy(clean) + self.weight * curvature).mean()
        return Outcome(loss=loss, logits=clean.detach())
