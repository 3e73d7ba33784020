"""What ``steelman doctor`` says of a machine: all of it, quickly, and true of what is missing."""

from __future__ import annotations

import importlib.util
import io
import platform
import re
import shutil
import time
from pathlib import Path

import numpy
import pytest
import torch
from rich.console import Console

import steelman
from steelman.cli import doctor, listing
from steelman.data import DATASETS


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What it prints here: what stands beside each word, of a machine without datasets."""
    monkeypatch.setenv("STEELMAN_DATA", str(tmp_path / "kept"))
    console = Console(record=True, width=200, file=io.StringIO())
    monkeypatch.setattr(listing, "console", console)
    started = time.monotonic()
    doctor.examine(console)
    assert time.monotonic() - started < 10
    rows = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in console.export_text().splitlines())
    return {row[0]: row[1] for row in rows if len(row) == 2}


def test_it_says_all_there_is(told: dict[str, str], tmp_path: Path) -> None:
    assert told["steelman"] == steelman.__version__
    assert told["torch"] == torch.__version__
    assert told["numpy"] == numpy.__version__
    assert told["python"] == platform.python_version()
    assert told["platform"] == platform.platform()
    assert re.search(r"\d+ cores, \d+ of them for this process", told["CPU"])
    assert told["threads"].startswith(f"{torch.get_num_threads()} used by torch")
    assert re.match(r"[\d,]+ GFLOP/s", told["float32"])
    assert re.match(
        r"[\d,]+ GFLOP/s, [\d.e+-]+ times float32; steelman evaluate (uses|searches)|none: ", told["bfloat16"]
    )
    assert re.match(r"[1-9][\d,]* images per second", told["PGD"])
    assert told["data"] == f"in {tmp_path / 'kept'}"
    assert DATASETS.keys() <= told.keys()
    assert told["mnist"] == "not here; run: steelman data get mnist"
    assert not (tmp_path / "kept").exists(), "looking changes nothing"
    assert not [word for word in ("tensorboard", "transformers", "Chromium", "C++ compiler") if word not in told]


def test_a_missing_part_says_what_it_is_for_and_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there = dict(doctor.optional_parts())
    assert there["pytest"] == f"there: {pytest.__version__}"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    missing = doctor.optional_parts()
    assert missing
    for name, said in missing:
        assert re.fullmatch(r"missing: needed for .+; install with: (pip|apt) install \S+( \(on Debian\))?", said), name
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/google-chrome" if name == "google-chrome" else None)
    assert dict(doctor.optional_parts())["Chromium"] == "there"
    assert dict(doctor.optional_parts())["chromedriver"].startswith("missing")


def test_a_machine_without_bfloat16_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    product = doctor._product

    def refuses(device: torch.device, kind: torch.dtype) -> object:
        if kind is torch.bfloat16:
            raise RuntimeError("no kernel\nfor that")
        return product(device, kind)

    monkeypatch.setattr(doctor, "_product", refuses)
    monkeypatch.setattr(doctor, "SECONDS", 0.01)
    assert dict(doctor.speeds(torch.device("cpu")))["bfloat16"] == "none: no kernel"


def test_a_call_is_timed_by_its_quickest_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call does not count: it sets things up, or finds them in a cache that nothing else has."""
    clock, takes = [0.0], iter([0.001, 0.05, 0.01, *[0.05] * 200])

    def call() -> torch.Tensor:
        clock[0] += next(takes)
        return torch.zeros(())

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    assert doctor._seconds(call, torch.device("cpu")) == pytest.approx(0.01)
    assert doctor.SECONDS <= clock[0] < doctor.SECONDS + 0.1
