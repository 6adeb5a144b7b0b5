"""Where a token stands: encodings applied to queries and keys."""

from halflife.position.rope import rope

__all__ = ["rope"]
