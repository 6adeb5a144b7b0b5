"""The ops, which write and read memory: `(q, k, v, g, …, state) → (o, state)`."""

from halflife.ops.backends.dispatch import available_backends, ops
from halflife.ops.conv import causal_conv1d
from halflife.ops.delta_rule import delta_rule
from halflife.ops.dplr import dplr
from halflife.ops.gate_rank import gate_rank
from halflife.ops.koopman.op import koopman_attention
from halflife.ops.linear_attention import linear_attention
from halflife.ops.log_linear import log_linear_attention
from halflife.ops.ridge_attention import ridge_attention
from halflife.ops.selfcheck import selfcheck

__all__ = [
    "available_backends", "causal_conv1d", "delta_rule", "dplr", "gate_rank", "koopman_attention",
    "linear_attention", "log_linear_attention", "ops", "ridge_attention", "selfcheck",
]  # fmt: skip
