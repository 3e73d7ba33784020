"""A run's folder: what it holds, how it is made, and how it is read back.

- ``recipe.yaml`` or ``fit.json``: the settings of the run.
- ``environment.json``: the versions of the libraries.
- ``metrics.jsonl`` and ``tensorboard``: the course of the training.
- ``checkpoints``: what a resume needs.
- ``model.safetensors`` and ``model.json``: the kept weights, and how to rebuild their model.
- ``corruptions``: the accuracy on corrupted images.
- ``verdict``: the evidence of the suite. ``attacks``: the evidence of the attacks of ``evaluation.attacks``.
- ``report.html``: the report.
- ``run.json``: marks a finished run, so it is written last.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from steelman.arguments import model_of, path_of
from steelman.corruptions.accuracy import CorruptionAccuracy
from steelman.corruptions.record import NAME, read_record
from steelman.errors import UserError, resume_command, shown
from steelman.evaluation.evaluate import versions
from steelman.evaluation.result import Evaluation, Verdict
from steelman.evidence.bundle import GIVEN, OWN, finished
from steelman.evidence.ledger import tidy
from steelman.files import sweep, write_atomic, write_folder
from steelman.imports import check_allowed
from steelman.models.batchnorm import AuxiliaryNorm, route, split_norms
from steelman.models.classifier import Ensemble, build_described, check_fits, load_state, load_weights
from steelman.training.described import model_file, run_file
from steelman.training.records import Trained

CORRUPTED = "corruptions"  # the folder of a run with its accuracy on corrupted images
# The files that are written whole.
FILES = (
    "recipe.yaml",
    "fit.json",
    "environment.json",
    "metrics.jsonl",
    "model.safetensors",
    "model.json",
    "report.html",
    "run.json",
    "README.md",
)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    """A finished run: the kept model in eval mode, its epochs, and its evaluation.

    `path` and `report` are None for a run without a folder. `evaluation` is that of the suite. A run without a suite
    has the evaluation of its given attacks there. If the run has both, `attacked` is the evaluation of the attacks.
    `corrupted` is the accuracy on corrupted images, if the recipe asked for it.
    `missing` is the reason if there is no model: only the user's code can build it.
    """

    path: Path | None
    history: tuple[dict[str, Any], ...]
    evaluation: Evaluation
    attacked: Evaluation | None = None
    corrupted: CorruptionAccuracy | None = None
    kept: nn.Module | None = dataclasses.field(default=None, repr=False)
    missing: str = ""

    @property
    def model(self) -> nn.Module:
        """The kept model. It is on the device of the training, or on the CPU if the run was loaded."""
        if self.kept is None:
            raise UserError(self.missing)
        return self.kept

    @property
    def verdict(self) -> Verdict:
        """How many samples no attack broke, and how far this number can be trusted."""
        if self.evaluation.verdict is None:
            raise UserError(f"the evaluation in {self.path} has no verdict")
        return self.evaluation.verdict

    @property
    def report(self) -> Path | None:
        """The path of the report."""
        return None if self.path is None else self.path / "report.html"

    def __repr__(self) -> str:
        """The folder and the verdict. All fields would fill the screen of a notebook."""
        verdict = "no verdict" if self.evaluation.verdict is None else str(self.evaluation.verdict)
        return f"run of {len(self.history)} epochs in {self.path or 'no folder'}\n{verdict}"

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the run to the Hugging Face Hub as ``owner/name``, and return its address. See `models.hub.push`."""
        from steelman.models.hub import push

        if self.path is None:
            raise UserError("expected a run with a folder, got one without: call fit with out=FOLDER")
        return push(self.path, repo_id, **options)


def load(place: Path | str, model: nn.Module | None = None, *, allow_import: Collection[str] = ()) -> Run:
    """Load a finished run from its folder or from ``hf:owner/name``.

    `model` is needed if only the caller's code can build the run's model. It is a module of the same architecture, and
    gets the kept weights. `allow_import` are the modules that may be imported if the folder names a factory of theirs.
    Without it, no code that a folder names is imported: the run then has no model.
    """
    if isinstance(place, str) and place.startswith("hf:"):
        from steelman.models.hub import pull

        place = pull(place)
    folder = path_of("place", place)
    if model is not None:
        model_of("model", model)
    if not isinstance(allow_import, Collection):
        raise UserError(f"allow_import: expected a list of modules, got {shown(allow_import)}")
    if not (folder / "run.json").is_file():
        begun = any((folder / name).is_file() for name in ("recipe.yaml", "fit.json"))
        hint = (
            f"the run is not finished; go on with: {resume_command(folder)}"
            if begun
            else "it is not a run: it has no run.json"
        )
        raise UserError(f"no finished run in {folder}: {hint}")
    kept, missing = None, ""
    if model is not None:
        kept = _filled(model, folder)
    elif (problem := _foreign(folder, model_file(folder / "model.json"), allow_import)) is not None:
        missing = problem
    else:
        kept, _ = load_model(folder, allow_import)
    return dataclasses.replace(without_model(folder), kept=kept, missing=missing)


