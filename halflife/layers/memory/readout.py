"""The read-out of spectral Koopman attention, with what a layer learns of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halflife.initial import draws
from halflife.layers.mixer import State
from halflife.layers.parts import is_watched
from halflife.ops.koopman import KoopmanCall, KoopmanResult, attend, attend_token, takes_token
from halflife.precision import ROOMY, Float32Module

FIXED_MIX = {"koopman": 1.0, "ridge": 0.0}  # μ that is not learned


class Readout(Float32Module):
    """The op with the learned γ, μ and η of each head.

    `γ = 1 + σ(·)/2` lies in [1, 1.5] unless it is fixed. η multiplies the output and starts at `eta_init`.

    Args:
        mix: μ, "koopman" (1), "ridge" (0), "learned", `σ(·)` in [0, 1], or "powers", a number for each power from 0 to
            `power`, which starts at 1 for the first power and at 0 for the others.
        eta_init: initial η.
        power: K, under "powers" alone.
        gamma: γ, or None for a learned one.
    """

    def __init__(self, num_heads: int, mix: str, eta_init: float, power: int, gamma: float | None) -> None:
        super().__init__()
        self.mix, self.gamma, self.eta_init = mix, gamma, eta_init
        self.gamma_logit = nn.Parameter(torch.empty(num_heads)) if gamma is None else None
        self.eta = nn.Parameter(torch.empty(num_heads))
        self.mix_logit = nn.Parameter(torch.empty(num_heads)) if mix == "learned" else None
        self.weights = nn.Parameter(torch.empty(power + 1, num_heads)) if mix == "powers" else None
        self.reset_parameters()

    @draws
    def reset_parameters(self) -> None:
        self.eta.fill_(self.eta_init)
        for logit in (self.gamma_logit, self.mix_logit):
            if logit is not None:
                logit.zero_()
        if self.weights is not None:
            self.weights.zero_()[1] = 1

    def settings(self) -> dict[str, Any]:
        """γ and μ as `koopman_attention` takes them."""
        gamma = self.gamma if self.gamma_logit is None else 1 + self.gamma_logit.sigmoid() / 2
        mix = self.weights if self.mix_logit is None else self.mix_logit.sigmoid()
        return {"gamma": gamma, "mix": FIXED_MIX[self.mix] if mix is None else mix}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, backend: str, **options: Any) -> KoopmanResult:
        """Run the op with these γ and μ, and scale its outputs by η; `options` are the other arguments of the op.

        A forward hook sees the state and the count of repeated factorisations in the result.
        """
        result = attend(KoopmanCall(q, k, v.to(ROOMY[v.dtype]), **self.settings(), **options), backend)
        return result._replace(y=result.y * self.eta.unsqueeze(-1).to(result.y.dtype))

    def token(self, q: Tensor, k: Tensor, v: Tensor, backend: str, **options: Any) -> tuple[Tensor, State] | None:
        """The outputs and the state that `forward` has for one token, by one kernel; None where it takes none."""
        if k.shape[1] != 1 or is_watched(self):
            return None
        fixed = {"gamma": self.gamma or 1.0, "mix": FIXED_MIX.get(self.mix, 1.0)}
        call = KoopmanCall(q, k, v.to(ROOMY[v.dtype]), **fixed, **options)
        if not takes_token(call, backend):
            return None
        mix = self.weights if self.mix_logit is None else self.mix_logit
        return attend_token(call, self.gamma_logit, mix, self.eta)
