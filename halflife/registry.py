"""Names for the things a user chooses: decays, layers, presets, tasks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


def unknown(kind: str, name: str, choices: list[str]) -> ValueError:
    """The error for a name that is not there: it lists the choices and guesses what was meant."""
    close = difflib.get_close_matches(str(name), choices, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return ValueError(f"unknown {kind} {name!r}.{hint} Choose from: {', '.join(choices)}")


class Registry(Generic[Entry]):
    """An ordered mapping from a name to a class (or any entry), filled by `add`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry] = {}

    def add(self, name: str) -> Callable[[Entry], Entry]:
        """Decorator: `@DECAYS.add("simple")`. A name can be taken once."""

        def register(entry: Entry) -> Entry:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
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
        """All names, in the order of registration."""
        return list(self._entries)

    def summary(self, name: str) -> str:
        """The first line of the entry's docstring: what `halflife list` prints."""
        return (self[name].__doc__ or "").strip().splitlines()[0]
