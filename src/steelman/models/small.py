"""Small networks: three for MNIST, one for 8x8 digits, and two without convolutions."""

from __future__ import annotations

import math

from torch import Tensor, nn

from steelman.errors import UserError
from steelman.models.activations import make_activation
from steelman.models.base import Backbone, Shape, init_convolutions


class LeNet(Backbone):
    """conv5x5 2w, pool, conv5x5 4w, pool, fc 64w.

    width: w; 16 gives the 32, 64 and 1024 of Madry et al. (2018, arXiv:1706.06083).

    Convolutions keep the size of the map, as in that paper and in PAS (Liu et al., 2020). PyTorch's default
    initialisation, as in the code of PAS.
    """

    def __init__(self, *, input_shape: Shape, width: int = 16, activation: str = "relu") -> None:
        super().__init__(input_shape=input_shape, width=width, smallest=4)
        self.features = 64 * width
        channels, height, breadth = input_shape
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 2 * width, 5, padding=2),
            make_activation(activation),
            nn.MaxPool2d(2),
            nn.Conv2d(2 * width, 4 * width, 5, padding=2),
            make_activation(activation),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * width * (height // 4) * (breadth // 4), self.features),
            make_activation(activation),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class SmallCNN(Backbone):
    """Two unpadded conv3x3 w, pool, two conv3x3 2w, pool, fc, dropout 0.5, fc.

    width: w; 32 gives the 32, 64 and 200 of TRADES (Zhang et al., 2019, arXiv:1901.08573).

    Convolutions are drawn from N(0, 2 / fan_in) with zero biases, as in the code of TRADES. That code also starts the
    last layer at zero. Here the last layer is the head, which has the option `zero_init`.
    """

    def __init__(self, *, input_shape: Shape, width: int = 32, activation: str = "relu") -> None:
        super().__init__(input_shape=input_shape, width=width, smallest=16)
        self.features = 25 * width // 4
        channels, height, breadth = (input_shape[0], *(((size - 4) // 2 - 4) // 2 for size in input_shape[1:]))
        self.conv1 = nn.Conv2d(channels, width, 3)
        self.conv2 = nn.Conv2d(width, width, 3)
        self.conv3 = nn.Conv2d(width, 2 * width, 3)
        self.conv4 = nn.Conv2d(2 * width, 2 * width, 3)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(2 * width * height * breadth, self.features)
        self.dropout = nn.Dropout(0.5)
        self.fc2 = nn.Linear(self.features, self.features)
        self.act = make_activation(activation)
        init_convolutions(self, "fan_in")

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act(self.conv2(self.act(self.conv1(x)))))
        x = self.pool(self.act(self.conv4(self.act(self.conv3(x)))))
        x = self.dropout(self.act(self.fc1(x.flatten(1))))
        out: Tensor = self.act(self.fc2(x))
        return out


class FastMNIST(Backbone):
    """conv4x4 w and conv4x4 2w, both of stride 2, then fc.

    width: w; 16 gives the 16, 32 and 100 of the MNIST network of FastAT (Wong et al., 2020, arXiv:2001.03994).

    PyTorch's default initialisation, as in the code of FastAT.
    """

    def __init__(self, *, input_shape: Shape, width: int = 16, activation: str = "relu") -> None:
        super().__init__(input_shape=input_shape, width=width, smallest=4)
        self.features = 25 * width // 4
        channels, height, breadth = input_shape
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 4, stride=2, padding=1),
            make_activation(activation),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1),
            make_activation(activation),
            nn.Flatten(),
            nn.Linear(2 * width * (height // 4) * (breadth // 4), self.features),
            make_activation(activation),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class DigitsCNN(Backbone):
    """conv3x3 w, conv3x3 2w of stride 2, fc 8w: quick on images as small as 8x8.

    PyTorch's default initialisation.
    """

    def __init__(self, *, input_shape: Shape, width: int = 16, activation: str = "relu") -> None:
        super().__init__(input_shape=input_shape, width=width)
        self.features = 8 * width
        channels, height, breadth = input_shape
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1),
            make_activation(activation),
            nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            make_activation(activation),
            nn.Flatten(),
            nn.Linear(2 * width * ((height + 1) // 2) * ((breadth + 1) // 2), self.features),
            make_activation(activation),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class MLP(Backbone):
    """Two hidden layers of `width` units on the pixels. PyTorch's default initialisation."""

    def __init__(self, *, input_shape: Shape, width: int = 128, activation: str = "relu") -> None:
        super().__init__(input_shape=input_shape, width=width)
        self.features = width
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(math.prod(input_shape), width),
            make_activation(activation),
            nn.Linear(width, width),
            make_activation(activation),
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Linear(Backbone):
    """The pixels themselves. With a linear head it is a linear model, without options for width and activation."""

    def __init__(self, *, input_shape: Shape, width: int = 1, activation: str = "relu") -> None:
        super().__init__(input_shape=input_shape, width=width)
        self.features = math.prod(input_shape)
        if width != 1 or activation != "relu":
            raise UserError(f"the linear model takes no width and no activation, got {width!r} and {activation!r}")

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)
