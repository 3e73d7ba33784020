"""The models, weights, data and threat models that a command line names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steelman import data as datasets
from steelman.attacks import ATTACKS, Attack
from steelman.errors import UserError, shown, unknown
from steelman.imports import imported
from steelman.models import PUBLISHED_LAYOUTS
from steelman.models.classifier import build_described, load_state, load_weights
from steelman.settings import SettingsError, make, name_and_options, options_from_texts
from steelman.threat import ORDER, ThreatModel
from steelman.training.folder import load_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """The model and the data that a command line names. Only the model of a run is loaded already."""

    target: str
    model: nn.Module | None
    described: dict[str, Any]
    data: str
    where: dict[str, Any]
    named: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.described.get("recipe", self.target))

    def load(self) -> tuple[nn.Module, datasets.Dataset]:
        """The model, in eval mode, and the dataset. Their images have the same shape."""
        dataset = datasets.load(self.data, **self.where)
        if self.model is None:
            return _named(self.target, dataset, **self.named).eval(), dataset
        if tuple(self.described["input_shape"]) != dataset.shape:
            raise UserError(
                f"the model takes images of shape {tuple(self.described['input_shape'])}, and those of {self.data} are "
                f"{dataset.shape}"
            )
        return self.model, dataset


def subject(
    target: str,
    *,
    data: str | None,
    root: Path | None,
    weights: Path | None,
    layout: str | None,
    head: str,
    options: Sequence[str],
    allow_import: Collection[str] = (),
) -> Subject:
    """Find the model and the data that the options of a command name.

    `allow_import` are the modules that the folder of a run may name. `target` itself was typed: it may be an import
    path.
    """
    folder, is_run = Path(target), is_folder(target)
    model, described = load_model(folder, allow_import) if is_run else (None, {})
    if described and (weights or layout or options or head != "linear"):
        raise UserError("--weights, --layout, --head and --option are for a model given by name; a run has its own")
    if not is_run and ("/" in target or (":" not in target and folder.suffix)):
        raise UserError(f"no run at {target}; expected a run's folder, a model's name or package.module:factory")
    own = described.get("data", {"name": None, "options": {}})
    name, where = name_and_options(data) if data else (own["name"], {})
    where = {**(own["options"] if name == own["name"] else {}), **where, **({"root": root} if root else {})}
    if name is None:
        raise UserError(
            f"--data: expected a dataset for a model given by name; choices: {', '.join(datasets.DATASETS)}"
        )
    named = {"head": head, "options": options_from_texts(options), "weights": weights, "layout": layout}
    return Subject(target=target, model=model, described=described, data=name, where=where, named=named)


def random_weights(target: str, options: Sequence[str], weights: Path | None, *, allowed: bool) -> bool:
    """Whether the command's model comes from a factory that draws its weights. This is refused unless `allowed`."""
    factory = ":" in target and "/" not in target and not is_folder(target)
    if allowed and (weights is not None or not factory):
        other = "--weights names trained ones" if weights is not None else f"{target} is not one"
        raise UserError(f"--random-weights: expected package.module:factory without --weights; {other}")
    if not factory or weights is not None or not _drawn(target, options_from_texts(options)):
        return False
    if not allowed:
        raise UserError(
            f"--weights: {target} makes a model with new random weights each time; expected a file of trained weights. "
            "To measure the untrained model, add --random-weights"
        )
    return True


def _drawn(target: str, options: dict[str, Any]) -> bool:
    """Whether the weights of a factory's model depend on random numbers. A factory that reads a file gives the same.

    A seed that the factory itself sets is ignored here: weights drawn from a fixed seed are random too.
    """

    def unheeded(seed: Any) -> torch.Generator:  # noqa: ARG001 - torch's own function has this name
        return torch.default_generator

    kept, made = (torch.manual_seed, torch.random.manual_seed), []
    with torch.random.fork_rng(devices=[]):
        try:
            for seed in (1, 2):
                torch.default_generator.manual_seed(seed)
                torch.manual_seed = torch.random.manual_seed = unheeded
                made.append(dict(imported(target, options, [target]).named_parameters()))
        finally:
            torch.manual_seed, torch.random.manual_seed = kept
    one, two = made
    return one.keys() != two.keys() or any(not torch.equal(one[name], two[name]) for name in one)


def threat_from(own: dict[str, Any] | None, norm: str | None, eps: str | None) -> ThreatModel:
    if norm is not None and norm not in ORDER:
        raise UserError(f"--norm: {unknown('norm', norm, ORDER)}")
    if own is None and eps is None:
        raise UserError("--eps: expected a radius, such as 8/255, for a model that is not a run")
    given: dict[str, Any] = {**(own or {}), **({"norm": norm} if norm else {}), **({} if eps is None else {"eps": eps})}
    if own is not None and norm not in (None, own["norm"]) and eps is None:
        raise UserError(f"--eps: expected a radius for norm {norm}; the run's own is for {own['norm']}")
    try:
        return ThreatModel(**given)
    except SettingsError as error:
        raise UserError(f"threat model: {error}") from None


