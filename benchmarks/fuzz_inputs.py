"""The fuzzer's inputs: valid ones with a few changes, and values that Hypothesis draws."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

if TYPE_CHECKING:
    from fuzz_readers import Reader

NUMBERS = (
    *("0", "-0", "-1", "1", "2", "255", "256", "65535", "65536", "2147483647", "2147483648", "4294967296"),
    *(
        "9223372036854775807",
        "9223372036854775808",
        "18446744073709551615",
        "18446744073709551616",
        "-9223372036854775809",
    ),
    *("1e1", "1e3", "1e5", "1e9", "1e11", "1e20", "1e23", "1e308", "1e309", "-1e308", "1e-320", "0.1", "0.5", "1.5"),
    *("8/255", "1/0", "0/0", "1e308/1e-308", "nan", ".nan", "inf", ".inf", "-.inf", "NaN", "Infinity", "-Infinity"),
    *("0x7fffffff", "0o17", "1_000", "1:30", "1:2:3.4", "00012", "+1", "1.", ".5", "9" * 400, "1" + "0" * 5000),
)
WORDS = (
    *("null", "~", "true", "false", "yes", "no", "on", "''", '""', "[]", "{}", "[null]", "[[]]", "{a: 1}", "{name: x}"),
    *("os:system", "subprocess:getoutput", "tests.x:y", "builtins:eval", "!!python/object/apply:os.system [id]"),
    *(
        "!!binary aGk=",
        "!!set {a}",
        "!!timestamp 2001-01-01",
        "2001-01-01",
        "2001-99-99",
        "!!omap []",
        "!<x> y",
        "&a [*a]",
    ),
    *(
        "<<: {a: 1}",
        "? [a]\n: b",
        "- - - a",
        "|\n  text",
        ">\n  text",
        "# x",
        "---",
        "...",
        "%YAML 1.2",
        "\t",
        "\\u0000",
    ),
    *(
        "\\ud800",
        "\ufeff",
        "\u0000",
        "\U0001f600",
        "../../etc/passwd",
        "/dev/zero",
        "/dev/stdin",
        "~",
        "hf:a/b",
        "%s%n",
        "{0}",
    ),
    *(
        "a" * 5000,
        "[" * 200,
        "{a: " * 200,
        '{"a":' * 200,
        "[" * 100_000,
        "*a",
        "\x85",
        "\u2028",
        "[red]x[/red]",
        "\x1b[31m",
    ),
)
KEYS = re.compile(r"[A-Za-z_][\w.-]*")
NUMERAL = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?:/\d+)?")
DTYPES = (
    "BOOL",
    "U8",
    "I8",
    "I16",
    "U16",
    "I32",
    "U32",
    "I64",
    "U64",
    "F16",
    "BF16",
    "F32",
    "F64",
    "F8_E4M3",
    "C64",
    "X",
)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from([*NUMBERS[:40], *WORDS[:15]]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def drawn(strategy: st.SearchStrategy[Any], count: int, key: str) -> list[Any]:
    """Values that Hypothesis draws."""
    found: list[Any] = []

    @seed(key)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(value: Any) -> None:
        found.append(value)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collect()
    return found


def inputs(reader: Reader, templates: Path, key: str) -> Iterator[bytes]:
    """The inputs of a reader without end. `key` decides them."""
    rng, seeds = random.Random(key), reader.seeds(templates)
    yield from seeds  # must be accepted, or the changes start from nothing
    values, turn = drawn(PLAIN, 400, key), 0
    while True:
        turn += 1
        one = rng.choice(seeds)
        kind = rng.choice(reader.kinds)
        if kind == "bytes":
            yield changed_bytes(rng, one, seeds)
        elif kind == "text":
            yield changed_text(rng, one, seeds, reader.words)
        elif kind == "json":
            yield changed_json(rng, one, values, reader.words)
        elif kind == "tensors":
            yield changed_tensors(rng, one)
        elif kind == "words":
            yield changed_words(rng, one, reader.words)
        elif kind == "yaml":
            yield drawn_yaml(rng, one, values, reader.words)
        if turn % 4000 == 0:
            values = drawn(PLAIN, 400, f"{key}/{turn}")


def changed_bytes(rng: random.Random, content: bytes, others: list[bytes]) -> bytes:
    """A few bits, bytes, numbers or parts are changed, cut out, repeated, or taken from another input."""
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at = min(rng.randrange(len(found) + 1), rng.choice((len(found), 64, 600)))  # headers come first
        end, what = min(at + rng.choice((1, 2, 4, 8, 64, 1000)), len(found)), rng.randrange(8)
        if what == 0 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif what == 1 and at < len(found):
            found[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif what == 2:
            del found[at : (None if rng.random() < 0.5 else end)]
        elif what == 3:
            found[at:at] = found[at:end] * rng.choice((1, 2, 100))
        elif what == 4:
            size = rng.choice((2, 4, 8))
            value = rng.choice((0, 1, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1))
            number = (value & (2 ** (8 * size) - 1)).to_bytes(size, rng.choice(("little", "big")))
            found[at : at + size] = number
        elif what == 5:
            found[at:at] = rng.randbytes(rng.choice((1, 4, 100)))
        elif what == 6:
            other = rng.choice(others)
            start = rng.randrange(len(other) + 1)
            found[at:end] = other[start : start + (end - at) + rng.randrange(50)]
        else:
            found[at:end] = rng.choice((NUMBERS, WORDS)[rng.randrange(2)]).encode()
    return bytes(found[: 1 << 22])


def changed_text(rng: random.Random, content: bytes, others: list[bytes], words: tuple[str, ...]) -> bytes:
    """A few numbers, names or lines are changed, cut out, repeated, indented, or taken from another input."""
    text = content.decode(errors="replace")
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        what, lines = rng.randrange(8), text.split("\n")
        at = rng.randrange(len(lines))
        if what <= 2:
            spots = list((NUMERAL, KEYS)[rng.randrange(2)].finditer(text))
            if spots:
                spot = rng.choice(spots)
                text = (
                    text[: spot.start()] + rng.choice(rng.choice((NUMBERS, WORDS, words or WORDS))) + text[spot.end() :]
                )
            continue
        if what == 3:
            lines.insert(rng.randrange(len(lines) + 1), lines[at])
        elif what == 4:
            del lines[at]
        elif what == 5:
            lines[at] = (
                " " * rng.randrange(5) + lines[at].lstrip() if rng.random() < 0.5 else lines[at].replace(": ", ":")
            )
        elif what == 6:
            other = rng.choice(others).decode(errors="replace").split("\n")
            lines.insert(at, rng.choice(other))
        else:
            return changed_bytes(rng, text.encode(), others)
        text = "\n".join(lines)
    return text.encode(errors="surrogatepass")[: 1 << 22]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from _paths(value[key], (*path, key))


def _unusual(rng: random.Random, old: Any, values: list[Any], words: tuple[str, ...]) -> Any:
    """Another value in the place of `old`."""
    what = rng.randrange(7)
    if what == 0 and isinstance(old, int | float):
        return rng.choice(
            (-old, old + 1, old - 1, old * 10**9, float(old), str(old), [old], bool(old), old * 2, old / 7)
        )
    if what == 1:
        return rng.choice(
            (0, -1, 1, 2, 2**31, 2**53, 2**63 - 1, 2**64 - 1, 1e20, 1e308, 1e-320, -0.0, 0.5, 10**6, 10**9)
        )
    if what == 2:
        return rng.choice((None, True, False, "", [], {}, [[]], "x", "\x00", "\ud800", "a" * 10_000, {"a": {"b": []}}))
    if what == 4 and isinstance(old, list) and old:
        return rng.choice((old * 2, old[:-1], old[::-1], old * 1000, [old], old[:1]))
    if what == 5 and isinstance(old, str):
        return rng.choice(
            (old + "x", old[:-1], old.upper(), old * 50, f"../{old}", old.encode(errors="surrogatepass").hex())
        )
    return rng.choice((words or WORDS) if what == 3 else values)


def altered(rng: random.Random, value: Any, values: list[Any], words: tuple[str, ...]) -> Any:
    """A copy of a JSON value with a few parts changed, deleted, added or moved."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = rng.choice(list(_paths(value)))
        if not path:
            if rng.random() < 0.05:
                return _unusual(rng, value, values, words)
            continue
        inside = value
        for key in path[:-1]:
            inside = inside[key]
        what = rng.randrange(8)
        if what == 0:
            del inside[path[-1]]
        elif what == 1 and isinstance(inside, dict):
            inside[str(rng.choice([*words, "name", "x", "", "format"]))] = inside[path[-1]]
        elif what == 2:
            other = rng.choice(list(_paths(value)))
            moved: Any = value
            for key in other:
                moved = moved[key]
            inside[path[-1]] = copy.deepcopy(moved)
        else:
            # A copy: a part of `values` that is changed later would be changed for all inputs.
            inside[path[-1]] = copy.deepcopy(_unusual(rng, inside[path[-1]], values, words))
    return value


