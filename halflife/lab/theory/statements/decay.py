"""Statements of the Decay paper about formulas: decays at the start, and rotary positions under a vector decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halflife.decay import build
from halflife.lab.theory.statements.row import IDENTITY, NUMBER, error, row
from halflife.ops import linear_attention
from halflife.position.rope import rope

HEADS, LAYERS, SIZE = 12, 12, 64  # of the 160M models (Table 5)
STARTS = (0.8, 0.9, 0.95, 0.99)
TOKENS = 64


def median_decay(name: str, layer: int = 0, tokens: int = 1, **options: Any) -> float:
    """Return the median λ over the heads before training, at zero activation and the last of `tokens` tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        decay = build(name, num_heads=HEADS, head_dim=SIZE, layer_idx=layer, num_layers=LAYERS, **options)
    rest = torch.zeros(1, tokens, *decay.shape, dtype=torch.float64)
    with torch.no_grad():
        return decay(rest)[0, -1].exp().median().item()


def shift_error(log_decay: Tensor, generator: torch.Generator) -> float:
    """Return how much the output of linear attention with RoPE and log-decays `[1, T, 1, K]` changes if all positions
    move by 7 tokens.
    """
    shape = log_decay.shape
    q, k, v = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    positions = torch.arange(shape[1])
    outputs = [
        linear_attention(rope(q, positions + by), rope(k, positions + by), v, log_decay, backend="reference")[0]
        for by in (0, 7)
    ]
    return error(outputs[1], outputs[0])


def statements(seed: int) -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    vector = -0.5 * torch.rand(1, TOKENS, 1, 8, generator=generator, dtype=torch.float64)
    scalar = vector[..., :1].expand_as(vector).contiguous()
    paired = torch.cat([vector[..., :4], vector[..., :4]], -1)  # RoPE rotates the pairs (i, i + K/2)
    medians = torch.tensor([median_decay("simple", p=p) for p in STARTS])
    return {
        "simple starts": row("Decay, §5.5", "median λ of Simple Decay at f = 0, against p", IDENTITY,
            error(medians, torch.tensor(STARTS))),
        "rope scalar": row("Decay, App. A.3", "change of the output if positions move, scalar decay", IDENTITY,
            shift_error(scalar, generator)),
        "rope vector": row("Decay, App. A.3", "change of the output if positions move, vector decay", IDENTITY,
            shift_error(vector, generator)),
        "rope paired": row("Decay, App. A.3", "change of the output if positions move, one decay a pair", IDENTITY,
            shift_error(paired, generator)),
        "tnl median": row("Decay, Table 1", "median λ of TNL by layer", NUMBER,
            [median_decay("tnl", layer) for layer in range(LAYERS)]),
        "tnl released median": row("Decay, released code", "median λ of TNL by layer", NUMBER,
            [median_decay("tnl_released", layer) for layer in range(LAYERS)]),
        "lightnet median": row("Decay, Table 1", "λ of LightNet at f = 0, after 2,048 tokens", NUMBER,
            median_decay("lightnet", tokens=2048)),
    }  # fmt: skip
