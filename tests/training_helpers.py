"""A network, data and a trainer so small that a whole run takes a blink; and the command line in real processes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from rich.console import Console
from torch import Tensor, nn

from steelman.attacks import PGD
from steelman.data import CropFlip, NoAugment
from steelman.data.source import ArraySource
from steelman.heads import build_head
from steelman.models.classifier import Classifier
from steelman.objectives import OBJECTIVES, Batch, Objective, Outcome
from steelman.objectives.pgd_at import PGDAT
from steelman.rng import Key
from steelman.schedules import SCHEDULES
from steelman.threat import ThreatModel
from steelman.training import OPTIMIZERS, Around, Compute, Guard, RunSettings, Trainer, Training, Validation
from steelman.training.checkpoint import checkpoints, load_checkpoint

SHAPE = (1, 4, 4)


class Backbone(nn.Module):
    """Two layers with batch norm and dropout: what a run remembers, and where it uses the global generator."""

    def __init__(self, features: int = 12, dropout: float = 0.3, pixels: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(pixels, features), nn.BatchNorm1d(features), nn.ReLU(), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x.reshape(len(x), -1))  # which cannot be made of no images
        return out


def a_net(head: str = "he", classes: int = 3, seed: int = 0, **options: Any) -> Classifier:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Classifier(Backbone(**options), build_head(head, options.get("features", 12), classes), SHAPE)


class Helper(nn.Module):
    """A model to learn from, in whatever precision it is asked."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(k + 1) * torch.sin(x * (k + 1)).flatten(1).sum(dim=1) for k in range(3)], dim=1)


OWN = ("tests.training_helpers",)  # the module of digits_net: recipes with it need ``allow_import=OWN``


def digits_net(dropout: float = 0.3) -> nn.Module:
    """For recipes, through an import path: batch norm and dropout on 8x8 digits."""
    return nn.Sequential(Backbone(32, dropout, 64), nn.Linear(32, 10))


def some_data(n: int = 42, classes: int = 3, seed: int = 0) -> ArraySource:
    """Blurred class patterns; learnable, and not at once."""
    g = torch.Generator().manual_seed(seed)
    patterns = torch.rand(classes, *SHAPE, generator=torch.Generator().manual_seed(99))
    y = torch.arange(n) % classes
    x = (0.6 * patterns[y] + 0.4 * torch.rand(n, *SHAPE, generator=g)).clamp(0, 1)
    return ArraySource(x, y, [f"class {k}" for k in range(classes)])


@dataclasses.dataclass
class Remembering(Objective):
    """PGD-AT with a term that depends on all batches before: a run that forgets `carry` ends elsewhere."""

    inner: PGDAT = PGDAT(attack=PGD(steps=2, step_size=0.05, keep="last"))  # noqa: RUF009 - frozen settings

    def __call__(self, batch: Batch) -> Outcome:
        outcome = self.inner(batch)
        seen = batch.carry.get("seen", torch.zeros(3))
        batch.carry["seen"] = 0.9 * seen + outcome.logits.mean(dim=0)
        batch.carry["count"] = batch.carry.get("count", torch.tensor(0)) + len(batch.x)
        return Outcome(outcome.loss * (1 + 0.1 * batch.carry["seen"].sum().sin()), outcome.logits)


class Made(Objective):
    """An objective that is a function."""

    def __init__(self, function: Callable[[Batch], Outcome]) -> None:
        self.function = function

    def __call__(self, batch: Batch) -> Outcome:
        return self.function(batch)


def a_trainer(folder: Path, *, loud: Console | None = None, **changes: Any) -> Trainer:
    """Everything that a resumed run could get wrong is on: augmentation, averages, schedules, dropout, momentum."""
    folder.mkdir(parents=True, exist_ok=True)
    training = {
        "epochs": 3,
        "batch_size": 8,
        "optimizer": OPTIMIZERS["sgd"](momentum=0.9, weight_decay=1e-3),
        "lr": SCHEDULES["piecewise"](points=[(0, 0.02), (0.5, 0.2), (1, 0)]),
        "eps": SCHEDULES["linear"](start=0.0, end=0.1, until=0.5),
        "ema": 0.9,
        **changes.pop("training", {}),
    }
    blocks = {
        "training": Training(**training),
        "validation": changes.pop("watch", Validation(size=24, samples=24, attack=PGD(steps=2))),
        "guard": changes.pop("guard", Guard(on_collapse="ignore")),
        "around": changes.pop("around", Around()),
        "compute": changes.pop("compute", Compute(accelerator="cpu")),
    }
    given: dict[str, Any] = {
        "net": a_net(),
        "train": some_data(),
        "validation": some_data(24, seed=1),
        "augment": CropFlip(pad=1),
        "threat": ThreatModel(eps=0.1),
        "objective": Remembering(),
        "settings": RunSettings(**blocks),
        "console": loud or Console(file=io.StringIO(), width=500),
        "folder": folder,
        "fingerprint": "this recipe",
        "helper": Helper(),
        **changes,
    }
    if not isinstance(given["objective"], Objective):
        given["objective"] = Made(given["objective"])
    given.setdefault("fabric", Fabric(accelerator="cpu", devices=1, precision=given["settings"].compute.precision))
    return Trainer(**given)


