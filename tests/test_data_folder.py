"""Images in folders: the crops of evaluation and training, worker processes, and folders that are not datasets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from steelman.data import FolderSource, Subset, batches, folder, load, stream
from steelman.data.folder import random_box
from steelman.data.source import first, name_of
from steelman.errors import UserError
from steelman.rng import Key


def ramp_image(width: int, height: int) -> Image.Image:
    """Red grows to the right and green downwards; blue is 128."""
    red = np.broadcast_to(np.linspace(0, 255, width), (height, width))
    green = np.broadcast_to(np.linspace(0, 255, height)[:, None], (height, width))
    return Image.fromarray(np.stack([red, green, np.full_like(red, 128)], -1).round().astype(np.uint8))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for part, per_class in (("train", 5), ("val", 2)):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for number in range(per_class):
                ramp_image(60 + 10 * number, 50 + 20 * label).save(folder / f"{number}.png")
            (folder / "notes.txt").write_text("not an image")
    return tmp_path


def test_folders_by_class(pictures: Path) -> None:
    data = load("folder", root=str(pictures), size=32, resize=40)
    assert (data.classes, data.num_classes, data.shape) == (("cat", "dog"), 2, (3, 32, 32))
    assert (len(data.train), len(data.test)) == (10, 4)
    assert data.train.labels.tolist() == [0] * 5 + [1] * 5
    assert isinstance(data.train, FolderSource)
    assert data.train.path(5) == pictures / "train" / "dog" / "0.png"


def test_evaluation_takes_the_centre(pictures: Path) -> None:
    """The shorter side becomes 40, so 100 x 70 becomes 57 x 40; the crop of 32 starts at pixel (12, 4)."""
    source = FolderSource(pictures / "train", size=32, resize=40)
    x = source.images(torch.tensor([9]))
    assert x.shape == (1, 3, 32, 32)
    assert torch.equal(x, source.images(torch.tensor([9, 0]))[:1])
    columns, rows = x[0, 0].mean(0), x[0, 1].mean(1)
    centre = torch.arange(32) + 0.5
    assert torch.allclose(columns, ((centre + 12) * 100 / 57 - 0.5) / 99, atol=0.004)
    assert torch.allclose(rows, ((centre + 4) * 70 / 40 - 0.5) / 69, atol=0.004)
    assert torch.allclose(x[0, 2], torch.tensor(128 / 255))


def test_training_crops_are_parts_of_the_image_and_follow_key_and_index(pictures: Path) -> None:
    source = FolderSource(pictures / "train", size=16, resize=16)
    index = torch.arange(10)
    state = torch.get_rng_state()
    x = source.images(index, Key(0))
    assert torch.equal(torch.get_rng_state(), state)
    alone = torch.cat([source.images(index[i : i + 1], Key(0)) for i in (7, 2)])
    assert torch.equal(x[[7, 2]], alone)
    assert not torch.equal(x, source.images(index, Key(1)))
    assert x.min() >= 0
    assert x.max() <= 1
    flips = 0
    for seed in range(20):
        for image in source.images(index, Key(seed)):
            red, green = image[0].mean(0), image[1].mean(1)
            flips += int(red[0] > red[-1])
            assert (green.diff() >= -0.005).all()  # never upside down
            assert (red.diff() * (red[-1] - red[0]).sign() >= -0.005).all()
            assert torch.allclose(image[2], torch.tensor(128 / 255))
    assert 65 <= flips <= 135  # of 200; within 5 standard deviations of one half


def test_random_boxes_have_the_area_and_the_shape_asked_for() -> None:
    noise = Key(0).uniform(torch.arange(2000), (41,), torch.float64).tolist()
    areas = []
    for row in noise:
        left, top, w, h = random_box(400, 300, row)
        assert 0 <= left <= 400 - w
        assert 0 <= top <= 300 - h
        assert 0.74 < w / h < 1.35
        areas.append(w * h / 120_000)
    assert min(areas) < 0.1
    assert min(areas) > 0.079
    assert 0.95 < max(areas) <= 1
    # The first attempt, worked by hand: area 0.54 of 400 x 300, ratio 1: a square of side 254.56.
    assert random_box(400, 300, [0.5, 0.5, 0.999, 0.0] * 10) == (145, 0, 255, 255)
    # No attempt fits: the middle, as wide as the ratio allows.
    assert random_box(1000, 10, [0.9] * 40) == (493, 0, 13, 10)
    assert random_box(10, 1000, [0.9] * 40) == (0, 493, 10, 13)


def test_workers_change_nothing_and_an_epoch_can_be_taken_up(pictures: Path) -> None:
    source = Subset(FolderSource(pictures / "train", size=16, resize=20), torch.tensor([9, 1, 2, 3, 4, 5, 6]))
    order = batches(7, 2, Key(0))
    state = torch.get_rng_state()
    one = list(stream(source, order, Key(1), workers=0))
    two = list(stream(source, order, Key(1), workers=2))
    rest = list(stream(source, order[2:], Key(1), workers=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert len(one) == len(two) == 4
    for a, b in (*zip(one, two, strict=True), *zip(one[2:], rest, strict=True)):
        assert all(torch.equal(left, right) for left, right in zip(a, b, strict=True))
    assert torch.equal(one[0][1], source.labels[order[0]])


def test_a_source_says_by_how_many_processes_it_is_read(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counted(batches: Any, **options: Any) -> DataLoader[Any]:
        asked.append(options["num_workers"])
        return DataLoader(batches, **options)

    monkeypatch.setattr("steelman.data.source.DataLoader", counted)
    source = FolderSource(pictures / "train", size=16, resize=20, workers=2, name="mine")
    list(stream(first(source, 4), batches(4, 2, None), None))
    assert asked == [2]
    assert name_of(first(source)) == "mine"
    with pytest.raises(UserError, match="expected 0 or more processes, got -1"):
        FolderSource(pictures / "train", workers=-1)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_image_is_named(pictures: Path, workers: int) -> None:
    path = pictures / "train" / "cat" / "2.png"
    path.write_bytes(path.read_bytes()[:100])
    source = FolderSource(pictures / "train", size=16, resize=16)
    with pytest.raises(UserError) as error:
        list(stream(source, batches(10, 2, None), Key(0), workers))
    assert str(error.value).startswith(f"{path}: cannot read the image")


class Dying(FolderSource):
    def images(self, index: Tensor, key: Key | None = None) -> Tensor:
        os._exit(3)


def test_a_worker_that_dies_is_reported(pictures: Path) -> None:
    with pytest.raises(UserError, match="a process that reads images died"):
        list(stream(Dying(pictures / "train"), batches(10, 2, None), None, workers=1))


def test_other_kinds_of_image(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    ramp_image(30, 30).convert("L").save(folder / "0.JPG", "JPEG")
    ramp_image(30, 30).convert("RGBA").save(folder / "1.webp")
    Image.fromarray(np.zeros((30, 30), np.uint16)).save(folder / "2.png")
    source = FolderSource(tmp_path, size=8, resize=8)
    assert source.images(torch.tensor([0, 1])).shape == (2, 3, 8, 8)
    with pytest.raises(UserError, match=r"2\.png: expected 8 bits a channel, got 16 bits"):
        source.images(torch.tensor([2]))


def test_folders_that_are_not_datasets(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs root=PATH"):
        load("folder")
    with pytest.raises(UserError, match=r"expected an existing root, got .*/nowhere"):
        load("folder", root=tmp_path / "nowhere")
    with pytest.raises(UserError, match="size 32 and resize 16"):
        load("folder", root=pictures, size=32, resize=16)
    (pictures / "test" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match="expected a folder val or test, found both"):
        load("folder", root=pictures)
    with pytest.raises(UserError, match=r"test/cat: expected images \(\.jpg, .* found none"):
        load("folder", root=pictures, test="test")
    ramp_image(9, 9).save(pictures / "test" / "cat" / "a.png")
    with pytest.raises(UserError, match=r"same classes to train and to test; only in one: \['dog'\]"):
        load("folder", root=pictures, test="test")
    assert len(load("folder", root=pictures, test="val").test) == 4
    with pytest.raises(UserError, match=r"cannot read .*/neither: No such file"):
        load("folder", root=pictures, test="neither")


def test_an_image_goes_to_no_other_program(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow gives PostScript to Ghostscript, which runs it."""
    called: list[object] = []
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *given, **_: called.append(given))
    path = sorted((pictures / "train").glob("*/*"))[0]
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n")
    source = FolderSource(pictures / "train", size=8, resize=8)
    with pytest.raises(UserError, match="cannot read the image"):
        source.images(torch.tensor([0]))
    assert called == []


def test_a_pipe_is_no_image(pictures: Path) -> None:
    path = sorted((pictures / "train").glob("*/*"))[0]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="expected a file, got none, or something else"):
        FolderSource(pictures / "train", size=8, resize=8).images(torch.tensor([0]))


def test_an_image_of_too_many_pixels(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "MOST_PIXELS", 100)
    with pytest.raises(UserError, match="expected at most 100 pixels, got"):
        FolderSource(pictures / "train", size=8, resize=8).images(torch.tensor([0]))


def test_the_name_of_a_class_that_no_file_can_hold(pictures: Path) -> None:
    """Training would end before its model could be written."""
    (one, *_) = sorted((pictures / "train").iterdir())
    one.rename(os.fsdecode(os.fsencode(pictures / "train") + b"/\xff"))
    with pytest.raises(UserError, match="the name of a class: expected a text of printable characters"):
        FolderSource(pictures / "train")
