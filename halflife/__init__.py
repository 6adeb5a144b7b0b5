"""halflife: how linear recurrent sequence models remember and forget."""

from halflife import decay, layers, ops, tasks
from halflife.models import SIZES, LanguageModel, ModelConfig, param_groups, preset

__version__ = "0.1.0"

__all__ = ["SIZES", "LanguageModel", "ModelConfig", "decay", "layers", "ops", "param_groups", "preset", "tasks"]
