"""Configurations, presets, and the language model."""

from halflife.models.config import ModelConfig
from halflife.models.lm import LanguageModel, ModelState
from halflife.models.parameters import param_groups
from halflife.models.presets import MODIFIERS, PRESETS, SIZES, preset

__all__ = ["MODIFIERS", "PRESETS", "SIZES", "LanguageModel", "ModelConfig", "ModelState", "param_groups", "preset"]
