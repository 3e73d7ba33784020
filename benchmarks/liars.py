"""Models that lie: what the suites say of each, what is true, and why nobody believes them.

    python benchmarks/liars.py                              # the small liars of tests/test_liars.py
    python benchmarks/liars.py --robust RUN --weak RUN      # liars made of two trained models, on their own test images

The small liars have samples that a known point breaks, so in truth they are 0% robust. A liar made of two models
answers attackers like the robust one, and an adversary's images like the weak one. Its truth is measured by attacks
that know its trick.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from steelman import PGD, ThreatModel, evaluate, load
from steelman.attacks.shaped import SHAPES, Shaped
from steelman.data import load as load_data
from steelman.data.source import ArraySource
from steelman.evaluation.checks import ContractError

SUITES = ("fast", "standard")
PAGE = (
    "# Models that lie, and what a verdict says of them",
    "",
    "Look here which lies are tried in each test run. Each of these small models looks robust to some attacks, and an",
    "adversary breaks all of its samples. So its true robust accuracy is 0%. The suites have fewer steps than usual,",
    "because the models are small. This command wrote the table:",
    "",
    "```",
    "python benchmarks/liars.py --out docs/liars.md",
    "```",
    "",
    "A verdict would be believed if it were sound and over 8 points above the truth. A flag in brackets lowers the",
    "trust. A refused model gets no verdict; the word behind it is the reason. [Limits](limits.md) says which lies are",
    "not found.",
    "",
)


class Two(nn.Module):
    """The weak model's answers, but the robust one's where `odd` says that an attacker asks."""

    def __init__(self, robust: nn.Module, weak: nn.Module, known: Tensor, odd: str) -> None:
        super().__init__()
        self.robust, self.weak, self.odd = robust, weak, odd
        self.register_buffer("known", known, persistent=False)
        self.seen: list[Tensor] = []
        self.locked = False

    def forward(self, x: Tensor) -> Tensor:
        odd = getattr(self, f"_{self.odd}")(x.detach())
        return torch.where(odd[:, None], self.robust(x), self.weak(x))

    def _moved(self, x: Tensor) -> Tensor:
        """The move of each pixel from the nearest image of the data."""
        nearest = torch.cdist(x.flatten(1), self.known.flatten(1)).argmin(dim=1)  # type: ignore[operator]
        return (x - self.known[nearest]).abs().flatten(1)  # type: ignore[index]

    def _offgrid(self, x: Tensor) -> Tensor:
        return ((255 * x - (255 * x).round()).abs() > 1e-3).flatten(1).any(dim=1)

    def _dense(self, x: Tensor) -> Tensor:
        return (self._moved(x) > 1e-4).double().mean(dim=1) > 0.22

    def _far(self, x: Tensor) -> Tensor:
        return self._moved(x).amax(dim=1) > 0.1

    def _near_repeat(self, x: Tensor) -> Tensor:
        if not self.seen:
            self.seen = [x]
            return torch.zeros(len(x), dtype=torch.bool)
        before = torch.cat(self.seen)
        apart = (x[:, None] - before[None]).abs().flatten(2).amax(dim=2).amin(dim=1)
        self.seen = [torch.cat((before, x[apart > 0.35]))[-400:]]
        return (apart < 0.35) & (apart > 0)

    def _lockdown(self, x: Tensor) -> Tensor:
        locked = self.locked
        self.locked = locked or bool((self._moved(x) > 1e-4).any())
        return torch.full((len(x),), locked)


def truth(make: Callable[[], Two], x: Tensor, y: Tensor, threat: ThreatModel) -> float:
    """The share of the samples that no point made for the weak model breaks. Each point goes to a fresh model."""
    weak, robust = make().weak, torch.ones(len(x), dtype=torch.bool)
    attacks = [
        PGD(steps=50, loss="margin"),
        *(Shaped(shape=shape, steps=50) for shape in SHAPES),
    ]
    radii = (threat, threat.at(threat.eps / 4))
    for points in [attack(weak, x, y, radius) for attack in attacks for radius in radii]:
        with torch.no_grad():
            answers = torch.cat([make()(point[None]).argmax(dim=1) for point in points])
        robust &= answers == y
    return float(robust.double().mean())


def said(model: nn.Module, x: Tensor, y: Tensor, threat: ThreatModel, suite: str) -> tuple[str, bool]:
    """What a suite says, and whether a reader would believe a number above the truth."""
    try:
        found = evaluate(model, x, y, threat, suite)
    except ContractError as error:
        return f"refused: {error.reason}", False
    verdict = found.verdict
    assert verdict is not None
    flags = ", ".join(dict.fromkeys(flag.name for flag in verdict.flags if flag.raised))
    return f"{verdict.robust_accuracy:.0%} {verdict.trust}" + (f" ({flags})" if flags else ""), verdict.trust == "sound"


def small() -> list[tuple[str, str, list[str], bool]]:
    """The liars of the tests."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from tests import test_liars as liars

    rows = []
    for name, case in liars.LIARS.items():
        threat = liars.BETWEEN if case.levels else liars.THREAT
        _, x, y = liars.problem(case, threat)
        words, believed = [], False
        for suite in SUITES:
            try:
                found = evaluate(case.make().eval(), x, y, threat, liars.small(suite, threat))
            except ContractError as error:
                words.append(f"refused: {error.reason}")
                continue
            assert found.verdict is not None
            verdict, flags = found.verdict, ", ".join(sorted(liars.raised(found)))
            words.append(f"{verdict.robust_accuracy:.0%} {verdict.trust}" + (f" ({flags})" if flags else ""))
            believed |= verdict.trust == "sound" and verdict.robust_accuracy > liars.ALLOWED
        rows.append((name, "0%", words, believed))
        print(name, *words, "BELIEVED" if believed else "", sep=" | ", flush=True)
    return rows