def _named(
    target: str, dataset: Any, head: str, options: dict[str, Any], weights: Path | None, layout: str | None
) -> nn.Module:
    """A model by registry name or import path, with weights from a file."""
    head_name, head_options = name_and_options(head)
    mean, std = options.pop("mean", (0.0,)), options.pop("std", (1.0,))
    spec = {"name": target, "options": options, "mean": mean, "std": std}
    described_head = {"name": head_name, "options": head_options}
    # The import path was typed, so it is allowed.
    model = build_described(spec, described_head, dataset.shape, dataset.num_classes, [target])
    if weights is None:
        if layout is not None:
            raise UserError(f"--layout {layout}: expected --weights with it, a file of that layout")
        if ":" not in target:
            raise UserError(f"--weights: expected a file of trained weights for {target}, got none")
        return model
    state = load_state(weights)
    if layout is not None:
        if layout not in PUBLISHED_LAYOUTS:
            raise unknown("layout", layout, PUBLISHED_LAYOUTS)
        state = PUBLISHED_LAYOUTS[layout](state)
    own = model.state_dict()
    # Published weights seldom contain mean and std. A classifier needs both; its own values mean no normalisation.
    state = {**{key: own[key] for key in ("mean", "std") if key in own}, **state}
    load_weights(model, state, str(weights))
    return model


def is_folder(text: str) -> bool:
    """Whether a text of the command line names a folder. A text that can be no file's name is none."""
    try:
        return Path(text).is_dir()
    except (OSError, ValueError):  # a name that is too long, or has a NUL character
        return False


def folder_name(text: str) -> str:
    """A text as the name of a folder. One such as ".." would be the folder above."""
    return re.sub(r"[^\w.+-]+", "-", text).lstrip(".")[:100]


def models_named(texts: Sequence[str]) -> dict[str, str]:
    """Read texts such as ``runs/mine`` or ``mine=package.module:factory``: the model's place, by name."""
    places: dict[str, str] = {}
    for text in texts:
        name, equals, place = text.partition("=")
        if not equals or is_folder(text):
            name, place = (Path(text).resolve().name if is_folder(text) else text), text
        if not name or not place:
            raise UserError(f"expected a model as NAME=MODEL, got {shown(text)}")
        if name in places:
            raise UserError(f"two models have the name {shown(name)}; rename one, as in NAME={shown(place)[1:-1]}")
        places[name] = place
    return places


def model_at(place: str, allow_import: Collection[str] = ()) -> tuple[Any, dict[str, Any]]:
    """A run's model and its description, or an imported model and an empty description."""
    if is_folder(place):
        return load_model(Path(place), allow_import)
    if ":" not in place or "/" in place:
        raise UserError(f"no run at {place}; expected a run's folder or package.module:factory")
    return imported(place, {}, [place]), {}


def threat_agreed(own: Sequence[dict[str, Any]], norm: str | None, eps: str | None) -> dict[str, Any] | None:
    """The threat model of all runs. A value in which they differ must come from the command line."""
    if not own:
        return None
    agreed = {key: value for key, value in own[0].items() if all(one[key] == value for one in own)}
    if "norm" not in agreed:
        agreed.pop("eps", None)  # runs of different norms may have the same eps by chance
    for key, given in (("norm", norm), ("eps", eps)):
        if key not in agreed and given is None:
            values = ", ".join(dict.fromkeys(str(one[key]) for one in own))
            raise UserError(f"--{key}: the runs' own differ ({values}); name one")
    for key in ("low", "high"):
        if key not in agreed:
            raise UserError(f"the runs have different ranges of pixels: {', '.join(str(one[key]) for one in own)}")
    return {"norm": norm, "eps": eps, **agreed}


def free_name(folder: Path) -> Path:
    """`folder`, or the first free name with a number behind it. So no evaluation is ever overwritten."""
    place, count = folder, 1
    while place.exists():
        count += 1
        place = folder.with_name(f"{folder.name}-{count}")
    return place


def attack_from_text(text: str) -> tuple[str, Attack]:
    """Read ``pgd`` or ``pgd:steps=50,restarts=10`` as a label and an attack.

    >>> attack_from_text("pgd:steps=50")[1].steps
    50
    """
    name, options = name_and_options(text)
    try:
        return text, make("attack", ATTACKS, name, options)
    except SettingsError as error:
        raise UserError(f"attack {text!r}: {error}") from None
