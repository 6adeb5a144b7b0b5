"""The state of a model in the form that transformers' `generate` needs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from halflife.models.lm import ModelState
from halflife.models.states import changed

# The name of a cache in arguments and outputs: "past_key_values" before transformers 5.24, and "cache" since.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
Tokens = tuple[Tensor, Tensor | None]  # ids `[B, T]` or embeddings `[B, T, D]`, and their mask `[B, T]`


class HalflifeCache:
    """The state of a model, which transformers calls `cache`, and before 5.24 `past_key_values`.

    A forward pass returns a new cache and does not modify its input. The methods change this object, never its tensors.

    Args:
        state: the model's state, one row for each sequence; None before the first token.
        seen: columns of the batch that were read, padding included; None means the longest sequence's tokens.
        static: whether `generate` may compile the forward pass, as with a static cache of transformers.

    Attributes:
        unread: the tokens that the state has not read, though they are in `seen`; the next forward pass reads them
            first. It is empty unless `crop` returned to an earlier state.
        prompt: columns of the ids of `generate` that have been read, if `generate` read them before it began to decode.
    """

    is_linear = (False,)  # transformers ≥ 5.24 asks a cache how much it has read unless all entries are true

    def __init__(self, state: ModelState | None = None, seen: int | None = None, *, static: bool = False) -> None:
        self.state, self.is_compileable = state, static
        self._columns = 0  # those beyond the tokens of the longest row
        if seen is not None:
            self.seen = seen
        self.unread: list[Tokens] = []
        self.prompt: int | None = None
        # What `crop` needs: the columns and the state before forward passes, and all tokens since the first of them.
        self._states: list[tuple[int, ModelState | None]] | None = None
        self._tokens: list[Tokens] = []

    @staticmethod
    def check(past_key_values: object, cache: object = None) -> HalflifeCache | None:
        """Return the cache that is given under one of the two names, or None.

        Raises:
            TypeError: it is of another kind.
            ValueError: both are given.
        """
        if past_key_values is not None and cache is not None:
            raise ValueError("give either cache or past_key_values, which are two names of one argument")
        given = past_key_values if cache is None else cache
        if given is not None and not isinstance(given, HalflifeCache):
            raise TypeError(
                f"{CACHE} must be the HalflifeCache that an earlier call returned, or None: a recurrent model "
                f"has a state in the place of keys and values; got {type(given).__name__}"
            )
        return given

    def __len__(self) -> int:
        """Return the number of layers; 0 before the first token."""
        return 0 if self.state is None else len(self.state)

    @property
    def batch_size(self) -> int:
        """Rows of the batch; 0 before the first token."""
        return 0 if self.state is None else len(self.state[0]["position"])

    @property
    def seen(self) -> int:
        """Columns of the batch that the model has read, padding included."""
        # A number of its own would change at each step, and a compiled forward pass would be compiled for each again.
        return self._columns + self._longest()

    @seen.setter
    def seen(self, count: int) -> None:
        self._columns = count - self._longest()

    def _longest(self) -> int:
        return int(self.state[0]["position"].max()) if self.state is not None and self.batch_size else 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns of the batch that the model has read."""
        return self.seen

    def copy(self) -> HalflifeCache:
        """Return another cache of the same state. The two share tensors, which are never modified."""
        other = HalflifeCache(self.state, static=self.is_compileable)
        other._columns, other.prompt = self._columns, self.prompt
        other.unread, other._tokens = [*self.unread], [*self._tokens]
        other._states = None if self._states is None else [*self._states]
        return other

    def after(self, state: ModelState, tokens: Tokens, before: ModelState | None) -> HalflifeCache:
        """Return the cache after a forward pass that read `tokens` and led from the state `before` to `state`."""
        new = HalflifeCache(state, static=self.is_compileable)
        if tokens[1] is None and not self.unread:
            new._columns = self._columns
        else:
            new.seen = self.seen + tokens[0].shape[1]
        if self._states is not None:
            new._states, new._tokens = [*self._states, (self.seen, before)], [*self._tokens, tokens]
        return new

    @property
    def recording(self) -> bool:
        """Whether states are kept for `crop`."""
        return self._states is not None

    is_croppable = recording

    def activate_past_recording(self) -> None:
        """Keep the state before each further forward pass, and its tokens, for `crop`."""
        if self._states is None:
            self._states = []

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, and all earlier states that were kept for it.

        The state becomes the last one that was kept before them. The next forward pass begins with the tokens between.

        Args:
            tokens_to_remove: their number as a negative number, or 0, as in transformers.

        Raises:
            RuntimeError: `activate_past_recording` was called too late or not at all.
        """
        if self._states is None or tokens_to_remove > 0:
            raise RuntimeError(
                "crop takes a negative number of tokens, after activate_past_recording and the forward passes that it "
                f"undoes; got {tokens_to_remove}" + ("" if self._states is None else " while it records")
            )
        length = self.seen + tokens_to_remove
        states = self._states if self.unread else [*self._states, (self.seen, self.state)]
        kept = [x for x in states if x[0] <= length]
        if not kept:
            raise RuntimeError(f"the states before {states[0][0]} tokens were not kept; crop to {length} needs them")
        (origin, _), (start, self.state) = kept[0], kept[-1]
        self.unread = _part(self._tokens, start - origin, length - origin)
        self._tokens = _part(self._tokens, 0, length - origin)
        self._states, self.seen = [kept[0], kept[-1]], length

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices`, in this order."""
        self._change(lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times (for beams and `num_return_sequences`)."""
        self._change(lambda x: x.repeat_interleave(repeats, 0))

    reorder_cache = batch_select_indices  # beam search calls it by this name

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        def of(state: ModelState | None) -> ModelState | None:
            return None if state is None else changed(state, change)

        def tokens(parts: list[Tokens]) -> list[Tokens]:
            return [(change(x), None if mask is None else change(mask)) for x, mask in parts]

        seen = self.seen
        self.state, self.unread, self._tokens = of(self.state), tokens(self.unread), tokens(self._tokens)
        self.seen = seen
        if self._states is not None:
            self._states = [(seen, of(state)) for seen, state in self._states]


def _part(tokens: list[Tokens], start: int, stop: int) -> list[Tokens]:
    parts, first = [], 0
    for x, mask in tokens:
        piece = slice(max(start - first, 0), max(stop - first, 0))
        if x[:, piece].shape[1]:
            parts.append((x[:, piece], None if mask is None else mask[:, piece]))
        first += x.shape[1]
    return parts
