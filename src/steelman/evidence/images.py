"""Checks evidence with the model and the data: every clean and adversarial image, and the pilot's gradients."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor, nn

from steelman.data.source import Source
from steelman.errors import UserError
from steelman.evaluation.masking import TINY, _slopes
from steelman.evaluation.verdict import Kept
from steelman.evidence.bundle import Bundle, DamagedError, device_of
from steelman.evidence.gallery import Shown
from steelman.evidence.ledger import ROBUST, WRONG, digests, nearness
from steelman.losses import magnitude, margin
from steelman.precision import full_precision

BATCH, BATCH_BYTES = 256, 1 << 26
# CLOSE is the allowed error of a margin or a lead, relative to the standard deviation of the logits. ROUNDINGS is the
# allowed difference of logits in another batch or on another machine, in roundings of the largest logit.
CLOSE, ROUNDINGS = 1e-3, 64


def read_as_evaluated(model: nn.Module, source: Source | None) -> nn.Module:
    """The model as an evaluation sees it: wrapped if its answer is an object, a dict or a tuple."""
    from steelman.models.wrap import detected  # this imports attacks, and a check without a model needs none

    if source is None or not len(source):
        return model
    first = source.images(torch.arange(min(2, len(source))))
    with full_precision():
        return detected(model, first.to(device_of(model))).model


class Asked:
    """A model that answers in eval mode and full precision."""

    def __init__(self, model: nn.Module, device: torch.device | None, classes: int) -> None:
        self.model, self.classes = model, classes
        kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        self.dtype = torch.float64 if kinds == {torch.float64} else torch.float32
        self.device = device or device_of(model)

    def __call__(self, x: Tensor) -> Tensor:
        """The model's logits for `x`, in float64 on the CPU."""
        modes = [module.training for module in self.model.modules()]
        try:
            self.model.eval()
            with torch.no_grad(), torch.autocast(self.device.type, enabled=False), full_precision():
                logits: Tensor = self.model(x.to(self.device, self.dtype))
        except (RuntimeError, ValueError, TypeError, LookupError) as error:
            raise UserError(f"the model cannot take images of shape {tuple(x.shape[1:])}: {error}") from None
        finally:
            for module, training in zip(self.model.modules(), modes, strict=True):
                module.training = training
        if logits.shape != (len(x), self.classes) or not bool(logits.isfinite().all()):
            raise DamagedError(f"expected {self.classes} finite logits for each image, the model gives others")
        return logits.double().cpu()


def check_clean(bundle: Bundle, source: Source, asked: Asked | None) -> None:
    """Raise unless the data are the evaluated data, and the model gives the claimed answers to clean images."""
    samples, n = bundle.samples, bundle.record["total"]
    if len(source) < n:
        raise DamagedError(f"expected at least {n} images, got {len(source)}")
    low, high = math.inf, -math.inf
    for rows in _parts(torch.arange(n), source):
        x, y = source.images(rows), source.labels[rows]
        low, high = min(low, float(x.min())), max(high, float(x.max()))
        wrong = rows[(y != samples["label"][rows]) | (digests(x, y) != samples["digest"][rows])]
        if len(wrong):
            raise DamagedError(f"the data are not those that were evaluated: samples {some(wrong)} differ")
        if asked is None:
            continue
        logits = asked(x)
        if rows[0] == 0 and not torch.equal(logits, asked(x)):
            raise UserError("the model gives another answer each time; what is claimed of it cannot be checked with it")
        if len(other := rows[~_says(logits, samples["clean"][rows], asked.dtype)]):
            raise DamagedError(f"the model does not say what is claimed of the clean images {some(other)}")
        # A robust sample's margin is the smallest seen, so it is not above the clean margin. A sample that is wrong
        # without an attack is never attacked, so margin and lead belong to the clean image.
        wrong_already = samples["broken_by"][rows] == WRONG
        for name, value, unit in _margins(logits, y, asked.dtype):
            above = samples[name][rows] - value
            bad = (above.abs() > unit) & wrong_already
            bad |= (above > unit) & (samples["broken_by"][rows] == ROBUST) & (name == "margin")
            if bool(bad.any()):
                raise DamagedError(f"the {name} of samples {some(rows[bad])} is not what the model gives")
    threat = bundle.threat
    # In a range that is too wide, the same radius would be fewer grey levels.
    if (threat.low, threat.high) != (0, 1) and low >= 0 and high <= 1:
        raise DamagedError(
            f"the range is claimed to be {threat.low:g} .. {threat.high:g}, and all pixels are in 0 .. 1"
        )


def check_images(
    bundle: Bundle, gallery: Shown | None, source: Source | None, asked: Asked | None
) -> tuple[Tensor, dict[int, Tensor], int]:
    """Check every adversarial image.

    Returns three values: which samples have an image, the images of the gallery's samples by row, and a count. The
    count is the number of images that are still adversarial after rounding to 8 bits.
    """
    shown, pictured, rounded = torch.zeros(bundle.record["total"], dtype=torch.bool), dict[int, Tensor](), 0
    low, high = bundle.threat.low, bundle.threat.high
    for rows, images in bundle.images():
        if bool((bundle.samples["broken_by"][rows] < 0).any()):
            raise DamagedError("an adversarial image belongs to a sample that is not claimed to be broken")
        if images.shape[1:] != (shape := tuple(bundle.record["shape"])):
            raise DamagedError(f"expected adversarial images of shape {shape}, got {tuple(images.shape[1:])}")
        shown[rows] = True
        if not bool(((images >= low) & (images <= high)).all()):  # False for NaN
            raise DamagedError(f"some of the adversarial images {some(rows)} leave the range {low:g} .. {high:g}")
        if gallery is not None:
            at = torch.isin(rows, gallery.rows)
            pictured.update(zip(rows[at].tolist(), images[at], strict=True))
        if source is not None:
            for part, x_adv in zip(_parts(rows, source), _parts(images, source), strict=True):
                rounded += _examples(bundle, part, x_adv, source, asked)
    return shown, pictured, rounded


