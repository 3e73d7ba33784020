"""Evaluation: run attacks, verify every claim, keep the evidence."""

from steelman.evaluation.harness import DEFAULT_ATTACKS, evaluate
from steelman.evaluation.result import Evaluation, Score, interval

__all__ = ["DEFAULT_ATTACKS", "Evaluation", "Score", "evaluate", "interval"]
