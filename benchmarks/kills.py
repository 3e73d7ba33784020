"""Kill a run and an evaluation with SIGKILL at and between their writes, go on, and compare with an unkilled one.

    python benchmarks/kills.py                  # 25 kills of a run, 25 of an evaluation
    python benchmarks/kills.py --kills 200      # more

A first process is not killed; it counts the changes to the folder. The moments of the kills are spread over them:

- before: before a change to a file or a folder, so also after the one before it;
- half way: in the middle of a file's content;
- random: at any time.

Each kill begins with an empty place. Then the same command goes on to the end. What must hold:

- right after the kill, the folder is not there, or it has its settings and versions, each whole;
- in the end, all files are the same to the byte, except for times; nothing hidden is left.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "tempfile.mkstemp")
SETTINGS = (
    *("model={name: mlp, width: 16}", "training.epochs=3", "training.lr=0.01", "objective.attack.steps=1"),
    *("training.batch_size=512", "validation.size=40", "validation.samples=20", "evaluation.samples=20"),
    *("evaluation.attacks={FGSM: fgsm}", "compute.accelerator=cpu", "training.save_minutes=0.00001"),
)
TIMES = ("seconds", "training_seconds", "session_seconds", "time")


@dataclasses.dataclass(frozen=True)
class Moment:
    """When a process is killed: at the `at`-th change, half way through the `at`-th content, or after `at` seconds."""

    kind: str
    at: float

    def __str__(self) -> str:
        return f"{self.kind} {self.at:.3g}"


# In the process that is killed.


class Killer:
    """Counts the changes to a folder and what is written to its files. It kills its own process at the moment."""

    def __init__(self, place: Path, moment: Moment | None) -> None:
        self.place, self.moment = str(place), moment
        self.counts = Counter[str]()
        sys.addaudithook(self.hear)

    def hear(self, event: str, found: tuple[Any, ...]) -> None:
        if event == "open":
            change = isinstance(found[2], int) and bool(found[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        else:
            change = event in CHANGES
        if change and any(isinstance(one, str | os.PathLike) and self.inside(one) for one in found):
            self.reached("before")

    def inside(self, path: str | os.PathLike[str]) -> bool:
        absolute = os.path.abspath(os.fspath(path))  # noqa: PTH100 - Path.resolve would follow links
        return absolute.startswith(self.place)

    def reached(self, kind: str) -> None:
        self.counts[kind] += 1
        if self.moment is not None and self.moment.kind == kind and self.counts[kind] == self.moment.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_contents(self) -> None:
        """From here on, each content that is written to a file of the folder is a moment."""
        real, killer = os.fdopen, self

        def fdopen(*given: Any, **named: Any) -> IO[Any]:
            file: IO[Any] = real(*given, **named)
            return Halving(file, killer)  # type: ignore[return-value]

        os.fdopen = fdopen  # type: ignore[assignment]
        path_open = Path.open

        def opened(path: Path, mode: str = "r", *given: Any, **named: Any) -> IO[Any]:
            file: IO[Any] = path_open(path, mode, *given, **named)
            writes = any(letter in mode for letter in "wa+") and killer.inside(path)
            return Halving(file, killer) if writes else file  # type: ignore[return-value]

        Path.open = opened  # type: ignore[method-assign, assignment]


class Halving:
    """A file that may kill the process after half of a content."""

    def __init__(self, file: IO[Any], killer: Killer) -> None:
        self.file, self.killer = file, killer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Halving:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, content: Any) -> int:
        moment = self.killer.moment
        if moment is not None and moment.kind == "half way" and self.killer.counts["half way"] + 1 == moment.at:
            self.file.write(content[: len(content) // 2])
            self.file.flush()
        self.killer.reached("half way")
        return self.file.write(content)


def train(place: Path) -> None:
    """A small run, as the command line starts it or goes on with it."""
    from rich.console import Console

    from steelman import recipe
    from steelman.training import run

    quiet = Console(quiet=True)
    if (place / "recipe.yaml").exists():
        if not (place / "run.json").exists():
            run.resume(place, quiet)
        return
    source, origin = recipe.read("digits-pgd-at", SETTINGS)
    run.train(source, place, console=quiet, origin=origin)


def measure(place: Path) -> None:
    """An evaluation of a fixed model."""
    import torch

    from steelman import data
    from steelman.data.source import first
    from steelman.errors import UserError
    from steelman.evaluation.evaluate import evaluate
    from steelman.threat import ThreatModel

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).eval()
    source = data.load("digits").train
    images = source.images(torch.arange(len(source))).flatten(1)
    one_hot = torch.nn.functional.one_hot(source.labels, 10).float()
    with torch.no_grad():
        net[1].weight.copy_(torch.linalg.lstsq(images, one_hot).solution.T)  # type: ignore[operator]
    place.parent.mkdir(exist_ok=True)
    try:
        evaluate(net, first(source, 30), None, ThreatModel(eps=0.05), "fast", out=place, batch_size=10)
    except UserError as error:
        if "it is finished" not in str(error):  # killed after its last file
            raise


JOBS: dict[str, Callable[[Path], None]] = {"run": train, "evaluation": measure}


def child(job: str, place: str, moment: Moment | None, report: str | None) -> None:
    """The process: it does the job, and may be killed at the moment."""
    import torch

    torch.set_num_threads(1)
    # Names of temporary files must not differ from process to process: their order may be that of their names.
    killer = Killer(Path(place), moment)
    killer.watch_contents()
    started = time.monotonic()
    JOBS[job](Path(place))
    if report is not None:
        Path(report).write_text(json.dumps({**killer.counts, "random": time.monotonic() - started}))


# In the process that watches.

_context = multiprocessing.get_context("forkserver")


def do(job: str, place: Path, moment: Moment | None = None, report: Path | None = None) -> int:
    """Start a process, wait for its end, and return its exit code."""
    process = _context.Process(
        target=child, args=(job, str(place), moment, None if report is None else str(report)), daemon=True
    )
    process.start()
    if moment is not None and moment.kind == "random":
        process.join(moment.at)
        if process.is_alive():
            process.kill()
    process.join(300)
    assert process.exitcode is not None, "it did not end in 300 s"
    return process.exitcode


def counted(job: str, place: Path) -> dict[str, float]:
    """Do the job without a kill, and count its moments."""
    report = place.with_name(f"{place.name}.counts")
    code = do(job, place, report=report)
    assert code == 0, f"{job}: exit code {code}"
    found: dict[str, float] = json.loads(report.read_text())
    return found


def moments(counts: dict[str, float], kills: int, seed: int) -> list[Moment]:
    """Moments of all kinds, spread evenly over what happens."""
    rng, half = random.Random(seed), max(1, kills // 4)
    late = max(1, kills // 8)
    before = kills - half - late
    spread = [Moment("before", 1 + round(i * (counts["before"] - 1) / max(before - 1, 1))) for i in range(before)]
    spread += [Moment("half way", 1 + round(i * (counts["half way"] - 1) / max(half - 1, 1))) for i in range(half)]
    return spread + [Moment("random", rng.uniform(0.1, 1.0) * counts["random"]) for _ in range(late)]


def _timeless(value: Any) -> Any:
    """A JSON value without times."""
    if isinstance(value, dict):
        return {key: _timeless(one) for key, one in value.items() if key not in TIMES}
    if isinstance(value, list):  # a checkpoint keeps a mapping as a list of pairs
        return [_timeless(one) for one in value if not (isinstance(one, list) and one and one[0] in TIMES)]
    return value


def contents(place: Path) -> dict[str, str]:
    """Each file of a folder, and a digest of what it holds except for times."""
    found = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if not path.is_file() or name.startswith("tensorboard/"):  # each process writes its own file there
            continue
        content = path.read_bytes()
        if path.name in ("times.json", "report.html"):  # they show times
            content = b""
        elif path.name == "state.json":  # the second line is the checksum of the first one
            content = json.dumps(_timeless(json.loads(content.split(b"\n")[0]))).encode()
        elif path.suffix in (".json", ".jsonl"):
            lines = content.splitlines() if path.suffix == ".jsonl" else [content]
            content = json.dumps([_timeless(json.loads(line)) for line in lines]).encode()
        found[name] = hashlib.sha256(content).hexdigest()
    return found


def half_made(job: str, place: Path) -> str:
    """What is wrong with a folder right after a kill, or an empty text."""
    if job != "run" or not place.exists():
        return ""
    wrong = [name for name in ("recipe.yaml", "environment.json") if not (place / name).is_file()]
    if wrong:
        return f"{', '.join(wrong)} missing"
    from steelman.bounded import read_json
    from steelman.recipe import parse, read

    read_json(place / "environment.json")
    parse(*read(str(place / "recipe.yaml")))
    return ""


def differences(place: Path, whole: dict[str, str]) -> str:
    """How a finished folder differs from the one that was not killed, or an empty text."""
    hidden = [str(path.relative_to(place)) for path in place.rglob(".*")]
    beside = [path.name for path in place.parent.iterdir() if path.name.startswith(".")]
    found = contents(place)
    names = found.keys() ^ whole.keys()
    other = [name for name in found.keys() & whole.keys() if found[name] != whole[name]]
    parts = (("hidden", hidden + beside), ("missing or extra", sorted(names)), ("different", sorted(other)))
    return "; ".join(f"{word}: {', '.join(one)}" for word, one in parts if one)


def try_all(job: str, kills: int, seed: int, root: Path) -> tuple[Counter[str], list[str]]:
    """Kill at the moments, go on, and compare. Returns counts and failures."""
    counts = counted(job, root / "whole" / job)
    whole, tally, failures = contents(root / "whole" / job), Counter[str](), list[str]()
    for number, moment in enumerate(moments(counts, kills, seed)):
        place = root / f"{job}-{number}" / job
        place.parent.mkdir()
        killed = do(job, place, moment) == -signal.SIGKILL
        problem = half_made(job, place)
        if (code := do(job, place)) != 0:
            problem += f"; going on ended with exit code {code}"
        elif different := differences(place, whole):
            problem += f"; {different}"
        tally[moment.kind] += 1
        tally["killed"] += killed
        tally["same"] += not problem
        if problem:
            failures.append(f"{job}, {moment}: {problem.removeprefix('; ')}")
            print(failures[-1], flush=True)
        else:
            shutil.rmtree(place.parent)
    tally["writes"], tally["contents"] = int(counts["before"]), int(counts["half way"])
    return tally, failures


def main() -> None:
    said = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    said.add_argument("--kills", type=int, default=50, help="in total; half of them for each job")
    said.add_argument("--seed", type=int, default=0)
    said.add_argument("--job", choices=list(JOBS), action="append")
    given = said.parse_args()
    _context.set_forkserver_preload(["steelman.training.run", "steelman.data"])
    jobs = given.job or list(JOBS)
    root, found, failures = Path(tempfile.mkdtemp(prefix="steelman-kills-")), {}, []
    for job in jobs:
        (root / "whole").mkdir(exist_ok=True)
        found[job], wrong = try_all(job, given.kills // len(jobs), given.seed, root)
        failures += wrong
    print("\n| | changes | contents | kills | before a change | half way | random | killed in time | same in the end |")
    print("|---|" + "---:|" * 8)
    for job, tally in found.items():
        kinds = [tally[kind] for kind in ("before", "half way", "random")]
        row = [tally["writes"], tally["contents"], sum(kinds), *kinds, tally["killed"], tally["same"]]
        print(f"| {job} | " + " | ".join(map(str, row)) + " |")
    if failures:
        print(f"\nleft in {root}")
        sys.exit(1)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
