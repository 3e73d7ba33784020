"""Converters from the state dicts of published models to that of `Classifier`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from steelman.errors import UserError

_TRADES_SMALLCNN = {
    **{f"feature_extractor.conv{i}": f"backbone.conv{i}" for i in (1, 2, 3, 4)},
    "classifier.fc1": "backbone.fc1",
    "classifier.fc2": "backbone.fc2",
    "classifier.fc3": "head",
}


def trades_smallcnn(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The MNIST model published with TRADES (Zhang et al., 2019), for the backbone ``smallcnn``.

    The published model does not normalise pixels. So the classifier's mean becomes 0, and its std 1.
    """
    names = {f"{old}.{part}": f"{new}.{part}" for old, new in _TRADES_SMALLCNN.items() for part in ("weight", "bias")}
    if wrong := sorted(names.keys() ^ state.keys()):
        raise UserError(f"expected the state dict of the TRADES SmallCNN; missing or unexpected: {', '.join(wrong)}")
    identity = {"mean": torch.zeros(1, 1, 1, 1), "std": torch.ones(1, 1, 1, 1)}
    return identity | {new: state[old] for old, new in names.items()}


PUBLISHED_LAYOUTS: dict[str, Callable[[Mapping[str, Tensor]], dict[str, Tensor]]] = {
    "trades-smallcnn": trades_smallcnn,
}
