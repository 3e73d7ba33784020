"""Checking evidence without attacking again: nothing here knows how an attack works.

Without the model, what the evidence says is checked against itself; with `model` and `data`, every image, clean and
adversarial, is put to the model, and every claim is counted anew.

What can be shown is shown: that each broken sample is broken, that each answer is the model's, that every count is the
samples' own. What cannot be shown without attacking is that no attack would break a sample claimed to be robust, that
the attacks were run as the settings say, or that passes were counted right. Who doubts that runs the evaluation again:
the same settings and seed give the same evidence.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import torch
from torch import Tensor, nn

from steelman.data.source import Source
from steelman.errors import UserError
from steelman.evaluation.consistency import check_consistency
from steelman.evaluation.evidence import Bundle, DamagedError, read_bundle, weights_digest
from steelman.evaluation.ledger import ROBUST, WRONG, digests, nearness
from steelman.losses import magnitude, margin
from steelman.precision import full_precision

BATCH, BATCH_BYTES = 256, 1 << 26
# How far a margin or a lead may be from the one written down, in units of the logits' spread, and what sums may differ
# by in another batch or on another machine, in roundings of the largest logit.
CLOSE, ROUNDINGS = 1e-3, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """What a check found: how many samples and images were looked at, and how many images still fool the model after
    rounding to 8 bits (None where no model was given)."""

    seal: str
    samples: int
    broken: int
    robust: int
    model: bool
    data: bool
    rounded: int | None = None


def verify(
    folder: Path,
    *,
    model: nn.Module | None = None,
    source: Source | None = None,
    device: torch.device | None = None,
) -> Checked:
    """Check the evidence in `folder`; raise with the first thing that is not as claimed.

    Images are put to the model on `device`, or where its weights are.
    """
    if model is not None and source is None:
        raise UserError(
            "--data: expected the data with the model; without it no image can be compared with its clean one"
        )
    bundle = read_bundle(folder)
    record, samples = bundle.record, bundle.samples
    check_consistency(bundle)
    asked = None
    if model is not None:
        if weights_digest(model) != record["weights"]:
            raise DamagedError("the model's weights are not those that were evaluated")
        asked = _Asked(model, device, len(record["classes"]))
    if source is not None:
        _clean(bundle, source, asked)
    shown, rounded = torch.zeros(record["total"], dtype=torch.bool), 0
    for rows, images in bundle.images():
        if bool((samples["broken_by"][rows] < 0).any()):
            raise DamagedError("an adversarial image belongs to a sample that is not claimed to be broken")
        shown[rows] = True
        low, high = bundle.threat.low, bundle.threat.high
        if not bool(((images >= low) & (images <= high)).all()):  # NaN is neither
            raise DamagedError(f"some of the adversarial images {_some(rows)} leave the range {low:g} .. {high:g}")
        if source is not None:
            for part, x_adv in zip(_parts(rows, source), _parts(images, source), strict=True):
                rounded += _examples(bundle, part, x_adv, source, asked)
    missing = (samples["broken_by"] >= 0) & ~shown
    if bool(missing.any()):
        raise DamagedError(f"no adversarial image for the broken samples {_some(missing.nonzero()[:, 0])}")
    return Checked(
        seal=bundle.seal,
        samples=record["total"],
        broken=int(shown.sum()),
        robust=record["robust_correct"],
        model=model is not None,
        data=source is not None,
        rounded=rounded if model is not None else None,
    )


class _Asked:
    """A model that is asked in eval mode and full precision."""

    def __init__(self, model: nn.Module, device: torch.device | None, classes: int) -> None:
        self.model, self.classes = model, classes
        parameters = list(model.parameters())
        kinds = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
        self.dtype = torch.float64 if kinds == {torch.float64} else torch.float32
        self.device = device or next((parameter.device for parameter in parameters), torch.device("cpu"))

    def __call__(self, x: Tensor) -> Tensor:
        """Logits in float64, on the CPU."""
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


def _clean(bundle: Bundle, source: Source, asked: _Asked | None) -> None:
    """The data are those that were evaluated, and the model's answers to them too."""
    samples, n = bundle.samples, bundle.record["total"]
    if len(source) < n:
        raise DamagedError(f"expected at least {n} images, got {len(source)}")
    for rows in _parts(torch.arange(n), source):
        x, y = source.images(rows), source.labels[rows]
        wrong = rows[(y != samples["label"][rows]) | (digests(x, y) != samples["digest"][rows])]
        if len(wrong):
            raise DamagedError(f"the data are not those that were evaluated: samples {_some(wrong)} differ")
        if asked is None:
            continue
        logits = asked(x)
        if rows[0] == 0 and not torch.equal(logits, asked(x)):
            raise UserError("the model gives another answer each time; what is claimed of it cannot be checked with it")
        if len(other := rows[~_says(logits, samples["clean"][rows], asked.dtype)]):
            raise DamagedError(f"the model does not say what is claimed of the clean images {_some(other)}")
        # The margin is the smallest seen, so never above the clean one, and that itself where nothing was tried.
        wrong_already = samples["broken_by"][rows] == WRONG
        for name, value, unit in _margins(logits, y, asked.dtype):
            above = samples[name][rows] - value
            bad = (above.abs() > unit) & wrong_already
            bad |= (above > unit) & (samples["broken_by"][rows] == ROBUST) & (name == "margin")
            if bool(bad.any()):
                raise DamagedError(f"the {name} of samples {_some(rows[bad])} is not what the model gives")


