"""Configurations, presets and the forward pass."""

from halflife.models.config import ModelConfig
from halflife.models.lm import LanguageModel, ModelState, param_groups
from halflife.models.presets.modifiers import MODIFIERS
from halflife.models.presets.presets import PRESETS, preset
from halflife.models.presets.sizes import SIZES

__all__ = ["MODIFIERS", "PRESETS", "SIZES", "LanguageModel", "ModelConfig", "ModelState", "param_groups", "preset"]
