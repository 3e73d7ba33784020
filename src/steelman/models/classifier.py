"""Classifier: input normalisation, backbone and head. Also models from an import path, and weights from files."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from steelman.errors import UserError, shortened, shown
from steelman.heads import Head, build_head, embed
from steelman.imports import imported
from steelman.models.base import check_images
from steelman.progress import say

# Without these limits, a file or a model could fill the memory. Each limit is 16 GB, at four bytes a weight.
MOST_BYTES, MOST_WEIGHTS = 1 << 34, 1 << 32


class Classifier(nn.Module):
    """logits = head(backbone((x - mean) / std)), for images in [0, 1].

    `spec` holds the names and options that build it again. It is None unless `build_classifier` made the model.
    """

    mean: Tensor
    std: Tensor
    spec: dict[str, Any] | None = None

    def __init__(
        self,
        backbone: nn.Module,
        head: Head,
        input_shape: tuple[int, int, int],
        mean: Sequence[float] = (0.0,),
        std: Sequence[float] = (1.0,),
    ) -> None:
        super().__init__()
        channels = input_shape[0]
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise UserError(f"{name}: expected 1 or {channels} values, one per channel, got {len(values)}")
        if min(std) <= 0:
            raise UserError(f"std: expected values above 0, got {list(std)}")
        self.input_shape = tuple(input_shape)
        self.backbone, self.head = backbone, head
        self.register_buffer("mean", torch.tensor(tuple(mean)).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(tuple(std)).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        check_images(x, self.input_shape)
        logits: Tensor = self.head(self.backbone((x - self.mean) / self.std))
        return logits


class Ensemble(nn.Module):
    """log(mean over the members of softmax): several models as one, which can predict and be attacked."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.stack([member(x).log_softmax(dim=1) for member in self.members])
        return rows.logsumexp(dim=0) - math.log(len(self.members))


def build_classifier(
    name: str,
    *,
    input_shape: tuple[int, int, int],
    num_classes: int,
    head: str = "linear",
    head_options: dict[str, Any] | None = None,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
    **options: Any,
) -> nn.Module:
    """Build a classifier by a name in MODELS, or from ``package.module:factory``.

    A factory is called with `options`, and gives the user's own model from images to logits. That model normalises its
    own images. A `head` other than ``linear`` replaces the model's last linear layer.

    `name` is your own text: the factory is imported and called. For a name from a file, use ``build_described``.
    """
    spec = {"name": name, "options": options, "mean": mean, "std": std}
    described_head = {"name": head, "options": head_options or {}}
    return build_described(spec, described_head, input_shape, num_classes, [name])


def build_described(
    spec: Mapping[str, Any],
    head: Mapping[str, Any],
    input_shape: tuple[int, int, int],
    num_classes: int,
    allow_import: Collection[str],
) -> nn.Module:
    """Build a classifier from names and options as a recipe or model.json has them.

    A factory is imported only if `allow_import` has its name or its module.
    """
    from steelman.models import MODELS
    from steelman.settings import make

    name, options = spec["name"], dict(spec["options"])
    mean, std = tuple(spec["mean"]), tuple(spec["std"])
    head_name, head_options = head["name"], dict(head["options"])
    for kind, given, own in (("model", options, {"input_shape"}), ("head", head_options, {"features", "num_classes"})):
        if wrong := own & given.keys():
            raise UserError(f"{sorted(wrong)[0]}: expected options of the {kind}; the images and the classes decide it")
    if ":" in name:
        if mean != (0.0,) or std != (1.0,):
            raise UserError(f"mean and std: {name} normalises its own input; expected neither, got {mean} and {std}")
        from steelman.models.wrap import detected  # wrap imports attacks, and they import models

        made = imported(name, options, allow_import)
        model, sentence = detected(made, torch.full((2, *input_shape), 0.5))
        if sentence:
            say(sentence)
        if head_name != "linear" or head_options:
            embed(model, head_name, **head_options)
        return model

    def classifier() -> Classifier:
        backbone = make("model", MODELS, name, {"input_shape": input_shape, **options})
        built = build_head(head_name, backbone.features, num_classes, **head_options)
        return Classifier(backbone, built, input_shape, mean, std)

    _check_size(name, classifier)
    model = classifier()
    model.spec = {
        "model": {"name": name, "options": options, "mean": mean, "std": std, "weights": None},
        "head": {"name": head_name, "options": head_options},
    }
    return model


