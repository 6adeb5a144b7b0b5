"""The contract of a decay: how fast memory fades, from an activation and a position to a log-decay."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halflife.precision import Float32Module
from halflife.registry import Registry

DECAYS: Registry[type[Decay]] = Registry("decay")

GRANULARITIES = ("scalar", "vector")


class Decay(Float32Module):
    """Log-decays `g ≤ 0` from activations f, `[B, T, H]` (scalar) or `[B, T, H, K]` (vector).

    A strategy is one file: parameters in `reset_parameters`, the law in `log_decay`. Class attributes say what it is:

    * `data_dependent`: whether `g` depends on f (if not, layers make no projection for it, and only the
      shape of f counts);
    * `spectral`: whether it has base rates, one a channel, that PoST can order;
    * `fastest_rate`: the rate at which PoST's fastest channel starts;
    * `bounded`: whether its rates have a limit, which lies near that;
    * `shares_keys`: whether the architecture it comes from writes `k = 1 − λ`;
    * `granularities`: for which it is defined.

    Args:
        num_heads: heads H.
        head_dim: key channels of a head, K.
        granularity: "scalar" (one rate a head) or "vector" (one a key channel).
        layer_idx, num_layers: where the layer stands; some strategies decay more slowly in deep layers.

    Raises:
        ValueError: a granularity for which the strategy is not defined, or sizes below 1.
    """

    data_dependent = True
    spectral = False
    fastest_rate = 1.0
    bounded = False
    shares_keys = False
    granularities: tuple[str, ...] = GRANULARITIES

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        granularity: str = "scalar",
        layer_idx: int = 0,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        if granularity not in self.granularities:
            raise ValueError(
                f"{type(self).__name__} is defined for granularity {' and '.join(self.granularities)}; "
                f"got {granularity!r}"
            )
        if min(num_heads, head_dim, num_layers) < 1 or not 0 <= layer_idx < num_layers:
            raise ValueError(
                f"need num_heads, head_dim ≥ 1 and 0 ≤ layer_idx < num_layers; got {num_heads}, {head_dim}, "
                f"{layer_idx} of {num_layers}"
            )
        self.num_heads, self.head_dim, self.granularity = num_heads, head_dim, granularity
        self.layer_idx, self.num_layers = layer_idx, num_layers

    def step(self, f: Tensor) -> Tensor:
        """The step size by which a layer also scales its values; only Mamba-2's decays have one."""
        raise ValueError(f"{type(self).__name__} has no step size")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one token's log-decays: `(H,)` or `(H, K)`."""
        return (self.num_heads,) if self.granularity == "scalar" else (self.num_heads, self.head_dim)

    def reset_parameters(self) -> None:
        """Draws the parameters anew, by the strategy's law; calling it again gives a fresh draw."""

    def forward(self, f: Tensor, *, position: Tensor | None = None, log_rate: Tensor | None = None) -> Tensor:
        """Log-decays `g ≤ 0` in float32 (float64 for float64 activations).

        Args:
            f: activations `[B, T, H]` or `[B, T, H, K]`; the gradient flows into them.
            position: token positions, from 1, `[T]` or `[B, T]`; only decays that depend on position use it.
            log_rate: base log-rates to use instead of the strategy's own, `[H]` or `[H, K]` (PoST).
        """
        return self.log_decay(self._wide(f), log_rate)

    def log_decay(self, f: Tensor, log_rate: Tensor | None) -> Tensor:
        """The law itself: `g` from float32 activations and, if given, base log-rates instead of its own."""
        raise NotImplementedError

    def _wide(self, f: Tensor) -> Tensor:
        if f.shape[2:] != self.shape:
            raise ValueError(f"f must be [B, T, {', '.join(map(str, self.shape))}]; got {tuple(f.shape)}")
        return f if f.dtype == torch.float64 else f.float()

    def scan(
        self,
        f: Tensor,
        *,
        position: Tensor | None = None,
        state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`(g, state)`: `forward` for streaming; only decays that remember (`stateful`) have a state."""
        return self(f, position=position), None

    stateful = False

    # ---- base rates

    def base_log_rate(self) -> Tensor:
        """Log of the decay rate, log(−g), at zero activation: `[H]` or `[H, K]`."""
        return self._log_rate_at_rest(None)

    def timescales(self, position: float = 1) -> Tensor:
        """Tokens after which a channel has decayed by 1/e, at zero activation: `[H]` or `[H, K]`.

        Args:
            position: the token's position, from 1; only position-adaptive decays depend on it.
        """
        return (-self.base_log_rate()).exp()

    def _log_rate_at_rest(self, log_rate: Tensor | None) -> Tensor:
        return self.log_decay(self._rest(), log_rate).neg().log()[0, 0]

    def _rest(self) -> Tensor:
        """Zero activation of one token, `[1, 1, H]` or `[1, 1, H, K]`."""
        tensors = [*self.parameters(), *self.buffers()]
        return torch.zeros(1, 1, *self.shape, device=tensors[0].device if tensors else None)

    # ---- under PoST: what it orders, and how that stretches. Log-rates, outside the law, unless a strategy says else

    def release_rates(self) -> None:
        """Gives up the strategy's own base rates: from now on `log_rate` is always passed (PoST)."""
        raise ValueError(f"{type(self).__name__} has no base rates, one a channel, that PoST could order")

    def rate_offset(self) -> float:
        """Log of the factor between `e^{log_rate}` and the decay rate at zero activation, under PoST."""
        return 0.0

    def post_base(self, rate: float) -> float:
        """What PoST orders, of a channel with this decay rate at zero activation: by default its log-rate."""
        return math.log(rate) - self.rate_offset()

    def post_log_rates(self, base: Tensor) -> Tensor:
        """The log-rates of ordered quantities, up to a constant: PoST's taper compares them."""
        return base

    def activation(self, f: Tensor) -> Tensor:
        """f and the bias, if any, that PoST leaves in it and that base rates do not count."""
        return f

    def stretch_log_decay(self, f: Tensor, base: Tensor, log_stretch: Tensor) -> Tensor:
        """The law when each rate is multiplied by `e^{log_stretch}`, `[…, T, H]` or `[…, T, H, K]`."""
        g = self.log_decay(f, base)
        return g * log_stretch.exp().to(g.dtype)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, granularity={self.granularity}"


def build(
    name: str, *, num_heads: int, head_dim: int, granularity: str = "scalar",
    layer_idx: int = 0, num_layers: int = 1, **options: object,
) -> Decay:  # fmt: skip
    """The decay strategy `name` with its parameters drawn.

    Args:
        name: one of `DECAYS.names()`.
        num_heads, head_dim, granularity, layer_idx, num_layers: see `Decay`.
        **options: the strategy's own (`p` of "simple", `tau` of "gla", …).

    Raises:
        ValueError: an unknown name (the message lists the choices), granularity or size.
    """
    return DECAYS[name](
        num_heads=num_heads, head_dim=head_dim, granularity=granularity,
        layer_idx=layer_idx, num_layers=num_layers, **options,
    )  # fmt: skip
