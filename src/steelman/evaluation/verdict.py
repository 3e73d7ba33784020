"""The results of a suite's run: flags of the stages, verdict, scores, notes and gallery."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import torch

from steelman.evaluation.findings import Findings
from steelman.evaluation.masking import flag
from steelman.evaluation.result import Example, Flag, Score, Trust, Verdict, scores_of
from steelman.evaluation.runner import Runner
from steelman.evidence.ledger import pilot_size

# The limit for the share of all samples that only targeted attacks break.
TARGETED_AHEAD = 0.1
# The limit for an attack's share of points outside the threat model. Above it, its failures mean nothing.
OUTSIDE = 0.05
# The limit for an attack's share of successes that full precision refutes. Above it, the model's answers change.
REFUTED = 0.05
# The limit for the share of samples that the pilot's attacks break, and a suite without a pilot stage does not.
PILOT_AHEAD = 0.05
# The limit for the share of samples that are wrong only within rounding. Above it, the bound on rounding is in doubt.
UNCLEAR = 0.05
# A model has collapsed if it gives one class to at least COLLAPSE of the images. The class's share of the data must be
# lower by COLLAPSE_AHEAD. There must be COLLAPSE_SEEN images: a few images may have one class by chance.
COLLAPSE, COLLAPSE_AHEAD, COLLAPSE_SEEN = 0.95, 0.2, 20


def verdict_of(run: Runner, findings: Findings, names: Sequence[str], *, random: bool) -> Verdict:
    """The verdict. Its trust is the lowest that any raised flag leaves."""
    order, flags = list(get_args(Trust)), (*findings.flags, *doubts(run, findings))
    raised = [one for one in flags if one.raised]
    unsure = random or not run.complete
    worst: list[Trust] = ["suspect" if unsure else "sound", *(one.trust for one in raised)]
    reasons = [one.text for one in raised]
    if collapse := collapsed(run, names):
        reasons.append(collapse)
    if random:
        reasons.append("the model is random: another draw of its noise may give another answer")
    if run.suite.protocol:
        reasons.append("a protocol of given attacks: an upper bound, which a stronger attack may lower")
    if not run.complete:
        reasons.append("the time ran out before all attacks had run: an upper bound, the tightest so far")
    return Verdict(
        correct=int(run.ledger.robust.sum()),
        total=run.total,
        clean=int(run.ledger.right.sum()),
        norm=run.threat.norm,
        eps=run.threat.eps,
        suite=run.suite.name,
        trust=max(worst, key=order.index),
        reasons=tuple(reasons),
        flags=flags,
        complete=run.complete,
        escalated=run.escalated,
        protocol=run.suite.protocol,
    )


def collapsed(run: Runner, names: Sequence[str]) -> str:
    """A sentence if the model gives one class to almost every image, but the data do not. Else an empty text."""
    answers, labels = (torch.bincount(column, minlength=len(names)) for column in (run.ledger.clean, run.ledger.label))
    most = int(answers.argmax())
    share, expected = int(answers[most]) / run.total, int(labels[most]) / run.total
    if run.total < COLLAPSE_SEEN or share < COLLAPSE or share - expected < COLLAPSE_AHEAD:
        return ""
    return f'the model answers "{names[most]}" for {share:.0%} of the images: it has collapsed'


def doubtful(run: Runner, findings: Findings) -> bool:
    """Whether any flag is raised so far."""
    return any(one.raised for one in (*findings.flags, *doubts(run, findings)))


def doubts(run: Runner, findings: Findings) -> list[Flag]:
    """The flags that come from the stages, not from the pilot."""
    found = []
    sentinels = {stage.name for stage in run.suite.stages if stage.role == "sentinel"}
    watch = [record for record in run.records if record.name in sentinels]
    if watch:
        tried, broken = watch[0].attacked, sum(record.broken for record in watch)
        found.append(
            flag(
                "sentinel broken",
                broken,
                0,
                "sound",
                f"AutoAttack's own attacks broke {broken} of {tried} robust samples drawn at random; where they "
                "break one, every robust sample is attacked at full cost",
            )
        )
    for record in run.records:
        share = run.outside.get(record.name, 0) / max(record.attacked, 1)
        if share > OUTSIDE:
            found.append(
                flag(
                    "points outside",
                    share,
                    OUTSIDE,
                    "suspect",
                    f"{share:.0%} of the points that {record.name} gave lie outside the threat model and could not "
                    "be counted: it does not know the rules",
                )
            )
        share = run.refuted.get(record.name, 0) / max(record.attacked, 1)
        limit = REFUTED + 1 / max(record.attacked, 1)
        if share > limit:
            found.append(
                flag(
                    "successes refuted",
                    share,
                    limit,
                    "suspect",
                    f"for {share:.0%} of its samples {record.name} saw a success that the model, asked again in full "
                    "precision, does not confirm: its answers change",
                )
            )
    targeted = [record.broken for record in run.records if record.settings["attack"] == "MultiTargeted"]
    if targeted and not run.suite.protocol:  # in a protocol, targeted attacks also get samples that others broke
        share = sum(targeted) / max(run.total, 1)
        found.append(
            flag(
                "targeted ahead",
                share,
                TARGETED_AHEAD,
                "sound",
                f"targeted attacks broke {share:.1%} of all samples after untargeted ones had left them",
            )
        )
    if not any(stage.role in ("pilot", "escalation") for stage in run.suite.stages):
        share = int(run.ledger.robust[findings.broken].sum()) / pilot_size(run.total)
        if share > PILOT_AHEAD:
            found.append(
                flag(
                    "pilot stronger",
                    share,
                    PILOT_AHEAD,
                    "suspect",
                    f"{share:.0%} of the samples that checks were made on are broken by the checks' own attacks, "
                    "which this suite does not count, and by none of its own",
                )
            )
    right = max(int(run.ledger.right.sum()), 1)
    share, limit = int(run.unclear.sum()) / right, UNCLEAR + 1 / right
    if share > limit:
        found.append(
            flag(
                "wrong by a rounding",
                share,
                limit,
                "suspect",
                f"for {share:.0%} of the samples the model was wrong at a point, but by no more than what sums of such "
                "numbers differ by; those points were not counted",
            )
        )
    if run.nonfinite:
        found.append(
            flag(
                "logits not finite",
                run.nonfinite,
                0,
                "invalid",
                f"the model gave NaN or infinite logits at {run.nonfinite} points inside the threat model; what "
                "it answers there is not defined, and they were not counted",
            )
        )
    return found


def scores(run: Runner) -> tuple[Score, ...]:
    """The scores: clean, after each stage (in a protocol: under each attack), and the worst case."""
    return scores_of(
        run.records,
        run.total,
        clean=int(run.ledger.right.sum()),
        robust=int(run.ledger.robust.sum()),
        clean_seconds=run.clean_seconds,
    )


def notes(run: Runner, findings: Findings) -> list[str]:
    """Notes on points that were not counted, and on what the time cut short."""
    outside = [
        f"{name}: {count} points outside the threat model were not counted"
        for name, count in run.outside.items()
        if count
    ]
    before = "curve" if run.suite.protocol else "pilot"
    cut = [
        f"{name}: the time ran out after {done} of {count} samples"
        + ("" if name == "curve" else "; the others count as robust")
        for name, (done, count) in {**run.cut, **({before: findings.cut} if findings.cut else {})}.items()
    ]
    return outside + cut


def examples(run: Runner, count: int) -> tuple[Example, ...]:
    """The gallery: the first samples that the model got right, each with its point of the smallest margin."""
    ledger, found = run.ledger, []
    for row in ledger.right.nonzero()[:count, 0].tolist():
        x, _ = run.images(torch.tensor([row]))
        tried = int(ledger.tried[row])
        found.append(
            Example(
                index=row,
                label=int(ledger.label[row]),
                clean_prediction=int(ledger.clean[row]),
                adversarial_prediction=int(ledger.guess[row]),
                attack=run.suite.stages[tried].name if tried >= 0 else "",
                clean=x[0].cpu(),
                adversarial=ledger.points(torch.tensor([row]), x)[0].cpu(),
            )
        )
    return tuple(found)
