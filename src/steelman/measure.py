"""``steelman evaluate`` and ``transfer``: find the models, data and threat that the command line names, and measure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console
from torch import nn

from steelman import data as datasets
from steelman.attacks import ATTACKS
from steelman.config import attack_from_text, name_and_options, options_from_texts
from steelman.errors import UserError, unknown
from steelman.evaluation import DEFAULT_ATTACKS, Evaluation, evaluate
from steelman.evaluation.transfer import Transfer, transfer
from steelman.models import PUBLISHED_LAYOUTS
from steelman.models.classifier import build_classifier, imported, load_state, load_weights
from steelman.run import load_model, write_report
from steelman.settings import SettingsError, options_of
from steelman.threat import ThreatModel


def measure(
    target: str,
    *,
    data: str | None,
    root: Path | None,
    norm: str | None,
    eps: str | None,
    attacks: list[str],
    weights: Path | None,
    layout: str | None,
    head: str,
    options: list[str],
    samples: int | None,
    batch_size: int,
    seed: int,
    workers: int,
    out: Path | None,
    console: Console,
) -> Evaluation:
    """Evaluate a run or a model, print the table, and write evaluation.json and report.html."""
    chosen = dict(attack_from_text(text) for text in attacks) or None
    folder = Path(target)
    model: nn.Module
    described: dict[str, Any] = {}
    if folder.is_dir():
        model, described = load_model(folder)
    if described and (weights or layout or options or head != "linear"):
        raise UserError("--weights, --layout, --head and --option are for a model given by name; a run has its own")
    if not folder.is_dir() and ("/" in target or (":" not in target and folder.suffix)):
        raise UserError(f"no run at {target}; expected a run's folder, a model's name or package.module:factory")
    own = described.get("data", {"name": None, "options": {}})
    name, where = name_and_options(data) if data else (own["name"], {})
    where = {**(own["options"] if name == own["name"] else {}), **where, **({"root": root} if root else {})}
    if name is None:
        raise UserError(
            f"--data: expected a dataset for a model given by name; choices: {', '.join(datasets.DATASETS)}"
        )
    if out is not None and ((out / "evaluation.json").exists() or (out / "report.html").exists()):
        raise UserError(f"--out: {out} already holds a report; choose another folder, or delete it")
    threat = _threat(described.get("threat"), norm, eps)
    dataset = datasets.load(name, **where)
    if not folder.is_dir():
        model = _named(target, dataset, head, options_from_texts(options), weights, layout)
    elif tuple(described["input_shape"]) != dataset.shape:
        raise UserError(
            f"the model takes images of shape {tuple(described['input_shape'])}, and {name} has {dataset.shape}"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    label = described.get("recipe", target)
    found = evaluate(
        model.to(device),
        dataset.test,
        None,
        threat,
        chosen or DEFAULT_ATTACKS,
        name=label,
        data_name=f"{dataset.name} test",
        samples=samples,
        batch_size=batch_size,
        seed=seed,
        workers=workers,
        device=device,
        console=console,
    )
    place = out or _free(
        (folder if folder.is_dir() else Path("runs")) / "evaluations" / f"{threat.norm}-{threat.eps:.4g}"
    )
    found.save(place)
    write_report(place, found, console)
    return found


def _threat(own: dict[str, Any] | None, norm: str | None, eps: str | None) -> ThreatModel:
    if own is None and eps is None:
        raise UserError("--eps: expected a radius, such as 8/255, for a model that is not a run")
    given: dict[str, Any] = {**(own or {}), **({"norm": norm} if norm else {}), **({"eps": eps} if eps else {})}
    if own is not None and norm not in (None, own["norm"]) and eps is None:
        raise UserError(f"--eps: expected a radius for norm {norm}; the run's own is for {own['norm']}")
    try:
        return ThreatModel(**given)
    except ValidationError as error:
        raise UserError(f"threat model: {SettingsError.of(error, ThreatModel)}") from None


def _named(
    target: str, dataset: Any, head: str, options: dict[str, Any], weights: Path | None, layout: str | None
) -> nn.Module:
    """A model by registry name or import path, with weights from a file."""
    head_name, head_options = name_and_options(head)
    model = build_classifier(
        target,
        input_shape=dataset.shape,
        num_classes=dataset.num_classes,
        head=head_name,
        head_options=head_options,
        **options,
    )
    if weights is None:
        if layout is not None:
            raise UserError(f"--layout {layout}: expected --weights with it, the file of that layout")
        if ":" not in target:
            raise UserError(
                f"--weights: expected a file of trained weights for {target}; untrained ones measure nothing"
            )
        return model
    state = load_state(weights)
    if layout is not None:
        if layout not in PUBLISHED_LAYOUTS:
            raise unknown("layout", layout, PUBLISHED_LAYOUTS)
        state = PUBLISHED_LAYOUTS[layout](state)
    own = model.state_dict()
    # Published weights seldom carry the input normalisation; here it is part of the model, and by default none.
    state = {**{key: own[key] for key in ("mean", "std") if key in own}, **state}
    load_weights(model, state, str(weights))
    return model


def _free(folder: Path) -> Path:
    """`folder`, or the first numbered name beside it that is not taken: an evaluation is never overwritten."""
    place, count = folder, 1
    while place.exists():
        count += 1
        place = folder.with_name(f"{folder.name}-{count}")
    return place


def cross(
    models: Sequence[str],
    target: Sequence[str] | None,
    *,
    data: str | None,
    root: Path | None,
    norm: str | None,
    eps: str | None,
    attack: str,
    samples: int | None,
    batch_size: int,
    seed: int,
    workers: int,
    out: Path | None,
    console: Console,
) -> Transfer:
    """Craft on each model, score on every target, print the table and write transfer.json."""
    _, chosen = attack_from_text(_to_the_last_step(attack))
    if out is not None and (out / "transfer.json").exists():
        raise UserError(f"--out: {out} already holds a transfer; choose another folder, or delete it")
    sources = _models_named(models)
    targets = _models_named(target) if target else sources
    for name in sources.keys() & targets.keys():
        if Path(sources[name]).resolve() != Path(targets[name]).resolve():
            raise UserError(f"a source and a target are called {name!r}; name them, as in NAME={targets[name]}")
    loaded = {name: _model_at(place) for name, place in {**sources, **targets}.items()}
    runs = [described for _, described in loaded.values() if described]
    threat = _threat(_threat_agreed([run["threat"] for run in runs], norm, eps), norm, eps)
    own = [run["data"] for run in runs]
    if data is None and (not own or any(one != own[0] for one in own)):
        reason = "the runs' own differ; say which" if own else "expected a dataset, for none of the models is a run"
        raise UserError(f"--data: {reason}; choices: {', '.join(datasets.DATASETS)}")
    name, where = name_and_options(data) if data else (own[0]["name"], {})
    kept = [one["options"] for one in own if one["name"] == name]
    where = {**(kept[0] if kept and all(one == kept[0] for one in kept) else {}), **where}
    dataset = datasets.load(name, **{**where, **({"root": root} if root else {})})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = transfer(
        {name: loaded[name][0].to(device) for name in sources},
        {name: loaded[name][0].to(device) for name in targets},
        dataset.test,
        threat,
        chosen,
        data_name=f"{dataset.name} test",
        samples=samples,
        batch_size=batch_size,
        seed=seed,
        workers=workers,
        device=device,
        console=console,
    )
    place = out or _free(Path("runs") / "transfers" / f"{threat.norm}-{threat.eps:.4g}")
    found.save(place)
    console.print(found.table())
    console.print(f"transfer: {place / 'transfer.json'}", highlight=False, soft_wrap=True)
    return found


def _to_the_last_step(attack: str) -> str:
    """An attack's text with keep=last, if it takes that: one that stops at its first success transfers badly."""
    name, options = name_and_options(attack)
    keep = options_of(ATTACKS[name]).get("keep") if name in ATTACKS else None
    if keep is None or keep.default != "best" or "keep" in options:
        return attack
    return f"{attack},keep=last" if options else f"{name}:keep=last"


