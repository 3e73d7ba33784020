"""The readers that the fuzzer tries, each with valid inputs to start from. Run as a script, it makes those inputs."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import shutil
import struct
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import fuzz_corruptions

TINY = (
    *("model={name: mlp, width: 16}", "training.epochs=4", "training.lr=0.01", "objective.attack.steps=1"),
    *("validation.samples=20", "evaluation.samples=40", "evaluation.attacks={FGSM: fgsm}", "compute.accelerator=cpu"),
)
OPTIONS = (
    *(
        "pgd:steps=2,restarts=2,loss=margin",
        "fab:steps=2",
        "square:queries=8",
        "folder:size=8,root=.",
        "he:scale=10,margin=0.2",
    ),
    *("eot:samples=2", "cw:steps=3", "rays:queries=10", "arrays:root=x.npz", "mlp", "deepfool", "apgd:loss=dlr"),
)
NAMES = (
    *("name", "base", "data", "model", "head", "threat", "objective", "training", "validation", "guard", "around"),
    *("compute", "evaluation", "published", "chosen", "epochs", "batch_size", "optimizer", "lr", "eps", "seed", "ema"),
    *(
        "select",
        "cycles",
        "weights",
        "mean",
        "std",
        "width",
        "depth",
        "root",
        "size",
        "resize",
        "test",
        "augment",
        "norm",
    ),
    *(
        "low",
        "high",
        "l1",
        "l2",
        "linf",
        "steps",
        "restarts",
        "step_size",
        "loss",
        "queries",
        "helper",
        "attack",
        "awp",
    ),
    *("pgd-at", "trades", "mart", "alp", "free-at", "fast-at", "rat", "gat", "hat", "tla", "cure", "llr", "standard"),
    *(
        "piecewise",
        "linear",
        "cosine",
        "cyclic",
        "constant",
        "points",
        "warmup",
        "resets",
        "at",
        "mlp",
        "lenet",
        "smallcnn",
    ),
    *(
        "wrn-34-10",
        "resnet18",
        "digits",
        "folder",
        "arrays",
        "mnist",
        "cifar10",
        "devices",
        "nodes",
        "workers",
        "precision",
    ),
    *(
        "accelerator",
        "compile",
        "channels_last",
        "label_smoothing",
        "clip",
        "patience",
        "auxiliary_norm",
        "samples",
        "suite",
    ),
    *(
        "attacks",
        "fast",
        "he",
        "m-he",
        "scale",
        "margin",
        "pgd",
        "fgsm",
        "apgd",
        "fab",
        "square",
        "cw",
        "eot",
        "digits-pgd-at",
    ),
)
LINES = (
    ["train", "digits-pgd-at", "training.epochs=1", "--out", "run"],
    ["train", "mine.yaml", "threat.eps=8/255", "head=he"],
    ["resume", "{t}/stopped"],
    ["evaluate", "{t}/run", "--eps", "0.1", "--suite", "fast", "--samples", "5", "--out", "x"],
    [
        "evaluate",
        "mlp",
        "--data",
        "digits",
        "--eps",
        "8/255",
        "--weights",
        "{t}/run/model.safetensors",
        "--option",
        "width=16",
    ],
    ["evaluate", "{t}/run", "--attack", "pgd:steps=2", "--minutes", "1", "--batch-size", "7", "--seed", "3"],
    ["transfer", "a={t}/run", "b={t}/run", "--target", "a={t}/run", "--attack", "mim:steps=2", "--eps", "0.1"],
    ["distance", "{t}/run", "--attack", "deepfool:steps=2", "--norm", "l2", "--eps", "0.5", "--samples", "2"],
    ["verify", "{t}/run", "--model", "{t}/run", "--data", "digits"],
    ["compare", "a={t}/run", "b={t}/run/attacks", "--out", "page.html"],
    ["gate", "{t}/run", "--min-robust", "0.1", "--min-clean", "0.2", "--allow-suspect"],
    ["list", "attacks"],
    ["data", "list"],
    ["data", "get", "mnist", "--source", "{t}/idx", "--root", "data"],
    ["doctor"],
    ["demo", "--out", "demo"],
    ["--version"],
    ["train", "--help"],
)
WORDS_OF_LINES = (
    *(
        "train",
        "resume",
        "evaluate",
        "transfer",
        "distance",
        "verify",
        "compare",
        "gate",
        "list",
        "data",
        "get",
        "demo",
    ),
    *(
        "--out",
        "--eps",
        "--norm",
        "--suite",
        "--attack",
        "--data",
        "--root",
        "--weights",
        "--layout",
        "--head",
        "--option",
    ),
    *(
        "--samples",
        "--batch-size",
        "--seed",
        "--workers",
        "--minutes",
        "--precision",
        "--allow-import",
        "--random-weights",
    ),
    *(
        "--more-outputs",
        "--min-robust",
        "--allow-suspect",
        "--source",
        "--target",
        "--model",
        "--help",
        "--",
        "-",
        "--tiny-eps",
    ),
    *(
        "{t}/run",
        "{t}/run/verdict",
        "{t}/stopped",
        "{t}/fit",
        "{t}",
        "{t}/run/model.json",
        ".",
        "..",
        "~",
        "",
        "=",
        "a=",
        "=b",
    ),
    *(
        "mlp",
        "os:system",
        "no.such:thing",
        "steelman:PGD",
        "torch.nn:Linear",
        "hf:a/b",
        "digits",
        "folder:size=8",
        "auto",
    ),
    *(
        "l2",
        "trades-smallcnn",
        "he:scale=0",
        "fast",
        "standard",
        "pgd:steps=1e23",
        "square:queries=1e20",
        "width=1e11",
        *OPTIONS,
    ),
)


@dataclasses.dataclass(frozen=True)
class Reader:
    """How a reader is tried: its valid inputs, the kinds of changes to them, its words, and the call itself.

    The call gets the input, an empty folder and the folder of the templates.
    """

    seeds: Callable[[Path], list[bytes]]
    kinds: tuple[str, ...]
    read: Callable[[bytes, Path, Path], None]
    words: tuple[str, ...] = ()


def files(*patterns: str) -> Callable[[Path], list[bytes]]:
    """The valid inputs in the files of the templates with such names."""
    return lambda templates: [path.read_bytes() for pattern in patterns for path in sorted(templates.glob(pattern))]


def texts(*given: str) -> Callable[[Path], list[bytes]]:
    return lambda _: [text.encode() for text in given]


def _copied(templates: Path, name: str, scratch: Path) -> Path:
    return Path(shutil.copytree(templates / name, scratch / name))


# Recipes and texts.


def recipe(content: bytes, scratch: Path, _: Path) -> None:
    from steelman import recipe as recipes

    path = scratch / "mine.yaml"
    path.write_bytes(content)
    (scratch / "other.yaml").write_bytes(content)
    source, origin = recipes.read(str(path))
    recipes.check_root(source, origin)
    made = recipes.parse(source, origin)
    assert repr(made)
    recipes.fingerprint(source)


def override(content: bytes, _: Path, __: Path) -> None:
    from steelman import recipe as recipes

    changes = content.decode(errors="replace").split("\n")
    recipes.named_by(changes)
    source, origin = recipes.read("digits-pgd-at", changes)
    recipes.check_root(source, origin)
    recipes.parse(source, origin)


def option(content: bytes, _: Path, __: Path) -> None:
    from steelman import data
    from steelman.cli.subjects import attack_from_text, models_named
    from steelman.errors import UserError
    from steelman.heads import build_head
    from steelman.settings import name_and_options
    from steelman.threat import ThreatModel

    text = content.decode(errors="replace")
    refused = []
    name, options = name_and_options(text)
    for call in (
        lambda: attack_from_text(text),
        lambda: build_head(name, 4, 3, **options),
        lambda: data.load(name, **options),
        lambda: models_named([text]),
        lambda: ThreatModel(norm="l2", eps=text),  # type: ignore[arg-type]
    ):
        try:
            call()
        except UserError as error:
            refused.append(str(error))
    if len(refused) == 5:
        raise UserError(refused[0])


def command_line(content: bytes, scratch: Path, templates: Path) -> None:
    """The command line as a user starts it. It stops where the work would begin."""
    from steelman.cli import commands
    from steelman.errors import UserError

    line = [word.replace("{t}", str(templates)) for word in json.loads(content)]
    (scratch / "mine.yaml").write_bytes((templates / "run" / "recipe.yaml").read_bytes())
    said = io.StringIO()
    kept = sys.argv, sys.stderr
    sys.argv, sys.stderr = ["steelman", *line], said
    try:
        commands.main()
    except SystemExit as ended:
        if ended.code in (None, 0):
            return
        text = said.getvalue()
        if ended.code in (1, 2) and "Traceback" not in text:
            raise UserError(text[-1000:] or "the help was shown") from None
        raise RuntimeError(f"exit code {ended.code}: {text[-3000:]}") from ended
    finally:
        sys.argv, sys.stderr = kept


# A run's folder.


def model_json(content: bytes, scratch: Path, templates: Path) -> None:
    from steelman.models.hub import card, pull
    from steelman.training.folder import load_model

    run = _copied(templates, "bare", scratch)
    (run / "model.json").write_bytes(content)
    model, record = load_model(run)
    _answers(model, record["input_shape"])
    card(pull(run), "a/b")


def weights(content: bytes, scratch: Path, templates: Path) -> None:
    from steelman.training.folder import load_model

    run = _copied(templates, "bare", scratch)
    (run / "model.safetensors").write_bytes(content)
    record = json.loads((run / "model.json").read_text())
    record["sha256"] = hashlib.sha256(content).hexdigest()
    (run / "model.json").write_text(json.dumps(record))
    model, record = load_model(run)
    _answers(model, record["input_shape"])


def torch_weights(content: bytes, scratch: Path, _: Path) -> None:
    from steelman.models.classifier import build_classifier, load_state, load_weights

    (scratch / "x.pt").write_bytes(content)
    state = load_state(scratch / "x.pt")
    model = build_classifier("mlp", input_shape=(1, 8, 8), num_classes=10, width=16)
    load_weights(model, state, "x.pt")


def _answers(model: Any, shape: list[int]) -> None:
    import torch

    if shape[0] * shape[1] * shape[2] < 10**6:
        with torch.no_grad():
            model(torch.rand(2, *shape))


def run_json(content: bytes, scratch: Path, templates: Path) -> None:
    from steelman.training.folder import load

    run = _copied(templates, "run", scratch)
    (run / "run.json").write_bytes(content)
    load(run)


def fit_json(content: bytes, scratch: Path, templates: Path) -> None:
    from steelman.training.asked import begin

    run = _copied(templates, "fit", scratch)
    (run / "fit.json").write_bytes(content)
    begin(run, json.loads((templates / "fit" / "fit.json").read_text()))


# Evidence.


def _judged(place: Path, templates: Path) -> None:
    from steelman.evaluation.result import Evaluation
    from steelman.evidence.compare import compare
    from steelman.evidence.verify import verify
    from steelman.report import Entry, html

    model, source = _subject(templates)
    verify(place, model=model, source=source)
    compare({"a": place, "b": templates / "run" / "verdict"})
    found = Evaluation.load(place)
    html.write(place / "report.html", [Entry(name="x", evaluation=found)], title="x")


def evidence(content: bytes, scratch: Path, templates: Path) -> None:
    """The seal is made to fit. So the checks behind it are tried."""
    place = Path(shutil.copytree(templates / "run" / "verdict", scratch / "verdict"))
    (place / "evidence.json").write_bytes(fuzz_corruptions.resealed(content))
    _judged(place, templates)


def _resealed(name: str) -> Callable[[bytes, Path, Path], None]:
    def read(content: bytes, scratch: Path, templates: Path) -> None:
        from steelman.evidence.bundle import seal_of

        place = Path(shutil.copytree(templates / "run" / "verdict", scratch / "verdict"))
        (place / name).write_bytes(content)
        record = json.loads((place / "evidence.json").read_text())
        record["files"][name] = hashlib.sha256(content).hexdigest()
        record["seal"] = seal_of(record)
        (place / "evidence.json").write_text(json.dumps(record, indent=1))
        _judged(place, templates)

    return read


def times(content: bytes, scratch: Path, templates: Path) -> None:
    place = Path(shutil.copytree(templates / "run" / "verdict", scratch / "verdict"))
    (place / "times.json").write_bytes(content)
    _judged(place, templates)


def work_mark(content: bytes, scratch: Path, templates: Path) -> None:
    place = _copied(templates, "work", scratch)
    (place / "work" / "run.json").write_bytes(content)
    _evaluated(place)


def batch(content: bytes, scratch: Path, templates: Path) -> None:
    """One batch of an interrupted evaluation. Its checksum is made to fit."""
    place = _copied(templates, "work", scratch)
    names = sorted(path.name for path in (place / "work").glob("*.batch"))
    name = names[content[-1] % len(names) if content else 0]
    (place / "work" / name).write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    _evaluated(place)


def _batches(templates: Path) -> list[bytes]:
    found = sorted((templates / "work" / "work").glob("*.batch"))
    return [path.read_bytes().partition(b"\n")[2] for path in found]


def _evaluated(place: Path, minutes: float | None = None) -> None:
    import torch

    from steelman.attacks import PGD
    from steelman.evaluation.evaluate import evaluate
    from steelman.threat import ThreatModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3)).eval()
        x = torch.rand(12, 1, 4, 4)
    with torch.no_grad():
        y = net(x).argmax(dim=1)
    suite = {"a": PGD(steps=1), "b": PGD(steps=2)}
    evaluate(net, x, y, ThreatModel(eps=0.05), suite, out=place, batch_size=6, minutes=minutes)


# Checkpoints.


def _checkpoint(scratch: Path, templates: Path, name: str, content: bytes) -> None:
    run = _copied(templates, "stopped", scratch)
    place = next((run / "checkpoints").iterdir())
    text = (place / "state.json").read_bytes().split(b"\n")[0]
    if name == "state.json":
        text = content
    else:
        (place / name).write_bytes(content)
        record = json.loads(text)
        record["sha256"] = hashlib.sha256(content).hexdigest()
        text = json.dumps(record).encode()
    (place / "state.json").write_bytes(text + b"\n" + hashlib.sha256(text).hexdigest().encode() + b"\n")
    _trainer(run).fit(resume=True)


def checkpoint_json(content: bytes, scratch: Path, templates: Path) -> None:
    _checkpoint(scratch, templates, "state.json", content)


def checkpoint_tensors(content: bytes, scratch: Path, templates: Path) -> None:
    _checkpoint(scratch, templates, "tensors.safetensors", content)


def _states(templates: Path) -> list[bytes]:
    return [path.read_bytes().split(b"\n")[0] for path in templates.glob("stopped/checkpoints/*/state.json")]


def _trainer(folder: Path) -> Any:
    import torch
    from lightning_fabric import Fabric
    from rich.console import Console

    from steelman.attacks import PGD
    from steelman.data.source import ArraySource
    from steelman.objectives import OBJECTIVES
    from steelman.threat import ThreatModel
    from steelman.training import OPTIMIZERS, RunSettings, Trainer, Training, Validation

    torch.manual_seed(0)
    layers = (torch.nn.Linear(16, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    how: dict[str, Any] = {"epochs": 1, "batch_size": 8, "optimizer": OPTIMIZERS["adam"](), "lr": 0.01, "ema": 0.9}
    data = ArraySource(torch.rand(16, 1, 4, 4), torch.arange(16) % 3)
    return Trainer(
        net=torch.nn.Sequential(torch.nn.Flatten(), *layers),
        train=data,
        validation=data,
        objective=OBJECTIVES["tla"](attack=PGD(steps=1, keep="last"))
        if "tla" in OBJECTIVES
        else OBJECTIVES["pgd-at"](),
        threat=ThreatModel(eps=0.1),
        settings=RunSettings(training=Training(**how), validation=Validation(size=4, samples=4, attack=PGD(steps=1))),
        fabric=Fabric(accelerator="cpu", devices=1),
        folder=folder,
        console=Console(file=io.StringIO()),
        fingerprint="x",
    )


# Data.


def npy(content: bytes, scratch: Path, templates: Path) -> None:
    from steelman import data

    root = _copied(templates, "npy", scratch)
    name = "train_labels" if content and len(content) < 400 else "train_images"
    (root / f"{name}.npy").write_bytes(content)
    _seen(data.load("arrays", root=root))


def npz(content: bytes, scratch: Path, _: Path) -> None:
    from steelman import data

    (scratch / "x.npz").write_bytes(content)
    _seen(data.load("arrays", root=scratch / "x.npz"))


def _seen(dataset: Any) -> None:
    import torch

    for part in (dataset.train, dataset.test):
        part.images(torch.arange(min(len(part), 4)))


def _layout(kind: str) -> Callable[[bytes, Path, Path], None]:
    """The input takes the place of each file of a published dataset in turn; the others are valid."""

    def read(content: bytes, _: Path, templates: Path) -> None:
        from steelman.data.published import CIFAR10, CIFAR100, IDX, SPRITES
        from steelman.errors import UserError

        layout = {"idx": IDX, "cifar": CIFAR10, "cifar100": CIFAR100, "sprites": SPRITES}[kind]
        found = {name: (templates / kind / name).read_bytes() for name in layout.files}
        refused = []
        for name in layout.files:
            try:
                layout.decode({**found, name: content})
            except UserError as error:
                refused.append(error)
        if len(refused) == len(layout.files):
            raise refused[0]

    return read


def tar(content: bytes, scratch: Path, _: Path) -> None:
    from steelman.data.formats import read_tar

    (scratch / "x.tar.gz").write_bytes(content)
    read_tar(scratch / "x.tar.gz", ["test.bin", "train.bin"])


def unpacked_tar(content: bytes, scratch: Path, _: Path) -> None:
    tar(gzip.compress(content, 1), scratch, scratch)


def _tars(templates: Path) -> list[bytes]:
    return [gzip.decompress(path.read_bytes()) for path in sorted(templates.glob("tar/*.gz"))]


def gz(content: bytes, scratch: Path, _: Path) -> None:
    from steelman.data.formats import read_folder

    (scratch / "test.bin.gz").write_bytes(content)
    read_folder(scratch, ["test.bin"])


def stored(content: bytes, scratch: Path, _: Path) -> None:
    """A fetched dataset as steelman keeps it."""
    from steelman import data
    from steelman.data.store import intact, read

    path = scratch / "mnist" / "mnist.safetensors"
    path.parent.mkdir()
    path.write_bytes(content)
    intact(path, {"train_images": "0" * 64})
    data.available(scratch)
    read(path)
    data.load("mnist", root=scratch)


def image(content: bytes, scratch: Path, _: Path) -> None:
    import torch

    from steelman.data.folder import FolderSource
    from steelman.rng import Key

    for name in ("a", "b"):
        (scratch / name).mkdir()
        (scratch / name / "x.png").write_bytes(content)
    source = FolderSource(scratch, size=8, resize=9)
    source.images(torch.arange(1))
    source.images(torch.arange(2), Key(0))


TENSORS = ("tensors", "tensors", "bytes")
JSON = ("json", "json", "json", "text", "bytes")
ALL = ("clean", "label", "rows", "model", "name", "options", "format", "seal", "members", "verdict", "suite", "stages")

READERS: dict[str, Reader] = {
    "recipe": Reader(files("recipes/*.yaml", "run/recipe.yaml"), ("yaml", "yaml", "text", "bytes"), recipe, NAMES),
    "override": Reader(
        texts(*TINY, "training.epochs=3\nthreat.eps=8/255", "head=he\nhead.scale=10", "training.lr={name: cosine}"),
        ("text",),
        override,
        (*NAMES, *(f"{a}.{b}" for a in NAMES[2:13] for b in NAMES[14:30])),
    ),
    "option": Reader(texts(*OPTIONS, "8/255"), ("text",), option, NAMES),
    "command-line": Reader(
        lambda _: [json.dumps(line).encode() for line in LINES], ("words",), command_line, WORDS_OF_LINES
    ),
    "model.json": Reader(files("bare/model.json", "he.json"), JSON, model_json, (*ALL, *NAMES)),
    "weights": Reader(files("bare/model.safetensors"), TENSORS, weights),
    "torch-weights": Reader(files("*.pt"), ("bytes",), torch_weights),
    "run.json": Reader(files("run/run.json"), JSON, run_json, ALL),
    "fit.json": Reader(files("fit/fit.json"), JSON, fit_json, ALL),
    "evidence.json": Reader(files("run/verdict/evidence.json"), JSON, evidence, ALL),
    "times.json": Reader(files("run/verdict/times.json"), JSON, times, ALL),
    "samples": Reader(files("run/verdict/samples.safetensors"), TENSORS, _resealed("samples.safetensors")),
    "adversarial": Reader(
        files("run/verdict/adversarial-0000.safetensors"), TENSORS, _resealed("adversarial-0000.safetensors")
    ),
    "gallery": Reader(files("run/verdict/gallery.safetensors"), TENSORS, _resealed("gallery.safetensors")),
    "work-mark": Reader(files("work/work/run.json"), JSON, work_mark, ALL),
    "batch": Reader(_batches, TENSORS, batch),
    "checkpoint.json": Reader(_states, JSON, checkpoint_json, ALL),
    "checkpoint": Reader(files("stopped/checkpoints/*/tensors.safetensors"), TENSORS, checkpoint_tensors),
    "npy": Reader(files("npy/train_*.npy"), ("bytes",), npy),
    "npz": Reader(files("*.npz"), ("bytes",), npz),
    "idx": Reader(files("idx/*"), ("bytes",), _layout("idx")),
    "cifar": Reader(files("cifar/test*"), ("bytes",), _layout("cifar")),
    "cifar100": Reader(files("cifar100/*"), ("bytes",), _layout("cifar100")),
    "sprites": Reader(files("sprites/test*"), ("bytes", "bytes", "text"), _layout("sprites")),
    "tar": Reader(_tars, ("bytes",), unpacked_tar),
    "tar.gz": Reader(files("tar/*.gz"), ("bytes",), tar),
    "gzip": Reader(files("gz/*"), ("bytes",), gz),
    "stored": Reader(files("stored.safetensors"), TENSORS, stored),
    "image": Reader(files("images/*"), ("bytes",), image),
    "corruptions.json": Reader(files("corrupted/corruptions.json"), JSON, fuzz_corruptions.claims, ALL),
    "corruptions": Reader(files("corrupted/corruptions.safetensors"), TENSORS, fuzz_corruptions.answers),
    "published-set": Reader(files("stored-set/*.npy"), ("bytes",), fuzz_corruptions.stored_set),
}


# The worker's state, and the templates.

_kept: dict[str, tuple[Any, Any]] = {}


def _subject(templates: Path) -> tuple[Any, Any]:
    """The model and the data of the template's evidence, read once."""
    if "subject" not in _kept:
        from steelman import data
        from steelman.data.source import first
        from steelman.training.folder import load_model

        _kept["subject"] = load_model(templates / "run")[0], first(data.load("digits").test, 40)
    return _kept["subject"]


