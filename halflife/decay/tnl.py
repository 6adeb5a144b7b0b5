"""The decays of TransNormerLLM: one fixed, and one learnable from the same initial rates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halflife.decay.base import DECAYS, ConstantDecay
from halflife.decay.spectral import SpectralDecay
from halflife.initial import draws


@DECAYS.add("tnl")
class TNLDecay(ConstantDecay):
    """λ = exp(−8 j/h · (1 − l/L)): one fixed rate per head, slower in deeper layers.

    Heads count j = 1 … h and layers l = 0 … L − 1, so that λ < 1 everywhere. If layers counted from 1, the last one
    would have λ = 1, and TNL-L no log-rate to learn. Time-scale `h / (8 j (1 − l/L))`. The
    median λ of the first layer is about e^{−4.5} with 8 heads, although the paper calls TNL's decays "close to 1". The
    released code has `tnl_released`. Source: Decay, Table 1.
    """

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        self.reset_parameters()

    def rates(self) -> Tensor:
        head = torch.arange(1, self.num_heads + 1, dtype=torch.float32) / self.num_heads
        return 8 * head * (1 - self.layer_idx / self.num_layers)


@DECAYS.add("tnl_l")
class LearnableTNLDecay(SpectralDecay, TNLDecay):
    """λ = exp(−e^p) with learnable p, which starts at the rates of TNL. Source: Decay, §4."""

    def __init__(self, **sizes) -> None:
        super().__init__(trained_rates=True, **sizes)

    def release_rates(self) -> None:
        self.log_rate = None


def released_rates(num_heads: int, layer_idx: int, num_layers: int) -> Tensor:
    """The released rates `s_j (1 − l/(L−1) + 1e-5)`, `[H]`, s_j geometric from 1/2 to 1/256; one layer has l = 0.

    In the released code TPE shifts l by one, so that its last layer has λ > 1. Here it has no effect on l.
    """
    slopes = 0.5 * 128.0 ** -torch.linspace(0, 1, num_heads, dtype=torch.float32)
    return slopes * (1 - layer_idx / max(num_layers - 1, 1) + 1e-5)


@DECAYS.add("tnl_released")
class ReleasedTNLDecay(TNLDecay):
    """λ = exp(−s_j (1 − l/(L−1) + 1e-5)): TNL as the authors of the Decay paper ran it, s_j from 1/2 to 1/256.

    s_j is geometric over the heads. Time-scales 2 to 256 tokens in the first layer, and 10⁵ times as many in the last.
    Source: released code of the Decay paper (xmixers).
    """

    def rates(self) -> Tensor:
        return released_rates(self.num_heads, self.layer_idx, self.num_layers)


@DECAYS.add("tnl_l_released")
class ReleasedLearnableTNLDecay(SpectralDecay):
    """λ = exp(−|r|) with learnable r, which starts at the rates of `tnl_released`.

    In the last layer r starts between 4·10⁻⁸ and 5·10⁻⁶, so λ is 1 to five digits. Adam moves r by up to a learning
    rate a step, so λ can leave this start. A log-rate could not: it would have to move by 11 to 16 for λ = 0.8, and the
    paper's learning rates sum to 6. Under PoST the rates are e^p.
    Source: released code of the Decay paper (xmixers). It learns −r without a bound, which gives λ > 1 where r < 0, and
    sets r to 0 after it has computed these rates, although the paper starts TNL-L as TNL.
    """

    data_dependent = False
    granularities = ("scalar",)

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        self.rate: nn.Parameter | None = nn.Parameter(torch.empty(self.shape))
        self.reset_parameters()

    @draws
    def reset_parameters(self) -> None:
        if self.rate is not None:
            self.rate.copy_(released_rates(self.num_heads, self.layer_idx, self.num_layers))

    def release_rates(self) -> None:
        self.rate = None

    def log_decay(self, f: Tensor, log_rate: Tensor | None) -> Tensor:
        rate = self.rate.abs() if log_rate is None else log_rate.exp()  # type: ignore[union-attr]
        return (-rate).to(f.dtype).expand(f.shape)