def _examples(bundle: Bundle, rows: Tensor, x_adv: Tensor, source: Source, asked: Asked | None) -> int:
    """Check some adversarial images. Returns how many are still adversarial after rounding to 8 bits."""
    threat, y = bundle.threat, bundle.samples["label"][rows]
    if asked is not None and x_adv.dtype != asked.dtype:
        raise DamagedError(f"expected adversarial images in {asked.dtype}, as the model has it, got {x_adv.dtype}")
    x = source.images(rows).to(x_adv)
    if len(far := rows[~threat.contains(x_adv, x)]):
        raise DamagedError(f"adversarial images {some(far)} are outside the threat model")
    if asked is None:
        return 0
    logits = asked(x_adv)
    other = rows[(logits.argmax(dim=1) == y) | ~_says(logits, bundle.samples["guess"][rows], asked.dtype)]
    if len(other):
        raise DamagedError(f"the model does not say what is claimed of the adversarial images {some(other)}")
    for name, value, unit in _margins(logits, y, asked.dtype):
        if bool((bad := (bundle.samples[name][rows] - value).abs() > unit).any()):
            raise DamagedError(f"the {name} of samples {some(rows[bad])} is not what the model gives")
    steps = (x_adv - threat.low) / (threat.high - threat.low) * 255
    rounded = threat.low + steps.round() / 255 * (threat.high - threat.low)
    return int((asked(rounded.clamp(threat.low, threat.high)).argmax(dim=1) != y).sum())


def check_pictures(bundle: Bundle, gallery: Shown, asked: Asked) -> None:
    """Raise unless the model's answers to the gallery's adversarial images agree with guess, margin and lead."""
    rows, samples = gallery.rows, bundle.samples
    logits = asked(gallery.adversarial)
    if len(other := rows[~_says(logits, samples["guess"][rows], asked.dtype)]):
        raise DamagedError(f"the model does not say what is claimed of the gallery's samples {some(other)}")
    for name, value, unit in _margins(logits, samples["label"][rows], asked.dtype):
        if len(other := rows[(samples[name][rows] - value).abs() > unit]):
            raise DamagedError(f"the {name} of the gallery's samples {some(other)} is not what the model gives")


def _says(logits: Tensor, claimed: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether the claimed class has the largest logit, up to rounding.

    In another batch, rounding can change which of two almost equal logits is larger.
    """
    behind = logits.amax(dim=1) - logits.gather(1, claimed[:, None])[:, 0]
    return behind <= ROUNDINGS * torch.finfo(dtype).eps * magnitude(logits)


def _margins(logits: Tensor, y: Tensor, dtype: torch.dtype) -> list[tuple[str, Tensor, Tensor]]:
    """(name, value, allowed error) of the lead and the margin."""
    lead, near = -margin(logits, y), nearness(logits, y)
    noise = ROUNDINGS * torch.finfo(dtype).eps * magnitude(logits)
    spread = logits.std(dim=1, correction=0)
    plain = CLOSE * (spread + lead.abs()) + noise
    scaled = CLOSE * (1 + near.abs()) + noise / spread.clamp_min(1e-300)
    return [("lead", lead, plain), ("margin", near, scaled if logits.shape[1] > 2 else plain)]


def _parts(values: Tensor, source: Source) -> itertools.chain[Tensor]:
    """Batches of `values` that fit in memory, whatever the size of an image."""
    size = max(min(BATCH, BATCH_BYTES // (4 * max(source.shape[0] * source.shape[1] * source.shape[2], 1))), 1)
    return itertools.chain(torch.split(values, size))


def some(rows: Tensor) -> str:
    shown = ", ".join(map(str, rows[:5].tolist()))
    return shown + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")


def check_gradients(bundle: Bundle, kept: Kept, source: Source, asked: Asked) -> None:
    """Raise unless the gradients at the pilot's images are zero where that is claimed. This costs no attack."""
    rows = kept.signs.get("rows", torch.empty(0, dtype=torch.int64))
    if not len(rows):
        return
    x, y = source.images(rows).to(asked.device, asked.dtype), source.labels[rows].to(asked.device)
    with full_precision():
        slopes = _slopes(asked.model, x, y, bundle.threat, 64)
    zero = kept.signs["zero gradients"].bool()
    found = torch.zeros(len(rows)) if slopes is None else slopes.cpu()
    # Near the limit, another batch or machine may decide otherwise.
    if len(other := rows[(zero & (found > 2 * TINY)) | (~zero & (found < TINY / 2))]):
        raise DamagedError(f"the gradients at samples {some(other)} are not what is claimed of them")
