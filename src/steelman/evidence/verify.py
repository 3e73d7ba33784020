"""Checks evidence without attacking again.

Without the model, the claims are checked against each other: see ``consistency``. With the model and the data, every
clean and adversarial image goes through the model again. The gradient at the pilot's images is computed again too.

Four claims cannot be shown without attacking:
- that no attack breaks a sample that is claimed to be robust;
- that the pilot measured its signs and the curve as it is written;
- that the attacks ran with the claimed settings;
- that the passes were counted right.

The first two are what an audit is for: see ``audit``. To check all four, run the evaluation again: the same settings
and seed give the same evidence.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import torch
from torch import nn

import steelman
from steelman.arguments import device_from, model_of, path_of, text_of
from steelman.data import DATASETS
from steelman.data.source import UNNAMED, Source, knows_classes, name_of
from steelman.errors import UserError
from steelman.evaluation.signs import SIGNS
from steelman.evidence.audit import Audit, audit
from steelman.evidence.bundle import TIMES, Bundle, DamagedError, read_bundle, weights_digest
from steelman.evidence.consistency import check_consistency, stranger
from steelman.evidence.gallery import check_gallery, gallery_of
from steelman.evidence.images import (
    Asked,
    check_clean,
    check_gradients,
    check_images,
    check_pictures,
    read_as_evaluated,
    some,
)
from steelman.evidence.page import PAGE, check_page

SHORTEST = 32  # digits of a seal: with fewer, a forger could try until his evidence has the same ones


class SealError(DamagedError):
    """The evidence has another seal than the published one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of a check: the counts of samples, and whether a model and data were given.

    `rounded` counts the images that are still adversarial after rounding to 8 bits. It is None without a model.
    `stranger` is a sentence if the suite is not one of steelman's, and `version` one if another version made the
    evidence. `page` is empty if the page was checked or is missing, else the reason why not. `unmeasured` are the signs
    that were not measured, and `unknown` are files that are no part of evidence. `audit` is the audit, or None.
    """

    seal: str
    samples: int
    broken: int
    robust: int
    model: bool
    data: bool
    rounded: int | None = None
    stranger: str = ""
    version: str = ""
    page: str = ""
    unmeasured: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    audit: Audit | None = None


def verify(
    folder: Path,
    *,
    model: nn.Module | None = None,
    source: Source | None = None,
    device: torch.device | None = None,
    seal: str | None = None,
    reattack: int | None = None,
    suite: str = "standard",
    salt: str | None = None,
) -> Checked:
    """Check the evidence in `folder`. The first false claim raises an error.

    For the folder of a run, it is the evidence in ``verdict``, or else in ``attacks``. Images are moved to `device`, or
    to the device of the model. `seal` is the published seal, or its first digits.

    With `reattack`, an audit attacks so many of the samples that are claimed to be robust, with the suite `suite`. The
    draw depends on the seal and on `salt`. By default, the salt is random. See `steelman.evidence.audit`.
    """
    folder, device = path_of("folder", folder), device_from("device", device)
    _check_given(model, source, reattack)
    bundle = read_bundle(folder)
    check_seal(bundle.seal, seal)
    record, samples = bundle.record, bundle.samples
    strange, kept = stranger(bundle), check_consistency(bundle)
    asked = None
    if model is not None:
        model = read_as_evaluated(model, source)
        if weights_digest(model) != record["weights"]:
            raise DamagedError("the model's weights are not those that were evaluated")
        asked = Asked(model, device, len(record["classes"]))
    if source is not None:
        _names(bundle, source)
        check_clean(bundle, source, asked)
    gallery = gallery_of(bundle)
    shown, pictured, rounded = check_images(bundle, gallery, source, asked)
    missing = (samples["broken_by"] >= 0) & ~shown
    if bool(missing.any()):
        raise DamagedError(f"no adversarial image for the broken samples {some(missing.nonzero()[:, 0])}")
    if gallery is not None:
        check_gallery(bundle, gallery, pictured)
        if asked is not None:
            check_pictures(bundle, gallery, asked)
    if source is not None and asked is not None:
        check_gradients(bundle, kept, source, asked)
    page = check_page(folder, bundle)
    done = None
    if reattack is not None and asked is not None and source is not None:
        done = audit(bundle, asked.model.to(asked.device), source, reattack, suite=suite, salt=salt)
        if done.rejected:
            raise DamagedError(done.text)
    other = bundle.version != steelman.__version__
    return Checked(
        seal=bundle.seal,
        samples=record["total"],
        broken=int(shown.sum()),
        robust=record["robust_correct"],
        model=model is not None,
        data=source is not None,
        rounded=rounded if model is not None else None,
        stranger=strange,
        version=f"steelman {bundle.version} made the evidence, and this is {steelman.__version__}" if other else "",
        page=page,
        unmeasured=() if kept.protocol or not len(kept.signs["rows"]) else tuple(SIGNS.keys() - kept.signs.keys()),
        unknown=_unknown(bundle),
        audit=done,
    )


def _check_given(model: nn.Module | None, source: Source | None, reattack: int | None) -> None:
    """Refuse arguments of other types, and a model or an audit without what it needs."""
    if source is not None and not isinstance(source, Source):
        raise UserError(
            f"source: expected a source, such as steelman.data.load('digits').test, got {type(source).__name__}"
        )
    if model is not None:
        model_of("model", model)
    if model is not None and source is None:
        raise UserError(
            "--data: expected the data with the model; without it no image can be compared with its clean one"
        )
    if reattack is not None and (model is None or source is None):
        raise UserError("--reattack: expected the model and the data with it")


def check_seal(found: str, seal: str | None) -> None:
    """Raise unless the evidence has the published seal. None asks for nothing."""
    if seal is None:
        return
    asked = text_of("seal", seal).strip().lower()
    if not re.fullmatch(f"[0-9a-f]{{{SHORTEST},64}}", asked):
        raise UserError(f"--seal: expected {SHORTEST} to 64 digits of 0-9 and a-f, got {seal[:80]!r}")
    if not found.startswith(asked):
        raise SealError(f"the evidence has the seal {found}, and the published one is {asked}")


def _unknown(bundle: Bundle) -> tuple[str, ...]:
    """Files beside the evidence that are no part of it."""
    known = {"evidence.json", TIMES, PAGE, "work", *bundle.record["files"]}
    return tuple(sorted(path.name for path in bundle.folder.iterdir() if path.name not in known))


def _names(bundle: Bundle, source: Source) -> None:
    """Raise unless classes and shape are those of the data. A model with more outputs has numbers as classes."""
    name, given = bundle.record["data"].split()[:1], name_of(source)
    if name and name[0] in DATASETS and given != UNNAMED and given.split()[:1] != name:
        raise DamagedError(f"the data are claimed to be {bundle.record['data']!r}, and these are {given!r}")
    claimed = bundle.record["classes"]
    numbers = [str(number) for number in range(len(claimed))]
    named = knows_classes(source) and len(source.classes) == len(claimed)
    if claimed not in ([list(source.classes), numbers] if named else [numbers]) and knows_classes(source):
        shown = ", ".join(map(str, source.classes[:5])) if named else f"0 .. {len(claimed) - 1}"
        raise DamagedError(
            f"the classes are not those of the data: expected {shown}, got {', '.join(claimed[:5])[:80]}"
        )
    if list(source.shape) != bundle.record["shape"]:
        raise DamagedError(f"expected images of shape {bundle.record['shape']}, got {list(source.shape)}")
