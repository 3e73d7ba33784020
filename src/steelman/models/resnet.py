"""Post-activation ResNets: ResNet-18 for small images, bottleneck ResNets for ImageNet."""

from __future__ import annotations

from torch import Tensor, nn

from steelman.models.activations import make_activation
from steelman.models.base import Backbone, Shape, init_convolutions
from steelman.models.denoise import denoised


def shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The identity if the shape does not change, else a 1x1 convolution and batch norm."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    """out = act(bn2(conv2(act(bn1(conv1(x))))) + shortcut(x))."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, activation: str) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            make_activation(activation),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = shortcut(inputs, outputs, stride)
        self.act = make_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.residual(x) + self.shortcut(x))
        return out


class Bottleneck(nn.Module):
    """out = act(r(x) + shortcut(x)). r is a 1x1, a 3x3 (with the stride) and a 1x1 convolution, each with BN."""

    def __init__(self, inputs: int, inner: int, outputs: int, *, stride: int, activation: str) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            make_activation(activation),
            nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(inner),
            make_activation(activation),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = shortcut(inputs, outputs, stride)
        self.act = make_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.residual(x) + self.shortcut(x))
        return out


class ResNet18(Backbone):
    """ResNet-18 for small images: a 3x3 stem and stages of 4, 8, 16 and 32 times `width` channels, then the mean.

    width: 16 is the usual network (64 to 512 channels); PAS (Liu et al., 2020) uses 8.
    denoise: "softmax", "dot", "mean" or "median" ends each stage with that feature denoising block.

    He et al. (2016, arXiv:1512.03385). Initialisation is PyTorch's default, as in the code of PAS.
    """

    def __init__(self, *, input_shape: Shape, width: int = 16, activation: str = "relu", denoise: str = "none") -> None:
        super().__init__(input_shape=input_shape, width=width)
        self.features = 32 * width
        inputs = 4 * width
        layers: list[nn.Module] = [
            nn.Conv2d(input_shape[0], inputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(inputs),
            make_activation(activation),
        ]
        for stage in range(4):
            for index in range(2):
                stride = 2 if stage > 0 and index == 0 else 1
                outputs = 4 * width * 2**stage
                layers.append(BasicBlock(inputs, outputs, stride=stride, activation=activation))
                inputs = outputs
            layers += denoised(inputs, denoise)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.layers(x)
        return maps.mean((2, 3))


class BottleneckResNet(Backbone):
    """ResNet for ImageNet: a 7x7 stem, a max-pool, four stages of bottlenecks, then the mean.

    blocks: the number of blocks in each of the four stages.
    widening: the factor for the width of the inner convolutions: 1 for ResNet-50, 2 for WRN-50-2.
    width: channels of the stem, 64 in the papers. The output has 32 times as many.
    denoise: "softmax", "dot", "mean" or "median" ends each stage with that feature denoising block.

    He et al. (2016, arXiv:1512.03385), and Zagoruyko and Komodakis (2016, arXiv:1605.07146) for the wide ones. The 3x3
    convolution has the stride, as is usual; in the paper the first 1x1 convolution has it. Convolutions are drawn from
    N(0, 2 / fan_out).
    """

    def __init__(
        self,
        blocks: tuple[int, int, int, int],
        widening: int = 1,
        /,
        *,
        input_shape: Shape,
        width: int = 64,
        activation: str = "relu",
        denoise: str = "none",
    ) -> None:
        super().__init__(input_shape=input_shape, width=width)
        self.features = 32 * width
        inputs = width
        layers: list[nn.Module] = [
            nn.Conv2d(input_shape[0], width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            make_activation(activation),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        for stage, count in enumerate(blocks):
            planes = width * 2**stage
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(Bottleneck(inputs, widening * planes, 4 * planes, stride=stride, activation=activation))
                inputs = 4 * planes
            layers += denoised(inputs, denoise)
        self.layers = nn.Sequential(*layers)
        init_convolutions(self, "fan_out")

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.layers(x)
        return maps.mean((2, 3))
