"""Position encodings of queries and keys."""

from halflife.position.lrpe import lrpe
from halflife.position.rope import check_pairs, rope, rotate

__all__ = ["check_pairs", "lrpe", "rope", "rotate"]
