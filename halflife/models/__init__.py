"""Configurations, presets and the forward pass."""

from halflife.models.config import ModelConfig
from halflife.models.lm import LanguageModel, ModelState, param_groups
from halflife.models.presets import MODIFIERS, PRESETS, preset

__all__ = ["MODIFIERS", "PRESETS", "LanguageModel", "ModelConfig", "ModelState", "param_groups", "preset"]
