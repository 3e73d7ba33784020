"""A head on a model, or on a copy of it."""

from __future__ import annotations

import torch
from torch import nn

from steelman.heads import embed, head_of


def test_a_copy_gets_the_head_and_the_model_stays_as_it_is() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).train()
    x = torch.rand(5, 1, 2, 2)
    last = net[-1]
    assert isinstance(last, nn.Linear)
    layers, before = list(net), {name: value.clone() for name, value in net.state_dict().items()}
    other = embed(net, "he", scale=10, copy=True)
    assert other is not net
    head = head_of(other)
    assert head is not None
    assert head.scale == 10
    assert head.training
    assert list(net) == layers
    assert torch.equal(head.weight, last.weight)
    other(x).sum().backward()
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items()), "nothing is shared"
    assert all(parameter.grad is None for parameter in net.parameters())


def test_without_a_copy_the_model_itself_is_changed() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    assert embed(net) is net
    assert head_of(net) is net[-1]
