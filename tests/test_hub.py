"""Runs on the Hugging Face Hub, with a folder in the Hub's place: nothing here uses the network."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import save
from torch import nn

import steelman
from steelman.errors import UserError
from steelman.evaluation.stages import protocol
from steelman.evidence.bundle import read_bundle
from steelman.models.classifier import build_classifier
from steelman.models.hub import MARK, card, pull, push
from steelman.threat import ThreatModel
from steelman.training.folder import load_model

SHAPE, REPO = (1, 4, 4), "ann/small"
THREAT = ThreatModel(eps=0.1)


def a_net() -> nn.Module:
    torch.manual_seed(3)
    return build_classifier("linear", input_shape=SHAPE, num_classes=3).eval()


def describe(folder: Path, **changed: Any) -> None:
    """Write a run's model.json and recipe.yaml."""
    model: dict[str, Any] = {"name": "linear", "options": {}, "mean": [0.0], "std": [1.0], "weights": None}
    record = {
        "format": 1,
        "recipe": "small",
        "model": model,
        "head": {"name": "linear", "options": {}},
        "input_shape": SHAPE,
        "classes": ["a", "b", "c"],
        "data": {"name": "noise", "options": {}},
        "threat": dataclasses.asdict(THREAT),
        "auxiliary_norm": None,
        "epoch": 1,
        "members": None,
        "sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        **changed,
    }
    (folder / "model.json").write_text(json.dumps(record))
    (folder / "recipe.yaml").write_text("name: small\nmodel: linear\n")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its verdict, and with much that nobody else needs."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    folder.mkdir()
    net = a_net()
    (folder / "model.safetensors").write_bytes(save(dict(net.state_dict())))
    describe(folder)
    x = torch.rand(20, *SHAPE)
    y = net(x).argmax(dim=1)
    y[0] = (y[0] + 1) % 3
    steelman.evaluate(net, x, y, THREAT, "fast", out=folder / "verdict")
    for name in ("report.html", "run.json", "checkpoints/step-1/state.json", "verdict/work/notes.json", "model.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    for name in ("code.py", "weights.pt", "model.pkl", ".hidden.json", "evaluation.txt"):
        (folder / name).write_text("{}")
    return folder


@pytest.fixture
def run(measured: Path, tmp_path: Path) -> Path:
    return shutil.copytree(measured, tmp_path / "run")


class FakeHub:
    """What is used of huggingface_hub, with folders for repositories; patterns are the library's own to apply."""

    def __init__(self, root: Path) -> None:
        self.root, self.said = root, list[tuple[str, dict[str, Any]]]()
        self.filter: Callable[..., Any] = pytest.importorskip("huggingface_hub.utils").filter_repo_objects

    def files(self, folder: Path) -> list[str]:
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    def HfApi(self, **options: Any) -> FakeHub:  # noqa: N802 - the library's name
        self.said.append(("HfApi", options))
        return self

    def create_repo(self, repo_id: str, **options: Any) -> str:
        self.said.append(("create_repo", options))
        (self.root / repo_id).mkdir(parents=True, exist_ok=True)
        return f"https://hub.test/{repo_id}"

    def upload_folder(
        self,
        *,
        repo_id: str,
        folder_path: Path,
        allow_patterns: list[str],
        ignore_patterns: list[str],
        delete_patterns: list[str],
        **options: Any,
    ) -> None:
        self.said.append(("upload_folder", options))
        place = self.root / repo_id
        for name in self.filter(self.files(place), allow_patterns=delete_patterns):
            (place / name).unlink()
        chosen = self.filter(self.files(folder_path), allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        for name in chosen:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder_path / name, place / name)

    def snapshot_download(
        self, repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str], **options: Any
    ) -> str:
        self.said.append(("snapshot_download", options))
        source, place = self.root / repo_id, self.root / "cache" / repo_id
        if not source.is_dir():
            raise type("RepositoryNotFoundError", (OSError,), {})("404 Client Error. (Request ID: 1)\n\nNo such thing")
        shutil.rmtree(place, ignore_errors=True)
        for name in self.filter(self.files(source), allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, place / name)
        return str(place)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(tmp_path / "hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_the_library_takes_what_is_asked_of_it() -> None:
    """The fake stands for these calls; a version of the library that names an argument otherwise is noticed here."""
    import inspect

    library: Any = pytest.importorskip("huggingface_hub")
    for function, names in (
        (library.HfApi, ("token",)),
        (library.HfApi.create_repo, ("repo_id", "private", "exist_ok")),
        (
            library.HfApi.upload_folder,
            ("repo_id", "folder_path", "revision", "allow_patterns", "ignore_patterns", "delete_patterns"),
        ),
        (library.snapshot_download, ("repo_id", "revision", "token", "allow_patterns", "ignore_patterns")),
    ):
        assert set(names) <= inspect.signature(function).parameters.keys()
    for name in ("GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError", "LocalEntryNotFoundError"):
        assert hasattr(library.errors, name)


def test_a_run_comes_back_as_it_went(run: Path, hub: FakeHub) -> None:
    assert push(run, REPO) == "https://hub.test/ann/small"
    folder = pull(f"hf:{REPO}")
    model, record = load_model(folder)
    x = torch.rand(5, *SHAPE)
    assert model(x).equal(a_net()(x))
    assert record["recipe"] == "small"
    assert read_bundle(folder / "verdict").seal == read_bundle(run / "verdict").seal
    assert pull(REPO) == folder


def test_nothing_but_data_is_pushed_or_pulled(run: Path, hub: FakeHub) -> None:
    push(run, REPO)
    sent = {"README.md", "model.json", "model.safetensors", "recipe.yaml", "report.html", "run.json"}
    evidence = {
        f"verdict/{path.name}" for path in (run / "verdict").iterdir() if path.suffix in (".json", ".safetensors")
    }
    assert set(hub.files(hub.root / REPO)) == sent | evidence
    for name in ("evil.py", "model.pkl", "pytorch_model.bin", "weights.pt", "checkpoints/step-9/state.json"):
        (hub.root / REPO / name).parent.mkdir(parents=True, exist_ok=True)
        (hub.root / REPO / name).write_text("raise SystemExit")
    assert set(hub.files(pull(REPO))) == sent | evidence


def test_evidence_may_stay_at_home_and_never_mixes_with_older_one(run: Path, hub: FakeHub) -> None:
    push(run, REPO)
    old = hub.root / REPO / "verdict" / "adversarial-0007.safetensors"
    old.write_bytes(b"")
    own = hub.root / REPO / "notes.json"  # somebody's own file is left alone
    own.write_text("{}")
    push(run, REPO)
    assert not old.exists()
    assert own.exists()
    assert read_bundle(pull(REPO) / "verdict")
    push(run, REPO, evidence=False)
    assert not any(name.startswith("verdict/") for name in hub.files(hub.root / REPO))


def test_options_reach_the_library(run: Path, hub: FakeHub) -> None:
    push(run, REPO, private=True, revision="next", token="key", message="Better")
    pull(REPO, revision="v1", token="key")
    assert hub.said == [
        ("HfApi", {"token": "key"}),
        ("create_repo", {"private": True, "exist_ok": True}),
        ("upload_folder", {"revision": "next", "commit_message": "Better"}),
        ("snapshot_download", {"revision": "v1", "token": "key"}),
    ]


def test_the_card_says_what_the_evidence_says(run: Path) -> None:
    text, bundle = card(run, REPO), read_bundle(run / "verdict")
    front, _, body = text.removeprefix("---\n").partition("\n---\n")
    assert yaml.safe_load(front)["library_name"] == "steelman"
    robust = bundle.record["robust_correct"]
    for line in (
        'model = steelman.load("hf:ann/small").model',
        "- Data: noise",
        "- Clean accuracy: 95.0%",
        f"- Robust accuracy: {robust / 20:.1%} [",
        "of 20 samples",
        "- Data: data; threat model: linf, eps 0.1; suite: fast",
        f"- Trust: {bundle.record['verdict']['trust']}",
        f"- Seal: `{bundle.seal}`",
        "    model: linear",
    ):
        assert line in body
    shutil.rmtree(run / "verdict")
    assert "Nobody has measured this model" in card(run, REPO)


def test_a_card_of_one_s_own_is_kept(run: Path, hub: FakeHub) -> None:
    push(run, REPO)
    assert MARK in (run / "README.md").read_text()
    (run / "README.md").write_text(f"{MARK}\nold")
    push(run, REPO)
    assert (hub.root / REPO / "README.md").read_text() == card(run, REPO)
    (run / "README.md").write_text("mine")
    push(run, REPO)
    assert (hub.root / REPO / "README.md").read_text() == "mine"


def other_weights(run: Path) -> None:
    state = {name: value + 1 for name, value in a_net().state_dict().items()}
    (run / "model.safetensors").write_bytes(save(state))
    describe(run)


def changed_seal(run: Path) -> None:
    path = run / "verdict" / "evidence.json"
    path.write_text(path.read_text().replace('"robust_correct": ', '"robust_correct": 1'))


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (other_weights, "verdict is evidence of another model"),
        (changed_seal, "evidence.json was changed: its seal does not fit"),
        (lambda run: (run / "model.safetensors").write_bytes(b"x"), "its checksum differs"),
        (lambda run: (run / "model.json").unlink(), "not a finished run: model.json is missing"),
        (lambda run: (run / "model.safetensors").unlink(), "not a finished run: model.safetensors is missing"),
    ],
)
def test_a_run_that_is_not_what_it_says_is_not_pushed(
    run: Path, hub: FakeHub, spoil: Callable[[Path], object], error: str
) -> None:
    spoil(run)
    with pytest.raises(UserError, match=error):
        push(run, REPO)
    assert hub.said == []


