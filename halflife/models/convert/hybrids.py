"""Conversion of transformers' hybrids of Gated DeltaNet and attention, Qwen3.5 and OLMo Hybrid, in both directions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from halflife.layers import SwiGLU
from halflife.layers.attention import Attention
from halflife.layers.gated_deltanet import GatedDeltaNet
from halflife.models.config import ModelConfig
from halflife.models.convert.mixers import olmo_rules, qwen3_5_rules, widths
from halflife.models.convert.rules import (
    Rule,
    convert_back,
    convert_from,
    copy,
    join_convolutions,
    require_equal,
    shared_heads,
)
from halflife.models.convert.source import (
    SOURCES,
    Config,
    Converted,
    Tensors,
    Translation,
    divide,
    known_keys,
    on_meta,
    settings,
)
from halflife.models.lm import LanguageModel

DEFAULTS = {
    "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
QWEN3_5 = {**DEFAULTS, "head_dim": 256}
OLMO = {
    **DEFAULTS, "vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_attention_heads": 30,
    "num_key_value_heads": None, "linear_key_head_dim": None, "linear_value_head_dim": None,
    "linear_num_key_heads": None, "linear_num_value_heads": None, "linear_allow_neg_eigval": True, "head_dim": None,
}  # fmt: skip
FIXED = {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "attention_dropout": (0.0, 0)}
# Settings of the initial values alone, and those that `_layer_types` and `_rope` read.
IGNORED = {
    "layer_types", "rope_parameters", "full_attention_interval", "linear_a_log_min", "linear_a_log_max",
    "linear_dt_min", "linear_dt_max", "linear_dt_init_floor", "partial_rotary_factor", "mamba_ssm_dtype",
    "attn_output_gate", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "pretraining_tp",
}  # fmt: skip
KINDS = ("linear_attention", "full_attention")
# (name in checkpoints, name in the model).
OLMO_NAMES = (("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm"))
MLP = ("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down")
UNUSED = ("mtp.", "model.visual.")  # of Qwen3.5's other tasks: prediction of several tokens, and images


@SOURCES.add("qwen3_5_text")
def from_qwen3_5(config: Config, tensors: Tensors) -> Converted:
    """Convert a `Qwen3_5ForCausalLM` of transformers to a halflife configuration and state dict.

    Where value heads share a query and a key, each value head gets a copy of both.

    Raises:
        ValueError: halflife cannot represent a setting, or the tensors do not fit.
    """
    s, model = _qwen3_5(config)
    return _convert(model, s, tensors)


def _qwen3_5(config: Config) -> tuple[SimpleNamespace, ModelConfig]:
    known_keys(config, {*QWEN3_5, *FIXED, *IGNORED})
    s = settings(config, QWEN3_5, {**FIXED, "attn_output_gate": (True,)})
    options = _attention(config, s, qk_norm="head_plus_one", gate=True)
    return s, _model("qwen3_5", config, s, options, norm="rms_plus_one", norm_eps=s.rms_norm_eps)


@SOURCES.add("qwen3_5")
def from_qwen3_5_with_images(config: Config, tensors: Tensors) -> Converted:
    """Convert the text model of a `Qwen3_5ForConditionalGeneration`. Its tower for images is left out.

    Raises:
        ValueError: see `from_qwen3_5`.
    """
    text = {**config.get("text_config", {})}
    text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", False))
    renamed = {name.replace("model.language_model.", "model."): x for name, x in tensors.items()}
    return from_qwen3_5(text, {name: x for name, x in renamed.items() if not name.startswith(UNUSED)})


@SOURCES.add("olmo_hybrid")
def from_olmo_hybrid(config: Config, tensors: Tensors) -> Converted:
    """Convert an `OlmoHybridForCausalLM` of transformers to a halflife configuration and state dict.

    Raises:
        ValueError: halflife cannot represent a setting, or the tensors do not fit.
    """
    s, model = _olmo_hybrid(config)
    named = {_replaced(name, OLMO_NAMES): x for name, x in join_convolutions(tensors).items()}
    return _convert(model, s, named)


def _olmo_hybrid(config: Config) -> tuple[SimpleNamespace, ModelConfig]:
    known_keys(config, {*OLMO, *FIXED, *IGNORED})
    s = settings(config, OLMO, FIXED)
    s.num_key_value_heads = s.num_key_value_heads or s.num_attention_heads
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        setattr(s, name, getattr(s, name) or s.num_attention_heads)
    s.linear_key_head_dim = s.linear_key_head_dim or int(0.75 * s.hidden_size / s.linear_num_key_heads)
    s.linear_value_head_dim = s.linear_value_head_dim or 2 * s.linear_key_head_dim
    s.head_dim = s.head_dim or divide(s.hidden_size, s.num_attention_heads, "hidden_size / num_attention_heads")
    options, more = _attention(config, s, qk_norm="all"), {"allow_neg_eigval": s.linear_allow_neg_eigval}
    return s, _model("olmo_hybrid", config, s, options, norm_place="after", norm_eps=1e-5, **more)


def _replaced(name: str, names: tuple[tuple[str, str], ...]) -> str:
    for old, new in names:
        name = name.replace(old, new)
    return name


def _as_published(tensors: dict[str, Tensor], widths: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of an OLMo Hybrid with the names under which transformers saves them."""
    new: dict[str, Tensor] = {}
    for name, x in tensors.items():
        if name.endswith("linear_attn.conv1d.weight"):
            for part, taps in zip("qkv", x.split(list(widths)), strict=True):
                new[name.replace("conv1d", f"{part}_conv1d")] = taps.clone()
        else:
            new[_replaced(name, tuple((b, a) for a, b in OLMO_NAMES))] = x
    return new


