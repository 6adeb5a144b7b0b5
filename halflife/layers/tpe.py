"""Toeplitz position encoding: one layer after the embedding that weighs earlier tokens by their distance alone."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.initial import draws
from halflife.layers.memory.choice import one_state
from halflife.layers.mixer import LAYERS, Mixer, Shared, State
from halflife.layers.options import Place, Run
from halflife.layers.parts import GatedRMSNorm
from halflife.packing import Packing
from halflife.precision import Float32Module


class ToeplitzKernel(Float32Module):
    """`r_n = Σ_i a_i b_i λ_i^n`, one kernel per head, a sum of N exponentials.

    The time-scales start between 1 and `longest` tokens, a at 0 and b at 1, so at first earlier tokens have weight 0.
    If a starts with standard deviation 1/N, the sum over earlier tokens is as large as the token itself, and the loss
    is 0.25 nats worse (docs/log.md).
    """

    def __init__(self, num_heads: int, size: int, longest: float) -> None:
        super().__init__()
        self.longest = longest
        self.read, self.write, self.log_rate = (nn.Parameter(torch.empty(num_heads, size)) for _ in range(3))
        self.reset_parameters()

    @draws
    def reset_parameters(self) -> None:
        size = self.read.shape[-1]
        nn.init.zeros_(self.read)
        nn.init.ones_(self.write)
        self.log_rate.copy_(torch.linspace(0, -math.log(self.longest), size, dtype=torch.float32))

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """a, b and log λ, `[H, N]` each."""
        return self.read.clone(), self.write.clone(), -self.log_rate.exp()


class Toeplitz(Mixer):
    """Linear attention whose query, key and decay are the same at every token, head by head."""

    adds = False  # whether a model adds the output to the embeddings, or puts it in their place

    def __init__(self, place: Place, run: Run) -> None:
        super().__init__()
        self.num_heads, self.head_dim = place.num_heads, place.head_size()
        self.chunk_size, self.backend = run.chunk_size, run.backend

    def weigh(
        self, x: Tensor, read: Tensor, write: Tensor, g: Tensor, state: State, packing: Packing
    ) -> tuple[Tensor, State]:
        """`Σ_{s ≤ t} (Σ_i a_i b_i e^{(t−s) g_i}) x_s` for `read` a and `write` b `[H, N]`, and g `[H, N]` or `[H]`."""
        q, k, g = (part.expand(*x.shape[:2], *part.shape) for part in (read.to(x.dtype), write.to(x.dtype), g))
        values = x.unflatten(-1, (self.num_heads, self.head_dim))
        y, memory = one_state(x, q, k, values, g, None, state, packing, scale=1, **self.op_options)
        return y.flatten(-2).to(x.dtype), memory


@LAYERS.add("tpe")
class TPE(Toeplitz):
    """Toeplitz position encoding: `y_t = Σ_{s ≤ t} r_{t−s} x_s`, head by head, `r_n = Σ_i a_i b_i λ_i^n`.

    It is linear attention whose query a, key b and decay λ are the same at every token, so it runs in linear time and
    streams. A model adds its output to the embeddings, which also sets the weight at distance 0.
    Source: Decay, §2.2; Qin et al. 2025.

    Args:
        place, run: groups of options. There are H kernels, each for D / H channels.
        state_size: number N of exponentials in a kernel.
        longest: largest initial time-scale, in tokens.
    """

    adds = True

    def __init__(self, place: Place, run: Run, *, state_size: int = 16, longest: float = 512.0) -> None:
        super().__init__(place, run)
        if longest < 1:
            raise ValueError(f"longest must be at least 1; got {longest}")
        self.kernel = ToeplitzKernel(self.num_heads, state_size, longest)

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        read, write, g = self.kernel()
        return self.weigh(x, read, write, g, state, packing)


class HeadDecay(Float32Module):
    """The vectors a and b and the decay λ = σ(·) of each head.

    All are drawn from a standard normal distribution, or, if not `drawn`, a and b start at 1 and λ at ½.
    """

    def __init__(self, num_heads: int, head_dim: int, drawn: bool) -> None:
        super().__init__()
        self.drawn = drawn
        self.read, self.write = (nn.Parameter(torch.empty(num_heads, head_dim)) for _ in range(2))
        self.logit = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    @draws
    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter) if self.drawn else nn.init.ones_(parameter)
        if not self.drawn:
            nn.init.zeros_(self.logit)

    def forward(self) -> tuple[Tensor, Tensor]:
        """a·b `[H, 1]` and log λ `[H]`."""
        return (self.read * self.write).sum(-1, keepdim=True), F.logsigmoid(self.logit)


@LAYERS.add("tpe_paper")
class PaperTPE(Toeplitz):
    """Toeplitz position encoding with one λ per head: `y_t = Σ_{s ≤ t} (a·b) λ^{t−s} x_s`, head by head.

    A model reads its output in the place of the embeddings. The paper gives no initial values. Source: Decay, §2.2.

    Args:
        place, run: groups of options. There are H kernels, each for D / H channels. a and b have D / H entries.
    """

    drawn = True  # see `HeadDecay`

    def __init__(self, place: Place, run: Run) -> None:
        super().__init__(place, run)
        self.kernel = HeadDecay(self.num_heads, self.head_dim, self.drawn)

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        weight, g = self.kernel()
        return self.weigh(x, torch.ones_like(weight), weight, g, state, packing)


@LAYERS.add("tpe_released")
class ReleasedTPE(PaperTPE):
    """`tpe_paper` with a norm and a projection: `y = RMSNorm(Σ_{s ≤ t} (a·b) λ^{t−s} x_s) W`, norm over all heads.

    The authors of the Decay paper ran it so: their code gives the norm a number of groups, which their RMSNorm ignores,
    and draws a, b and λ, which it then sets to their start. Source: released code of the Decay paper (xmixers).

    Args:
        place, run: as in `PaperTPE`.
    """

    drawn = False

    def __init__(self, place: Place, run: Run) -> None:
        super().__init__(place, run)
        self.norm = GatedRMSNorm(place.hidden_size)
        self.out_proj = nn.Linear(place.hidden_size, place.hidden_size, bias=False)

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        y, new = super().mix(x, state, packing, shared)
        return self.out_proj(self.norm(y)), new
