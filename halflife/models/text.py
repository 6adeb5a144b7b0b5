"""From tokens, as they come, to text: whole characters, and the texts that end it."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence


def decoder(decode: Callable[[Sequence[int]], str] | None, before: Sequence[int] = ()) -> Callable[..., str]:
    """Return a function `unpack(tokens, final=…)` from tokens, as they come, to the characters that they complete.

    Args:
        decode: the tokenizer's function from ids to text; None for bytes.
        before: the tokens before the first one, as far as its text depends on them.
    """
    return _Bytes() if decode is None else _Incremental(decode, list(before))


def pieces_of_text(tokens: Iterator[int], stop: frozenset[int], unpack: Callable[..., str]) -> Iterator[str]:
    """Yield the text of the tokens as they come; the first part of a character waits for the rest of it."""
    for token in tokens:
        if token in stop:
            break
        if piece := unpack([token], final=False):
            yield piece
    if piece := unpack([], final=True):
        yield piece


def divide_stops(stop: Sequence[int | str]) -> tuple[frozenset[int], list[str]]:
    """Return the tokens and the texts of `stop`."""
    texts = [one for one in stop if isinstance(one, str)]
    tokens = [one for one in stop if isinstance(one, int) and not isinstance(one, bool)]
    if len(texts) + len(tokens) < len(stop):
        raise TypeError(f"stop must be a text, or a list of tokens and texts; got {stop!r}")
    if "" in texts:
        raise ValueError("a text of stop must not be empty")
    return frozenset(tokens), texts


def until(pieces: Iterator[str], stops: Sequence[str]) -> Iterator[str]:
    """Yield the text before the first of `stops`. An end that may be the beginning of one waits for the rest of it."""
    held = ""
    for piece in pieces:
        held += piece
        if ends := [at for stop in stops if (at := held.find(stop)) >= 0]:
            held = held[: min(ends)]
            break
        waiting = max((n for stop in stops for n in range(1, len(stop)) if held.endswith(stop[:n])), default=0)
        if ready := held[: len(held) - waiting]:
            yield ready
        held = held[len(ready) :]
    if held:
        yield held


class _Bytes:
    """Decode tokens that are bytes of UTF-8; invalid bytes become replacement characters."""

    def __init__(self) -> None:
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __call__(self, tokens: Sequence[int], *, final: bool) -> str:
        return self.decoder.decode(bytes(tokens), final)


class _Incremental:
    """Decode token by token. A token's text may depend on earlier tokens, so these are decoded together with it."""

    def __init__(self, decode: Callable[[Sequence[int]], str], before: list[int]) -> None:
        self.decode = decode
        self.before = before  # the last tokens whose text has been returned
        self.waiting: list[int] = []

    def __call__(self, tokens: Sequence[int], *, final: bool) -> str:
        self.waiting += tokens
        known, text = self.decode(self.before) if self.before else "", self.decode([*self.before, *self.waiting])
        if not final and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        if self.waiting:
            self.before, self.waiting = self.waiting, []
        return text[len(known) :]
