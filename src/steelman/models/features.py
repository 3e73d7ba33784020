"""Reading a model's features: the inputs of the layer that gives its logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steelman.errors import UserError
from steelman.heads import Head, head_of, heads_of

# `parallel` warns if the mean cosine between the features of different images is at least this.
PARALLEL = 0.995


def last_layer(model: nn.Module) -> Head | nn.Linear:
    """The layer that turns features into logits: the steelman head, or else the last linear layer of the model."""
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
    """Inside, each forward of the model adds the features that entered its last layer to the yielded list.

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
    """Raise unless `layer`, whose inputs were `seen`, ran once in each of `forwards` forwards and gave the logits."""
    if len(seen) != forwards or len(layer.weight) != logits.shape[1]:
        raise UserError(
            f"expected the model's last linear layer to run once in a forward and give its {logits.shape[1]} logits, "
            f"got one with {len(layer.weight)} outputs that ran {len(seen)} times in {forwards}"
        )


def check_readable(model: nn.Module, x: Tensor) -> None:
    """Raise unless the features of a model can be read: its last layer runs once in a forward of the images `x`."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad(), features_of(model) as seen:
            logits = model.eval()(x)
    finally:
        for module, training in modes:
            module.training = training
    check_features(last_layer(model), seen, logits, 1)


def parallel(model: nn.Module, x: Tensor) -> str:
    """A warning if the head normalises features and the features are almost parallel; else an empty text.

    Such a head gets almost the same input for every image, so it learns slowly or not at all. Softplus is a usual
    cause: all its features are above zero.
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
        f"the features of different images are almost parallel (mean cosine {cosine:.4f}), and the head uses only "
        "their direction: the model will learn slowly. What helps: another activation than softplus, batch norm before "
        "the head, or a linear head"
    )
