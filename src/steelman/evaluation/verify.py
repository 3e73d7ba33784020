"""Checking evidence without attacking again: nothing here knows how an attack works.

Without the model, what the evidence says is checked against itself; with `model` and `data`, every adversarial image is
put to the model, and every claim is counted anew.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor, nn

from steelman.data.source import Source
from steelman.errors import UserError
from steelman.evaluation.evidence import Bundle, DamagedError, data_digest, read_bundle, weights_digest
from steelman.evaluation.ledger import ROBUST, WRONG, digests
from steelman.evaluation.result import interval
from steelman.threat import ThreatModel

BATCH = 256


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
    """Check the evidence in `folder`; raise with the first thing that is not as claimed."""
    bundle = read_bundle(folder)
    record, samples = bundle.record, bundle.samples
    _counts(bundle)
    if model is not None and weights_digest(model) != record["weights"]:
        raise DamagedError("the model's weights are not those that were evaluated")
    if source is not None:
        _same_data(bundle, source)
    if model is not None and source is None:
        raise UserError(
            "--data: expected the data with the model; without it no image can be compared with its clean one"
        )
    threat, shown, rounded = ThreatModel(**record["threat"]), torch.zeros(len(samples["label"]), dtype=torch.bool), 0
    for rows, images in bundle.images():
        if bool(shown[rows].any()) or bool((samples["broken_by"][rows] < 0).any()):
            raise DamagedError(
                "an adversarial image belongs to a sample that is not claimed to be broken, or comes twice"
            )
        shown[rows] = True
        if bool((images < threat.low).any()) or bool((images > threat.high).any()) or not images.isfinite().all():
            raise DamagedError(f"adversarial images {_some(rows)} leave the range {threat.low:g} .. {threat.high:g}")
        if source is not None:
            for part, x_adv in zip(torch.split(rows, BATCH), torch.split(images, BATCH), strict=True):
                rounded += _examples(part, x_adv, samples, source, threat, model, device)
    missing = (samples["broken_by"] >= 0) & ~shown
    if bool(missing.any()):
        raise DamagedError(f"no adversarial image for the broken samples {_some(missing.nonzero()[:, 0])}")
    if model is not None and source is not None:
        _clean(samples, source, model, device)
    return Checked(
        seal=bundle.seal,
        samples=len(samples["label"]),
        broken=int((samples["broken_by"] >= 0).sum()),
        robust=int(record["robust_correct"]),
        model=model is not None,
        data=source is not None,
        rounded=rounded if model is not None else None,
    )


def _counts(bundle: Bundle) -> None:
    """What is claimed of all must follow from what is claimed of each."""
    record, samples = bundle.record, bundle.samples
    n = record["total"]
    for name, column in samples.items():
        if column.shape != (n,):
            raise DamagedError(f"samples.safetensors: expected {n} rows of {name!r}, got {tuple(column.shape)}")
    right, robust = samples["broken_by"] != WRONG, samples["broken_by"] == ROBUST
    expected = {
        "clean_correct": int(right.sum()),
        "robust_correct": int(robust.sum()),
        "data_digest": data_digest(samples["digest"]),
    }
    for key, value in expected.items():
        if record[key] != value:
            raise DamagedError(f"evidence.json: {key} is {record[key]}, and the samples say {value}")
    if bool(((samples["clean"] == samples["label"]) != right).any()):
        raise DamagedError("a sample is counted as right or wrong against what the model said of it")
    fallen = samples["broken_by"] >= 0
    if bool((fallen & (samples["guess"] == samples["label"])).any()):
        raise DamagedError("a sample is claimed to be broken by an image that the model gets right")
    for number, stage in enumerate(record["suite"]["stages"]):
        done = {entry["name"]: entry for entry in record["stages"]}.get(stage["name"])
        count = int((samples["broken_by"] == number).sum())
        if done is None and count:
            raise DamagedError(f"{count} samples are claimed to be broken by {stage['name']}, which did not run")
        if done is not None and not record["suite"]["protocol"] and done["broken"] != count:
            raise DamagedError(
                f"{stage['name']} is claimed to have broken {done['broken']}, and the samples say {count}"
            )
    verdict = record["verdict"]
    if verdict is not None and (verdict["correct"], verdict["total"]) != (record["robust_correct"], n):
        raise DamagedError("the verdict's counts are not those of the samples")
    interval(record["robust_correct"], n)


def _same_data(bundle: Bundle, source: Source) -> None:
    n, samples = bundle.record["total"], bundle.samples
    if len(source) < n:
        raise DamagedError(f"expected at least {n} images, got {len(source)}")
    for rows in torch.split(torch.arange(n), BATCH):
        labels = source.labels[rows]
        wrong = rows[
            (labels != samples["label"][rows]) | (digests(source.images(rows), labels) != samples["digest"][rows])
        ]
        if len(wrong):
            raise DamagedError(f"the data are not those that were evaluated: samples {_some(wrong)} differ")


def _examples(
    rows: Tensor,
    x_adv: Tensor,
    samples: dict[str, Tensor],
    source: Source,
    threat: ThreatModel,
    model: nn.Module | None,
    device: torch.device | None,
) -> int:
    """Radius and prediction of some adversarial images; how many fool the model after rounding to 8 bits."""
    x, y = source.images(rows).to(x_adv.dtype), samples["label"][rows]
    far = rows[~threat.contains(x_adv, x)]
    if len(far):
        raise DamagedError(f"adversarial images {_some(far)} are outside the threat model")
    if model is None:
        return 0
    guess = _answers(model, x_adv, device)
    other = rows[guess != samples["guess"][rows]]
    if len(other) or bool((guess == y).any()):
        raise DamagedError(f"the model does not say what is claimed of the adversarial images {_some(other)}")
    steps = (x_adv - threat.low) / (threat.high - threat.low) * 255
    rounded = threat.low + steps.round() / 255 * (threat.high - threat.low)
    return int((_answers(model, rounded.clamp(threat.low, threat.high), device) != y).sum())


def _clean(samples: dict[str, Tensor], source: Source, model: nn.Module, device: torch.device | None) -> None:
    for rows in torch.split(torch.arange(len(samples["label"])), BATCH):
        guess = _answers(model, source.images(rows), device)
        # Two classes that tie but for a rounding may change places in another batch.
        other = rows[(guess != samples["clean"][rows]) & (samples["lead"][rows].abs() > 1e-4)]
        if len(other):
            raise DamagedError(f"the model does not say what is claimed of the clean images {_some(other)}")


def _answers(model: nn.Module, x: Tensor, device: torch.device | None) -> Tensor:
    kinds = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    x = x.to(device or "cpu", torch.float64 if kinds == {torch.float64} else torch.float32)
    modes = [module.training for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            answer: Tensor = model(x).argmax(dim=1).cpu()
        return answer
    finally:
        for module, training in zip(model.modules(), modes, strict=True):
            module.training = training


def _some(rows: Tensor) -> str:
    shown = ", ".join(map(str, rows[:5].tolist()))
    return shown + (f" and {len(rows) - 5} more" if len(rows) > 5 else "")
