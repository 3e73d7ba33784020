"""The documentation says what the registries say."""

from __future__ import annotations

import functools
import importlib.util
import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import torch
from torch import nn

from steelman.attacks import ATTACKS
from steelman.attacks.engine import Problem, Search
from steelman.objectives import OBJECTIVES
from steelman.threat import Norm

ROOT = Path(__file__).parent.parent


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["methods.md", "attacks.md"])
def test_the_generated_part_is_up_to_date(name: str) -> None:
    pages = script(ROOT / "docs" / "generate.py")
    assert name in pages.PAGES
    assert pages.page(name).read_text() == pages.text(name), "run: make docs"


def test_a_change_of_the_registry_or_of_the_generated_part_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pages = script(ROOT / "docs" / "generate.py")
    before = pages.text("attacks.md")
    with monkeypatch.context() as patch:
        patch.setitem(ATTACKS, "another", ATTACKS["pgd"])
        assert pages.text("attacks.md") != before
    (tmp_path / "attacks.md").write_text("by hand\n\n" + pages.MARK + "\n\nsomething else\n")
    monkeypatch.setattr(pages, "page", lambda name: tmp_path / name)
    assert pages.text("attacks.md").startswith("by hand\n\n" + pages.MARK + "\n\n## All attacks\n")
    assert "something else" not in pages.text("attacks.md")


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_method_says_its_equation_and_its_paper(name: str) -> None:
    page = script(ROOT / "docs" / "generate.py")
    said = page.paragraphs(OBJECTIVES[name])
    assert said[0].endswith(".")
    if name != "standard":
        assert re.match(r"[A-Z][\w. -]+ \(\d{4}\)", said[-1]), said[-1]


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_every_attack_says_what_it_does_and_its_paper(name: str) -> None:
    pages = script(ROOT / "docs" / "generate.py")
    does, paper = pages.summary_and_paper(ATTACKS[name])
    assert does.endswith(".")
    assert re.match(r"[A-Z][\w. -]+ \(\d{4}\)", paper), paper
    (row,) = (line for line in pages.attacks(ATTACKS) if line.startswith(f"| `{name}` |"))
    cells = re.split(r"(?<!\\) \| ", row.strip("| "))
    assert len(cells) == 6
    assert re.fullmatch(r"(white|black) box, (budget|minimum norm)|that of its attack", cells[2])
    assert re.fullmatch(r"`attacks/\w+\.py`", cells[4])


class Nearest(Search):
    """Minimise |x' - x| where a | b < c. The second sentence.

    A paragraph of details.

    Doe et al. (2021), "A Paper".

    >>> 1 + 1
    2
    """

    norms: ClassVar[tuple[Norm, ...]] = ("l2",)
    minimum_norm: ClassVar[bool] = True
    black_box: ClassVar[bool] = True

    def __init__(self, *, steps: int = 3, size: float = 1.0) -> None: ...

    def search(self, problem: Problem) -> None: ...


def test_a_row_of_the_table_of_attacks() -> None:
    pages = script(ROOT / "docs" / "generate.py")
    fixed = functools.partial(Nearest, steps=4)
    fixed.summary = "Nearest in four steps (Roe, 2020; Poe et al., 2022, Eq. 3)."  # type: ignore[attr-defined]
    plain = functools.partial(Nearest, steps=5)
    plain.summary = "Nearest in five steps."  # type: ignore[attr-defined]
    _, _, first, second, third = pages.attacks({"nearest": Nearest, "four": fixed, "five": plain})
    assert first == (
        r"| `nearest` | Minimise \|x' - x\| where a \| b &lt; c. The second sentence. | black box, minimum norm | l2 | "
        '`test_docs.py` | Doe et al. (2021), "A Paper". |'
    )
    assert second.startswith("| `four` | Nearest in four steps. | black box, minimum norm | l2 | ")
    assert second.endswith("| Roe (2020); Poe et al. (2022), Eq. 3. |")
    assert third.endswith('| Doe et al. (2021), "A Paper". |')


def test_an_attack_around_another_has_no_kind_of_its_own() -> None:
    class Around(Search):
        """Another attack."""

        @property
        def norms(self) -> tuple[Norm, ...]:  # type: ignore[override]
            return ("l1",)

    pages = script(ROOT / "docs" / "generate.py")
    assert pages.kind_and_norms(Around) == ("that of its attack", "those of its attack")
    assert pages.summary_and_paper(Around) == ("Another attack.", "")


@pytest.mark.parametrize(("name", "count"), [("attacks.md", 4), ("verdict.md", 1)])
def test_the_examples_of_a_page_run(name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what an example leaves behind
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL)
    assert len(blocks) >= count
    model, other = (nn.Sequential(nn.Flatten(), nn.Linear(4, 3)) for _ in range(2))
    x = torch.rand(4, 1, 2, 2)
    y = model(x).argmax(dim=1)
    names = {"model": model, "other": other, "x": x, "y": y, "target": (y + 1) % 3}
    (tmp_path / "examples.py").write_text("\n".join(blocks))  # each goes on where the one before ended
    runpy.run_path(str(tmp_path / "examples.py"), init_globals=names)


def test_the_pages_link_to_pages_that_are_there() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([\w./-]+\.\w+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_objective_is_in_the_measured_page() -> None:
    bench = script(ROOT / "benchmarks" / "methods_mnist.py")
    assert bench.SETTINGS.keys() == OBJECTIVES.keys()
