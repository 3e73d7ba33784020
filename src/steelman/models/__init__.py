"""Backbones: images to features. Each file holds one family of architectures, and MODELS has all of them by name.

>>> import torch
>>> backbone = MODELS["wrn-28-8"](input_shape=(3, 32, 32), width=1, activation="softplus")
>>> backbone(torch.rand(2, 3, 32, 32)).shape, backbone.features
(torch.Size([2, 64]), 64)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from steelman.models.activations import ACTIVATIONS
from steelman.models.base import Backbone, check_images
from steelman.models.mobilenet import MobileNetV2
from steelman.models.preact_resnet import PreActResNet18
from steelman.models.published import PUBLISHED_LAYOUTS
from steelman.models.resnet import BottleneckResNet, ResNet18
from steelman.models.small import MLP, DigitsCNN, FastMNIST, LeNet, Linear, SmallCNN
from steelman.models.vgg import VGG16
from steelman.models.wide_resnet import WideResNet


def _variant(
    summary: str, family: Callable[..., Backbone], *wiring: object, **defaults: object
) -> Callable[..., Backbone]:
    """One architecture of a family, with a summary for the lists.

    Depth and wiring are given by position, so they are not options. The width is an option.
    """
    made = partial(family, *wiring, **defaults)
    made.summary = summary  # type: ignore[attr-defined]
    return made


MODELS: dict[str, Callable[..., Backbone]] = {
    "digits-cnn": DigitsCNN,
    "fastat-mnist": FastMNIST,
    "lenet": LeNet,
    "linear": Linear,
    "mlp": MLP,
    "mobilenet-v2": MobileNetV2,
    "pas-resnet18": partial(ResNet18, width=8),
    "pas-vgg16": partial(VGG16, width=8),
    "preact-resnet18": PreActResNet18,
    "preact-resnet18-fastat": _variant(
        "PreActResNet-18 of FastAT: its shortcuts read the raw input.", PreActResNet18, "raw"
    ),
    "resnet18": ResNet18,
    "resnet50": _variant("ResNet-50 for ImageNet.", BottleneckResNet, (3, 4, 6, 3)),
    "resnet152": _variant("ResNet-152 for ImageNet.", BottleneckResNet, (3, 8, 36, 3)),
    "smallcnn": SmallCNN,
    "vgg16": VGG16,
    "wrn-28-8": _variant("Wide ResNet of depth 28, 8 times as wide, for small images.", WideResNet, 28, width=8),
    "wrn-28-10": _variant("Wide ResNet of depth 28, 10 times as wide, for small images.", WideResNet, 28, width=10),
    "wrn-34-10": _variant("Wide ResNet of depth 34, 10 times as wide, for small images.", WideResNet, 34, width=10),
    "wrn-34-20": _variant("Wide ResNet of depth 34, 20 times as wide, for small images.", WideResNet, 34, width=20),
    "wrn-40-8": _variant("Wide ResNet of depth 40, 8 times as wide, for small images.", WideResNet, 40, width=8),
    "wrn-50-2": _variant("ResNet-50 with twice as wide bottlenecks, for ImageNet.", BottleneckResNet, (3, 4, 6, 3), 2),
    "wrn-101-2": _variant(
        "ResNet-101 with twice as wide bottlenecks, for ImageNet.", BottleneckResNet, (3, 4, 23, 3), 2
    ),
}

__all__ = ["ACTIVATIONS", "MODELS", "PUBLISHED_LAYOUTS", "Backbone", "check_images"]
