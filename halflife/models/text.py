"""From logits to tokens, and from tokens, as they come, to text: whole characters, and the texts that end it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from halflife.ops.arguments import may_branch
from halflife.precision import compute_dtype

Decode = Callable[[Sequence[int]], str]

REPLACED = "\N{REPLACEMENT CHARACTER}"
NOT_FINITE = "the logits of the model are not finite, as after a divergence in training"
CONTEXT = 64  # tokens
COLDEST = 2e-38  # a temperature in float32 with a finite reciprocal
FIRST_IDS = 1024  # where a vocabulary has its single bytes
_fragments: WeakKeyDictionary[object, int | None] = WeakKeyDictionary()  # by tokenizer


class TextStream:
    """The text of tokens as they come, which together is what `decode` says of all tokens.

    A token's text may depend on earlier tokens, so these are decoded together with it. A character appears with the
    last token that it needs. Characters that a later token may change wait. With byte fallback, one wrong byte makes
    the whole run of bytes unreadable, so the run waits for its end. Characters that may begin a stop string wait too.

    Args:
        decode: the tokenizer's function from ids to text; None for bytes.
        before: the tokens before the first one, or the last of them that `context` returns.
        stops: strings that end the text; they are no part of it.

    Attributes:
        released: number of characters that `push` has returned.
        stopped: whether a stop string came.
    """

    def __init__(self, decode: Decode | None, before: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode or _decode_bytes, tuple(stops)
        self._fragment = _find_fragment(self._decode)
        self._before = context(decode, before)  # the last tokens whose text is released
        self._known = self._decode(self._before)
        self._pending: list[int] = []  # tokens whose text is not released
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
        self._pending += tokens
        if not self._pending:
            return ""
        read = [*self._before, *self._pending]
        text = self._decode(read)
        if not final and not self._settled(read, text):
            return ""
        piece = text[self._known_length(text) :]
        # Tokens without a text, as skipped special tokens are, do not show that text precedes the next token.
        self._known = self._decode(self._pending)
        if self._known:
            self._before = self._pending
        else:
            self._before, self._known = read, text
        self._pending = []
        return piece

    def _settled(self, tokens: list[int], text: str) -> bool:
        if text.endswith(REPLACED):
            return False
        return self._fragment is None or self._decode([*tokens, self._fragment]).startswith(text)

    def _known_length(self, text: str) -> int:
        """Return how much of `text` is that of earlier tokens. They may end in an incomplete character."""
        if self._known.endswith(REPLACED) and not text.startswith(self._known):
            differ = (i for i, (one, other) in enumerate(zip(self._known, text, strict=False)) if one != other)
            return next(differ, len(text))
        return len(self._known)

    def _begun(self) -> int:
        waiting = self._waiting
        lengths = ((stop, range(1, min(len(stop), len(waiting) + 1))) for stop in self._stops)
        begun = (n for stop, most in lengths for n in most if waiting.endswith(stop[:n]))
        return max(begun, default=0)


def context(decode: Decode | None, tokens: Sequence[int]) -> list[int]:
    """Return the last tokens of `tokens` after which later tokens have the text that they have after all of them.

    These are some 64 that have a text and do not begin within a character.
    """
    decode, count = decode or _decode_bytes, CONTEXT
    while count < len(tokens) and (not (text := decode(tokens[-count:])) or text.startswith(REPLACED)):
        count *= 2
    return list(tokens[-count:])


def _find_fragment(decode: Decode) -> int | None:
    """Return a token that is a byte within a character, or None if the tokenizer has none."""
    owner = getattr(decode, "__self__", decode)
    with suppress(TypeError):  # an owner that cannot be referred to weakly
        if owner in _fragments:
            return _fragments[owner]
    found = None
    with suppress(Exception):  # a function of the user's may refuse ids
        found = next((i for i in range(FIRST_IDS) if decode([i]) == REPLACED), None)
    with suppress(TypeError):
        _fragments[owner] = found
    return found


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


def draw(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> int:  # fmt: skip
    """Draw a token from `logits [V]`; the settings are those of `Session.sample`.

    Raises:
        ValueError: a logit is not finite.
    """
    return number_of(choose(logits, temperature, top_k, top_p, generator))


def likeliest(logits: Tensor) -> Tensor:
    """The likeliest tokens `[…]` by logits `[…, V]`, or −1 where one is not finite; they stay on the device."""
    return torch.where(logits.isfinite().all(-1), logits.argmax(-1), -1)


def choose(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None,
    best: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Draw a token as `draw` does, but leave it on its device, where it is −1 if a logit is not finite.

    The host of an accelerator waits for nothing. `best` is the `likeliest` token, if it is known.
    """
    if temperature == 0:
        return likeliest(logits) if best is None else best
    finite = logits.isfinite().all() if best is None else best >= 0
    if may_branch(logits.device):
        if not finite:
            raise ValueError(NOT_FINITE)
        return torch.multinomial(probabilities(logits, temperature, top_k, top_p), 1, generator=generator)[0]
    p = probabilities(logits, temperature, top_k, top_p)
    noise = torch.empty_like(p).exponential_(generator=generator)  # as in `multinomial`, which reads two values of p
    return torch.where(finite, (p / noise).argmax(), -1)


def number_of(token: Tensor) -> int:
    """The only value of a token that the host of an accelerator waits for."""
    if (number := int(token)) < 0:
        raise ValueError(NOT_FINITE)
    return number


def probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Return the probability of each token, `[V]`, float32. Temperature applies first, then top_k, then top_p."""
    scaled = _divided(logits, temperature)
    if top_k is not None and top_k < len(scaled):
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[-1], -torch.inf)
    p = scaled.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = p.sort(descending=True, stable=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p  # the tokens before have enough probability
        beyond[0] = False  # also where `top_p` is 0, or is rounded to it
        p = torch.zeros_like(p).scatter(0, order, ordered.masked_fill(beyond, 0.0))
    return p / p.sum()


def _divided(logits: Tensor, temperature: float) -> Tensor:
    """The logits in float32 over the temperature, up to a constant; finite even if they are huge, or it is tiny."""
    if may_branch(logits.device):
        scaled = logits.float() / temperature
        if scaled.isfinite().all():
            return scaled
        return ((logits.double() - logits.double().max()) / temperature).float()
    wide = logits.to(compute_dtype(logits))
    return ((wide - wide.max()) / max(temperature, COLDEST)).float()
