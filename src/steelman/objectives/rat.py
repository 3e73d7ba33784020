"""RAT: randomised weights. The terms of their Taylor expansion pull clean and adversarial outputs together."""

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
    """An attack by name, with the defaults of the base method."""
    defaults = {"loss": "kl", "start": "gaussian"} if info.data.get("base") == "trades" else {}
    build: Any = inner(**defaults).func
    return build(value)


@settings
class RAT(Objective):
    """mean [ (1 - alpha) CE(f(x), y) + beta KL(f(x) || f(x*)) + alpha (D1 + second * D2) ], from Taylor terms.

    D = (KL(T(d)_y || f(x*)) + KL(T(-d)_y || f(x))) / 2, with d = r(x) - r(x*) in D1, and d = r(x)^2 - r(x*)^2 in D2.
    r_j = sum_i dCE/dW_ji. W is the weight of the last layer. CE is the mean over the batch of this process.

    T(d)_y is a target distribution, and constant to the gradient. Class y has the share 1 - `spread`. The other classes
    have the share `spread`, in proportion to d minus its minimum; if all are equal, in equal parts. `spread` None means
    1 - 2 / K: 0.8 for 10 classes, 0.98 for 100.

    `order` 1 leaves out D2. `order` 0 leaves out D1 and alpha too: the base alone. With base "at", CE(f(x*), y) takes
    the place of CE(f(x), y) and of the KL, so beta has no effect. The head's margin and the label smoothing are in the
    cross-entropy, not in r or D.

    D1 and D2 read the paper as follows. r has a sign. Eq. (17) raises the output of x* where r(x) - r(x*) is large. For
    positive features, as after a ReLU, this raises r(x*). Eq. (19) would be zero for a linear layer. Softmax ignores a
    shift of all logits, so the sums of the Hessian over all classes are zero. So D2 uses r^2 instead: the block j = l
    of the outer product of the gradients. The released code does so too. `released` follows that code in two more
    points: D1 takes the difference of |r|, and D2 uses T(-d)_y for both x and x*.

    With base "trades", x* is made at weights w + `sigma` N(0, 1). Each step draws new noise, for weights of two or more
    dimensions; the released code draws it for convolutions only. Everything else is at w. Two forwards in train mode, x
    and then x*, move batch norm; the released code makes eight.

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
        """Raise unless the features of the model can be read. This runs before the training."""
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
        """x*: made by `attack`, or else by the base's attack. With base "trades", the weights have noise on them."""
        attack = self.attack or (TRADES().attack if self.base == "trades" else PGDAT().attack)
        if batch.x_adv is not None or batch.threat.eps == 0 or self.base == "at" or self.sigma == 0:
            return batch.attacked(attack)
        with shaken(batch.net, self.sigma, batch.key.fold("weights")):
            return batch.attacked(attack)

    def gaps(self, r: Tensor, r_adv: Tensor) -> list[tuple[float, Tensor, Tensor]]:
        """(weight, d of the target for x*, d of the target for x) of each Taylor term."""
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
    """Inside, each weight of two or more dimensions has Gaussian noise on it. Afterwards it is the same to the bit."""
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
    """r_j = sum_i dCE/dW_ji of the mean cross-entropy, from the features z that enter the layer.

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
    """T(d) as a matrix: row y is the target distribution for true class y, and `gap` is d.

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
