"""Runs on the Hugging Face Hub: `push` uploads a run's folder, `pull` fetches one.

Both only copy files, by ``upload_folder`` and ``snapshot_download``. The library's ``PyTorchModelHubMixin`` is not
used: every model would have to inherit from it. It stores no recipe and no evidence. If it finds no safetensors file,
it reads a pickle.

A pulled file is never imported and never run. Pickles and Python files are not fetched.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import yaml
from torch import nn

from steelman.errors import UserError
from steelman.files import write_atomic

FILES = ("*.safetensors", "*.json", "*.jsonl", "*.yaml", "*.html", "*.md")
# The files that only a resume or an unfinished evaluation needs. They are large, and no reader can use them.
UNWANTED = ("checkpoints/*", "tensorboard/*", "*/work/*", ".*", "*/.*")
EVIDENCE = ("verdict/*", "attacks/*")
REASONS = {  # keys are names of the library's errors: the library may not be installed, so they cannot be imported
    "GatedRepoError": "its owner must first give you access",
    "RepositoryNotFoundError": "there is no such repository, or it is private and needs a token",
    "RevisionNotFoundError": "it has no such revision",
    "LocalEntryNotFoundError": "the Hub cannot be reached, and this machine has no copy",
}
MARK = "<!-- steelman writes this card at each push. Delete this line to keep a text of your own. -->"


def push(
    folder: Path | str,
    repo_id: str,
    *,
    private: bool | None = None,
    evidence: bool = True,
    revision: str | None = None,
    token: str | None = None,
    message: str | None = None,
) -> str:
    """Upload a finished run to the repository ``owner/name``, and return its address.

    A missing repository is made. The repository gets weights, recipe, verdict with evidence, report and a model card.
    Evidence of an earlier push is deleted there: evidence mixed with other files would be refused. recipe.yaml is
    uploaded with the options of the dataset, such as the path of its folder.

    Arguments:
        private: whether a new repository is private; None: the setting of the owner's account.
        evidence: False leaves out the evidence and the report. Both contain images of the test set.
        revision: a branch.
        token: an access token. It is needed unless ``hf auth login`` has stored one.
        message: describes the upload.
    """
    folder, hub = Path(folder), _library()
    repo_id = _repository(repo_id)
    record = _described(folder)
    digest = _checksum(folder / "model.safetensors")
    if digest != record.get("sha256"):
        raise UserError(f"{folder / 'model.safetensors'} is not what model.json describes: its checksum differs")
    readme = folder / "README.md"
    if not readme.is_file() or MARK in readme.read_text():
        write_atomic(readme, card(folder, repo_id).encode())
    unwanted = UNWANTED if evidence else (*UNWANTED, *EVIDENCE, "*.html")
    try:
        api = hub.HfApi(token=token)
        address = str(api.create_repo(repo_id, private=private, exist_ok=True))
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            allow_patterns=list(FILES),
            ignore_patterns=list(unwanted),
            delete_patterns=list(EVIDENCE),
            commit_message=message or f"A run of steelman: {record.get('recipe') or folder.name}",
        )
    except Exception as error:  # the library raises its own errors, its network library's and the system's
        raise UserError(f"cannot push {folder} to {repo_id}: {_reason(error)}") from None
    return address


def pull(
    source: Path | str, *, allow: Collection[str] = (), revision: str | None = None, token: str | None = None
) -> Path:
    """The folder of a run: a local folder or, if there is none, the repository ``owner/name``, which is fetched.

    ``hf:owner/name`` always means the repository.

    A run whose model comes from ``package.module:factory`` is refused. To load it would import that code, and call it
    with arguments from the file.

    Arguments:
        allow: the factories that you trust.
        revision: a branch, a tag or a commit. A commit always gives the same files.
        token: an access token, for a private repository.
    """
    text = str(source)
    if not text.startswith("hf:") and (isinstance(source, Path) or Path(text).is_dir()):
        folder = Path(source)
    else:
        repo_id, hub = _repository(text.removeprefix("hf:")), _library()
        try:
            folder = Path(
                hub.snapshot_download(
                    repo_id, revision=revision, token=token, allow_patterns=list(FILES), ignore_patterns=list(UNWANTED)
                )
            )
        except Exception as error:  # the library raises its own errors, its network library's and the system's
            raise UserError(f"cannot pull {repo_id}: {_reason(error)}") from None
    named = set(_texts(_described(folder).get("model")))
    if (folder / "recipe.yaml").is_file():
        named.update(_recipe_model(folder / "recipe.yaml"))
    code = sorted(name for name in named if ":" in name and name not in allow)
    if code:
        raise UserError(
            f"{text}: its model is made by {code[0]!r}, and to load it would import and call that code; if you trust "
            f"this code, pass allow=[{code[0]!r}]"
        )
    return folder


def card(folder: Path, repo_id: str) -> str:
    """The model card of a run: data, recipe, threat model, verdict and seal, as Markdown."""
    record = _described(folder)
    data, threat = record.get("data") or {}, record.get("threat") or {}
    header = {
        "library_name": "steelman",
        "pipeline_tag": "image-classification",
        "tags": ["adversarial-robustness", "adversarial-training"],
    }
    lines = [
        "---",
        yaml.safe_dump(header, sort_keys=False).strip(),
        "---",
        MARK,
        f"# {repo_id.rpartition('/')[2]}",
        "",
        "An image classifier, trained and measured with steelman.",
        "",
        "```python",
        "import steelman",
        "",
        f'model = steelman.load("hf:{repo_id}").model  # takes images in [0, 1], gives logits',
        "```",
        "",
        "## Training",
        "",
        f"- Data: {data.get('name', 'not named')}",
        f"- Images: {'x'.join(map(str, record.get('input_shape', ())))} (channels, height, width)",
        f"- Classes: {len(record.get('classes', ()))}",
        f"- Threat model: {threat.get('norm')}, eps {threat.get('eps')}, "
        f"pixels in [{threat.get('low')}, {threat.get('high')}]",
        f"- SHA-256 of the weights: `{record.get('sha256')}`",
        "",
        "## Verdict",
        "",
        *_verdict(folder),
    ]
    recipe = folder / "recipe.yaml"
    if recipe.is_file():
        lines += ["", "## Recipe", "", *(f"    {line}".rstrip() for line in recipe.read_text().splitlines())]
    return "\n".join(lines) + "\n"


def _verdict(folder: Path) -> Iterator[str]:
    """The card's lines on the verdict. Their evidence must match its seal and the run's weights."""
    from steelman.evaluation.result import interval  # here, so that to import a model does not import evaluations
    from steelman.evidence.bundle import read_bundle

    place = folder / "verdict"
    if not (place / "evidence.json").is_file():
        yield "Nobody has measured this model: the run has no verdict."
        return
    bundle = read_bundle(place)
    record, total = bundle.record, bundle.record["total"]
    if record["weights"] != _weights(folder):
        raise UserError(f"{place} is evidence of another model: its weights are not those of model.safetensors")
    for name, correct in (("Clean", record["clean_correct"]), ("Robust", record["robust_correct"])):
        low, high = interval(correct, total)
        yield f"- {name} accuracy: {correct / total:.1%} [{low:.1%}, {high:.1%}] of {total:,} samples"
    threat, verdict = bundle.threat, record["verdict"]
    yield f"- Data: {record['data']}; threat model: {threat.norm}, eps {threat.eps:g}; suite: {record['suite']['name']}"
    if verdict is not None:
        yield f"- Trust: {verdict['trust']}"
        yield from (f"  - {reason}" for reason in verdict["reasons"])
    yield f"- Seal: `{bundle.seal}`"


def _weights(folder: Path) -> str:
    """The digest of a run's weights, computed as for its evidence."""
    from steelman.evidence.bundle import weights_digest
    from steelman.models.classifier import load_state

    state = load_state(folder / "model.safetensors")
    # A digest needs the state dict alone. A model built from model.json could import another person's code.
    return weights_digest(cast(nn.Module, SimpleNamespace(state_dict=lambda: state)))