def _layer_types(config: Config, s: SimpleNamespace) -> list[str]:
    every = config.get("full_attention_interval", 4)
    types = config.get("layer_types") or [KINDS[(i + 1) % every == 0] for i in range(s.num_hidden_layers)]
    if unknown := [kind for kind in types if kind not in KINDS]:
        raise ValueError(f"layer_types has {unknown[0]} in config.json, which cannot be represented")
    if len(types) != s.num_hidden_layers:
        raise ValueError(f"layer_types in config.json has {len(types)} layers, not {s.num_hidden_layers}")
    return list(types)


def _attention(config: Config, s: SimpleNamespace, **options: Any) -> dict[str, Any]:
    """The options of the attention layers."""
    rope = {"rope_type": "default", **(config.get("rope_parameters") or {})}
    known = {"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
    if rope["rope_type"] != "default" or set(rope) - known:
        raise ValueError(f"rope_parameters = {rope} in config.json cannot be represented; only the default type can")
    options |= {"num_heads": s.num_attention_heads, "num_kv_heads": s.num_key_value_heads, "head_dim": s.head_dim}
    if rope.get("rope_theta") is None:
        return {**options, "position": "none", "norm_eps": s.rms_norm_eps}
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    return {**options, "rope_base": rope["rope_theta"], "rope_fraction": fraction, "norm_eps": s.rms_norm_eps}


def _model(
    name: str, config: Config, s: SimpleNamespace, attention: dict[str, Any], norm: str = "rms",
    norm_place: str | None = None, **options: Any,
) -> ModelConfig:  # fmt: skip
    types = _layer_types(config, s)
    full = [i for i, kind in enumerate(types) if kind == "full_attention"]
    kind = {"mixer": "attention", "options": attention, "layers": full}
    kind |= {"norm_place": norm_place} if norm_place else {}
    mixer = {
        "num_heads": s.linear_num_value_heads, "head_dim": s.linear_key_head_dim, "value_dim": s.linear_value_head_dim,
        "conv_size": s.linear_conv_kernel_dim, **options,
    }  # fmt: skip
    return ModelConfig(
        name=name, vocab_size=s.vocab_size, hidden_size=s.hidden_size, num_layers=s.num_hidden_layers,
        mixer="gated_deltanet", mixer_options=mixer, hybrid=kind if full else {}, norm=norm, norm_eps=s.rms_norm_eps,
        intermediate_size=s.intermediate_size, tie_embeddings=s.tie_word_embeddings,
        initializer_range=s.initializer_range,
    )  # fmt: skip


def _convert(model: ModelConfig, s: SimpleNamespace, tensors: Tensors) -> Converted:
    moved = Translation(on_meta(model), tensors)
    convert_from(moved, _rules(model, s))
    moved.head("lm_head.weight", "model.embed_tokens.weight")
    return model, moved.finish()


def _rules(model: ModelConfig, s: SimpleNamespace) -> Iterator[Rule]:
    """Yield the rules of all tensors but the head's."""
    qwen, hidden, width = model.norm == "rms_plus_one", s.hidden_size, s.intermediate_size
    yield copy("embedding.weight", "model.embed_tokens.weight", s.vocab_size, hidden)
    yield copy("norm.weight", "model.norm.weight", hidden)
    for i in range(s.num_hidden_layers):
        full, theirs, ours = i in model.other_layers, f"model.layers.{i}.", f"blocks.{i}."
        norms = ("input_layernorm", "post_attention_layernorm")
        if model.norms_after(i):
            norms = ("post_attention_layernorm", "post_feedforward_layernorm")
        for name, place in zip(norms, ("mixer", "mlp"), strict=True):
            yield copy(f"{ours}{place}_norm.weight", f"{theirs}{name}.weight", hidden)
        for name, part in MLP:
            shape = (hidden, width) if part == "down" else (width, hidden)
            yield copy(f"{ours}mlp.{part}.weight", f"{theirs}mlp.{name}.weight", *shape)
        linear = qwen3_5_rules if qwen else olmo_rules
        for rule in _attention_rules(s, gate=qwen) if full else linear(s):
            yield rule.under(f"{ours}mixer.", theirs + ("self_attn." if full else "linear_attn."))


def _attention_rules(s: SimpleNamespace, gate: bool) -> Iterator[Rule]:
    """Yield the rules of attention. With a gate, each head's rows in `q_proj` are its query and its gate."""
    size, hidden, given = s.head_dim, s.hidden_size, s.num_attention_heads
    queries, keys = given * size, s.num_key_value_heads * size
    total = queries * (2 if gate else 1)
    rows = torch.arange(total).view(given, -1, size)
    index = [rows[:, 0].flatten(), torch.arange(total, total + 2 * keys), *(rows[:, i].flatten() for i in [1] * gate)]
    theirs = (("q_proj.weight", (total, hidden)), ("k_proj.weight", (keys, hidden)), ("v_proj.weight", (keys, hidden)))
    yield Rule("qkv_proj.weight", theirs, torch.cat(index))
    yield copy("out_proj.weight", "o_proj.weight", hidden, queries)
    for name, width in (("q_norm", queries), ("k_norm", keys)):
        yield copy(f"{name}.weight", f"{name}.weight", size if gate else width)


def to_transformers_hybrid(model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the `config.json` and tensors of a Qwen3.5 or an OLMo Hybrid that computes what `model` does.

    A model whose norms have weights 1 + w becomes a Qwen3.5, any other one an OLMo Hybrid.

    Raises:
        ValueError: the model has options that transformers' model lacks; the message names them.
    """
    state, qwen = model.state_dict(), model.config.norm == "rms_plus_one"
    theirs = _their_config(model, qwen)
    s, expected = (_qwen3_5 if qwen else _olmo_hybrid)(theirs)
    require_equal(model, expected, "Qwen3.5" if qwen else "OLMo Hybrid")
    tensors = convert_back(_rules(expected, s), state)
    tensors = tensors if qwen else _as_published(tensors, widths(s))
    if model.head is not None:
        tensors["lm_head.weight"] = state["head.weight"]
    return {**theirs, "dtype": str(model.embedding.weight.dtype).removeprefix("torch.")}, tensors


def _their_config(model: LanguageModel, qwen: bool) -> dict[str, Any]:
    """Return the content of `config.json` for a model that may still have options without a place in it."""
    config, full = model.config, set(model.config.other_layers)
    mixers: list[Any] = [getattr(block, "mixer", None) for block in model.blocks]
    linear = [mixer for i, mixer in enumerate(mixers) if i not in full and isinstance(mixer, GatedDeltaNet)]
    attention = [mixer for i, mixer in enumerate(mixers) if i in full and isinstance(mixer, Attention)]
    if not linear or not attention or len(linear) + len(attention) < config.num_layers:
        raise ValueError(
            "transformers has models for mixer 'mamba2' only, and for hybrids of 'gated_deltanet' and 'attention'; "
            f"this one has {', '.join(sorted({config.mixer_of(i)[0] for i in range(config.num_layers)}))}"
        )
    first, one = linear[0], attention[0]
    mlp = model.blocks[0].mlp
    if not isinstance(mlp, SwiGLU):
        raise ValueError(f"transformers' hybrids have mlp 'swiglu'; this model has {config.mlp!r}")
    shared = [part for mixer in linear for part in _queries_and_keys(mixer)]
    rope = {"rope_type": "default", "rope_theta": one.rope_base, "partial_rotary_factor": one.rotated / one.head_dim}
    if not qwen:
        rope.pop("partial_rotary_factor")
        rope = rope if one.position == "rope" else {"rope_type": "default", "rope_theta": None}
    their = {
        "architectures": ["Qwen3_5ForCausalLM" if qwen else "OlmoHybridForCausalLM"],
        "model_type": "qwen3_5_text" if qwen else "olmo_hybrid", "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size, "num_hidden_layers": config.num_layers,
        "intermediate_size": len(mlp.up.weight),
        "num_attention_heads": one.num_heads, "num_key_value_heads": one.num_kv_heads, "head_dim": one.head_dim,
        "rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tie_embeddings, "rope_parameters": rope,
        "initializer_range": config.initializer_range, "linear_conv_kernel_dim": first.conv.size if first.conv else 0,
        "linear_key_head_dim": first.head_dim, "linear_value_head_dim": first.value_dim,
        "linear_num_key_heads": first.num_heads // shared_heads(shared, first.num_heads),
        "linear_num_value_heads": first.num_heads, "layer_types": [KINDS[i in full] for i in range(config.num_layers)],
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    return their if qwen else {**their, "linear_allow_neg_eigval": first.beta_scale == 2}


def _queries_and_keys(mixer: GatedDeltaNet) -> Iterator[Tensor]:
    """Yield the rows of the projection and of the convolution that give the queries, and those of the keys."""
    for weight in (mixer.qkv_proj.weight, *([] if mixer.conv is None else [mixer.conv.weight])):
        yield from weight.split(mixer.splits)[:2]
