"""The built-in recipes, and how a recipe's file is read and merged with the recipe it is based on."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from steelman.bounded import read_yaml
from steelman.errors import UserError, shown, unknown

# A recipe does not take these keys from its base: they describe the base alone.
OWN = ("name", "description", "published")
MISSING = object()
MOST_BASES = 20  # a chain of recipes; more are a mistake, or an attack


def recipes() -> dict[str, Path]:
    """The paths of the built-in recipes, by name."""
    folder = Path(str(resources.files("steelman"))) / "recipes"
    return {path.stem: path for path in sorted(folder.rglob("*.yaml"), key=lambda path: path.stem)}


RECIPES: dict[str, Path] = recipes()


def find(name: str, folder: Path = Path()) -> Path:
    """The path of a recipe: a built-in one by its name, any other by a path that starts in `folder`."""
    path = folder / name if name.endswith((".yaml", ".yml")) or "/" in name else RECIPES.get(name)
    if path is None:
        raise unknown("recipe", name, RECIPES, listed="steelman list recipes")
    return path


def load(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A recipe's mapping, merged with that of its base, and so on. `above` are the recipes that named this one."""
    own = _mapping(path)
    if "base" not in own:
        return own
    base, chain = own.pop("base"), (*above, path.resolve())
    try:
        if not isinstance(base, str):
            raise UserError(f"expected a recipe's name or the path of a YAML file, got {shown(base)}")
        below = find(base, path.parent)
        if below.resolve() in chain:
            circle = " -> ".join(one.stem for one in (*chain, below))
            raise UserError(f"expected a base that is not based on this recipe, got {circle}")
        if len(chain) > MOST_BASES:
            raise UserError(f"expected at most {MOST_BASES} bases below each other, got more")
        return laid_over(load(below, chain), own)
    except UserError as error:
        raise UserError(f"{path}: base: {error}") from None


def _mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"no recipe at {path}")
    source = read_yaml(path)
    if not isinstance(source, dict):
        raise UserError(f"{path}: expected a mapping of keys to values, got {type(source).__name__}")
    return source


def laid_over(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's mapping `own`, with missing keys taken from `base`.

    Mappings are merged key by key. A mapping with another ``name`` replaces that of the base, and so do lists and
    single values. Name, description and published rows are not taken from the base. A reason in `chosen` is taken only
    if the recipe does not change that setting.

    >>> laid_over({"head": {"name": "he", "scale": 10}}, {"head": {"margin": 0.1}})
    {'head': {'name': 'he', 'scale': 10, 'margin': 0.1}}
    >>> laid_over({"head": {"name": "he", "scale": 10}}, {"head": {"name": "linear"}})
    {'head': {'name': 'linear'}}
    """
    inherited = {key: value for key, value in base.items() if key not in OWN}
    whole = merged(inherited, own)
    reasons, mine = base.get("chosen"), own.get("chosen") or {}
    if isinstance(reasons, Mapping) and isinstance(mine, Mapping):
        alone = {key for key in reasons if setting(own, key) is MISSING and setting(whole, key) == setting(base, key)}
        whole["chosen"] = {**{key: reasons[key] for key in reasons if key in alone}, **mine}
    return whole


def merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` merged with `base`, where `own` wins. A text in `base` counts as a mapping with that ``name``."""
    whole = dict(base)
    for key, value in own.items():
        old = whole.get(key)
        whole[key] = value
        if isinstance(value, Mapping):
            under = old if isinstance(old, Mapping) else {"name": old} if isinstance(old, str) else {}
            same = value.get("name", under.get("name")) == under.get("name")
            whole[key] = merged(under if same else {}, value)
    return whole


def setting(source: Mapping[str, Any], key: str) -> object:
    """The value at a dotted key of a recipe's mapping, or MISSING."""
    place: object = source
    for part in str(key).split("."):
        place = place.get(part, MISSING) if isinstance(place, Mapping) else MISSING
    return place
