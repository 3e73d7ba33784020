"""MobileNetV2 with the strides for small images."""

from __future__ import annotations

from torch import Tensor, nn

from steelman.models.activations import make_activation
from steelman.models.base import Backbone, Shape

# Per stage: expansion, channels in units of `width`, blocks, stride of the first block.
STAGES = ((1, 2, 1, 1), (6, 3, 2, 1), (6, 4, 3, 2), (6, 8, 4, 2), (6, 12, 3, 1), (6, 20, 3, 2), (6, 40, 1, 1))


class InvertedResidual(nn.Module):
    """A 1x1, a depthwise 3x3 and a 1x1 convolution, each with batch norm; plus the input if the stride is 1."""

    def __init__(self, inputs: int, outputs: int, *, expansion: int, stride: int, activation: str) -> None:
        super().__init__()
        inner = expansion * inputs
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            make_activation(activation),
            nn.Conv2d(inner, inner, 3, stride=stride, padding=1, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            make_activation(activation),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module | None = None
        if stride == 1 and inputs == outputs:
            self.shortcut = nn.Identity()
        elif stride == 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.residual(x)
        return out if self.shortcut is None else out + self.shortcut(x)


class MobileNetV2(Backbone):
    """MobileNetV2 for small images: three layers have stride 2, and five in the network for ImageNet.

    width: 8 is the usual network, with 32 channels in the stem and 1280 features.

    Sandler et al. (2018, arXiv:1801.04381), in the usual version for CIFAR, which RAT (Jin et al., 2023) uses. It has
    plain ReLU. A block of stride 1 that changes the number of channels has a 1x1 convolution as its shortcut.
    PyTorch's default initialisation.
    """

    def __init__(self, *, input_shape: Shape, width: int = 8, activation: str = "relu") -> None:
        super().__init__(input_shape=input_shape, width=width)
        self.features = 160 * width
        inputs = 4 * width
        layers: list[nn.Module] = [
            nn.Conv2d(input_shape[0], inputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(inputs),
            make_activation(activation),
        ]
        for expansion, factor, count, first_stride in STAGES:
            for index in range(count):
                outputs = factor * width
                stride = first_stride if index == 0 else 1
                layers.append(
                    InvertedResidual(inputs, outputs, expansion=expansion, stride=stride, activation=activation)
                )
                inputs = outputs
        layers += [
            nn.Conv2d(inputs, self.features, 1, bias=False),
            nn.BatchNorm2d(self.features),
            make_activation(activation),
        ]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.layers(x)
        return maps.mean((2, 3))
