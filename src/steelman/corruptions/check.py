"""Checks the evidence of a measurement on corrupted images.

Without the model, the counts are checked against the answers, and the seal against the content. With the model and the
data, the images of each cell are made again, and the model answers again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor, nn

import steelman
from steelman.arguments import model_of, path_of, text_of
from steelman.attacks.base import logits_of, untouched
from steelman.bounded import read_bytes
from steelman.corruptions.measure import Loaded, digest_of
from steelman.corruptions.official import Official
from steelman.corruptions.plan import Plan
from steelman.corruptions.record import GENERATED, MOST_BYTES, NAME, Record, read_record
from steelman.corruptions.weather import Frost
from steelman.data.source import Source, knows_classes
from steelman.errors import UserError
from steelman.evaluation.checks import as_model, check_finite
from steelman.evidence.bundle import DamagedError, device_of, weights_digest
from steelman.evidence.verify import check_seal
from steelman.losses import spread
from steelman.precision import full_precision
from steelman.progress import Ticker
from steelman.report import corruptions as page
from steelman.rng import Key

NEAR = 1e-3  # a share of the spread of the logits: a nearer lead may turn on another machine
APART = 0.01  # the most that the accuracy of a cell may differ if its images come out otherwise on this machine


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedCorruptions:
    """The result of a check. `others` are the cells whose images come out otherwise here, `skipped` those not made."""

    seal: str
    cells: int
    samples: int
    model: bool
    data: bool
    others: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    near: int = 0
    version: str = ""

    @property
    def text(self) -> str:
        """The result in a few sentences."""
        done = self.cells - len(self.skipped)
        said = [f"The counts of {self.cells} cells of {self.samples:,} samples follow from the answers."]
        if self.model and done > len(self.others):
            same = done - len(self.others)
            said.append(f"The model answered the images of {same} cells again, and gave the same answers.")
        elif self.model:
            said.append("The model was asked about the clean images alone.")
        else:
            said.append("The model was not asked: give --model and --data.")
        if self.near:
            said.append(f"In {self.near:,} answers two classes lead by less than a rounding, so either was accepted.")
        if self.others:
            said.append(
                f"The images of {len(self.others)} cells come out otherwise here, such as {self.others[0]}: of these, "
                f"only the accuracy was checked, to {100 * APART:g} points."
            )
        if self.skipped:
            said.append(f"Not checked: {', '.join(self.skipped)}. Give their images with --official or --frost.")
        return " ".join([*said, *([f"{self.version}."] if self.version else [])])


def verify_corruptions(
    folder: Path | str,
    *,
    model: nn.Module | None = None,
    source: Source | None = None,
    official: Official | None = None,
    frost: str | None = None,
    seal: str | None = None,
    batch_size: int = 256,
) -> CheckedCorruptions:
    """Check the evidence in `folder`. The first false claim raises an error.

    `official` is the published set, if the evidence is about one. `frost` are the pictures of frost.
    """
    folder = path_of("folder", folder)
    if (model is None) != (source is None):
        raise UserError("expected the model and the data together")
    found = read_record(folder)
    check_seal(found.seal, None if seal is None else text_of("seal", seal))
    _check_page(found)
    record = found.record
    others: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    near = 0
    if model is not None and source is not None:
        model_of("model", model)
        if weights_digest(model) != record["weights"]:
            raise DamagedError("the model's weights are not those that were measured")
        _check_data(found, source)
        with torch.inference_mode(False), full_precision():
            others, skipped, near = _check_cells(found, model, source, official, frost, batch_size)
    made_by = str(record["versions"].get("steelman", "unknown"))
    return CheckedCorruptions(
        seal=found.seal,
        cells=len(found.cells),
        samples=record["total"],
        model=model is not None,
        data=source is not None,
        others=others,
        skipped=skipped,
        near=near,
        version=f"steelman {made_by} made the evidence, and this is {steelman.__version__}"
        if made_by != steelman.__version__
        else "",
    )


def _check_page(found: Record) -> None:
    """Raise if the folder has a page that shows anything else than the evidence."""
    path = found.folder / "report.html"
    if found.record["versions"].get("steelman") != steelman.__version__ or not path.is_file():
        return  # another version draws another page
    if read_bytes(path, most_bytes=MOST_BYTES) != page.render([found.accuracy]).encode():
        raise DamagedError(f"{path} does not show what {NAME} holds; delete it, or make it again")


def _check_data(found: Record, source: Source) -> None:
    record = found.record
    if list(source.shape) != record["shape"]:
        raise DamagedError(f"expected images of shape {record['shape']}, got {list(source.shape)}")
    if len(source) != record["clean_total"]:
        raise DamagedError(f"expected {record['clean_total']:,} images, got {len(source):,}; see --samples")
    if knows_classes(source) and list(source.classes) != record["classes"]:
        raise DamagedError("the classes are not those of the data")
    if not torch.equal(found.claimed.clean_label, source.labels.to(torch.int32)):
        raise DamagedError("the labels of the clean images are not those of the data")
    if digest_of(source) != record["data_digest"]:
        raise DamagedError("the clean images and labels are not those that were measured")


def _check_cells(
    found: Record, model: nn.Module, source: Source, official: Official | None, frost: str | None, batch_size: int
) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Make the images of each cell again, and ask the model.

    Returns the cells with other images, those skipped, and how many answers could be either of two classes.
    """
    record = found.record
    frost = record["frost"] if record["frost"] == "generated" else frost
    plan = Plan(
        corruptions=tuple(record["corruptions"]),
        severities=tuple(record["severities"]),
        family=record["settings"].get("family", "auto"),
        exact=record["settings"].get("exact", True),
        frost=frost,
        seed=record["seed"],
    )
    generated = record["source"] == GENERATED
    if generated and plan.described(source.shape) != record["settings"]:
        raise DamagedError("the constants of the corruptions are not those of their severities")
    if not generated and official is not None and official.name != record["source"]:
        raise UserError(f"--official: expected {record['source']}, got {official.name}")
    other_frost = generated and record["frost"] and Frost(pictures=frost).source() != record["frost"]
    key = Key(plan.seed).fold("corruptions")
    clean = Loaded(source, None, key)
    _, near = _compare(found.claimed.clean, found.claimed.clean_label, model, clean, batch_size, "clean")
    others, skipped = [], []
    with Ticker("verify") as tell:
        for at, (name, severity) in enumerate(found.cells):
            title = f"{name} {severity}"
            tell(title, at, len(found.cells))
            if (other_frost and name == "frost") or (not generated and official is None):
                skipped.append(title)
                continue
            origin = source if official is None or generated else official.cell(name, severity)
            if not torch.equal(origin.labels.to(torch.int32), found.claimed.label):
                raise DamagedError(f"{title}: the labels are not those of the data")
            made = Loaded(origin, plan.build(name, severity) if generated else None, key)
            same, close = _compare(
                found.claimed.guess[at], found.claimed.label, model, made, batch_size, title, found.claimed.images[at]
            )
            near += close
            if not same:
                others.append(title)
    return tuple(others), tuple(skipped), near


