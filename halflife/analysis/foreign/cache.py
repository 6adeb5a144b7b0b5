"""The cache of transformers for a model without attention layers."""

from __future__ import annotations

from typing import Any


def recurrent_cache(config: Any) -> Any:
    """Return an empty cache for a decoder of recurrent layers alone.

    Some decoders build an attention mask even if no layer uses it. They ask the cache how many tokens it has seen. A
    cache without attention layers refuses to say, and here the attribute `seen` answers.
    """
    from transformers import DynamicCache

    class RecurrentCache(DynamicCache):
        seen = 0

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self.seen

        def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
            return self.seen + query_length, 0

    return RecurrentCache(config=config)