def changed_json(rng: random.Random, content: bytes, values: list[Any], words: tuple[str, ...]) -> bytes:
    """JSON with other values, with keys that come twice, or nested deeply."""
    text = json.dumps(altered(rng, json.loads(content), values, words), indent=1)
    what = rng.randrange(20)
    if what == 0:  # a key twice
        lines = text.split("\n")
        at = rng.randrange(len(lines))
        text = "\n".join([*lines[: at + 1], *lines[at:]])
    elif what == 1:
        spot = rng.choice(list(re.finditer(r"[\d\"]", text)) or [re.search("", text)])
        depth = rng.choice((60, 70, 1000, 50_000))
        assert spot is not None
        text = text[: spot.start()] + "[" * depth + "]" * rng.choice((depth, 0)) + text[spot.start() :]
    elif what == 2:
        text = text.replace("1", rng.choice(NUMBERS), 1)
    return text.encode(errors="surrogatepass")


def drawn_yaml(rng: random.Random, content: bytes, values: list[Any], words: tuple[str, ...]) -> bytes:
    """A recipe whose values Hypothesis drew, or that takes names from the registries."""
    import yaml

    value = yaml.safe_load(content)
    text: str = yaml.safe_dump(altered(rng, value, values, words), sort_keys=False, allow_unicode=True)
    return text.encode(errors="surrogatepass")


