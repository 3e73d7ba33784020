"""Readers for JSON and YAML of unknown origin: size, depth and numbers are limited before anything is built.

A file of a stranger can be wrong in any way. Without these limits, a few hundred bytes can fill the memory or crash the
interpreter. Every refusal is one sentence.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pydantic
import yaml

from steelman.errors import UserError, shortened, shown

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T", bound=pydantic.BaseModel)

JSON_BYTES = 1 << 24
YAML_BYTES = 1 << 17
DEEPEST = 64
DIGITS = 400  # no number of ours is longer; Python takes quadratic time for a long one
# Strings are matched whole, so that a bracket inside one is not counted. Without the end of the text as an alternative,
# each quote of an unfinished string would be tried again, in quadratic time.
_JSON_PARTS = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)
_BASE: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C version is several times as fast; not all have it


class _RefusedError(Exception):
    """What is wrong, without the name of the file."""


def read_bytes(path: Path, *, what: str = "", most_bytes: int = JSON_BYTES) -> bytes:
    """The content of a file. A folder, a pipe, a device or a file above `most_bytes` is refused before it is read."""
    what = what or str(path)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for, and a device may have no end
            raise UserError(f"{what}: expected a file, got a {'folder' if stat.S_ISDIR(found.st_mode) else 'device'}")
        if found.st_size > most_bytes:
            raise UserError(f"{what}: expected at most {most_bytes:,} bytes, got {found.st_size:,}")
        with path.open("rb") as file:
            content = file.read(found.st_size + 1)  # not more: Python sets aside as many bytes as it is asked for
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{what}: there is no such file") from None
    except ValueError as error:  # a path with a NUL character
        if isinstance(error, UserError):
            raise
        raise UserError(f"{what!r} cannot be a file's name") from None
    if len(content) > found.st_size:
        raise UserError(f"{what}: it grew while it was read")
    return content


def read_json(
    source: Path | bytes | str, *, what: str = "", most_bytes: int = JSON_BYTES, deepest: int = DEEPEST
) -> Any:
    """The value of a JSON file, or of JSON given as bytes or text.

    It refuses: more than `most_bytes`, lists and mappings nested more than `deepest` times, a key twice in a mapping,
    whole numbers of more than 64 bits, NaN, Infinity, NUL characters and unpaired surrogates.

    `what` names the source in errors; by default it is the path.
    """
    what, text = _text(source, what, most_bytes)
    try:
        _check_depth(text, deepest)
        value = json.loads(
            text,
            object_pairs_hook=_pairs,
            parse_int=_whole,
            parse_float=_fraction,
            parse_constant=_constant,
        )
        if "\\u" in text:
            _check_texts(value)
    except _RefusedError as error:
        raise UserError(f"{what}: {error}") from None
    except ValueError as error:
        raise UserError(f"{what}: not JSON ({error})") from None
    return value


def read_yaml(
    source: Path | bytes | str, *, what: str = "", most_bytes: int = YAML_BYTES, deepest: int = DEEPEST
) -> Any:
    """The value of a YAML file, or of YAML given as bytes or text.

    It refuses: more than `most_bytes`, lists and mappings nested more than `deepest` times, aliases, tags, a key twice
    in a mapping, whole numbers of more than 64 bits, NaN, infinity and NUL characters.

    `what` names the source in errors; by default it is the path.
    """
    what, text = _text(source, what, most_bytes)
    try:
        _check_events(text, deepest)
        return yaml.load(text, _Loader)
    except _RefusedError as error:
        raise UserError(f"{what}: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{what} is not YAML: {_reason(error)}") from None
    except (ValueError, OverflowError) as error:  # an impossible date
        raise UserError(f"{what} is not YAML: {error}") from None


def read_tensors(content: bytes, *, what: str, most_header: int = JSON_BYTES) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Its header is JSON, which is limited like any other: a key that comes twice would be two tensors in one name.
    """
    from safetensors import SafetensorError  # here, because the shell's completion reads recipes without torch
    from safetensors.torch import load

    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > len(content) - 8:
        raise UserError(f"{what}: expected a safetensors file, got {len(content):,} bytes that are none")
    header = read_json(content[8 : 8 + size], what=what, most_bytes=most_header)
    if not isinstance(header, dict):
        raise UserError(f"{what}: expected a mapping as the header, got {type(header).__name__}")
    try:
        return load(content)
    except (SafetensorError, ValueError, TypeError, LookupError, RuntimeError, OverflowError) as error:
        raise UserError(f"{what}: {str(error)[:200]}") from None


def checked(schema: type[T], value: object, *, what: str) -> T:
    """`value` as the pydantic model `schema`. The error is one sentence on the first field that is wrong."""
    try:
        return schema.model_validate(value)
    except pydantic.ValidationError as error:
        raise UserError(f"{what}: {problem(error)}") from None


