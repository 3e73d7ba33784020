"""Evaluation: run attacks, check every success, and keep the evidence."""
