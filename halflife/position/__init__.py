"""Position encodings of queries and keys."""

from halflife.position.lrpe import half_lrpe, lrpe
from halflife.position.rope import angles, check_pairs, rope, rotate, spread

__all__ = ["angles", "check_pairs", "half_lrpe", "lrpe", "rope", "rotate", "spread"]
