"""Where a token stands: encodings applied to queries and keys."""

from halflife.position.rope import check_pairs, rope

__all__ = ["check_pairs", "rope"]
