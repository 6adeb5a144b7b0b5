"""Names for the things a user chooses: decays, layers, presets, tasks."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from numbers import Integral
from types import NoneType
from typing import Any, Generic, TypeVar, cast, get_args, get_origin, get_type_hints

Entry = TypeVar("Entry")
Member = TypeVar("Member")  # the decorated class or function, whose type stays what it is


@dataclass(frozen=True)
class AtLeast:
    """The bound of an option that is a whole number: `Annotated[int, AtLeast(0)]`. Others are 1 or more."""

    least: int


def unknown(kind: str, name: str, choices: list[str]) -> ValueError:
    """Return the error for an unknown name. Its message lists the choices and the most similar one."""
    close = difflib.get_close_matches(str(name), choices, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ValueError(f"unknown {kind} {name!r}.{hint} Choose from: {', '.join(choices)}")


def check_choice(kind: str, name: str, choices: Collection[str]) -> None:
    """Raise the error of `unknown` if `name` is none of the choices."""
    if name not in choices:
        raise unknown(kind, name, list(choices))


def check_least(least: int = 1, **values: int) -> None:
    """Raise a ValueError about the first of the values that is less than `least`."""
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}; got {value}")


@cache
def _own_parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """Return what `cls(…)` takes, by name; see `constructor_parameters`."""
    found: dict[str, inspect.Parameter] = {}
    for parent in cls.__mro__:
        if "__init__" not in vars(parent):
            continue
        parameters = list(inspect.signature(parent.__init__).parameters.values())[1:]
        try:
            hints = get_type_hints(cls if is_dataclass(cls) else parent.__init__, include_extras=True)
        except NameError:  # a name that its module imports for type checkers alone
            hints = {}
        for one in parameters:
            if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
                found.setdefault(one.name, one.replace(annotation=hints.get(one.name, Any)))
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return found


def option_groups(cls: type) -> dict[str, type]:
    """Return the parameters of `cls(…)` that are groups of options: a dataclass, or the first of a union."""
    first = {name: (get_args(one.annotation) or [one.annotation])[0] for name, one in _own_parameters(cls).items()}
    return {name: kind for name, kind in first.items() if isinstance(kind, type) and is_dataclass(kind)}


@cache
def constructor_parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """Return the options of `cls(…)`, by name, with types for annotations.

    The options in a group (`option_groups`) stand in its place. Where a constructor hands `**options` on, the
    parameters of the parent class are included.
    """
    groups, found = option_groups(cls), {}
    for name, one in _own_parameters(cls).items():
        found |= _own_parameters(groups[name]) if name in groups else {name: one}
    return found


def construct(cls: Callable[..., Entry], options: Mapping[str, Any]) -> Entry:
    """Return `cls(…)` with options by name. Those of a group become its dataclass."""
    assert isinstance(cls, type)
    groups, left = option_groups(cls), dict(options)
    arguments: dict[str, Any] = {}
    for name, group in groups.items():
        arguments[name] = group(**{option: left.pop(option) for option in _own_parameters(group) if option in left})
    return cls(**arguments, **left)


def plain_type(annotation: Any) -> Any:
    """Return the type of an annotation without its bound."""
    return annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation


def _takes_any(cls: type) -> bool:
    """Whether no constructor of the class or its parents ends the list of options."""
    own = [parent.__init__ for parent in cls.__mro__ if "__init__" in vars(parent)]
    return all(any(one.kind is one.VAR_KEYWORD for one in inspect.signature(f).parameters.values()) for f in own)


def _check_value(owner: str, name: str, value: Any, parameter: inspect.Parameter) -> None:
    """Check a mapping of options, and a whole number, which is 1 or more, or 0 or more by its bound or its default."""
    bounds = [bound.least for bound in getattr(parameter.annotation, "__metadata__", ()) if isinstance(bound, AtLeast)]
    hint = plain_type(parameter.annotation)
    types = get_args(hint) or (hint,)
    if value is None and NoneType in types:
        return
    if any(get_origin(kind) is Mapping for kind in types) and not isinstance(value, Mapping):
        raise ValueError(f"{name} takes a mapping of options; got {value!r}")
    if int not in types:
        return
    least = 0 if parameter.default == 0 else min(bounds, default=1)
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{name} of {owner} must be a whole number, {least} or more; got {value!r}")


def taken(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the options that `cls(…)` takes, for options that are offered to every class."""
    known = constructor_parameters(cls)
    return dict(options) if _takes_any(cls) else {name: value for name, value in options.items() if name in known}


def check_options(owner: str, cls: type, options: Any, without: Collection[str] = ()) -> None:
    """Check that `options` is a mapping whose keys are parameters of `cls(…)`, other than those of `without`.

    Raises:
        ValueError: it is not, or a whole number is none; the message names `owner`, and lists the known names or shows
            the value.
    """
    if not isinstance(options, Mapping):
        raise ValueError(f"{owner} takes a mapping of options; got {options!r}")
    if _takes_any(cls):
        return
    known = [name for name in constructor_parameters(cls) if name not in without]
    wrong = [name for name in options if name not in known]
    if len(wrong) > 1 and known:
        raise ValueError(f"{owner} has no options {', '.join(map(repr, wrong))}; choose from {', '.join(known)}")
    for name in options:
        if name not in known:
            none = ValueError(f"{owner} takes no options; got {', '.join(map(repr, wrong))}")
            raise unknown(f"option of {owner}", name, known) if known else none
        _check_value(owner, name, options[name], constructor_parameters(cls)[name])


class Registry(Generic[Entry]):
    """An ordered mapping from names to classes or other entries; `add` fills it.

    Args:
        kind: what an entry is, for messages.
        modules: name → the module whose import adds the entry, for entries that are imported when they are asked for.
    """

    def __init__(self, kind: str, modules: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._modules = dict(modules or {})
        self._entries: dict[str, Entry] = {}

    def add(self, name: str) -> Callable[[Member], Member]:
        """Register the decorated entry under a name, as in `@DECAYS.add("simple")`. Each name can be used once."""

        def register(entry: Member) -> Member:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = cast(Entry, entry)
            return entry

        return register

    def __getitem__(self, name: str) -> Entry:
        if name not in self._entries:  # ops look their implementations up for every token
            if name not in self._modules:
                raise unknown(self.kind, name, self.names())
            importlib.import_module(self._modules[name])
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        """Return all names, those of modules first, and the others in the order of registration."""
        return list(dict.fromkeys([*self._modules, *self._entries]))

    def summary(self, name: str) -> str:
        """Return the first line of an entry's docstring, which `halflife list` prints."""
        return next(iter((self[name].__doc__ or "").strip().splitlines()), "")
