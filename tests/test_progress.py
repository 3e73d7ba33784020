"""Progress is shown where it was asked for: a bar on a terminal, elsewhere a plain line at most every 30 seconds."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from steelman import progress
from steelman.attacks import PGD
from steelman.evaluation.evaluate import evaluate
from steelman.progress import EVERY, Ticker, showing
from steelman.threat import ThreatModel
from steelman.training.progress import Recorder
from tests.evidence_helpers import EPS, a_model, the_data


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("steelman.progress.time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def a_console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=100), file


def test_a_plain_line_now_and_then(clock: list[float]) -> None:
    console, file = a_console(terminal=False)
    with showing(console), Ticker("[red]") as tell:
        for second in range(100):
            tell("targets", 20 * second, 2000, note="loss 0.5" if second > 50 else "")
            clock[0] += 1
    assert file.getvalue().splitlines() == [
        "[red]: targets, 600 of 2,000 samples",
        "[red]: targets, 1,200 of 2,000 samples, loss 0.5",
        "[red]: targets, 1,800 of 2,000 samples, loss 0.5",
    ]
    assert EVERY == 30


def test_what_is_short_says_nothing_and_so_does_what_nobody_watches(clock: list[float]) -> None:
    console, file = a_console(terminal=False)
    with showing(console), Ticker("fast") as tell:
        tell("targets", 1, 2)
    with Ticker("fast") as tell:
        clock[0] += 1000
        tell("targets", 1, 2)
    assert file.getvalue() == ""


def test_on_a_terminal_it_is_a_bar_that_is_gone_at_the_end() -> None:
    console, file = a_console(terminal=True)
    with showing(console), Ticker("fast", "steps") as tell:
        tell("targets", 512, 2000, note="loss 0.5")
        assert tell._bar is not None
        tell._bar.refresh()
        shown = file.getvalue()
        tell("restarts", 0, 0)
    for words in ("fast: targets", "512/2000", "loss 0.5"):
        assert words in shown
    assert "\x1b[2K" in file.getvalue(), "the line is cleared"


@pytest.mark.parametrize("done", [0, 5])
def test_training_says_how_far_it_is_inside_an_epoch_too(clock: list[float], tmp_path: Path, done: int) -> None:
    console, file = a_console(terminal=False)
    recorder = Recorder(tmp_path, console, [], 400, done)
    for step in range(40):
        recorder.step(1 + step // 20, 2 - step / 100)
        clock[0] += 2
    recorder.close()
    assert file.getvalue().splitlines() == [
        f"training: epoch 1, {16 + done} of 400 steps, loss 1.8500",
        f"training: epoch 2, {31 + done} of 400 steps, loss 1.7000",
    ]


def test_on_a_terminal_an_epoch_does_not_begin_the_bar_anew(tmp_path: Path) -> None:
    console, file = a_console(terminal=True)
    recorder = Recorder(tmp_path, console, [], 400, 7)
    bar = recorder.tell._bar
    assert bar is not None
    began = bar.tasks[0].start_time
    for epoch in (1, 2):
        recorder.step(epoch, 0.5)
    bar.refresh()
    recorder.close()
    assert bar.tasks[0].start_time == began
    for words in ("training: epoch 2", "9/400", "loss 0.5"):
        assert words in file.getvalue()


def test_of_two_blocks_the_inner_one_holds_and_it_ends() -> None:
    outer, inner = (a_console(terminal=False)[0] for _ in range(2))
    with showing(outer):
        with contextlib.suppress(KeyboardInterrupt), showing(inner):
            assert Ticker("a")._console is inner
            raise KeyboardInterrupt
        with showing(None):
            assert Ticker("a")._console is None
        assert Ticker("a")._console is outer
    assert Ticker("a")._console is None


def test_an_evaluation_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    console, file = a_console(terminal=False)
    threat, attacks = ThreatModel(eps=EPS), {"climb": PGD(steps=1)}
    evaluate(a_model(), the_data(), None, threat, attacks)
    with showing(console):
        evaluate(a_model(), the_data(), None, threat, attacks, batch_size=20)
    lines = file.getvalue().splitlines()
    assert "custom: clean, 20 of 48 samples" in lines
    assert "custom: climb, 42 of 42 samples" in lines
    assert capsys.readouterr() == ("", "")
