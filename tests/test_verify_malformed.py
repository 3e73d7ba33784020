"""Nonsense in a bundle is refused with a sentence; a check needs no more memory for more data."""

from __future__ import annotations

import copy
import hashlib
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from steelman.attacks import PGD
from steelman.errors import UserError
from steelman.evidence import bundle as bundles
from steelman.evidence.bundle import DamagedError
from steelman.evidence.verify import verify
from steelman.threat import ThreatModel
from tests.evidence_helpers import FIRST, Forged, a_model, evaluate, the_data


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += paths(item, (*at, key))
    return found


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


NONSENSE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 70,
    1.5,
    float("nan"),
    float("inf"),
    "x",
    "\ud800",
    [],
    {},
    [[]],
    {"a": 1},
    deep(50),
)


def test_a_record_of_nonsense_is_refused_with_a_sentence(bundle: Path) -> None:
    """Every key, at any depth, replaced or gone; the hashes and the seal fit."""
    chance, forged = random.Random(4), Forged(bundle)
    record = forged.record
    source, model, refused = the_data(), a_model(), 0
    every = [path for path in paths(record) if path[0] != "seal"]
    for path in [*[p for p in every if len(p) == 1], *chance.sample(every, 70)]:
        forged.record = copy.deepcopy(record)
        target: Any = forged.record
        for key in path[:-1]:
            target = target[key]
        if chance.random() < 0.2 and isinstance(target, dict):
            del target[path[-1]]
        else:
            target[path[-1]] = chance.choice(NONSENSE)
        forged.seal()
        try:
            verify(bundle, model=model, source=source)
        except UserError:
            refused += 1
    assert refused > 60


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"9" * 5000, b"[" * 200_000, b'{"format": 1}', b'{"format": 2}'],
    ids=["empty", "cut", "list", "null", "text", "bytes", "digits", "deep", "bare", "newer"],
)
def test_a_file_that_is_no_record(bundle: Path, content: bytes) -> None:
    (bundle / "evidence.json").write_bytes(content)
    with pytest.raises(UserError, match=r"evidence\.json"):
        verify(bundle)


def test_names_that_lead_elsewhere(bundle: Path, tmp_path: Path) -> None:
    forged = Forged(bundle)
    for name in ("../evidence.json", "/etc/hostname", "adversarial-../x.safetensors", "a\0b", "adversarial-1"):
        files = dict(forged.record["files"])
        forged.record["files"] = {**files, name: "0" * 64}
        forged.seal()
        with pytest.raises(DamagedError, match=r"no evidence is kept in a file called|text without NUL"):
            verify(bundle)
        forged.record["files"] = files
    (tmp_path / "folder" / "evidence.json").mkdir(parents=True)
    with pytest.raises(UserError, match="expected a file, got a folder"):
        verify(tmp_path / "folder")
    with pytest.raises(UserError, match=r"no evidence in .*nowhere: evidence\.json is missing"):
        verify(tmp_path / "nowhere")


def test_every_flipped_byte_is_noticed(bundle: Path) -> None:
    chance = random.Random(1)
    for path in (bundle / "evidence.json", bundle / "samples.safetensors", bundle / FIRST):
        content = path.read_bytes()
        for _ in range(25):
            at = chance.randrange(len(content))
            path.write_bytes(content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :])
            with pytest.raises(UserError):
                verify(bundle)
        path.write_bytes(content)
    verify(bundle)


def test_a_damaged_header_is_refused_with_a_sentence(bundle: Path) -> None:
    """Bytes of the safetensors headers changed, and the hashes and the seal made to fit."""
    chance, forged, refused = random.Random(2), Forged(bundle), 0
    for name in ("samples.safetensors", FIRST):
        content = (bundle / name).read_bytes()
        header = 8 + int.from_bytes(content[:8], "little")
        for trial in range(60):
            at = chance.randrange(header)
            made = content[:at] + bytes([chance.randrange(256)]) + content[at + 1 :]
            if trial % 6 == 0:
                made = content[: chance.randrange(len(content))]
            if trial % 6 == 1:
                dtype = chance.choice([b'"F64"', b'"BF1"', b'"U8" ', b'"I64"'])
                made = content.replace(b'"I64"', dtype).replace(b'"F32"', dtype)
            (bundle / name).write_bytes(made)
            forged.record["files"][name] = hashlib.sha256(made).hexdigest()
            forged.seal()
            try:
                verify(bundle)
            except UserError:
                refused += 1
        (bundle / name).write_bytes(content)
        forged.record["files"][name] = hashlib.sha256(content).hexdigest()
    assert refused > 90


# Memory.

SCRIPT = """
import resource, sys
from pathlib import Path
from tests.test_verify_malformed import grown
grown(Path(sys.argv[1]))
"""


class Endless:
    """Images made when they are asked for."""

    classes = ("a", "b")
    shape = (3, 64, 64)

    def __init__(self, n: int) -> None:
        self.labels = torch.arange(n) % 2

    def __len__(self) -> int:
        return len(self.labels)

    def images(self, index: Tensor, key: Any = None) -> Tensor:
        level = torch.where(self.labels[index] == 1, 0.6, 0.4) + 0.0001 * (37 * index % 997)
        return level.float()[:, None, None, None].expand(-1, *self.shape).contiguous()


class Level(nn.Module):
    """Bright or dark."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        level = (x.flatten(1).mean(dim=1) - 0.5) * self.weight
        return torch.stack((-level, level), dim=1)


def grown(folder: Path) -> None:
    """Print by how many bytes memory grew while ten times as much data were evaluated and verified."""
    torch.set_num_threads(1)
    bundles.SHARD_BYTES = 1 << 20

    def run(n: int) -> int:
        source, model, threat = Endless(n), Level(), ThreatModel(eps=0.12)
        suite = {"one": PGD(steps=1, start="zero"), "two": PGD(steps=1, start="zero", loss="margin")}
        found = evaluate(model, source, None, threat, suite, batch_size=50, out=folder / str(n), curve=False)
        assert found.verdict is not None
        assert 0 < found.verdict.correct < n
        checked = verify(folder / str(n), model=model, source=source)
        assert checked.broken > n / 3
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    print(run(150), run(1500))


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False, timeout=250
    )
    assert found.returncode == 0, found.stderr
    before, after = map(int, found.stdout.split())
    images = 1500 * 3 * 64 * 64 * 4
    assert after - before < images / 4, f"grew by {(after - before) / 1e6:.0f} MB for {images / 1e6:.0f} MB of images"
    files = sum(path.stat().st_size for path in (tmp_path / "1500").iterdir())
    assert files > images / 3, "the adversarial images are all there"
