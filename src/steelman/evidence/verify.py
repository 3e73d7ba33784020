"""Checks evidence without attacking again.

Without the model, the claims are checked against each other. With the model and the data, every clean and adversarial
image goes through the model again.

The check shows that broken samples are broken, and that the model gives the claimed answers. It also shows that the
counts agree with the samples. Three claims cannot be shown without attacking:
- that no attack breaks a sample that is claimed to be robust;
- that the attacks ran with the claimed settings;
- that the passes were counted right.

To check these too, run the evaluation again: the same settings and seed give the same evidence.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn

from steelman.data.source import Source
from steelman.errors import UserError
from steelman.evaluation.result import Trust
from steelman.evidence.bundle import Bundle, DamagedError, data_digest, device_of, read_bundle, weights_digest
from steelman.evidence.gallery import Shown, check_gallery, gallery_of
from steelman.evidence.ledger import ROBUST, WRONG, digests, nearness, pilot_size
from steelman.losses import magnitude, margin
from steelman.precision import full_precision

BATCH, BATCH_BYTES = 256, 1 << 26
# CLOSE is the allowed error of a margin or a lead, relative to the standard deviation of the logits. ROUNDINGS is the
# allowed difference of logits in another batch or on another machine, in roundings of the largest logit.
CLOSE, ROUNDINGS = 1e-3, 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of a check: the counts of samples, and whether a model and data were given.

    `rounded` counts the images that are still adversarial after rounding to 8 bits. It is None without a model.
    """

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
    """Check the evidence in `folder`. The first false claim raises an error.

    For the folder of a run, it is the evidence in ``verdict``, or else in ``attacks``. Images are moved to `device`, or
    to the device of the model.
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
        model = _read_as_evaluated(model, source)
        if weights_digest(model) != record["weights"]:
            raise DamagedError("the model's weights are not those that were evaluated")
        asked = _Asked(model, device, len(record["classes"]))
    if source is not None:
        _clean(bundle, source, asked)
    gallery = gallery_of(bundle)
    shown, pictured, rounded = _images(bundle, gallery, source, asked)
    missing = (samples["broken_by"] >= 0) & ~shown
    if bool(missing.any()):
        raise DamagedError(f"no adversarial image for the broken samples {_some(missing.nonzero()[:, 0])}")
    if gallery is not None:
        check_gallery(bundle, gallery, pictured)
        if asked is not None:
            _pictures(bundle, gallery, asked)
    return Checked(
        seal=bundle.seal,
        samples=record["total"],
        broken=int(shown.sum()),
        robust=record["robust_correct"],
        model=model is not None,
        data=source is not None,
        rounded=rounded if model is not None else None,
    )


def _read_as_evaluated(model: nn.Module, source: Source | None) -> nn.Module:
    """The model as an evaluation sees it: wrapped if its answer is an object, a dict or a tuple."""
    from steelman.models.wrap import detected  # this imports attacks, and a check without a model needs none

    if source is None or not len(source):
        return model
    first = source.images(torch.arange(min(2, len(source))))
    with full_precision():
        return detected(model, first.to(device_of(model))).model


class _Asked:
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


def _clean(bundle: Bundle, source: Source, asked: _Asked | None) -> None:
    """Raise unless the data are the evaluated data, and the model gives the claimed answers to clean images."""
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
        # A robust sample's margin is the smallest seen, so it is not above the clean margin. A sample that is wrong
        # without an attack is never attacked, so margin and lead belong to the clean image.
        wrong_already = samples["broken_by"][rows] == WRONG
        for name, value, unit in _margins(logits, y, asked.dtype):
            above = samples[name][rows] - value
            bad = (above.abs() > unit) & wrong_already
            bad |= (above > unit) & (samples["broken_by"][rows] == ROBUST) & (name == "margin")
            if bool(bad.any()):
                raise DamagedError(f"the {name} of samples {_some(rows[bad])} is not what the model gives")


def _images(
    bundle: Bundle, gallery: Shown | None, source: Source | None, asked: _Asked | None
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
        shown[rows] = True
        if not bool(((images >= low) & (images <= high)).all()):  # False for NaN
            raise DamagedError(f"some of the adversarial images {_some(rows)} leave the range {low:g} .. {high:g}")
        if gallery is not None:
            at = torch.isin(rows, gallery.rows)
            pictured.update(zip(rows[at].tolist(), images[at], strict=True))
        if source is not None:
            for part, x_adv in zip(_parts(rows, source), _parts(images, source), strict=True):
                rounded += _examples(bundle, part, x_adv, source, asked)
    return shown, pictured, rounded


def _examples(bundle: Bundle, rows: Tensor, x_adv: Tensor, source: Source, asked: _Asked | None) -> int:
    """Check some adversarial images. Returns how many are still adversarial after rounding to 8 bits."""
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


def _pictures(bundle: Bundle, gallery: Shown, asked: _Asked) -> None:
    """Raise unless the model's answers to the gallery's adversarial images agree with guess, margin and lead."""
    rows, samples = gallery.rows, bundle.samples
    logits = asked(gallery.adversarial)
    if len(other := rows[~_says(logits, samples["guess"][rows], asked.dtype)]):
        raise DamagedError(f"the model does not say what is claimed of the gallery's samples {_some(other)}")
    for name, value, unit in _margins(logits, samples["label"][rows], asked.dtype):
        if len(other := rows[(samples[name][rows] - value).abs() > unit]):
            raise DamagedError(f"the {name} of the gallery's samples {_some(other)} is not what the model gives")


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


def _some(rows: Tensor) -> str:
    shown = ", ".join(map(str, rows[:5].tolist()))
    return shown + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")


# The flags that a complete cascade has for every model.
MEASURED = ("zero gradients", "black box stronger", "random answers", "undefined answers", "coarse answers")


def check_consistency(bundle: Bundle) -> None:
    """Raise an error at the first claim that contradicts another."""
    _columns(bundle)
    _counts(bundle)
    _stages(bundle)
    _verdict(bundle)


def _columns(bundle: Bundle) -> None:
    """Raise if a claim about a single sample is impossible."""
    samples, classes = bundle.samples, len(bundle.record["classes"])
    broken_by, label = samples["broken_by"], samples["label"]
    for name in ("label", "clean", "guess"):
        if bool(((samples[name] < 0) | (samples[name] >= classes)).any()):
            raise DamagedError(f"samples.safetensors: {name} is not always one of the {classes} classes")
    if bool(((broken_by < WRONG) | (broken_by >= len(bundle.record["suite"]["stages"]))).any()):
        raise DamagedError("a sample is claimed to be broken by a stage that the suite does not have")
    if bool(((samples["clean"] == label) != (broken_by != WRONG)).any()):
        raise DamagedError("a sample is counted as right or wrong against what the model said of it")
    broken = broken_by >= 0
    if bool((broken & (samples["guess"] == label)).any()):
        raise DamagedError("a sample is claimed to be broken by an image that the model gets right")
    for name in ("margin", "lead"):
        if not bool(samples[name].isfinite().all()) or bool((broken & (samples[name] >= 0)).any()):
            raise DamagedError(f"samples.safetensors: {name} is not a number, or not below 0 where a sample is broken")
    counts = [samples[name] for name in ("passes", "forwards", "backwards")]
    if any(bool(((count < 0) | (count > 1 << 40)).any()) for count in counts) or bool((counts[0] > counts[1]).any()):
        raise DamagedError("samples.safetensors: the counts of passes cannot be")


def _counts(bundle: Bundle) -> None:
    """Raise unless the total counts agree with the samples, and the curve's counts are possible."""
    record, samples = bundle.record, bundle.samples
    expected = {
        "clean_correct": int((samples["broken_by"] != WRONG).sum()),
        "robust_correct": int((samples["broken_by"] == ROBUST).sum()),
        "data_digest": data_digest(samples["digest"]),
    }
    for key, value in expected.items():
        if record[key] != value:
            raise DamagedError(f"evidence.json: {key} is {record[key]}, and the samples say {value}")
    for point in record["curve"]:
        if point["correct"] > point["total"] or point["total"] > record["total"]:
            raise DamagedError(f"evidence.json: the curve counts {point['correct']} of {point['total']} samples")


