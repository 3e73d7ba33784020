"""Every attack beside its peers: the same images, model and settings, one run; robust accuracy and wall time.

    python benchmarks/attacks.py            # both models, 1,000 images; interrupted, it goes on at the next row
    python benchmarks/attacks.py --quick    # 20 images, a few steps: does it work?

The peers (torchattacks, foolbox, ART) are taken where they can be imported. The MNIST model is the one published with
TRADES, if its file is there (``--trades``); the CIFAR-10 models are trained first, by the recipe below, unless they are
there already. Writes docs/attacks-peers.md.

All get all images, in batches of the same size, with all threads that torch has. Times are wall seconds, set-up
included. Nobody's word is taken: a sample counts as broken if the point is in the threat model (one a rounding
outside is projected first) and the model, in full precision, gets it wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor, nn

from steelman import data as datasets
from steelman import recipe as recipes
from steelman.attacks import ATTACKS, untouched
from steelman.evaluation.evaluate import versions
from steelman.models import PUBLISHED_LAYOUTS
from steelman.models.classifier import build_classifier, load_state, load_weights
from steelman.threat import ThreatModel, norms
from steelman.training import run
from steelman.training.folder import load_model

AGAIN = 60.0  # seconds for all libraries together below which a row is run twice
Peer = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclasses.dataclass(frozen=True)
class Row:
    """One attack with the same settings in each library."""

    label: str
    norm: str
    name: str
    options: dict[str, Any]
    peers: dict[str, Peer]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its images and the radii it is attacked with."""

    label: str
    model: nn.Module
    x: Tensor
    y: Tensor
    eps: dict[str, float]
    first: int = 0  # the number of its first image in the test set


def available() -> tuple[dict[str, str], list[str]]:
    """The peers that can be imported, with their versions, and those that cannot, with the reason."""
    found, missing = {}, []
    for module, package in (
        ("torchattacks", "torchattacks"),
        ("foolbox", "foolbox"),
        ("art", "adversarial-robustness-toolbox"),
        ("adv_lib.attacks", "adv-lib"),
    ):
        try:
            importlib.import_module(module)
            found[package] = importlib.metadata.version(package)
        except ImportError as error:
            needs = " It requires torchvision, which this package does without." if package == "adv-lib" else ""
            missing.append(f"{package} could not be imported ({str(error).splitlines()[0]}).{needs}")
    return found, missing


def torchattacks(name: str, **options: Any) -> Peer:
    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        made = getattr(importlib.import_module("torchattacks"), name)(model, **options)
        x_adv: Tensor = made(x, y)
        return x_adv

    return attack


def foolbox(name: str, eps: float, **options: Any) -> Peer:
    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        library = importlib.import_module("foolbox")
        raw: Tensor
        raw, _, _ = getattr(library.attacks, name)(**options)(
            library.PyTorchModel(model, bounds=(0, 1), device=x.device), x, y, epsilons=eps
        )
        return raw

    return attack


