"""``steelman doctor``: versions, devices, speed, datasets and optional parts of this machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from steelman.attacks import PGD
from steelman.cli.listing import print_table
from steelman.data import available, data_root
from steelman.data.datasets import digits
from steelman.evaluation.bfloat16 import native
from steelman.evaluation.evaluate import versions
from steelman.models.classifier import build_classifier
from steelman.threat import ThreatModel

SIZE = 768  # rows and columns of the matrices in the speed test
SECONDS = 0.25  # how long each speed is measured
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
COMPILERS = ("c++", "g++", "clang++")
Row = tuple[str, str]


def examine(console: Console) -> None:
    """Print everything about this machine. It takes a few seconds. Nothing is downloaded or changed."""
    with console.status("checking this machine"):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        tables = [
            (("versions", ""), list(versions().items())),
            (("devices", ""), devices()),
            (("measured", f"on {device.type}"), speeds(device)),
            (("data", f"in {data_root()}"), list(available().items())),
            (("optional part", ""), optional_parts()),
        ]
    for columns, rows in tables:
        print_table(columns, rows)
        console.print()


def devices() -> list[Row]:
    """The processors of this machine."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    rows = [
        ("CPU", f"{_processor()}, {os.cpu_count()} cores, {usable} of them for this process"),
        ("threads", f"{torch.get_num_threads()} used by torch; the variable OMP_NUM_THREADS changes it"),
    ]
    for place in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(place)
        rows.append((f"CUDA {place}", f"{card.name}, {card.total_memory / 2**30:.0f} GiB"))
    if not torch.cuda.is_available():
        rows.append(("CUDA", "none" if torch.version.cuda else f"none; torch {torch.__version__} was built without it"))
    rows.append(("MPS", "there" if torch.backends.mps.is_available() else "none"))
    return rows


def speeds(device: torch.device) -> list[Row]:
    """The speed of matrix products and of PGD, which take most of the time of training and evaluation."""
    work, exact = 2 * SIZE**3 / 1e9, _seconds(_product(device, torch.float32), device)
    chosen = "uses it in its coarse searches" if native(device) else "searches in float32"
    try:
        coarse = _seconds(_product(device, torch.bfloat16), device)
        half = f"{work / coarse:,.0f} GFLOP/s, {exact / coarse:.2g} times float32; steelman evaluate {chosen}"
    except RuntimeError as error:
        half = f"none: {str(error).splitlines()[0]}"
    return [
        ("float32", f"{work / exact:,.0f} GFLOP/s, by a product of {SIZE} x {SIZE} matrices"),
        ("bfloat16", half),
        ("PGD", f"{_attacked_a_second(device):,.0f} images per second for one step on digits-cnn"),
    ]


def optional_parts() -> list[Row]:
    """The optional parts. A row of a missing part says what needs it, and how to install it."""
    browser, driver = any(map(shutil.which, BROWSERS)), shutil.which("chromedriver")
    return [
        _package("tensorboard", "curves of a run in TensorBoard", "pip install tensorboard"),
        _package("huggingface_hub", "runs on the Hugging Face Hub", "pip install huggingface-hub"),
        _package("transformers", "models of the library transformers", "pip install transformers"),
        _program("C++ compiler", any(map(shutil.which, COMPILERS)), "compute.compile: true", "apt install g++"),
        _package("pytest", "the tests", "pip install pytest"),
        _package("selenium", "browser tests of the report", "pip install selenium"),
        _program("Chromium", browser, "browser tests of the report", "apt install chromium"),
        _program("chromedriver", bool(driver), "browser tests of the report", "apt install chromium-driver"),
    ]


def _package(name: str, purpose: str, command: str) -> Row:
    """The row of a Python package. The package is not imported, because some imports take seconds."""
    if importlib.util.find_spec(name) is None:
        return name, f"missing: needed for {purpose}; install with: {command}"
    try:
        return name, f"there: {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:  # a folder on Python's path that was never installed
        return name, "there"


def _program(name: str, there: bool, purpose: str, command: str) -> Row:
    return name, "there" if there else f"missing: needed for {purpose}; install with: {command} (on Debian)"


def _processor() -> str:
    """The processor's name. On Linux it is in a file."""
    told = Path("/proc/cpuinfo")
    for line in told.read_text(errors="replace").splitlines() if told.is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _product(device: torch.device, kind: torch.dtype) -> Callable[[], Tensor]:
    left, right = (torch.ones(SIZE, SIZE, device=device, dtype=kind) for _ in range(2))
    return lambda: left @ right


def _attacked_a_second(device: torch.device) -> float:
    """The number of images that one step of PGD attacks in a second: a forward and a backward pass for each."""
    data, steps = digits(), 5
    x, y = data.train.images(torch.arange(256)).to(device), data.train.labels[:256].to(device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_classifier("digits-cnn", input_shape=data.shape, num_classes=data.num_classes).to(device).eval()
    attack, threat = PGD(steps=steps, keep="last"), ThreatModel(eps=0.15)
    return len(x) * steps / _seconds(lambda: attack(model, x, y, threat), device)


def _seconds(call: Callable[[], Tensor], device: torch.device) -> float:
    """The time of the quickest of several calls. Other programs may make a call slower."""
    taken, begun = list[float](), time.perf_counter()
    while len(taken) < 2 or time.perf_counter() - begun < SECONDS:
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - started)
    return min(taken[1:])  # the first call also sets things up
