"""Hostile JSON and YAML is refused in one sentence, at once and in little memory."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from steelman.bounded import JSON_BYTES, YAML_BYTES, read_bytes, read_json, read_yaml
from steelman.errors import UserError

JSON = {
    '{"a": 1, "b": 2, "a": 3}': "each key once in a mapping, got 'a' twice",
    '{"a": {"b": [1, NaN]}}': "expected finite numbers, got NaN",
    "[Infinity]": "expected finite numbers, got Infinity",
    "1e999": "fit 64 bits, got '1e999'",
    "9" * 5000: "whole numbers of at most 64 bits",
    str(2**64): "whole numbers of at most 64 bits",
    "1." + "1" * 5000: "fit 64 bits",
    "[" * 100_000: "nested at most 64 times",
    '{"a":' * 65 + "1" + "}" * 65: "nested at most 64 times",
    '"\\ud800"': "without unpaired surrogates",
    '{"\\u0000": 1}': "text without NUL",
    '"' + '\\"' * 100_000: "not JSON (Unterminated string",
    "": "not JSON (Expecting value",
}
YAML = {
    "a: 1\nb: 2\na: 3": "line 3: expected each key once in a mapping, got 'a' twice",
    "a: 1\n'a': 3": "line 2: expected each key once in a mapping, got 'a' twice",
    "a: &x 1\nb: *x": "line 2: expected the value itself, got the alias *x",
    "a:\n  <<: {b: 1}": "line 2: expected the keys themselves, got <<",
    "? [a]\n: b": "expected a text as the key",
    "!!python/object/apply:os.system [true]": "expected a value without a tag",
    "!!bool maybe": "expected a value without a tag",
    "[" * 100_000: "line 1: expected lists and mappings nested at most 64 times",
    "{a: " * 3000: "line 1: expected lists and mappings nested at most 64 times",
    "".join(" " * depth + "a:\n" for depth in range(100)): "line 65: expected lists and mappings nested",
    "a: " + "9" * 5000: "line 1: expected a number that fits 64 bits",
    "a: 0x" + "f" * 30: "fits 64 bits",
    "a: .nan": "line 1: expected a finite number",
    "a: " + "1:" * 198 + "1.0": "not YAML",
    '"\\0"': "line 1: expected text without NUL",
    "2001-99-99": "is not YAML: month must be in 1..12",
    "a: b: c": "is not YAML: line 1: mapping values are not allowed",
}


def _refused(read: Callable[..., Any], source: object, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        read(source, what="x.file")
    text = str(caught.value)
    assert expected in text
    assert text.startswith("x.file")
    assert "\n" not in text
    assert len(text) < 250


@pytest.mark.parametrize("source", JSON, ids=range(len(JSON)))
def test_hostile_json_is_refused(source: str) -> None:
    _refused(read_json, source, JSON[source])
    _refused(read_json, source.encode(), JSON[source])


@pytest.mark.parametrize("source", YAML, ids=range(len(YAML)))
def test_hostile_yaml_is_refused(source: str) -> None:
    _refused(read_yaml, source, YAML[source])


def test_an_alias_bomb_takes_no_memory() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    tracemalloc.start()
    try:
        _refused(read_yaml, "\n".join(lines), "got the alias *a0")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 40)  # a sparse file: to read it would fill the memory
    for read, most in ((read_json, JSON_BYTES), (read_yaml, YAML_BYTES)):
        _refused(read, large, f"expected at most {most:,} bytes, got {1 << 40:,}")
        _refused(read, b" " * (most + 1), f"expected at most {most:,} bytes")


def test_only_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for ever
    _refused(read_bytes, tmp_path / "pipe", "expected a file, got a device")
    _refused(read_bytes, Path("/dev/zero"), "expected a file, got a device")
    _refused(read_bytes, tmp_path, "expected a file, got a folder")
    _refused(read_bytes, tmp_path / "none", "there is no such file")
    _refused(read_json, b"\xff", "expected text in UTF-8, got byte 255 at 0")


def test_the_usual_is_read_as_before() -> None:
    text = "a: [1, -2, {b: 1e-3}]\nc: 8/255\nd: 2020-01-01\ne: 1.5\nf: ~\ng: true\n1: x"
    found = read_yaml(text)
    assert found.pop("d").isoformat() == "2020-01-01"
    assert found == {"a": [1, -2, {"b": "1e-3"}], "c": "8/255", "e": 1.5, "f": None, "g": True, 1: "x"}
    assert read_json('{"a": [1, -2, "[[{{\\"", 1.5e-3, null, true, "\\u00e9"]}') == {
        "a": [1, -2, '[[{{"', 1.5e-3, None, True, "é"]
    }
    assert read_json("[" * 64 + "]" * 64) is not None
