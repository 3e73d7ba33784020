"""Three small models on corrupted CIFAR-10 images: standard, PGD-AT, and PGD-AT with a hypersphere head.

    python benchmarks/corruptions_cifar10.py                # trains what is missing in runs/corruptions-cifar10

The recipe is cifar10-pgd-at-small with 8 epochs, about 10 to 25 minutes a model on two cores. Then the models get the
first 2,000 test images in 75 cells. Interrupted, it goes on. Keeps the numbers in benchmarks/results, and writes
docs/corruptions-cifar10.md and a page beside the models.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from steelman import data
from steelman import recipe as recipes
from steelman.corruptions import KINDS
from steelman.corruptions.accuracy import CorruptionAccuracy, percent
from steelman.corruptions.measure import measure
from steelman.corruptions.plan import Plan
from steelman.corruptions.published import PUBLISHED
from steelman.data.source import first
from steelman.evaluation.result import share_of
from steelman.progress import showing
from steelman.report import corruptions as page
from steelman.training import run
from steelman.training.folder import load_model

COMMON = ["training.epochs=8", "evaluation={suite: fast, samples: 500}"]
MODELS = {
    "standard": ["objective=standard", "training.select=last"],
    "PGD-AT": [],
    "PGD-AT+HE": ["head={name: he, scale: 15, margin: 0.2}"],
}
SAMPLES = 2000
RESULTS = Path(__file__).parent / "results" / "corruptions-cifar10.json"
BESIDE = ("PGD-AT", "PGD-AT+HE")  # published rows


def trained(folder: Path, name: str) -> Path:
    """A trained model. An interrupted training goes on."""
    place = folder / name
    if not (place / "run.json").is_file():
        source, origin = recipes.read("cifar10-pgd-at-small", [*COMMON, *MODELS[name]])
        run.train(source, place, resume=(place / "recipe.yaml").is_file(), origin=origin)
    return place


def table(found: Mapping[str, CorruptionAccuracy]) -> list[str]:
    """The means of each model, as Markdown."""
    kinds = list(KINDS)
    lines = [
        f"| model | clean | {' | '.join(kinds)} | mCA | mCE | relative mCE |",
        "|---|" + "---:|" * (len(kinds) + 4),
    ]
    base = found["standard"]
    for name, one in found.items():
        means = [percent(mean) for mean in (*one.kinds().values(), one.mca)]
        errors = page.error_texts(one, base)
        clean = share_of(int(one.clean.sum()), len(one.clean))
        lines.append(f"| {name} | {clean} | {' | '.join(means)} | {' | '.join(errors)} |")
    for row in map(PUBLISHED.__getitem__, BESIDE):
        cells = [
            math.fsum(value for corruption in names for value in row.cells[corruption]) / (5 * len(names))
            for names in KINDS.values()
        ]
        shown = " | ".join(f"{value:.1f}%" for value in cells)
        lines.append(f"| *published {row.name}, WRN-34-10, CIFAR-10-C* | | {shown} | {row.mca:.1f}% | | |")
    return lines


def text(found: Mapping[str, CorruptionAccuracy]) -> str:
    one = next(iter(found.values()))
    lines = [
        "# Three models on corrupted CIFAR-10 images",
        "",
        "Look here what adversarial training does to accuracy on noisy, blurred or foggy images. This command trains",
        "the models and wrote the page:",
        "",
        "```",
        "python benchmarks/corruptions_cifar10.py",
        "```",
        "",
        "The network is a PreActResNet-18 of width 16, trained for 8 epochs on a CPU, seed 0. So the models are far",
        "smaller than the published ones, and one seed says little about a method. The images are generated with the",
        f"constants of CIFAR-10-C from the first {one.total:,} test images, seed {one.seed}. Frost: {one.frost}.",
        "Brackets are 95% intervals over the images.",
        "",
        *table(found),
        "",
        "## Differences on the same images",
        "",
        "They hold for these three models. Whether they hold for the methods, other seeds of the training would show.",
        "",
        *(f"- {difference.text}." for difference in page.differences(list(found.values()))),
        "",
        f"Versions: {', '.join(f'{name} {value}' for name, value in one.versions.items())}.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=Path("runs/corruptions-cifar10"))
    parser.add_argument("--out", type=Path, default=Path("docs/corruptions-cifar10.md"))
    options = parser.parse_args()
    places = {name: trained(options.models, name) for name in MODELS}
    nets = {name: load_model(place)[0] for name, place in places.items()}
    source = first(data.load("cifar10").test, SAMPLES)
    with showing(Console(), notes=True):
        found = measure(
            nets, source, Plan(), places={name: options.models / "corruptions" / name for name in nets}, batch_size=250
        )
    page.write(options.models / "corruptions" / "report.html", list(found.values()), baseline=found["standard"])
    RESULTS.write_text(json.dumps({name: one.to_dict() for name, one in found.items()}, indent=1) + "\n")
    options.out.write_text(text(found))
    print(options.out.read_text())


if __name__ == "__main__":
    main()
