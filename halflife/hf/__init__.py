"""halflife's models for Hugging Face's `AutoModel…`, `generate()` and `Trainer`.

Importing this package needs transformers, and registers the classes with it.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming

from halflife.hf.cache import HalflifeCache
from halflife.hf.causal_lm import HalflifeForCausalLM
from halflife.hf.classification import HalflifeForSequenceClassification, HalflifeForTokenClassification
from halflife.hf.config import AUTO_MAP, HalflifeConfig
from halflife.hf.model import HalflifeModel

__all__ = [
    "AUTO_MAP", "HalflifeCache", "HalflifeConfig", "HalflifeForCausalLM", "HalflifeForSequenceClassification",
    "HalflifeForTokenClassification", "HalflifeModel",
]  # fmt: skip

AutoConfig.register("halflife", HalflifeConfig, exist_ok=True)
for auto, model in (
    (AutoModel, HalflifeModel),
    (AutoModelForCausalLM, HalflifeForCausalLM),
    (AutoModelForSequenceClassification, HalflifeForSequenceClassification),
    (AutoModelForTokenClassification, HalflifeForTokenClassification),
):
    auto.register(HalflifeConfig, model, exist_ok=True)
# `checkpoint.save` names the head without the prefix of the wrapper.
register_checkpoint_conversion_mapping("HalflifeForCausalLM", [WeightRenaming(r"^head\.", "lm_head.")], overwrite=True)
