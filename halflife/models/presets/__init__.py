"""Model configurations by name: `base[+modifier…]`."""

from halflife.models.presets.modifiers import MODIFIERS
from halflife.models.presets.presets import PRESETS, preset
from halflife.models.presets.sizes import SIZES

__all__ = ["MODIFIERS", "PRESETS", "SIZES", "preset"]