def plain_trainer(folder: Path, **changes: Any) -> Trainer:
    """The opposite: constant learning rate and radius, no augmentation, no average."""
    training = {"lr": 0.1, "eps": None, "ema": None, **changes.pop("training", {})}
    given: dict[str, Any] = {"augment": NoAugment(), "objective": OBJECTIVES["standard"](), **changes}
    return a_trainer(folder, training=training, **given)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def same(a: Any, b: Any, path: str = "state") -> None:
    """Nested dicts and lists of tensors and numbers are equal to the bit; times may differ."""
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor), path
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.numpy().tobytes() == b.numpy().tobytes(), f"{path} differs by {float((a - b).abs().max())}"
    elif isinstance(a, dict):
        assert list(a) == list(b), path
        for key in a:
            if key != "seconds":
                same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for i, (left, right) in enumerate(zip(a, b)):
            same(left, right, f"{path}.{i}")
    else:
        assert a == b, f"{path}: {a!r} and {b!r}"


def newest(folder: Path) -> dict[str, Any]:
    return load_checkpoint(checkpoints(folder)[0])


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same_run(a: Path, b: Path) -> None:
    """Two runs ended alike: weights, optimiser, average, generator, carried state, epochs and metrics."""
    same(newest(a), newest(b))
    same(metrics(a), metrics(b))


def a_batch(net: nn.Module, n: int = 6, *, eps: float = 0.1, ratio: float = 1.0, **changes: Any) -> Batch:
    g = torch.Generator().manual_seed(5)
    given: dict[str, Any] = {
        "x": torch.rand(n, *SHAPE, generator=g, dtype=torch.float64),
        "y": torch.arange(n) % 3,
        "index": 7 + 3 * torch.arange(n),
        "threat": ThreatModel(eps=eps),
        "ratio": ratio,
        "key": Key(3).fold("attack", 11),
        "model": net,
        "net": net,
        "carry": {},
        "helper": Helper(),
        **changes,
    }
    return Batch(**given)


# Real processes. A server that has steelman imported already forks them, so that each one starts at once.

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["steelman.cli", "steelman.training.run", "tests.training_helpers"])


def _command_line(arguments: list[str], folder: str, name: str, environment: dict[str, str]) -> None:
    for stream, number in (("out", 1), ("err", 2)):
        descriptor = os.open(Path(folder) / f"{name}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
    os.chdir(folder)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = ["steelman", *arguments]
    from steelman.cli import main

    main()


@dataclasses.dataclass
class Running:
    """One ``steelman`` process; its working folder is `folder`."""

    process: BaseProcess
    folder: Path
    name: str

    def end(self, timeout: float = 120) -> int:
        """Its exit code, as a shell gives it; a process that does not end fails the test."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            pytest.fail(f"{self.name} did not end in {timeout} s; it said: {self.error}")
        code = self.process.exitcode
        assert code is not None
        return code if code >= 0 else 128 - code

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    @property
    def output(self) -> str:
        return (self.folder / f"{self.name}.out").read_text()

    @property
    def error(self) -> str:
        return (self.folder / f"{self.name}.err").read_text()


def steelman(folder: Path, *arguments: str, name: str = "steelman", **environment: str) -> Running:
    """Start ``steelman ARGUMENTS`` in `folder`."""
    environment = {"OMP_NUM_THREADS": "1", **environment}
    given = (list(arguments), str(folder), name, environment)
    process = _context.Process(target=_command_line, args=given, daemon=True)
    process.start()
    return Running(process, folder, name)


def two_processes(folder: Path, *arguments: str) -> list[Running]:
    """The same command as both ranks of a run, launched from outside as a cluster does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "NODE_RANK": "0"}
    return [steelman(folder, *arguments, name=f"rank{rank}", LOCAL_RANK=str(rank), **shared) for rank in (0, 1)]


def wait_for(condition: Any, running: list[Running], timeout: float = 60) -> None:
    """Until `condition()` holds or all processes ended."""
    until = time.monotonic() + timeout
    while not condition() and any(one.process.is_alive() for one in running):
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.005)


@contextlib.contextmanager
def interrupted_at(steps: set[int], trainer: Trainer, number: int = signal.SIGTERM) -> Iterator[None]:
    """Send this process a signal while the objective is at the given steps."""
    inner = trainer.criterion.objective

    def objective(batch: Batch) -> Outcome:
        if trainer.progress.step in steps:
            os.kill(os.getpid(), number)
        return inner(batch)

    trainer.criterion.objective = Made(objective)
    yield
