"""Pictures of frost: photographs of the user or of the package imagecorruptions, or a generated texture."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from steelman.arguments import home_of
from steelman.errors import UserError, shown
from steelman.rng import Key

# The released generator draws one of the first five of its six pictures.
NAMES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")
SCALES = {"cifar": 0.2, "imagenet": 1.0}  # the size of the pictures for each family
GENERATED = "generated"
# The generated texture: the decay of its fractals, and what was measured on random parts of the photographs.
DECAYS = (1.05, 1.3)
LEVELS = (0.41, 0.89)  # the mean of a part
SPREAD = 0.115  # the standard deviation within a part
TINT = (0.88, 1.02, 1.1)  # red, green and blue

LEAST = 64  # pixels along a side of a picture
MOST_PIXELS = 1 << 26


@functools.lru_cache(maxsize=1)
def _installed() -> Path | None:
    """The pictures of the package imagecorruptions. It is found, but not imported."""
    found = importlib.util.find_spec("imagecorruptions")
    places = [] if found is None else list(found.submodule_search_locations or [])
    folders = [Path(place) / "frost" for place in places]
    return next((folder for folder in folders if all((folder / name).is_file() for name in NAMES)), None)


def folder_of(pictures: str | None) -> Path | None:
    """The folder of the pictures. None means the generated texture."""
    if pictures == GENERATED:
        return None
    if pictures is None:
        return _installed()
    folder = home_of("pictures", pictures)
    try:
        missing = [name for name in NAMES if not (folder / name).is_file()]
    except OSError as error:
        raise UserError(f"pictures: {shown(pictures)} cannot be a folder ({error.strerror})") from None
    if missing:
        raise UserError(
            f"pictures: expected {NAMES[0]} to {NAMES[-1]} in {folder}, or {GENERATED!r}; {missing[0]} is missing"
        )
    return folder


def check(pictures: str | None) -> None:
    """Read all pictures, so that a wrong one is found before anything is measured."""
    folder = folder_of(pictures)
    for name in NAMES if folder is not None else ():
        picture = _picture(Path(folder or ".") / name, 1.0)
        if min(picture.shape[1:]) < LEAST:
            got = f"{picture.shape[1]} x {picture.shape[2]}"
            raise UserError(f"pictures: expected at least {LEAST} x {LEAST} pixels in {name}, got {got}")


def source(pictures: str | None) -> str:
    """Where the frost comes from."""
    folder = folder_of(pictures)
    return GENERATED if folder is None else f"pictures {_digest(folder)[:12]}"


@functools.lru_cache(maxsize=4)
def _digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for name in NAMES:
        whole.update((folder / name).read_bytes())
    return whole.hexdigest()


@functools.lru_cache(maxsize=16)
def _picture(path: Path, scale: float) -> Tensor:
    """A picture in [0, 1] of shape (3, H, W)."""
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise UserError(f"{path}: expected at most {MOST_PIXELS:,} pixels")
            values = np.asarray(opened.convert("RGB"))
    except (OSError, Image.DecompressionBombError) as error:
        raise UserError(f"{path}: the picture cannot be read ({str(error) or type(error).__name__})") from None
    picture = torch.from_numpy(values.copy()).movedim(-1, 0).float() / 255
    return picture if scale == 1 else _resized(picture, scale)


def _resized(picture: Tensor, scale: float) -> Tensor:
    size = [round(side * scale) for side in picture.shape[1:]]
    return F.interpolate(picture[None], size, mode="bilinear", align_corners=False)[0]


def parts(pictures: str | None, size: tuple[int, int], family: str, index: Tensor, key: Key) -> Tensor:
    """A part of a picture for each sample, of shape (N, 3, height, width)."""
    folder = folder_of(pictures)
    if folder is None:
        return texture(size, index.cpu(), key)
    found = []
    for which, down, across in key.uniform(index.cpu(), (3,), torch.float64).tolist():
        picture = _picture(folder / NAMES[int(which * len(NAMES))], SCALES[family])
        # A part needs room to move, so a small picture is enlarged.
        need = max((side + 1) / have for side, have in zip(size, picture.shape[1:], strict=True))
        if need > 1:
            picture = _resized(picture, need * 1.1)
        top, left = (
            int(share * (have - side))
            for share, have, side in zip((down, across), picture.shape[1:], size, strict=True)
        )
        found.append(picture[:, top : top + size[0], left : left + size[1]])
    return torch.stack(found)


def texture(size: tuple[int, int], index: Tensor, key: Key) -> Tensor:
    """A texture like frost on a window: needles along a fractal's ridges, bluish white.

    Its brightness, its spread within a part and between parts, and its colour are those of the photographs.
    """
    from steelman.corruptions.weather import plasma  # here, because that file imports this one

    side = max(*size, 64)  # fewer pixels would show one ridge alone
    key = key.fold("frost")
    layers = [plasma(side, decay, index, key.fold(number)) for number, decay in enumerate(DECAYS)]
    ridges = sum(1 - (2 * layer - 1).abs() for layer in layers)[:, : size[0], : size[1]]  # type: ignore[index]
    apart = ridges - ridges.mean(dim=(1, 2), keepdim=True)
    needles = apart / apart.std(dim=(1, 2), keepdim=True)
    level = LEVELS[0] + (LEVELS[1] - LEVELS[0]) * key.fold("level").uniform(index, (1, 1), torch.float64)
    bright = (level + SPREAD * needles)[:, None] * torch.tensor(TINT, dtype=torch.float64).view(1, 3, 1, 1)
    return bright.clamp(0, 1).float()
