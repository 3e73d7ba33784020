"""Every edit of evidence that a script can enumerate: which `steelman.verify` refuses, and why the others pass.

    python benchmarks/edits.py                # all edits of three small evaluations, and 20 audits
    python benchmarks/edits.py --every 20     # each twentieth edit

Three evaluations of one small model are edited: the suite `fast`, a suite of the user's own with a sentinel, and a
protocol. Each JSON value is replaced, and entries of each tensor are changed. Each file is removed, and some are added.
Each edit is made three times:

- *plain*: nothing else changes;
- *resealed*: all hashes and the seal fit again;
- *concluded*: flags, trust, reasons and notes are computed again too, and then all is resealed.

`verify` gets the model and the data. An edit that passes must have a reason in REASONS. Otherwise the script exits with
1. Then broken samples are declared robust, which no checksum finds, and audits with different salts look for them.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from steelman.attacks import PGD
from steelman.data.source import ArraySource
from steelman.errors import UserError
from steelman.evaluation.masking import Pilot
from steelman.evaluation.stages import Stage, Suite
from steelman.evaluation.suites import SUITES
from steelman.evidence.bundle import seal_of
from steelman.evidence.ledger import ROBUST
from steelman.evidence.page import page_of
from steelman.evidence.verify import verify
from steelman.threat import ThreatModel
from tests.evidence_helpers import EPS, Forged, a_model, evaluate, the_data


class Traceback(Exception):  # noqa: N818 - it names what the user would see
    """`verify` ended with an error that is none of the user's."""


MODES = ("plain", "resealed", "concluded")
THREAT = ThreatModel(eps=EPS)
OWN = Suite(
    name="own",
    stages=(
        Stage(name="pilot", attack=Pilot(), role="pilot"),
        Stage(name="pgd", attack=PGD(steps=2, step_size=EPS)),
        Stage(name="near", attack=PGD(steps=4, step_size=EPS, loss="margin"), share=0.5),
        Stage(name="sentinel pgd", attack=PGD(steps=10, loss="margin"), share=0.3, role="sentinel"),
    ),
)
SUBJECTS: dict[str, Any] = {
    "fast": "fast",
    "own": OWN,
    "protocol": {"one": PGD(steps=1, start="zero"), "two": PGD(steps=3, loss="margin")},
}
ATTACK = "only an attack can measure it; an audit does"
# (subject, mode, place of the edit): why it is no claim, or who finds it. The first that fits counts.
REASONS: list[tuple[str, str]] = [
    (
        r".* versions(\.steelman)? .*",
        "`verify` names the other version, and does not compare sentences of other versions",
    ),
    (r".* versions\..*", "a text about the machine; no number follows from it"),
    (r".* (model|data) .*", "a name; the weights and the data have digests"),
    (r".* batch_size .*", "how the work was split; no number follows from it"),
    (r".* seed .*", "the same samples are drawn; the noise of the attacks was that of another seed: " + ATTACK),
    (r"fast .* suite\.name .*", "a name of nobody's suite: `verify` says so, and `gate` fails"),
    (r"(own|protocol) .* suite\..*", "the suite is not one of steelman's: `verify` says so, and `gate` fails"),
    (r".* concluded random .*", "it lowers the trust"),
    (r".* concluded grain .*", "a note says it; " + ATTACK),
    (r".* concluded stages\.\d+\.(outside|refuted|nonfinite|witnessed|contradicted) .*", ATTACK),
    (r".* stages\.\d+\.(outside|refuted|witnessed) .*", "it moves no figure above its limit, and no note; " + ATTACK),
    (r".* curve\.\d+\.correct .*", ATTACK),
    (
        r".* concluded curve .*|protocol resealed curve .*",
        "a suite may be run without the curve, and `verify` then shows none",
    ),
    (r".* samples\.safetensors (margin|lead|guess) .*", "of a robust sample, " + ATTACK),
    (r".* samples\.safetensors (passes|unclear) .*", ATTACK),
    (r".* (samples\.safetensors|stages\.\d+\.) .*balanced.*", "passes that balance: to check them, run it again"),
    (r".* concluded signs\.safetensors (?!rows|broken|zero gradients).*", ATTACK),
    (r".* signs\.safetensors \w[\w ]* answers.*", "it moves no figure: " + ATTACK),
    (r".* adversarial-\d+\.safetensors images .*", "the image still breaks the model, as far as was claimed"),
    (r".* gallery\.safetensors (adversarial|tried) .*", "of a robust sample: the point may be any with this margin"),
    (r".* times\.json .*", "times are not sealed; a page that shows others than times.json is refused"),
    (r".* (report\.html|times\.json) removed", "a page and times may be missing; nothing is claimed then"),
    (r".* (resealed|concluded) gallery\.safetensors removed", "images may be left out; no number follows from them"),
    (r".* files added .*", "`verify` names files that are no part of the evidence"),
    (r".* header .*", "the same tensors in other bytes"),
    (r".* declared robust .*", "no checksum finds it; the audit does, see below"),
]