def warm_up(templates: Path) -> None:
    """Import everything, and cut off the network, the training and the evaluation of the command line."""
    import socket

    import torch

    from steelman.cli import demo, doctor, measure
    from steelman.data import download
    from steelman.errors import UserError
    from steelman.evaluation import distance
    from steelman.training import run

    torch.set_num_threads(1)
    for name, reader in READERS.items():
        if name in ("recipe", "image", "samples", "stored", "batch", "checkpoint", "npz", "model.json"):
            scratch = templates / "scratch"
            scratch.mkdir()
            reader.read(reader.seeds(templates)[0], scratch, templates) if name != "stored" else None
            shutil.rmtree(scratch)

    def stop(*_: object, **__: object) -> NoReturn:
        sys.exit(0)

    def no_network(*_: object, **__: object) -> NoReturn:
        raise OSError("there is no network here")

    for place, name in ((demo, "run_demo"), (doctor, "examine"), (measure, "evaluate"), (measure, "transfer")):
        setattr(place, name, stop)
    distance.distance = stop
    run.Trainer = _Stops(run.Trainer)  # type: ignore[assignment, attr-defined]  # the name that `run` calls
    socket.getaddrinfo = socket.create_connection = no_network

    def no_npm(*_: object, **__: object) -> NoReturn:
        raise UserError("npm is not installed")

    download.npm_pack = no_npm


