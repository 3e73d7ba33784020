"""The documentation says what the registries say."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, get_type_hints

import pytest
import torch
import yaml
from pydantic import Field
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from steelman import recipe
from steelman.attacks import ATTACKS
from steelman.attacks.engine import Problem, Search
from steelman.cli.listing import Kind, registries
from steelman.heads import HEADS
from steelman.objectives import OBJECTIVES
from steelman.recipe_files import load, recipes
from steelman.settings import Count, settings
from steelman.threat import Norm
from steelman.training import OPTIMIZERS

ROOT = Path(__file__).parent.parent
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))


def script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # a script finds the files beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


@pytest.mark.parametrize("name", ["methods.md", "attacks.md", "recipe.md"])
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


def recipe_keys() -> Any:
    return script(ROOT / "docs" / "recipe_keys.py")


def test_the_complete_recipe_of_its_page_is_right() -> None:
    page = (ROOT / "docs" / "recipe.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    source = yaml.safe_load(example)
    made = recipe.parse(source)
    assert made.training.seed == 1
    assert {"data", "model", "head", "threat", "objective", "training", "validation", "around", "evaluation"} <= {
        *source
    }
    assert page.index("```yaml") < page.index("## All keys")


def test_the_page_of_recipes_has_every_key_and_a_sentence_for_it() -> None:
    rows = list(recipe_keys().every_key())
    known = {row[0] for row in rows}
    for one in ("name", "threat.eps", "training.optimizer", "around.awp.gamma", "published[].paper", "head.OPTION"):
        assert one in known, one
    for key, kind, default, does in rows:
        assert kind, key
        assert default, key
        assert re.fullmatch(r"[A-Z`].*\.", does), f"{key}: {does}"
    assert set(recipe_keys().WORDS) <= known, "words for a key that is gone"
    page = (ROOT / "docs" / "recipe.md").read_text()
    for link in re.findall(r"\]\(#([\w-]+)\)", page):
        assert re.search(rf"^#+ {link}$", page, re.MULTILINE | re.IGNORECASE), link


def test_every_key_of_a_built_in_recipe_is_on_the_page() -> None:
    known = {row[0] for row in recipe_keys().every_key()}
    wide = {"objective", "data", "model", "head", "chosen", "published"}  # options, or reasons of one's own
    for path in recipes().values():
        for block, inside in load(path).items():
            assert block in known or any(key.startswith(f"{block}.") for key in known), f"{path.stem}: {block}"
            for key in inside if isinstance(inside, dict) and block not in wide else ():
                assert any(one == f"{block}.{key}" or one.startswith(f"{block}.{key}.") for one in known), (
                    path.stem,
                    key,
                )


def test_a_key_in_words() -> None:
    pages = recipe_keys()

    @settings
    class Block:
        """Something. `rate` is how much; `many` says how often. The end."""

        rate: Annotated[float, Field(ge=0, lt=1)] = 0.5
        many: Count | None = None
        stated: Annotated[bool, Field(description="Its own words.")] = True

    assert list(pages.every_key(Block, "block.")) == [
        ("block.rate", "number at least 0 and below 1", "`0.5`", "How much."),
        ("block.many", "whole number above 0 or `null`", "`null`", "Says how often."),
        ("block.stated", "true or false", "`true`", "Its own words."),
    ]
    assert pages.plain(ATTACKS["pgd"](steps=3, loss="margin")) == "{name: pgd, steps: 3, loss: margin}"
    assert pages.plain(OPTIMIZERS["sgd"]()) == "sgd"
    assert list(pages.options(HEADS["he"])) == ["scale: 15.0", "margin: 0.2", "wn_mode: autograd"]


def named_in(kind: Any, seen: set[Any]) -> Iterator[dict[str, Any]]:
    """The registries that the keys of a settings class name, and those of what can be named there."""
    if kind in seen:
        return
    seen.add(kind)
    for hint in get_type_hints(kind, include_extras=True).values():
        for part in recipe_keys().flat(hint):
            for check in getattr(part, "__metadata__", ()):
                found = inspect.getclosurevars(check.func).nonlocals if hasattr(check, "func") else {}
                if "registry" in found:
                    yield found["registry"]
                    for entry in found["registry"].values():
                        made_by = entry.func if isinstance(entry, functools.partial) else entry
                        if hasattr(made_by, "__pydantic_fields__"):
                            yield from named_in(made_by, seen)
            if hasattr(part, "__pydantic_fields__"):
                yield from named_in(part, seen)


def test_every_registry_that_a_recipe_can_name_can_be_listed() -> None:
    listed, found = registries(), list(named_in(recipe.Recipe, set()))
    assert any("sgd" in one for one in found)
    assert any("crop-flip" in one for one in found)
    for registry in found:  # an objective's attacks are some of all
        assert any(registry.keys() <= one.keys() for one in listed.values()), sorted(registry)
    for name, (_, entries) in ((name, entry) for name, entry in recipe_keys().NAMED.items()):
        assert any(entries is one for one in listed.values()), name
    assert {kind for kind in Kind if kind is not Kind.recipes} == listed.keys()


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


# The pages with Python examples, and how many each has at least.
EXAMPLES = {
    "README.md": 3,
    "CONTRIBUTING.md": 5,
    "docs/architecture.md": 1,
    "docs/attacks.md": 6,
    "docs/corruptions.md": 1,
    "docs/how-the-suites-were-chosen.md": 1,
    "docs/limits.md": 1,
    "docs/methods.md": 2,
    "docs/verdict.md": 3,
}


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of code of a page, also those inside a list."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(code) for _, code in found]


def test_every_page_with_an_example_is_run() -> None:
    pages = [path for path in PAGES if blocks(path, "python")]
    assert {str(path.relative_to(ROOT)) for path in pages} == EXAMPLES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_a_page_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what an example leaves behind
    found = blocks(ROOT / name, "python")
    assert len(found) >= EXAMPLES[name]
    torch.manual_seed(0)
    model, other, net = (nn.Sequential(nn.Flatten(), nn.Linear(16, 3)) for _ in range(3))
    x, y = torch.rand(16, 1, 4, 4), torch.arange(16) % 3
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    names = {"model": model, "other": other, "net": net, "x": x, "y": y, "x_test": x, "y_test": y, "data": (x, y)}
    names |= {"loader": loader, "target": (y + 1) % 3}
    (tmp_path / "examples.py").write_text("\n".join(found))  # each goes on where the one before ended
    runpy.run_path(str(tmp_path / "examples.py"), init_globals=names)


@pytest.mark.parametrize("name", ["README.md", "docs/methods.md"])
def test_the_recipes_of_a_page_are_right(name: str, tmp_path: Path) -> None:
    found = blocks(ROOT / name, "yaml")
    assert found
    for place, text in enumerate(found):
        path = tmp_path / f"{place}.yaml"
        path.write_text(text)
        recipe.parse(*recipe.read(str(path)))


@pytest.mark.parametrize(
    ("script_name", "page"), [("attacks.py", "attacks-peers.md"), ("verdict.py", "verdict-autoattack.md")]
)
def test_a_measured_page_has_the_words_of_its_benchmark(script_name: str, page: str) -> None:
    """The words change without a new measurement, so they are changed in both places."""
    written = (ROOT / "docs" / page).read_text().splitlines()
    tree = ast.parse((ROOT / "benchmarks" / script_name).read_text())
    (main,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "main")
    lines = [
        line.value
        for node in ast.walk(main)
        if isinstance(node, ast.List)
        for line in node.elts
        if isinstance(line, ast.Constant) and isinstance(line.value, str) and " " in line.value
    ]
    assert len(lines) > 10
    for line in lines:
        assert line in written, line


def test_the_picture_of_the_readme_is_small() -> None:
    assert (ROOT / "docs" / "report.png").stat().st_size < 120_000


def test_the_pages_link_to_pages_that_are_there() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([\w./-]+\.\w+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_objective_is_in_the_measured_page() -> None:
    bench = script(ROOT / "benchmarks" / "methods_mnist.py")
    assert bench.SETTINGS.keys() == OBJECTIVES.keys()