def art(name: str, **options: Any) -> Peer:
    def attack(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        wrapped = importlib.import_module("art.estimators.classification").PyTorchClassifier(
            model, nn.CrossEntropyLoss(), tuple(x.shape[1:]), 10, clip_values=(0.0, 1.0)
        )
        made = getattr(importlib.import_module("art.attacks.evasion"), name)(
            wrapped, batch_size=len(x), verbose=False, **options
        )
        return torch.from_numpy(made.generate(x.numpy(), torch.nn.functional.one_hot(y, 10).numpy()))

    return attack


def rows(eps: dict[str, float], quick: bool) -> list[Row]:
    """The comparison. `n` shortens everything for a quick look."""

    def n(steps: int) -> int:
        return min(steps, 4) if quick else steps

    e, two = eps["linf"], eps["l2"]
    step, step_two = 2.5 * e / 20, 2.5 * two / 20
    return [
        Row(
            "FGSM",
            "linf",
            "fgsm",
            {},
            {"torchattacks": torchattacks("FGSM", eps=e), "foolbox": foolbox("LinfFastGradientAttack", e)},
        ),
        Row(
            "BIM-10",
            "linf",
            "bim",
            {"steps": n(10), "step_size": e / 4},
            {
                "torchattacks": torchattacks("BIM", eps=e, alpha=e / 4, steps=n(10)),
                "foolbox": foolbox("LinfBasicIterativeAttack", e, abs_stepsize=e / 4, steps=n(10), random_start=False),
            },
        ),
        Row(
            "PGD-20",
            "linf",
            "pgd",
            {"steps": n(20), "step_size": step},
            {
                "torchattacks": torchattacks("PGD", eps=e, alpha=step, steps=n(20)),
                "foolbox": foolbox("LinfPGD", e, abs_stepsize=step, steps=n(20)),
                "art": art("ProjectedGradientDescentPyTorch", eps=e, eps_step=step, max_iter=n(20), num_random_init=1),
            },
        ),
        Row(
            "MIM-20",
            "linf",
            "mim",
            {"steps": n(20), "step_size": step},
            {
                "torchattacks": torchattacks("MIFGSM", eps=e, alpha=step, steps=n(20), decay=1.0),
                "foolbox": foolbox(
                    "LinfMomentumIterativeFastGradientMethod", e, abs_stepsize=step, steps=n(20), momentum=1.0
                ),
            },
        ),
        Row(
            "PGD-20 l2",
            "l2",
            "pgd",
            {"steps": n(20), "step_size": step_two},
            {
                "torchattacks": torchattacks("PGDL2", eps=two, alpha=step_two, steps=n(20)),
                "foolbox": foolbox("L2PGD", two, abs_stepsize=step_two, steps=n(20)),
            },
        ),
        Row(
            "APGD-CE-25",
            "linf",
            "apgd",
            {"steps": n(25)},
            {
                "torchattacks": torchattacks("APGD", eps=e, steps=n(25), loss="ce"),
                "art": art(
                    "AutoProjectedGradientDescent",
                    eps=e,
                    eps_step=2 * e,
                    max_iter=n(25),
                    nb_random_init=1,
                    loss_type="cross_entropy",
                ),
            },
        ),
        Row(
            "APGD-DLR-25",
            "linf",
            "apgd-dlr",
            {"steps": n(25)},
            {"torchattacks": torchattacks("APGD", eps=e, steps=n(25), loss="dlr")},
        ),
        Row(
            "APGD-T-10 x 9",
            "linf",
            "apgd-t",
            {"steps": n(10), "targets": 9},
            {"torchattacks": torchattacks("APGDT", eps=e, steps=n(10), n_classes=10)},
        ),
        Row(
            "FAB-10",
            "linf",
            "fab",
            {"steps": n(10)},
            {"torchattacks": torchattacks("FAB", eps=e, steps=n(10), n_classes=10)},
        ),
        Row(
            "FAB-T-5 x 9",
            "linf",
            "fab-t",
            {"steps": n(5), "targets": 9},
            {"torchattacks": torchattacks("FAB", eps=e, steps=n(5), n_classes=10, multi_targeted=True)},
        ),
        Row(
            "DeepFool-10",
            "linf",
            "deepfool",
            {"steps": n(10)},
            {"foolbox": foolbox("LinfDeepFoolAttack", e, steps=n(10))},
        ),
        Row(
            "DeepFool-10 l2",
            "l2",
            "deepfool",
            {"steps": n(10)},
            {
                "foolbox": foolbox("L2DeepFoolAttack", two, steps=n(10)),
                "torchattacks": torchattacks("DeepFool", steps=n(10)),
            },
        ),
        Row(
            "C&W 4 x 25",
            "l2",
            "cw",
            {"steps": n(25), "search_steps": 4, "c": 0.1},
            {"foolbox": foolbox("L2CarliniWagnerAttack", two, binary_search_steps=4, steps=n(25), initial_const=0.1)},
        ),
        Row(
            "C&W 1 x 100",
            "l2",
            "cw",
            {"steps": n(100), "search_steps": 1, "c": 1},
            {"torchattacks": torchattacks("CW", c=1, steps=n(100))},
        ),
        Row(
            "Square-150",
            "linf",
            "square",
            {"queries": n(150), "rescale": True},  # as both peers have it
            {
                "torchattacks": torchattacks("Square", eps=e, n_queries=n(150)),
                "art": art("SquareAttack", eps=e, max_iter=n(150), nb_restarts=1),
            },
        ),
        Row(
            "Square-150 l2",
            "l2",
            "square",
            {"queries": n(150), "rescale": True},
            {"torchattacks": torchattacks("Square", norm="L2", eps=two, n_queries=n(150))},
        ),
        Row(
            "Square-150 l2, whole",
            "l2",
            "square",
            {"queries": n(150), "rescale": True, "whole": True},
            {"art": art("SquareAttack", norm=2, eps=two, max_iter=n(150), nb_restarts=1)},
        ),
        Row(
            "SPSA-5, 32 pairs",
            "linf",
            "spsa",
            {"steps": n(5), "pairs": 32, "sigma": 0.01, "step_size": e / 2},
            {
                "torchattacks": torchattacks(
                    "SPSA", eps=e, delta=0.01, lr=e / 2, nb_iter=n(5), nb_sample=32, max_batch_size=32
                )
            },
        ),
    ]


def judge(case: Case, threat: ThreatModel, points: Tensor, model: nn.Module) -> Tensor:
    """Which samples the points break."""
    points = points.detach().to(case.x.dtype)
    near = norms(points - case.x, threat.p) <= threat.eps * (1 + 1e-4)
    points = torch.where(near[:, None, None, None], threat.project(points, case.x), case.x)
    with untouched(model), torch.no_grad():
        guess = torch.cat([model(part).argmax(dim=1) for part in torch.split(points, 250)])
    return guess != case.y


def _batches(case: Case, batch_size: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return torch.split(case.x, batch_size), torch.split(case.y, batch_size)


def timed(attack: Callable[[Tensor, Tensor], Any], case: Case, batch_size: int) -> tuple[float, list[Any]]:
    """Wall seconds for all images, and what came out for each batch."""
    started = time.perf_counter()
    found = [attack(x, y) for x, y in zip(*_batches(case, batch_size), strict=True)]
    return time.perf_counter() - started, found


def compare(case: Case, row: Row, batch_size: int, peers: set[str]) -> dict[str, Any]:
    """One row of the table: each library in turn; all of them a second time, for the better, if that is soon done."""
    threat = ThreatModel(norm=row.norm, eps=case.eps[row.norm])  # type: ignore[arg-type]
    attack = ATTACKS[row.name](**row.options)
    place = {"at": 0}

    def ours(x: Tensor, y: Tensor) -> Any:
        index = torch.arange(len(x)) + place["at"]
        place["at"] = (place["at"] + len(x)) % len(case.x)
        return attack.run(case.model, x, y, threat, index=index)

    seconds, found = timed(ours, case, batch_size)
    broken = judge(case, threat, torch.cat([part.x_adv for part in found]), case.model)
    ours_record = {
        "robust": 1 - float(broken.double().mean()),
        "seconds": seconds,
        "forwards": float(torch.cat([part.forwards for part in found]).double().mean()),
        "backwards": float(torch.cat([part.backwards for part in found]).double().mean()),
    }
    record: dict[str, Any] = {
        "attack": row.label,
        "norm": row.norm,
        "eps": threat.eps,
        "ours": ours_record,
        "peers": {},
    }
    for name, peer in row.peers.items():
        if name.split()[0] not in peers:
            continue
        try:
            taken, points = _peer_timed(peer, case, batch_size)
        except Exception as error:  # a peer that cannot do it is a result too
            record["peers"][name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"}
            continue
        theirs = judge(case, threat, torch.cat(points), case.model)
        only_ours, only_theirs = int((broken & ~theirs).sum()), int((theirs & ~broken).sum())
        record["peers"][name] = {
            "robust": 1 - float(theirs.double().mean()),
            "seconds": taken,
            "only ours": only_ours,
            "only theirs": only_theirs,
            "p": float(binomtest(only_theirs, only_ours + only_theirs).pvalue) if only_ours + only_theirs else 1.0,
        }
    timings = [ours_record, *(peer for peer in record["peers"].values() if "seconds" in peer)]
    if sum(one["seconds"] for one in timings) < AGAIN:
        ours_record["seconds"] = min(seconds, timed(ours, case, batch_size)[0])
        for name, one in record["peers"].items():
            if "seconds" in one:
                one["seconds"] = min(one["seconds"], _peer_timed(row.peers[name], case, batch_size)[0])
    return record


def _peer_timed(peer: Peer, case: Case, batch_size: int) -> tuple[float, list[Any]]:
    """A peer's pass, with the model left as it was."""
    torch.manual_seed(0)
    modes = [(parameter, parameter.requires_grad) for parameter in case.model.parameters()]
    try:
        return timed(lambda x, y: peer(case.model, x, y), case, batch_size)
    finally:
        case.model.eval()
        for parameter, wanted in modes:
            parameter.requires_grad_(wanted)
            parameter.grad = None


def through_features(case: Case, steps: list[int], step_size: float, batch_size: int) -> list[dict[str, Any]]:
    """Accuracy of a standard model under PGD and under the attack through normalised features, by steps."""
    threat = ThreatModel(eps=case.eps["linf"])
    found = []
    for count in steps:
        record: dict[str, Any] = {"steps": count}
        for label, attack in (
            ("PGD", ATTACKS["pgd"](steps=count, step_size=step_size)),
            ("FN, scale 1", ATTACKS["fn"](steps=count, step_size=step_size, scale=1)),
            ("FN, scale |z|", ATTACKS["fn"](steps=count, step_size=step_size, scale="length")),
        ):
            points = torch.cat(
                [
                    attack(case.model, x, y, threat, index=torch.arange(len(x)) + batch_size * place)
                    for place, (x, y) in enumerate(zip(*_batches(case, batch_size), strict=True))
                ]
            )
            record[label] = 1 - float(judge(case, threat, points, case.model).double().mean())
        found.append(record)
        print(record, flush=True)
    return found


def table(label: str, case: Case, records: list[dict[str, Any]]) -> list[str]:
    """A model's table, as Markdown."""
    lines = [
        f"## {label}",
        "",
        f"{len(case.x)} images; linf eps {case.eps['linf']:.4g}, l2 eps {case.eps['l2']:.4g}.",
        "",
        "| attack | robust | F | B | seconds | peer | its robust | only ours / its | p | its seconds | time ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for record in records:
        ours = record["ours"]
        first = (
            f"| {record['attack']} | {ours['robust']:.1%} | {ours['forwards']:.1f} | {ours['backwards']:.1f} "
            f"| {ours['seconds']:.1f}"
        )
        for name, peer in record["peers"].items():
            if "error" in peer:
                lines.append(f"{first} | {name} | {peer['error']} | | | | |")
            else:
                lines.append(
                    f"{first} | {name} | {peer['robust']:.1%} | {peer['only ours']} / {peer['only theirs']} "
                    f"| {peer['p']:.2g} | {peer['seconds']:.1f} | {ours['seconds'] / peer['seconds']:.2f}x |"
                )
            first = "| | | | |"
    times = []
    for record in records:
        fastest = min((p["seconds"] for p in record["peers"].values() if "seconds" in p), default=math.inf)
        if fastest < math.inf:
            times.append((record["attack"], record["ours"]["seconds"] / fastest))
    best = [
        (
            record["attack"],
            record["ours"]["robust"] - min(p["robust"] for p in record["peers"].values() if "robust" in p),
        )
        for record in records
        if any("robust" in p for p in record["peers"].values())
    ]
    within = [name for name, ratio in times if ratio <= 0.6]
    slower = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in times if ratio > 0.6)
    weaker = ", ".join(f"{name} {100 * apart:+.1f} points" for name, apart in best if apart > 0)
    return [
        *lines,
        "",
        f"At most 0.6x the time of the fastest peer: {len(within)} of {len(times)} attacks"
        + (f". The others: {slower}." if slower else "."),
        f"Robust accuracy above the best peer's: {weaker or 'none'}.",
        "",
    ]


def trades(path: Path, samples: int, first: int = 0) -> Case:
    """The MNIST model published with TRADES."""
    model = build_classifier("smallcnn", input_shape=(1, 28, 28), num_classes=10)
    load_weights(model, PUBLISHED_LAYOUTS["trades-smallcnn"](load_state(path)), str(path))
    test = datasets.load("mnist").test
    index = torch.arange(first, first + samples)
    label = "MNIST, TRADES' published SmallCNN"
    return Case(label, model.eval(), test.images(index), test.labels[index], MNIST, first)


MNIST, CIFAR = {"linf": 0.3, "l2": 1.5}, {"linf": 8 / 255, "l2": 0.5}


def cifar(work: Path, samples: int, standard: bool, quick: bool) -> Case:
    """A narrow PreActResNet-18, trained here: the small PGD-AT recipe, narrower and shortened, or no adversary."""
    changes = [
        f"training.epochs={1 if quick else 3 if standard else 5}",
        f"evaluation.samples={50 if quick else 500}",
        *(["objective=standard"] if standard else ["model.width=8"]),
        *(["validation.size=49500", "validation.samples=50"] if quick else []),
    ]
    folder = work / (f"cifar10-{'standard' if standard else 'robust'}" + ("-quick" if quick else ""))
    kind = "standard training" if standard else "PGD-AT with one step"
    return trained(folder, changes, samples, f"CIFAR-10, PreActResNet-18 of width {16 if standard else 8}, {kind}")


def trained(folder: Path, changes: list[str], samples: int, label: str, first: int = 0) -> Case:
    """The model in a folder, trained there first by the small PGD-AT recipe with some changes unless it is there."""
    if not (folder / "run.json").exists():
        run.train(recipes.read("cifar10-pgd-at-small", changes)[0], folder)
    model, _ = load_model(folder)
    test = datasets.load("cifar10").test
    index = torch.arange(first, first + samples)
    return Case(label, model.eval(), test.images(index), test.labels[index], CIFAR, first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 images, a few steps; prints the page only")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=250)
    parser.add_argument("--trades", type=Path, default=Path("../shared/models/trades_mnist_smallcnn.pt"))
    parser.add_argument("--work", type=Path, default=Path("runs/bench-attacks"))
    parser.add_argument("--out", type=Path, default=Path("docs/attacks-peers.md"))
    parser.add_argument("--only", nargs="*", help="these attacks alone, by their labels; prints the page only")
    parser.add_argument("--models", nargs="*", default=["mnist", "cifar", "features"])
    options = parser.parse_args()
    samples = 20 if options.quick else options.samples
    found, missing = available()
    peers = {{"adversarial-robustness-toolbox": "art"}.get(name, name) for name in found}
    options.work.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Attacks beside their peers",
        "",
        "Here you see what each attack finds and what it costs, beside the same attack of other libraries. This",
        "command writes the page; rows that are there already are kept:",
        "",
        "```",
        "make bench-attacks",
        "```",
        "",
        f"All libraries get the same images, model and settings, in batches of {options.batch_size}, on "
        f"{torch.get_num_threads()} threads, in float32.",
        "Times include the set-up.",
        *missing,
        "",
        "- *robust* is the share of samples that the attack did not break. A sample is broken if its point is in the",
        "  threat model and the model gets it wrong. The same rule judges a peer's points and ours.",
        "- *F* and *B* are the forwards and the backwards that a sample took on average.",
        "- *only ours / its* counts the samples that only one of the two broke.",
        "- *p* is McNemar's exact test on those. Above 0.05, the difference may come from random starts alone.",
        "- *time ratio* is our time over the peer's.",
        "",
    ]
    for which in options.models:
        if which == "mnist" and not options.trades.is_file():
            lines += [f"MNIST left out: the TRADES model was not at {options.trades.name}.", ""]
            continue
        if which == "features":
            case = cifar(options.work, samples, standard=True, quick=options.quick)
            records = through_features(
                case, [1, 2] if options.quick else [1, 2, 3, 5, 7, 10], 0.003, options.batch_size
            )
            names = [name for name in records[0] if name != "steps"]
            lines += [
                "## Through normalised features",
                "",
                f"{case.label}. Accuracy by the number of steps, on {samples} test images, with linf eps 8/255 and "
                "steps of 0.003.",
                "Pang et al. (2020), Table 7, have the same comparison with other networks.",
                "",
                f"| steps | {' | '.join(name.replace('|', chr(92) + '|') for name in names)} |",
                f"|---|{'---|' * len(names)}",
                *(f"| {r['steps']} | {' | '.join(f'{r[name]:.1%}' for name in names)} |" for r in records),
                "",
            ]
            continue
        case = (
            trades(options.trades, samples)
            if which == "mnist"
            else cifar(options.work, samples, standard=False, quick=options.quick)
        )
        # A row is compared in one go; rows that an earlier call finished are taken from it.
        kept = options.work / f"{which}-{samples}.json"
        done = {record["attack"]: record for record in json.loads(kept.read_text())} if kept.exists() else {}
        records = []
        for row in rows(case.eps, options.quick):
            if options.only and row.label not in options.only:
                continue
            record = done.get(row.label) or compare(case, row, options.batch_size, peers)
            print(json.dumps(record), flush=True)
            records.append(record)
            kept.write_text(json.dumps(records, indent=1))
        lines += table(case.label, case, records)
    lines += [
        "## Remarks",
        "",
        "- On a robust model nearly every sample needs every step, and the convolutions take the time. There is little",
        "  to save there. There is more to save where most samples are broken, or where a step asks for several",
        "  gradients.",
        "- Square: `rescale` is on, as in the peers. The default here is off, as in AutoAttack.",
        f"- Rows that all libraries together do in {AGAIN:.0f} s were run twice in turn. The better pass counts.",
        "- FGSM here also asks whether it succeeded. That is one forward more than the peers' single step.",
        "- SPSA: `nb_sample=32` of torchattacks means 32 pairs of queries.",
        "- Square in l2: ART divides by the norm of a window where the paper multiplies by it. So each of its bumps",
        "  takes most of the radius. `whole` does that here, and is compared with ART. The paper's way is compared",
        "  with torchattacks.",
        "",
        f"Versions: {', '.join(f'{name} {value}' for name, value in {**versions(), **found}.items())}.",
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if not options.quick and not options.only and options.models == parser.get_default("models"):
        options.out.write_text(text)


if __name__ == "__main__":
    main()
