"""Evaluation: run attacks, verify every claim, keep the evidence."""

from steelman.evaluation.harness import DEFAULT_ATTACKS, evaluate
from steelman.evaluation.result import Evaluation, Score, Verdict, interval
from steelman.evaluation.suites import SUITES, Stage, Suite
from steelman.evaluation.verify import verify

__all__ = [
    "DEFAULT_ATTACKS",
    "SUITES",
    "Evaluation",
    "Score",
    "Stage",
    "Suite",
    "Verdict",
    "evaluate",
    "interval",
    "verify",
]
