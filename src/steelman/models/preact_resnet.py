"""Pre-activation ResNet-18 for small images."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from steelman.models.activations import make_activation
from steelman.models.base import Backbone, Shape
from steelman.models.denoise import denoised


class PreActBlock(nn.Module):
    """out = conv2(act(bn2(conv1(a)))) + shortcut, with a = act(bn1(x)).

    The shortcut is x itself if the shape does not change. Else it is a 1x1 convolution of `a`, or of x with `projects`
    "raw".
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        stride: int,
        activation: str,
        projects: Literal["activated", "raw"] = "activated",
    ) -> None:
        super().__init__()
        self.projects = projects
        self.bn1 = nn.BatchNorm2d(inputs)
        self.act1 = make_activation(activation)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.act2 = make_activation(activation)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = stride == 1 and inputs == outputs
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated: Tensor = self.act1(self.bn1(x))
        skip = x
        if self.shortcut is not None:
            skip = self.shortcut(activated if self.projects == "activated" else x)
        out: Tensor = self.conv2(self.act2(self.bn2(self.conv1(activated))))
        return out + skip


class PreActResNet18(Backbone):
    """Pre-activation ResNet-18: a 3x3 stem, stages of 1, 2, 4 and 8 times `width` channels, BN, activation, mean.

    width: channels of the first stage, 64 in the papers.
    denoise: "softmax", "dot", "mean" or "median" ends each stage with that feature denoising block.

    `projects` is the input of a shortcut that changes the shape. He et al. (2016, arXiv:1603.05027) and the code of AWP
    and RAT use the activated input. The code of FastAT and FreeAT (Wong et al., 2020) uses the raw input. All use
    PyTorch's default initialisation.
    """

    def __init__(
        self,
        projects: Literal["activated", "raw"] = "activated",
        /,
        *,
        input_shape: Shape,
        width: int = 64,
        activation: str = "relu",
        denoise: str = "none",
    ) -> None:
        super().__init__(input_shape=input_shape, width=width)
        self.features = 8 * width
        self.stem = nn.Conv2d(input_shape[0], width, 3, padding=1, bias=False)
        blocks: list[nn.Module] = []
        inputs = width
        for stage in range(4):
            for index in range(2):
                stride = 2 if stage > 0 and index == 0 else 1
                outputs = width * 2**stage
                blocks.append(PreActBlock(inputs, outputs, stride=stride, activation=activation, projects=projects))
                inputs = outputs
            blocks += denoised(inputs, denoise)
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(self.features)
        self.act = make_activation(activation)

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.act(self.bn(self.blocks(self.stem(x))))
        return maps.mean((2, 3))
