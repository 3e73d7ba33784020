"""Reports on evaluations and training runs: tables for the terminal, and one self-contained HTML page."""

from steelman.report.entry import Entry

__all__ = ["Entry"]
