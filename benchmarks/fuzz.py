"""A fuzzer: each reader of files and texts gets damaged, huge and hostile inputs. None may crash, hang or fill memory.

    python benchmarks/fuzz.py --minutes 30               # every reader, for the same time each
    python benchmarks/fuzz.py --reader recipe --seed 7   # one reader; the seed decides all inputs
    python benchmarks/fuzz.py --replay runs/fuzz/recipe-traceback-0001.bin

An input is a valid one with a few changes, or a value that Hypothesis draws. It goes to another process, which may use
2 GB more than steelman itself, and has 20 seconds. The results are:

- accepted: the reader took it;
- refused: a `UserError`, so one sentence for the user;
- traceback: any other error, or a dead process;
- hang: no answer in 20 seconds;
- memory: 2 GB were not enough.

Each failing input is saved in ``runs/fuzz``, with its traceback beside it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fuzz_inputs
import fuzz_readers
from fuzz_worker import ACCEPTED, HANG, KINDS, MEMORY, REFUSED, TRACEBACK, Answer, Worker

OUT = Path("runs/fuzz")
SAVED = 5  # inputs that are saved of one failure: the same kind at the same line
BATCH = 50  # inputs of one reader before the next one's turn


@dataclasses.dataclass
class Tally:
    """The results of one reader."""

    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: float = 0.0
    failures: collections.Counter[tuple[str, str]] = dataclasses.field(default_factory=collections.Counter)

    def add(self, answer: Answer) -> bool:
        """Count an answer. Returns whether its input should be saved."""
        self.counts[answer.kind] += 1
        if answer.kind in (ACCEPTED, REFUSED):
            return False
        self.failures[answer.kind, answer.place] += 1
        return self.failures[answer.kind, answer.place] <= SAVED


def keep(name: str, content: bytes, answer: Answer) -> None:
    """Save a failing input and its traceback."""
    OUT.mkdir(parents=True, exist_ok=True)
    place = OUT / f"{name}-{answer.kind}-{hashlib.sha256(content).hexdigest()[:10]}"
    Path(f"{place}.bin").write_bytes(content)  # a reader's name may have a dot
    Path(f"{place}.txt").write_text(answer.text)
    print(f"{name}: {answer.kind} at {answer.place}: {answer.text.strip()[-120:]!r} -> {place}.bin", flush=True)


def fuzz(names: list[str], minutes: float, seed: int, templates: Path) -> dict[str, Tally]:
    """Try inputs in turns, so that each reader gets the same share of the time."""
    tallies = {name: Tally() for name in names}
    made = {name: fuzz_inputs.inputs(fuzz_readers.READERS[name], templates, f"{seed}/{name}") for name in names}
    worker, share = Worker(templates), 60 * minutes / len(names)
    while any(tally.seconds < share for tally in tallies.values()):
        for name, tally in tallies.items():
            started = time.monotonic()
            for _ in range(BATCH):
                if tally.seconds + time.monotonic() - started > share:
                    break
                content = next(made[name])
                answer = worker.ask(name, content)
                if tally.add(answer):
                    keep(name, content, answer)
            tally.seconds += time.monotonic() - started
    worker.close()
    return tallies


def table(tallies: dict[str, Tally]) -> str:
    """The counts of each reader, as Markdown."""
    lines = ["| reader | inputs | " + " | ".join(KINDS) + " |", "|---|" + "---:|" * (len(KINDS) + 1)]
    total: collections.Counter[str] = collections.Counter()
    for name, tally in [*tallies.items(), ("all", None)]:
        counts = total if tally is None else tally.counts
        lines.append(f"| {name} | {counts.total():,} | " + " | ".join(f"{counts[kind]:,}" for kind in KINDS) + " |")
        total = total + counts if tally is not None else total
    return "\n".join(lines)


def main() -> None:
    said = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    said.add_argument("--minutes", type=float, default=10.0, help="for all readers together")
    said.add_argument("--seed", type=int, default=0)
    said.add_argument("--reader", action="append", choices=list(fuzz_readers.READERS), help="repeat for more")
    said.add_argument("--replay", type=Path, nargs="+", help="try saved inputs again")
    given = said.parse_args()
    random.seed(given.seed)
    templates = Path(tempfile.mkdtemp(prefix="steelman-fuzz-"))
    try:
        # In another process, for it trains a model, and this one needs no torch.
        subprocess.run([sys.executable, str(Path(__file__).with_name("fuzz_readers.py")), str(templates)], check=True)
        if given.replay:
            worker = Worker(templates)
            for path in given.replay:
                name = path.name.rsplit("-", 2)[0]
                answer = worker.ask(name, path.read_bytes())
                print(f"{path.name}: {answer.kind} {answer.place} {answer.text.strip()[-2000:]}")
            worker.close()
            return
        tallies = fuzz(given.reader or list(fuzz_readers.READERS), given.minutes, given.seed, templates)
    finally:
        shutil.rmtree(templates, ignore_errors=True)
    print(f"\nseed {given.seed}, {given.minutes:g} minutes\n\n{table(tallies)}")
    for name, tally in tallies.items():
        for (kind, place), count in tally.failures.most_common():
            print(f"{name}: {count} x {kind} at {place}")
    bad = sum(tally.counts[kind] for tally in tallies.values() for kind in (TRACEBACK, HANG, MEMORY))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