def changed_tensors(rng: random.Random, content: bytes) -> bytes:
    """A safetensors file with other names, types, shapes, places or numbers."""
    if len(content) < 8:
        return content
    size = struct.unpack("<Q", content[:8])[0]
    header, data = json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])
    for _ in range(rng.choice((1, 1, 2, 3))):
        names = [name for name in header if name != "__metadata__"]
        if not names:
            break
        name, what = rng.choice(names), rng.randrange(9)
        entry = header[name]
        begin, end = entry["data_offsets"]
        if what == 0:
            entry["dtype"] = rng.choice(DTYPES)
        elif what == 1 and entry["shape"]:
            entry["shape"][rng.randrange(len(entry["shape"]))] = rng.choice((0, 1, -1, 2, 2**31, 2**62, 1e20))
        elif what == 2:
            rng.shuffle(entry["shape"])
        elif what == 3:
            entry["shape"] = rng.choice(([end - begin], [], [1, *entry["shape"]], [*entry["shape"], 1], [0]))
        elif what == 4:
            header[rng.choice((name + "x", "", "a.b", "__metadata__", "rows", "rng"))] = header.pop(name)
        elif what == 5:
            del header[name]
        elif what == 6 and end > begin:  # other numbers of the same type
            width = 8 if entry["dtype"].endswith("64") else 4 if entry["dtype"].endswith("32") else 1
            at = rng.randrange(begin, end) // width * width
            value = rng.choice((b"\xff" * 8, b"\0" * 8, struct.pack("<d", 1e300), struct.pack("<f", float("nan")) * 2))
            value = rng.choice((value, struct.pack("<q", rng.choice((-1, -2, 2**62, 10**6)))))
            data[at : at + width] = value[:width]
        elif what == 7 and end > begin:  # all numbers
            data[begin:end] = (rng.choice((b"\xff", b"\0", b"\x01", b"\x7f")) * (end - begin))[: end - begin]
        else:  # a smaller tensor that fits
            entry["shape"] = [max(0, side // 2) if isinstance(side, int) else side for side in entry["shape"]]
    return _packed(rng, header, bytes(data))


def _packed(rng: random.Random, header: dict[str, Any], data: bytes) -> bytes:
    """A safetensors file. Mostly its tensors are laid out anew, so that the file is well formed."""
    if rng.random() < 0.8:
        widths = {"64": 8, "32": 4, "16": 2}
        parts, place = [], 0
        for name, entry in header.items():
            if name == "__metadata__" or not isinstance(entry, dict) or "data_offsets" not in entry:
                continue
            begin, end = entry["data_offsets"]
            count = 1
            for side in entry["shape"]:
                count *= side if isinstance(side, int) and 0 <= side < 10**6 else 1
            wanted = min(count * widths.get(str(entry["dtype"])[-2:], 1), 1 << 20)
            part = (data[begin:end] or b"\0") * (wanted // max(end - begin, 1) + 1)
            parts.append(part[:wanted])
            entry["data_offsets"] = [place, place + wanted]
            place += wanted
        data = b"".join(parts)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def changed_words(rng: random.Random, content: bytes, words: tuple[str, ...]) -> bytes:
    """A command line, as a JSON list: words are replaced, deleted, repeated, added, or get other values."""
    line: list[str] = json.loads(content)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, what = rng.randrange(len(line) + 1), rng.randrange(7)
        pool = rng.choice((words, words, NUMBERS, WORDS))
        if what == 0 and at < len(line):
            del line[at]
        elif what == 1 and at < len(line):
            line.insert(at, line[at])
        elif what == 2 or not line or at == len(line):
            line.insert(at, rng.choice(pool))
        elif what == 3:
            line[at] = rng.choice(pool)
        elif what == 4:
            head, mark, _ = line[at].rpartition("=")
            line[at] = f"{head}{mark}{rng.choice(pool)}"
        elif what == 5:
            line[at] = changed_text(rng, line[at].encode(), [b"x"], words).decode(errors="replace")
        else:
            line[at : at + 1] = [rng.choice(words), rng.choice(pool)]
    plain = [word.replace("\0", "").encode(errors="ignore").decode() for word in line]  # a system passes no others
    return json.dumps([word[:100_000] for word in plain]).encode()
