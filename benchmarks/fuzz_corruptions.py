"""The fuzzer's readers of evidence on corrupted images, and of published sets of them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

FOLDER = "corrupted"


def subject() -> tuple[Any, Any]:
    """A model and its data."""
    import torch

    from steelman.data.source import ArraySource

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10)).eval()
    x = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    return net, ArraySource(x, torch.arange(4), [str(one) for one in range(10)])


def make(templates: Path) -> None:
    """Make the valid inputs."""
    import numpy as np

    from steelman import evaluate_corruptions
    from steelman.report import corruptions as page

    net, source = subject()
    found = evaluate_corruptions(net, source, corruptions=["fog", "contrast"], out=templates / FOLDER)
    page.write(templates / FOLDER / "report.html", [found])
    stored = templates / "stored-set"
    stored.mkdir()
    np.save(stored / "fog.npy", np.zeros((20, 32, 32, 3), np.uint8))
    np.save(stored / "labels.npy", np.tile(np.arange(4, dtype=np.uint8), 5))


def resealed(content: bytes) -> bytes:
    """Claims whose seal is made to fit, as a forger would. What is no mapping is left as it is."""
    from steelman.bounded import read_json
    from steelman.errors import UserError
    from steelman.evidence.bundle import seal_of

    try:
        record = read_json(content)
        record["seal"] = seal_of(record)
        return json.dumps(record, indent=1).encode()
    except (UserError, TypeError, AttributeError, UnicodeEncodeError):
        return content


def claims(content: bytes, scratch: Path, templates: Path) -> None:
    place = Path(shutil.copytree(templates / FOLDER, scratch / FOLDER))
    (place / "corruptions.json").write_bytes(resealed(content))
    (place / "report.html").unlink()
    _judged(place)


def answers(content: bytes, scratch: Path, templates: Path) -> None:
    from steelman.evidence.bundle import seal_of

    place = Path(shutil.copytree(templates / FOLDER, scratch / FOLDER))
    (place / "corruptions.safetensors").write_bytes(content)
    record = json.loads((place / "corruptions.json").read_text())
    record["files"] = {"corruptions.safetensors": hashlib.sha256(content).hexdigest()}
    record["seal"] = seal_of(record)
    (place / "corruptions.json").write_text(json.dumps(record, indent=1))
    (place / "report.html").unlink()
    _judged(place)


def stored_set(content: bytes, scratch: Path, templates: Path) -> None:
    """An array of a published set, or its labels."""
    import torch

    from steelman.corruptions.official import open_official

    place = Path(shutil.copytree(templates / "stored-set", scratch / "set"))
    (place / ("labels.npy" if content[-1:] < b"\x40" else "fog.npy")).write_bytes(content)
    found = open_official(place, subject()[1])
    for severity in (1, 5):
        found.cell("fog", severity).images(torch.arange(4))


def _judged(place: Path) -> None:
    from steelman.corruptions.check import verify_corruptions
    from steelman.corruptions.record import read_record
    from steelman.report import corruptions as page

    page.render([read_record(place).accuracy])
    net, source = subject()
    verify_corruptions(place, model=net, source=source)
