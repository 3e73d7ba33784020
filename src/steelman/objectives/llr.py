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

# Of the released code; one as small as this keeps the search from slowing where the loss is flat.
ADAM_EPS = 1e-9


@settings
class LLR(Objective):
    """mean [ l(x) + weight * g(delta; x) + mu * |delta . grad l(x)| ], where delta in the threat model maximises g.

    g(delta; x) = |l(x + delta) - l(x) - delta . grad l(x)|, for each sample: how far the loss is from linear. It is
    maximised by `steps` steps of Adam with learning rate `lr` from a uniform start, projected after each one, with
    grad l(x) a constant. l is everywhere the training cross-entropy, with the head's margin and the label smoothing:
    delta maximises the very g that the loss has. Defaults are the paper's; the released configuration comes to `weight`
    2 and `mu` 0.6 (it doubles the whole loss), and raises the radius from 0 over the first steps. `penalty` "norm" puts
    mu ||grad l(x)||_2 in the place of the last term, the variant that the authors' rebuttal found to cost accuracy.

    The loss differentiates grad l(x) once more, so a smooth activation, such as softplus or silu, is meant: the second
    derivative of ReLU is zero, and what remains is the softmax's own.

    One forward in train mode, of x, moves batch norm and gives the first l(x). Those of the regulariser, at x and at
    x + delta, run in eval mode but with the clean batch's statistics, and move nothing. `statistics` "live" keeps these
    statistics in the graph, as the released code does: a gradient flows through them, and grad l(x) holds what a sample
    does to the others. With "constant" they are numbers, and a sample's loss is its own; on a residual network that
    gradient points elsewhere. The search for delta takes them as numbers in both.

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
        if batch.threat.eps == 0 and self.penalty == "along":  # delta is zero, and both terms with it
            return Outcome(loss=nominal.mean(), logits=clean.detach(), x_adv=batch.x)
        # In half precision the difference of two losses would be rounding.
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
        """x + delta, where delta maximises g; a sum, and Adam works pixel by pixel, so no sample minds the others."""
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
