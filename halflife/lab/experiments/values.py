"""Values that a user writes, on the command line or in a file, as the types that options have."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

WORDS: dict[Any, str] = {
    bool: "true or false", int: "a whole number", float: "a number", str: "text", Path: "a path", type(None): "null",
    dict: "a mapping", list: "a list", Sequence: "a list",
}  # fmt: skip


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML reads it, but with 1e-3 as a number, as in YAML 1.2 and in Python."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def load_yaml(text: str, what: str) -> Any:
    """The value of a YAML (or JSON) text; a ValueError calls it `what`."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"{what} is no YAML: {' '.join(str(error).split())}") from error


def convert(name: str, value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint`: whole numbers as floats, lists as tuples, text as paths. A ValueError calls it
    `name`.
    """
    try:
        return _convert(value, hint)
    except TypeError:
        raise ValueError(f"{name} must be {describe(hint)}; got {value!r}") from None


def _convert(value: Any, hint: Any) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _first(value, parts)
    if origin is Literal:
        return value if value in parts else _refuse()
    if origin is tuple:
        return _tuple(value, parts)
    if origin in (dict, Mapping) or hint in (dict, Mapping):
        return dict(value) if isinstance(value, Mapping) else _refuse()
    if origin in (list, Sequence):
        return list(value) if isinstance(value, list | tuple) else _refuse()
    return _scalar(value, hint)


def _refuse() -> typing.NoReturn:
    raise TypeError


def _first(value: Any, hints: Sequence[Any]) -> Any:
    """The value as the first of these types that takes it."""
    for hint in hints:
        try:
            return _convert(value, hint)
        except TypeError:
            continue
    raise TypeError


def _tuple(value: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    if parts[-1] is Ellipsis:
        return tuple(_convert(item, parts[0]) for item in (value if isinstance(value, list | tuple) else [value]))
    if not isinstance(value, list | tuple) or len(value) != len(parts):
        raise TypeError
    return tuple(map(_convert, value, parts))


def _scalar(value: Any, hint: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int and number and float(value).is_integer():
        return int(value)
    if hint is float and number:
        return float(value)
    if hint is str and isinstance(value, str | int):
        return str(value) if not isinstance(value, bool) else _refuse()
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint in (bool, type(None), None) and isinstance(value, bool if hint is bool else type(None)):
        return value
    raise TypeError


def describe(hint: Any) -> str:
    """A type in words: "a whole number or null"."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(describe, parts)))
    if origin is Literal:
        return " or ".join(map(str, parts))
    if origin is tuple:
        own = [describe(part) for part in parts if part is not Ellipsis]
        return f"a list, each entry {own[0]}" if Ellipsis in parts else f"a list of {' and '.join(own)}"
    return WORDS.get(origin or hint, "a mapping")


def parse_count(text: str) -> int:
    """Return a number of tokens that is written as 500K, 20M, 1.5B or 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?)", text.strip().upper().replace("_", ""))
    if not match:
        raise ValueError(f"{text!r} is no number of tokens; write 500K, 20M, 1.5B or 1000000")
    return round(float(match[1]) * 1000 ** " KMBT".index(match[2] or " "))
