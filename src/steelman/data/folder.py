"""Images in folders, one folder to a class, decoded when they are asked for."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from steelman.arguments import check_printable
from steelman.data.source import UNNAMED
from steelman.errors import UserError, shown
from steelman.rng import Key

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# Without this list, Pillow would go by the content alone, and give PostScript to another program.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
MOST_PIXELS = 1 << 26  # of one image: decoding more would take gigabytes
SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
ATTEMPTS = 10
LONGEST = 50


class FolderSource:
    """The images ``root/<class>/*.jpg`` (or png and others), as RGB of `size` x `size`.

    Without a key, the shorter side is resized to `resize` and the centre cropped. With a key, a random part of the
    image is resized, and mirrored with a chance of 1/2. The part has 8% to 100% of the area and an aspect ratio of 3/4
    to 4/3. This is the crop of Szegedy et al. (2015), "Going deeper with convolutions". A file's rotation tag is
    ignored, as is usual.
    """

    def __init__(
        self, root: Path, *, size: int = 224, resize: int = 256, workers: int = 0, name: str = UNNAMED
    ) -> None:
        """An evaluation reads the files with `workers` processes (0: its own), and records call the images `name`."""
        if not 1 <= size <= resize:
            raise UserError(f"expected 1 <= size <= resize, got size {size} and resize {resize}")
        if workers < 0:
            raise UserError(f"workers: expected 0 or more processes, got {workers}")
        self.root, self.size, self.resize = root, size, resize
        self.workers, self.name = workers, name
        self.classes, names, labels = _scan(root)
        # One array, not a list: reading a list changes its reference counts, so each worker would copy its memory.
        self._names = np.array(names)
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.shape = (3, size, size)

    def __len__(self) -> int:
        return len(self._names)

    def path(self, index: int) -> Path:
        """The file of sample `index`."""
        return self.root / os.fsdecode(self._names[index])

    def images(self, index: Tensor, key: Key | None = None) -> Tensor:
        index = index.to("cpu")
        pixels = np.empty((len(index), self.size, self.size, 3), np.uint8)
        noise = None
        if key is not None and len(index):
            noise = key.fold("crop").uniform(index, (4 * ATTEMPTS + 1,), torch.float64).tolist()
        for row, sample in enumerate(index.tolist()):
            pixels[row] = np.asarray(self._one(self.path(sample), None if noise is None else noise[row]))
        return torch.from_numpy(pixels).permute(0, 3, 1, 2).to(torch.float32).div_(255).contiguous()

    def _one(self, path: Path, noise: list[float] | None) -> Image.Image:
        try:
            if not path.is_file():  # a pipe would wait for ever
                raise UserError(f"{path}: expected a file, got none, or something else")
            with Image.open(path, formats=FORMATS) as file:
                if file.width * file.height > MOST_PIXELS:
                    raise UserError(f"{path}: expected at most {MOST_PIXELS:,} pixels, got {file.size}")
                wide = ";16" in str(getattr(file, "tile", ""))
                if wide or file.mode.startswith(("I", "F")):
                    kind = "16 bits" if wide else f"an image of mode {file.mode}"
                    raise UserError(f"{path}: expected 8 bits a channel, got {kind}")
                if max(file.size) > LONGEST * max(min(file.size), 1):  # its shorter side is enlarged to `resize`
                    raise UserError(f"{path}: expected at most {LONGEST} times as long as wide, got {file.size}")
                # Without this, the colours that transparent pixels happen to hold would become visible.
                if file.has_transparency_data and file.convert("RGBA").getchannel("A").getextrema() != (255, 255):
                    raise UserError(f"{path}: expected an image without transparent pixels; save it on a background")
                picture = file.convert("RGB")
        except UserError:
            raise
        except Exception as error:  # a broken image raises many kinds of error
            raise UserError(f"{path}: cannot read the image ({shown(str(error))[1:-1]})") from None
        return self._centre(picture) if noise is None else self._random(picture, noise)

    def _centre(self, picture: Image.Image) -> Image.Image:
        short = min(picture.size)
        width, height = (self.resize * side // short for side in picture.size)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        picture = picture.resize((width, height), Image.Resampling.BILINEAR)
        return picture.crop((left, top, left + self.size, top + self.size))

    def _random(self, picture: Image.Image, noise: list[float]) -> Image.Image:
        left, top, width, height = random_box(*picture.size, noise)
        picture = picture.crop((left, top, left + width, top + height))
        picture = picture.resize((self.size, self.size), Image.Resampling.BILINEAR)
        return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if noise[-1] < 0.5 else picture


def random_box(width: int, height: int, noise: list[float]) -> tuple[int, int, int, int]:
    """(left, top, width, height) of a random part of an image; the middle if no attempt fits in it."""
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for area, ratio, x, y in (noise[4 * i : 4 * i + 4] for i in range(ATTEMPTS)):
        target = width * height * (SCALE[0] + area * (SCALE[1] - SCALE[0]))
        aspect = math.exp(low + ratio * (high - low))
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            return int(x * (width - w + 1)), int(y * (height - h + 1)), w, h
    w = max(1, min(width, round(height * RATIO[1])))
    h = max(1, min(height, round(width / RATIO[0])))
    return (width - w) // 2, (height - h) // 2, w, h


def _scan(root: Path) -> tuple[tuple[str, ...], list[bytes], list[int]]:
    """The classes, the files and the labels below a folder, in the order of their names."""
    try:
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
        names: list[bytes] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            check_printable("the name of a class", name)
            files = sorted(
                entry.name
                for entry in os.scandir(root / name)
                if entry.name.lower().endswith(EXTENSIONS) and not entry.name.startswith(".")
            )
            if not files:
                raise UserError(f"{root / name}: expected images ({', '.join(EXTENSIONS)}), found none")
            names += [os.fsencode(f"{name}/{file}") for file in files]
            labels += [label] * len(files)
    except OSError as error:
        raise UserError(f"cannot read {error.filename or root}: {error.strerror or error}") from None
    if not classes:
        raise UserError(f"{root}: expected a folder for each class, found none")
    return tuple(classes), names, labels
