"""An audit: some of the samples that are claimed to be robust are attacked anew.

Evidence cannot show that a sample is robust. So a forger can declare broken samples robust, and nothing in the evidence
contradicts it. An audit draws samples by a number that depends on the seal and on a salt of the auditor. Nobody who
made the evidence could know it. The drawn samples are attacked with a suite of the auditor's choice.

**The interval.** Of N claimed samples, n are drawn without replacement, and k are broken. The number of false claims
among the N then has an exact hypergeometric interval. If none is broken, it is the one-sided 95% bound. Else it is the
two-sided 95% interval.

**The rule.** A few claims of honest evidence may be false: another seed or a stronger suite breaks a few more. So
evidence is rejected in two cases only:

- The lower end of the 95% Clopper-Pearson interval of k of n is above PLAUSIBLE. With few claimed samples, this
  interval still tells chance from forgery. The interval above does not.
- The evidence claims a sound verdict of a cascade, and the audit's own evaluation raises a flag that lowers the trust.

Every broken sample is reported.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from steelman.data.source import Source, Subset
from steelman.errors import UserError, unknown
from steelman.evaluation.result import Trust, Verdict, interval
from steelman.evaluation.stages import Suite
from steelman.evaluation.suites import SUITES, suite_named
from steelman.evidence.bundle import Bundle, read_bundle
from steelman.evidence.ledger import ROBUST

PLAUSIBLE = 0.02  # the share of claims that may be false in honest evidence
LIKELY = 0.95
SHOWN = 20  # samples that a sentence names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """The result of an audit. `low` and `high` are the ends of the interval of the number of false claims.

    `broken` are the rows of the samples that the audit broke. `own` tells whether the suite is the evidence's own.
    `trust` and `reasons` are those of the audit's own evaluation, on the drawn samples. `rejected` follows the rule
    above.
    """

    claimed: int
    drawn: int
    broken: tuple[int, ...]
    low: int
    high: int
    suite: str
    own: bool
    salt: str
    trust: Trust
    reasons: tuple[str, ...]
    contradicted: bool

    @property
    def many(self) -> bool:
        """Whether more claims are false than in honest evidence."""
        return bool(self.broken) and interval(len(self.broken), self.drawn)[0] > PLAUSIBLE

    @property
    def rejected(self) -> bool:
        return self.many or self.contradicted

    @property
    def text(self) -> str:
        """The result in sentences."""
        suite = f"suite {self.suite}, {'the' if self.own else 'not the'} evidence's own (salt {self.salt})"
        if not self.claimed:
            return "no sample is claimed to be robust, so there is nothing to attack"
        said = [f"{suite} broke {self._broken}: {self._share}"]
        if self.many:
            said.append(
                f"more than chance explains if {PLAUSIBLE:.0%} of the claims are false, the most in honest evidence"
            )
        elif self.broken and not self.own:
            said.append("another suite may break a few samples of honest evidence")
        elif self.broken:
            said.append("other noise may break a few samples of honest evidence")
        if self.contradicted:
            said.append(f"the evidence says sound, and the audit's own evaluation is {self.trust}")
        if self.trust != "sound":
            said.extend(self.reasons)
        return "; ".join(said)

    @property
    def _broken(self) -> str:
        if not self.broken:
            return f"none of {self.drawn:,}"
        rows = ", ".join(map(str, self.broken[:SHOWN])) + (" and more" if len(self.broken) > SHOWN else "")
        return f"{len(self.broken):,} of {self.drawn:,} (samples {rows})"

    @property
    def _share(self) -> str:
        if self.drawn == self.claimed:
            return f"these are all {self.claimed:,} samples that are claimed to be robust"
        # Rounded outwards: the sentence must not say more than the interval.
        high = math.ceil(1000 * min(self.high + (not self.broken), self.claimed) / self.claimed) / 10
        if not self.broken:
            return f"with 95% confidence less than {high:.1f}% of the claimed {self.claimed:,} are false"
        low = math.floor(1000 * self.low / self.claimed) / 10
        return f"with 95% confidence {low:.1f}% to {high:.1f}% of the claimed {self.claimed:,} are false"


def audit(
    bundle: Bundle,
    model: nn.Module,
    source: Source,
    count: int,
    *,
    suite: str = "standard",
    salt: str | None = None,
    batch_size: int = 256,
) -> Audit:
    """Attack `count` of the samples that are claimed to be robust, or all of them if there are fewer."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UserError(f"--reattack: expected a number of samples, at least 1, got {count!r}")
    if suite not in SUITES:
        raise unknown("suite", suite, SUITES)
    salt = secrets.token_hex(8) if salt is None else salt
    claimed = (bundle.samples["broken_by"] == ROBUST).nonzero()[:, 0]
    number = hashlib.sha256(f"{bundle.seal}\n{salt}".encode(errors="surrogateescape")).digest()
    rows = drawn_by(number, claimed)[:count].sort().values
    verdict, broken = (
        (None, rows[:0]) if not len(rows) else _attacked(bundle, model, source, rows, number, suite, batch_size)
    )
    own, sound = bundle.record["suite"], bundle.record["verdict"]["trust"] == "sound"
    low, high = false_claims(len(broken), len(rows), len(claimed))
    return Audit(
        claimed=len(claimed),
        drawn=len(rows),
        broken=tuple(broken.tolist()),
        low=low,
        high=high,
        suite=suite,
        own=suite == own["name"],
        salt=salt,
        trust="sound" if verdict is None else verdict.trust,
        reasons=() if verdict is None else verdict.reasons,
        contradicted=verdict is not None and verdict.trust != "sound" and sound and not own["protocol"],
    )