def problem(error: pydantic.ValidationError) -> str:
    """One sentence on the first problem of a validation: the field, what was expected, what came."""
    first = error.errors(include_url=False)[0]
    place = ".".join(shortened(str(part)) for part in first["loc"])
    count = error.error_count()
    more = f" (and {count - 1} more)" if count > 1 else ""
    if first["type"] == "missing":
        return f"{place} is missing{more}"
    if first["type"] == "extra_forbidden":
        return f"{place} is no key of this file{more}"
    text = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return f"{place + ': ' if place else ''}{text[:1].lower()}{text[1:]}, got {shown(first['input'])}{more}"


def _text(source: Path | bytes | str, what: str, most_bytes: int) -> tuple[str, str]:
    """The name and the text of a source."""
    if isinstance(source, Path):
        what = what or str(source)
        source = read_bytes(source, what=what, most_bytes=most_bytes)
    what = what or "the text"
    if len(source) > most_bytes:
        raise UserError(f"{what}: expected at most {most_bytes:,} bytes, got {len(source):,}")
    if isinstance(source, str):
        return what, source
    try:
        return what, source.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{what}: expected text in UTF-8, got byte {source[error.start]} at {error.start}") from None


def _check_depth(text: str, deepest: int) -> None:
    """Refuse deep JSON before it is parsed. The parser calls itself at each bracket."""
    depth = 0
    for part in _JSON_PARTS.finditer(text):
        one = text[part.start()]
        depth += (one in "[{") - (one in "]}")
        if depth > deepest:
            raise _RefusedError(f"expected lists and mappings nested at most {deepest} times, got more")


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _RefusedError(f"expected each key once in a mapping, got {shown(twice)} twice")
    return made


def _whole(text: str) -> int:
    if len(text) > 21 or not -(2**63) <= (value := int(text)) < 2**64:
        raise _RefusedError(f"expected whole numbers of at most 64 bits, got {shown(text)}")
    return value


def _fraction(text: str) -> float:
    if len(text) > DIGITS or not math.isfinite(value := float(text)):
        raise _RefusedError(f"expected numbers that fit 64 bits, got {shown(text)}")
    return value


def _constant(text: str) -> NoReturn:
    raise _RefusedError(f"expected finite numbers, got {text}")


def _check_texts(value: object) -> None:
    """Refuse what no file and no terminal can take: NUL, and unpaired surrogates."""
    for text in _texts(value):
        if "\0" in text or any("\ud800" <= one <= "\udfff" for one in text):
            raise _RefusedError(f"expected text without NUL and without unpaired surrogates, got {shown(text)}")


def _texts(value: object) -> Iterator[str]:
    """Every text in a value from JSON, keys included. The depth is limited already."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _check_events(text: str, deepest: int) -> None:
    """Refuse deep YAML, aliases and tags before anything is built.

    The events come one by one. The composer, which builds the nodes, calls itself at each bracket and can crash.
    """
    depth = 0
    for event in yaml.parse(text, _BASE):
        line = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):  # a few lines of aliases of aliases would become gigabytes
            raise _RefusedError(f"{line}: expected the value itself, got the alias *{event.anchor}")
        if getattr(event, "tag", None) is not None:
            raise _RefusedError(f"{line}: expected a value without a tag, got {shown(event.tag)}")
        if isinstance(event, yaml.ScalarEvent) and "\0" in event.value:
            raise _RefusedError(f"{line}: expected text without NUL characters, got {shown(event.value)}")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > deepest:
            raise _RefusedError(f"{line}: expected lists and mappings nested at most {deepest} times, got more")


def _reason(error: yaml.YAMLError) -> str:
    """The reason of a YAML error in one line. PyYAML's own text has several."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark is not None else ""
    said = getattr(error, "problem", None) or str(error) or type(error).__name__
    return where + str(said).splitlines()[0]


class _Loader(_BASE):  # type: ignore[misc]
    """The safe loader, which also refuses keys that come twice and numbers that are too large."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """PyYAML calls this for each mapping. Its own version merges what is below the key ``<<``."""
        seen = set()
        for key, _ in node.value:
            line = f"line {key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode):
                raise _RefusedError(f"{line}: expected a text as the key, got a list or a mapping")
            if key.tag == "tag:yaml.org,2002:merge":
                raise _RefusedError(f"{line}: expected the keys themselves, got <<")
            name = self.construct_object(key)
            if not isinstance(name, str | int | float | None):
                raise _RefusedError(f"{line}: expected a text as the key, got {shown(str(name))}")
            if name in seen:
                raise _RefusedError(f"{line}: expected each key once in a mapping, got {shown(name)} twice")
            seen.add(name)

    def number(self, node: yaml.ScalarNode) -> int | float:
        """A number with at most 64 bits."""
        line = f"line {node.start_mark.line + 1}"
        if len(node.value) > DIGITS:
            raise _RefusedError(f"{line}: expected a number that fits 64 bits, got {shown(node.value)}")
        whole = node.tag.endswith(":int")
        value: int | float = self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)
        if not math.isfinite(value) or (whole and not -(2**63) <= value < 2**64):
            raise _RefusedError(f"{line}: expected a finite number that fits 64 bits, got {shown(node.value)}")
        return value


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.number)
