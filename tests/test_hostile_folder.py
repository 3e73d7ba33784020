"""A stranger's folder is read by every reader. No code of it is imported or run, and nothing outside is written."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import importlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save
from torch import nn

import steelman
from steelman import cli, data, imports
from steelman import recipe as recipes
from steelman.attacks import PGD
from steelman.data import store
from steelman.errors import UserError
from steelman.evaluation.result import Evaluation
from steelman.evidence.compare import compare
from steelman.evidence.verify import verify
from steelman.models.classifier import build_classifier, load_state
from steelman.models.hub import card, pull
from steelman.threat import ThreatModel
from steelman.training import folder as folders
from steelman.training import run as training
from steelman.training.checkpoint import load_newest

SHAPE = (1, 4, 4)
PATHS = ("os:system", "subprocess:getoutput", "evil_module:make", "tests.x:y", "torch:load", "builtins:eval")
EVIL = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\ndef make(**_): Path(__file__).touch()\n"
SOURCE = Path(str(steelman.__file__)).parent
# What would start a process, open a connection, or build an object from a pickle.
NEVER = (
    "subprocess.",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "pty.",
    "socket.connect",
    "pickle.",
)
CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate")


class Watch:
    """What Python's audit events tell: imports, processes, and changes to files."""

    def __init__(self) -> None:
        self.inside: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self.hear)

    def hear(self, event: str, found: tuple[Any, ...]) -> None:
        if self.inside is None:
            return
        if event.startswith(NEVER):
            self.seen.append(f"{event} {found!r}"[:200])
        elif event == "exec":  # raised for each module that is imported for the first time
            self.executed(str(found[0].co_filename))
        elif (
            event == "open" and isinstance(found[0], str | bytes) and found[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        ):
            self.changed(event, os.fsdecode(found[0]))
        elif event in CHANGES and isinstance(found[0], str | os.PathLike):
            self.changed(event, os.fspath(found[0]))

    def executed(self, path: str) -> None:
        """Code of the standard library, of installed packages and of steelman is as usual."""
        usual = path.startswith("<") or "site-packages" in path or Path(path).is_relative_to(SOURCE)
        if not usual and not path.startswith((str(Path(os.__file__).parent), "/usr/lib")):
            self.seen.append(f"executed {path}")

    def changed(self, event: str, path: str) -> None:
        assert self.inside is not None
        if path != os.devnull and not Path(path).absolute().is_relative_to(self.inside):
            self.seen.append(f"{event} {path}")


_watch = Watch()


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Inside the folder, where a module of the stranger lies, ready to be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("STEELMAN_DATA", str(tmp_path / "data"))
    (tmp_path / "evil_module.py").write_text(EVIL)

    def import_module(name: str) -> Any:  # a module that is there already raises no event
        _watch.seen.append(f"import_module {name}")
        return importlib.import_module(name)

    monkeypatch.setattr(imports, "importlib", SimpleNamespace(import_module=import_module))
    _watch.inside, _watch.seen = tmp_path, []
    try:
        yield _watch
    finally:
        _watch.inside = None
        sys.modules.pop("evil_module", None)


class Runs:
    """A pickle of this object writes a file when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("open('ran', 'w').close()",)


# The stranger's folders.


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with evidence, and its data as arrays."""
    folder = tmp_path_factory.mktemp("honest") / "run"
    folder.mkdir()
    x, y = torch.rand(12, *SHAPE, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    net = build_classifier("linear", input_shape=SHAPE, num_classes=3).eval()
    arrays = folder / "arrays"
    arrays.mkdir()
    for part in ("train", "test"):
        np.save(arrays / f"{part}_images.npy", x.numpy())
        np.save(arrays / f"{part}_labels.npy", y.numpy())
    steelman.evaluate(net, x, y, ThreatModel(eps=0.1), {"one": PGD(steps=1)}, out=folder / "verdict")
    (folder / "model.safetensors").write_bytes(save(dict(net.state_dict())))
    (folder / "run.json").write_text(
        json.dumps(
            {
                "status": "finished",
                "message": None,
                "kept_epoch": 1,
                "training_seconds": 1.0,
                "session_seconds": 1.0,
                "history": [],
            }
        )
    )
    describe(folder)
    return folder


def describe(run: Path, **changes: Any) -> None:
    """Write model.json and recipe.yaml, with the right checksum."""
    model: dict[str, Any] = {"name": "linear", "options": {}, "mean": [0.0], "std": [1.0], "weights": None}
    content = (run / "model.safetensors").read_bytes()
    record = {
        "format": 1,
        "recipe": "x",
        "model": {**model, **changes.pop("model", {})},
        "head": {"name": "linear", "options": {}},
        "input_shape": SHAPE,
        "classes": ["0", "1", "2"],
        "data": {"name": "arrays", "options": {"root": str(run / "arrays")}},
        "threat": dataclasses.asdict(ThreatModel(eps=0.1)),
        "auxiliary_norm": None,
        "epoch": 1,
        "members": None,
        "sha256": hashlib.sha256(content).hexdigest(),
        **changes,
    }
    (run / "model.json").write_text(json.dumps(record))
    recipe(run)


def recipe(run: Path, text: str = "", **changes: Any) -> None:
    source = {
        "name": "x",
        "data": {"name": "arrays", "root": str(run / "arrays")},
        "model": "linear",
        "threat": {"eps": 0.1},
        "objective": {"name": "pgd-at", "attack": {"name": "pgd", "steps": 1}},
        "training": {"epochs": 1, "batch_size": 4, "lr": 0.1},
        "validation": {"size": 3, "samples": 3},
        "evaluation": {"suite": None, "attacks": {"FGSM": "fgsm"}},
        **changes,
    }
    (run / "recipe.yaml").write_text(text or json.dumps(source))  # JSON is YAML


def _pickled(place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(pickle.dumps(Runs()))


def _model(name: str, **more: Any) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        describe(run, model={"name": name, **more})
        recipe(run, model={"name": name, **more})

    return spoil


def _weights(run: Path) -> None:
    _pickled(run / "model.safetensors")
    describe(run)
    torch.save({"layer": Runs()}, run / "weights.pt")
    recipe(run, model={"name": "linear", "weights": str(run / "weights.pt")})


def _evidence(run: Path) -> None:
    for name in ("samples.safetensors", "gallery.safetensors", "adversarial-0000.safetensors"):
        _pickled(run / "verdict" / name)


def _working(run: Path) -> None:
    record = json.loads((run / "verdict" / "evidence.json").read_text())
    shutil.rmtree(run / "verdict")
    (run / "verdict" / "work").mkdir(parents=True)
    (run / "verdict" / "work" / "run.json").write_text(json.dumps(record))
    for name in ("clean-00000.batch", "00-00000.batch"):
        content = pickle.dumps(Runs())
        seal = hashlib.sha256(content).hexdigest().encode()
        (run / "verdict" / "work" / name).write_bytes(seal + b"\n" + content)


def _checkpoint(run: Path) -> None:
    (run / "run.json").unlink()
    place = run / "checkpoints" / "step-00000001"
    _pickled(place / "tensors.safetensors")
    digest = hashlib.sha256((place / "tensors.safetensors").read_bytes()).hexdigest()
    hostile = {"object": "os:system", "py/object": "os.system", "call": ["os.system", "id"]}
    text = json.dumps({"format": 1, "sha256": digest, "structure": hostile})
    (place / "state.json").write_text(f"{text}\n{hashlib.sha256(text.encode()).hexdigest()}\n")
    (place / "optimizer.pt").write_bytes(pickle.dumps(Runs()))


def _data(run: Path) -> None:
    hostile = np.array([Runs()], dtype=object)
    np.save(run / "arrays" / "train_images.npy", hostile, allow_pickle=True)
    np.savez(run / "arrays.npz", train_images=hostile, train_labels=hostile)
    for name in ("mnist.safetensors", "mnist.pt"):
        _pickled(run / "data" / "mnist" / name)
    for name in ("data_batch_1.bin", "data_batch_1", "train-images-idx3-ubyte.gz", "mnist.tar.gz"):
        _pickled(run / "published" / name)
    for part in ("train", "val"):
        _pickled(run / "images" / part / "class" / "x.png")


def _helper(run: Path) -> None:
    other = Path(shutil.copytree(run, run / "other"))
    describe(other, model={"name": "evil_module:make"})
    recipe(run, objective={"name": "hat", "helper": str(other)})


def _text(text: str) -> Callable[[Path], None]:
    def spoil(run: Path) -> None:
        (run / "run.json").unlink()
        recipe(run, text)

    return spoil


NAMED = "name: x\nmodel: linear\nthreat: {eps: 0.1}\nobjective: pgd-at\n"
HOSTILE: dict[str, Callable[[Path], None]] = {
    **{f"called {name}": _model(name) for name in PATHS},
    "a model with a command": _model("os:system", options={"command": "touch ran"}),
    "a model of a module in the folder": _model("evil_module:make", options={"a": 1}),
    "pickled weights": _weights,
    "pickled evidence": _evidence,
    "a pickled evaluation in progress": _working,
    "a pickled checkpoint": _checkpoint,
    "pickled data": _data,
    "a helper of another module": _helper,
    "a base with a model of its own": lambda run: recipe(run, base="../run/recipe.yaml", model="evil_module:make"),
    "a tag": _text("name: !!python/object/apply:os.system ['touch ran']\n" + NAMED),
    "a tag for a module": _text("name: !!python/module:evil_module\n" + NAMED),
    **{
        f"an import path as the {key}": _text(
            f"{NAMED}\n{key}: {{name: evil_module:make}}".replace(f"{key}: linear\n", "")
        )
        for key in ("data", "head", "objective", "threat", "evaluation")
    },
    "an import path in lists": _text(
        f"{NAMED}training: {{optimizer: 'evil_module:make', lr: {{name: 'os:system'}}}}\n"
        "evaluation: {suite: 'os:system'}\n"
    ),
}


# The readers.


def _command(*line: str) -> None:
    kept, sys.argv = sys.argv, ["steelman", *line]
    code: object = None
    try:
        cli.main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = kept
    assert code in (None, 0, 1, 2), code


def _arrays(run: Path) -> None:
    for read in (
        lambda: data.load("arrays", root=run / "arrays"),
        lambda: data.load("arrays", root=run / "arrays.npz"),
        lambda: data.load("mnist", root=run / "data"),
        lambda: store.read(run / "data" / "mnist" / "mnist.safetensors"),
        lambda: data.get("mnist", root=run / "new", source=run / "published"),
        lambda: data.get("cifar10", root=run / "new", source=run / "published"),
        lambda: data.load("folder", root=run / "images", size=4, resize=4).train.images(torch.arange(1)),
    ):
        with _maybe():
            read()


class _maybe:  # noqa: N801 - it reads as a word
    """A sentence for the user is as good as an answer."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: object, at: object) -> bool:
        return isinstance(error, UserError)


def _weight_files(run: Path) -> None:
    for name in ("model.safetensors", "weights.pt", "checkpoints/step-00000001/optimizer.pt"):
        with _maybe():
            load_state(run / name)


def _hub(run: Path) -> None:
    card(pull(run), "a/b")


def _parsed(run: Path) -> None:
    source, origin = recipes.read(str(run / "recipe.yaml"))
    recipes.check_root(source, origin)
    training.train(source, run.parent / "new", console=Console(quiet=True), origin=origin)


def _evaluated(run: Path) -> None:
    x, y = torch.rand(12, *SHAPE, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).eval()
    steelman.evaluate(net, x, y, ThreatModel(eps=0.1), {"one": PGD(steps=1)}, out=run / "verdict")


READERS: dict[str, Callable[[Path], object]] = {
    "load": steelman.load,
    "load_model": folders.load_model,
    "hub": _hub,
    "weights": _weight_files,
    "data": _arrays,
    "verify": verify,
    "evidence": lambda run: Evaluation.load(run / "verdict"),
    "compare": lambda run: compare({"a": run, "b": run / "verdict"}),
    "evaluate": _evaluated,
    "checkpoint": load_newest,
    "recipe": _parsed,
    "resume": lambda run: training.resume(run, Console(quiet=True)),
    "steelman train": lambda run: _command("train", str(run / "recipe.yaml"), "--out", str(run.parent / "newer")),
    "steelman resume": lambda run: _command("resume", str(run)),
    "steelman evaluate": lambda run: _command(
        "evaluate", str(run), "--attack", "fgsm", "--out", str(run.parent / "out")
    ),
    "steelman transfer": lambda run: _command("transfer", str(run), f"b={run}", "--out", str(run.parent / "moved")),
    "steelman distance": lambda run: _command("distance", str(run), "--attack", "deepfool:steps=1", "--samples", "2"),
    "steelman verify": lambda run: _command("verify", str(run), "--model", str(run), "--data", "arrays"),
    "steelman verify of a run": lambda run: _command("verify", str(run)),
    "steelman gate": lambda run: _command("gate", str(run), "--min-robust", "0.1"),
    "steelman compare": lambda run: _command("compare", str(run), f"b={run}", "--out", str(run.parent / "page.html")),
}
# The readers of what is hostile. The others would only train or evaluate an honest run, which takes long.
OF_RECIPES = ("load", "recipe", "resume", "steelman train", "steelman resume")
OF_NAMES = ("load", "load_model", "hub", "recipe", "steelman evaluate")
OF_EVIDENCE: tuple[str, ...] = ("load", "hub", "verify", "evidence", "compare", "evaluate")
OF_EVIDENCE += ("steelman verify", "steelman verify of a run", "steelman gate", "steelman compare")
CONCERNED = {
    "an import path": OF_RECIPES,
    "a tag": OF_RECIPES,
    "a base": OF_RECIPES,
    "called": OF_NAMES,
    "a helper": OF_RECIPES,
    "pickled evidence": OF_EVIDENCE,
    "a pickled evaluation": OF_EVIDENCE,
    "a pickled checkpoint": ("weights", "checkpoint", "load", "load_model", "hub"),
    "pickled data": ("data", "recipe", "steelman train", "steelman evaluate", "steelman verify"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_reader_runs_what_a_folder_names(kind: str, honest: Path, tmp_path: Path, watch: Watch) -> None:
    concerned = next((names for word, names in CONCERNED.items() if kind.startswith(word)), tuple(READERS))
    for name in concerned:
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        run = Path(shutil.copytree(honest, folder / "run"))
        describe(run)
        HOSTILE[kind](run)
        with _maybe():
            READERS[name](run)
        assert not watch.seen, f"{name}: {watch.seen}"
    assert not list(tmp_path.rglob("ran"))


def test_what_the_user_allows_is_imported_and_seen(honest: Path, tmp_path: Path, watch: Watch) -> None:
    """Without this test, a watch that sees nothing would pass the one above."""
    run = Path(shutil.copytree(honest, tmp_path / "run"))
    describe(run, model={"name": "evil_module:make"})
    with pytest.raises(UserError, match=r"should give a torch\.nn\.Module, got NoneType"):
        folders.load_model(run, allow_import=["evil_module"])
    assert any("import_module evil_module" in one for one in watch.seen)
    assert any(one.startswith("executed") and one.endswith("evil_module.py") for one in watch.seen)
    assert (tmp_path / "ran").exists()
    watch.seen.clear()
    os.system("true")
    (tmp_path.parent / "outside").write_text("")
    assert [one.split()[0] for one in watch.seen] == ["os.system", "open"]


def test_a_module_is_not_allowed_for_what_it_has_imported(honest: Path, tmp_path: Path, watch: Watch) -> None:
    (tmp_path / "evil_module.py").write_text("from os import system\n")
    run = Path(shutil.copytree(honest, tmp_path / "run"))
    describe(run, model={"name": "evil_module:system", "options": {"command": "touch ran"}})
    with pytest.raises(UserError, match="is defined in posix, and only evil_module is allowed"):
        folders.load_model(run, allow_import=["evil_module"])
    assert not (tmp_path / "ran").exists()
    assert watch.seen


# One function imports by name, and nothing runs a text or a pickle.

ALLOWED = {
    ("imports.py", "importlib"): "the one importer of names that a user gives",
    ("__init__.py", "importlib"): "the lazy names of steelman itself, from a table in the same file",
    ("report/html.py", "importlib"): "reads a file of the package",
    ("recipe_files.py", "importlib"): "reads files of the package",
    ("cli/doctor.py", "importlib"): "asks for the versions of installed packages",
    ("models/hub.py", "importlib"): "imports huggingface_hub, by that fixed name",
    ("corruptions/frost.py", "importlib"): "looks where imagecorruptions has its pictures, and imports nothing",
    ("corruptions/measure.py", "importlib"): "asks for the version of Pillow",
    ("corruptions/published.py", "importlib"): "reads a file of the package",
    ("evaluation/stages.py", "marshal"): "hashes the code of a user's own function; nothing is read",
}
MODULES = (
    "importlib",
    "pickle",
    "marshal",
    "shelve",
    "runpy",
    "code",
    "codeop",
    "imp",
    "dill",
    "cloudpickle",
    "joblib",
)
CALLS = ("eval", "exec", "compile", "__import__", "execfile")


def _strange(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in CALLS:
                yield called
            keys = {key.arg: ast.unparse(key.value) for key in node.keywords}
            if called.endswith("torch.load") and keys.get("weights_only") != "True":
                yield "torch.load without weights_only"
            if called.endswith("np.load") and keys.get("allow_pickle") != "False":
                yield "np.load with pickles"
            if (
                called in ("yaml.load", "yaml.unsafe_load", "yaml.full_load")
                and ast.unparse(node.args[-1]) != "_Loader"
            ):
                yield "yaml.load"


def test_one_function_imports_by_name() -> None:
    found = {
        (str(path.relative_to(SOURCE)), word)
        for path in SOURCE.rglob("*.py")
        for word in _strange(ast.parse(path.read_text()))
        if word in MODULES or word in CALLS or " " in word or word == "yaml.load"
    }
    assert found == set(ALLOWED)
    fixed = {
        "models/hub.py": ["'huggingface_hub'"],
        "imports.py": ["module"],
        "__init__.py": ["f'steelman.{_MODULE_OF[name]}'"],
    }
    for name, given in fixed.items():
        tree = ast.parse((SOURCE / name).read_text())
        calls = [
            one for one in ast.walk(tree) if isinstance(one, ast.Call) and "import_module" in ast.unparse(one.func)
        ]
        assert [ast.unparse(one.args[0]) for one in calls] == given


@pytest.mark.parametrize("text", ["eval('1')", "import pickle", "torch.load(x)", "np.load(x, allow_pickle=True)"])
def test_the_search_finds_what_it_looks_for(text: str) -> None:
    assert list(_strange(ast.parse(text)))
