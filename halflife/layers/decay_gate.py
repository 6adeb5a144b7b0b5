"""The decay of a layer: a projection to its activation, and its law."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from halflife.decay import Decay, DecayParts
from halflife.layers.mixer import Mixer, Shared, State
from halflife.layers.options import DecayChoice, Place
from halflife.layers.parts import DecayProjection, is_watched
from halflife.ops.laws import Product
from halflife.packing import Packing
from halflife.precision import compute_dtype


class DecayGate(Mixer):
    """A mixer with a decay, or without one. `decay_proj` gives its activation if the input sets it."""

    decay: Decay | None
    decay_proj: DecayProjection | None

    def add_decay(
        self, choice: DecayChoice, place: Place, *, head_dim: int, granularity: str, rank: int | None,
        bias: bool = False,
    ) -> None:  # fmt: skip
        """Make the decay. `rank` (None for full rank) and `bias` are those of its projection."""
        self.decay = choice.build(place, head_dim=head_dim, granularity=granularity)
        self.decay_proj = None
        if self.decay is not None and self.decay.data_dependent:
            self.decay_proj = DecayProjection(place.hidden_size, self.decay.shape, rank, bias)

    def decay_input(self, x: Tensor, product: bool = False) -> Any:
        """The activation f of the decay, `[B, T, H]` or `[B, T, H, K]`, or if asked for also a `Product`."""
        assert self.decay is not None
        if self.decay_proj is None:  # only its shape counts
            ones = [1] * len(self.decay.shape)
            number = x[:, :, 0].view(*x.shape[:2], *ones) if product else x.new_zeros((), dtype=compute_dtype(x))
            return number.expand(*x.shape[:2], *self.decay.shape)
        return self.decay_proj.product(x) if product and not is_watched(self.decay_proj) else self.decay_proj(x)

    def log_decays(
        self, f: Tensor | Product, position: Tensor, state: State, packing: Packing, shared: Shared | None = None, *,
        with_step: bool = False,
    ) -> tuple[DecayParts, State]:  # fmt: skip
        """The log-decays in the shape of f with their parts, and the new state of the decay, or an empty dict."""
        assert self.decay is not None
        if not self.decay.stateful:
            more = {"shared": shared} if self.decay.reads_shared else {}
            return self.decay(f, position=position, parts=True, with_step=with_step, **more), {}
        assert isinstance(f, Tensor)
        given = {"position": position, "state": state.get("decay"), "cu_seqlens": packing}
        g, new = self.decay.scan(f, **given, parts=with_step)
        return g if with_step else DecayParts(g, None, None), {} if new is None else {"decay": new}
