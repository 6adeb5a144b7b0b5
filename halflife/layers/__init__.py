"""Projections + decay + op: `(x, state) → (y, state)`."""

from halflife.layers import attention, gated_deltanet, gla, mamba2, retnet  # noqa: F401 (each registers itself)
from halflife.layers.mixer import LAYERS, LinearMixer, Mixer, State, build
from halflife.layers.mlp import SwiGLU
from halflife.layers.packing import repad, unpad

__all__ = ["LAYERS", "LinearMixer", "Mixer", "State", "SwiGLU", "build", "repad", "unpad"]
