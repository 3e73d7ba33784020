"""Sources, splits, epochs, augmentation, folders of images, and the datasets by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from steelman.data import (
    AUGMENTATIONS,
    DATASETS,
    ArraySource,
    CropFlip,
    Dataset,
    NoAugment,
    Source,
    Subset,
    batches,
    load,
    split,
    stream,
)
from steelman.errors import UserError
from steelman.rng import Key
from steelman.settings import make

LABELS = torch.tensor([0, 1, 2, 0])


def test_uint8_images_stay_bytes_and_come_out_as_fractions() -> None:
    images = np.arange(4 * 3 * 2 * 2, dtype=np.uint8).reshape(4, 3, 2, 2)
    source = ArraySource(images, LABELS.numpy())
    assert source._images.dtype == torch.uint8
    assert source._images.data_ptr() == images.ctypes.data  # not copied
    out = source.images(torch.tensor([3, 1]), Key(0))
    assert out.dtype == torch.float32
    assert torch.equal(out, torch.from_numpy(images[[3, 1]]).float() / 255)
    assert images[3, 2, 1, 1] == 47
    assert isinstance(source, Source)
    assert (source.shape, source.classes, len(source)) == ((3, 2, 2), ("0", "1", "2"), 4)


def test_greyscale_images_without_a_channel_get_one() -> None:
    assert ArraySource(torch.rand(4, 5, 6), LABELS).shape == (1, 5, 6)


def test_arrays_torch_cannot_share_are_copied() -> None:
    images = np.random.default_rng(0).random((4, 1, 3, 3)).astype(">f8")
    images.flags.writeable = False
    source = ArraySource(images[:, :, ::-1], LABELS)
    assert np.allclose(source.images(torch.arange(4)).numpy(), images[:, :, ::-1])


NAN = torch.zeros(4, 1, 2, 2)
NAN[2, 0, 1], NAN[3, 0, 0, 0] = float("nan"), float("inf")
GOOD = torch.zeros(4, 1, 2, 2)


@pytest.mark.parametrize(
    ("images", "labels", "classes", "text"),
    [
        (GOOD * 0 + 255, LABELS, None, "expected values in [0, 1], got 255 .. 255; divide by 255"),
        (GOOD - 1, LABELS, None, "expected values in [0, 1], got -1 .. -1"),
        (NAN, LABELS, None, "expected finite pixels, got 3 NaN or infinite, the first in image 2"),
        (GOOD.long(), LABELS, None, "expected images as uint8, or as floating point in [0, 1], got torch.int64"),
        (torch.zeros(4, 8, 8, 3), LABELS, None, "got (4, 8, 8, 3), which looks like (N, H, W, C)"),
        (torch.zeros(4, 8), LABELS, None, "expected images of shape (N, C, H, W) or (N, H, W), got (4, 8)"),
        (GOOD[:0], LABELS[:0], None, "expected at least one image, got shape (0, 1, 2, 2)"),
        (GOOD, LABELS[:3], None, "one label for each of 4 images, got labels of shape (3,)"),
        (GOOD, LABELS.float(), None, "expected integer labels, got torch.float32"),
        (GOOD, torch.tensor([0, 1, 37, 2]), tuple("0123456789"), "label 37 at index 2, expected 0 .. 9"),
        (GOOD, torch.tensor([0, -1, 0, 2]), None, "label -1 at index 1, expected 0 or more"),
        (GOOD, LABELS, ("a", "b", "a"), "expected different class names"),
        (np.array([None]), LABELS, None, "expected images as a tensor or an array of numbers, got an array of object"),
        ([[1]], LABELS, None, "expected images as a tensor or an array of numbers, got list"),
    ],
)
def test_bad_arrays_are_named(images: Any, labels: Tensor, classes: tuple[str, ...] | None, text: str) -> None:
    with pytest.raises(UserError) as error:
        ArraySource(images, labels, classes)
    assert text in str(error.value)


def numbered(n: int, classes: int = 3) -> ArraySource:
    """Image i is i / 1000 everywhere."""
    return ArraySource((torch.arange(n) / 1000).reshape(n, 1, 1, 1).expand(n, 1, 2, 2), torch.arange(n) % classes)


def test_a_subset_is_a_view_numbered_anew() -> None:
    inner = Subset(numbered(20), torch.tensor([4, 9, 2, 7]))
    outer = Subset(inner, torch.tensor([3, 0]))
    assert torch.equal(outer.images(torch.tensor([0, 1]))[:, 0, 0, 0], torch.tensor([0.007, 0.004]))
    assert outer.labels.tolist() == [7 % 3, 4 % 3]
    assert isinstance(outer, Source)
    for wrong in ([20], [-1]):
        with pytest.raises(UserError, match=r"indices in 0 \.\. 19"):
            Subset(numbered(20), torch.tensor(wrong))


@given(st.lists(st.integers(0, 4), min_size=8, max_size=60), st.integers(0, 5), st.data())
def test_a_split_is_disjoint_and_stratified(labels: list[int], seed: int, data: st.DataObject) -> None:
    y = torch.tensor(labels)
    source = ArraySource(torch.zeros(len(y), 1, 1, 1), y, tuple("abcde"))
    present = len(set(labels))
    validation = data.draw(st.integers(1, len(y) - present))
    train, held_out = split(source, validation, seed)
    assert len(held_out) == validation
    assert sorted([*train.index.tolist(), *held_out.index.tolist()]) == list(range(len(y)))
    shares = {label: validation * labels.count(label) / len(y) for label in set(labels)}
    assert all((train.labels == label).any() for label in shares)
    if all(share <= labels.count(label) - 2 for label, share in shares.items()):
        assert all(abs(int((held_out.labels == label).sum()) - share) < 1 for label, share in shares.items())


def test_a_split_in_even_proportions_is_exact_and_follows_the_seed() -> None:
    source = numbered(300)
    _, held_out = split(source, 60, seed=1)
    assert torch.bincount(held_out.labels).tolist() == [20, 20, 20]
    assert torch.equal(split(source, 60, seed=1)[1].index, held_out.index)
    assert not torch.equal(split(source, 60, seed=2)[1].index, held_out.index)
    assert not torch.equal(held_out.index, torch.arange(60))
    for wrong in (0, 298, 300):
        with pytest.raises(UserError, match=rf"1 \.\. 297 of the 300 images, got {wrong}"):
            split(source, wrong, seed=1)


def test_batches() -> None:
    assert [part.tolist() for part in batches(7, 3, None)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert [len(part) for part in batches(7, 3, None, drop_last=True)] == [3, 3]
    assert [len(part) for part in batches(6, 3, None, drop_last=True)] == [3, 3]
    shuffled = torch.cat(batches(50, 7, Key(3)))
    assert sorted(shuffled.tolist()) == list(range(50))
    assert torch.equal(shuffled, Key(3).permutation(50))
    assert batches(0, 3, None) == []
    with pytest.raises(UserError, match="at least 1, got 0"):
        batches(5, 0, None)
    with pytest.raises(UserError, match=r"at most 5, got 6"):
        batches(5, 6, None, drop_last=True)


def test_a_stream_of_arrays_keeps_the_order_and_the_labels() -> None:
    source = numbered(10)
    order = batches(10, 4, Key(0))
    for workers in (0, 2):  # arrays are read here whatever the number of workers
        out = list(stream(source, order, Key(1), workers))
        assert [index.tolist() for _, _, index in out] == [index.tolist() for index in order]
        assert all(torch.equal(x, source.images(index)) for x, _, index in out)
        assert all(torch.equal(y, index % 3) for _, y, index in out)


def naive_crop_flip(x: Tensor, index: Tensor, key: Key, settings: CropFlip) -> Tensor:
    out = []
    for image, sample in zip(x, index):
        u = key.uniform(sample[None], (3,))[0].tolist()
        mode = {"zero": "constant", "reflect": "reflect"}[settings.fill]
        padded = F.pad(image[None], (settings.pad,) * 4, mode=mode)[0]
        top, left = (int(value * (2 * settings.pad + 1)) for value in u[:2])
        crop = padded[:, top : top + image.shape[1], left : left + image.shape[2]]
        out.append(crop.flip(2) if settings.flip and u[2] < 0.5 else crop)
    return torch.stack(out)


@pytest.mark.parametrize("fill", ["zero", "reflect"])
@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("pad", [0, 1, 4])
def test_crop_and_flip_is_a_loop_over_images(pad: int, flip: bool, fill: Any) -> None:
    x = torch.rand(40, 3, 7, 9, generator=torch.Generator().manual_seed(0))
    index = torch.randint(0, 10**6, (40,), generator=torch.Generator().manual_seed(1))
    augment = CropFlip(pad=pad, flip=flip, fill=fill)
    out = augment(x, index, Key(5))
    assert torch.equal(out, naive_crop_flip(x, index, Key(5), augment))
    # One at a time gives the same as all at once.
    assert torch.equal(out, torch.cat([augment(x[i : i + 1], index[i : i + 1], Key(5)) for i in range(40)]))


def test_crops_and_flips_are_spread_evenly() -> None:
    n = 20_000
    index = torch.arange(n)
    ramp = torch.tensor([[0.0, 0.25, 1.0]]).expand(n, 1, 1, 3)
    flipped = CropFlip(pad=0)(ramp, index, Key(0))[:, 0, 0, 0] == 1
    assert abs(flipped.float().mean() - 0.5) < 0.015
    dot = torch.zeros(n, 1, 5, 5)
    dot[:, :, 2, 2] = 1
    out = CropFlip(pad=2, flip=False)(dot, index, Key(1))
    assert (out.sum((1, 2, 3)) == 1).all()
    share = out.mean((0, 1))
    assert (share - 1 / 25).abs().max() < 0.006
    # A new key, as a new epoch has, gives new crops.
    assert (CropFlip(pad=2)(dot, index, Key(2)) != out).flatten(1).any(1).float().mean() > 0.9


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_every_augmentation_keeps_shape_box_and_input(name: str) -> None:
    augment = make("augmentation", AUGMENTATIONS, name, {})
    for shape in ((5, 3, 8, 8), (1, 1, 8, 6), (0, 3, 8, 8)):
        x = torch.rand(shape, dtype=torch.float64)
        before, state = x.clone(), torch.get_rng_state()
        out = augment(x, torch.arange(shape[0]), Key(0))
        assert out.shape == x.shape
        assert out.dtype == x.dtype
        assert torch.equal(x, before)
        assert out.numel() == 0 or (out.min() >= 0 and out.max() <= 1)
        assert torch.equal(torch.get_rng_state(), state)


def test_augmentations_by_name() -> None:
    x = torch.rand(3, 1, 6, 6)
    assert torch.equal(NoAugment()(x, torch.arange(3), Key(0)), x)
    assert AUGMENTATIONS["crop"]() == CropFlip(flip=False)
    assert AUGMENTATIONS["crop-flip"](pad=2) == CropFlip(pad=2)
    with pytest.raises(ValueError, match="pad"):
        CropFlip(pad=-1)
    with pytest.raises(UserError, match="reflecting 6 pixels needs larger images, got 6 x 6"):
        CropFlip(pad=6, fill="reflect")(x, torch.arange(3), Key(0))


def save_arrays(folder: Path, **changes: Any) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    parts = {
        "train_images": np.random.default_rng(0).integers(0, 256, (9, 3, 4, 4), np.uint8),
        "train_labels": np.arange(9) % 5,
        "test_images": np.zeros((2, 3, 4, 4), np.uint8),
        "test_labels": np.array([0, 1], np.int32),
    } | changes
    for name, values in parts.items():
        np.save(folder / f"{name}.npy", values)
    return parts


def test_arrays_in_a_folder_or_in_one_file(tmp_path: Path) -> None:
    parts = save_arrays(tmp_path / "a")
    np.savez(tmp_path / "a.npz", **parts)
    for root in (tmp_path / "a", tmp_path / "a.npz"):
        data = load("arrays", root=root)
        assert (data.num_classes, data.shape, len(data.test)) == (5, (3, 4, 4), 2)
        expected = torch.from_numpy(parts["train_images"]).float() / 255
        assert torch.equal(data.train.images(torch.arange(9)), expected)
        assert data.train.labels.tolist() == parts["train_labels"].tolist()


def test_arrays_that_are_not_datasets(tmp_path: Path) -> None:
    save_arrays(tmp_path / "a", train_labels=np.array([None] * 9))
    with pytest.raises(UserError, match=r"train_labels\.npy: cannot be read .*Python objects"):
        load("arrays", root=tmp_path / "a")
    save_arrays(tmp_path / "a", train_images=np.full((9, 3, 4, 4), 255.0))
    with pytest.raises(UserError, match=r"train: expected values in .* divide by 255"):
        load("arrays", root=tmp_path / "a")
    save_arrays(tmp_path / "a", test_images=np.zeros((2, 3, 5, 4), np.uint8))
    with pytest.raises(UserError, match=r"one image shape, got \(3, 4, 4\) and \(3, 5, 4\)"):
        load("arrays", root=tmp_path / "a")
    (tmp_path / "a" / "test_labels.npy").unlink()
    with pytest.raises(UserError, match=r"expected the file .*test_labels\.npy, found none"):
        load("arrays", root=tmp_path / "a")
    np.savez(tmp_path / "b.npz", train_images=np.zeros(3))
    with pytest.raises(UserError, match="there is no train_labels"):
        load("arrays", root=tmp_path / "b.npz")
    (tmp_path / "c.npz").write_text("hello")
    with pytest.raises(UserError, match=r"c\.npz: cannot be read"):
        load("arrays", root=tmp_path / "c.npz")


def test_digits_are_built_in() -> None:
    data = load("digits")
    assert isinstance(data, Dataset)
    assert (len(data.train), len(data.test), data.shape, data.num_classes) == (1437, 360, (1, 8, 8), 10)
    x = data.train.images(torch.arange(1437))
    assert (float(x.min()), float(x.max())) == (0, 1)
    assert (torch.bincount(data.test.labels) >= 34).all()
    again = load("digits")
    assert torch.equal(again.test.images(torch.arange(360)), data.test.images(torch.arange(360)))
    from sklearn.datasets import load_digits

    everything = {(image.tobytes(), int(y)) for image, y in zip(load_digits().images / 16, load_digits().target)}
    seen = [
        (source.images(torch.tensor([i]))[0, 0].double().numpy().tobytes(), int(source.labels[i]))
        for source in (data.train, data.test)
        for i in range(len(source))
    ]
    assert set(seen) == everything


def test_unknown_names_and_options() -> None:
    assert {"digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "folder", "arrays"} == set(DATASETS)
    with pytest.raises(UserError, match=r"unknown dataset 'cifar-10' \(did you mean 'cifar10'\?\); choices: arrays"):
        load("cifar-10")
    with pytest.raises(UserError, match="option of dataset 'digits' 'root'"):
        load("digits", root="x")
    with pytest.raises(UserError, match=r"size: .*valid integer.* got 'big'"):
        load("folder", root=".", size="big")
