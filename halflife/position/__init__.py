"""Position encodings of queries and keys."""

from halflife.position.lrpe import half_lrpe, lrpe
from halflife.position.rope import check_pairs, rope, rotate

__all__ = ["check_pairs", "half_lrpe", "lrpe", "rope", "rotate"]
