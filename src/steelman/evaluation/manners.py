"""The manners of a model: its answer to an image may depend on that image alone.

A model with other manners answers an attacker otherwise than it answers a user. The checks run before any attack, on
clean images. The pilot asks again at perturbed points, and a fresh copy of the model is asked beside every stage.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from steelman.attacks.base import logits_of, untouched
from steelman.data.source import Source
from steelman.evaluation.checks import ContractError, check_finite, coarse, first_answer, first_images
from steelman.losses import magnitude, margin, spread

REPEATS = 6  # forwards on the same images: rare noise could be missed in fewer forwards
CROWD = 64  # images in the largest batch of `check_manners`
COMPANY = 7  # points in a batch when they are asked about in other company
ASKED = 16  # points that are asked about in all ways
ALONE = 2  # points that a copy of their own is asked about
FINE = 1e-3  # logits that differ by less than this share of their spread are the same answer
# A model that computes in half precision inside moves by up to this share of the spread from batch to batch.
COARSEST = 0.05


@dataclasses.dataclass(frozen=True)
class Manners:
    """What the checks found: whether the model is random, and how far its logits move from batch to batch.

    `grain` is a share of the logits' spread. It is 0 for a model that computes in full precision.
    """

    random: bool = False
    grain: float = 0.0


def check_manners(
    model: nn.Module, source: Source, device: torch.device, *, random: bool = False, most: int = CROWD
) -> Manners:
    """Refuse a model whose answer depends on more than the image.

    These models are refused:
    - a model that changes the images it is asked about;
    - a model whose logits differ by less than their rounding;
    - a random model, unless `random` allows it (then the checks below are skipped);
    - a model whose answer to an image depends on the other images of the batch;
    - a model whose answer changes when a gradient is asked for;
    - a model in train mode, if it answers differently there.

    No batch is larger than `most`, or than 12 images if `most` is smaller.
    """
    x = first_images(model, source, device)
    given = x.clone()
    logits = first_answer(model, given)
    if not torch.equal(given, x):
        raise ContractError(
            "in place",
            "the model changes its images in place, so the next question about them would be another one; let it work "
            "on a copy (x = x.clone(), or inplace=False in its first layer)",
        )
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
            return Manners(random=True)
        raise ContractError(
            "random",
            f"the model is random: the same images gave logits {apart:.3g} apart. Make it deterministic in eval mode, "
            "or attack its mean answer with eot (steelman evaluate --attack eot)",
        )
    grain = _check_batch(model, x, logits, min(most, CROWD))
    with torch.enable_grad():
        watched = first_answer(model, x.clone().requires_grad_(True), gradient=True).detach()
    if bool(differ(watched, logits, COARSEST if grain else 0.0).any()):
        raise ContractError(
            "gradient mode",
            "the model answers otherwise when a gradient is asked for: attacks would climb another model than the "
            "one that is judged",
        )
    if model.training:
        with untouched(model, "train"), torch.no_grad():
            trained = logits_of(model, torch.cat((x, _others(x))))[: len(x)]
        if not torch.allclose(trained, logits, rtol=1e-4, atol=1e-5) and not _same_answers(trained, logits, grain):
            raise ContractError(
                "train mode", "the model is in train mode, where it answers otherwise; call model.eval()"
            )
    return Manners(grain=grain)


def differ(a: Tensor, b: Tensor, grain: float = 0.0) -> Tensor:
    """Which samples get other answers in `a` than in `b`.

    Another batch size changes the order of sums, and so the rounding. The influence of other images is much larger. A
    model with a `grain` may move by it, as long as the answer stays, or leads by less.
    """
    rounding = 64 * torch.finfo(b.dtype).eps * torch.maximum(b.abs(), magnitude(b)[:, None])
    moved = (a - b).abs()
    same = (moved <= FINE * spread(b)[:, None] + rounding).all(dim=1)
    if not grain:
        return ~same
    near = (moved <= 2 * grain * spread(b)[:, None] + rounding).all(dim=1)
    guess = b.argmax(dim=1)
    held = (a.argmax(dim=1) == guess) | (-margin(b, guess) <= 2 * grain * spread(b))
    return ~(same | (near & held))


def otherwise(model: nn.Module, points: Tensor, grain: float, batch_size: int) -> dict[str, Tensor]:
    """Which points get another answer when they are asked about in another way.

    "company": in reversed order, in batches of another size. "gradient": while a gradient is asked for. Some points are
    asked about in more ways, see `_companies` and `_gradients`.
    """
    with untouched(model), torch.no_grad():
        plain = torch.cat([logits_of(model, part) for part in torch.split(points, batch_size)])
        parts = torch.split(points.flip(0), min(COMPANY, batch_size))
        company = torch.cat([logits_of(model, part.clone()) for part in parts]).flip(0)
    with untouched(model), torch.enable_grad():
        watched = torch.cat(
            [logits_of(model, part.clone().requires_grad_(True)).detach() for part in torch.split(points, batch_size)]
        )
    found = {"company": differ(company, plain, grain), "gradient": differ(watched, plain, grain)}
    rows = torch.linspace(0, len(points) - 1, min(ASKED, len(points))).round().long().to(points.device)
    some = points[rows]
    for name, answers in (
        ("company", _companies(model, some, points[0], batch_size)),
        ("gradient", _gradients(model, some, batch_size)),
    ):
        for other in answers:
            found[name][rows] |= differ(other, plain[rows], grain)
    defined = plain.isfinite().all(dim=1)  # what has no answer has a flag of its own
    return {name: other & defined for name, other in found.items()}


def _companies(model: nn.Module, points: Tensor, clean: Tensor, batch_size: int) -> Iterator[Tensor]:
    """The answers to points alone, to each in a batch of itself, beside a clean image, and in another layout."""
    with untouched(model), torch.no_grad():
        yield torch.cat([logits_of(model, point[None].clone()) for point in points])
        if batch_size > 1:
            yield torch.cat([logits_of(model, torch.stack((point, point)))[:1] for point in points])
            yield torch.cat([logits_of(model, torch.stack((clean, point)))[1:] for point in points])
        # Many users keep their images so in memory. A model that refuses this layout gives them no answer either.
        with contextlib.suppress(RuntimeError):
            yield torch.cat([logits_of(model, _other_layout(part)) for part in torch.split(points, batch_size)])


def _other_layout(x: Tensor) -> Tensor:
    """The same images in another order of memory: channels last, or columns first if there is one channel."""
    if x.shape[1] > 1:
        return x.contiguous(memory_format=torch.channels_last)
    return x.transpose(2, 3).contiguous().transpose(2, 3)


def _gradients(model: nn.Module, points: Tensor, batch_size: int) -> Iterator[Tensor]:
    """The answers in inference mode, and with gradients: to plain images, and to images that were computed."""
    parts = torch.split(points, batch_size)
    with untouched(model):
        with torch.inference_mode():
            found = torch.cat([logits_of(model, part.clone()) for part in parts])
        yield found.clone()
        with torch.enable_grad():
            yield torch.cat([logits_of(model, part.clone()).detach() for part in parts])
            yield torch.cat([logits_of(model, part.clone().requires_grad_(True) * 1.0).detach() for part in parts])


class Witness:
    """A copy of the model from before the first question. It remembers nothing, so it shows what the model remembers.

    Some models cannot be copied. Then `kept` is None, and nothing can be asked.

    What a model keeps outside itself, such as in a global variable or in a file, is the same for every copy.
    """

    def __init__(self, model: nn.Module) -> None:
        self.kept: nn.Module | None
        try:
            with torch.no_grad():
                self.kept = copy.deepcopy(getattr(model, "_orig_mod", model))  # a copy need not be compiled
        except Exception:  # copying may raise any error
            self.kept = None

    def dressed(self, bare: nn.Module, model: nn.Module) -> Witness:
        """This witness with the wrapper that `model` has around `bare`."""
        if self.kept is not None and model is not bare:
            self.kept = copy.deepcopy(model, {id(bare): self.kept})
        return self

    def answers(self, points: Tensor) -> Tensor | None:
        """The logits of fresh copies, without a gradient, in reversed order and in small batches."""
        if self.kept is None:
            return None
        # A memory could begin within the first batch. So some points have a copy of their own.
        alone = [self._fresh_answers(point[None]) for point in points[:ALONE]]
        return torch.cat([*alone, *([self._fresh_answers(points[ALONE:])] if len(points) > ALONE else [])])

    def _fresh_answers(self, points: Tensor) -> Tensor:
        """The logits of one more copy. It shares nothing, so no question knows of the one before."""
        with torch.no_grad():  # else a scripted model's copy would keep a graph to the weights it is copied from
            fresh = copy.deepcopy(self.kept)
        assert fresh is not None
        with untouched(fresh), torch.no_grad():
            parts = [logits_of(fresh, part.clone()) for part in torch.split(points.flip(0), COMPANY)]
        return torch.cat(parts).flip(0)

    def contradicts(self, points: Tensor, logits: Tensor, grain: float) -> Tensor | None:
        """Which points get another answer from a fresh copy than `logits`."""
        if len(points) == 0 or (fresh := self.answers(points)) is None:
            return None
        finite = logits.isfinite().all(dim=1) & fresh.isfinite().all(dim=1)
        return torch.where(finite, differ(fresh, logits, grain), (logits.isfinite() != fresh.isfinite()).any(dim=1))


def _same_answers(a: Tensor, b: Tensor, grain: float) -> bool:
    return bool(grain) and not bool(differ(a, b, grain).any())


def _moved(model: nn.Module, x: Tensor) -> float:
    """The largest difference between the model's answers to the same images.

    All answers come from one ``untouched`` block. Every such block starts with the same random numbers, so separate
    blocks would hide the noise.
    """
    with untouched(model), torch.no_grad():
        answers = [logits_of(model, x).double() for _ in range(REPEATS)]
    return max(float((one - answers[0]).abs().max()) for one in answers)


def _check_batch(model: nn.Module, x: Tensor, logits: Tensor, most: int) -> float:
    """Refuse a model whose answer to an image changes when the image is alone, or last in a large batch.

    Returns the model's grain.
    """
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
    if not bool((differ(alone, logits) | differ(last, logits)).any()):
        return 0.0
    moved = torch.maximum((alone - logits).abs(), (last - logits).abs())
    grain = float((moved.amax(dim=1) / spread(logits)).max())
    if grain > COARSEST or bool((differ(alone, logits, grain) | differ(last, logits, grain)).any()):
        raise ContractError(
            "batch",
            f"the model's answer to an image depends on the others in its batch: among others, logits moved by up to "
            f"{float(moved.max()):.3g}. Batch norm without running statistics does this",
        )
    return grain


def _others(x: Tensor) -> Tensor:
    """Other images in the same range: the negatives and the mirror images of `x`."""
    return torch.cat((x.amin() + x.amax() - x, x.flip(-1)))
