"""Train image classifiers to withstand adversaries, and tell the truth about how well they do."""

__version__ = "0.1.0"
