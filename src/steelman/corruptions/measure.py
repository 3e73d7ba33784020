"""Measures models on corrupted images, cell by cell. An interrupted call goes on from its finished cells."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steelman.arguments import path_of, text_of
from steelman.corruptions import SEVERITIES, STANDARD
from steelman.corruptions.accuracy import CorruptionAccuracy
from steelman.corruptions.base import Corruption, Family, check_images, check_shape
from steelman.corruptions.official import Official
from steelman.corruptions.plan import Plan
from steelman.corruptions.record import (
    GENERATED,
    NAME,
    PARTS,
    Claimed,
    check_claims,
    differs,
    read_record,
    write_record,
)
from steelman.corruptions.weather import Frost
from steelman.data.source import ArraySource, Source, name_of
from steelman.errors import UserError, shown
from steelman.evaluation.checks import as_model, check_contract, check_model, predictions
from steelman.evaluation.evaluate import versions
from steelman.evaluation.manners import check_manners
from steelman.evaluation.stages import whole
from steelman.evidence.bundle import data_digest, device_of, weights_digest
from steelman.evidence.ledger import Work, digests, locked, tidy
from steelman.precision import full_precision
from steelman.progress import Ticker
from steelman.rng import Key
from steelman.threat import ThreatModel

BLOCK = 1 << 25  # values of the images that are in memory at once
THREAT = ThreatModel(eps=1 / 255)  # its range is that of the images; the radius is not used


def evaluate_corruptions(
    model: nn.Module,
    data: Source | tuple[Tensor, Tensor],
    *,
    corruptions: Sequence[str] = STANDARD,
    severities: Sequence[int] = SEVERITIES,
    family: Family = "auto",
    exact: bool = True,
    frost: str | None = None,
    out: Path | str | None = None,
    name: str = "model",
    seed: int = 0,
    batch_size: int = 256,
) -> CorruptionAccuracy:
    """The accuracy of a model on corrupted images, for each corruption and severity.

    The images are generated from `data`, so they are no benchmark's. Each sample has noise of its own, which depends on
    the seed and its place in the data alone.

    Arguments: `data` is a source, or images in [0, 1] and labels. `family` are the constants: "auto" means those of
    CIFAR-10-C for images below 64 pixels, and those of ImageNet-C above. `exact` cuts the images to 8 bits, as the
    published sets are. `frost` is a folder with pictures of frost, or "generated". `out` is a folder for the evidence.
    If the call is interrupted, the same call goes on there.

    Hendrycks and Dietterich (2019), "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations".

    >>> from steelman.heads import linear
    >>> net = nn.Sequential(nn.Flatten(), linear(28 * 28, 3))
    >>> x, y = torch.rand(8, 1, 28, 28), torch.randint(3, (8,))
    >>> found = evaluate_corruptions(net, (x, y), corruptions=["fog", "contrast"], severities=[1, 5])
    >>> found.total, len(found.cells)
    (8, 4)
    """
    plan = Plan(
        corruptions=corruptions,  # type: ignore[arg-type]  # Plan takes any sequence
        severities=severities,  # type: ignore[arg-type]
        family=family,
        exact=exact,
        frost=frost,
        seed=whole("seed", seed),
    )
    name = text_of("name", name)
    places = None if out is None else {name: path_of("out", out)}
    return measure({name: model}, data, plan, places=places, batch_size=batch_size)[name]


def measure(
    models: Mapping[str, nn.Module],
    data: Source | tuple[Tensor, Tensor],
    plan: Plan,
    *,
    official: Official | None = None,
    places: Mapping[str, Path] | None = None,
    batch_size: int = 256,
) -> dict[str, CorruptionAccuracy]:
    """The accuracy of some models on the same corrupted images. Each model has a folder of its own in `places`.

    With `official`, the images are those of a published set. All models must be on the device of the first one.
    """
    if not isinstance(data, Source) and not (isinstance(data, tuple) and len(data) == 2):
        raise UserError(f"data: expected (images, labels) or a source, got {shown(data)}")
    source = ArraySource(*data) if isinstance(data, tuple) else data
    check_shape(source.shape, "data")
    batch_size = whole("batch_size", batch_size, 1)
    for name, model in models.items():
        with _about(name, models):
            check_model(model)
    device = device_of(next(iter(models.values())))
    if official is not None:
        both = tuple(name for name in plan.corruptions if name in official.corruptions)
        if not both:
            raise UserError(
                f"official: expected one of {', '.join(plan.corruptions)}, and {official.name} there has "
                f"{', '.join(official.corruptions)}"
            )
        plan = dataclasses.replace(plan, corruptions=both)
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False), full_precision():
        for name, model in models.items():
            with _about(name, models):
                check_contract(model, source, THREAT, device)
                check_manners(model, source, device, most=batch_size)
        images = _images(plan, source, official)
        check_images(source.images(torch.arange(1)))
        with contextlib.ExitStack() as stack:
            if places is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                places = {name: folder / str(number) for number, name in enumerate(models)}
            digest = digest_of(source)
            claims = {name: claims_of(name, model, source, plan, official, digest) for name, model in models.items()}
            for name in models:
                check_claims(claims[name])
                _finish_deleting(places[name], claims[name])
            found = {name: read_record(places[name], claims[name]) for name in models if (places[name] / NAME).exists()}
            works = {
                name: stack.enter_context(Work(places[name] / "work", claims[name], PARTS))
                for name in models
                if name not in found
            }
            if works:
                asked = {name: models[name] for name in works}
                parts = _measured(asked, source, plan, images, works, device, batch_size)
                for name, work in works.items():
                    found[name] = write_record(places[name], claims[name], parts[name])
                    work.close()
    return {name: found[name].accuracy for name in models}


def _images(plan: Plan, source: Source, official: Official | None) -> list[tuple[tuple[str, int], Source]]:
    """Where the images of each cell come from: the clean images, or the cell of a published set."""
    cells = plan.cells()
    return [(cell, source if official is None else official.cell(*cell)) for cell in cells]


def digest_of(source: Source) -> str:
    """The checksum of all images and labels."""
    rows = torch.split(torch.arange(len(source)), rows_of(source))
    return data_digest(torch.cat([digests(source.images(at), source.labels[at]) for at in rows]))


def _finish_deleting(place: Path, claims: Mapping[str, Any]) -> None:
    """Delete the folder of the batches if a killed call had written all evidence, and not deleted it."""
    if (place / NAME).is_file() and (place / "work").exists() and not differs(place, claims):
        with locked(place, "measuring"):
            shutil.rmtree(place / "work")
            tidy(place)


def claims_of(
    name: str, model: nn.Module, source: Source, plan: Plan, official: Official | None, digest: str
) -> dict[str, Any]:
    """The settings of a measurement, which its evidence holds. `digest` is the checksum of the data."""
    uses_frost = official is None and "frost" in plan.corruptions
    return {
        "model": name,
        "weights": weights_digest(model),
        "data": name_of(source),
        "total": len(source) if official is None else len(official.cell(plan.corruptions[0], plan.severities[0])),
        "clean_total": len(source),
        "data_digest": digest,
        "shape": list(source.shape),
        "classes": list(source.classes),
        "source": GENERATED if official is None else official.name,
        "corruptions": list(plan.corruptions),
        "severities": list(plan.severities),
        "settings": plan.described(source.shape) if official is None else {},
        "seed": plan.seed,
        "frost": Frost(pictures=plan.frost).source() if uses_frost else "",
        "versions": {**versions(), "pillow": importlib.metadata.version("pillow")},
    }


def _measured(
    models: Mapping[str, nn.Module],
    source: Source,
    plan: Plan,
    images: Sequence[tuple[tuple[str, int], Source]],
    works: Mapping[str, Work],
    device: torch.device,
    batch_size: int,
) -> dict[str, Claimed]:
    """The answers of each model to the clean images and to those of each cell. Finished parts are read."""
    key = Key(plan.seed).fold("corruptions")
    guesses: dict[str, list[Tensor]] = {name: [] for name in models}
    checksums: dict[str, list[str]] = {name: [] for name in models}

    def compute(model: nn.Module, title: str, made: Loaded, number: int) -> dict[str, Tensor]:
        x = made.block(number)
        guess = [predictions(model, as_model(model, one, device), title) for one in torch.split(x, batch_size)]
        return {"guess": torch.cat(guess), "bytes": made.sums[number]}

    done, all_of_them = 0, len(source) + sum(len(origin) for _, origin in images)
    with Ticker("corruptions") as tell:
        for cell, origin in [(None, source), *images]:
            made = Loaded(origin, None if cell is None or origin is not source else plan.build(*cell), key)
            title = "clean" if cell is None else f"{cell[0]}-{cell[1]}"
            found: dict[str, list[dict[str, Tensor]]] = {name: [] for name in models}
            for number, rows in enumerate(made.rows):
                for name, model in models.items():
                    doing = functools.partial(compute, model, title, made, number)
                    found[name].append(works[name].batch(f"{title}-{number:04d}", doing))
                done += len(rows)
                tell(title, done, all_of_them)
            for name, parts in found.items():
                guesses[name].append(torch.cat([part["guess"] for part in parts]))
                checksums[name].append(_joined([part["bytes"] for part in parts]))
    return {
        name: Claimed(
            clean=guesses[name][0],
            guess=torch.stack(guesses[name][1:]),
            clean_label=source.labels,
            label=images[0][1].labels,
            images=tuple(checksums[name][1:]),
        )
        for name in models
    }


class Loaded:
    """The images of a cell, in blocks that fit into the memory. A block is kept until another one is asked for."""

    def __init__(self, origin: Source, corruption: Corruption | None, key: Key) -> None:
        self.origin, self.corruption, self.key = origin, corruption, key
        self.rows = torch.split(torch.arange(len(origin)), rows_of(origin))
        self.sums: dict[int, Tensor] = {}
        self._kept: tuple[int, Tensor] | None = None

    def block(self, number: int) -> Tensor:
        """The images of a block. Its checksum is noted."""
        if self._kept is None or self._kept[0] != number:
            rows = self.rows[number]
            x = self.origin.images(rows)
            x = x if self.corruption is None else self.corruption(x, index=rows, key=self.key)
            self._kept, self.sums[number] = (number, x), _checksum(x)
        return self._kept[1]

    def blocks(self) -> Iterator[Tensor]:
        for number in range(len(self.rows)):
            yield self.block(number)

    def checksum(self) -> str:
        """The checksum of all images, once all blocks were made."""
        return _joined([self.sums[number] for number in range(len(self.rows))])


def rows_of(source: Source) -> int:
    """How many images of a source are in memory at once."""
    return max(BLOCK // max(math.prod(source.shape), 1), 1)


def _checksum(x: Tensor) -> Tensor:
    """The SHA-256 of images, as 32 bytes. Images of whole grey levels count as their 8 bits."""
    values = (x * 255).round().to(torch.uint8)
    content = values if torch.equal(values.to(x.dtype) / 255, x) else x
    digest = hashlib.sha256(content.contiguous().cpu().numpy().tobytes()).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _joined(sums: Sequence[Tensor]) -> str:
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in sums)).hexdigest()


@contextlib.contextmanager
def _about(name: str, models: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put the name of a model before the message of an error, if there are several models."""
    try:
        yield
    except UserError as error:
        if len(models) == 1:
            raise
        raise UserError(f"{name}: {error}") from None
