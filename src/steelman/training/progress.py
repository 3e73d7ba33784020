"""What a run shows and records while it trains: a live line with an ETA, JSON lines, TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from steelman.files import write_atomic


class Recorder:
    """Shows steps and epochs on a console and appends each epoch to ``metrics.jsonl`` and TensorBoard."""

    def __init__(self, folder: Path, console: Console, history: list[dict[str, Any]], total: int, done: int) -> None:
        self.path, self.console = folder / "metrics.jsonl", console
        # After a resume the file may hold an epoch that the checkpoint does not: the checkpoint is right.
        write_atomic(self.path, "".join(json.dumps(epoch) + "\n" for epoch in history).encode())
        self.board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.console.print("TensorBoard is not installed; curves go to metrics.jsonl alone", style="dim")
        else:
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=len(history) + 1)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("training", total=total, completed=done, loss="")
        self.bar.start()

    def step(self, epoch: int, loss: float) -> None:
        self.bar.update(self.task, advance=1, description=f"epoch {epoch}", loss=f"loss {loss:.4f}")

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
        self.bar.stop()
        if self.board is not None:
            self.board.close()


def read_history(folder: Path) -> tuple[dict[str, Any], ...]:
    """A run's epochs; a last line cut off by a crash is left out."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return ()
    epochs = []
    for line in path.read_text().splitlines():
        try:
            epochs.append(json.loads(line))
        except ValueError:
            break
    return tuple(epochs)
