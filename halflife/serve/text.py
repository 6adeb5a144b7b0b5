"""Text of tokens as they come, which ends at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halflife.data.tokenizers import ByteTokenizer, Tokenizer
from halflife.models.text import decoder

Unpack = Callable[..., str]


def unpacker(tokenizer: Tokenizer, before: Sequence[int]) -> Unpack:
    """Return a function `unpack(tokens, final=…)` to the characters that the tokens complete.

    Args:
        tokenizer: of the text.
        before: the last token of the prompt, on which the first text may depend, or nothing.
    """
    if not isinstance(tokenizer, ByteTokenizer):
        return decoder(tokenizer.decode, before)
    stream = tokenizer.stream()
    return lambda tokens, final: stream.push(tokens) + (stream.finish() if final else "")


class StoppableText:
    """Text that is released piece by piece. Characters that may begin a stop string wait.

    Args:
        unpack: see `unpacker`.
        stops: strings that end the text; they are no part of it.

    Attributes:
        released: number of characters that `push` has returned.
        stopped: whether a stop string came.
    """

    def __init__(self, unpack: Unpack, stops: Sequence[str] = ()) -> None:
        self._unpack, self._stops = unpack, tuple(stops)
        self._waiting = ""
        self.released, self.stopped = 0, False

    def __len__(self) -> int:
        """Return the number of characters, those that wait included."""
        return self.released + len(self._waiting)

    def push(self, tokens: Sequence[int], final: bool = False) -> str:
        """Return the characters that `tokens` release; `final` releases all."""
        self._waiting += self._unpack(tokens, final=final)
        ends = [at for stop in self._stops if (at := self._waiting.find(stop)) >= 0]
        if ends:
            self.stopped, self._waiting, cut = True, self._waiting[: min(ends)], min(ends)
        else:
            cut = len(self._waiting) - (0 if final else self._begun())
        piece, self._waiting = self._waiting[:cut], self._waiting[cut:]
        self.released += len(piece)
        return piece

    def _begun(self) -> int:
        """Return the most characters at the end of the waiting text with which a stop string begins."""
        longest = max(map(len, self._stops), default=1) - 1
        for count in range(min(longest, len(self._waiting)), 0, -1):
            if any(stop.startswith(self._waiting[-count:]) for stop in self._stops):
                return count
        return 0
