"""What a suite's run leaves: what is kept for the verdict, the scores, and the gallery."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from steelman.evaluation.findings import Findings
from steelman.evaluation.result import Example, Score, scores_of
from steelman.evaluation.runner import Runner
from steelman.evaluation.verdict import Kept


def kept_of(run: Runner, findings: Findings, names: Sequence[str] = (), *, random: bool = False) -> Kept:
    """What a run keeps so far. `names` are the names of the classes."""
    return Kept(
        suite=run.suite.name,
        protocol=run.suite.protocol,
        roles={stage.name: stage.role for stage in run.suite.stages},
        threat=run.threat,
        classes=tuple(names),
        samples=run.ledger.columns(),
        stages=tuple(run.records),
        signs={} if run.suite.protocol else findings.columns,
        curve=findings.curve,
        random=random,
        grain=run.grain,
        escalated=run.escalated,
        cut=run.cut,
        look_cut=findings.cut,
    )


def scores(run: Runner) -> tuple[Score, ...]:
    """The scores: clean, after each stage (in a protocol: under each attack), and the worst case."""
    return scores_of(
        run.records,
        run.total,
        clean=int(run.ledger.right.sum()),
        robust=int(run.ledger.robust.sum()),
        clean_seconds=run.clean_seconds,
    )


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
