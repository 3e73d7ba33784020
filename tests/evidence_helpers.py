"""A small model, its evidence, and a forger who makes every hash and every count fit again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from steelman.attacks import ATTACKS, PGD
from steelman.data.source import ArraySource, first
from steelman.evaluation import evaluate as evaluating
from steelman.evaluation.result import Evaluation
from steelman.evaluation.stages import Stage, Suite
from steelman.evaluation.suites import suite_of
from steelman.evaluation.verdict import notes_of, verdict_of
from steelman.evidence import bundle as bundles
from steelman.evidence.bundle import GALLERY, SIGNS_FILE, read_bundle, seal_of
from steelman.evidence.ledger import WRONG, drawn
from steelman.evidence.rebuild import kept_in
from steelman.evidence.verify import verify
from steelman.rng import Key
from steelman.threat import ThreatModel

FIRST = "adversarial-0000.safetensors"
EPS = 0.05
N = 48


class Net(nn.Module):
    """Three classes by a small convolution; nothing in it depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.out = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.conv(x - 0.5)).flatten(1))
        return out


def a_model(dtype: torch.dtype = torch.float32) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = Net()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        return model.to(dtype).eval()


def the_data() -> ArraySource:
    """Every eighth label is wrong."""
    x = torch.rand(N, 1, 4, 4, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        y = a_model()(x).argmax(dim=1)
    y[::8] = (y[::8] + 1) % 3
    return ArraySource(x, y, ["a", "b", "c"])


SUITE = Suite(
    name="tiny",
    stages=(
        Stage(name="two steps", attack=PGD(steps=2, step_size=EPS)),
        Stage(name="pgd", attack=PGD(steps=4, step_size=EPS, loss="margin")),
        Stage(name="warm square", attack=ATTACKS["square"](queries=20), share=0.5, warm=True),
        Stage(name="escalated pgd", attack=PGD(steps=5), role="escalation"),
    ),
)


def evaluate(model: Any, x: Any, y: Any, threat: ThreatModel, suite: Any = "standard", **options: Any) -> Evaluation:
    """``steelman.evaluate``; among the options may be fields of the suite, and of how many samples, called what."""
    fields = ("curve", "gallery", "precision", "surrogates", "more_outputs", "tiny_eps")
    changes = {name: options.pop(name) for name in fields if name in options}
    if "samples" in options or "data_name" in options:
        source = first(x if y is None else ArraySource(x, y), options.pop("samples", None))
        source.name = options.pop("data_name", source.name)
        x, y = source, None
    return evaluating.evaluate(model, x, y, threat, suite_of(suite, threat, **changes), **options)


def make(folder: Path, model: nn.Module) -> Path:
    source = the_data()
    size = bundles.SHARD
    bundles.SHARD = 5
    try:
        evaluate(model, source, None, ThreatModel(eps=EPS), SUITE, batch_size=20, out=folder, curve=False, gallery=2)
    finally:
        bundles.SHARD = size
    return folder


class Forged:
    """The parts of a bundle, to be changed; `write` makes every hash fit again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record: dict[str, Any] = json.loads((folder / "evidence.json").read_text())
        self.samples = load_file(folder / "samples.safetensors")
        self.shards = {path.name: load_file(path) for path in sorted(folder.glob("adversarial-*"))}
        self.gallery = load_file(folder / GALLERY) if (folder / GALLERY).exists() else {}
        self.signs = load_file(folder / SIGNS_FILE) if (folder / SIGNS_FILE).exists() else {}

    def row(self, kind: int) -> int:
        """The first sample that is WRONG or ROBUST, or (0 and more) that this stage broke."""
        return int((self.samples["broken_by"] == kind).nonzero()[0])

    def write(self) -> None:
        for name in list(self.record["files"]):
            (self.folder / name).unlink(missing_ok=True)
        parts = {
            "samples.safetensors": self.samples,
            **self.shards,
            **({GALLERY: self.gallery} if self.gallery else {}),
            **({SIGNS_FILE: self.signs} if self.signs else {}),
        }
        self.record["files"] = {}
        for name, tensors in parts.items():
            content = save({key: value.contiguous() for key, value in tensors.items()})
            (self.folder / name).write_bytes(content)
            self.record["files"][name] = hashlib.sha256(content).hexdigest()
        self.seal()

    def conclude(self) -> None:
        """Write all files, with the verdict and the notes that follow from them."""
        self.write()
        kept = kept_in(read_bundle(self.folder))
        made = dataclasses.asdict(verdict_of(kept))
        self.record["verdict"] = {name: made[name] for name in self.record["verdict"]}
        self.record["notes"] = notes_of(kept)
        self.seal()

    def seal(self) -> None:
        self.record["seal"] = seal_of(self.record)
        (self.folder / "evidence.json").write_bytes(json.dumps(self.record, indent=1, sort_keys=True).encode())

    def drop(self, row: int) -> None:
        """Take a sample's adversarial image away."""
        for name, shard in list(self.shards.items()):
            keep = shard["rows"] != row
            self.shards[name] = {key: value[keep] for key, value in shard.items()}
            if not bool(keep.any()):
                del self.shards[name]

    def hide(self, row: int) -> None:
        """Take a sample out of the gallery."""
        keep = self.gallery["rows"] != row
        self.gallery = {key: value[keep] for key, value in self.gallery.items()} if bool(keep.any()) else {}

    def add(self, row: int, image: Tensor) -> None:
        """Give a sample an adversarial image, all in one file."""
        rows = torch.cat([shard["rows"] for shard in self.shards.values()] + [torch.tensor([row])])
        images = torch.cat([shard["images"] for shard in self.shards.values()] + [image[None]])
        order = rows.argsort()
        self.shards = {"adversarial-0000.safetensors": {"rows": rows[order], "images": images[order]}}

    def recount(self) -> None:
        """Make every count follow from the samples: the forger is no fool."""
        broken_by, record = self.samples["broken_by"], self.record
        left = record["clean_correct"] = int((broken_by != WRONG).sum())
        for number, stage in enumerate(record["stages"]):
            stage["broken"] = int((broken_by == number).sum())
            stage["attacked"] = math.ceil(record["suite"]["stages"][number]["share"] * left)
            left -= stage["broken"]
            stage["left"] = left
        record["robust_correct"] = left
        record["data_digest"] = bundles.data_digest(self.samples["digest"])
        if self.signs:
            order = drawn(Key(record["seed"]), self.samples["digest"], (broken_by != WRONG).nonzero()[:, 0], "pilot")
            self.signs["rows"] = order[: len(self.signs["rows"])].sort().values

    def idle(self, row: int) -> None:
        """Give the passes of a sample to another one, as if no attack had seen it."""
        other = int((self.samples["broken_by"] >= 0).nonzero()[-1])
        for name, least in (("forwards", 1), ("backwards", 0)):
            column = self.samples[name]
            column[other] += column[row] - least
            column[row] = least
        self.samples["passes"][row], self.samples["unclear"][row] = 0, False


def check(folder: Path, model: nn.Module | None = None, source: ArraySource | None = None) -> Any:
    return verify(folder, model=model or a_model(), source=source or the_data())
