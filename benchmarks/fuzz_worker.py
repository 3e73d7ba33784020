"""The process that tries the fuzzer's inputs, and the handle to it. It is used again until it dies or hangs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import resource
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

ACCEPTED, REFUSED, TRACEBACK, HANG, MEMORY = KINDS = ("accepted", "refused", "traceback", "hang", "memory")
SECONDS, BYTES = 20, 2 << 30
FULL = ("can't allocate", "not enough memory", "MemoryError")
WORN_OUT = 2000  # inputs for one process: what libraries leak should not count as the next input's memory


@dataclasses.dataclass(frozen=True)
class Answer:
    """What became of an input; of a failure, its place in the code, and the whole traceback."""

    kind: str
    place: str = ""
    text: str = ""


class Worker:
    """A handle to the process. A dead or hanging process is replaced."""

    def __init__(self, templates: Path) -> None:
        self.templates, self.done = templates, 0
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, reader: str, content: bytes) -> Answer:
        """Try an input."""
        if self.process is None or self.done >= WORN_OUT:
            self._start()
        assert self.process is not None
        self.done += 1
        started = time.monotonic()
        try:
            _send(self.process.stdin, json.dumps(reader).encode(), content)
            answer = self._receive(started + SECONDS)
        except (BrokenPipeError, EOFError):
            code = self.process.wait()
            self.close()
            return Answer(TRACEBACK, f"the process died, code {code}", f"exit code {code}")
        except TimeoutError:
            self.close()
            return Answer(HANG, "the watchdog", f"no answer in {SECONDS} s")
        return Answer(**json.loads(answer))

    def _start(self) -> None:
        self.close()
        command = [sys.executable, __file__, str(self.templates)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "STEELMAN_DATA": str(self.templates / "data")}
        self.process, self.done = (
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
            ),
            0,
        )
        self._receive(time.monotonic() + 120)

    def _receive(self, until: float) -> bytes:
        assert self.process is not None
        assert self.process.stdout is not None
        content, wanted, number = b"", 4, self.process.stdout.fileno()
        while len(content) < wanted:
            left = until - time.monotonic()
            if left <= 0 or not select.select([number], [], [], left)[0]:
                raise TimeoutError
            part = os.read(number, 1 << 20)
            if not part:
                raise EOFError
            content += part
            if len(content) >= 4:
                wanted = 4 + struct.unpack("<I", content[:4])[0]
        return content[4:]

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
        self.process = None


def _send(pipe: object, *parts: bytes) -> None:
    assert isinstance(pipe, io.BufferedIOBase)
    for part in parts:
        pipe.write(struct.pack("<I", len(part)) + part)
    pipe.flush()


def _status(name: str) -> int:
    """A size from the kernel's record of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def attempt(reader: object, content: bytes, templates: Path) -> Answer:
    """Give an input to a reader in an empty folder, and say what became of it."""
    from steelman.errors import UserError

    Path("/proc/self/clear_refs").write_text("5")  # sets the peak of the memory back
    before = _status("VmRSS")
    with tempfile.TemporaryDirectory(dir=templates, prefix="try-") as scratch:
        os.chdir(scratch)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader.read(content, Path(scratch), templates)  # type: ignore[attr-defined]
            answer = Answer(ACCEPTED)
        except UserError as error:
            answer = Answer(REFUSED, text=str(error))
            if not str(error).strip() or len(str(error)) > 4000:
                answer = Answer(TRACEBACK, "an empty or endless sentence", str(error)[:4000])
            # A sentence may quote the input, which may have these words too.
            if any(word in str(error) and word.encode() not in content for word in FULL):
                answer = Answer(MEMORY, _place(error), traceback.format_exc())
        except MemoryError as error:
            answer = Answer(MEMORY, _place(error), traceback.format_exc())
        except BaseException as error:
            kind = MEMORY if "allocate" in str(error) else TRACEBACK
            answer = Answer(kind, _place(error), traceback.format_exc())
        finally:
            os.chdir(templates)
    if _status("VmHWM") - before > BYTES:
        answer = Answer(MEMORY, "the peak of the memory", answer.text or f"{_status('VmHWM') - before:,} bytes")
    return answer


def _place(error: BaseException) -> str:
    """The last line of steelman's own code in a traceback, and the kind of the error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/steelman/" in frame.filename] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} {type(error).__name__}" if own else type(error).__name__


def main(templates: Path) -> None:
    """Answer inputs from the standard input until it ends."""
    answers, questions = os.fdopen(os.dup(1), "wb"), os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # what steelman prints is no answer
    import fuzz_readers

    fuzz_readers.warm_up(templates)
    most = _status("VmSize") + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _send(answers, b"ready")
    while head := questions.read(4):
        name = json.loads(questions.read(struct.unpack("<I", head)[0]))
        content = questions.read(struct.unpack("<I", questions.read(4))[0])
        answer = attempt(fuzz_readers.READERS[name], content, templates)
        _send(answers, json.dumps(dataclasses.asdict(answer)).encode())
    shutil.rmtree(templates / "scratch", ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
