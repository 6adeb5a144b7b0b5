"""Heads for classes of sequences and of tokens, as transformers defines them over any base model."""

from __future__ import annotations

from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from halflife.hf.model import HalflifePreTrainedModel


class HalflifeForSequenceClassification(GenericForSequenceClassification, HalflifePreTrainedModel):
    """A `HalflifeModel` with a linear map (`.score`) at the last token of each row; reward models are of this kind."""


class HalflifeForTokenClassification(GenericForTokenClassification, HalflifePreTrainedModel):
    """A `HalflifeModel` with a linear map (`.score`) at each token."""
