"""From tokens, as they come, to text: whole characters, and the texts that end it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence


class TextStream:
    """The text of tokens as they come. A character appears with the last token that it needs.

    A token's text may depend on earlier tokens, so these are decoded together with it. Characters that may begin a stop
    string wait.

    Args:
        decode: the tokenizer's function from ids to text; None for bytes.
        before: the tokens before the first one, as far as its text depends on them.
        stops: strings that end the text; they are no part of it.

    Attributes:
        released: number of characters that `push` has returned.
        stopped: whether a stop string came.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str] | None, before: Sequence[int] = (), stops: Sequence[str] = ()
    ) -> None:
        self._decode, self._stops = decode or _decode_bytes, tuple(stops)
        self._before = list(before)  # the last tokens whose text is decoded
        self._incomplete: list[int] = []  # tokens whose last character is not complete
        self._waiting = ""
        self.released, self.stopped = 0, False

    def __len__(self) -> int:
        """Return the number of characters, those that wait included."""
        return self.released + len(self._waiting)

    def push(self, tokens: Sequence[int], final: bool = False) -> str:
        """Return the characters that `tokens` release; `final` releases all."""
        self._waiting += self._decode_next(tokens, final)
        ends = [at for stop in self._stops if (at := self._waiting.find(stop)) >= 0]
        if ends:
            self.stopped, self._waiting, cut = True, self._waiting[: min(ends)], min(ends)
        else:
            cut = len(self._waiting) - (0 if final else self._begun())
        piece, self._waiting = self._waiting[:cut], self._waiting[cut:]
        self.released += len(piece)
        return piece

    def _decode_next(self, tokens: Sequence[int], final: bool) -> str:
        self._incomplete += tokens
        known, text = self._decode(self._before), self._decode([*self._before, *self._incomplete])
        if not final and text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        if self._incomplete:
            self._before, self._incomplete = self._incomplete, []
        return text[len(known) :]

    def _begun(self) -> int:
        """Return the most characters at the end of the waiting text with which a stop string begins."""
        begun = (n for stop in self._stops for n in range(1, len(stop)) if self._waiting.endswith(stop[:n]))
        return max(begun, default=0)


def _decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


def pieces_of_text(tokens: Iterator[int], ends: frozenset[int], stream: TextStream) -> Iterator[str]:
    """Yield the text of the tokens as they come, until one of `ends` or a stop string of the stream."""
    for token in tokens:
        if token in ends:
            break
        if piece := stream.push([token]):
            yield piece
        if stream.stopped:
            return
    if piece := stream.push([], final=True):
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
