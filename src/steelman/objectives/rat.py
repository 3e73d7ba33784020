"""RAT: randomised weights, whose Taylor terms pull clean and adversarial outputs together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import BeforeValidator, Field, ValidationInfo
from torch import Tensor, nn
from torch.func import functional_call

from steelman.attacks import Attack
from steelman.heads import Head
from steelman.losses import kl
from steelman.models.batchnorm import Branch
from steelman.models.features import check_features, check_readable, features_of, last_layer
from steelman.objectives.base import Batch, Objective, Outcome, inner
from steelman.objectives.pgd_at import PGDAT
from steelman.objectives.trades import TRADES
from steelman.rng import Key
from steelman.settings import Number, settings


def _of_base(value: object, info: ValidationInfo) -> object:
    """Attacks by name get the defaults that the base method gives them."""
    defaults = {"loss": "kl", "start": "gaussian"} if info.data.get("base") == "trades" else {}
    build: Any = inner(**defaults).func
    return build(value)


@settings
class RAT(Objective):
    """mean [ (1 - alpha) CE(f(x), y) + beta KL(f(x) || f(x*)) + alpha (D1 + second * D2) ], from Taylor terms.

    D = (KL(T(d)_y || f(x*)) + KL(T(-d)_y || f(x))) / 2, with d = r(x) - r(x*) in D1 and r(x)^2 - r(x*)^2 in D2, where
    r_j = sum_i dCE/dW_ji is the batch's mean (a process's share of it) at the last layer W. T(d)_y is d without entry
    y, made a distribution and times `spread`, and 1 - spread at y; a d that tells no class from another gives a uniform
    one. Targets are constants. `spread` None is 1 - 2 / K: 0.8 for 10 classes, 0.98 for 100. `order` 1 leaves out D2, 0
    also D1 and alpha: the base alone. Base "at" has CE(f(x*), y) in the place of both CE(f(x), y) and the KL, so no
    beta. The margin of a head and label smoothing are in the cross-entropy alone, neither in r nor in D.

    r is signed, for Eq. (17) raises the output of x* where r(x) - r(x*) is large, and that raises r(x*) where features
    are positive, as after a ReLU. Read to the letter, Eq. (19) is zero for a linear layer: the Hessian's sums over all
    classes j vanish, as softmax ignores a shift of all logits. So D2 takes r^2, as the released code does: of the
    gradients' outer product, the block j = l. `released` is that code's reading: |r| before the difference in D1, and
    in D2 T(-d)_y for both x and x*.

    With base "trades", x* is made at weights w + `sigma` N(0, 1), drawn anew each step for weights of two or more
    dimensions (the released code: for convolutions); everything else is at w. Two forwards in train mode, x and then
    x*, move batch norm (the released code makes eight).

    Jin et al. (2023), "Randomized Adversarial Training via Taylor Expansion", Appendix D.
    """

    forwards: ClassVar[tuple[Branch, ...]] = ("clean", "adversarial")
    eager: ClassVar[str] = "reads features as the model runs, which compiled models do not show"
    base: Literal["trades", "at"] = "trades"
    alpha: Annotated[Number, Field(ge=0, le=1)] = 0.2
    second: Annotated[Number, Field(ge=0)] = 0.5
    beta: Annotated[Number, Field(ge=0)] = 6.0
    order: Literal[0, 1, 2] = 2
    spread: Annotated[Number, Field(ge=0, le=1)] | None = None
    released: bool = False
    sigma: Annotated[Number, Field(ge=0)] = 1e-4
    attack: Annotated[Attack | None, BeforeValidator(_of_base)] = None

    def check(self, net: nn.Module, x: Tensor) -> None:
        """Raise, before anything is trained, unless the model has features to read."""
        check_readable(net, x)

    def __call__(self, batch: Batch) -> Outcome:
        x_adv = self.crafted(batch)
        with features_of(batch.net) as seen:
            clean, adversarial = batch.clean(), batch.adversarial(x_adv)
        if self.base == "trades":
            label, pair = batch.cross_entropy(clean), self.beta * kl(adversarial, clean)
        else:
            label, pair = batch.cross_entropy(adversarial), torch.zeros_like(clean[:, 0])
        if self.order:
            layer = last_layer(batch.net)
            check_features(layer, seen, clean, 2)
            r, r_adv = (row_sums(layer, z, batch.y) for z in seen)
            taylor = torch.zeros_like(label)
            for weight, for_adversarial, for_clean in self.gaps(r, r_adv)[: self.order]:
                both = self.pull(for_adversarial, adversarial, batch.y) + self.pull(for_clean, clean, batch.y)
                taylor = taylor + weight * both / 2
            label = (1 - self.alpha) * label + self.alpha * taylor
        return Outcome(loss=(label + pair).mean(), logits=adversarial.detach(), x_adv=x_adv)

    def crafted(self, batch: Batch) -> Tensor:
        """x*: by the attack of the base unless another is named, at shaken weights with base "trades"."""
        attack = self.attack or (TRADES().attack if self.base == "trades" else PGDAT().attack)
        if batch.x_adv is not None or batch.threat.eps == 0 or self.base == "at" or self.sigma == 0:
            return batch.attacked(attack)
        with shaken(batch.net, self.sigma, batch.key.fold("weights")):
            return batch.attacked(attack)

    def gaps(self, r: Tensor, r_adv: Tensor) -> list[tuple[float, Tensor, Tensor]]:
        """The weight of each Taylor term, and what its targets for x* and for x are made of."""
        first, second = r - r_adv, r.square() - r_adv.square()
        if self.released:
            first = r.abs() - r_adv.abs()
        return [(1.0, first, -first), (self.second, -second if self.released else second, -second)]

    def pull(self, gap: Tensor, logits: Tensor, y: Tensor) -> Tensor:
        """KL(T(d)_y || f) for each sample."""
        spread = 1 - 2 / logits.shape[1] if self.spread is None else self.spread
        log_p = logits.log_softmax(dim=1)
        return F.kl_div(log_p, targets(gap, spread)[y].to(log_p.dtype), reduction="none").sum(dim=1)


@contextlib.contextmanager
def shaken(net: nn.Module, sigma: float, key: Key) -> Iterator[None]:
    """Inside, each weight of two or more dimensions has Gaussian noise on it; then it is as before, to the bit."""
    weights = {name: weight for name, weight in net.named_parameters() if weight.dim() > 1}
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    try:
        with torch.no_grad():
            for name, weight in weights.items():
                rows = torch.arange(len(weight), device=weight.device)
                weight.add_(key.fold(name).normal(rows, tuple(weight.shape[1:]), weight.dtype), alpha=sigma)
        yield
    finally:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(before[name])


def row_sums(layer: Head | nn.Linear, z: Tensor, y: Tensor) -> Tensor:
    """r_j = sum_i dCE/dW_ji of the mean cross-entropy, from the features that enter the layer alone.

    >>> layer = nn.Linear(2, 2)
    >>> z, y = torch.ones(1, 2), torch.tensor([0])
    >>> torch.allclose(row_sums(layer, z, y), 2 * (layer(z).softmax(dim=1)[0] - torch.tensor([1.0, 0.0])))
    True
    """
    with torch.enable_grad(), torch.autocast(z.device.type, enabled=False):
        weight = layer.weight.detach().requires_grad_()
        logits = functional_call(layer, {"weight": weight}, (z.detach().to(weight.dtype),))
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits, y), weight)
    return gradient.sum(dim=1)


def targets(gap: Tensor, spread: float) -> Tensor:
    """T(d): for each true class the distribution that the difference `gap` of each class asks for.

    >>> targets(torch.tensor([1.0, 2.0, 4.0]), 0.8)
    tensor([[0.2000, 0.2000, 0.6000],
            [0.0000, 0.2000, 0.8000],
            [0.0000, 0.8000, 0.2000]])
    """
    others = 1 - torch.eye(len(gap), dtype=gap.dtype, device=gap.device)
    rows = (gap - gap.min()) * others
    sums = rows.sum(dim=1, keepdim=True)
    rows = torch.where(sums > 0, rows / sums, others / (len(gap) - 1))
    return spread * rows + (1 - spread) * (1 - others)
