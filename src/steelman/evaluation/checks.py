"""Checks on a model and its data, before any attack. A model that fails one would get a meaningless verdict."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from steelman.attacks.base import check_range, logits_of, untouched
from steelman.data.source import ArraySource, Source
from steelman.errors import UserError
from steelman.losses import magnitude, spread
from steelman.threat import ThreatModel

TRIED = 4  # images on which `check_manners` tries a model
REPEATS = 6  # forwards on the same images: rare noise could be missed in fewer forwards
CROWD = 64  # images in the largest batch of `check_manners`
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


def check_model(model: object) -> None:
    """Refuse an object that is not a PyTorch model."""
    if not isinstance(model, nn.Module):
        raise ContractError("model", f"expected a torch.nn.Module that gives logits, got {type(model).__name__}")


def check_radius(threat: ThreatModel, shape: Sequence[int] | None = None) -> None:
    """Refuse a radius that is not above 0, and a radius that no image of `shape` can reach."""
    if not threat.eps > 0:
        raise ContractError("eps", f"eps: expected a radius above 0, got {threat.eps}")
    if shape is not None and (problem := threat.too_wide(shape)):
        raise ContractError("eps", f"eps: {problem}")


def source_of(x: Tensor | Source, y: Tensor | None, threat: ThreatModel) -> Source:
    """The source `x` itself, or a new source of the images `x` and the labels `y`."""
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
    """Refuse a model or data that cannot be evaluated. Returns the model's number of classes."""
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
    """Refuse a model whose answer depends on more than the image. Returns whether the model is random.

    These models are refused:
    - a model whose logits differ by less than their rounding;
    - a random model, unless `random` allows it (then the checks below are skipped);
    - a model whose answer to an image depends on the other images of the batch;
    - a model whose answer changes when a gradient is asked for;
    - a model in train mode, if it answers differently there.

    No batch is larger than `most`, or than 12 images if `most` is smaller.
    """
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


def _moved(model: nn.Module, x: Tensor) -> float:
    """The largest difference between the model's answers to the same images.

    All answers come from one ``untouched`` block. Every such block starts with the same random numbers, so separate
    blocks would hide the noise.
    """
    with untouched(model), torch.no_grad():
        answers = [logits_of(model, x).double() for _ in range(REPEATS)]
    return max(float((one - answers[0]).abs().max()) for one in answers)


def _check_batch(model: nn.Module, x: Tensor, logits: Tensor, most: int) -> None:
    """Refuse a model whose answer to an image changes when the image is alone, or last in a large batch."""
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
    """Other images in the same range: the negatives and the mirror images of `x`."""
    return torch.cat((x.amin() + x.amax() - x, x.flip(-1)))


def _differ(a: Tensor, b: Tensor) -> Tensor:
    """Which samples' logits differ by more than rounding.

    Another batch size changes the order of sums, and so the rounding. The influence of other images is much larger.
    """
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
        if len(x) == 1 and isinstance(error, ValueError):  # batch norm in train mode says this of a single image
            raise ContractError("batch", f"the model cannot take an image alone: {reason}") from None
        raise ContractError("shape", f"the model cannot take images of shape {tuple(x.shape[1:])}: {reason}") from None
    half = isinstance(answer, Tensor) and answer.dtype in (torch.float16, torch.bfloat16)
    return answer.float() if half else answer
