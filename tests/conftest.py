"""One thread and one seed, so that every test is as quick and as repeatable beside others as alone."""

from __future__ import annotations

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("steelman", deadline=None, derandomize=True, max_examples=60, database=None)
hypothesis.settings.load_profile("steelman")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
