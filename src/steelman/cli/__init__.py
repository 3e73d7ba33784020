"""The command line. `commands` and `evidence` hold the commands; the other files hold the work behind them."""

from steelman.cli.commands import app, main

__all__ = ["app", "main"]
