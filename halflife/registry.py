"""Names for the things a user chooses: decays, layers, presets, tasks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

Entry = TypeVar("Entry")
Member = TypeVar("Member")  # the decorated class or function, whose type stays what it is


def unknown(kind: str, name: str, choices: list[str]) -> ValueError:
    """Return the error for an unknown name. Its message lists the choices and the most similar one."""
    close = difflib.get_close_matches(str(name), choices, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ValueError(f"unknown {kind} {name!r}.{hint} Choose from: {', '.join(choices)}")


class Registry(Generic[Entry]):
    """An ordered mapping from names to classes or other entries; `add` fills it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
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
        if name not in self._entries:
            raise unknown(self.kind, name, self.names())
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def names(self) -> list[str]:
        """Return all names in the order of registration."""
        return list(self._entries)

    def summary(self, name: str) -> str:
        """Return the first line of an entry's docstring, which `halflife list` prints."""
        return (self[name].__doc__ or "").strip().splitlines()[0]
