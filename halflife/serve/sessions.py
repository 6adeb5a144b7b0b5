"""Sessions: sequences that clients continue. Each stores one state, whatever its length."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halflife.models.states import size
from halflife.serve.jobs import Done
from halflife.serve.prefixes import Prefix


class Busy(Exception):
    """A request works on the session."""


class Crowded(Exception):
    """There are as many sessions, or bytes of their states, as the server takes."""


@dataclass(eq=False)
class Session:
    """One sequence: what the model has read, and the last token, which the next request reads first."""

    id: str
    read: Prefix | None = None
    unread: tuple[int, ...] = ()
    busy: bool = False
    bytes: int = 0  # of the state
    _rest: tuple[int, ...] = ()

    def take(self, rest: Sequence[int] = ()) -> None:
        """Reserve the session for one request, or raise `Busy` if another one works on it.

        The tokens `rest` stay unread after the request, if its job writes none.
        """
        self.check_free()
        self.busy, self._rest = True, tuple(rest)

    def check_free(self) -> None:
        """Raise `Busy` if another request works on the session."""
        if self.busy:
            raise Busy(f"another request works on {self.id}")

    def release(self, done: Done | None) -> None:
        """End the request. The session continues from the end of its job, or is as before if the job failed."""
        self.busy = False
        if done is not None and done.after is not None:
            self.read, self.unread, self.bytes = done.after, done.unread or self._rest, size(done.after.state)

    def about(self) -> dict[str, Any]:
        """Return what clients see of the session."""
        position = (0 if self.read is None else self.read.length) + len(self.unread)
        return {"id": self.id, "object": "session", "position": position, "state_bytes": self.bytes}


class Sessions:
    """At most `most` sessions. None is opened or continued while the states have more than `most_bytes` bytes."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self.most, self.most_bytes = most, most_bytes
        self._by_id: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def bytes(self) -> int:
        """Bytes of all states. Sessions that share a state count it each."""
        return sum(session.bytes for session in self._by_id.values())

    def open(self, like: Session | None = None) -> Session:
        """Open a session, empty or at the place of another one. Raise `Crowded` if there are too many."""
        if len(self) >= self.most:
            raise Crowded(f"there are {self.most} sessions already; delete one")
        self.check_room()
        session = Session(f"session-{secrets.token_hex(16)}")
        if like is not None:
            session.read, session.unread, session.bytes = like.read, like.unread, like.bytes
        self._by_id[session.id] = session
        return session

    def check_room(self) -> None:
        """Raise `Crowded` if the states have too many bytes."""
        if self.bytes > self.most_bytes:
            raise Crowded(f"the states of all sessions have more than {self.most_bytes:,} bytes; delete a session")

    def get(self, name: str) -> Session:
        """Return a session, or raise KeyError if there is none of this name."""
        return self._by_id[name]

    def delete(self, name: str) -> None:
        """Forget a session. A request that works on it ends as it would."""
        del self._by_id[name]
