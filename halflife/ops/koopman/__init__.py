"""Spectral Koopman attention.

`op` holds the op, `call` its arguments, `state` the sums that it remembers, `layout` the chunks, `solve` the linear
algebra, `readout` the power filter with its gradient, `reference` the token loop that defines the op, and `graph` the
form that is exported.
"""

from halflife.ops.koopman.call import KoopmanCall, check_settings
from halflife.ops.koopman.op import KoopmanResult, attend, attend_token, koopman_attention, takes_token
from halflife.ops.koopman.state import convert_state

__all__ = [
    "KoopmanCall", "KoopmanResult", "attend", "attend_token", "check_settings", "convert_state", "koopman_attention",
    "takes_token",
]  # fmt: skip