@dataclasses.dataclass(frozen=True)
class Edit:
    """One edit: a kind for the table, its place, and what it does to the folder, given a mode."""

    kind: str
    where: str
    make: Callable[[Path, str], None]


def others(value: Any) -> list[Any]:  # noqa: PLR0911 - one line a type
    """Other values of the same JSON type."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [v for v in dict.fromkeys((0, 1, value + 1, value - 1, 2 * value + 1, 1_000_000)) if v != value]
    if isinstance(value, float):
        return [v for v in dict.fromkeys((0.0, 1.0, value / 2, 2 * value, value + 1e-6, -1.0)) if v != value]
    if isinstance(value, str):
        words = ("", value + "x", "sound", "suspect", "fast", "attack", "0" * 64)
        return [v for v in dict.fromkeys(words) if v != value]
    if isinstance(value, list):
        return [v for v in ([], value[1:], value[:-1], value[::-1], value + value[-1:]) if v != value]
    if isinstance(value, dict):
        fewer = ({k: v for k, v in value.items() if k != key} for key in value)
        return [v for v in ({}, {**value, "more": 1}, *fewer) if v != value]
    return [0, [0, 1], "x"]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path in a JSON value."""
    if at:
        yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from places(part, (*at, key))


def finish(forged: Forged, mode: str) -> None:
    if mode == "concluded":
        forged.conclude()
    else:
        forged.write()


