"""The command line: `commands` and `evidence` hold the commands, the other files what they do."""

from steelman.cli.commands import app, main

__all__ = ["app", "main"]
