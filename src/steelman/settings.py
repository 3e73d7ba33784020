"""Settings objects (frozen, keyword-only, validated dataclasses) and the registries that name them.

An attack, an objective or a schedule is declared once, as a dataclass with ``@settings``. Python code calls the class.
A recipe and the command line use its name in a registry. The validation is the same for all three.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic
from pydantic import BeforeValidator, ConfigDict, ValidationError

from steelman.bounded import read_yaml
from steelman.errors import UserError, shown, unknown

T = TypeVar("T")
MOST_PROBLEMS, LONGEST_KEY = 20, 60  # of an error: its lines, and the characters of a key in it
MOST = 10_000_000  # steps, queries or anything else that is counted: more would never end

_FRACTION = re.compile(r"\s*([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)\s*/\s*([0-9.]+(?:[eE][-+]?[0-9]+)?)\s*")


def number(value: object) -> object:
    """Read ``"8/255"`` and ``"1e-3"`` as numbers. Any other value is returned unchanged.

    >>> number("8/255") == 8 / 255
    True
    """
    if not isinstance(value, str):
        return value
    try:
        if match := _FRACTION.fullmatch(value):
            return float(match[1]) / float(match[2])
        return float(value)
    except ZeroDivisionError:
        raise UserError(f"expected a number or a fraction such as 8/255, got {shown(value)}") from None
    except ValueError:
        return value


def _number_only(value: object) -> object:
    """Read a number, and refuse a boolean. Python counts True as 1; in a recipe it is a mistake."""
    if isinstance(value, bool):
        raise UserError(f"expected a number, got {str(value).lower()}")
    return number(value)


def at_most(most: int) -> BeforeValidator:
    """The validator of a whole number that has a limit."""

    def check(value: object) -> object:
        found = _number_only(value)
        if isinstance(found, int | float) and found > most:  # pydantic would not name the limit for 1e20
            raise UserError(f"expected at most {most:,}, got {shown(value)}")
        return found

    return BeforeValidator(check)


Number = Annotated[float, BeforeValidator(_number_only), pydantic.Field(allow_inf_nan=False)]
Count = Annotated[int, at_most(MOST), pydantic.Field(gt=0)]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[T]) -> type[T]:
    """Make a class a frozen, keyword-only dataclass. Its fields are validated, and an unknown field is an error."""
    config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    made: type[T] = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=config)(cls)  # type: ignore[assignment]
    build = made.__init__

    @functools.wraps(build)
    def checked(self: object, *args: Any, **options: Any) -> None:
        try:
            build(self, *args, **options)
        except ValidationError as error:  # pydantic's own text has several lines, and the address of its page
            raise SettingsError.of(error, made) from None

    made.__init__ = checked  # type: ignore[method-assign]
    return made


class SettingsError(UserError):
    """One or more wrong settings. Each problem is (path of keys, what is wrong)."""

    def __init__(self, problems: Sequence[tuple[tuple[str, ...], str]]) -> None:
        self.problems = list(problems)
        lines = [f"{'.'.join(map(_short, path))}: {text}" if path else text for path, text in problems]
        more = [f"and {len(lines) - MOST_PROBLEMS} more"] if len(lines) > MOST_PROBLEMS else []
        super().__init__("\n".join(lines[:MOST_PROBLEMS] + more))

    @classmethod
    def of(cls, error: ValidationError, checked: object) -> SettingsError:
        """Turn a validation error of the settings class `checked` into paths and sentences, at any depth of nesting."""
        problems: list[tuple[tuple[str, ...], str]] = []
        for item in error.errors(include_url=False):
            path = tuple(str(part) for part in item["loc"] if not str(part).startswith("function-"))
            inner = item.get("ctx", {}).get("error")
            if isinstance(inner, SettingsError):
                problems += [((*path, *sub), text) for sub, text in inner.problems]
            elif isinstance(inner, UserError):
                problems.append((path, str(inner)))
            elif item["type"] == "missing":
                problems.append((path, "is required and missing"))
            elif item["type"] == "unexpected_positional_argument":
                problems.append(((), f"expected settings by their names, got {shown(item['input'])} without a name"))
            elif item["type"] == "unexpected_keyword_argument":
                problems.append((path, str(unknown("key", item["loc"][-1], _keys_at(checked, item["loc"][:-1])))))
            else:
                text = item["msg"].removeprefix("Value error, ")
                problems.append((path, f"{text[:1].lower()}{text[1:]}, got {shown(item['input'])}"))
        return cls(list(dict.fromkeys(problems)))


def _short(key: str) -> str:
    return key if len(key) <= LONGEST_KEY else f"{key[:LONGEST_KEY]}..."


def _keys_at(checked: object, path: Sequence[str | int]) -> list[str]:
    """The keys of the settings class at `path` below `checked`."""
    for part in path:
        fields = getattr(checked, "__pydantic_fields__", {})
        checked = getattr(fields.get(part), "annotation", None)
    return list(getattr(checked, "__pydantic_fields__", {}))


def options_of(factory: Callable[..., object]) -> dict[str, inspect.Parameter]:
    """The options of a registry entry, without those that the entry sets itself."""
    return {
        name: parameter
        for name, parameter in inspect.signature(factory).parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }


def summary_of(factory: Callable[..., object]) -> str:
    """The first line of a registry entry's docstring."""
    target = factory.func if isinstance(factory, functools.partial) else factory
    return (getattr(factory, "summary", None) or inspect.getdoc(target) or "").split("\n")[0]


def make(kind: str, registry: Mapping[str, Callable[..., T]], name: object, options: Mapping[str, Any]) -> T:
    """Call the registry entry `name` with `options`. An error names the key, the value and the choices."""
    if not isinstance(name, str) or name not in registry:
        raise unknown(kind, name, registry)
    factory = registry[name]
    known = options_of(factory)
    wrong = [((key,), str(unknown(f"option of {kind} {name!r}", key, known))) for key in options if key not in known]
    if wrong:
        raise SettingsError(wrong)
    try:
        return factory(**options)
    except ValidationError as error:  # of a function that checks its arguments; a settings class raises our own
        raise SettingsError.of(error, factory) from None


def named(kind: str, registry: Mapping[str, Callable[..., Any]]) -> BeforeValidator:
    """The validator of a field that takes an object, a name, or a mapping with a ``name`` and options."""

    def build(value: object) -> object:
        if isinstance(value, str):
            return make(kind, registry, value, {})
        if isinstance(value, Mapping):
            options = {str(key): item for key, item in value.items()}
            if "name" not in options:
                raise SettingsError([(("name",), f"is required: which {kind}? choices: {', '.join(sorted(registry))}")])
            return make(kind, registry, options.pop("name"), options)
        return value

    return BeforeValidator(build)


def name_and_options(text: str) -> tuple[str, dict[str, Any]]:
    """Read ``he:scale=10,margin=0.1`` as a name and its options."""
    name, _, rest = text.partition(":")
    return name.strip(), options_from_texts(filter(None, rest.split(",")))


def options_from_texts(texts: Iterable[str]) -> dict[str, Any]:
    """Read texts such as ``key=value``. The value is YAML, or a fraction such as 8/255."""
    options: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"expected an option as key=value, got {shown(text)}")
        options[key.strip()] = number(read_yaml(value, what=f"{_short(key.strip())}: {shown(value)}"))
    return options
