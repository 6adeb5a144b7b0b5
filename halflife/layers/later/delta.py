"""Descendants of Gated DeltaNet: KDA, Gated DeltaNet-2, Comba and DeltaProduct.

Each one is the design-space block with another delta rule. All of them have short convolutions, and L2-normalised
queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.layers.mixer import LAYERS, LinearMixer, State
from halflife.layers.parts import ShortConv
from halflife.ops import delta_rule, dplr
from halflife.ops.fused import l2_normalize
from halflife.packing import Packing

# fla draws e^A of Comba and DeltaProduct from U(0, 16).
WIDE_RATES = {"rate_start": "uniform_0_16"}


def fix_options(layer: str, options: Mapping[str, Any], **fixed: Any) -> dict[str, Any]:
    """Return `options` and `fixed`, which define the layer.

    Raises:
        ValueError: `options` holds another value for one of `fixed`.
    """
    for name, value in fixed.items():
        if options.get(name, value) != value:
            raise ValueError(f"{name} is {value!r} in {layer} and cannot change; got {options[name]!r}")
    return {**options, **fixed}


@LAYERS.add("kda")
class KDA(LinearMixer):
    """Kimi Delta Attention (Kimi Team 2025): the delta rule under a vector decay, with low-rank gates.

        S_t = (I − β_t k_t k_tᵀ) diag(e^{g_t}) S_{t−1} + β_t k_t v_tᵀ,   g_t = −e^{A_h} softplus(W₂ W₁ x_t + Δ)

    A is one number a head, and Δ one a key channel. The output is `(RMSNorm(o) ⊙ σ(W₂ W₁ x + b)) W_o` with the norm
    over each head. Both low-rank maps have rank V. This is the design-space block with other defaults, and `options`
    are `LinearMixer`'s. The state holds `memory [N, H, K, V]` and the convolution's last inputs.
    Initial values: e^A uniform in [1, 16], softplus(Δ) log-uniform in [0.001, 0.1].
    """

    UPDATE = "delta"

    def __init__(self, hidden_size: int, num_heads: int = 4, **options: Any) -> None:
        value_dim = options.get("value_dim") or hidden_size // max(num_heads, 1)
        defaults = {
            "decay": "mamba2_headwise", "granularity": "vector", "conv_size": 4, "gate": "low_rank_sigmoid",
            "decay_rank": value_dim,
        }  # fmt: skip
        fixed = fix_options(type(self).__name__, options, update=self.UPDATE)
        super().__init__(hidden_size, num_heads, **{**defaults, **fixed})


@LAYERS.add("gdn2")
class GatedDeltaNet2(KDA):
    """Gated DeltaNet-2 (2026): KDA with an erase gate on the key's channels and a write gate on the value's.

        S_t = (I − k_t (b_t ⊙ k_t)ᵀ) diag(e^{g_t}) S_{t−1} + k_t (w_t ⊙ v_t)ᵀ,   b_t = σ(W_b x_t),   w_t = σ(W_w x_t)

    It is KDA if all channels of a head have b = w = β. `ops.dplr` computes it with `a = −e^g ⊙ b ⊙ k` and `b = k`.
    Source: github.com/NVlabs/GatedDeltaNet-2, and fla's layer of that name.

    Args:
        hidden_size: D.
        num_heads: H.
        allow_neg_eigval: whether b lies in (0, 2) instead of (0, 1).
        options: those of `LinearMixer`.
    """

    UPDATE = "linear"  # the block then has no writing strength β

    def __init__(self, hidden_size: int, num_heads: int = 4, *, allow_neg_eigval: bool = False, **options: Any) -> None:
        fixed = fix_options("GatedDeltaNet2", options, position="none", gate_rank=None, log_linear=None, qk_norm=True)
        super().__init__(hidden_size, num_heads, **fixed)
        if self.decay is None:
            raise ValueError("GatedDeltaNet2 needs a decay; got None")
        self.erase_scale = 2 if allow_neg_eigval else 1
        self.erase_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.write_proj = nn.Linear(hidden_size, num_heads * self.value_dim, bias=False)

    def update_state(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: State, packing: Packing
    ) -> tuple[Tensor, State]:
        assert g is not None
        decay = g.exp() if g.ndim == k.ndim else g.exp().unsqueeze(-1)
        erase = self.erase_scale * self.erase_proj(x).sigmoid().view_as(k)
        write = self.write_proj(x).sigmoid().view_as(v)
        # The view is needed because torch.compile refuses an autograd function that gets one tensor twice.
        o, memory = dplr(
            q, k, write * v, -erase * k * decay.to(k.dtype), k.view_as(k), g, scale=self.head_dim**-0.5,
            initial_state=state.get("memory"), output_final_state=True, cu_seqlens=packing,
            chunk_size=self.chunk_size, backend=self.backend,
        )  # fmt: skip
        assert memory is not None
        return o, {"memory": memory}


class Feedback(nn.Module):
    """Comba's two numbers a head: the share σ(b) of the key that reads the state, and the weight d of its output.

    Both start at fla's values: b = 1, and d = `correction`.
    """

    def __init__(self, num_heads: int, correction: float) -> None:
        super().__init__()
        self.correction = correction
        self.share = nn.Parameter(torch.empty(num_heads))
        self.output = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.share)
        nn.init.constant_(self.output, self.correction)


@LAYERS.add("comba")
class Comba(LinearMixer):
    """Comba (Hu et al. 2025): a scalar-plus-low-rank transition, where a fraction of the key reads the state.

        S_t = (e^{g_t} I − β_t k_t p_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   p_t = σ(b_h) k_t,   o_t = S_tᵀ (q_t − d_h p_t)

    The state is read before it decays, as in the paper, in fla's kernels and in `naive_chunk_comba`. (fla's
    `naive_recurrent_comba` reads it after the decay.) `ops.dplr` computes it with `a = −β p` and `b = k`. As in fla's
    layer, the L2 norm of the query comes after its correction. fla's layer also normalises p, which cancels σ(b) in the
    state. Here p is a fraction of the normalised key, as in the equation.
    The output is `(RMSNorm(o) ⊙ σ(x W)) W_o` with the norm over each head.

    Args:
        hidden_size: D.
        num_heads: H.
        correction: initial d. The authors suggest 0.02 for small models.
        options: those of `LinearMixer`. The decay is `mamba2`, with e^A uniform in [0, 16] at the start.
    """

    def __init__(self, hidden_size: int, num_heads: int = 4, *, correction: float = 1.0, **options: Any) -> None:
        defaults = {"decay": "mamba2", "conv_size": 4, "gate": "sigmoid"}
        fixed = fix_options(
            "Comba", options, granularity="scalar", update="delta", position="none", gate_rank=None,
            log_linear=None, qk_norm=True,
        )  # fmt: skip
        super().__init__(hidden_size, num_heads, **{**defaults, **fixed, **_wide_rates(options)})
        self.feedback = Feedback(num_heads, correction)

    def heads(self, qkv: Tensor, shared_key: Tensor | None, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.conv is None and self.activation == "silu":
            size = 2 * self.num_heads * self.head_dim
            qkv = torch.cat([F.silu(qkv[..., :size]), qkv[..., size:]], -1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in qkv.split(self.splits, -1))
        weight = (self.feedback.output * self.feedback.share.sigmoid()).unsqueeze(-1)
        return l2_normalize(q - weight * k), l2_normalize(k), v

    def update_state(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: State, packing: Packing
    ) -> tuple[Tensor, State]:
        assert self.beta_proj is not None
        beta = (self.beta_scale * self.beta_proj(x).sigmoid()).unsqueeze(-1)
        read = -self.feedback.share.sigmoid().unsqueeze(-1) * beta * k
        q, written, read, k = (x.to(v.dtype) for x in (q, beta * k, read, k))  # autocast leaves some in float32
        o, memory = dplr(
            q, written, v, read, k, g, scale=self.head_dim**-0.5, initial_state=state.get("memory"),
            output_final_state=True, cu_seqlens=packing, chunk_size=self.chunk_size, backend=self.backend,
        )  # fmt: skip
        assert memory is not None
        return o, {"memory": memory}


@LAYERS.add("deltaproduct")
class DeltaProduct(LinearMixer):
    """DeltaProduct (Siems et al. 2025): n steps of the delta rule a token, each with its key, value and strength.

        S_{t,0} = e^{g_t} S_{t−1},   S_{t,j} = (I − β_{t,j} k_{t,j} k_{t,j}ᵀ) S_{t,j−1} + β_{t,j} k_{t,j} v_{t,j}ᵀ,
        S_t = S_{t,n},   o_t = S_tᵀ q_t

    The transition of a token is a product of n generalised Householder matrices. It can be a rotation for n = 2 and β
    in (0, 2). `ops.delta_rule` computes it on n T rows, of which the first of a token decays and the last has the
    query. The projections make these rows, so that no input is copied. With `decay=None` it has no decay.

    Args:
        hidden_size: D.
        num_heads: H.
        num_householder: n, the steps of a token.
        allow_neg_eigval: whether β lies in (0, 2), as in the paper, or in (0, 1).
        options: those of `LinearMixer`. The decay is `mamba2`, with e^A uniform in [0, 16] at the start. The output is
            that of Gated DeltaNet.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        *,
        num_householder: int = 2,
        allow_neg_eigval: bool = True,
        **options: Any,
    ) -> None:
        defaults = {"decay": "mamba2", "granularity": "scalar", "conv_size": 4, "gate": "swish"}
        fixed = fix_options(
            "DeltaProduct", options, update="delta", position="none", gate_rank=None, log_linear=None,
            qk_norm=True, share_keys=False,
        )  # fmt: skip
        chosen = {**defaults, **fixed, **_wide_rates(options)}
        super().__init__(hidden_size, num_heads, allow_neg_eigval=allow_neg_eigval, **chosen)
        self.steps = num_householder
        query, key, value = self.splits
        self.splits = [query, num_householder * key, num_householder * value]
        self.qkv_proj = nn.Linear(hidden_size, sum(self.splits), bias=False)
        self.conv = None if self.conv is None else ShortConv(sum(self.splits), self.conv.size)
        self.beta_proj = nn.Linear(hidden_size, num_householder * num_heads, bias=False)

    def heads(self, qkv: Tensor, shared_key: Tensor | None, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`q [B, T, H, K]`, `k [B, n T, H, K]` and `v [B, n T, H, V]`."""
        q, k, v = qkv.split(self.splits, -1)
        q, k = self.activate(q).unflatten(-1, (self.num_heads, self.head_dim)), self.activate(k)
        return l2_normalize(q), l2_normalize(self._rows(k, self.head_dim)), self._rows(v, self.value_dim)

    def _rows(self, x: Tensor, size: int) -> Tensor:
        return x.unflatten(-1, (self.steps, self.num_heads, size)).flatten(1, 2)

    def update_state(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, state: State, packing: Packing
    ) -> tuple[Tensor, State]:
        assert self.beta_proj is not None
        beta = self.beta_scale * self.beta_proj(x).sigmoid().unflatten(-1, (self.steps, -1)).flatten(1, 2)
        more = self.steps - 1
        q = F.pad(q.unsqueeze(2), (0, 0, 0, 0, more, 0)).flatten(1, 2)
        if g is not None:
            g = F.pad(g.unsqueeze(2), (*[0, 0] * (g.ndim - 2), 0, more)).flatten(1, 2)
        o, memory = delta_rule(
            q, k, v, beta, g, scale=self.head_dim**-0.5, initial_state=state.get("memory"), output_final_state=True,
            cu_seqlens=packing.repeated(self.steps), chunk_size=self.chunk_size, backend=self.backend,
        )  # fmt: skip
        assert memory is not None
        return o[:, more :: self.steps], {"memory": memory}


def _wide_rates(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the decay with initial rates as fla's, where it is `mamba2` and PoST does not set them."""
    plain = options.get("decay", "mamba2") == "mamba2" and options.get("post") is None
    return {"decay_options": {**WIDE_RATES, **(options.get("decay_options") or {})}} if plain else {}