CALLED = list[str]()


def planted(**options: str) -> nn.Module:
    """What a stranger's model.json would have called."""
    CALLED.append(str(options))
    return a_net()


def test_code_that_a_run_names_is_not_imported(run: Path, hub: FakeHub) -> None:
    push(run, REPO)
    foreign = {"name": "tests.test_hub:planted", "options": {"command": "rm"}, "mean": [0.0], "std": [1.0]}
    describe(hub.root / REPO, model=foreign)
    for folder in (pull(REPO), hub.root / REPO):
        with pytest.raises(UserError, match=r"made by 'tests.test_hub:planted', and to build it would import and call"):
            load_model(folder)
        with pytest.raises(UserError, match=r"allow_import=\['tests.test_hub'\] in Python"):
            load_model(folder, allow_import=["tests", "tests.test_hub:other", "tests.test_hub.planted"])
    assert CALLED == []
    load_model(pull(REPO), allow_import=["tests.test_hub"])
    assert CALLED == ["{'command': 'rm'}"]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("model.json", "{", "model.json is damaged"),
        ("model.json", "[]", "model.json is damaged: expected a mapping, got list"),
        ("model.json", '{"model": ' + "[" * 100_000, "model.json is damaged"),
        ("model.json", '{"format": 1, "format": 1}', "model.json is damaged: expected each key once"),
        ("model.json", '{"model": "os:system"}', "model.json is damaged: format is missing"),
    ],
)
def test_damaged_files_are_told(run: Path, name: str, content: str, error: str) -> None:
    (run / name).write_text(content)
    with pytest.raises(UserError, match=error):
        pull(run)


