"""The decays of HGRN2: lower bounds from logits of each layer, and from one table for all layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halflife.decay.base import DECAYS, Decay, DecayParts
from halflife.initial import draws
from halflife.ops.backends.widened import product
from halflife.ops.laws import Product, bounded_decay


@DECAYS.add("hgrn2")
class HGRN2Decay(Decay):
    """λ = γ + (1 − γ) σ(f): the lower bound γ grows with depth.

    g = log(γ + (1 − γ) σ(f)). A softmax over learned logits gives L shares, one a layer, and γ of layer l is the sum of
    the first l shares. The first layer therefore has γ = 0. Range (γ, 1). Initialisation: logits 0, γ = l/L. Each layer
    has its separate set of L logits. Source: Qin et al. 2024; Decay, Table 1.
    """

    shares_keys = True

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        self.bound_logits = nn.Parameter(torch.empty(self.num_layers, *self.shape)) if self.has_logits() else None
        self.reset_parameters()

    def has_logits(self) -> bool:
        return self.layer_idx > 0

    @draws
    def reset_parameters(self) -> None:
        if self.bound_logits is not None:
            self.bound_logits.zero_()

    def lower_bound(self, shared: Any = None) -> Tensor | None:
        """γ of this layer, `[H]` or `[H, K]`, in (0, 1); None for 0."""
        if self.bound_logits is None:
            return None
        return self.bound_logits.softmax(0)[: self.layer_idx].sum(0)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, f: Tensor | Product, *, position: Tensor | None = None, parts: bool = False, with_step: bool = True,
        shared: Any = None, then: Callable[[DecayParts], Any] | None = None,
    ) -> Any:  # fmt: skip
        """As `Decay.forward`, of which the bounds leave no base rates and no PoST.

        Args:
            f, position, parts, then: as there.
            with_step: whether the parts have the key `1 − λ`.
            shared: tensors that the layers of one pass share, see `hgrn2_released`.
        """
        if isinstance(f, Product):
            f = product(*f).unflatten(-1, self.shape)
        self._check(f)
        bound = self.lower_bound(shared)
        g, key = bounded_decay(f, None if bound is None else bound.to(f.device), parts and with_step)
        found = DecayParts(g, None, None, key)
        return then(found) if then is not None else found if parts else g

    def log_decay(self, f: Tensor, log_rate: Tensor | None, step: Tensor | None = None) -> Tensor:
        return self(f)


@DECAYS.add("hgrn2_released")
class ReleasedHGRN2Decay(HGRN2Decay):
    """λ = γ + (1 − γ) σ(f), with one table of logits for all layers, as the authors of the Decay paper ran it.

    The first layer has the table, L logits for each channel, and passes the bounds of all layers to later ones through
    `shared`. γ of layer l is the sum of the shares of the layers 1 to l, counted from 0. Without `shared`, a later
    layer has its initial bound, l/L. Range and initialisation as `hgrn2`. Source: released code (xmixers).
    """

    reads_shared = True

    def has_logits(self) -> bool:
        return self.layer_idx == 0 and self.num_layers > 1

    def lower_bound(self, shared: Any = None) -> Tensor | None:
        if self.layer_idx == 0:
            if self.bound_logits is not None and shared is not None:
                shares = self.bound_logits.softmax(0)
                shared["lower_bounds"] = shares.cumsum(0) - shares[0]
            return None
        bounds = None if shared is None else shared.get("lower_bounds")
        return torch.full(self.shape, self.layer_idx / self.num_layers) if bounds is None else bounds[self.layer_idx]
