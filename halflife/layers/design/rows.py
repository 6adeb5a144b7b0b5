"""The rows of the design-space block: its options with other defaults, some with an update of their own.

The options of a row are those of `LinearMixer`, and of its update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from halflife.layers.design.block import LinearMixer
from halflife.layers.design.row_updates import EraseWrite, Feedback, Product, Ridge
from halflife.layers.mixer import LAYERS
from halflife.layers.options import Place

Options = Mapping[str, Any]


def _head_size(given: Options) -> int:
    return Place(**{name: given[name] for name in ("hidden_size", "num_heads") if name in given}).head_size()


def _wide_rates(given: Options) -> Options | None:
    """Initial rates as fla's, e^A uniform in [0, 16], where the decay is `mamba2` and PoST does not set them."""
    plain = given.get("decay", "mamba2") == "mamba2" and given.get("post") is None
    return {"rate_start": "uniform_0_16"} if plain else None


@LAYERS.add("gla")
class GLA(LinearMixer):
    """Gated Linear Attention (Yang et al. 2024): vector decay σ(f)^{1/16} through rank 16, keys of half size.

    There is no activation on q and k. The output has a norm over each head, and a SiLU gate.
    """

    defaults: ClassVar[Options] = {
        "decay": "gla", "head_dim": lambda given: max(_head_size(given) // 2, 1), "activation": "none",
        "gate": "swish", "decay_rank": 16, "decay_bias": True,
    }  # fmt: skip


@LAYERS.add("retnet")
class RetNet(LinearMixer):
    """Multi-scale retention (Sun et al. 2023): one fixed decay per head, RoPE on q and k, values of twice the size.

    There is no activation on q and k. The output has a norm over each head, and a SiLU gate.
    """

    defaults: ClassVar[Options] = {
        "decay": "retnet", "granularity": "scalar", "value_dim": lambda given: 2 * _head_size(given),
        "position": "rope", "activation": "none", "gate": "swish",
    }  # fmt: skip


@LAYERS.add("gated_deltanet")
class GatedDeltaNet(LinearMixer):
    """Gated DeltaNet (Yang et al. 2025): the delta rule under Mamba-2's decay.

    It has short convolutions and L2-normalised q and k. The output has a norm over each head, and a SiLU gate.
    """

    defaults: ClassVar[Options] = {
        "decay": "mamba2", "granularity": "scalar", "update": "delta", "conv_size": 4, "gate": "swish",
    }  # fmt: skip


@LAYERS.add("deltanet")
class DeltaNet(GatedDeltaNet):
    """DeltaNet (Yang et al. 2024): Gated DeltaNet without decay."""

    defaults: ClassVar[Options] = {**GatedDeltaNet.defaults, "decay": None}


@LAYERS.add("kda")
class KDA(LinearMixer):
    """Kimi Delta Attention (Kimi Team 2025): the delta rule under a vector decay, with low-rank gates.

        S_t = (I − β_t k_t k_tᵀ) diag(e^{g_t}) S_{t−1} + β_t k_t v_tᵀ,   g_t = −e^{A_h} softplus(W₂ W₁ x_t + Δ)

    A is one number per head, and Δ one per key channel. The output is `(RMSNorm(o) ⊙ σ(W₂ W₁ x + b)) W_o` with the norm
    over each head. Both low-rank maps have rank V. It has short convolutions and L2-normalised q and k.
    The state holds `memory [N, H, K, V]` and the convolution's last inputs.
    Initial values: e^A uniform in [1, 16], softplus(Δ) log-uniform in [0.001, 0.1].
    """

    defaults: ClassVar[Options] = {
        "decay": "mamba2_headwise", "conv_size": 4, "gate": "low_rank_sigmoid",
        "decay_rank": lambda given: given.get("value_dim") or _head_size(given),
    }  # fmt: skip
    fixed: ClassVar[Options] = {"update": "delta"}


@LAYERS.add("gdn2")
class GatedDeltaNet2(KDA):
    """Gated DeltaNet-2 (2026): KDA with an erase gate on the key's channels and a write gate on the value's.

        S_t = (I − k_t (b_t ⊙ k_t)ᵀ) diag(e^{g_t}) S_{t−1} + k_t (w_t ⊙ v_t)ᵀ,   b_t = σ(W_b x_t),   w_t = σ(W_w x_t)

    It is KDA if all channels of a head have b = w = β. `ops.dplr` computes it with `a = −e^g ⊙ b ⊙ k` and `b = k`.
    Source: github.com/NVlabs/GatedDeltaNet-2, and fla's layer of that name.
    """

    fixed: ClassVar[Options] = {"position": "none", "qk_norm": True}

    def __init__(self, update: EraseWrite, **groups: Any) -> None:
        if groups["decay"].decay is None:
            raise ValueError("GatedDeltaNet2 needs a decay; got None")
        super().__init__(update=update, **groups)


@LAYERS.add("comba")
class Comba(LinearMixer):
    """Comba (Hu et al. 2025): a scalar-plus-low-rank transition, where a fraction of the key reads the state.

        S_t = (e^{g_t} I − β_t k_t p_tᵀ) S_{t−1} + β_t k_t v_tᵀ,   p_t = σ(b_h) k_t,   o_t = S_tᵀ (q_t − d_h p_t)

    The state is read before it decays, as in the paper, in fla's kernels and in `naive_chunk_comba`. (fla's
    `naive_recurrent_comba` reads it after the decay.) `ops.dplr` computes it with `a = −β p` and `b = k`. As in fla's
    layer, the L2 norm of the query comes after its correction. fla's layer also normalises p, which cancels σ(b) in the
    state (`normalize_feedback=True`). By default p is a fraction of the normalised key, as in the equation.
    The output is `(RMSNorm(o) ⊙ σ(x W)) W_o` with the norm over each head. e^A starts uniform in [0, 16].
    """

    defaults: ClassVar[Options] = {"decay": "mamba2", "conv_size": 4, "gate": "sigmoid", "decay_options": _wide_rates}
    fixed: ClassVar[Options] = {"granularity": "scalar", "position": "none", "qk_norm": True}

    def __init__(self, update: Feedback, **groups: Any) -> None:
        super().__init__(update=update, **groups)


@LAYERS.add("deltaproduct")
class DeltaProduct(LinearMixer):
    """DeltaProduct (Siems et al. 2025): n steps of the delta rule per token, each with its key, value and strength.

        S_{t,0} = e^{g_t} S_{t−1},   S_{t,j} = (I − β_{t,j} k_{t,j} k_{t,j}ᵀ) S_{t,j−1} + β_{t,j} k_{t,j} v_{t,j}ᵀ,
        S_t = S_{t,n},   o_t = S_tᵀ q_t

    The transition of a token is a product of n generalised Householder matrices. It can be a rotation for n = 2 and β
    in (0, 2). `ops.delta_rule` computes it on n T rows, of which the first of a token decays and the last has the
    query. The projections make these rows, so that no input is copied. With `decay=None` it has no decay.
    The output is that of Gated DeltaNet. e^A starts uniform in [0, 16].
    """

    defaults: ClassVar[Options] = {
        "decay": "mamba2", "granularity": "scalar", "conv_size": 4, "gate": "swish", "decay_options": _wide_rates,
    }  # fmt: skip
    fixed: ClassVar[Options] = {"position": "none", "qk_norm": True, "share_keys": False}

    def __init__(self, update: Product, **groups: Any) -> None:
        super().__init__(update=update, **groups)


@LAYERS.add("mesa")
class MesaNet(LinearMixer):
    """MesaNet (von Oswald et al. 2025): ridge regression on all tokens so far, solved at every token.

        G_t = e^{g_t} G_{t−1} + β_t k_t k_tᵀ,   C_t = e^{g_t} C_{t−1} + β_t v_t k_tᵀ,   o_t = C_t (G_t + Λ)⁻¹ q_t

    `g = logsigmoid(x W_g + b)` and `β = σ(x W_β + b)` for each head. Queries and keys go through a short convolution
    with SiLU and have norm 1, and values do not. The output is `RMSNorm(o) W_o` with the norm over each head, and with
    `gate="swish"` gated.
    The state holds `gram [N, H, K, K]`, `memory [N, H, K, V]` and the convolution's last inputs.
    Source: its §3 and fla's layer of that name.
    """

    defaults: ClassVar[Options] = {
        "decay": "gla", "conv_size": 4, "gate": "none", "decay_bias": True, "decay_rank": 0,
        "decay_options": lambda given: {"tau": 1.0} if given.get("decay", "gla") == "gla" else None,
    }  # fmt: skip
    fixed: ClassVar[Options] = {"granularity": "scalar"}

    def __init__(self, update: Ridge, **groups: Any) -> None:
        if groups["decay"].decay is None:
            raise ValueError("MesaNet needs a decay; got None")
        super().__init__(update=update, **groups)
