"""Projections + decay + op: `(x, state) → (y, state)`."""

from halflife.decay import Float32Module
from halflife.layers import attention, gated_deltanet, gla, mamba2, retnet  # noqa: F401 (each registers itself)
from halflife.layers.mixer import LAYERS, LinearMixer, Mixer, State, build
from halflife.layers.mlp import SwiGLU
from halflife.layers.norm import ShortConv
from halflife.layers.packing import repad, unpad

__all__ = [
    "LAYERS", "Float32Module", "LinearMixer", "Mixer", "ShortConv", "State", "SwiGLU", "build", "repad", "unpad",
]  # fmt: skip
