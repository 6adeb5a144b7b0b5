"""Jobs of one request: from the engine's thread to a coroutine, which may be told that the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from halflife.serve.engine import Engine
from halflife.serve.jobs import Done, Event, Failed, Job, Piece, Settings
from halflife.serve.prefixes import Prefix
from halflife.serve.sessions import Session


class JobFailed(Exception):
    """The engine ended a job without a result."""


class Answering:
    """The jobs of one request, one per prompt. `done` has the ends of the jobs so far.

    A `session` is the one that the only job continues. It is released when the job ends.

    Raises:
        Full, Stopping, ValueError: the engine refuses a job.
    """

    def __init__(
        self, engine: Engine, prompts: Sequence[Sequence[int]], settings: Settings, session: Session | None = None
    ) -> None:
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()
        self._settings, self._session = settings, session
        self.done: list[Done] = []
        self.jobs: list[Job] = []
        try:
            for prompt in prompts:
                self._submit(engine, prompt, None if session is None else session.read)
        except Exception:
            self.cancel()
            if session is not None:
                session.release(None)
            raise

    @property
    def choices(self) -> int:
        """Number of continuations of all jobs."""
        return len(self.jobs) * self._settings.n

    def _submit(self, engine: Engine, prompt: Sequence[int], begin: Prefix | None) -> None:
        first = self.choices

        def deliver(event: Event) -> None:
            if self._session is not None and not isinstance(event, Piece):
                self._session.release(event if isinstance(event, Done) else None)
            self._events.put_nowait((first, event))

        def emit(event: Event) -> None:
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(deliver, event)

        self.jobs.append(engine.submit(Job(prompt, self._settings, emit, begin, keep=self._session is not None)))

    def cancel(self) -> None:
        """Tell the engine that nobody waits for the answer."""
        for job in self.jobs:
            job.cancelled = True

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Yield (choice, piece) as the engine emits them, until all jobs have ended. Raise `JobFailed` if one fails."""
        while len(self.done) < len(self.jobs):
            first, event = await self._events.get()
            if isinstance(event, Failed):
                raise JobFailed(event.message)
            if isinstance(event, Done):
                self.done.append(event)
            else:
                yield first + event.choice, event

    async def whole(self) -> list[list[Piece]]:
        """Return the pieces of each choice after all jobs have ended."""
        found: list[list[Piece]] = [[] for _ in range(self.choices)]
        async for choice, piece in self.pieces():
            found[choice].append(piece)
        return found
