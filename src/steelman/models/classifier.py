"""Classifier: input normalisation, backbone and head. Also models from an import path, and weights from files."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from steelman.errors import UserError
from steelman.heads import Head, build_head, embed
from steelman.models.base import check_images
from steelman.progress import say


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
    """
    from steelman.models import MODELS
    from steelman.settings import make

    if ":" in name:
        if tuple(mean) != (0.0,) or tuple(std) != (1.0,):
            raise UserError(f"mean and std: {name} normalises its own input; expected neither, got {mean} and {std}")
        from steelman.models.wrap import detected  # wrap imports attacks, and they import models

        model, sentence = detected(imported(name, **options), torch.full((2, *input_shape), 0.5))
        if sentence:
            say(sentence)
        if head != "linear" or head_options:
            embed(model, head, **(head_options or {}))
        return model
    backbone = make("model", MODELS, name, {"input_shape": input_shape, **options})
    built = build_head(head, backbone.features, num_classes, **(head_options or {}))
    model = Classifier(backbone, built, input_shape, mean, std)
    model.spec = {
        "model": {"name": name, "options": options, "mean": tuple(mean), "std": tuple(std), "weights": None},
        "head": {"name": head, "options": head_options or {}},
    }
    return model


def imported(path: str, **options: Any) -> nn.Module:
    """The model that ``package.module:factory`` makes. The import runs that module's code."""
    module_name, _, attribute = path.partition(":")
    if str(Path.cwd()) not in sys.path:  # a console command does not import from the current folder by itself
        sys.path.append(str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"cannot import {path!r} (expected package.module:factory): {error}") from None
    try:
        model = factory(**options)
    except TypeError as error:
        raise UserError(f"{path} could not be called with {options}: {error}") from None
    if not isinstance(model, nn.Module):
        raise UserError(f"{path} should give a torch.nn.Module, got {type(model).__name__}")
    return model


def load_state(path: Path) -> dict[str, Tensor]:
    """A state dict from a safetensors file, or from a torch file with ``weights_only``. No code of a pickle runs."""
    if not path.is_file():
        raise UserError(f"no weights at {path}")
    if path.suffix == ".safetensors":
        try:
            return dict(load_file(path))
        except SafetensorError as error:
            raise UserError(f"{path} is damaged or is not a safetensors file: {error}") from None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds here: pickle, zip, EOF and runtime errors
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"{path} is not a plain state dict: {reason}") from None
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path}: expected a state dict of tensors, got {type(state).__name__}")
    return {key.removeprefix("module."): value for key, value in state.items()}


def load_weights(model: nn.Module, state: dict[str, Tensor], origin: str) -> None:
    """Load `state` into `model`. The error for a state of another model names the differences."""
    expected = model.state_dict()
    missing, extra = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    shapes = [
        f"{key} is {tuple(state[key].shape)}, expected {tuple(expected[key].shape)}"
        for key in sorted(expected.keys() & state.keys())
        if state[key].shape != expected[key].shape
    ]
    problems = [
        f"{len(items)} {what} ({', '.join(items[:3])}{', ...' if len(items) > 3 else ''})"
        for what, items in (("missing", missing), ("unknown", extra), ("of another shape", shapes))
        if items
    ]
    if problems:
        raise UserError(f"{origin} belongs to another model: " + "; ".join(problems))
    model.load_state_dict(state)
