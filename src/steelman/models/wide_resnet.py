"""Wide ResNets for small images."""

from __future__ import annotations

from torch import Tensor, nn

from steelman.errors import UserError
from steelman.models.activations import make_activation
from steelman.models.base import Backbone, Shape, init_convolutions
from steelman.models.denoise import denoised
from steelman.models.preact_resnet import PreActBlock


class WideResNet(Backbone):
    """Wide ResNet: a 3x3 stem of 16 channels, three stages of 16, 32 and 64 times `width`, BN, activation, mean.

    depth: 6n + 4, for n blocks in a stage.
    width: the widening factor.
    denoise: "softmax", "dot", "mean" or "median" ends each stage with that feature denoising block.

    Zagoruyko and Komodakis (2016, arXiv:1605.07146), in the version of the code of TRADES (Zhang et al., 2019). A
    shortcut that changes the shape reads act(bn(x)). Convolutions are drawn from N(0, 2 / fan_out). That code also has
    a copy of the first stage that it never runs; it is left out here.
    """

    def __init__(
        self, depth: int, /, *, input_shape: Shape, width: int = 10, activation: str = "relu", denoise: str = "none"
    ) -> None:
        super().__init__(input_shape=input_shape, width=width)
        self.features = 64 * width
        if depth < 10 or depth % 6 != 4:
            raise UserError(f"expected a depth of 6n + 4 with n >= 1, such as 28 or 34, got {depth!r}")
        self.stem = nn.Conv2d(input_shape[0], 16, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        inputs = 16
        for stage in range(3):
            for index in range((depth - 4) // 6):
                stride = 2 if stage > 0 and index == 0 else 1
                outputs = 16 * width * 2**stage
                blocks.append(PreActBlock(inputs, outputs, stride=stride, activation=activation))
                inputs = outputs
            blocks += denoised(inputs, denoise)
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(self.features)
        self.act = make_activation(activation)
        init_convolutions(self, "fan_out")

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.act(self.bn(self.blocks(self.stem(x))))
        return maps.mean((2, 3))
