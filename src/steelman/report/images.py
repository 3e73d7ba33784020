"""Turns image tensors into PNG data URIs."""

from __future__ import annotations

import base64
import io

import torch
from PIL import Image
from torch import Tensor

from steelman.errors import UserError


def scaled_perturbation(delta: Tensor, *, norm: str, eps: float) -> Tensor:
    """A perturbation δ as an image in [0, 1]. A pixel without change is mid-grey.

    For linf it is (δ + eps) / (2 eps). In other norms eps does not bound each pixel, so it is (δ + m) / (2 m) with
    m = max|δ|.

    >>> scaled_perturbation(torch.tensor([-0.1, 0.0, 0.1]), norm="linf", eps=0.1)
    tensor([0.0000, 0.5000, 1.0000])
    """
    reach = eps if norm == "linf" else float(delta.abs().max())
    return (delta + reach) / (2 * reach) if reach > 0 else torch.full_like(delta, 0.5)


def data_uri(image: Tensor) -> str:
    """A grey (1, H, W) or RGB (3, H, W) image in [0, 1] as a PNG data URI of the same size."""
    if image.ndim != 3 or image.shape[0] not in (1, 3):
        raise UserError(f"expected a grey or RGB image of shape (1 or 3, H, W), got shape {tuple(image.shape)}")
    levels = (image.detach().cpu().double().nan_to_num() * 255).round().clamp(0, 255).to(torch.uint8)
    pixels = levels[0] if len(levels) == 1 else levels.permute(1, 2, 0)
    buffer = io.BytesIO()
    Image.fromarray(pixels.contiguous().numpy()).save(buffer, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
