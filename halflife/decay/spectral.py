"""Decays with base rates, one per channel, which PoST can order and stretch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from halflife.decay.base import Decay
from halflife.registry import check_choice


class SpectralDecay(Decay):
    """A decay whose law `log_decay(f, log_rate)` takes base log-rates from outside, which PoST provides.

    By default PoST sorts log-rates, and stretches a channel by a factor on its log-decay. A strategy whose law is not
    exponential in the sorted parameter has `sorts_log_rates = False` and overrides `post_base` and `post_log_rates`.
    Its stretch is added to the sorted parameter.

    Class attributes:
        fastest_rate: the base rate at which PoST's fastest channel starts.
        bounded: whether the rates have an upper limit, near `fastest_rate`.
        sorts_log_rates: whether the parameter that PoST sorts is the logarithm of a rate.
    """

    fastest_rate = 1.0
    bounded = False
    sorts_log_rates = True

    @property
    def base_shape(self) -> tuple[int, ...]:
        """The shape of the base rates, `(H,)`, `(H, K)`, or `(H, 1)` for one rate per head under a vector decay."""
        return self.shape

    def release_rates(self) -> None:
        """Delete the base rates of the strategy. From then on the caller passes `log_rate` (PoST)."""
        raise NotImplementedError

    def rate_offset(self) -> float:
        """Return the log of the ratio between the decay rate at zero activation and `e^{log_rate}`, under PoST."""
        return 0.0

    def post_base(self, rate: float) -> float:
        """Return the base parameter that PoST sorts, for a channel whose resting decay rate is `rate`."""
        return math.log(rate) - self.rate_offset()

    def post_log_rates(self, base: Tensor) -> Tensor:
        """Return the log-rates of sorted base parameters, up to a constant. PoST's taper compares them."""
        return base


def no_base_rates(decay: Decay) -> ValueError:
    """The error of PoST for a decay that has no base rates."""
    return ValueError(f"{type(decay).__name__} has no base rates, one per channel, that PoST could order")


def check_rate_start(rate_start: str, choices: Sequence[str], train_length: int | None) -> None:
    """Check the start of the base rates of a strategy that has these choices, and T in tokens.

    It is a ValueError if the start is unknown, if "geometric" has no T or another start has one, or if T is below 2.
    """
    check_choice("rate_start", rate_start, choices)
    if (rate_start == "geometric") != (train_length is not None):
        raise ValueError(
            f"rate_start 'geometric' needs train_length, and no other start has it; got {rate_start!r} and "
            f"{train_length}"
        )
    if train_length is not None and train_length < 2:
        raise ValueError(f"train_length must be at least 2; got {train_length}")
