"""The Mamba-3 block of Echo's tables against its equations, in float64, and its numbers of parameters."""

import torch
import torch.nn.functional as F
from helpers import assert_close

from halflife import LanguageModel, layers
from halflife.lab.experiments.echo import PAPER, EchoTransfer
from halflife.lab.experiments.recall import recall_model

HEADS, SIZE, LENGTH = 2, 6, 11


def turned(x, angle):
    """The pairs (i, i + P) of a vector, rotated."""
    a, b = x.chunk(2)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def test_the_block_token_by_token():
    layer = layers.build("mamba3_echo", hidden_size=12, num_heads=HEADS, state_size=SIZE, chunk_size=4).double()
    u = torch.randn(2, LENGTH, 12, dtype=torch.float64)
    z, x, b, c, f, a, l, w = layer.in_proj(u).split([24, 24, 12, 12, 2, 2, 2, 6], -1)
    padded = F.pad(x, (0, 0, 3, 0))
    x = F.silu(sum(padded[:, i : i + LENGTH] * layer.conv.weight[:, i] for i in range(4)) + layer.conv.bias)
    outputs = torch.zeros(2, LENGTH, HEADS, 12, dtype=torch.float64)
    for row in range(2):
        for h in range(HEADS):
            state, angle = torch.zeros(SIZE, 12, dtype=torch.float64), torch.zeros(SIZE // 2, dtype=torch.float64)
            key, value = torch.zeros(SIZE, dtype=torch.float64), torch.zeros(12, dtype=torch.float64)
            for t in range(LENGTH):
                step = F.softplus(f[row, t, h])
                alpha, end = torch.exp(-step * F.softplus(a[row, t, h])), l[row, t, h].sigmoid()
                angle = angle + step * w[row, t].view(HEADS, -1)[h]
                new = turned(b[row, t].view(HEADS, -1)[h], angle)
                state = alpha * (state + (1 - end) * step * torch.outer(key, value))
                key, value = new, x[row, t].view(HEADS, -1)[h]
                state = state + end * step * torch.outer(key, value)
                outputs[row, t, h] = state.T @ turned(c[row, t].view(HEADS, -1)[h], angle)
    assert_close(layer(u)[0], layer.out_proj(outputs.flatten(-2) * F.silu(z)), 1e-12)


def test_the_counts_of_the_paper():
    """121,600 a layer; 1.11 M, 998 K and 982 K in all, the last without γ and η of two SKA layers."""
    layer = layers.build("mamba3_echo", hidden_size=128, num_heads=4)
    assert sum(x.numel() for x in layer.parameters()) == 121_600
    models = [LanguageModel(recall_model(name, PAPER)) for name in EchoTransfer().models_at("paper")]
    learned = sum(x.numel() for block in models[2].blocks[2:] for x in block.mixer.readout.parameters())
    assert learned == 2 * (4 + 4)
    counts = [model.num_parameters() for model in models]
    assert [counts[0], counts[1], counts[2] - learned] == [1_110_144, 998_016, 981_632]
