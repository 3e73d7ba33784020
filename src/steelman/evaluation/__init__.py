"""Evaluation: run attacks, verify every claim, keep what was found."""
