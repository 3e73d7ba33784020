"""Tables for the terminal and one self-contained HTML page, from evaluations and training runs."""

from steelman.report.entry import Entry

__all__ = ["Entry"]
