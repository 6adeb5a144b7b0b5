"""Spectral Koopman attention: the op, its state, its layout in segments, and the token loop that defines it."""

from halflife.ops.koopman.op import check_settings, koopman_attention

__all__ = ["check_settings", "koopman_attention"]