def _examples(bundle: Bundle, rows: Tensor, x_adv: Tensor, source: Source, asked: _Asked | None) -> int:
    """Radius and prediction of some adversarial images; how many fool the model after rounding to 8 bits."""
    threat, y = bundle.threat, bundle.samples["label"][rows]
    if asked is not None and x_adv.dtype != asked.dtype:
        raise DamagedError(f"expected adversarial images in {asked.dtype}, as the model has it, got {x_adv.dtype}")
    x = source.images(rows).to(x_adv)
    if x.shape != x_adv.shape:
        raise DamagedError(f"expected adversarial images of shape {tuple(x.shape[1:])}, got {tuple(x_adv.shape[1:])}")
    if len(far := rows[~threat.contains(x_adv, x)]):
        raise DamagedError(f"adversarial images {_some(far)} are outside the threat model")
    if asked is None:
        return 0
    logits = asked(x_adv)
    other = rows[(logits.argmax(dim=1) == y) | ~_says(logits, bundle.samples["guess"][rows], asked.dtype)]
    if len(other):
        raise DamagedError(f"the model does not say what is claimed of the adversarial images {_some(other)}")
    for name, value, unit in _margins(logits, y, asked.dtype):
        if bool((bad := (bundle.samples[name][rows] - value).abs() > unit).any()):
            raise DamagedError(f"the {name} of samples {_some(rows[bad])} is not what the model gives")
    steps = (x_adv - threat.low) / (threat.high - threat.low) * 255
    rounded = threat.low + steps.round() / 255 * (threat.high - threat.low)
    return int((asked(rounded.clamp(threat.low, threat.high)).argmax(dim=1) != y).sum())


def _says(logits: Tensor, claimed: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether the claimed class wins; one that ties but for roundings may have won in another batch."""
    behind = logits.amax(dim=1) - logits.gather(1, claimed[:, None])[:, 0]
    return behind <= ROUNDINGS * torch.finfo(dtype).eps * magnitude(logits)


def _margins(logits: Tensor, y: Tensor, dtype: torch.dtype) -> list[tuple[str, Tensor, Tensor]]:
    """(name, value, how far from it is near) of the margin and the lead."""
    lead, near = -margin(logits, y), nearness(logits, y)
    noise = ROUNDINGS * torch.finfo(dtype).eps * magnitude(logits)
    spread = logits.std(dim=1, correction=0)
    plain = CLOSE * (spread + lead.abs()) + noise
    scaled = CLOSE * (1 + near.abs()) + noise / spread.clamp_min(1e-300)
    return [("lead", lead, plain), ("margin", near, scaled if logits.shape[1] > 2 else plain)]


def _parts(values: Tensor, source: Source) -> itertools.chain[Tensor]:
    """Batches that fit in memory, whatever the size of an image."""
    size = max(min(BATCH, BATCH_BYTES // (4 * max(source.shape[0] * source.shape[1] * source.shape[2], 1))), 1)
    return itertools.chain(torch.split(values, size))


def _some(rows: Tensor) -> str:
    shown = ", ".join(map(str, rows[:5].tolist()))
    return shown + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")
