"""The gallery in the evidence: the clean and the adversarial images of a few samples."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from steelman.evidence.bundle import GALLERY, PICTURES, Bundle, DamagedError
from steelman.evidence.ledger import WRONG, digests


@dataclasses.dataclass(frozen=True)
class Shown:
    """The samples of a gallery. `tried` is the number of the stage that attacked a sample last, or -1 for none."""

    rows: Tensor
    tried: Tensor
    clean: Tensor
    adversarial: Tensor


def gallery_of(bundle: Bundle) -> Shown | None:
    """The gallery of a bundle, with rows in rising order. None if there is no gallery."""
    if GALLERY not in bundle.record["files"]:
        return None
    part, path = bundle.tensors(GALLERY), bundle.folder / GALLERY
    if part.keys() != {"rows", "tried", *PICTURES}:
        raise DamagedError(f"{path}: expected rows, tried, clean and adversarial, got {', '.join(sorted(part))}")
    rows, tried, clean, adversarial = (part[name] for name in ("rows", "tried", *PICTURES))
    if any(one.dtype != torch.int64 or one.dim() != 1 or len(one) != len(rows) for one in (rows, tried)):
        raise DamagedError(f"{path}: expected a list of rows, and for each the stage that attacked it last")
    if clean.dtype not in (torch.float32, torch.float64) or clean.dim() != 4 or len(clean) != len(rows):
        got = f"{clean.dtype} of shape {tuple(clean.shape)}"
        raise DamagedError(f"{path}: expected {len(rows)} images in float32 or float64, got {got}")
    if (adversarial.dtype, adversarial.shape) != (clean.dtype, clean.shape):
        raise DamagedError(f"{path}: expected adversarial images of the clean images' type and shape")
    if clean.shape[1:] != (shape := tuple(bundle.record["shape"])):
        raise DamagedError(f"{path}: expected images of shape {shape}, got {tuple(clean.shape[1:])}")
    n = len(bundle.samples["label"])
    if len(rows) == 0 or int(rows[0]) < 0 or bool((rows.diff() <= 0).any()) or int(rows[-1]) >= n:
        raise DamagedError(f"{path}: expected rising rows, each once, between 0 and {n - 1}")
    return Shown(rows, tried, clean, adversarial)


def check_gallery(bundle: Bundle, gallery: Shown, broken: dict[int, Tensor]) -> None:
    """Raise unless the images belong to their samples. `broken` holds the images that broke samples, by row."""
    rows, samples, stages = gallery.rows, bundle.samples, len(bundle.record["suite"]["stages"])
    broken_by, low, high = samples["broken_by"][rows], bundle.threat.low, bundle.threat.high
    if bool((broken_by == WRONG).any()):
        raise _damaged(rows[broken_by == WRONG], "wrong without any attack, and not for the gallery")
    if bool(((gallery.tried < -1) | (gallery.tried >= stages)).any()):
        raise DamagedError("the gallery names a stage that the suite does not have")
    # A broken sample must show the image that broke it. A sample that no stage attacked must show its clean image. For
    # any other sample, the evidence holds no second copy to compare with.
    expected = [
        broken.get(row, clean if tried < 0 else image)
        for row, tried, clean, image in zip(
            rows.tolist(), gallery.tried.tolist(), gallery.clean, gallery.adversarial, strict=True
        )
    ]
    wrong = {
        "broken by another stage": (broken_by >= 0) & (gallery.tried != broken_by),
        f"shown by images that leave the range {low:g} .. {high:g}": ~_within(gallery, low, high),
        "shown by another clean image": digests(gallery.clean, samples["label"][rows]) != samples["digest"][rows],
        "shown by an image outside the threat model": ~bundle.threat.contains(gallery.adversarial, gallery.clean),
        "shown by another adversarial image than its own": ~_equal(gallery.adversarial, expected),
    }
    for what, bad in wrong.items():
        if bool(bad.any()):
            raise _damaged(rows[bad], what)


def _damaged(rows: Tensor, what: str) -> DamagedError:
    return DamagedError(f"the gallery: sample {int(rows[0])} is {what}")


def _within(gallery: Shown, low: float, high: float) -> Tensor:
    images = torch.cat((gallery.clean, gallery.adversarial), dim=1).flatten(1)
    return ((images >= low) & (images <= high)).all(dim=1)  # False for NaN


def _equal(images: Tensor, others: list[Tensor]) -> Tensor:
    """Which images equal the others in shape, type and pixels."""
    return torch.tensor([torch.equal(one, other) for one, other in zip(images, others, strict=True)])
