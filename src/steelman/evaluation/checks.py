"""What must be true of a model and its data before an attack's answer means anything."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from steelman.attacks.base import check_range, logits_of, untouched
from steelman.data.source import Source
from steelman.errors import UserError
from steelman.threat import ThreatModel


def predictions(model: nn.Module, x: Tensor, what: str) -> Tensor:
    """The model's answers in eval mode and full precision; logits that are not finite are refused."""
    if len(x) == 0:  # many a model cannot take none
        return torch.empty(0, dtype=torch.int64, device=x.device)
    with untouched(model), torch.no_grad():
        logits = logits_of(model, x)
    finite = torch.isfinite(logits).all(dim=1)
    if not finite.all():
        raise UserError(f"the model gives NaN or infinite logits for {int((~finite).sum())} of {len(x)} {what} images")
    return logits.argmax(dim=1)


def check_contract(model: nn.Module, source: Source, threat: ThreatModel, device: torch.device) -> int:
    """Refuse what cannot be evaluated, with a sentence; the number of classes the model knows."""
    if not threat.eps > 0:
        raise UserError(f"eps: expected a radius above 0, got {threat.eps}")
    if len(source) == 0:
        raise UserError("expected at least one image, got none")
    first = torch.arange(min(4, len(source)))
    x = source.images(first).to(device)
    check_range(x, threat)
    try:
        with untouched(model), torch.no_grad():
            logits = model(x)
    except UserError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"the model cannot take images of shape {tuple(x.shape[1:])}: {reason}") from None
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(x):
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise UserError(f"expected logits of shape ({len(x)}, classes) for {len(x)} images, got {shape}")
    classes = logits.shape[1]
    if classes < 2:
        raise UserError(f"expected a model of at least two classes, got {classes}")
    wrong = ((source.labels < 0) | (source.labels >= classes)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise UserError(
            f"label {int(source.labels[at])} at index {at}, expected 0 .. {classes - 1} "
            f"(the model has {classes} classes)"
        )
    return classes
