"""RWKV's mixtures of each token with the one before it, and the maps that read them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from halflife.ops.recurrent import takes_map
from halflife.ops.rwkv7 import mixed_maps, token_mix
from halflife.packing import Packing


class TokenShift(nn.ParameterDict):
    """The inputs `x_i = x + δ ⊙ μ_i` of several maps, where δ leads from a token to the one before it."""

    pass_backend = "auto"  # see `set_backend`
    __call__ = nn.Module.__call__  # torch's dict of parameters refuses calls

    def forward(self, x: Tensor, first: Tensor | None, packing: Packing) -> tuple[dict[str, Tensor], Tensor]:
        """Tokens `x [B, T, D]` → the input of each map by its name, and the last token of each sequence."""
        *mixed, last = shifted(x, first, packing, [*self.values()], self.pass_backend)
        return dict(zip(self, mixed, strict=True)), last


def shifted(x: Tensor, first: Tensor | None, packing: Packing, mu: list[Tensor], backend: str) -> tuple[Tensor, ...]:
    """The mixtures of tokens of x with those before them, and the last token of each sequence `[N, D]`."""
    if packing.cu_seqlens is not None or not x.shape[1]:
        before, last = packing.delay(x, first)
        return *token_mix(x, before, mu, backend=backend), last
    return token_mix(x, None if first is None else first.to(x.dtype), mu, True, backend)


def maps_of_shifted(
    x: Tensor, first: Tensor | None, mu: list[Tensor], weights: Sequence[Tensor | None], backend: str
) -> list[Tensor] | None:
    """What maps give for one token of each sequence, each for its mixture, by one kernel; None where it takes none."""
    if x.is_cpu or first is None or first.ndim != 2 or backend != "auto":
        return None
    known = [weight for weight in weights if weight is not None]
    return mixed_maps(x, first, mu, known) if len(known) == len(weights) and takes_map(x, first, *known) else None