def _check_size(name: str, build: Callable[[], nn.Module]) -> None:
    """Refuse a model that is too large. It is first built without memory, or else its sizes could fill the memory."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            weights = sum(value.numel() for value in build().state_dict().values())
    except UserError:
        raise
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"the model {name} cannot be built with these options: {_first_line(error)[:200]}") from None
    if weights > MOST_WEIGHTS:
        raise UserError(f"the model {name}: expected at most {MOST_WEIGHTS:,} weights, got {weights:,}")


def load_state(path: Path) -> dict[str, Tensor]:
    """A state dict from a safetensors file, or from a torch file with ``weights_only``. No code of a pickle runs."""
    if not path.is_file():
        raise UserError(f"no weights at {path}")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise UserError(f"{path}: expected weights of at most {MOST_BYTES:,} bytes, got {size:,}")
    if path.suffix == ".safetensors":
        try:
            return dict(load_file(path))
        except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"{path} is damaged or is not a safetensors file: {_first_line(error)}") from None
    try:
        _check_archive(path)
        # A pickle can ask for more bytes than the file has. A file in memory sets none aside for that.
        file = path if zipfile.is_zipfile(path) else io.BytesIO(path.read_bytes())
        state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds here: pickle, zip, EOF and runtime errors
        raise UserError(f"{path} is not a plain state dict: {_first_line(error)}") from None
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()
    ):
        raise UserError(f"{path}: expected a state dict of tensors, got {type(state).__name__}")
    for key, value in state.items():
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            kind = "quantised" if value.is_quantized else "meta" if value.is_meta else str(value.layout)
            raise UserError(f"{path}: expected plain tensors, got a {kind} one as {shown(key)}")
    return {key.removeprefix("module."): value for key, value in state.items()}


def _check_archive(path: Path) -> None:
    """Refuse a torch file with packed parts. torch packs none, and a small packed part could fill the memory."""
    if not zipfile.is_zipfile(path):  # the format of torch before 1.6
        return
    with zipfile.ZipFile(path) as archive:
        if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
            raise UserError("its parts are packed, and torch does not pack them")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def check_fits(expected: Mapping[str, Tensor], state: Mapping[str, Tensor], origin: str) -> None:
    """Refuse a state with other names, shapes or kinds of numbers than expected. The error names the differences."""
    missing, extra = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    both = sorted(expected.keys() & state.keys())
    shapes = [
        f"{key} is {tuple(state[key].shape)}, expected {tuple(expected[key].shape)}"
        for key in both
        if state[key].shape != expected[key].shape
    ]
    kinds = [
        f"{key} is {state[key].dtype}, expected {expected[key].dtype}"
        for key in both
        if state[key].dtype != expected[key].dtype
        and not (state[key].is_floating_point() and expected[key].is_floating_point())
    ]
    problems = [
        f"{len(items)} {what} ({', '.join(shortened(item) for item in items[:3])}{', ...' if len(items) > 3 else ''})"
        for what, items in (
            ("missing", missing),
            ("unknown", extra),
            ("of another shape", shapes),
            ("of another kind", kinds),
        )
        if items
    ]
    if problems:
        raise UserError(f"{origin} belongs to another model: " + "; ".join(problems))


def load_weights(model: nn.Module, state: dict[str, Tensor], origin: str) -> None:
    """Load `state` into `model`. Numbers of another precision are converted, and a sentence says so."""
    expected = model.state_dict()
    check_fits(expected, state, origin)
    others = sorted({str(state[key].dtype) for key in expected if state[key].dtype != expected[key].dtype})
    if others:
        say(f"{origin}: weights in {', '.join(others)} are converted to the precision of the model")
    model.load_state_dict(state)
