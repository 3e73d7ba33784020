"""Heads: features to logits. The head owns normalisation, scale and margin.

The head multiplies the logits by its scale. So an attack, a training loss and an evaluation see the same logits. The
margin is in a training loss alone, which passes labels to ``with_margin``.

Pang et al. (2020), "Boosting Adversarial Training with Hypersphere Embedding": FN (Eq. 12), WN, HE (Eq. 5 and 6) and
the modified m-HE, whose logits are angles.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steelman.arguments import model_of
from steelman.errors import UserError, shown
from steelman.settings import make

# The derivative of arccos(c) is infinite at |c| = 1. Cosines are kept this far from there, so gradients stay finite.
ANGLE_GUARD = 1e-6

WNMode = Literal["autograd", "project"]


def _finite(value: object, kind: type = numbers.Real) -> bool:
    """Whether a setting is a finite number. It may come from a file, and so be anything."""
    return isinstance(value, numbers.Real) and isinstance(value, kind) and math.isfinite(value)


class Head(nn.Module):
    """z -> scale * f(W, z): features z and weights W to logits; f is a product or an angle.

    linear:  W z + b                     FN:  s W z~ + b          WN:  s W~ z
    HE:      s cos(theta) = s W~ z~      m-HE:  -s theta          (~ means divided by the l2 norm)

    The training margin m lowers the true class: s (cos theta - m 1_y), or s (-theta - m 1_y).

    `wn_mode` says how normalised weights are learned. "autograd" differentiates through the division by the norm.
    "project" ignores the division in the gradient, and divides the weights by their norm after each step of the
    optimiser. The papers' code does the latter.
    """

    def __init__(
        self,
        features: int,
        num_classes: int,
        *,
        normalise_features: bool = False,
        normalise_weights: bool = False,
        angular: bool = False,
        bias: bool = True,
        scale: float = 1.0,
        margin: float = 0.0,
        zero_init: bool = False,
        wn_mode: WNMode = "autograd",
    ) -> None:
        super().__init__()
        if not (_finite(num_classes, numbers.Integral) and num_classes >= 2):
            raise UserError(f"expected at least two classes, got {num_classes!r}")
        if not (_finite(scale) and scale > 0):
            raise UserError(f"head scale: expected a number above 0, got {shown(scale)}")
        if not (_finite(margin) and margin >= 0):
            raise UserError(f"head margin: expected a number of at least 0, got {shown(margin)}")
        if wn_mode not in get_args(WNMode):
            raise UserError(f"wn_mode: expected one of {', '.join(get_args(WNMode))}, got {shown(wn_mode)}")
        if zero_init and normalise_weights:
            raise UserError(
                "zero_init: a zero weight has no direction, so a head that normalises weights cannot use it"
            )
        self.features, self.num_classes = features, num_classes
        self.normalise_features, self.normalise_weights, self.angular = normalise_features, normalise_weights, angular
        self.scale, self.margin, self.wn_mode = scale, margin, wn_mode
        self.weight = nn.Parameter(torch.empty(num_classes, features))
        self.bias = nn.Parameter(torch.zeros(num_classes)) if bias else None
        if zero_init:
            nn.init.zeros_(self.weight)
        else:
            nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
            if self.bias is not None and features:
                nn.init.uniform_(self.bias, -1 / math.sqrt(features), 1 / math.sqrt(features))
        self.project()

    @torch.no_grad()
    def project(self) -> None:
        """In "project" mode, put the weights back on the sphere."""
        if self.normalise_weights and self.wn_mode == "project":
            self.weight.copy_(F.normalize(self.weight, dim=1))

    def direction(self) -> Tensor:
        """The weights as the product uses them."""
        if not self.normalise_weights:
            return self.weight
        unit = F.normalize(self.weight, dim=1)
        # An average or a perturbation of the weights leaves the sphere. The value used here is normalised all the same.
        return unit if self.wn_mode == "autograd" else self.weight + (unit - self.weight).detach()

    def forward(self, z: Tensor) -> Tensor:
        out = F.linear(z, self.direction())
        # The logits are divided by the lengths of the features. Dividing the features would cost far more operations.
        length = torch.linalg.vector_norm(z, dim=1, keepdim=True).clamp_min(1e-12) if self.normalise_features else 1.0
        if self.angular:
            # float32 even under autocast: half precision rounds all cosines near 1 to the same angle.
            cos = (out if out.dtype == torch.float64 else out.float()) / length
            out = -self.scale * torch.arccos(cos.clamp(-1 + ANGLE_GUARD, 1 - ANGLE_GUARD))
        else:
            out = (self.scale / length) * out
        return out if self.bias is None else out + self.bias

    def with_margin(self, logits: Tensor, y: Tensor) -> Tensor:
        """Logits for a training loss: the true class lowered by scale * margin."""
        if self.margin == 0:
            return logits
        lowered = torch.full_like(y, self.scale * self.margin, dtype=logits.dtype)[:, None]
        return logits - torch.zeros_like(logits).scatter(1, y[:, None], lowered)

    def extra_repr(self) -> str:
        return (
            f"{self.features} -> {self.num_classes}, normalise_features={self.normalise_features}, "
            f"normalise_weights={self.normalise_weights}, angular={self.angular}, scale={self.scale}, "
            f"margin={self.margin}, wn_mode={self.wn_mode}"
        )


def linear(features: int, num_classes: int, *, bias: bool = True, zero_init: bool = False) -> Head:
    """W z + b, the plain head."""
    return Head(features, num_classes, bias=bias, zero_init=zero_init)


def fn(features: int, num_classes: int, *, scale: float = 1.0, margin: float = 0.0, bias: bool = False) -> Head:
    """s W z~: normalised features only (Pang et al., 2020, Eq. 12)."""
    return Head(features, num_classes, normalise_features=True, bias=bias, scale=scale, margin=margin)


def wn(
    features: int, num_classes: int, *, scale: float = 1.0, margin: float = 0.0, wn_mode: WNMode = "autograd"
) -> Head:
    """s W~ z: normalised weights only. Features keep their length, so the default scale is 1."""
    return Head(features, num_classes, normalise_weights=True, bias=False, scale=scale, margin=margin, wn_mode=wn_mode)


_hypersphere = partial(Head, normalise_features=True, normalise_weights=True, bias=False)


def he(
    features: int, num_classes: int, *, scale: float = 15.0, margin: float = 0.2, wn_mode: WNMode = "autograd"
) -> Head:
    """s cos(theta): hypersphere embedding, with the margin m in the training loss (Pang et al., 2020, Eq. 6)."""
    return _hypersphere(features, num_classes, scale=scale, margin=margin, wn_mode=wn_mode)


def mhe(
    features: int, num_classes: int, *, scale: float = 15.0, margin: float = 0.1, wn_mode: WNMode = "autograd"
) -> Head:
    """-s theta: hypersphere embedding on angles instead of cosines (Pang et al., 2020, m-HE)."""
    return _hypersphere(features, num_classes, angular=True, scale=scale, margin=margin, wn_mode=wn_mode)


HEADS: dict[str, Callable[..., Head]] = {"linear": linear, "fn": fn, "wn": wn, "he": he, "m-he": mhe}


def build_head(name: str, features: int, num_classes: int, /, **options: Any) -> Head:
    """Make the head that the registry `HEADS` calls `name`."""
    return make("head", HEADS, name, {"features": features, "num_classes": num_classes, **options})


def heads_of(model: nn.Module) -> list[Head]:
    """All steelman heads inside a model and its wrappers. An ensemble has several."""
    return [module for module in model.modules() if isinstance(module, Head)]


def head_of(model: nn.Module) -> Head | None:
    """The steelman head inside a model, or None."""
    found = heads_of(model)
    if len(found) > 1:
        raise UserError(f"expected at most one steelman head in the model, found {len(found)}")
    return found[0] if found else None


def with_margin(model: nn.Module, logits: Tensor, y: Tensor) -> Tensor:
    """The logits for a training loss: the true class is lowered by the margin of the model's head, if it has one."""
    head = head_of(model)
    return logits if head is None else head.with_margin(logits, y)


