"""The examples run as they stand, and stay as short as they claim to be."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
MARK = "# --- the example"
LONGEST = 12
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "sample")


def test_there_is_one_for_each_case() -> None:
    assert NAMES == ["custom_attack", "custom_objective", "fit_dataset", "hugging_face", "own_loop"]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short(name: str) -> None:
    lines = (EXAMPLES / f"{name}.py").read_text().split(MARK)[1].splitlines()
    code = [line for line in lines if line.strip() and not line.strip().startswith('"""')]
    assert len(code) <= LONGEST, f"{name} has {len(code)} lines"


@pytest.mark.parametrize("name", NAMES)
def test_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "hugging_face":
        pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.manual_seed(0)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    sys.modules.pop("sample", None)
    said = capsys.readouterr().out
    assert "robust" in said
    assert "of 150" in said
    assert os.environ.get("HF_HUB_OFFLINE") in (None, "1")
