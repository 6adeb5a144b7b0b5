"""Sequence mixers, `(x, state) → (y, state)`: projections, a decay and an op."""

from halflife.layers import attention, fox, longhorn, mamba2, mamba3, rwkv7, ska, tpe  # noqa: F401 (they register)
from halflife.layers.design import rows  # noqa: F401
from halflife.layers.design.block import LinearMixer
from halflife.layers.memory.gate_rank import GateRank, gate_statistics
from halflife.layers.mixer import LAYERS, Mixer, Shared, SharedTensors, State, build, repad, unpad
from halflife.layers.mlp import KoopmanMLP, SwiGLU
from halflife.layers.parts import ShortConv
from halflife.layers.rwkv7 import RWKV7ChannelMix

__all__ = [
    "LAYERS", "GateRank", "KoopmanMLP", "LinearMixer", "Mixer", "RWKV7ChannelMix", "Shared", "SharedTensors",
    "ShortConv", "State", "SwiGLU", "build", "gate_statistics", "repad", "unpad",
]  # fmt: skip
