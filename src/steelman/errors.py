"""The errors that a user sees."""

from __future__ import annotations

import difflib
import reprlib
import shlex
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

LONGEST = 150  # characters of a value in an error
MOST_CHOICES = 30  # in an error; more would hide what they are the choices of


class UserError(ValueError):
    """A mistake that the user can correct. The command line prints it without a traceback."""


def resume_command(folder: Path) -> str:
    """The command that resumes a run. For a run of ``fit``, it is a text that describes the call.

    >>> resume_command(Path("my runs/a"))
    "steelman resume 'my runs/a'"
    """
    if (folder / "fit.json").is_file():
        return "the same call of steelman.fit"
    module = _own_module(folder / "recipe.yaml")
    return f"steelman resume {shlex.quote(str(folder))}" + (f" --allow-import {module}" if module else "")


def unfinished(folder: Path) -> str:
    """How to go on with a run that is not finished. An empty text for any other folder."""
    begun = any((folder / name).is_file() for name in ("recipe.yaml", "fit.json"))
    if not begun or (folder / "run.json").is_file():
        return ""
    return f"the run is not finished; go on with: {resume_command(folder)}"


def _own_module(path: Path) -> str:
    """The module of the user's own model in a recipe, or an empty text."""
    from steelman.bounded import read_yaml  # here, because it imports this file

    try:
        model = read_yaml(path)["model"]
        name = str(model if isinstance(model, str) else model["name"])
    except (UserError, OSError, LookupError, TypeError):
        return ""
    module, colon, _ = name.partition(":")
    return module if colon else ""


class TrainingInterruptedError(Exception):
    """A signal stopped the training. Everything is saved."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        super().__init__(f"{signal.Signals(number).name}: everything is saved; go on with: {resume_command(folder)}")


def unknown(
    kind: str, got: object, choices: Iterable[str], *, meant: Sequence[str] = (), listed: str = ""
) -> UserError:
    """The error for a name that is not among the `choices`.

    `meant` are names to ask for, instead of the choice that is most like the given name. `listed` is the command that
    lists the choices: of very many, only those like the given name are printed.

    >>> print(unknown("attack", "pdg", ["fgsm", "pgd"]))
    unknown attack 'pdg' (did you mean 'pgd'?); choices: fgsm, pgd
    """
    known = sorted(choices)
    small = {name.lower(): name for name in known}  # without it, PGD would be like no name at all
    close = [small[name] for name in difflib.get_close_matches(str(got)[:100].lower(), small)]
    names = " or ".join(map(repr, meant or close[:1]))
    hint = f" (did you mean {names}?)" if names else ""
    if listed and len(known) > MOST_CHOICES:
        known = [*close, f"and {len(known) - len(close)} more: {listed}" if close else f"{len(known)} names: {listed}"]
    return UserError(f"unknown {kind} {shown(got)}{hint}; choices: {', '.join(known) or 'none'}")


def shown(value: object) -> str:
    """A value in an error. A long one is shortened.

    >>> len(shown(["x" * 10_000] * 100)) < 200
    True
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 60
    text = " ".join(line.strip() for line in short.repr(value).splitlines())
    return shortened(text)


def shortened(text: str) -> str:
    """A text in an error: its first characters, if it is long."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