def without_model(folder: Path) -> Run:
    """A finished run as its report shows it. No model is built."""
    attacked = folder / GIVEN
    both = finished(folder / OWN) and finished(attacked)
    return Run(
        path=folder,
        history=tuple(run_file(folder / "run.json")["history"]),
        evaluation=Evaluation.load(folder / OWN if finished(folder / OWN) else attacked),
        attacked=Evaluation.load(attacked) if both else None,
        corrupted=read_record(folder / CORRUPTED).accuracy if (folder / CORRUPTED / NAME).is_file() else None,
    )


def load_model(folder: Path, allow_import: Collection[str] = ()) -> tuple[nn.Module, dict[str, Any]]:
    """The kept model of a run, in eval mode, and its description.

    Nothing is imported, unless the folder names a factory of a module in `allow_import`.
    """
    record, state = read_model(folder)
    if (problem := _foreign(folder, record, allow_import)) is not None:
        raise UserError(problem)
    path, members = folder / "model.safetensors", record["members"]

    def one() -> nn.Module:
        shape = (record["input_shape"][0], record["input_shape"][1], record["input_shape"][2])
        try:
            built = build_described(record["model"], record["head"], shape, len(record["classes"]), allow_import)
        except (TypeError, RuntimeError) as error:  # options of other types, or sizes that torch cannot count
            if ":" in record["model"]["name"]:
                raise
            raise UserError(f"{folder / 'model.json'} is damaged: {str(error).splitlines()[0]}") from None
        return split_norms(built) if record["auxiliary_norm"] else built

    if ":" not in record["model"]["name"]:
        # A model without memory is compared with the weights first: a stranger's sizes could fill the memory.
        with torch.device("meta"):
            own = one().state_dict()
        whole = {f"members.{i}.{key}": value for i in range(members) for key, value in own.items()} if members else own
        check_fits(whole, state, str(path))
    model = Ensemble([one() for _ in range(members)]) if members else one()
    if record["auxiliary_norm"]:
        route(model, record["auxiliary_norm"])
    load_weights(model, state, str(path))
    return model.eval(), record


def read_model(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description of a run's model, and its weights."""
    if not (folder / "model.json").is_file():
        begun = any((folder / name).is_file() for name in ("recipe.yaml", "fit.json"))
        hint = f"the run is not finished; go on with: {resume_command(folder)}" if begun else "it is not a run"
        raise UserError(f"no model in {folder}: {hint}")
    record, path = model_file(folder / "model.json"), folder / "model.safetensors"
    if checksum(path) != record["sha256"]:
        raise UserError(f"{path} is damaged, or model.json describes another file: the checksum differs")
    return record, load_state(path)


def checksum(path: Path) -> str:
    """The SHA-256 of a file, or an empty text if there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _foreign(folder: Path, record: Mapping[str, Any], allow_import: Collection[str]) -> str | None:
    """The reason why a run's model cannot be built from its folder, or None if it can."""
    spec = record["model"]
    if spec["name"] is None:
        weights = folder / "model.safetensors"
        return (
            f"only your own code can build the model of {folder} (class {spec['class']}), and a run's folder holds "
            f"no code. In Python: steelman.load({str(folder)!r}, model=MyModel()). On the command line: name "
            f"package.module:factory as the model, with --weights {weights}"
        )
    if ":" in spec["name"]:
        try:
            check_allowed(spec["name"], allow_import, f"the model of {folder}")
        except UserError as error:
            return str(error)
    return None


def _filled(model: nn.Module, folder: Path) -> nn.Module:
    """The caller's own model with the weights of a run."""
    from steelman.models.wrap import detected

    record, state = read_model(folder)
    if record["model"].get("wrapped") and not any(key.startswith("model.") for key in model.state_dict()):
        model = detected(model, torch.full((2, *record["input_shape"]), 0.5)).model
    branch, members = record["auxiliary_norm"], record["members"]
    if branch and not any(isinstance(module, AuxiliaryNorm) for module in model.modules()):
        split_norms(model)
    if members:
        model = Ensemble([deepcopy(model) for _ in range(members)])
    if branch:
        route(model, branch)
    load_weights(model, state, str(folder / "model.safetensors"))
    return model.eval()


def make_folder(folder: Path, name: str, content: bytes) -> None:
    """Make a run's folder, with the settings in the file `name`. A folder that is not empty is never changed."""
    try:
        write_folder(folder, {name: content, "environment.json": _environment()})
    except OSError as error:
        raise UserError(f"cannot write the run to {folder}: {error.strerror or error}") from None


def mend(folder: Path) -> None:
    """Before a run goes on: delete what a killed process left half written, and write what it had no time to write."""
    if link := next((path for path in sorted(folder.iterdir()) if path.is_symlink()), None):
        raise UserError(f"{link} is a link, and the run would write to another place: expected a folder without links")
    sweep(folder, FILES)
    for name in (OWN, GIVEN):
        if (folder / name).is_dir():
            tidy(folder / name)
    if not (folder / "environment.json").exists():
        write_atomic(folder / "environment.json", _environment())


def _environment() -> bytes:
    return json.dumps(versions(), indent=1).encode()


def export(folder: Path, trained: Trained, description: Mapping[str, Any]) -> None:
    """Write the kept weights, and the description of their model."""
    content = save({name: value.contiguous() for name, value in trained.state.items()})
    record = {
        "format": 1,
        **description,
        "epoch": trained.epoch,
        "members": trained.members,
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    write_atomic(folder / "model.safetensors", content)
    write_atomic(folder / "model.json", json.dumps(record, indent=1).encode())
