"""One thread and one seed, so that every test is as quick and as repeatable beside others as alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.evidence_helpers import a_model, make

torch.set_num_threads(1)
hypothesis.settings.register_profile("steelman", deadline=None, derandomize=True, max_examples=60, database=None)
hypothesis.settings.load_profile("steelman")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evidence that stands."""
    return make(tmp_path_factory.mktemp("evidence") / "bundle", a_model())


@pytest.fixture
def bundle(original: Path, tmp_path: Path) -> Path:
    """A copy of it, to tamper with."""
    return shutil.copytree(original, tmp_path / "bundle")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where everything must be there (STEELMAN_REQUIRE_ALL), a test that skips for want of it fails instead."""
    report = yield
    wanted = any(item.get_closest_marker(name) for name in ("browser", "real_data"))
    if report.skipped and wanted and os.environ.get("STEELMAN_REQUIRE_ALL"):
        report.outcome = "failed"
        report.longrepr = f"required here, but skipped: {report.longrepr}"
    return report
