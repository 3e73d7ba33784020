"""The documentation says what the registries say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from steelman.objectives import OBJECTIVES

ROOT = Path(__file__).parent.parent


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_methods_is_up_to_date() -> None:
    page = script(ROOT / "docs" / "generate.py")
    assert page.PAGE.read_text() == page.text(), "run: make docs"


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_method_says_its_equation_and_its_paper(name: str) -> None:
    page = script(ROOT / "docs" / "generate.py")
    said = page.paragraphs(OBJECTIVES[name])
    assert said[0].endswith(".")
    if name != "standard":
        assert re.match(r"[A-Z][\w. -]+ \(\d{4}\)", said[-1]), said[-1]


def test_every_objective_is_in_the_measured_page() -> None:
    bench = script(ROOT / "benchmarks" / "methods_mnist.py")
    assert bench.SETTINGS.keys() == OBJECTIVES.keys()