def drawn_by(number: bytes, rows: Tensor) -> Tensor:
    """`rows` in an order that follows from `number`: by the SHA-256 of the number and the row."""
    keys = [hashlib.sha256(number + row.to_bytes(8, "little")).digest() for row in rows.tolist()]
    return rows[torch.tensor(sorted(range(len(keys)), key=keys.__getitem__), dtype=torch.int64)]


def _attacked(
    bundle: Bundle, model: nn.Module, source: Source, rows: Tensor, number: bytes, suite: str, batch_size: int
) -> tuple[Verdict, Tensor]:
    """The verdict of the audit's own evaluation, and the rows of the samples that it broke."""
    from steelman.evaluation.evaluate import evaluate  # it writes evidence, so this import would be a cycle

    # The evidence has these already: whoever made it allowed them.
    allowed = {"more_outputs", "tiny_eps"} & {field.name for field in dataclasses.fields(Suite)}
    chosen = suite_named(suite, bundle.threat, gallery=0, **dict.fromkeys(allowed, True))
    with tempfile.TemporaryDirectory(prefix="steelman-audit-") as folder:
        found = evaluate(
            model,
            Subset(source, rows),
            None,
            bundle.threat,
            chosen,
            seed=int.from_bytes(number[:7], "little"),
            batch_size=batch_size,
            out=Path(folder),
        )
        robust = read_bundle(Path(folder)).samples["broken_by"] == ROBUST
    assert found.verdict is not None
    return found.verdict, rows[~robust]


def false_claims(broken: int, drawn: int, claimed: int) -> tuple[int, int]:
    """The ends of the interval of the number of false claims, by the hypergeometric distribution.

    >>> false_claims(0, 100, 1140), false_claims(5, 100, 200)
    ((0, 32), (5, 19))
    """
    if drawn == claimed:
        return broken, broken
    from scipy.stats import hypergeom  # here, because it takes a second to load

    tail = (1 - LIKELY) if not broken else (1 - LIKELY) / 2
    most = claimed - (drawn - broken)
    high = _last(broken, most, lambda false: float(hypergeom.cdf(broken, claimed, false, drawn)) > tail)
    low = _last(-most, -broken, lambda false: float(hypergeom.sf(broken - 1, claimed, -false, drawn)) > tail)
    return (-low if broken else 0), high


def _last(first: int, last: int, fits: Callable[[int], bool]) -> int:
    """The last number from `first` to `last` that fits. Those that fit come first, and `first` fits."""
    while first < last:
        middle = (first + last + 1) // 2
        first, last = (middle, last) if fits(middle) else (first, middle - 1)
    return first
