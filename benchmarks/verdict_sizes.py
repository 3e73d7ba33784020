"""The verdict beside AutoAttack against the number of images: how much of the time is spent on a small question?

    python benchmarks/verdict_sizes.py          # interrupted, it goes on at the next point

The MNIST model published with TRADES. `fast` gets 100 to 10,000 images. AutoAttack (torchattacks' port, official
budgets) gets the sizes of PEER; more would take hours.
One thread. Each point is kept in benchmarks/results/verdict-sizes. Writes docs/verdict-sizes.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from attacks import Case, trades
from verdict import kept, ours, port

from steelman.evaluation.evaluate import versions

SIZES = (100, 200, 500, 1000, 2000, 5000, 10_000)
PEER = (100, 200, 500)  # more would take hours
BATCH = 250
RESULTS = Path(__file__).parent / "results" / "verdict-sizes"
PAGE = (
    "# The verdict's time against the number of images",
    "",
    "Look here how long a verdict on your number of images takes beside AutoAttack. This command wrote the page:",
    "",
    "```",
    "python benchmarks/verdict_sizes.py",
    "```",
    "",
    "The model is MNIST's, published with TRADES, linf eps 0.3. The images are the first ones of the test set. All ran",
    "on one thread, seed 0, in batches of 250. AutoAttack is torchattacks' port with AutoAttack's own budgets. The",
    "machine did other work too. Read the ratios roughly.",
    "",
)


def mine(case: Case) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        found = ours(case, "fast", 0, Path(folder) / "evidence", BATCH)
    return {**found, "left": len(found["left"]), "versions": versions()}


def theirs(case: Case) -> dict[str, Any]:
    found = port(case, BATCH)
    return {**found, "left": len(found["left"]), "versions": versions()}


def page(fast: dict[int, dict[str, Any]], peer: dict[int, dict[str, Any]]) -> str:
    """The table. It has no ratio where AutoAttack was not run."""
    lines = [*PAGE, "| images | `fast`: robust | `fast`: s | AutoAttack: robust | AutoAttack: s | time ratio |"]
    lines.append("|---|---|---|---|---|---|")
    for n, one in fast.items():
        told = "not run | | "
        if n in peer:
            told = f"{peer[n]['robust']} | {peer[n]['seconds']:.0f} | 1/{peer[n]['seconds'] / one['seconds']:.0f} "
        lines.append(f"| {n:,} | {one['robust']:,} | {one['seconds']:.1f} | {told}|")
    lines += [
        "",
        "Below 1,000 images `fast` has a smaller pilot and sentinel, and the verdict says what they can miss.",
        "",
        f"Versions: {', '.join(f'{name} {value}' for name, value in versions().items())}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trades", type=Path, default=Path("../shared/models/trades_mnist_smallcnn.pt"))
    parser.add_argument("--out", type=Path, default=Path("docs/verdict-sizes.md"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    fast, peer = dict[int, dict[str, Any]](), dict[int, dict[str, Any]]()
    for n in SIZES:
        case = trades(options.trades, n)
        fast[n] = kept(RESULTS / f"fast-{n}.json", mine, case)
        print("fast", n, fast[n]["robust"], fast[n]["seconds"], fast[n]["trust"], flush=True)
        if n in PEER:
            peer[n] = kept(RESULTS / f"autoattack-{n}.json", theirs, case)
            print("AutoAttack", n, peer[n]["robust"], peer[n]["seconds"], flush=True)
    text = page(fast, peer)
    print(text)
    options.out.write_text(text)


if __name__ == "__main__":
    main()