class _Stops:
    """The trainer as the commands see it: made, but never started."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def __call__(self, **given: Any) -> NoReturn:
        self.real(**given)
        sys.exit(0)


def make(templates: Path) -> None:
    """Make the valid inputs of all readers."""
    import numpy as np
    import torch
    from rich.console import Console
    from safetensors.torch import save_file

    import steelman
    from steelman import recipe as recipes
    from steelman.attacks import PGD
    from steelman.recipe_files import find
    from steelman.training import run
    from steelman.training.guard import StopRequest

    quiet = Console(quiet=True)
    source, origin = recipes.read("digits-pgd-at", [*TINY, "evaluation.suite=fast"])
    run.train(source, templates / "run", console=quiet, origin=origin)
    bare = templates / "bare"
    bare.mkdir()
    for name in ("model.json", "model.safetensors", "run.json", "recipe.yaml"):
        shutil.copy(templates / "run" / name, bare / name)
    record = json.loads((bare / "model.json").read_text())
    (templates / "he.json").write_text(json.dumps({**record, "head": {"name": "he", "options": {"scale": 10}}}))
    shutil.copytree(templates / "run", templates / "stopped")
    for name in ("run.json", "model.json", "model.safetensors"):
        (templates / "stopped" / name).unlink()
    for name in ("verdict", "attacks", "checkpoints", "tensorboard"):
        shutil.rmtree(templates / "stopped" / name)
    (templates / "recipes").mkdir()
    for path in list(find("digits-pgd-at").parent.rglob("*.yaml"))[:12]:
        shutil.copy(path, templates / "recipes")
    trainer = _trainer(templates / "stopped")
    trainer.recorder = None
    trainer.step(*next(iter(trainer.batches_left(StopRequest()))))
    trainer.save()
    x, y = torch.rand(60, 1, 4, 4), torch.arange(60) % 3
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
    steelman.fit(
        net, (x, y), steelman.ThreatModel(eps=0.1), steelman.PGDAT(attack=PGD(steps=1, keep="last")), epochs=1,
        console=quiet, out=templates / "fit",
    )  # fmt: skip
    for _ in range(2):  # no time at all is a batch each time
        _evaluated(templates / "work", 1e-9)
    state = torch.load(_saved(templates, net), weights_only=True)
    torch.save({"state_dict": state}, templates / "nested.pt")
    torch.save(state, templates / "old.pt", _use_new_zipfile_serialization=False)
    arrays: dict[str, Any] = {
        "train_images": np.random.default_rng(0).random((6, 1, 5, 5), np.float32),
        "train_labels": np.arange(6) % 3,
        "test_images": np.zeros((3, 1, 5, 5), np.float32),
        "test_labels": np.arange(3),
    }
    (templates / "npy").mkdir()
    for name, value in arrays.items():
        np.save(templates / "npy" / f"{name}.npy", value)
    np.savez(templates / "a.npz", **arrays)
    np.savez_compressed(templates / "b.npz", **arrays)
    eight = {name: torch.from_numpy(value).mul(9).to(torch.uint8) for name, value in arrays.items()}
    save_file(eight, templates / "stored.safetensors", {"steelman": '{"name": "mnist"}'})
    _published(templates)
    _pictures(templates)
    fuzz_corruptions.make(templates)


def _pictures(templates: Path) -> None:
    import numpy as np
    from PIL import Image

    (templates / "images").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (10, 12, 4), np.uint8)
    pixels[..., 3] = 255
    for mode in ("L", "RGB", "RGBA", "P", "1", "LA", "CMYK", "I;16", "I", "F", "YCbCr"):
        try:
            made = Image.fromarray(pixels).convert("RGB").convert(mode)
        except ValueError:
            made = Image.new(mode, (12, 10))
        for ending in ("png", "jpeg", "webp", "gif", "bmp", "tiff"):
            try:
                made.save(templates / "images" / f"{mode.replace(';', '')}.{ending}")
            except (OSError, ValueError, KeyError):
                (templates / "images" / f"{mode.replace(';', '')}.{ending}").unlink(missing_ok=True)


def _saved(templates: Path, net: Any) -> Path:
    import torch

    from steelman.models.classifier import build_classifier

    assert net
    model = build_classifier("mlp", input_shape=(1, 8, 8), num_classes=10, width=16)
    torch.save(model.state_dict(), templates / "plain.pt")
    return templates / "plain.pt"


def _published(templates: Path) -> None:
    from PIL import Image

    from steelman.data.published import CIFAR10, CIFAR100, IDX, SPRITES

    for name, layout in (("idx", IDX), ("cifar", CIFAR10), ("cifar100", CIFAR100), ("sprites", SPRITES)):
        (templates / name).mkdir()
        for file in layout.files:
            place = templates / name / file
            if "idx3" in file:
                place.write_bytes(struct.pack(">IIII", 0x803, 2, 28, 28) + bytes(2 * 784))
            elif "idx1" in file:
                place.write_bytes(struct.pack(">II", 0x801, 2) + b"\1\2")
            elif file.endswith(".png"):
                Image.new("RGB", (1024, 2)).save(place)
            elif file.endswith(".json"):
                place.write_text("[1, 2]" if "test" in file else json.dumps([1] * 10))
            else:
                place.write_bytes(bytes(2 * (3072 + (2 if name == "cifar100" else 1))))
    (templates / "tar").mkdir()
    (templates / "gz").mkdir()
    (templates / "gz" / "test.bin.gz").write_bytes(gzip.compress(bytes(9000) + b"x"))
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(templates / "tar" / f"{kind}.tar.gz", "w:gz", format=kind) as archive:
            for file in ("train.bin", "test.bin", "notes/" * 25 + "x"):
                entry = tarfile.TarInfo(f"deep/{file}")
                entry.size = 300
                archive.addfile(entry, io.BytesIO(bytes(300)))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
