"""Sizes that a preset is built with, and the sizes of the papers' models."""

from __future__ import annotations

from typing import Any, NamedTuple


class PresetSizes(NamedTuple):
    """The sizes that a base or a modifier may read; see `preset`."""

    hidden_size: int
    num_layers: int
    num_heads: int | None
    train_length: int

    def heads(self, *, expand: int = 1, head_dim: int = 64) -> int:
        """Return `num_heads`, or else as many heads of `head_dim` channels as `expand · hidden_size` holds (≥ 1)."""
        return self.num_heads or max(1, expand * self.hidden_size // head_dim)


DECAY = {"vocab_size": 50_432, "tie_embeddings": False}
ECHO = {"vocab_size": 32_000, "tie_embeddings": True}
POST = {"vocab_size": 128_256, "tie_embeddings": True}
GATE_RANK = {"hidden_size": 1536, "vocab_size": 32_000, "tie_embeddings": False}

# Arguments of `preset(name, **SIZES["decay-160m"])`.
SIZES: dict[str, dict[str, Any]] = {
    # Source: Decay, Table 5, with GPT-2's tokenizer. The table does not give the width of the GLU, and does not say
    # whether the head is tied. The parameter counts fit an untied head and a GLU of width 8/3 · hidden_size. That width
    # and the 50,257 tokens are rounded up to multiples of 256, the tokens as in the released code.
    "decay-160m": {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "intermediate_size": 2048, **DECAY},
    "decay-410m": {"num_layers": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 2816, **DECAY},
    "decay-1.45b": {"num_layers": 24, "hidden_size": 2048, "num_heads": 32, "intermediate_size": 5632, **DECAY},
    # Source: Echo, §3.4, which names no tokenizer. Of the common tokenizers only LLaMA-2's (32,000 tokens), with a tied
    # head, fits both "50M" and "180M": it gives 50.1M and 184.9M. docs/design-space.md lists the other readings.
    "echo-50m": {"num_layers": 16, "hidden_size": 448, **ECHO},
    "echo-180m": {"num_layers": 24, "hidden_size": 768, **ECHO},
    # Source: PoST, Table 5, which gives every size of Mamba-2: 188.9M and 448.2M, the paper's "~180M" and "~440M". For
    # RWKV-7 and Gated DeltaNet the paper says "~180M" alone. The released code has 12 layers of RWKV-7, 188.9M, and
    # 24 layers of Gated DeltaNet without MLPs, 212.3M.
    "post-180m": {"num_layers": 24, "hidden_size": 768, **POST, "mlp": "none"},
    "post-440m": {"num_layers": 48, "hidden_size": 1024, **POST, "mlp": "none"},
    "post-180m-mlp": {"num_layers": 12, "hidden_size": 768, **POST},
    "post-180m-delta": {
        "num_layers": 24,
        "hidden_size": 768,
        "num_heads": 6,
        **POST,
        "mlp": "none",
        "mixer_options": {"head_dim": 128, "value_dim": 256},
    },
    # Source: GateRank, §4.1, which gives the width, the number of layers (Mamba-2 20, Gated DeltaNet 18) and
    # "approximately 760M" with MLPs. The rest follows flash-linear-attention, whose trainer the paper used: 32,000
    # tokens, an untied head, and values twice as wide as keys under the delta rule. This gives 770M and 779M. The paper
    # does not give the heads, which change the count by 0.2 %; with 12 heads both models have states of one size.
    "gate-rank-760m": {"num_layers": 20, **GATE_RANK},
    "gate-rank-760m-delta": {"num_layers": 18, **GATE_RANK, "num_heads": 12, "mixer_options": {"value_dim": 256}},
}
