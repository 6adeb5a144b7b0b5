"""RWKV's mixtures of each token with the one before it, and the maps that read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.layers.mixer import Mixer, State
from halflife.layers.parts import is_watched
from halflife.ops.recurrent import takes_map
from halflife.ops.rwkv7 import mixed_maps, token_mix, token_mix_of_norm
from halflife.packing import Packing


class TokenShift(nn.ParameterDict):
    """The inputs `x_i = x + δ ⊙ μ_i` of several maps, where δ leads from a token to the one before it."""

    pass_backend = "auto"  # see `set_backend`
    __call__ = nn.Module.__call__  # torch's dict of parameters refuses calls

    def forward(self, x: Tensor, first: Tensor | None, packing: Packing) -> tuple[dict[str, Tensor], Tensor]:
        """Tokens `x [B, T, D]` → the input of each map by its name, and the last token of each sequence."""
        *mixed, last = shifted(x, first, packing, [*self.values()], self.pass_backend)
        return dict(zip(self, mixed, strict=True)), last


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm`, which also takes the sum of two."""

    adds = True

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The norm of x, or `x + y` and its norm."""
        total = x if y is None else x + y
        n = F.layer_norm(total, self.normalized_shape, self.weight, self.bias, self.eps)
        return n if y is None else (total, n)


class Shifting(Mixer):
    """A mixer that reads its input in mixtures `mu` of each token with the one before it alone."""

    mu: Any
    made: Sequence[Tensor] = ()  # what was made with the norm before it: mixtures or maps, and the last tokens

    def of_norm(
        self, norm: Any, x: Tensor, branch: Tensor | None, state: State | None, packing: Packing
    ) -> Sequence[Tensor] | None:
        """The mixtures of the norm of `x + branch`, its last tokens, and the sum; None where no kernel makes them.

        Of a token it is what maps make of the mixtures (`maps_of_token`).
        """
        if x.is_cpu or torch.compiler.is_compiling() or packing.cu_seqlens is not None or not x.shape[1]:
            return None
        watched = [norm] if isinstance(self.mu, Tensor) else [norm, self.mu]
        if type(norm) is not LayerNorm or self.pass_backend != "auto" or is_watched(*watched):
            return None
        if takes_map(x):
            return self._maps(x, state or {}, packing, branch, norm)
        mu, first = [self.mu] if isinstance(self.mu, Tensor) else [*self.mu.values()], (state or {}).get("shift")
        first = None if first is None else first.to(x.dtype)
        return token_mix_of_norm(x, branch, norm.weight, norm.bias, first, mu, norm.eps)

    def maps_of_token(self, x: Tensor, state: State, packing: Packing) -> tuple[list[Tensor], list[Tensor | None]]:
        """μ and weights of the maps that read mixtures of a token, if one kernel may compute all of them."""
        raise NotImplementedError

    def _maps(
        self, x: Tensor, state: State, packing: Packing, branch: Tensor | None = None, norm: Any = None
    ) -> list[Tensor] | None:
        """What maps give for one token of each sequence, by one kernel, and the token; with a norm also the sum."""
        first = state.get("shift")
        if first is None or first.ndim != 2 or self.pass_backend != "auto":
            return None
        mu, given = self.maps_of_token(x, state, packing)
        weights = [weight for weight in given if weight is not None]
        of_norm = [] if norm is None else [norm.weight, norm.bias]
        if not weights or len(weights) < len(given) or not takes_map(x, branch, first, *weights, *of_norm):
            return None
        return mixed_maps(x, first, mu, weights, branch, of_norm, 0.0 if norm is None else norm.eps)

    def made_maps(self, x: Tensor, state: State, packing: Packing) -> tuple[list[Tensor], Tensor] | None:
        """What the maps of a token give, and the token; None where they must be called."""
        if not takes_map(x):
            return None
        found = self.made or self._maps(x, state, packing)
        return None if found is None else ([*found[:-1]], found[-1])

    @contextmanager
    def knows(self, made: Sequence[Tensor]) -> Iterator[None]:
        """Inside this block, these are mixtures of the input, or of a token what maps give, and the last tokens."""
        self.made = made
        try:
            yield
        finally:
            self.made = ()


def shifted(x: Tensor, first: Tensor | None, packing: Packing, mu: list[Tensor], backend: str) -> tuple[Tensor, ...]:
    """The mixtures of tokens of x with those before them, and the last token of each sequence `[N, D]`."""
    if packing.cu_seqlens is not None or not x.shape[1]:
        before, last = packing.delay(x, first)
        return *token_mix(x, before, mu, backend=backend), last
    return token_mix(x, None if first is None else first.to(x.dtype), mu, True, backend)
