"""float32 is float32 where a verdict is found and checked, and what the caller allowed is allowed again after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelman.precision import full_precision
from steelman.threat import ThreatModel
from tests.evidence_helpers import a_model, check, evaluate, make, the_data


def state() -> list[Any]:
    backends: Any = torch.backends
    return [backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32, backends.mkldnn.matmul.fp32_precision]


@pytest.fixture(autouse=True)
def _coarse() -> Iterator[None]:
    before, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.set_float32_matmul_precision(before)
    torch.backends.cudnn.allow_tf32 = tf32


def test_coarse_products_are_off_inside_and_as_before_after() -> None:
    before = state()
    assert before == [True, True, "bf16"]
    with full_precision():
        assert state() == [False, False, "ieee"]
    with pytest.raises(ZeroDivisionError), full_precision():
        _ = 1 / 0
    assert state() == before


def test_where_the_new_switches_were_used() -> None:
    backends: Any = torch.backends
    backends.cudnn.conv.fp32_precision = "ieee"  # now the old one cannot be read
    try:
        with pytest.raises(RuntimeError):
            _ = backends.cudnn.allow_tf32
        with full_precision():
            assert backends.cuda.matmul.fp32_precision == "ieee"
        assert backends.cuda.matmul.fp32_precision == "tf32"
        assert backends.cudnn.conv.fp32_precision == "ieee"
    finally:
        backends.cudnn.conv.fp32_precision = "tf32"


class Looking(nn.Module):
    """A model that notes how exact the products are when it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.net = a_model()

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(state())
        out: Tensor = self.net(x)
        return out


SEEN: list[list[Any]] = []


def test_an_evaluation_and_its_check(tmp_path: Any) -> None:
    SEEN.clear()
    source = the_data()
    evaluate(Looking().eval(), source, None, ThreatModel(eps=0.05), "fast", samples=8)
    assert len(SEEN) > 10
    assert all(one == [False, False, "ieee"] for one in SEEN)
    make(tmp_path / "bundle", Looking().eval())
    SEEN.clear()
    check(tmp_path / "bundle", Looking().eval())
    assert SEEN
    assert all(one == [False, False, "ieee"] for one in SEEN)
