"""Checks of arguments: a wrong kind of value is one sentence, before anything is computed or written."""

from __future__ import annotations

import errno
import inspect
import math
import os
import unicodedata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steelman.errors import UserError, shown

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_LETTERS = 1000  # of a name: it stands in sentences


def path_of(name: str, value: object) -> Path:
    """A path.

    >>> path_of("out", 5)
    Traceback (most recent call last):
    ...
    steelman.errors.UserError: out: expected a path, got 5
    """
    if not isinstance(value, str | os.PathLike) or isinstance(value, bytes):
        raise UserError(f"{name}: expected a path, got {shown(value)}")
    try:
        path = Path(value)
        path.stat()
    except FileNotFoundError:
        return path
    except (OSError, ValueError, TypeError) as error:  # too long, with a NUL character, or of bytes
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            return path
        raise UserError(f"{name}: expected a path, got {shown(value)}") from None
    return path


def home_of(name: str, value: object) -> Path:
    """A path, with ``~`` as the user's home directory."""
    path = path_of(name, value)
    try:
        return path.expanduser()
    except RuntimeError:
        raise UserError(f"{name}: expected a path, got {shown(str(path))}: nobody has this home directory") from None


def text_of(name: str, value: object) -> str:
    """A text."""
    if not isinstance(value, str):
        raise UserError(f"{name}: expected a text, got {shown(value)}")
    return value


def check_printable(name: str, text: str) -> None:
    r"""Refuse a name with characters that steer a terminal, or that no file can hold, and one without end.

    >>> check_printable("name", "a\nb")
    Traceback (most recent call last):
    ...
    steelman.errors.UserError: name: expected a text of printable characters, got 'a\nb'
    """
    if len(text) > MOST_LETTERS:
        raise UserError(f"{name}: expected at most {MOST_LETTERS} characters, got {len(text):,}")
    if not printable(text):
        raise UserError(f"{name}: expected a text of printable characters, got {shown(text)}")


def printable(text: str) -> bool:
    """Whether a text has no characters that steer a terminal, or that no file can hold."""
    return all(unicodedata.category(character) not in ("Cc", "Cs") for character in text)


def number_of(name: str, value: object, expected: str = "a number") -> float:
    """A finite number. `expected` says which one."""
    try:
        found = float(value) if not isinstance(value, str | bytes) else math.nan  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        found = math.nan
    if not math.isfinite(found):
        raise UserError(f"{name}: expected {expected}, got {shown(value)}")
    return found


def model_of(name: str, value: object) -> nn.Module:
    """A module with weights."""
    if not isinstance(value, nn.Module):
        hint = "; make one first" if isinstance(value, type) and issubclass(value, nn.Module) else ""
        got = value.__name__ if isinstance(value, type) else type(value).__name__
        raise UserError(f"{name}: expected a torch.nn.Module, got {got}{hint}")
    if any(one.is_meta for one in (*value.parameters(), *value.buffers())):
        raise UserError(f"{name}: the model has no weights: they are on the meta device; make it on another device")
    return value


def check_call(name: str, value: object, expected: str, *given: str, **named: str) -> None:
    """Refuse what cannot be called with such arguments."""
    fits = callable(value) and not isinstance(value, type)
    try:
        if fits:
            inspect.signature(value).bind(*given, **named)  # type: ignore[arg-type]
    except TypeError:
        fits = False
    except ValueError:  # some functions written in C do not tell their arguments
        pass
    if not fits:
        raise UserError(f"{name}: expected {expected}, got {shown(value)}")


def device_from(name: str, value: Any) -> torch.device | None:
    """A device, from a device, from a text such as "cuda:0", or None."""
    if value is None:
        return None
    try:
        found = torch.device(value)
        torch.empty(0, device=found)
    except (RuntimeError, TypeError, AssertionError, ValueError, AttributeError):
        found = torch.device("meta")
    if found.type == "meta":
        raise UserError(f"{name}: expected a device of this machine, such as 'cpu' or 'cuda:0', got {shown(value)}")
    return found


def check_plain(what: str, value: Tensor) -> None:
    """Refuse tensors that nothing can be computed with."""
    kind = ""
    if value.is_meta:
        kind = "meta"
    elif value.is_quantized:
        kind = "quantised"
    elif value.is_nested:
        kind = "nested"
    elif value.layout != torch.strided:
        kind = "sparse"
    elif value.is_complex() or (value.is_floating_point() and value.dtype not in FLOATS):
        kind = str(value.dtype)
    if kind:
        raise UserError(f"expected {what} as a plain tensor of numbers, got a {kind} one")
