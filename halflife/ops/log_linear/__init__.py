"""Log-linear attention: a state for every power of two of the distance."""

from halflife.ops.log_linear import chunked, mask  # noqa: F401 (each registers itself)
from halflife.ops.log_linear.op import log_linear_attention

__all__ = ["log_linear_attention"]
