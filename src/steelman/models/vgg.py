"""VGG-16 with batch normalisation, for small images."""

from __future__ import annotations

from torch import Tensor, nn

from steelman.models.activations import make_activation
from steelman.models.base import Backbone, Shape

STAGES = ((4, 4), (8, 8), (16, 16, 16), (32, 32, 32), (32, 32, 32))


class VGG16(Backbone):
    """VGG-16-BN: 3x3 convolutions in five stages, a 2x2 max-pool at the end of each stage, then the mean.

    width: multiplies (4, 8, 16, 32, 32). 16 is the usual network (64 to 512 channels). 8 is our choice for PAS, which
    does not publish its width. The three linear layers of the original become one: the head.

    Simonyan and Zisserman (2015, arXiv:1409.1556). Convolutions have biases and PyTorch's default initialisation,
    as in the code of PAS (Liu et al., 2020).
    """

    def __init__(self, *, input_shape: Shape, width: int = 16, activation: str = "relu") -> None:
        super().__init__(input_shape=input_shape, width=width, smallest=2 ** len(STAGES))
        self.features = 32 * width
        layers: list[nn.Module] = []
        inputs = input_shape[0]
        for stage in STAGES:
            for factor in stage:
                outputs = factor * width
                layers += [
                    nn.Conv2d(inputs, outputs, 3, padding=1),
                    nn.BatchNorm2d(outputs),
                    make_activation(activation),
                ]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.layers(x)
        return maps.mean((2, 3))