def put(record: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    target: Any = record
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value


def in_json(folder: Path) -> Iterator[Edit]:
    record = json.loads((folder / "evidence.json").read_text())
    for path in places(record):
        value: Any = record
        for key in path:
            value = value[key]
        for number, other in enumerate(others(value)):

            def make(place: Path, mode: str, path: Any = path, other: Any = other) -> None:
                if mode == "plain" or path[0] in ("files", "seal"):
                    changed = json.loads((place / "evidence.json").read_text())
                    put(changed, path, other)
                    (place / "evidence.json").write_text(json.dumps(changed, indent=1))
                    return
                forged = Forged(place)
                put(forged.record, path, copy.deepcopy(other))
                finish(forged, mode)

            yield Edit(f"evidence.json: {path[0]}", f"{'.'.join(map(str, path))} to {number}", make)


def entries(tensor: Tensor, count: int) -> list[int]:
    """A spread of entries."""
    n = tensor.numel()
    return sorted({round(at * (n - 1) / max(count - 1, 1)) for at in range(min(count, n))}) if n else []


def changes(tensor: Tensor) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
    if tensor.dtype == torch.bool:
        return [("flipped", lambda v: ~v)]
    if tensor.is_floating_point():
        moves: tuple[float, ...] = (1e-7, 1 / 255, -1 / 255, 0.5, -0.5)
    else:
        moves = (1, -1, 1000)
    nan = [("nan", lambda v: v * float("nan"))] if tensor.is_floating_point() else []
    return [*((f"by {move:.2g}", lambda v, move=move: v + move) for move in moves), *nan]


def in_tensors(folder: Path, spread: int) -> Iterator[Edit]:
    def change(name: str, what: Callable[[dict[str, Tensor]], None]) -> Callable[[Path, str], None]:
        def make(place: Path, mode: str) -> None:
            if mode == "plain":
                held = {key: value.clone() for key, value in load_file(place / name).items()}
                what(held)
                save_file({key: value.contiguous() for key, value in held.items()}, place / name)
                return
            forged = Forged(place)
            parts = {"samples.safetensors": forged.samples, "signs.safetensors": forged.signs}
            parts = {**parts, "gallery.safetensors": forged.gallery, **forged.shards}
            what(parts[name])
            finish(forged, mode)

        return make

    def moved(key: str, at: int, move: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
        def what(held: dict[str, Tensor]) -> None:
            held[key] = held[key].clone()
            held[key].view(-1)[at] = move(held[key].view(-1)[at].clone())

        return what

    for path in sorted(folder.glob("*.safetensors")):
        held, kind = load_file(path), re.sub(r"-\d+", "-*", path.name)
        for key, tensor in held.items():
            for at in entries(tensor, spread):
                for said, move in changes(tensor):
                    yield Edit(
                        f"{kind}: {key}", f"{path.name} {key} [{at}] {said}", change(path.name, moved(key, at, move))
                    )
            for said, whole in (
                ("removed", lambda t, key=key: t.pop(key)),
                ("a row fewer", lambda t, key=key: t.update({key: t[key][:-1]})),
                ("reversed", lambda t, key=key: t.update({key: t[key].flip(0)})),
                ("as float64", lambda t, key=key: t.update({key: t[key].double()})),
            ):
                if said == "reversed" and torch.equal(tensor, tensor.flip(0)):
                    continue
                yield Edit(f"{kind}: {key}", f"{path.name} {key} {said}", change(path.name, whole))
        yield Edit(
            f"{kind}: a tensor more", f"{path.name} more", change(path.name, lambda t: t.update(more=torch.ones(1)))
        )


def of_files(folder: Path) -> Iterator[Edit]:
    def removed(name: str) -> Callable[[Path, str], None]:
        def make(place: Path, mode: str) -> None:
            (place / name).unlink()
            record_path = place / "evidence.json"
            if mode != "plain" and record_path.exists():
                record = json.loads(record_path.read_text())
                record["files"].pop(name, None)
                record["seal"] = seal_of(record)
                record_path.write_text(json.dumps(record, indent=1))

        return make

    def written(name: str, content: Callable[[Path], bytes]) -> Callable[[Path, str], None]:
        def make(place: Path, _: str) -> None:
            (place / name).write_bytes(content(place))

        return make

    def always(text: str) -> Callable[[Path], bytes]:
        return lambda _: text.encode()

    for path in sorted(folder.iterdir()):
        yield Edit("a file removed", f"{path.name} removed", removed(path.name))
    for name in ("notes.txt", ".hidden", "evidence.json.bak"):
        yield Edit("a file added", f"files added {name}", written(name, lambda _: b"approved"))
    for name in ("adversarial-0099.safetensors", "more.safetensors"):
        yield Edit(
            "a file added", f"tensors added {name}", written(name, lambda f: (f / "samples.safetensors").read_bytes())
        )
    page = (folder / "report.html").read_text()
    for number, text in enumerate((page + "<script>1</script>", page.replace("0", "1", 1), page[:-1], "", page + "\n")):
        yield Edit("report.html", f"report.html {number}", written("report.html", always(text)))
    times = json.loads((folder / "times.json").read_text())
    for key, *_ in places(times):
        for number, other in enumerate(others(times[key])):
            edit = written("times.json", always(json.dumps({**times, key: other})))
            yield Edit("times.json", f"times.json {key} to {number}", edit)


def by_hand() -> Iterator[Edit]:
    def balanced(place: Path, mode: str) -> None:
        forged = Forged(place)
        rows = (forged.samples["forwards"] > 2).nonzero()[:2, 0]
        forged.samples["forwards"][rows] += torch.tensor([1, -1])
        finish(forged, mode if mode != "plain" else "resealed")

    def stages(place: Path, mode: str) -> None:
        forged = Forged(place)
        row = int((forged.samples["forwards"] > 2).nonzero()[0])
        forged.samples["forwards"][row] += 5
        forged.record["stages"][-1]["forwards"] += 5
        finish(forged, mode if mode != "plain" else "resealed")

    yield Edit("by hand: passes", "samples.safetensors forwards balanced", balanced)
    yield Edit("by hand: passes", "stages.0. forwards balanced", stages)


def made(folder: Path) -> dict[str, Path]:
    """The evidence of each subject, with its page."""
    found = {}
    for name, suite in SUBJECTS.items():
        evaluate(a_model(), the_data(), None, THREAT, suite, out=folder / name, gallery=2)
        (folder / name / "report.html").write_text(page_of(folder / name))
        verify(folder / name, model=a_model(), source=the_data())
        found[name] = folder / name
    return found


def explained(subject: str, mode: str, where: str) -> str:
    text = f"{subject} {mode} {where} "
    return next(
        (reason for pattern, reason in REASONS if re.fullmatch(pattern, text) or re.fullmatch(pattern, text[:-1])), ""
    )


@dataclasses.dataclass
class Table:
    """Counts by (mode, kind), reasons of what passed, and what passed without a reason."""

    tried: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    passed: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    reasons: dict[tuple[str, str], set[str]] = dataclasses.field(default_factory=dict)
    open: list[str] = dataclasses.field(default_factory=list)

    def show(self) -> None:
        print("| edit | mode | tried | refused | passed | why it is no claim |\n|---|---|---|---|---|---|")
        for mode, kind in sorted(self.tried, key=lambda pair: (pair[1], MODES.index(pair[0]))):
            tried, passed = self.tried[mode, kind], self.passed[mode, kind]
            why = "; ".join(sorted(self.reasons.get((mode, kind), set())))
            print(f"| {kind} | {mode} | {tried} | {tried - passed} | {passed} | {why} |")
        print(
            f"\n{self.tried.total()} edits, {self.tried.total() - self.passed.total()} refused, {len(self.open)} open"
        )
        for one in self.open:
            print(f"OPEN: {one}")


def edits_of(folder: Path, spread: int) -> Iterator[Edit]:
    yield from in_json(folder)
    yield from in_tensors(folder, spread)
    yield from of_files(folder)
    yield from by_hand()


def run(folder: Path, every: int = 1, spread: int = 4) -> Table:  # noqa: PLR0912 - one loop, and its cases
    """Make evidence in `folder`, and try each edit, or each one in `every`."""
    table, number, model, source = Table(), 0, a_model(), the_data()
    for subject, original in made(folder).items():
        print(f"{subject}: {number} edits before it", file=sys.stderr, flush=True)
        for edit in edits_of(original, spread):
            for mode in MODES:
                if mode == "concluded" and edit.where.startswith(("verdict", "notes", "files", "seal")):
                    continue  # they are written anew
                number += 1
                if number % every:
                    continue
                place = shutil.copytree(original, folder / "edited")
                try:
                    edit.make(place, mode)
                    if unchanged(place, original):
                        continue
                    table.tried[mode, edit.kind] += 1
                    if mode != "plain" and same_page(place, original):
                        (place / "report.html").unlink()  # a forger makes the page anew, or leaves it out
                    if refused(place, model, source):
                        continue
                except Traceback as error:  # it was counted as tried
                    table.open.append(f"{subject} {mode} {edit.where}: {error}")
                    continue
                except (UserError, LookupError, TypeError, ValueError, RuntimeError, AttributeError, AssertionError):
                    table.tried[mode, edit.kind] += 1  # the forger's own tools cannot conclude from this
                    continue
                finally:
                    shutil.rmtree(place)
                table.passed[mode, edit.kind] += 1
                if reason := explained(subject, mode, edit.where):
                    table.reasons.setdefault((mode, edit.kind), set()).add(reason)
                else:
                    table.open.append(f"{subject} {mode} {edit.where}")
    return table


def same_page(place: Path, original: Path) -> bool:
    """Whether an edit left the page as it was."""
    page = place / "report.html"
    return page.exists() and page.read_bytes() == (original / "report.html").read_bytes()


def unchanged(place: Path, original: Path) -> bool:
    """Whether an edit changed nothing, such as a type that was the same before."""
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (place, original)]
    return files[0] == files[1]


def refused(place: Path, model: Any, source: ArraySource) -> bool:
    """Whether `verify` refuses the folder. Any other error is a bug, and is raised."""
    try:
        verify(place, model=model, source=source)
    except UserError:
        return True
    except Exception as error:
        raise Traceback(f"a traceback: {error!r}") from error
    return False


# The audit.


def quick(_: ThreatModel) -> Suite:
    stages = (
        Stage(name="two steps", attack=PGD(steps=2, step_size=EPS)),
        Stage(name="pgd", attack=PGD(steps=8, step_size=EPS / 2, loss="margin")),
    )
    return Suite(name="quick", stages=stages, curve=False)


def audits(folder: Path, salts: int, total: int = 200, forged: int = 20, drawn: int = 100) -> tuple[int, int]:
    """How many audits accept honest evidence, and how many find the forged evidence."""
    SUITES["quick"] = quick
    x = torch.rand(total, 1, 4, 4, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        source = ArraySource(x, a_model()(x).argmax(dim=1), ["a", "b", "c"])
    out, liar = folder / "honest", folder / "forged"
    evaluate(a_model(), source, None, THREAT, quick(THREAT), out=out, gallery=0)
    shutil.copytree(out, liar)
    declare_robust(liar, forged)
    verify(liar, model=a_model(), source=source)
    accepted = found = 0
    for salt in range(salts):
        verify(out, model=a_model(), source=source, reattack=drawn, suite="quick", salt=str(salt))
        accepted += 1
        try:
            verify(liar, model=a_model(), source=source, reattack=drawn, suite="quick", salt=str(salt))
        except UserError:
            found += 1
    return accepted, found


def declare_robust(folder: Path, count: int) -> list[int]:
    """Declare broken samples robust, and make all else fit: hashes, counts, sentences, seal and page."""
    forged = Forged(folder)
    rows: list[int] = (forged.samples["broken_by"] >= 0).nonzero()[:count, 0].tolist()
    for row in rows:
        forged.samples["broken_by"][row], forged.samples["guess"][row] = ROBUST, forged.samples["label"][row]
        forged.samples["margin"][row] = forged.samples["lead"][row] = 0.0
        forged.samples["passes"][row] = 0
        forged.drop(row)
    forged.recount()
    forged.signs["broken"].zero_()
    forged.conclude()
    (folder / "report.html").write_text(page_of(folder))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="try each one in so many edits")
    parser.add_argument("--spread", type=int, default=4, help="entries of each tensor that are changed")
    parser.add_argument("--salts", type=int, default=20, help="audits")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        table = run(Path(folder), given.every, given.spread)
        table.show()
        accepted, found = audits(Path(folder) / "audit", given.salts) if given.salts else (0, 0)
    print(f"\naudits of honest evidence that accept it: {accepted} of {given.salts}")
    print(f"audits that find 20 of 200 samples forged, 100 drawn: {found} of {given.salts}")
    sys.exit(1 if table.open or accepted < given.salts or found < given.salts else 0)


if __name__ == "__main__":
    main()
