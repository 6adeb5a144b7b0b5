"""How fast memory fades: `(activation, position) → g`, one short file a strategy."""

from halflife.decay import gla, hgrn2, lightnet, mamba2, retnet, rwkv7, simple, tnl  # noqa: F401 (each registers itself)
from halflife.decay.base import DECAYS, Decay, DecayParts, build
from halflife.decay.post import PoST
from halflife.decay.spectral import SpectralDecay

__all__ = ["DECAYS", "Decay", "DecayParts", "PoST", "SpectralDecay", "build"]
