"""What must be true of a model and its data before an attack's answer means anything."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from steelman.attacks.base import check_range, logits_of, untouched
from steelman.data.source import Source
from steelman.errors import UserError
from steelman.threat import ThreatModel

TRIED = 4  # images on which a model's manners are looked at


class ContractError(UserError):
    """Nothing true can be said of this model on these data; `reason` is one word for it."""

    def __init__(self, reason: str, text: str) -> None:
        self.reason = reason
        super().__init__(text)


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
        raise ContractError("eps", f"eps: expected a radius above 0, got {threat.eps}")
    if len(source) == 0:
        raise ContractError("empty", "expected at least one image, got none")
    x = as_model(model, source.images(torch.arange(min(TRIED, len(source)))), device)
    check_range(x, threat)
    logits = _answer(model, x)
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(x):
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ContractError("shape", f"expected logits of shape ({len(x)}, classes) for {len(x)} images, got {shape}")
    classes = logits.shape[1]
    if classes < 2:
        raise ContractError("classes", f"expected a model of at least two classes, got {classes}")
    wrong = ((source.labels < 0) | (source.labels >= classes)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise ContractError(
            "labels",
            f"label {int(source.labels[at])} at index {at}, expected 0 .. {classes - 1} "
            f"(the model has {classes} classes)",
        )
    return classes


def check_manners(model: nn.Module, source: Source, device: torch.device, *, random: bool = False) -> bool:
    """Refuse a model whose answer to an image is not the image's own: one in train mode where that matters, one that
    draws random numbers (unless `random` allows it), one that looks at the rest of the batch. Whether it is random."""
    x = as_model(model, source.images(torch.arange(min(TRIED, len(source)))), device)
    logits = _answer(model, x)
    bad = int((~torch.isfinite(logits)).any(dim=1).sum())
    if bad:
        raise ContractError("logits", f"the model gives NaN or infinite logits for {bad} of {len(x)} clean images")
    again = _answer(model, x)
    if not torch.equal(logits, again):
        if random:
            return True
        raise ContractError(
            "random",
            f"the model is random: the same images gave logits {float((logits - again).abs().max()):.3g} apart. Make "
            "it deterministic in eval mode, or attack its mean answer with eot (steelman evaluate --attack eot)",
        )
    alone = torch.cat([_answer(model, image[None]) for image in x])
    apart = (logits - alone).abs().amax(dim=1)
    # A sum in another order may differ by roundings; a neighbour's pixels make a difference of another kind.
    allowed = 1e-3 * (logits - logits.mean(dim=1, keepdim=True)).abs().amax(dim=1) + 1e-6
    if bool((apart > allowed).any()):
        raise ContractError(
            "batch",
            f"the model's answer to an image depends on the others in its batch: alone, logits moved by up to "
            f"{float(apart.max()):.3g}. Batch norm without running statistics does this",
        )
    if model.training:
        with untouched(model, "train"), torch.no_grad():
            trained = logits_of(model, x)
        if not torch.allclose(trained, logits, rtol=1e-4, atol=1e-5):
            raise ContractError(
                "train mode", "the model is in train mode, where it answers otherwise; call model.eval()"
            )
    return False


def as_model(model: nn.Module, x: Tensor, device: torch.device) -> Tensor:
    """Images on the device, in float64 for a model in float64."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return x.to(device, torch.float64 if kinds == {torch.float64} else torch.float32)


def _answer(model: nn.Module, x: Tensor) -> Tensor:
    try:
        with untouched(model), torch.no_grad():
            answer: Tensor = model(x)
    except UserError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ContractError("shape", f"the model cannot take images of shape {tuple(x.shape[1:])}: {reason}") from None
    return answer
