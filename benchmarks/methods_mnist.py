"""Every objective, with and without a hypersphere head, on MNIST: accuracy over seeds, and time against PGD-AT.

    python benchmarks/methods_mnist.py            # all of it; runs that are there already are not run again
    python benchmarks/methods_mnist.py --quick    # one seed, a few images: does it work?

Writes docs/methods-mnist.md. What each run came to is kept in benchmarks/results/methods-mnist, and is not measured
again while its recipe stays the same. Each run is one ordinary training with one thread; `--jobs` of them side by side.
Times are CPU seconds of one thread, batch by batch in turn from all methods, so that a busy machine slows all alike.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import io
import json
import multiprocessing
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from scipy.stats import bootstrap

from steelman import data as datasets
from steelman import recipe as recipes
from steelman.evaluation.evaluate import versions
from steelman.files import write_atomic
from steelman.objectives import OBJECTIVES
from steelman.objectives.criterion import Criterion
from steelman.training import run

EPS, STEPS, STEP = 0.2, 5, 0.1
INNER = {"name": "pgd", "steps": STEPS, "step_size": STEP}
RADIUS = {"name": "linear", "start": 0, "end": EPS, "until": 0.3}
HEADS = ("linear", "he")
EPOCHS = 12
SMOOTH = ("llr", "cure")  # they differentiate an input gradient once more, and ReLU has no second derivative
SETTLED = {6: "half", 24: "twice"}  # PGD-AT for half and for twice the epochs: does the accuracy still rise?
RESULTS = Path(__file__).parent / "results" / "methods-mnist"
LARGER = "smallcnn"  # the network of TRADES, for what a head costs beside more of a backbone
COLUMNS = ("clean", "PGD-50", "PGD-50 margin", "adaptive PGD-50", "worst case")

# The papers' settings for MNIST where they have them, else their defaults; every inner attack takes the same steps. LLR
# has its released weights: with the paper's weights it learns nothing here.
SETTINGS: dict[str, dict[str, Any]] = {
    "standard": {},
    "pgd-at": {"attack": INNER},
    "alp": {"attack": INNER},
    "trades": {"beta": 1, "attack": INNER},
    "mart": {"attack": INNER},
    "llr": {"weight": 2, "mu": 0.6, "steps": STEPS},
    "cure": {},
    "rat": {"beta": 1, "attack": {**INNER, "loss": "kl", "start": "gaussian"}},
    "free-at": {"replays": 4},
    "fast-at": {},
    "tla": {"alpha": 0.05, "weight": 0.5, "norm_weight": 1e-4, "attack": INNER},
    "feature-scatter": {},
    "gat": {},
    "hat": {"attack": INNER},
}


def recipe(name: str, head: str, seed: int, helper: Path | None, quick: bool, epochs: int = EPOCHS) -> dict[str, Any]:
    """One run."""
    last = {"steps": 50, "step_size": 0.02}
    return {
        "name": f"{name} {head} {seed}",
        "data": {"name": "mnist"},
        "model": {"name": "fastat-mnist", "activation": "softplus" if name in SMOOTH else "relu"},
        "head": {"name": head},
        "threat": {"norm": "linf", "eps": EPS},
        "objective": {"name": name, **SETTINGS[name], **({"helper": str(helper)} if name == "hat" else {})},
        "training": {
            "epochs": 1 if quick else epochs,
            "batch_size": 100,
            "optimizer": "adam",
            "lr": {"name": "piecewise", "points": [[0, 0], [0.3, 5e-3], [1, 0]]},
            "select": "last",
            "seed": seed,
            "eps": RADIUS,
        },
        # What is held out is not trained on: this leaves 10,000 of the 60,000 images.
        "validation": {"size": 59500 if quick else 50000, "samples": 200, "attack": {"name": "pgd", "steps": 10}},
        "guard": {"on_collapse": "ignore"},
        "evaluation": {
            "suite": None,
            "samples": 50 if quick else 500,
            "attacks": {
                "PGD-50": {"name": "pgd", **last},
                "PGD-50 margin": {"name": "pgd", "loss": "margin", **last},
                "adaptive PGD-50": {"name": "adaptive", **last},
            },
        },
    }


def one(work: Path, name: str, head: str, seed: int, quick: bool, epochs: int = EPOCHS) -> dict[str, Any]:
    """Train and measure; or read what an earlier call measured with the same recipe."""
    torch.set_num_threads(1)
    source = recipe(name, head, seed, work / f"standard-linear-{seed}", quick, epochs)
    label = f"{name}-{head}-{seed}" + (f"-{epochs}-epochs" if epochs != EPOCHS else "")
    folder, done = work / label, (work if quick else RESULTS) / f"{label}.json"
    # The folder of the helper is another on each machine; the model in it is not.
    plain = {key: value for key, value in source["objective"].items() if key != "helper"}
    measured = {key: source["evaluation"][key] for key in ("attacks", "samples")}
    key = recipes.fingerprint({**source, "objective": plain, "measured with": measured})
    wanted = name == "standard" and head == "linear" and not (folder / "run.json").exists()  # HAT's helper
    if done.is_file() and (kept := json.loads(done.read_text()))["key"] == key and not wanted:
        return dict(kept)
    if folder.exists():
        folder.rename(folder.with_name(f"{folder.name}-old-{time.time_ns()}"))
    started = time.monotonic()
    found = run.train(source, folder, console=Console(file=io.StringIO()), show=False)
    assert found is not None
    record = {
        "key": key,
        "name": name,
        "head": head,
        "seed": seed,
        "epochs": source["training"]["epochs"],
        "n": found.evaluation.total,
        "scores": {score.name: score.correct / score.total for score in found.evaluation.scores},
        "seconds": round(time.monotonic() - started),
        "commit": commit(),
        "versions": versions(),
    }
    done.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(done, json.dumps(record, indent=1).encode())
    return record


def commit() -> str:
    """The commit that is run."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


