"""Reading a model's features: what enters the layer that gives its logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steelman.errors import UserError
from steelman.heads import Head, head_of, heads_of

# The mean cosine of features from which a head that looks at their directions is warned of.
PARALLEL = 0.995


def last_layer(model: nn.Module) -> Head | nn.Linear:
    """What turns a model's features into logits: its steelman head, or else the last linear layer it defines."""
    head = head_of(model)
    if head is not None:
        return head
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise UserError(
            f"expected a model whose logits come from a linear layer or a steelman head, got {type(model).__name__} "
            "without either"
        )
    return layers[-1]


@contextlib.contextmanager
def features_of(model: nn.Module) -> Iterator[list[Tensor]]:
    """Inside, each forward of the model, however it is wrapped, adds the features that entered its last layer.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> with features_of(net) as seen:
    ...     logits = net(torch.rand(2, 1, 2, 2))
    >>> seen[0].shape
    torch.Size([2, 8])
    """
    seen: list[Tensor] = []
    handle = last_layer(model).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        yield seen
    finally:
        handle.remove()


def check_features(layer: Head | nn.Linear, seen: list[Tensor], logits: Tensor, forwards: int) -> None:
    """Raise unless the logits of `forwards` forwards can have come from the layer whose inputs were `seen`."""
    if len(seen) != forwards or len(layer.weight) != logits.shape[1]:
        raise UserError(
            f"expected the model's last linear layer to run once in a forward and give its {logits.shape[1]} logits, "
            f"got one with {len(layer.weight)} outputs that ran {len(seen)} times in {forwards}"
        )


def check_readable(model: nn.Module, x: Tensor) -> None:
    """Raise unless the features of a model, which enters its last layer once a forward, can be read; `x` are images."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), features_of(model) as seen:
            logits = model.eval()(x)
    finally:
        for module, training in modes:
            module.training = training
    check_features(last_layer(model), seen, logits, 1)


def parallel(model: nn.Module, x: Tensor) -> str:
    """What to say when a head looks at the directions of features that all point the same way; else nothing.

    Such a head sees almost the same input for every image, and learns slowly or not at all. Softplus does this: its
    features are all above zero.
    """
    head = head_of(model) if len(heads_of(model)) < 2 else None
    if head is None or not head.normalise_features or len(x) < 2:
        return ""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), features_of(model) as seen:
            model.eval()(x)
    finally:
        for module, training in modes:
            module.training = training
    z = F.normalize(seen[0].flatten(1).double(), dim=1)
    n = len(z)
    cosine = float(((z @ z.T).sum() - n) / (n * (n - 1)))
    if cosine < PARALLEL:
        return ""
    return (
        f"the features of different images are almost parallel (mean cosine {cosine:.4f}), and the head looks at their "
        "direction alone: expect slow learning, or take another activation than softplus, batch norm before the head, "
        "or a linear head"
    )