def _models_named(texts: Sequence[str]) -> dict[str, str]:
    """Read ``runs/mine`` or ``mine=package.module:factory`` as a name and where the model is."""
    places: dict[str, str] = {}
    for text in texts:
        name, equals, place = text.partition("=")
        if not equals or Path(text).is_dir():
            name, place = (Path(text).resolve().name if Path(text).is_dir() else text), text
        if not name or not place:
            raise UserError(f"expected a model as NAME=MODEL, got {text!r}")
        if name in places:
            raise UserError(f"two models are called {name!r}; name them, as in NAME={place}")
        places[name] = place
    return places


def _model_at(place: str) -> tuple[Any, dict[str, Any]]:
    """A run's model and its description, or an imported model and none."""
    if Path(place).is_dir():
        return load_model(Path(place))
    if ":" not in place or "/" in place:
        raise UserError(f"no run at {place}; expected a run's folder or package.module:factory")
    return imported(place), {}


def _threat_agreed(own: Sequence[dict[str, Any]], norm: str | None, eps: str | None) -> dict[str, Any] | None:
    """The threat that all runs were trained for; where they differ, the command line has to say."""
    if not own:
        return None
    agreed = {key: value for key, value in own[0].items() if all(one[key] == value for one in own)}
    if "norm" not in agreed:
        agreed.pop("eps", None)  # a radius means nothing without its norm
    for key, given in (("norm", norm), ("eps", eps)):
        if key not in agreed and given is None:
            values = ", ".join(dict.fromkeys(str(one[key]) for one in own))
            raise UserError(f"--{key}: the runs' own differ ({values}); say which")
    for key in ("low", "high"):
        if key not in agreed:
            raise UserError(f"the runs are for different ranges of pixels: {', '.join(str(one[key]) for one in own)}")
    return {"norm": norm, "eps": eps, **agreed}