def _described(folder: Path) -> dict[str, Any]:
    """The content of a run's model.json."""
    path = folder / "model.json"
    for needed in (path, folder / "model.safetensors"):
        if not needed.is_file():
            raise UserError(f"{folder} is not a finished run: {needed.name} is missing")
    try:
        record = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: {error}") from None
    if not isinstance(record, dict):
        raise UserError(f"{path} is damaged: expected a mapping, got {type(record).__name__}")
    return record


def _recipe_model(path: Path) -> Iterator[str]:
    """The name of a recipe's model."""
    try:
        recipe = yaml.safe_load(path.read_text())
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} is damaged: {str(error).splitlines()[0]}") from None
    model = recipe.get("model") if isinstance(recipe, dict) else None
    name = model.get("name") if isinstance(model, dict) else model
    if isinstance(name, str):
        yield name


def _texts(value: object) -> Iterator[str]:
    """Every text in a value from JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _repository(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", text, re.ASCII):
        raise UserError(f"expected a folder that exists, or a repository as owner/name, got {text!r}")
    return text


def _library() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise UserError(
            "the Hugging Face Hub needs the package huggingface-hub; install it with: pip install 'steelman[hub]'"
        ) from None


def _reason(error: Exception) -> str:
    """The reason of an error in one line. The library's own texts have several paragraphs."""
    for kind in type(error).__mro__:
        if kind.__name__ in REASONS:
            return REASONS[kind.__name__]
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
