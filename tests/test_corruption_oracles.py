"""Every corruption against a slow version of the released generators, and the promises that all of them make."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from torch import Tensor

from steelman.corruptions import CORRUPTIONS, blur, filters, noise, weather
from steelman.errors import UserError
from steelman.rng import Key
from tests import corruption_oracles as oracles
from tests.corruption_oracles import CONSTANTS, PLAIN, RANDOM, Array, Row

FAMILIES = ("cifar", "imagenet")
SEVERITIES = (1, 2, 3, 4, 5)
NOISY = (*RANDOM, "frost")


@functools.cache
def pictures(count: int, height: int, width: int, channels: int = 3) -> Array:
    """8-bit images: smooth, fine and coarse noise, stripes, and patches; each with its own range and colours."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:height, :width]
    found = np.empty((count, height, width, channels))
    for number in range(count):
        noise = rng.normal(size=(height, width, channels))
        if number % 4 == 3:
            wave = np.sin((rows * rng.normal() + columns * rng.normal())[..., None] / 2 + rng.uniform(0, 6, channels))
            image = wave + 0.2 * noise
        else:
            image = ndimage.gaussian_filter(noise, [(0.5, 0.5, 0), (2, 2, 0), (6, 6, 0)][number % 4])
        if number % 5 == 0:
            image = np.where((rows // 8 + columns // 8)[..., None] % 2 == 0, image, image.mean())
        image = (image - image.min()) / (image.max() - image.min())
        low, high = rng.uniform(0, 0.4, channels), rng.uniform(0.6, 1, channels)
        found[number] = low + (high - low) * image
        if number % 3 == 1:
            found[number, -6:, :7], found[number, 3:7, -8:] = 0, 1  # black has no hue, and white cannot grow
    return np.round(found * 255) / 255


def tensor(x: Array, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(np.moveaxis(x, -1, 1).copy()).to(dtype)


def array(x: Tensor) -> Array:
    return np.moveaxis(x.double().numpy(), 1, -1)


# Without noise: the same numbers.


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PLAIN)
def test_equals_the_released_generator(name: str, family: str, channels: int) -> None:
    for count, size in [(2, (28, 28)), (2, (32, 32))] if family == "cifar" else [(2, (40, 40)), (1, (70, 64))]:
        x = pictures(count, *size, channels)
        for severity, constants in zip(SEVERITIES, CONSTANTS[family][name]):
            found = CORRUPTIONS[name](severity=severity, family=family)(tensor(x))
            expected = np.clip([PLAIN[name](image, *constants) for image in x], 0, 1)
            np.testing.assert_allclose(array(found), expected, atol=1e-5, err_msg=f"severity {severity}, {size}")


@pytest.mark.parametrize(("size", "family"), [((63, 90), "cifar"), ((64, 64), "imagenet"), ((70, 63), "cifar")])
def test_the_size_chooses_the_family(size: tuple[int, int], family: str) -> None:
    x = torch.full((1, 3, *size), 0.25)
    (amount,) = CONSTANTS[family]["brightness"][1]
    assert CORRUPTIONS["brightness"](severity=2)(x)[0, 0, 0, 0].item() == pytest.approx(0.25 + amount)


# With noise: the same numbers from the same draws.


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> list[Array]:
    """What our code draws, in order, if it corrupts one image at a time."""
    found: list[Array] = []

    def kept(draw: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            before, made = len(found), draw(*args, **options)
            found[before:] = [made[0].double().numpy() if isinstance(made, Tensor) else made]
            return made

        return call

    for name in ("uniform", "normal"):
        monkeypatch.setattr(Key, name, kept(getattr(Key, name)))
    own = {name: kept(getattr(np.random.Generator, name)) for name in ("random", "standard_normal", "integers")}
    monkeypatch.setattr(np.random, "Generator", type("Generator", (np.random.Generator,), own))
    for file in (noise, weather):  # it makes its numbers from others
        monkeypatch.setattr(file, "normal", kept(file.normal))
    return found


def moves_of(draws: list[Array], moves: int) -> Array:
    """From whole numbers, or from numbers in [0, 1)."""
    return np.stack([draw if draw.dtype.kind == "i" else (draw * 2 * moves).astype(int) - moves for draw in draws])


# From an image, constants, and the uniform numbers in [0, 1) or normal ones that our code has drawn for the image.
EXACT: dict[str, Callable[[Array, Row, list[Array]], Array]] = {
    "gaussian-noise": lambda x, c, d: x + c[0] * np.moveaxis(d[0], 0, -1),
    "speckle-noise": lambda x, c, d: x + x * c[0] * np.moveaxis(d[0], 0, -1),
    "glass-blur": lambda x, c, d: oracles.glass_blur(x, c[0], int(c[1]), moves_of(d, int(c[1]))),
    "motion-blur": lambda x, c, d: oracles.motion_blur(x, c[0], c[1], 90 * d[0][0] - 45),
    "snow": lambda x, c, d: oracles.snow(x, c, d[0][0], 90 * d[1][0] - 135),
    "fog": lambda x, c, d: oracles.fog(x, c[0], oracles.plasma(c[1], 2 * d[0][..., None] - 1)[..., 0]),
    "elastic-transform": lambda x, c, d: oracles.elastic_transform(x, c, 2 * d[0] - 1, 2 * d[-1] - 1),
    # OpenCV's distance to an edge is a little shorter than the true one, which our code takes.
    "spatter": lambda x, c, d: oracles.spatter(x, c, d[0][0], oracles.euclidean),
}
# These cut numbers to whole levels on the way. Next to a level they may fall to either side, and rarely move an edge.
CUT = ("glass-blur", "snow", "spatter")


def compare(draws: list[Array], name: str, constants: Row, x: Array, **options: Any) -> None:
    wrong: list[Array] = []
    for image in x:
        draws.clear()
        found = array(
            CORRUPTIONS[name](**options)(tensor(image[None], torch.float64), index=torch.tensor([len(wrong)]))
        )
        wrong.append(np.abs(found[0] - np.clip(EXACT[name](image, constants, draws), 0, 1)))
    assert np.mean(np.stack(wrong) > (1.01 / 255 if name in CUT else 1e-5)) < (0.005 if name in CUT else 1e-9)
    assert np.mean(wrong) < 0.04 / 255


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", EXACT)
def test_equals_the_released_generator_given_the_same_draws(
    name: str, family: str, severity: int, draws: list[Array]
) -> None:
    x = pictures(4, 32, 40) if severity % 2 else pictures(2, 70, 64)
    compare(draws, name, CONSTANTS[family][name][severity - 1], x, severity=severity, family=family)


@pytest.mark.parametrize("constants", [(0.5, 1.2, 3, 0, 0.5, 0), (0.5, 5, 9, 0, 0.9, 0)])
def test_named_constants_of_spatter(constants: Row, draws: list[Array]) -> None:
    """Without dry places, there are slopes on both sides of the limits of an edge, and places far from any edge."""
    compare(draws, "spatter", constants, pictures(4, 70, 80), **dict(zip(weather.Spatter.NAMES, constants)))


@pytest.mark.parametrize("moves", [1, 2, 4, 10])
@pytest.mark.parametrize("channels", [1, 3])
def test_glass_moves_what_the_loop_over_pixels_moves(moves: int, channels: int, draws: list[Array]) -> None:
    x = torch.rand(1, channels, 28, 37, dtype=torch.float64)
    found = blur.moved(x, moves, torch.tensor([4]), Key(0))
    np.testing.assert_array_equal(array(found)[0], oracles.swapped(array(x)[0], moves, moves_of(draws, moves)[0]))


@pytest.mark.parametrize(("size", "side", "decay"), [(28, 32, 3.0), (32, 32, 1.4), (33, 64, 2.5), (96, 128, 1.75)])
def test_plasma_equals_the_loop_over_pixels(size: int, side: int, decay: float, draws: list[Array]) -> None:
    found = weather.plasma(size, decay, torch.tensor([3]), Key(0))
    assert draws[0].shape == (side, side)
    np.testing.assert_allclose(found[0], oracles.plasma(decay, 2 * draws[0][..., None] - 1)[..., 0], atol=1e-12)


@pytest.mark.parametrize(("radius", "sigma"), [(6, 1.0), (9, 2.5), (20, 15.0)])
def test_motion_goes_along_the_line(radius: int, sigma: float) -> None:
    angles = (0.0, 30.0, 45.0, -45.0, -44.9, -71.3, -90.0, -135.0, 90.0, 161.0)
    x = pictures(len(angles), 29, 28, 1)
    found = array(filters.motion_blur(tensor(x, torch.float64), radius, sigma, angles))
    weights = [math.exp(-(step**2) / (2 * sigma**2)) for step in range(2 * radius + 1)]
    for number, angle in enumerate(angles):
        cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        line = [(math.ceil(step * sin - 0.5), math.ceil(step * cos - 0.5)) for step in range(2 * radius + 1)]
        for row, column in np.ndindex(29, 28):
            total = 0.0
            for weight, (down, across) in zip(weights, line):
                total += weight * x[number, min(max(row + down, 0), 28), min(max(column + across, 0), 27), 0]
            assert found[number, row, column, 0] == pytest.approx(total / sum(weights), abs=1e-10)


@pytest.mark.parametrize(("mode", "edge_twice"), [("mirror", False), ("reflect", True)])
def test_sampling_is_that_of_scipy(mode: str, edge_twice: bool) -> None:
    x, rng = pictures(2, 28, 33, 1), np.random.default_rng(0)
    down, across = rng.uniform(-40, 70, (2, 28, 33)), rng.uniform(-50, 80, (2, 28, 33))
    places = torch.from_numpy(down), torch.from_numpy(across)
    found = array(filters.sample(tensor(x, torch.float64), *places, edge_twice=edge_twice))
    for number in range(2):
        at = down[number], across[number]
        expected = ndimage.map_coordinates(x[number, ..., 0], at, order=1, mode=mode)
        np.testing.assert_allclose(found[number, ..., 0], expected, atol=1e-9)


# With noise: other draws, the same statistics.

SAMPLES, LIMIT = 144, 5.0  # images, and standard errors


@pytest.fixture(scope="module")
def frost_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five pictures that differ in brightness, colour and texture."""
    folder, rng = tmp_path_factory.mktemp("frost"), np.random.default_rng(0)
    for number, name in enumerate(("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")):
        noise = ndimage.gaussian_filter(rng.normal(size=(250, 310, 3)), (1 + number, 5 - number, 0))
        values = 60 + 30 * number + 30 * noise / noise.std() + np.array([-20, 0, 5 * number])
        Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(folder / name)
    return folder


@functools.cache
def frosts(folder: Path, family: str) -> list[Array]:
    """The pictures as the family takes them. At a fifth of the size, linear interpolation keeps each fifth pixel."""
    found = [np.asarray(Image.open(path)) / 255 for path in sorted(folder.iterdir())]
    return [picture[2::5, 2::5] for picture in found] if family == "cifar" else found


def cropped(picture: Array, down: float, across: float, size: tuple[int, ...]) -> Array:
    top, left = int(down * (picture.shape[0] - size[0])), int(across * (picture.shape[1] - size[1]))
    return picture[top : top + size[0], left : left + size[1]]


def frosted(x: Array, constants: Row, rng: np.random.Generator, found: list[Array]) -> Array:
    parts = [cropped(found[rng.integers(5)], rng.random(), rng.random(), x.shape[1:3]) for _ in x]
    return np.stack([oracles.frost(image, constants, part) for image, part in zip(x, parts)])


def measured(x: Array, corrupted: Array) -> Array:
    """For each image: what the change is like, in numbers that vary little between images."""
    change = corrupted - x
    apart = change - change.mean(axis=(1, 2), keepdims=True)
    spread, power = (apart**2).mean(axis=(1, 2, 3)) + 1e-6, (change**2).mean(axis=(1, 2, 3)) + 1e-6
    numbers = [*np.moveaxis(change.mean(axis=(1, 2)), -1, 0), np.log(spread), np.log(power)]
    numbers.append((change**2 * x).mean(axis=(1, 2, 3)) / power)  # whether bright pixels change more
    numbers.append((apart[..., 0] * apart[..., 2]).mean(axis=(1, 2)) / spread)
    for lag in (1, 3):
        numbers.append((apart[:, lag:] * apart[:, :-lag]).mean(axis=(1, 2, 3)) / spread)
        numbers.append((apart[:, :, lag:] * apart[:, :, :-lag]).mean(axis=(1, 2, 3)) / spread)
    return np.stack(numbers, axis=1)


@functools.cache
def theirs(name: str, family: str, severity: int, folder: Path, scale: str) -> Array:
    x, rng, constants = pictures(SAMPLES, 32, 36), np.random.default_rng(0), CONSTANTS[family][name][severity - 1]
    drawn = frosted(x, constants, rng, frosts(folder, scale)) if name == "frost" else RANDOM[name](x, constants, rng)
    return measured(x, np.clip(drawn, 0, 1))


def distance(one: Array, other: Array) -> float:
    """The largest difference of means, in standard errors. Each image is compared with itself."""
    apart = one - other
    return float(np.max(np.abs(apart.mean(axis=0)) / (apart.std(axis=0, ddof=1) / math.sqrt(SAMPLES) + 1e-9)))


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", NOISY)
def test_has_the_statistics_of_the_generator(name: str, family: str, severity: int, frost_folder: Path) -> None:
    """And not those of the other family. The frost of both families is of the same size here."""
    (other,) = {*FAMILIES} - {family}
    options = {"pictures": str(frost_folder)} if name == "frost" else {}
    x = pictures(SAMPLES, 32, 36)
    found = CORRUPTIONS[name](severity=severity, family=family, **options)(tensor(x), key=Key(1))
    scale = family if name == "frost" else ""
    near, far = (theirs(name, one, severity, frost_folder, scale) for one in (family, other))
    assert distance(measured(x, array(found)), near) < LIMIT
    assert distance(measured(x, array(found)), far) > LIMIT


@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_frost_is_a_part_of_a_picture(family: str, severity: int, frost_folder: Path, draws: list[Array]) -> None:
    corrupt = CORRUPTIONS["frost"](severity=severity, family=family, pictures=str(frost_folder))
    for number, image in enumerate(pictures(12, 32, 36)):
        found = array(corrupt(tensor(image[None]), index=torch.tensor([number])))[0]
        which, down, across = draws[number]
        part = cropped(frosts(frost_folder, family)[int(5 * which)], down, across, image.shape[:2])
        expected = oracles.frost(image, CONSTANTS[family]["frost"][severity - 1], part)
        np.testing.assert_allclose(found, np.clip(expected, 0, 1), atol=1e-5)


@pytest.mark.parametrize("severity", [1, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_frost_is_bluish_and_rough_and_mixed_by_the_constants(family: str, severity: int) -> None:
    x, constants = pictures(60, 32, 36), CONSTANTS[family]["frost"][severity - 1]
    options: dict[str, Any] = {"severity": severity, "family": family, "pictures": "generated"}
    texture = array(CORRUPTIONS["frost"](image=0, frost=1, **options)(tensor(x)))
    found = array(CORRUPTIONS["frost"](**options)(tensor(x)))
    np.testing.assert_allclose(found, np.clip(oracles.frost(x, constants, texture), 0, 1), atol=1e-5)
    red, green, blue = texture.mean(axis=(0, 1, 2))
    assert red < green < blue
    means = texture[..., 1].mean(axis=(1, 2))  # the parts of the photographs have means of 0.41 to 0.89
    assert 0.35 < means.min() < 0.5
    assert 0.8 < means.max() < 0.95
    apart = texture[..., 1] - means[:, None, None]
    assert 0.08 < apart.std() < 0.125
    near, far = ((apart[:, :, lag:] * apart[:, :, :-lag]).mean() / apart.var() for lag in (1, 9))
    assert 2 * max(far, 0.25) < near < 0.99


# The promises of all.

SIZES = [(28, 1, 1, 9), (28, 3, 5, 9), (32, 1, 4, 9), (32, 3, 2, 9), (96, 1, 5, 8), (96, 3, 1, 8), (224, 1, 3, 3)]


def global_states() -> list[str]:
    return [str(state) for state in (torch.get_rng_state().tolist(), np.random.get_state(), random.getstate())]


def corruption(name: str, severity: int, **options: Any) -> Callable[..., Tensor]:
    return CORRUPTIONS[name](severity=severity, **({"pictures": "generated"} if name == "frost" else {}), **options)


@pytest.mark.parametrize(("size", "channels", "severity", "count"), [*SIZES, (224, 3, 4, 2)])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_keeps_its_noise_in_any_batch(name: str, size: int, channels: int, severity: int, count: int) -> None:
    x = tensor(pictures(count, size, size + size % 3, channels))
    before, state = x.clone(), global_states()
    corrupt, index = corruption(name, severity), torch.arange(count) * 7 + 2
    found = corrupt(x, index=index)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    assert 0 <= found.min() <= found.max() <= 1
    assert not torch.equal(found, x)
    for rows in (1, 7):
        parts = [corrupt(x[at : at + rows], index=index[at : at + rows]) for at in range(0, count, rows)]
        assert torch.equal(torch.cat(parts), found)
    order = Key(3).permutation(count)
    assert torch.equal(corrupt(x[order], index=index[order]), found[order])
    assert torch.equal(x, before)
    exact = corruption(name, severity, exact=True)(x, index=index) * 255
    assert (exact - exact.round()).abs().max() < 1e-4
    low, high = (-0.501, 0.501) if name == "motion-blur" else (-2e-3, 1.001)  # ImageMagick rounds, all others cut
    assert low < (found * 255 - exact).min() <= (found * 255 - exact).max() < high
    assert global_states() == state


@pytest.mark.parametrize("severity", [2, 5])
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_key_index_and_dtype(name: str, severity: int) -> None:
    corrupt, x = corruption(name, severity), tensor(pictures(1, 32, 32)).repeat(6, 1, 1, 1)
    found = corrupt(x)
    assert torch.equal(corrupt(x, key=Key(0), index=torch.arange(6)), found)
    apart = (found[:, None] - found).abs().mean(dim=(2, 3, 4))[~torch.eye(6, dtype=torch.bool)]
    other = (found - corrupt(x, key=Key(1))).abs().mean(dim=(1, 2, 3))
    if name in NOISY:  # all images are the same one; spatter of severity 2 leaves some dry
        assert min(apart.median(), other.median()) > 1e-3
    else:
        assert max(apart.max(), other.max()) == 0
    for dtype in (torch.float64, torch.float16):
        cast = corrupt(x.to(dtype))
        assert cast.dtype == dtype
        assert (cast.double() - found).mean().abs() < (1e-4 if dtype == torch.float64 else 0.004)
        empty = corrupt(x[:0].to(dtype))
        assert (empty.shape, empty.dtype) == (x[:0].shape, dtype)


# Bad input.

GOOD = torch.full((2, 3, 32, 32), 0.5)
BAD_IMAGES = {
    r"values in \[0, 1\], got 127.5 to 127.5; divide 8-bit images by 255": GOOD * 255,
    r"values in \[0, 1\], got nan": torch.where(torch.arange(32) == 5, torch.nan, GOOD),
    "at least 28 x 28 pixels, got 32 x 27": GOOD[..., :27],
    "1 or 3 channels, got 2": GOOD[:, :2],
    r"floating-point numbers of shape \(N, C, H, W\), got torch.uint8": GOOD.to(torch.uint8),
}


@pytest.mark.parametrize("name", ["brightness", "fog", "jpeg-compression"])
@pytest.mark.parametrize("message", BAD_IMAGES)
def test_refuses_bad_images(message: str, name: str) -> None:
    with pytest.raises(UserError, match=message):
        CORRUPTIONS[name]()(BAD_IMAGES[message])


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_refuses_bad_settings_and_a_bad_index(name: str, tmp_path: Path) -> None:
    make = CORRUPTIONS[name]
    for severity, limit in ((0, 1), (6, 5)):
        with pytest.raises(UserError, match=f"severity: .* {limit}, got {severity}"):
            make(severity=severity)
    with pytest.raises(UserError, match=r"family: .* 'auto', 'cifar' or 'imagenet', got 'cifar10'"):
        make(family="cifar10")
    with pytest.raises(UserError, match=r"index: expected a whole number for each of 2 images, got .* \(3,\)"):
        make()(GOOD, index=torch.arange(3))
    first, *others = make.NAMES  # type: ignore[attr-defined]
    for missing in others:
        with pytest.raises(UserError, match=f"{missing}: is required, because {first} is given; expected all or none"):
            make(**{first: 1})
    if name == "frost":
        with pytest.raises(UserError, match=r"pictures: expected frost1.png to .*; frost1.png is missing"):
            make(pictures=str(tmp_path))(GOOD)
