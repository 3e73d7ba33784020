"""Checks on a model and its data, before any attack. A model that fails one would get a meaningless verdict."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from steelman.arguments import model_of
from steelman.attacks.base import check_range, logits_of, untouched
from steelman.data.source import ArraySource, Source
from steelman.errors import UserError
from steelman.losses import magnitude, spread
from steelman.threat import ThreatModel

TRIED = 4  # images on which a model is tried
# The least radius, in grey levels. Below it, no 8-bit image can change, so every model would be robust.
LEAST_LEVELS = 0.5
# Logits are coarse if their spread is below this number of roundings: then chance decides which one is the largest.
COARSE = 256


class ContractError(UserError):
    """A check failed, so this model cannot be evaluated on these data; `reason` names the check in a word or two."""

    def __init__(self, reason: str, text: str) -> None:
        self.reason = reason
        super().__init__(text)


def predictions(model: nn.Module, x: Tensor, what: str) -> Tensor:
    """The classes that the model predicts in eval mode. Logits that are not finite are refused."""
    if len(x) == 0:  # some models cannot take an empty batch
        return torch.empty(0, dtype=torch.int64, device=x.device)
    with untouched(model), torch.no_grad():
        logits = logits_of(model, x)
    check_finite(logits, what)
    return logits.argmax(dim=1)


def threat_of(threat: object) -> ThreatModel:
    """The threat model. Anything else is refused."""
    if not isinstance(threat, ThreatModel):
        raise UserError(f"threat: expected a steelman.ThreatModel, got {type(threat).__name__}")
    return threat


def check_model(model: object) -> None:
    """Refuse an object that is not a PyTorch model."""
    if not isinstance(model, nn.Module):
        raise ContractError("model", f"expected a torch.nn.Module that gives logits, got {type(model).__name__}")
    model_of("model", model)


def check_radius(threat: ThreatModel, shape: Sequence[int] | None = None, *, tiny_eps: bool = False) -> None:
    """Refuse a radius that is not above 0, and a radius that no image of `shape` can reach.

    A radius under half a grey level is refused without `tiny_eps`. No 8-bit image changes by so little, so every model
    would be robust.
    """
    if not threat.eps > 0:
        raise ContractError("eps", f"eps: expected a radius above 0, got {threat.eps}")
    level = (threat.high - threat.low) / 255
    if threat.eps < LEAST_LEVELS * level and not tiny_eps:
        size = f"{threat.eps / level:.2g} of 255 grey levels in a range of {threat.low:g} .. {threat.high:g}"
        meant = f"; did you mean {255 * threat.eps:g}" if threat.high - threat.low == 255 else ""
        raise ContractError(
            "eps",
            f"eps: expected a radius of at least half a grey level, got {threat.eps:g}, which is {size}{meant}. If so "
            'small a radius is meant, say so: steelman.suite_named("fast", threat, tiny_eps=True), or --tiny-eps',
        )
    if shape is not None and (problem := threat.too_wide(shape)):
        raise ContractError("eps", f"eps: {problem}")


def source_of(x: Tensor | Source, y: Tensor | None, threat: ThreatModel) -> Source:
    """The source `x` itself, or a new source of the images `x` and the labels `y`."""
    if not isinstance(x, Tensor) and isinstance(x, Source):
        if y is not None:
            raise UserError("expected y None with a source, which has its own labels")
        return x
    if y is None:
        raise UserError("expected labels y with images x, got None")
    if isinstance(x, Tensor) and x.is_inference():
        with torch.inference_mode(False):
            x = x.clone()
    return ArraySource(x, y, bounds=(threat.low, threat.high))


def check_contract(
    model: nn.Module, source: Source, threat: ThreatModel, device: torch.device, *, tiny_eps: bool = False
) -> int:
    """Refuse a model or data that cannot be evaluated. Returns the model's number of classes."""
    check_model(model)
    check_radius(threat, source.shape, tiny_eps=tiny_eps)
    if len(source) == 0:
        raise ContractError("empty", "expected at least one image, got none")
    x = first_images(model, source, device)
    try:
        check_range(x, threat)
    except UserError as error:
        raise ContractError("range", str(error)) from None
    logits = first_answer(model, x)
    if not isinstance(logits, Tensor) or logits.dim() != 2 or len(logits) != len(x):
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ContractError("shape", f"expected logits of shape ({len(x)}, classes) for {len(x)} images, got {shape}")
    if not logits.is_floating_point():
        raise ContractError("shape", f"expected logits in floating point, got {logits.dtype}")
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


def as_model(model: nn.Module, x: Tensor, device: torch.device) -> Tensor:
    """The images on the device, in float64 for a model in float64, else in float32."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return x.to(device, torch.float64 if kinds == {torch.float64} else torch.float32)


def coarse(logits: Tensor) -> Tensor:
    """Whether the spread of each sample's logits is close to the rounding of numbers of their size.

    >>> coarse(torch.tensor([[1.0, 2.0], [1e7, 1e7 + 2]]))
    tensor([False,  True])
    """
    return spread(logits) < COARSE * torch.finfo(logits.dtype).eps * magnitude(logits)


def check_finite(logits: Tensor, what: str) -> None:
    """Refuse logits that are NaN or infinite."""
    bad = int((~torch.isfinite(logits)).any(dim=1).sum())
    if bad:
        raise ContractError(
            "logits", f"the model gives NaN or infinite logits for {bad} of {len(logits)} {what} images"
        )


def first_images(model: nn.Module, source: Source, device: torch.device) -> Tensor:
    return as_model(model, source.images(torch.arange(min(TRIED, len(source)))), device)


def first_answer(model: nn.Module, x: Tensor, *, gradient: bool = False) -> Tensor:
    try:
        with untouched(model), torch.set_grad_enabled(gradient):
            answer: Tensor = model(x)
    except UserError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if halves := {str(p.dtype) for p in model.parameters() if p.dtype in (torch.float16, torch.bfloat16)}:
            raise ContractError(
                "precision",
                f"the model's weights are {', '.join(sorted(halves))}, and it cannot take images in {x.dtype}; call "
                "model.float(), or convert the images inside the model",
            ) from None
        if len(x) == 1 and isinstance(error, ValueError):  # batch norm in train mode says this of a single image
            raise ContractError("batch", f"the model cannot take an image alone: {reason}") from None
        raise ContractError("shape", f"the model cannot take images of shape {tuple(x.shape[1:])}: {reason}") from None
    half = isinstance(answer, Tensor) and answer.dtype in (torch.float16, torch.bfloat16)
    return answer.float() if half else answer
