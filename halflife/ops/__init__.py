"""How memory is written and read: `(q, k, v, g, …, state) → (o, state)`."""

from halflife.ops.backend import available_backends, ops
from halflife.ops.delta_rule import delta_rule
from halflife.ops.linear_attention import linear_attention

__all__ = ["available_backends", "delta_rule", "linear_attention", "ops"]
