"""LLR: local linearity regularisation."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from steelman.attacks.base import input_gradient
from steelman.models.batchnorm import Branch, fixed, recorded, shared
from steelman.objectives.base import Batch, Objective, Outcome
from steelman.settings import Count, Number, settings

# The value of the released code. A larger one would make the search slow where the loss is flat.
ADAM_EPS = 1e-9


@settings
class LLR(Objective):
    """mean [ l(x) + weight * g(delta; x) + mu * |delta . grad l(x)| ], where delta in the threat model maximises g.

    g(delta; x) = |l(x + delta) - l(x) - delta . grad l(x)|, for each sample: how far the loss is from linear. l is the
    training cross-entropy, with the head's margin and the label smoothing, in all places. So delta maximises the same g
    that is in the loss.

    The search for delta starts with a uniform draw. It makes `steps` steps of Adam with learning rate `lr`, and
    projects after each step. grad l(x) is a constant to the search. `penalty` "norm" replaces the last term by
    mu ||grad l(x)||_2; the authors' rebuttal found that this variant costs accuracy. The defaults are the paper's. The
    released configuration doubles the whole loss, so it amounts to `weight` 2 and `mu` 0.6. It also raises the radius
    from 0 over the first steps.

    Use a smooth activation, such as softplus or silu: the loss needs the derivative of grad l(x). The second derivative
    of ReLU is zero, so only the softmax would have a curvature.

    One forward in train mode, of x, moves batch norm and gives the first l(x). Two more forwards, of x and x + delta,
    give g. They run in eval mode with the statistics of the clean batch, and move nothing. With `statistics` "live",
    gradients flow through these statistics, as in the released code. So grad l(x) includes the effect of a sample on
    the others. With "constant", the statistics are numbers, and each sample's loss depends on that sample alone. On a
    residual network, the two gradients point in different directions. The search for delta always takes numbers.

    Qin et al. (2019), "Adversarial Robustness through Local Linearization".
    """

    forwards: ClassVar[tuple[Branch, ...]] = ("clean",)
    eager: ClassVar[str] = "differentiates an input gradient, which compiled models cannot do"
    weight: Annotated[Number, Field(ge=0)] = 4.0
    mu: Annotated[Number, Field(ge=0)] = 3.0
    steps: Count = 10
    lr: Annotated[Number, Field(gt=0)] = 0.1
    penalty: Literal["along", "norm"] = "along"
    statistics: Literal["live", "constant"] = "live"

    def __call__(self, batch: Batch) -> Outcome:
        with recorded(batch.net) as numbers:
            clean = batch.clean()
        nominal = batch.cross_entropy(clean)
        if batch.threat.eps == 0 and self.penalty == "along":  # delta is zero, and so are both other terms
            return Outcome(loss=nominal.mean(), logits=clean.detach(), x_adv=batch.x)
        # In half precision, the difference of two losses would be rounding error alone.
        with torch.autocast(batch.x.device.type, enabled=False):
            x = batch.x.detach().requires_grad_(True)
            with shared(batch.net) if self.statistics == "live" else fixed(batch.net, numbers) as live:
                at_x = batch.cross_entropy(batch.net(x))
            (gradient,) = torch.autograd.grad(at_x.sum(), x, create_graph=True)  # of the sum: each sample's own part
            known = batch.known()
            with fixed(batch.net, numbers):
                x_adv = self.search(batch, at_x.detach(), gradient.detach()) if known is None else known
            with shared(batch.net, live) if self.statistics == "live" else fixed(batch.net, numbers):
                moved = batch.net(x_adv)
            rise = along(x_adv - batch.x, gradient)
            g = (batch.cross_entropy(moved) - at_x - rise).abs()
            steep = rise.abs() if self.penalty == "along" else torch.linalg.vector_norm(gradient.flatten(1), dim=1)
        loss = (nominal + self.weight * g + self.mu * steep).mean()
        return Outcome(loss=loss, logits=moved.detach(), x_adv=x_adv)

    def search(self, batch: Batch, at_x: Tensor, gradient: Tensor) -> Tensor:
        """x + delta, where delta maximises g. Adam works on each pixel alone, so no sample affects another."""
        x, threat = batch.x.detach(), batch.threat
        x_adv = threat.random_start(x, batch.index, batch.key.fold("llr")).requires_grad_(True)
        adam = torch.optim.Adam([x_adv], lr=self.lr, eps=ADAM_EPS, maximize=True)
        for _ in range(self.steps):
            losses = batch.cross_entropy(batch.net(x_adv))
            x_adv.grad = input_gradient((losses - at_x - along(x_adv - x, gradient)).abs(), x_adv)
            adam.step()
            with torch.no_grad():
                x_adv.copy_(threat.project(x_adv, x))
        return x_adv.detach()


def along(delta: Tensor, gradient: Tensor) -> Tensor:
    """delta . gradient for each sample.

    >>> along(torch.tensor([[1.0, 2.0], [0.0, 1.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]))
    tensor([11.,  6.])
    """
    return (delta * gradient).flatten(1).sum(dim=1)