def _stages(bundle: Bundle) -> None:
    """Raise unless the stages that ran are the suite's, in its order, and their counts agree with the samples."""
    record, samples = bundle.record, bundle.samples
    planned = {stage["name"]: (number, stage) for number, stage in enumerate(record["suite"]["stages"])}
    last, left, ran = -1, record["clean_correct"], record["stages"]
    for done in ran:
        name = done["name"]
        number, _ = planned.get(name, (-1, {}))
        if number <= last:
            raise DamagedError(f"{name} is not a stage of the suite, or not in its place")
        count = int((samples["broken_by"] == number).sum())
        if record["suite"]["protocol"]:  # each stage attacks all samples, and `broken_by` is the first that broke one
            fits = done["broken"] >= count and done["left"] == record["clean_correct"] - done["broken"]
            fits = fits and (number > 0 or done["broken"] == count)
        else:
            fits = done["broken"] == count and done["left"] == left - count
        if not fits or not count <= done["broken"] <= done["attacked"] <= left:
            said = ", ".join(f"{done[key]} {key}" for key in ("attacked", "broken", "left"))
            raise DamagedError(f"the counts of {name} do not add up: {said}, and {count} samples say it broke them")
        last, left = number, record["clean_correct"] if record["suite"]["protocol"] else done["left"]
    numbers = {planned[done["name"]][0] for done in ran}
    idle = [name for name, (number, _) in planned.items() if number not in numbers]
    for name in idle:
        if bool((samples["broken_by"] == planned[name][0]).any()):
            raise DamagedError(f"samples are claimed to be broken by {name}, which did not run")
    for kind, clean in (("forwards", record["total"]), ("backwards", 0)):
        total = clean + sum(done[kind] for done in ran)
        if int(samples[kind].sum()) != total:
            raise DamagedError(f"the stages count {total} {kind}, and the samples {int(samples[kind].sum())}")
    verdict = record["verdict"]
    wanted = [name for name in idle if planned[name][1]["role"] != "escalation" or verdict["escalated"]]
    if verdict["complete"] and wanted:
        raise DamagedError(f"the verdict is claimed to be complete, and {wanted[0]} did not run")
    if verdict["complete"] and not record["suite"]["protocol"]:
        _shares(bundle)