def embed(
    model: nn.Module, head: str = "he", *, layer: str | None = None, copy: bool = False, **options: Any
) -> nn.Module:
    """Replace a model's last linear layer, or its steelman head, by a new head with the same weights.

    The model itself is changed and returned. With ``copy=True`` the model stays unchanged: a deep copy gets the head,
    and the copy is returned. Make the optimiser afterwards: one that was made before does not know the new weights.

    Arguments:
        head: a name in `HEADS`.
        layer: the dotted name of the layer to replace. By default it is the last ``nn.Linear`` that the model defines.
        copy: whether to change a copy instead of the model.
        options: settings of the head, such as scale and margin.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> type(embed(net, copy=True)[-1]).__name__, type(net[-1]).__name__
    ('Head', 'Linear')
    >>> embed(net, scale=10)(torch.rand(2, 1, 2, 2)).abs().max() <= 10
    tensor(True)
    >>> type(net[-1]).__name__
    'Head'
    """
    model_of("embed", model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Head)}
    if not layers:
        raise UserError(
            f"embed: expected a model with a linear layer to replace, got {type(model).__name__} without one"
        )
    if layer is None:  # a model with a steelman head would otherwise keep it, and lose another layer
        heads = [name for name, module in layers.items() if isinstance(module, Head)]
        layer = heads[-1] if heads else list(layers)[-1]
    if not isinstance(layer, str) or layer not in layers:
        raise UserError(f"embed: {shown(layer)} is not a linear layer of the model; choices: {', '.join(layers)}")
    if layer == "":
        raise UserError("embed: the model is itself one linear layer; wrap it, for example in nn.Sequential")
    if not isinstance(copy, bool):
        raise UserError(f"copy: expected True or False, got {shown(copy)}")
    model = deepcopy(model) if copy else model
    old = model.get_submodule(layer)
    assert isinstance(old, nn.Linear | Head)  # checked above
    classes, features = old.weight.shape
    new = build_head(head, features, classes, **options)
    with torch.no_grad():
        new.weight.copy_(old.weight)
        if new.bias is not None:
            new.bias.copy_(torch.zeros_like(new.bias) if old.bias is None else old.bias)
    new.project()
    new.to(device=old.weight.device, dtype=old.weight.dtype).train(old.training)
    parent, _, name = layer.rpartition(".")
    setattr(model.get_submodule(parent), name, new)
    return model
