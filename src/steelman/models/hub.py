"""Runs on the Hugging Face Hub: `push` uploads a run's folder, `pull` fetches one.

Both only copy files, by ``upload_folder`` and ``snapshot_download``. The library's ``PyTorchModelHubMixin`` is not
used: every model would have to inherit from it. It stores no recipe and no evidence. If it finds no safetensors file,
it reads a pickle.

A pulled file is never imported and never run. Pickles and Python files are not fetched. A factory that model.json names
is not imported either: ``steelman.load`` refuses it, unless its argument `allow_import` has the factory's module.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import yaml
from torch import nn

from steelman.errors import UserError
from steelman.files import sweep, write_atomic

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
    from steelman.training.folder import checksum  # here, because training imports models

    folder, hub = Path(folder), _library()
    repo_id = _repository(repo_id)
    record = _described(folder)
    if checksum(folder / "model.safetensors") != record["sha256"]:
        raise UserError(f"{folder / 'model.safetensors'} is not what model.json describes: its checksum differs")
    readme = folder / "README.md"
    sweep(folder, ["README.md"])
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
            commit_message=message or f"A run of steelman: {record['recipe'] or folder.name}",
        )
    except Exception as error:  # the library raises its own errors, its network library's and the system's
        raise UserError(f"cannot push {folder} to {repo_id}: {_reason(error)}") from None
    return address


def pull(source: Path | str, *, revision: str | None = None, token: str | None = None) -> Path:
    """The folder of a run: a local folder or, if there is none, the repository ``owner/name``, which is fetched.

    ``hf:owner/name`` always means the repository.

    Arguments:
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
    _described(folder)  # or else a repository without a run would be found out much later
    return folder


def card(folder: Path, repo_id: str) -> str:
    """The model card of a run: data, recipe, threat model, verdict and seal, as Markdown."""
    record = _described(folder)
    data, threat = record["data"], record["threat"]
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
        f"- Data: {data['name'] or 'not named'}",
        f"- Images: {'x'.join(map(str, record['input_shape']))} (channels, height, width)",
        f"- Classes: {len(record['classes'])}",
        f"- Threat model: {threat['norm']}, eps {threat['eps']}, pixels in [{threat['low']}, {threat['high']}]",
        f"- SHA-256 of the weights: `{record['sha256']}`",
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
    from steelman.training.described import model_file  # here, because training imports models

    path = folder / "model.json"
    for needed in (path, folder / "model.safetensors"):
        if not needed.is_file():
            raise UserError(f"{folder} is not a finished run: {needed.name} is missing")
    return model_file(path)


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