def _shares(bundle: Bundle) -> None:
    """Raise unless each stage of a complete cascade attacked its share of the samples."""
    record, plan = bundle.record, {stage["name"]: stage for stage in bundle.record["suite"]["stages"]}
    left, watched = record["clean_correct"], None
    for done in record["stages"]:
        stage = plan[done["name"]]
        expected = math.ceil(stage["share"] * left) if stage["share"] < 1 else left
        if stage["role"] == "pilot":
            expected = min(left, pilot_size(record["total"]))
        if stage["role"] == "sentinel":  # all sentinel stages use one draw of samples
            expected = expected if watched is None else watched
            watched = expected - done["broken"]
        if done["attacked"] != expected:
            raise DamagedError(f"{done['name']} attacked {done['attacked']} samples, and its share was {expected}")
        left = done["left"]


def _verdict(bundle: Bundle) -> None:
    """Raise unless the trust and the flags agree."""
    record, verdict = bundle.record, bundle.record["verdict"]
    order = get_args(Trust)
    for flag in verdict["flags"]:
        if flag["raised"] != (flag["figure"] > flag["limit"]):
            raise DamagedError(f"flag {flag['name']!r} is raised or not against its own figure")
        if flag["raised"] and order.index(flag["trust"]) > order.index(verdict["trust"]):
            raise DamagedError(f"the verdict is {verdict['trust']} in spite of the flag {flag['name']!r}")
    if not verdict["complete"] and verdict["trust"] == "sound":
        raise DamagedError("the verdict is sound, though not complete")
    if verdict["complete"] and not record["suite"]["protocol"]:
        _flags(bundle)


def _flags(bundle: Bundle) -> None:
    """Raise unless a complete cascade has its flags, with figures from its counts, and escalated if one is raised."""
    record, verdict, plan = bundle.record, bundle.record["verdict"], bundle.record["suite"]["stages"]
    figures = {flag["name"]: flag["figure"] for flag in verdict["flags"]}
    missing = [name for name in MEASURED if name not in figures]
    if missing and record["clean_correct"]:
        raise DamagedError(f"the verdict is claimed to be complete, and the flag {missing[0]!r} was not measured")
    sentinels = [stage["name"] for stage in plan if stage["role"] == "sentinel"]
    broken = sum(done["broken"] for done in record["stages"] if done["name"] in sentinels)
    if sentinels and figures.get("sentinel broken") != broken:
        raise DamagedError(f"the sentinel broke {broken} samples, and the flag says {figures.get('sentinel broken')}")
    targeted = {stage["name"] for stage in plan if stage["attack"].get("attack") == "MultiTargeted"}
    climbs = [done["broken"] for done in record["stages"] if done["name"] in targeted]
    if climbs and figures.get("targeted ahead") != sum(climbs) / record["total"]:
        raise DamagedError("what the targeted stages broke is not what the flag 'targeted ahead' says")
    counts = [point["correct"] for point in record["curve"]]
    if counts and counts[0] and figures.get("accuracy levels off") != counts[-1] / counts[0]:
        raise DamagedError("where the curve ends is not what the flag 'accuracy levels off' says")
    doubt = any(flag["raised"] for flag in verdict["flags"]) and any(stage["role"] == "escalation" for stage in plan)
    if verdict["escalated"] != doubt:
        raise DamagedError("the verdict is escalated without a flag, or not in spite of one")
