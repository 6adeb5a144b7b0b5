"""Model configurations by name, `base[+modifier…]`: `sizes`, then `modifiers`, then `presets`."""

from halflife.models.presets.modifiers import MODIFIERS
from halflife.models.presets.presets import PRESETS, preset
from halflife.models.presets.sizes import SIZES

__all__ = ["MODIFIERS", "PRESETS", "SIZES", "preset"]
