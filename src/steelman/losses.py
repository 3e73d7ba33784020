"""Losses that give one value per sample. An attack maximises them. An objective takes their mean, once.

z are the logits, z_y is the logit of the true class, and z_p1 >= z_p2 >= ... are the sorted logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from steelman.errors import UserError, unknown


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """-log softmax(z)_y.

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([2]))
    tensor([1.3863])
    """
    return F.cross_entropy(logits, y, reduction="none")


def _other(logits: Tensor, y: Tensor) -> Tensor:
    """max over j != y of z_j."""
    return logits.scatter(1, y[:, None], float("-inf")).amax(dim=1)


def _at(logits: Tensor, y: Tensor) -> Tensor:
    return logits.gather(1, y[:, None])[:, 0]


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """max over j != y of z_j, minus z_y: positive exactly when the sample is misclassified.

    >>> margin(torch.tensor([[1.0, 3.0, 0.0]]), torch.tensor([1]))
    tensor([-2.])
    """
    return _other(logits, y) - _at(logits, y)


def targeted_margin(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """z_t - z_y."""
    return _at(logits, target) - _at(logits, y)


def dlr(logits: Tensor, y: Tensor) -> Tensor:
    """Difference of logits ratio: -(z_y - max_{j != y} z_j) / (z_p1 - z_p3); with two classes, the margin.

    Croce and Hein (2020), "Reliable evaluation of adversarial robustness", Eq. (6).
    """
    if logits.shape[1] < 3:
        return margin(logits, y)
    top = logits.topk(3, dim=1).values
    return margin(logits, y) / (top[:, 0] - top[:, 2] + 1e-12)


def targeted_dlr(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """-(z_y - z_t) / (z_p1 - (z_p3 + z_p4) / 2); below four classes, the targeted margin.

    Croce and Hein (2020), Eq. (7).
    """
    if logits.shape[1] < 4:
        return targeted_margin(logits, y, target)
    top = logits.topk(4, dim=1).values
    return targeted_margin(logits, y, target) / (top[:, 0] - (top[:, 2] + top[:, 3]) / 2 + 1e-12)


FAR = 1e3  # a class whose logit is below -FAR * (the larger size of the two largest logits) cannot matter


def in_play(logits: Tensor) -> Tensor:
    """Which classes can matter, for each sample.

    Some models switch a class off by a logit such as -1e6. Such a logit must not count as a size or a spread. It says
    nothing about the distances between the other logits, or about their rounding.

    >>> in_play(torch.tensor([[2.0, 1.0, -7.0, -1e6]]))
    tensor([[ True,  True,  True, False]])
    """
    leading = logits.topk(min(2, logits.shape[1]), dim=1).values.abs().amax(dim=1, keepdim=True)
    return logits >= -FAR * leading


def magnitude(logits: Tensor) -> Tensor:
    """max |z_j| over the classes in play. The size of rounding errors is proportional to it."""
    return logits.abs().where(in_play(logits), 0).amax(dim=1)


def spread(logits: Tensor) -> Tensor:
    """max z_j - min z_j over the classes in play.

    >>> spread(torch.tensor([[2.0, 1.0, -7.0, -1e6]]))
    tensor([9.])
    """
    return logits.amax(dim=1) - logits.where(in_play(logits), float("inf")).amin(dim=1)


def kl(logits: Tensor, reference: Tensor) -> Tensor:
    """KL(softmax(reference) || softmax(z)), the pair term of TRADES."""
    log_p, log_q = F.log_softmax(reference, dim=1), F.log_softmax(logits, dim=1)
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)


def standardised(logits: Tensor) -> Tensor:
    """(z - max z) / std(z): the same for z and for 1000 z + 5. max and std are constants to the gradient.

    Equal logits have a std of zero. They stay finite here, because their difference from the maximum is zero too.
    """
    if len(logits) == 0:  # torch warns of the std of nothing
        return logits
    fixed = logits.detach()
    spread = fixed.std(dim=1, correction=0, keepdim=True).clamp_min(torch.finfo(logits.dtype).tiny)
    return (logits - fixed.amax(dim=1, keepdim=True)) / spread


def scale_invariant_cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of z / std(z): the same for z and for 1000 z, so large logits cannot make its gradient vanish.

    std is a constant to the gradient.
    """
    return cross_entropy(standardised(logits), y)


def probability_margin(logits: Tensor, y: Tensor) -> Tensor:
    """max over j != y of p_j, minus p_y, with p = softmax(z / std(z)): positive exactly when misclassified.

    >>> probability_margin(torch.zeros(1, 2), torch.tensor([0]))
    tensor([0.])
    """
    return margin(standardised(logits).softmax(dim=1), y)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss an attack can maximise, and what it needs beside logits and labels."""

    function: Callable[..., Tensor]
    needs: Literal["nothing", "target", "reference"] = "nothing"


LOSSES: dict[str, Loss] = {
    "cross-entropy": Loss(cross_entropy),
    "margin": Loss(margin),
    "dlr": Loss(dlr),
    "targeted-margin": Loss(targeted_margin, needs="target"),
    "targeted-dlr": Loss(targeted_dlr, needs="target"),
    "kl": Loss(kl, needs="reference"),
    "scale-invariant-cross-entropy": Loss(scale_invariant_cross_entropy),
    "probability-margin": Loss(probability_margin),
}


def adversarial_loss(
    name: str, logits: Tensor, y: Tensor, *, target: Tensor | None = None, reference: Tensor | None = None
) -> Tensor:
    """What an attack maximises: the named loss or, towards `target`, the negative loss of the target class.

    >>> z = torch.tensor([[1.0, 3.0, 0.0]])
    >>> adversarial_loss("margin", z, torch.tensor([1]), target=torch.tensor([2]))
    tensor([-3.])
    """
    if name not in LOSSES:
        raise unknown("loss", name, LOSSES)
    loss = LOSSES[name]
    if loss.needs == "reference":
        if reference is None:
            raise UserError(f"loss {name!r} compares with the clean logits; expected them as reference, got none")
        if target is not None:
            raise UserError(f"loss {name!r} moves away from the clean logits; expected no target class")
        return loss.function(logits, reference)
    if loss.needs == "target":
        if target is None:
            raise UserError(f"loss {name!r} needs a target class for each sample, got none")
        return loss.function(logits, y, target)
    return loss.function(logits, y) if target is None else -loss.function(logits, target)
