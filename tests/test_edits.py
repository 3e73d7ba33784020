"""A small version of benchmarks/edits.py: each edit that passes has a reason, and no edit ends in a traceback."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from steelman.evaluation.suites import SUITES


@pytest.fixture(scope="module")
def edits() -> Any:
    spec = importlib.util.spec_from_file_location("edits", Path(__file__).parents[1] / "benchmarks" / "edits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "edits", module)  # its dataclasses look themselves up there
        spec.loader.exec_module(module)
        yield module


def test_each_edit_is_refused_or_explained(edits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "SUBJECTS", {name: edits.SUBJECTS[name] for name in ("own", "protocol")})
    table = edits.run(tmp_path, every=37, spread=2)
    assert table.open == []
    assert table.tried.total() > 80
    assert table.passed.total() < table.tried.total() / 3
    refused = {kind for (mode, kind), tried in table.tried.items() if tried > table.passed[mode, kind]}
    assert len(refused) > 15


def test_an_edit_without_a_reason_is_open(edits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert edits.explained("own", "plain", "seed to 1")
    assert not edits.explained("own", "plain", "verdict.trust to 1")
    assert not edits.explained("fast", "resealed", "suite.stages.0.name to 1")
    monkeypatch.setattr(edits, "REASONS", [])
    assert not edits.explained("own", "plain", "seed to 1")


def test_audits_find_forged_evidence(edits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "quick", edits.quick)
    assert edits.audits(tmp_path, salts=1) == (1, 1)
