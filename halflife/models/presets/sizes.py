"""Sizes of the papers' models, for `preset(name, **SIZES["decay-160m"])`."""

from __future__ import annotations

from typing import Any, NamedTuple


def _decay(layers: int, hidden: int, heads: int, intermediate: int) -> dict[str, Any]:
    return {
        "num_layers": layers, "hidden_size": hidden, "num_heads": heads, "intermediate_size": intermediate,
        "vocab_size": 50257, "tie_embeddings": False,
    }  # fmt: skip


def _echo(layers: int, hidden: int) -> dict[str, Any]:
    return {"num_layers": layers, "hidden_size": hidden, "vocab_size": 32_000, "tie_embeddings": True}


def _post(layers: int, hidden: int, **options: Any) -> dict[str, Any]:
    return {"num_layers": layers, "hidden_size": hidden, "vocab_size": 128_256, "tie_embeddings": True, **options}


def _gate_rank(layers: int, **options: Any) -> dict[str, Any]:
    return {"num_layers": layers, "hidden_size": 1536, "vocab_size": 32_000, "tie_embeddings": False, **options}


class Layout(NamedTuple):
    """Where a model has SKA, counted from 0, and of what rank."""

    layers: tuple[int, ...]
    rank: int


# Decay, Table 5, with GPT-2's tokenizer. The table gives neither the width of the GLU nor whether the head is tied; its
# parameter counts say: untied, and 8/3 of the hidden size rounded up to a multiple of 256.
SIZES: dict[str, dict[str, Any]] = {
    "decay-160m": _decay(12, 768, 12, 2048),
    "decay-410m": _decay(24, 1024, 16, 2816),
    "decay-1.45b": _decay(24, 2048, 32, 5632),
    # Echo, §3.4, which names no tokenizer: of the common ones only LLaMA-2's of 32,000 tokens, with a tied head, gives
    # both its "50M" and its "180M" (50.1M and 184.9M). docs/design-space.md has the other readings.
    "echo-50m": _echo(16, 448),
    "echo-180m": _echo(24, 768),
    # PoST, Table 5, for Mamba-2, which gives every size: 188.9M and 448.2M, the paper's "~180M" and "~440M". Of its
    # RWKV-7 and Gated DeltaNet the paper says "~180M" alone: with their MLPs, 12 layers give 188.9M and 190.9M.
    "post-180m": _post(24, 768, mlp="none"),
    "post-440m": _post(48, 1024, mlp="none"),
    "post-180m-mlp": _post(12, 768),
    # GateRank, §4.1: width, layers (Mamba-2 20, Gated DeltaNet 18) and MLPs, "approximately 760M". The rest is as in
    # flash-linear-attention, whose trainer it used: 32,000 tokens, an untied head, under the delta rule values twice as
    # wide as keys. That gives 770M and 779M. The heads, open too, change 0.2 %: with 12 both have states of one size.
    "gate-rank-760m": _gate_rank(20),
    "gate-rank-760m-delta": _gate_rank(18, num_heads=12, mixer_options={"value_dim": 256}),
}

# Echo, §3.4, by hidden size and layers.
ECHO = {(448, 16): Layout((3, 7, 11, 15), 56), (768, 24): Layout((8, 16), 48)}