class Stepper:
    """Steps of one method on real batches, as the trainer makes them, to be timed."""

    def __init__(self, name: str, head: str, x: torch.Tensor, y: torch.Tensor, model: str | None = None) -> None:
        source = recipe(name, head, 0, Path("unused"), quick=False)
        self.recipe = recipes.parse({**source, **({"model": model} if model else {})})
        self.net = run.build_model(self.recipe, (1, 28, 28), 10).train()
        self.helper = run.build_model(self.recipe, (1, 28, 28), 10).eval()
        self.optimizer = self.recipe.training.optimizer(self.net.parameters())
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3
        self.x, self.y, self.count = x, y, 0
        self.criterion = Criterion(self.recipe.objective, self.net, self.recipe.threat, steps=10**6, helper=self.helper)

    def __call__(self) -> float:
        """CPU seconds of one batch, replays included."""
        size = self.recipe.training.batch_size
        started = time.process_time()
        rows = (torch.arange(size) + size * self.count) % len(self.x)
        for x, y, index in self.criterion.batches([(self.x[rows], self.y[rows], rows)]):
            loss = self.criterion(x, y, index=index)
            self.optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
            self.optimizer.step()
        self.count += 1
        return time.process_time() - started


def timings(names: list[str], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of each method and head, a batch in each round; every round goes through all of them."""
    torch.set_num_threads(1)
    train = datasets.load("mnist").train
    index = torch.arange(5000)
    x, y = train.images(index), train.labels[index]
    steppers = {(name, head): Stepper(name, head, x, y) for name in names for head in HEADS}
    steppers |= {(LARGER, head): Stepper("pgd-at", head, x, y, LARGER) for head in HEADS}
    for stepper in [*steppers.values()] * 3:
        stepper()  # memory and caches
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in steppers}
    for turn in range(rounds):
        for key in list(steppers)[:: 1 if turn % 2 else -1]:
            seconds[key].append(steppers[key]())
    return seconds


def spread(found: list[float]) -> tuple[float, float]:
    """Mean and standard deviation."""
    return statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0


def apart(ours: tuple[float, float], theirs: tuple[float, float], seeds: int) -> tuple[str, str]:
    """The difference of two means with its standard error, and whether it is beyond two of them."""
    difference, error = ours[0] - theirs[0], ((ours[1] ** 2 + theirs[1] ** 2) / seeds) ** 0.5
    word = "noise" if abs(difference) <= 2 * error else "worse" if difference < 0 else "better"
    return f"{difference:+.1f} ± {error:.1f}", word


def page(
    results: list[dict[str, Any]], seconds: dict[tuple[str, str], list[float]], settled: list[dict[str, Any]]
) -> str:
    """The measured page."""
    table: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        table.setdefault((result["name"], result["head"]), []).append(result)
    seeds = sorted({result["seed"] for result in results})
    n = results[0]["n"]

    def values(key: tuple[str, str], column: str) -> list[float]:
        return [100 * one["scores"][column] for one in sorted(table[key], key=lambda one: int(one["seed"]))]

    def stat(key: tuple[str, str], column: str) -> tuple[float, float]:
        return spread(values(key, column))

    def share(key: tuple[str, str], of: tuple[str, str]) -> float:
        return statistics.median(seconds[key]) / statistics.median(seconds[of])

    def gap(key: tuple[str, str], of: tuple[str, str]) -> tuple[str, str]:
        """The difference in the worst case, and whether it is beyond two standard errors over the seeds."""
        return apart(stat(key, "worst case"), stat(of, "worst case"), len(seeds))

    base = ("pgd-at", "linear")
    heads = {name: gap((name, "he"), (name, "linear"))[1] for name in SETTINGS if (name, "he") in table}
    said = {word: [name for name, one in heads.items() if one == word] for word in ("better", "worse", "noise")}
    lines = [
        "# Every method on MNIST, with and without a hypersphere head",
        "",
        "Look up here what a method gives and costs on a small problem, before you spend a GPU on it. This is a small",
        "comparison. It is no published table.",
        "",
        f"- Network `fastat-mnist` with ReLU ({' and '.join(SMOOTH)} with softplus: they need a second derivative).",
        f"- 10,000 training images, {EPOCHS} epochs, batch 100, Adam, linf eps {EPS}.",
        f"- Inner attacks take {STEPS} steps of {STEP}. FreeAT, FastAT, feature scatter, GAT and LLR attack as they",
        "  are defined.",
        f"- The last epoch is measured on the first {n} test images. Accuracy in %: mean and standard deviation over",
        f"  seeds {', '.join(map(str, seeds))}.",
        "- PGD-50 has steps of 0.02. The margin attack is the same with the margin loss. The adaptive attack climbs",
        "  the loss with the head's margin. The worst case is per image.",
        "- The settings are those in `benchmarks/methods_mnist.py`. They are tuned for none of the methods.",
        "- The radius grows from 0 over the first 30% of the training. With the whole radius from the start PGD-AT",
        "  with ReLU and a linear head stayed at one class for all 12 epochs (seed 0).",
        "",
        "A difference counts when it is beyond two standard errors over the seeds. Everything else is called noise.",
        f"With {len(seeds)} seeds a standard error is itself uncertain: read a difference near the limit as open.",
        "",
        f"| method | head | {' | '.join(COLUMNS)} | time | against PGD-AT | HE against linear |",
        f"|---|---|{'---|' * len(COLUMNS)}---|---|---|",
    ]
    for name in SETTINGS:
        for head in HEADS:
            key = (name, head)
            if key not in table:
                continue
            cells = ["{:.1f} ± {:.1f}".format(*stat(key, column)) for column in COLUMNS]
            against = "-" if key == base else " ".join(gap(key, base))
            head_cell = " ".join(gap(key, (name, "linear"))) if head == "he" else ""
            time_share = f"{share(key, base):.2f}x"
            lines.append(f"| {name} | {head} | {' | '.join(cells)} | {time_share} | {against} | {head_cell} |")
    pairs = {
        name: [a / b - 1 for a, b in zip(seconds[name, "he"], seconds[name, "linear"], strict=True)]
        for name in (*SETTINGS, LARGER)
    }
    every = [pair for name in SETTINGS for pair in pairs[name]]
    low, high = bootstrap((numpy.array(every),), numpy.median, n_resamples=2000, rng=0).confidence_interval
    lines += [
        "",
        "The last two columns are differences in worst-case accuracy, with their standard errors.",
        "",
        "## What the hypersphere head does here",
        "",
        *(
            f"- {word}: {', '.join(names) or 'none'}."
            for word, names in zip(
                ("Significantly better with it", "Significantly worse with it", "Not to be told apart"),
                said.values(),
                strict=True,
            )
        ),
        "",
        "The head has its default scale and margin throughout.",
        "",
        "## Has the training settled?",
        "",
        "PGD-AT for half and for twice the epochs: worst-case accuracy, mean and standard deviation over the seeds.",
        "",
        f"| head | {' | '.join(f'{epochs} epochs' for epochs in sorted((*SETTLED, EPOCHS)))} |",
        f"|---|{'---|' * (len(SETTLED) + 1)}",
    ]
    lengths, worst = sorted((*SETTLED, EPOCHS)), dict[tuple[str, int], list[float]]()
    for one in (*results, *settled):
        if one["name"] == "pgd-at":
            worst.setdefault((one["head"], one["epochs"]), []).append(100 * one["scores"]["worst case"])
    for head in HEADS:
        told = [worst.get((head, epochs), []) for epochs in lengths]
        lines.append(
            f"| {head} | {' | '.join('{:.1f} ± {:.1f}'.format(*spread(one)) if one else '' for one in told)} |"
        )
    both = [(worst.get(("he", epochs), []), worst.get(("linear", epochs), [])) for epochs in lengths]
    cells = [" ".join(apart(spread(he), spread(linear), len(seeds))) if he and linear else "" for he, linear in both]
    lines += [
        f"| HE against linear | {' | '.join(cells)} |",
        "",
        f"Where {max(lengths)} epochs give more than {EPOCHS}, the rows above are those of a short training.",
    ]
    found, hours = versions(), sum(one["seconds"] for one in (*results, *settled)) / 3600
    commits = sorted({one["commit"] for one in (*results, *settled)})
    lines += [
        "",
        "## Time",
        "",
        "CPU seconds of an epoch relative to PGD-AT with a linear head, replays included. Each is a median over "
        f"{len(next(iter(seconds.values())))} batches. The methods took turns after each batch, on one thread.",
        "",
        f"A hypersphere head's extra time: median {statistics.median(every):+.1%} over {len(every)} pairs of batches",
        f"(95% bootstrap interval of the median {low:+.1%} .. {high:+.1%}). With the larger `{LARGER}` and PGD-AT:",
        f"{statistics.median(pairs[LARGER]):+.1%}.",
        "",
        f"All runs together took {hours:.1f} hours of one thread, at commit {', '.join(commits)}. Each run's numbers",
        "are in `benchmarks/results/methods-mnist`.",
        "",
        f"Versions: {', '.join(f'{name} {value}' for name, value in found.items())}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, few images; prints the page only")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--work", type=Path, default=Path("runs/methods-mnist"), help="where the runs are kept")
    parser.add_argument("--out", type=Path, default=Path("docs/methods-mnist.md"))
    parser.add_argument(
        "--only", nargs="*", choices=list(SETTINGS), default=list(SETTINGS), help="these methods alone, and no page"
    )
    options = parser.parse_args()
    missing = OBJECTIVES.keys() - SETTINGS.keys()
    assert not missing, f"no settings for {missing}"
    work = options.work.with_name(f"{options.work.name}-quick") if options.quick else options.work
    seeds = [0] if options.quick else [0, 1, 2]
    # The standard models come first: HAT learns from them.
    names = ["standard", *(name for name in SETTINGS if name in options.only and name != "standard")]
    results: list[dict[str, Any]] = []
    settled: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.jobs, mp_context=context) as pool:
        for group in (names[:1], names[1:]):
            jobs = {
                pool.submit(one, work, name, head, seed, options.quick): results
                for seed in seeds
                for name in group
                for head in HEADS
            }
            if "pgd-at" in group and not options.quick:
                jobs |= {
                    pool.submit(one, work, "pgd-at", head, seed, False, epochs): settled
                    for seed in seeds
                    for epochs in SETTLED
                    for head in HEADS
                }
            for job in concurrent.futures.as_completed(jobs):
                result = job.result()
                jobs[job].append(result)
                scores = ", ".join(f"{key} {100 * value:.1f}" for key, value in result["scores"].items())
                print(f"{result['name']} {result['head']} seed {result['seed']}: {scores}", flush=True)
    if set(names) != set(SETTINGS):
        return
    seconds = timings(names, 3 if options.quick else 60)
    text = page(results, seconds, settled)
    print(text)
    if not options.quick:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
