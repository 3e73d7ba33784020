"""What a run shows and records while it trains: a bar or plain lines, JSON lines, TensorBoard."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from steelman.files import write_atomic
from steelman.progress import Ticker, showing


class Recorder:
    """Shows steps and epochs on a console and appends each epoch to ``metrics.jsonl`` and TensorBoard.

    `total` is how many steps the whole training has, and `done` how many of them are done already.
    """

    def __init__(self, folder: Path, console: Console, history: list[dict[str, Any]], total: int, done: int) -> None:
        self.path, self.console = folder / "metrics.jsonl", console
        # After a resume the file may hold an epoch that the checkpoint does not: the checkpoint is right.
        write_atomic(self.path, "".join(json.dumps(epoch) + "\n" for epoch in history).encode())
        self.board: Any = None
        self._open = contextlib.ExitStack()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.console.print("TensorBoard is not installed; curves go to metrics.jsonl alone", style="dim")
        else:
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=len(history) + 1)
            self._open.callback(self.board.close)
        self.total, self.done = total, done
        with showing(console):
            self.tell = self._open.enter_context(Ticker("training", "steps", one_clock=True))

    def step(self, epoch: int, loss: float) -> None:
        self.done += 1
        self.tell(f"epoch {epoch}", self.done, self.total, f"loss {loss:.4f}")

    def epoch(self, metrics: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        if self.board is not None:
            for name, value in metrics.items():
                if name not in ("epoch", "step"):
                    self.board.add_scalar(name, value, metrics["epoch"])
            self.board.flush()
        self.console.print(
            f"epoch {metrics['epoch']:>3}  loss {metrics['loss']:.4f}  train {metrics['train_accuracy']:.1%}  "
            f"validation clean {metrics['validation_clean']:.1%}  robust {metrics['validation_robust']:.1%}  "
            f"lr {metrics['lr']:.2g}  eps {metrics['eps']:.4g}  {metrics['seconds']:.1f} s",
            highlight=False,
            soft_wrap=True,
        )

    def close(self) -> None:
        self._open.close()