def _compare(
    claimed: Tensor, label: Tensor, model: nn.Module, made: Loaded, batch_size: int, title: str, images: str = ""
) -> tuple[bool, int]:
    """Raise unless the model gives the claimed answers.

    Returns whether the images are those that were measured, and how many answers could be either of two classes.
    """
    guesses, allowed, done = [], [], 0
    for x in made.blocks():
        for part in torch.split(x, batch_size):
            logits = _logits(model, part, title)
            said = claimed[done : done + len(part)].to(logits.device, torch.int64)
            done += len(part)
            known = said < logits.shape[1]
            behind = logits.amax(dim=1) - logits.gather(1, torch.where(known, said, 0)[:, None])[:, 0]
            guesses.append(logits.argmax(dim=1).cpu().to(torch.int32))
            allowed.append((known & (behind <= NEAR * spread(logits))).cpu())
    guess, fits = torch.cat(guesses), torch.cat(allowed)
    if images and made.checksum() != images:
        before, after = (float((one == label).double().mean()) for one in (claimed, guess))
        if abs(before - after) > APART:
            raise DamagedError(
                f"{title}: the claimed accuracy is {100 * before:.1f}%, and here it is {100 * after:.1f}%; the images "
                "come out otherwise too"
            )
        return False, 0
    near = (guess != claimed) & fits
    wrong = (guess != claimed) & ~fits
    if bool(wrong.any()) or int(near.sum()) > max(1, APART * len(claimed)):
        bad = wrong if bool(wrong.any()) else near
        first = int(bad.nonzero()[0])
        raise DamagedError(
            f"{title}: {int(bad.sum())} answers are not those of the model, the first for sample {first}: claimed "
            f"{int(claimed[first])}, got {int(guess[first])}"
        )
    return True, int(near.sum())


def _logits(model: nn.Module, x: Tensor, title: str) -> Tensor:
    with untouched(model), torch.no_grad():
        logits = logits_of(model, as_model(model, x, device_of(model)))
    check_finite(logits, title)
    return logits
