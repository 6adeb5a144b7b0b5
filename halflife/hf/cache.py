"""The state of a model in the form that transformers' `generate` needs."""

from __future__ import annotations

from torch import Tensor

from halflife.models.lm import ModelState
from halflife.models.states import changed


class HalflifeCache:
    """The state of a model, which transformers calls `past_key_values`.

    A forward pass returns a new cache and does not modify its input. The methods change this object, never its tensors.

    Args:
        state: the model's state, one row for each sequence.
        seen: columns of the batch that the model has read, padding included; None means the longest sequence's tokens.
    """

    is_compileable = False
    is_croppable = False  # a recurrent state cannot forget its last tokens

    def __init__(self, state: ModelState, seen: int | None = None) -> None:
        self.state = state
        self.seen = int(state[0]["position"].max()) if seen is None else seen

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self.state)

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return len(self.state[0]["position"])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns of the batch that the model has read."""
        return self.seen

    def copy(self) -> HalflifeCache:
        """Return another cache of the same state. The two share tensors, which are never modified."""
        return HalflifeCache(self.state, self.seen)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices`, in this order."""
        self.state = changed(self.state, lambda x: x.index_select(0, indices.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times (for beams and `num_return_sequences`)."""
        self.state = changed(self.state, lambda x: x.repeat_interleave(repeats, 0))

    reorder_cache = batch_select_indices  # beam search calls it by this name
