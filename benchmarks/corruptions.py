"""Corruptions beside imagecorruptions: how far the images differ, and the time for 1,000 images.

    python -m venv peer && peer/bin/pip install -r benchmarks/peers-corruptions.txt
    python benchmarks/corruptions.py --peer peer/bin/python

Parts of two photographs of 224 pixels, which scikit-learn brings along. The constants are those of ImageNet-C. The peer
runs in an environment of its own, because it needs old libraries. It corrupts one 8-bit image at a time; ours gets all
images at once. Then all 75 cells of CIFAR-10's test images are made, if the data are there. Writes
docs/corruptions-peer.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_sample_images

from steelman import data
from steelman.corruptions import CORRUPTIONS, SEVERITIES, STANDARD
from steelman.evaluation.evaluate import versions
from steelman.rng import Key

PEER = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import numpy as np
import imagecorruptions.corruptions as made_by
from imagecorruptions import corrupt
blur = made_by.gaussian  # its option multichannel has another name since scikit-image 0.20
made_by.gaussian = lambda x, *rest, multichannel=False, **more: blur(
    x, *rest, channel_axis=-1 if multichannel else None, **more
)
images = np.load(sys.argv[1])
seconds, found = {}, {}
for name in sys.argv[3:]:
    for severity in range(1, 6):
        corrupt(images[0], corruption_name=name, severity=severity)  # warm
        started = time.perf_counter()
        made = [corrupt(image, corruption_name=name, severity=severity) for image in images]
        seconds[f"{name} {severity}"] = time.perf_counter() - started
        found[f"{name} {severity}"] = np.stack(made)
np.savez(sys.argv[2], seconds=json.dumps(seconds), **found)
"""
SIZE = 224
# The corruptions that are another thing in the peer than in the released generator.
OTHER = {
    "elastic-transform": "the peer has other constants and no affine map",
    "frost": "other random parts of the same pictures",
    "snow": "the peer cuts the flakes from the corner, the released code from the middle",
}


def photographs(count: int) -> torch.Tensor:
    """`count` parts of two photographs, in [0, 1]."""
    draw, found = np.random.default_rng(0), []
    pictures = load_sample_images().images
    for number in range(count):
        picture = pictures[number % len(pictures)]
        top, left = (int(draw.integers(side - SIZE)) for side in picture.shape[:2])
        found.append(picture[top : top + SIZE, left : left + SIZE])
    return torch.from_numpy(np.stack(found)).movedim(-1, 1).float() / 255


def peer(python: str, x: torch.Tensor) -> tuple[dict[str, float], Any]:
    """The peer's seconds and images, by name and severity."""
    with tempfile.TemporaryDirectory() as folder:
        images, out, script = (Path(folder) / name for name in ("x.npy", "y.npz", "peer.py"))
        np.save(images, (x * 255).round().byte().movedim(1, -1).numpy())
        script.write_text(PEER)
        names = [name.replace("-", "_") for name in CORRUPTIONS]
        subprocess.run([python, str(script), str(images), str(out), *names], check=True)
        with np.load(out) as found:
            return json.loads(str(found["seconds"])), {name: found[name] for name in found if name != "seconds"}


def ours(x: torch.Tensor, pictures: str | None) -> tuple[dict[str, float], dict[str, np.ndarray[Any, Any]]]:
    seconds, found = {}, {}
    for name, entry in CORRUPTIONS.items():
        more = {"pictures": pictures} if name == "frost" else {}
        for severity in SEVERITIES:
            corruption = entry(severity=severity, exact=True, **more)
            corruption(x[:2])  # warm
            started = time.perf_counter()
            made = corruption(x)
            title = f"{name} {severity}".replace("-", "_")
            seconds[title] = time.perf_counter() - started
            found[title] = (made * 255).round().byte().movedim(1, -1).numpy()
    return seconds, found


def cells() -> dict[str, float] | None:
    """The seconds for 10,000 CIFAR-10 images at five severities, for each corruption."""
    try:
        source = data.load("cifar10").test
    except ValueError:
        return None
    x, index, spent = source.images(torch.arange(len(source))), torch.arange(len(source)), {}
    for name in STANDARD:
        started = time.perf_counter()
        for severity in SEVERITIES:
            CORRUPTIONS[name](severity=severity, exact=True)(x, index=index, key=Key(0))
        spent[name] = time.perf_counter() - started
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", required=True, help="the Python of an environment with imagecorruptions")
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--pictures", help="a folder with pictures of frost; by default the peer's")
    parser.add_argument("--out", type=Path, default=Path("docs/corruptions-peer.md"))
    options = parser.parse_args()
    where = "import imagecorruptions, os; print(os.path.join(os.path.dirname(imagecorruptions.__file__), 'frost'))"
    told = subprocess.run([options.peer, "-W", "ignore", "-c", where], check=True, capture_output=True, text=True)
    x = photographs(options.images)
    my_seconds, mine = ours(x, options.pictures or told.stdout.strip())
    its_seconds, its = peer(options.peer, x)
    per = 1000 / options.images
    rows, ratios = [], []
    clean = (x * 255).round().byte().movedim(1, -1).numpy().astype(float)
    for name in CORRUPTIONS:
        titles = [f"{name} {severity}".replace("-", "_") for severity in SEVERITIES]
        here, there = (per * sum(seconds[title] for title in titles) / 5 for seconds in (my_seconds, its_seconds))
        apart = statistics.mean(float(np.abs(mine[t].astype(float) - its[t]).mean()) for t in titles)
        strong = [statistics.mean(float(np.abs(made[t] - clean).mean()) for t in titles) for made in (mine, its)]
        ratios.append(there / here)
        rows.append(
            f"| {name} | {apart:.2f} | {strong[0]:.1f} | {strong[1]:.1f} | {here:.2f} | {there:.2f} | "
            f"{there / here:.1f} | {OTHER.get(name, '')} |"
        )
        print(rows[-1], flush=True)
    spent = cells()
    text = page(rows, ratios, spent, options.images)
    options.out.write_text(text)
    print(text)


def page(rows: list[str], ratios: list[float], spent: dict[str, float] | None, count: int) -> str:
    lines = [
        "# Corruptions beside imagecorruptions",
        "",
        "Look here how fast the corruptions are, and how near they come to the package imagecorruptions 1.1.2.",
        "",
        "```",
        "python benchmarks/corruptions.py --peer peer/bin/python",
        "```",
        "",
        f"{count} parts of two photographs, 224 x 224 pixels, constants of ImageNet-C, mean over the five severities.",
        f"The peer makes one image at a time. Ours gets all images at once, on {torch.get_num_threads()} threads.",
        "",
        "- *difference*: the mean absolute difference between our image and the peer's, in grey levels of 255. For a",
        "  random corruption both draw other noise, so the images differ even if the corruption is the same. Then",
        "  compare the columns *ours* and *peer*: the mean absolute difference to the clean image.",
        "- *s*: seconds for 1,000 images.",
        "",
        "| corruption | difference | ours | peer | ours, s | peer, s | times faster | what differs |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
        *rows,
        "",
        f"Median: {statistics.median(ratios):.1f} times faster.",
    ]
    if spent is not None:
        dearest = max(spent, key=spent.__getitem__)
        lines += [
            "",
            f"All 75 cells of CIFAR-10's 10,000 test images: {sum(spent.values()):.0f} s. The dearest corruption is "
            f"{dearest}, {spent[dearest]:.0f} s for its five severities.",
        ]
    lines += ["", f"Versions: {', '.join(f'{name} {value}' for name, value in versions().items())}.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
