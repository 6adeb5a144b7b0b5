"""halflife's models for Hugging Face's `AutoModelForCausalLM`, `generate()` and `Trainer`.

Importing this package needs transformers, and registers the classes with it.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from halflife.hf.cache import HalflifeCache
from halflife.hf.config import HalflifeConfig
from halflife.hf.model import HalflifeForCausalLM

__all__ = ["HalflifeCache", "HalflifeConfig", "HalflifeForCausalLM"]

AutoConfig.register("halflife", HalflifeConfig, exist_ok=True)
AutoModelForCausalLM.register(HalflifeConfig, HalflifeForCausalLM, exist_ok=True)
