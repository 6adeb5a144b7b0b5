"""What the engine is asked for, what it answers, and what it counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from halflife.data.tokenizers import Tokenizer
from halflife.models.lm import ModelState
from halflife.models.text import TextStream
from halflife.serve.prefixes import Prefix


class Full(Exception):
    """Too many jobs wait."""


class Stopping(Exception):
    """The engine takes no more jobs."""


@dataclass
class Counts:
    """What the engine has done so far. Its thread writes the numbers, and others may read them."""

    prompt_tokens: int = 0  # read, without those that a stored state stood for
    reused_tokens: int = 0
    written_tokens: int = 0
    steps: int = 0  # batched steps of one token
    jobs: int = 0
    cancelled: int = 0
    failed: int = 0
    first_token_seconds: float = 0.0  # sum over `first_tokens`
    first_tokens: int = 0


@dataclass(frozen=True)
class Settings:
    """How a text is continued."""

    max_tokens: int  # largest number of tokens to write; 0 to read only
    temperature: float = 1.0  # divisor of the logits; 0 takes the likeliest token
    top_p: float = 1.0  # draw only from the likeliest tokens that together have at least this probability
    seed: int | None = None  # of the first continuation; the others count on. None means a new one each time
    stop: tuple[str, ...] = ()  # strings that end the text
    logprobs: int | None = None  # number of likeliest tokens to report with each token; None reports nothing
    n: int = 1  # number of continuations


@dataclass(frozen=True)
class Written:
    """A token that was written: where its text begins, its log-probability, and the likeliest tokens with theirs."""

    token: int
    offset: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A piece of a continuation. The last piece says why the text ends: "stop" or "length"."""

    choice: int
    text: str
    tokens: tuple[Written, ...]
    finish: str | None


@dataclass(frozen=True)
class Done:
    """The end of a job."""

    read: int  # tokens of the prompt
    reused: int  # how many of them a stored state stood for
    written: int  # tokens of all continuations
    after: Prefix | None  # what the model has read at the end, if the job asks to keep it
    unread: tuple[int, ...]  # tokens of the text that are not yet read


@dataclass(frozen=True)
class Failed:
    """The job has ended without a result."""

    message: str


Event = Piece | Done | Failed


@dataclass(eq=False)
class Job:
    """A prompt to read, and continuations to write."""

    tokens: Sequence[int]  # the prompt, which may be empty if the job begins after other tokens
    settings: Settings  # of the continuations
    emit: Callable[[Event], None]  # called by the engine's thread with each event; the last is `Done` or `Failed`
    begin: Prefix | None = None  # what a session has read before; None for a prompt from its beginning
    keep: bool = False  # whether the end of the job reports what the model has read
    cancelled: bool = False  # set by anyone who no longer wants the answer
    created: float = field(default_factory=time.monotonic)
    # The progress, which belongs to the engine's thread:
    position: int = 0  # tokens of the prompt that are read
    reused: int = 0
    cuts: tuple[int, ...] = ()  # positions at which a state is stored
    state: ModelState | None = None
    hidden: Tensor | None = None  # [D]
    written: int = 0
    left: int = 0  # continuations that have not ended

    @property
    def before(self) -> tuple[int, ...]:
        """The last tokens before those of `tokens`, as far as the text of later ones depends on them."""
        return () if self.begin is None else self.begin.recent

    @property
    def rows(self) -> int:
        """Rows of the batch that the job needs."""
        return max(1, self.settings.n)

    def free(self) -> None:
        """Let the states go at the end: a job is part of a circle of references, which Python frees late."""
        self.state = self.hidden = self.begin = None


class Row:
    """Continuation number `choice` of a job whose prompt is read. `device` is that of the random numbers."""

    def __init__(self, job: Job, choice: int, tokenizer: Tokenizer, device: torch.device) -> None:
        self.job, self.choice, self.eos = job, choice, tokenizer.eos
        self.generator = torch.Generator(device)
        seed = job.settings.seed
        self.generator.seed() if seed is None else self.generator.manual_seed((seed + choice) % 2**64)
        self.text = TextStream(tokenizer.decode, [*job.before, *job.tokens], job.settings.stop)
        self.tokens: list[int] = []
        self._unreported: list[Written] = []

    def take(self, token: int, logprobs: Tensor | None) -> bool:
        """Add a token, emit the text that it releases, and return whether the continuation has ended.

        `logprobs` are the log-probabilities of all tokens `[V]`, if the client asked for them.
        """
        settings = self.job.settings
        self.tokens.append(token)
        ended, full = token == self.eos, len(self.tokens) == settings.max_tokens
        if not ended:
            self._unreported.append(self._report(token, logprobs))
        piece = self.text.push([] if ended else [token], final=ended or full)
        finish = "stop" if ended or self.text.stopped else "length" if full else None
        if not piece and finish is None:
            return False
        count = len(self._unreported)
        if finish is None or self.text.stopped:  # the text of the others is not released, or is no part of the answer
            count = sum(written.offset < self.text.released for written in self._unreported)
        shown, self._unreported = tuple(self._unreported[:count]), self._unreported[count:]
        self.job.emit(Piece(self.choice, piece, shown, finish))
        return finish is not None

    def _report(self, token: int, logprobs: Tensor | None) -> Written:
        if logprobs is None:
            return Written(token, len(self.text))
        best = logprobs.topk(min(self.job.settings.logprobs or 0, len(logprobs)))
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Written(token, len(self.text), float(logprobs[token]), top)
