"""halflife: how linear recurrent sequence models remember and forget."""

from halflife import decay, layers, ops, tasks
from halflife.models import LanguageModel, ModelConfig, param_groups, preset

__version__ = "0.1.0"

__all__ = ["LanguageModel", "ModelConfig", "decay", "layers", "ops", "param_groups", "preset", "tasks"]
