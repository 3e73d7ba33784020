"""The base class of all backbones: size, input shape, and the checks on both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from steelman.errors import UserError, shown

Shape = tuple[int, int, int]
WIDEST = 1 << 16


class Backbone(nn.Module):
    """Images (N, C, H, W) to features (N, `features`).

    Arguments:
        input_shape: (C, H, W) of the images.
        width: base width or widening factor, as the architecture defines it.
        smallest: the smallest height and width that the architecture can take.
    """

    features: int
    input_shape: Shape

    def __init__(self, *, input_shape: Shape, width: int, smallest: int = 1) -> None:
        super().__init__()
        shape = tuple(input_shape) if isinstance(input_shape, tuple | list) else ()
        if len(shape) != 3 or not all(_is_count(size) for size in shape):
            raise UserError(f"expected an input shape of three positive integers (C, H, W), got {input_shape!r}")
        if min(shape[1:]) < smallest:
            name = type(self).__name__
            raise UserError(f"{name} expects images of at least {smallest}x{smallest}, got {shape[1]}x{shape[2]}")
        if not _is_count(width) or width > WIDEST:
            raise UserError(f"expected a width that is a positive integer of at most {WIDEST:,}, got {shown(width)}")
        self.input_shape = (shape[0], shape[1], shape[2])

    if TYPE_CHECKING:  # PyTorch types the call of a module as Any

        def __call__(self, x: Tensor) -> Tensor: ...


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_images(x: Tensor, input_shape: tuple[int, ...]) -> None:
    """Raise unless `x` is a batch of floating-point images of the expected shape. This reads no pixel."""
    if x.ndim != 4 or tuple(x.shape[1:]) != tuple(input_shape):
        expected = ", ".join(map(str, input_shape))
        raise UserError(f"expected images of shape (N, {expected}), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise UserError(f"expected floating-point images, got {x.dtype}")


def init_convolutions(module: nn.Module, mode: Literal["fan_in", "fan_out"]) -> None:
    """Draw every convolution from N(0, 2 / fan) and zero its bias (He et al., 2015)."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode=mode, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
