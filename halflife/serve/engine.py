"""One thread that runs one model for many clients, a turn at a time.

A turn reads a piece of the waiting prompts and writes one token of every continuation. A long prompt is read over many
turns, so it does not stop the others. The continuations are rows of one batch: a state has a fixed size, so rows that
are at different positions are stacked as they are. The keys and values of softmax attention grow with the position,
so there only rows of one length share a step. `batches` cuts prompts into few sizes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
from torch import Tensor

from halflife.data.tokenizers import Tokenizer
from halflife.models.lm import LanguageModel, ModelState
from halflife.models.session import Decoded, decoder
from halflife.models.states import form, select, stack
from halflife.models.text import NOT_FINITE, context, likeliest
from halflife.ops.linear import fast_linears
from halflife.registry import check_least
from halflife.serve.batch import Group, batches, draw_tokens, keep, merge
from halflife.serve.jobs import Counts, Done, Failed, Full, Job, Row, Stopping
from halflife.serve.prefixes import BLOCK_TOKENS, Prefix, PrefixCache

Result = TypeVar("Result")


class Engine:
    """Reads prompts and writes continuations.

    Args:
        model: the model in evaluation mode.
        tokenizer: of the texts.
        max_rows: most continuations, and prompts that are being read, at one time.
        max_waiting: most jobs that wait for a row.
        piece: most tokens of prompts that a turn reads.
        cache_bytes: bytes of the states of earlier prompts.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        *,
        max_rows: int = 32,
        max_waiting: int = 256,
        piece: int = 512,
        cache_bytes: int = 1 << 28,
    ) -> None:
        check_least(max_rows=max_rows, max_waiting=max_waiting)
        check_least(BLOCK_TOKENS, piece=piece)
        check_least(0, cache_bytes=cache_bytes)
        self.model, self.tokenizer = model, tokenizer
        self.max_rows, self.max_waiting, self.piece = max_rows, max_waiting, piece
        self.device, self._hidden = model.embedding.weight.device, decoder(model, last_hidden)
        self.prefixes, self.counts = PrefixCache(cache_bytes), Counts()
        self._waiting: deque[Job] = deque()
        self._reading: list[Job] = []
        self._groups: list[Group] = []
        self._calls: deque[tuple[Future, Callable[[], object]]] = deque()
        self._wake, self._stopping = threading.Condition(), False
        self._thread: threading.Thread | None = None

    def start(self) -> Engine:
        """Start the thread, and return the engine."""
        self._thread = threading.Thread(target=self._run, name="halflife-engine", daemon=True)
        self._thread.start()
        return self

    def submit(self, job: Job) -> Job:
        """Queue a job, and return it.

        Raises:
            Full: too many jobs wait.
            Stopping: `close` was called.
            ValueError: there is nothing to read, or more continuations than rows are asked for.
        """
        if not job.tokens and job.begin is None:
            raise ValueError("the prompt is empty: the model continues a text of at least one token")
        if job.rows > self.max_rows:
            raise ValueError(f"n must be at most {self.max_rows}; got {job.rows}")
        with self._wake:
            if self._stopping:
                raise Stopping("the server is stopping")
            if len(self._waiting) >= self.max_waiting:
                raise Full(f"{self.max_waiting} requests wait already")
            self._waiting.append(job)
            self._wake.notify()
        return job

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Let the engine's thread, which alone may run the model, call a function between two turns."""
        future: Future[Result] = Future()
        with self._wake:
            if self._stopping:
                raise Stopping("the server is stopping")
            self._calls.append((future, function))
            self._wake.notify()
        return future

    def close(self) -> None:
        """End all jobs and the thread. What is not done yet fails."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    @property
    def active(self) -> int:
        """Rows that are being read or written."""
        return sum(job.rows for job in self._reading) + sum(len(group.rows) for group in self._groups)

    @property
    def waiting(self) -> int:
        """Jobs that wait for a row."""
        return len(self._waiting)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        """The engine's thread, which alone calls the methods below."""
        with fast_linears(self.model):
            self._loop()
        self._fail(self._jobs(), "the server is stopping")
        for future, _ in self._calls:
            future.cancel()

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._stopping or self._waiting or self._reading or self._groups or self._calls):
                    self._wake.wait()
                if self._stopping:
                    return
            try:
                self.turn()
                self._answer_call()
            except Exception as error:  # a fault of this file: nobody waits for ever
                self._fail(self._jobs(), _reason(error))

    def _answer_call(self) -> None:
        if not self._calls:
            return
        future, function = self._calls.popleft()
        if future.set_running_or_notify_cancel():  # else nobody waits for it
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

    @torch.no_grad()
    def turn(self) -> None:
        """Read a piece of the prompts, and write a token of each continuation."""
        gone = {job for job in self._jobs() if job.cancelled}
        self.counts.cancelled += len(gone)
        self._end(gone, "the request was cancelled")
        self._let_in()
        self._read_prompts()
        self._write_tokens()

    def _jobs(self) -> set[Job]:
        with self._wake:
            return {*self._waiting, *self._reading, *(row.job for group in self._groups for row in group.rows)}

    def _fail(self, jobs: set[Job], reason: str) -> None:
        self.counts.failed += len(jobs)
        self._end(jobs, reason)

    def _end(self, jobs: set[Job], reason: str) -> None:
        if not jobs:
            return
        with self._wake:
            self._waiting = deque(job for job in self._waiting if job not in jobs)
        self._reading = [job for job in self._reading if job not in jobs]
        for group in self._groups:
            keep(group, [i for i, row in enumerate(group.rows) if row.job not in jobs])
        self._groups = [group for group in self._groups if group.rows]
        for job in jobs:
            job.free()
            job.emit(Failed(reason))

    def _let_in(self) -> None:
        """Take jobs from the queue while there are rows, and look for stored states of their prompts."""
        free = self.max_rows - self.active
        while True:
            with self._wake:
                if not self._waiting or self._waiting[0].rows > free:
                    return
                job = self._waiting.popleft()
            free -= job.rows
            self.counts.jobs += 1
            prefix, shared = job.begin, 0
            if prefix is None:
                prefix, shared = self.prefixes.find(job.tokens)
                job.position = job.reused = prefix.length if prefix else 0
                self.counts.reused_tokens += job.reused
            if prefix is not None:
                job.state, job.hidden = prefix.state, prefix.hidden
            job.cuts = tuple(sorted({shared, len(job.tokens)}))
            self._reading.append(job)

    def _read_prompts(self) -> None:
        for count, jobs in batches(self._portions()):
            try:
                self._read(jobs, count)
            except Exception as error:
                self._fail(set(jobs), _reason(error))
                break  # because the next calls may have these jobs too; the others go on at the next turn
        for job in [job for job in self._reading if job.position == len(job.tokens)]:
            self._reading.remove(job)
            try:
                self._begin(job)
            except Exception as error:
                self._fail({job}, _reason(error))

    def _begin(self, job: Job) -> None:
        """Begin the continuations of a prompt that is read."""
        if job.settings.max_tokens == 0:
            return self._finish(job, job.state, job.hidden, [])
        assert job.state is not None
        assert job.hidden is not None
        rows = [Row(job, i, self.tokenizer, self.device) for i in range(job.settings.n)]
        state = select(job.state, [0] * len(rows)) if len(rows) > 1 else job.state
        self._groups.append(Group(rows, state, job.hidden.expand(len(rows), -1)))
        job.left, job.state, job.hidden = len(rows), None, None

    def _portions(self) -> dict[Job, int]:
        """Return how many tokens of each prompt this turn reads. Short prompts leave their share to longer ones."""
        left, portions = self.piece, {}
        jobs = sorted(
            (job for job in self._reading if job.position < len(job.tokens)),
            key=lambda job: len(job.tokens) - job.position,
        )
        for i, job in enumerate(jobs):
            share = max(1, left // (len(jobs) - i))
            cut = next(cut for cut in job.cuts if cut > job.position)
            portions[job] = min(share, cut - job.position)
            left -= portions[job]
        return portions

    def _read(self, jobs: Sequence[Job], count: int) -> None:
        """Read `count` tokens of each prompt in one call. Their states have one form, or none has a state yet."""
        ids = torch.tensor([job.tokens[job.position : job.position + count] for job in jobs], device=self.device)
        states = [job.state for job in jobs if job.state is not None]
        hidden, after = self.model.hidden(ids, stack(states) if states else None)
        self.counts.prompt_tokens += ids.numel()
        for i, job in enumerate(jobs):
            job.state = select(after, [i]) if len(jobs) > 1 else after
            job.hidden, job.position = hidden[i, -1].clone(), job.position + count
            if job.begin is None and job.position in job.cuts:
                self.prefixes.add(job.tokens[: job.position], job.state, job.hidden)

    def _write_tokens(self) -> None:
        forms: dict[tuple, list[Group]] = {}
        for group in self._groups:
            forms.setdefault(form(group.state), []).append(group)
        self._groups = [merge(groups) for groups in forms.values()]
        for group in list(self._groups):
            try:
                self._step(group)
            except Exception as error:
                self._fail({row.job for row in group.rows}, _reason(error))
        self._groups = [group for group in self._groups if group.rows]

    def _step(self, group: Group) -> None:
        """Write one token of each row, and let the model read it where the row goes on."""
        logits = self.model.logits(group.hidden)
        best = likeliest(logits).tolist()
        if min(best) < 0:  # the other rows go on at the next turn
            broken = {row.job for row, token in zip(group.rows, best, strict=True) if token < 0}
            return self._fail(broken, NOT_FINITE)
        tokens = draw_tokens(logits, group.rows, best)
        going = []
        for i, (row, token) in enumerate(zip(group.rows, tokens, strict=True)):
            if not row.tokens:
                self.counts.first_tokens += 1
                self.counts.first_token_seconds += time.monotonic() - row.job.created
            wanted = row.job.settings.logprobs is not None
            if row.take(token, logits[i].float().log_softmax(-1) if wanted else None):
                self._finish(row.job, select(group.state, [i]), group.hidden[i].clone(), row.tokens)
            else:
                going.append(i)
        self.counts.written_tokens += len(group.rows)
        keep(group, going)
        if group.rows:
            ids = torch.tensor([[row.tokens[-1]] for row in group.rows], device=self.device)
            (group.hidden,), group.state = self._hidden(ids, group.state)
            self.counts.steps += 1

    def _finish(self, job: Job, state: ModelState | None, hidden: Tensor | None, tokens: list[int]) -> None:
        """End a continuation, whose last token is not read. After the last continuation, end the job."""
        assert state is not None
        assert hidden is not None
        read = [*job.tokens, *tokens[:-1]]
        if job.begin is None and tokens:
            self.prefixes.add(read, state, hidden)
        job.written += len(tokens)
        job.left -= 1
        if job.left <= 0:
            before, after = 0 if job.begin is None else job.begin.length, None
            if job.keep:
                recent = context(self.tokenizer.decode, [*job.before, *read])
                after = Prefix(before + len(read), state, hidden, tuple(recent))
            job.free()
            job.emit(Done(len(job.tokens), job.reused, job.written, after, tuple(tokens[-1:])))


def _reason(error: Exception) -> str:
    return f"the model failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"


def last_hidden(model: LanguageModel, ids: Tensor, state: ModelState | None) -> Decoded:
    """The hidden states `[B, D]` of the last tokens."""
    hidden, state = model.hidden(ids, state)
    return [hidden[:, -1]], state