def test_a_local_folder_is_taken_as_it_is(run: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    Path("ann").mkdir()
    run.rename(Path(REPO))
    assert pull(REPO) == Path(REPO)
    assert hub.said == []
    Path("hf:ann").mkdir()
    shutil.copytree(REPO, f"hf:{REPO}")
    with pytest.raises(UserError, match="cannot pull ann/small: there is no such repository, or it is private"):
        pull(f"hf:{REPO}")


@pytest.mark.parametrize(
    "name", ["hf:", "ann", "hf:ann", "ann/", "/small", "ann/small/more", "ann/sm all", 'ann/"', "../x/y"]
)
def test_what_is_no_repository_is_told(run: Path, hub: FakeHub, name: str) -> None:
    with pytest.raises(UserError, match="expected a folder that exists, or a repository as owner/name, got"):
        pull(name)
    assert hub.said == []
    with pytest.raises(UserError, match="is not a finished run"):
        pull(Path("nowhere"))


def test_a_failure_of_the_library_is_one_sentence(run: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("\n  no network\nmore")

    monkeypatch.setattr(hub, "create_repo", fail)
    with pytest.raises(UserError, match=r"cannot push .* to ann/small: no network$"):
        push(run, REPO)


def test_without_the_library_the_extra_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (lambda: push(run, REPO), lambda: pull(REPO)):
        with pytest.raises(UserError, match=r"install it with: pip install 'steelman\[hub\]'"):
            call()
    assert pull(run) == run


def test_a_run_of_fit_goes_there_and_back(tmp_path: Path, hub: FakeHub) -> None:
    net, x, y = a_net(), torch.rand(40, *SHAPE), torch.arange(40) % 3
    suite = protocol({"PGD": steelman.PGD(steps=2)}, curve=False)
    made = steelman.fit(net, (x, y), THREAT, epochs=1, out=tmp_path / "run", suite=suite, console=Console(quiet=True))
    assert made.push_to_hub(REPO) == "https://hub.test/ann/small"
    again = steelman.load(f"hf:{REPO}")
    assert again.model(x).equal(net(x))
    assert (again.verdict, again.history) == (made.verdict, made.history)
