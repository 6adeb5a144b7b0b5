"""The families of mixers that can be read. Each module registers its classes when it is imported."""

from halflife.analysis.foreign import gated_deltanet, kda, lightning, mamba2, rg_lru, rwkv4
from halflife.analysis.foreign.mixer_decay import MIXERS, MixerDecay

__all__ = ["MIXERS", "MixerDecay", "gated_deltanet", "kda", "lightning", "mamba2", "rg_lru", "rwkv4"]
