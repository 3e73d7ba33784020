"""What must be true of a model and its data before an attack's answer means anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from steelman.attacks.base import check_range, logits_of, untouched
from steelman.data.source import ArraySource, Source
from steelman.errors import UserError
from steelman.losses import magnitude, spread
from steelman.threat import ThreatModel

TRIED = 4  # images on which a model's manners are looked at
REPEATS = 6  # how often each is asked for, so that noise which is seldom shows
CROWD = 64  # images in the largest batch they are asked for in
# Logits whose differences are below this many roundings of their size: which is the largest is a matter of luck.
COARSE = 256


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
    check_finite(logits, what)
    return logits.argmax(dim=1)


def check_model(model: object) -> None:
    """Refuse what is no model at all."""
    if not isinstance(model, nn.Module):
        raise ContractError("model", f"expected a torch.nn.Module that gives logits, got {type(model).__name__}")


def check_radius(threat: ThreatModel, shape: Sequence[int] | None = None) -> None:
    """Refuse a radius that leaves an attack nowhere to go, and one that no image of `shape` can reach."""
    if not threat.eps > 0:
        raise ContractError("eps", f"eps: expected a radius above 0, got {threat.eps}")
    if shape is not None and (problem := threat.too_wide(shape)):
        raise ContractError("eps", f"eps: {problem}")


def source_of(x: Tensor | Source, y: Tensor | None, threat: ThreatModel) -> Source:
    """The source that is given, or one of images and labels in memory."""
    if isinstance(x, Source):
        if y is not None:
            raise UserError("expected y None with a source, which has its own labels")
        return x
    if y is None:
        raise UserError("expected labels y with images x, got None")
    if isinstance(x, Tensor) and x.is_inference():
        with torch.inference_mode(False):
            x = x.clone()
    return ArraySource(x, y, bounds=(threat.low, threat.high))


def check_contract(model: nn.Module, source: Source, threat: ThreatModel, device: torch.device) -> int:
    """Refuse what cannot be evaluated, with a sentence; the number of classes the model knows."""
    check_model(model)
    check_radius(threat, source.shape)
    if len(source) == 0:
        raise ContractError("empty", "expected at least one image, got none")
    halves = {str(p.dtype) for p in model.parameters() if p.dtype in (torch.float16, torch.bfloat16)}
    if halves:
        raise ContractError(
            "precision",
            f"the model's weights are {', '.join(sorted(halves))}, and answers are judged in full precision; call "
            "model.float()",
        )
    x = _first(model, source, device)
    try:
        check_range(x, threat)
    except UserError as error:
        raise ContractError("range", str(error)) from None
    logits = _answer(model, x)
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


def check_manners(
    model: nn.Module, source: Source, device: torch.device, *, random: bool = False, most: int = CROWD
) -> bool:
    """Refuse a model whose answer to an image is not the image's own: one in train mode where that matters, one that
    draws random numbers (unless `random` allows it), one that looks at the rest of the batch, one that answers
    otherwise when a gradient is asked for. Whether it is random. No batch is larger than `most`, or than a dozen."""
    x = _first(model, source, device)
    logits = _answer(model, x)
    check_finite(logits, "clean")
    if bool(coarse(logits).double().mean() > 0.5):
        raise ContractError(
            "coarse",
            f"the model's logits are as large as {float(logits.abs().max()):.3g} and differ by "
            f"{float((logits.amax(dim=1) - logits.amin(dim=1)).median()):.3g}, which is lost in {logits.dtype}'s "
            "roundings; take what they have in common away, or use float64",
        )
    apart = _moved(model, x)
    if apart:
        if random:
            return True
        raise ContractError(
            "random",
            f"the model is random: the same images gave logits {apart:.3g} apart. Make it deterministic in eval mode, "
            "or attack its mean answer with eot (steelman evaluate --attack eot)",
        )
    _check_batch(model, x, logits, min(most, CROWD))
    with torch.enable_grad():
        watched = _answer(model, x.clone().requires_grad_(True), gradient=True).detach()
    if bool(_differ(watched, logits).any()):
        raise ContractError(
            "gradient mode",
            "the model answers otherwise when a gradient is asked for: attacks would climb another model than the "
            "one that is judged",
        )
    if model.training:
        with untouched(model, "train"), torch.no_grad():
            trained = logits_of(model, torch.cat((x, _others(x))))[: len(x)]
        if not torch.allclose(trained, logits, rtol=1e-4, atol=1e-5):
            raise ContractError(
                "train mode", "the model is in train mode, where it answers otherwise; call model.eval()"
            )
    return False


def as_model(model: nn.Module, x: Tensor, device: torch.device) -> Tensor:
    """Images on the device, in float64 for a model in float64."""
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return x.to(device, torch.float64 if kinds == {torch.float64} else torch.float32)


def coarse(logits: Tensor) -> Tensor:
    """Where logits differ by little more than the roundings of numbers of their size.

    >>> coarse(torch.tensor([[1.0, 2.0], [1e7, 1e7 + 2]]))
    tensor([False,  True])
    """
    return spread(logits) < COARSE * torch.finfo(logits.dtype).eps * magnitude(logits)


def check_finite(logits: Tensor, what: str) -> None:
    """Refuse answers that are none."""
    bad = int((~torch.isfinite(logits)).any(dim=1).sum())
    if bad:
        raise ContractError(
            "logits", f"the model gives NaN or infinite logits for {bad} of {len(logits)} {what} images"
        )


def _moved(model: nn.Module, x: Tensor) -> float:
    """How far apart the answers to the same images are. Asked in one bracket, for each bracket begins with the same
    random numbers."""
    with untouched(model), torch.no_grad():
        answers = [logits_of(model, x).double() for _ in range(REPEATS)]
    return max(float((one - answers[0]).abs().max()) for one in answers)


def _check_batch(model: nn.Module, x: Tensor, logits: Tensor, most: int) -> None:
    """The answer to an image is the same alone, and last in a large batch of others."""
    others = _others(x)
    crowd = torch.cat((others.repeat(max((most - len(x)) // len(others), 1), 1, 1, 1), x.flip(0)))
    try:
        with untouched(model), torch.no_grad():
            alone = torch.cat([logits_of(model, image[None]) for image in x])
            last = logits_of(model, crowd)[-len(x) :].flip(0)
    except (RuntimeError, ValueError, LookupError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ContractError(
            "batch", f"the model takes images in a batch of {len(x)}, but not in one of another size: {reason}"
        ) from None
    apart = _differ(alone, logits) | _differ(last, logits)
    if bool(apart.any()):
        size = float(torch.maximum((alone - logits).abs(), (last - logits).abs()).max())
        raise ContractError(
            "batch",
            f"the model's answer to an image depends on the others in its batch: among others, logits moved by up to "
            f"{size:.3g}. Batch norm without running statistics does this",
        )


def _others(x: Tensor) -> Tensor:
    """Other images in the same range: the negatives and the mirror images."""
    return torch.cat((x.amin() + x.amax() - x, x.flip(-1)))


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """Where answers differ by more than sums in another order do; a neighbour's pixels make a difference of another
    kind."""
    rounding = 64 * torch.finfo(b.dtype).eps * torch.maximum(b.abs(), magnitude(b)[:, None])
    return ~((a - b).abs() <= 1e-3 * spread(b)[:, None] + rounding).all(dim=1)


def _first(model: nn.Module, source: Source, device: torch.device) -> Tensor:
    return as_model(model, source.images(torch.arange(min(TRIED, len(source)))), device)


def _answer(model: nn.Module, x: Tensor, *, gradient: bool = False) -> Tensor:
    try:
        with untouched(model), torch.set_grad_enabled(gradient):
            answer: Tensor = model(x)
    except UserError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if len(x) == 1 and isinstance(error, ValueError):  # what batch norm says that has one image to average over
            raise ContractError("batch", f"the model cannot take an image alone: {reason}") from None
        raise ContractError("shape", f"the model cannot take images of shape {tuple(x.shape[1:])}: {reason}") from None
    half = isinstance(answer, Tensor) and answer.dtype in (torch.float16, torch.bfloat16)
    return answer.float() if half else answer