def large(robust: Path, weak: Path, samples: int) -> list[tuple[str, str, list[str], bool]]:
    """Liars made of two trained models."""
    first, second = load(robust), load(weak)
    test = load_data(first.evaluation.data.split()[0]).test  # such as "mnist test"
    x, y = test.images(torch.arange(samples)), test.labels[:samples]
    norm = first.evaluation.norm
    threat = ThreatModel(norm=norm, eps=first.evaluation.eps)  # type: ignore[arg-type]  # it checks the text
    rows = []
    for odd in ("offgrid", "dense", "far", "near_repeat", "lockdown"):

        def make(odd: str = odd) -> Two:
            return Two(first.model, second.model, x, odd).eval()

        true = truth(make, x, y, threat)
        words, believed = [], False
        for suite in SUITES:
            started = time.monotonic()
            word, sound = said(make(), ArraySource(x, y).images(torch.arange(samples)), y, threat, suite)
            words.append(f"{word}, {time.monotonic() - started:.0f} s")
            believed |= sound
        rows.append((odd, f"{true:.0%}", words, believed))
        print(odd, f"{true:.0%}", *words, "BELIEVED" if believed else "", sep=" | ", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--robust", type=Path, help="the run of a robust model")
    parser.add_argument("--weak", type=Path, help="the run of a model that is not robust")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--out", type=Path, help="a page with the table, such as docs/liars.md")
    options = parser.parse_args()
    rows = small() if options.robust is None else large(options.robust, options.weak, options.samples)
    believed = [name for name, _, _, one in rows if one]
    lines = [
        f"| liar | true | {' | '.join(SUITES)} |",
        "|---|---|---|---|",
        *(f"| {name} | {true} | {' | '.join(words)} |" for name, true, words, _ in rows),
        "",
        f"{len(rows)} liars, believed: {', '.join(believed) or 'none'}.",
    ]
    print("", *lines, sep="\n")
    if options.out is not None:
        options.out.write_text("\n".join([*PAGE, *lines, ""]))
    return len(believed) > 0


if __name__ == "__main__":
    sys.exit(main())
