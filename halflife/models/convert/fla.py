"""Conversion of fla's GLA, Gated DeltaNet and KDA, in both directions.

Where heads share a query, a key or a value, each head of ours gets a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from halflife.layers.parts import FEATURE_MAPS
from halflife.models.config import ModelConfig
from halflife.models.convert.rules import Rule, copy, divide, heads, qkv_rules, shared_heads
from halflife.models.convert.source import SOURCES, Config, Source, configured, known_keys, settings
from halflife.models.lm import LanguageModel

Parsed = tuple[SimpleNamespace, ModelConfig]

DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 2048, "hidden_ratio": 4.0, "intermediate_size": None, "norm_eps": 1e-6,
    "tie_word_embeddings": False, "initializer_range": 0.02, "conv_size": 4,
}  # fmt: skip
GLA = {
    **DEFAULTS, "num_hidden_layers": 24, "num_heads": 4, "num_kv_heads": None, "expand_k": 0.5, "expand_v": 1.0,
    "use_short_conv": False, "use_output_gate": True, "fuse_norm": True,
}  # fmt: skip
GATED_DELTANET = {
    **DEFAULTS, "num_hidden_layers": 21, "num_heads": 6, "num_v_heads": None, "head_dim": 256, "expand_v": 2.0,
    "use_gate": True, "allow_neg_eigval": False,
}  # fmt: skip
KDA = {
    **DEFAULTS, "num_hidden_layers": 24, "num_heads": 16, "num_v_heads": None, "head_dim": 128, "expand_v": 1.0,
    "allow_neg_eigval": False,
}  # fmt: skip
NULLABLE = ("hidden_ratio",)

# Allowed values of settings. `attn` would put softmax attention into some layers, and `attnres_block_size` residuals
# over blocks of layers.
FIXED = {"attn": (None,), "hidden_act": ("swish", "silu"), "attnres_block_size": (None,)}
RANK = 16  # of a GLA's decay
# fla's models of GLA do not pass the last two on to their layers, whatever the config.json says.
GLA_FIXED = {
    **FIXED, "feature_map": (None, "swish", *FEATURE_MAPS), "clamp_min": (None,), "elementwise_affine": (True,),
    "use_gk": (True,), "use_gv": (False,), "gate_logit_normalizer": (16,), "gate_low_rank_dim": (RANK,),
}  # fmt: skip
GATED_DELTANET_FIXED = {**FIXED, "use_short_conv": (True,)}
KDA_FIXED = {**GATED_DELTANET_FIXED, "safe_gate": (False,), "lower_bound": (None,)}
# Settings that change speed, the loss, or initial values.
SPEED = {
    "attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp",
    "chunk_size", "residual_in_fp32", "dt_min", "dt_max", "dt_init_floor", "rescale_prenorm_residual", "num_heads",
}  # fmt: skip


def _gla(config: Config) -> Parsed:
    s = settings(config, GLA, GLA_FIXED, NULLABLE)
    key, value = (divide(int(s.hidden_size * x), s.num_heads, "a head's size") for x in (s.expand_k, s.expand_v))
    return s, linear_model("gla", s, {
        "num_heads": s.num_heads, "head_dim": key, "value_dim": value,
        "conv_size": s.conv_size if s.use_short_conv else 0, "gate": "swish" if s.use_output_gate else "none",
        **({"feature_map": {"swish": "silu"}.get(name, name)} if (name := config.get("feature_map")) else {}),
    })  # fmt: skip


def _gla_rules(s: SimpleNamespace, model: ModelConfig) -> Iterator[Rule]:
    shared, o = s.num_kv_heads or s.num_heads, model.mixer_options
    decays = heads(0, shared, o["head_dim"], s.num_heads // shared)
    return model_rules(model, [
        *qkv(s, model, s.num_heads, shared, shared),
        copy("decay_proj.down.weight", "gk_proj.0.weight"),
        Rule("decay_proj.up.weight", (("gk_proj.1.weight", (shared * o["head_dim"], RANK)),), decays),
        Rule("decay_proj.up.bias", (("gk_proj.1.bias", (shared * o["head_dim"],)),), decays),
        *output(s.use_output_gate, fused_norm(s)),
    ])  # fmt: skip


def _describe_gla(model: LanguageModel, mixers: list[Any]) -> dict[str, Any]:
    decays = [x for mixer in mixers for x in (mixer.decay_proj.up.weight, mixer.decay_proj.up.bias)]
    return describe_gla(model, mixers, decays)


def describe_gla(model: LanguageModel, mixers: list[Any], decays: Sequence[Tensor] = ()) -> dict[str, Any]:
    """Return the settings of a GLA or a RetNet, whose heads may share keys, values and the rows of `decays`."""
    feature_map = model.config.mixer_options.get("feature_map")
    return {
        **expanded(model, mixers[0]),
        "num_kv_heads": mixers[0].num_heads // shared_heads(mixers, slice(1, 3), decays),
        "use_output_gate": hasattr(mixers[0].gate, "proj"),
        "feature_map": None if feature_map == "none" else feature_map,
    }  # fmt: skip


def _gated_deltanet(config: Config) -> Parsed:
    s = settings(config, GATED_DELTANET, GATED_DELTANET_FIXED, NULLABLE)
    return s, _delta_model("gated_deltanet", s, {"gate": "swish" if s.use_gate else "none"})


def _gated_deltanet_rules(s: SimpleNamespace, model: ModelConfig) -> Iterator[Rule]:
    joint = qkv(s, model, s.num_heads, s.num_heads, model.mixer_options["num_heads"], repeat=False)
    return model_rules(model, [*joint, STRENGTH, *DECAY, *output(s.use_gate)])


def _kda(config: Config) -> Parsed:
    known_keys(config, {*KDA, *KDA_FIXED, *SPEED})
    s = settings(config, KDA, KDA_FIXED, NULLABLE)
    return s, _delta_model("kda", s, {})


def _kda_rules(s: SimpleNamespace, model: ModelConfig) -> Iterator[Rule]:
    number = model.mixer_options["num_heads"]
    names = {"decay_proj.down": "f_proj.0", "decay_proj.up": "f_proj.1", "beta_proj": "b_proj", "gate.down": "g_proj.0"}
    names |= {"gate.up": "g_proj.1", "gate.norm": "o_norm", "out_proj": "o_proj"}
    return model_rules(model, [
        *qkv(s, model, s.num_heads, s.num_heads, number, repeat=False),
        *(copy(f"{ours}.weight", f"{theirs}.weight") for ours, theirs in names.items()),
        copy("gate.up.bias", "g_proj.1.bias"),
        copy("decay.A_log", "A_log", number),
        copy("decay.dt_bias", "dt_bias", number * s.head_dim),
    ])  # fmt: skip


def _describe_delta(model: LanguageModel, mixers: list[Any]) -> dict[str, Any]:
    one = mixers[0]
    return {
        "num_heads": one.num_key_heads, "num_v_heads": one.num_heads, "head_dim": one.head_dim,
        "expand_v": one.value_dim / one.head_dim, "allow_neg_eigval": one.update.allow_neg_eigval,
        **common(model, one), **({} if model.config.mixer == "kda" else {"use_gate": hasattr(one.gate, "proj")}),
    }  # fmt: skip


def _delta_model(mixer: str, s: SimpleNamespace, options: dict[str, Any]) -> ModelConfig:
    number = s.num_v_heads or s.num_heads
    divide(number, s.num_heads, "the number of heads that share a key, num_v_heads / num_heads,")
    return linear_model(mixer, s, {
        "num_heads": number, **({} if number == s.num_heads else {"num_key_heads": s.num_heads}),
        "head_dim": s.head_dim, "value_dim": int(s.head_dim * s.expand_v), "conv_size": s.conv_size,
        "allow_neg_eigval": s.allow_neg_eigval, **options,
    })  # fmt: skip


def expanded(model: LanguageModel, one: Any) -> dict[str, Any]:
    """Return the settings of a model with mixers like `one`, whose sizes count all heads together."""
    key, value = (one.num_heads * size / model.config.hidden_size for size in (one.head_dim, one.value_dim))
    return {"num_heads": one.num_heads, "expand_k": key, "expand_v": value, **common(model, one)}


def common(model: LanguageModel, one: Any) -> dict[str, Any]:
    """Return the settings that all of fla's models have."""
    return {
        "use_short_conv": one.conv is not None, "conv_size": one.conv.size if one.conv else 4, "attn": None,
        "hidden_act": "swish", "fuse_norm": True, "norm_eps": model.config.norm_eps,
    }  # fmt: skip


DECAY = (copy("decay_proj.up.weight", "a_proj.weight"), copy("decay.A_log", "A_log"), copy("decay.dt_bias", "dt_bias"))
STRENGTH = copy("beta_proj.weight", "b_proj.weight")


def output(gated: bool, norm: str = "o_norm") -> Iterator[Rule]:
    """Yield the rules of the gate, the norm and the last map."""
    yield copy("gate.proj.weight", "g_proj.weight")
    yield copy("gate.norm.weight" if gated else "gate.weight", f"{norm}.weight")
    yield copy("out_proj.weight", "o_proj.weight")


def fused_norm(s: SimpleNamespace) -> str:
    """Return the name of the output norm, which has another one where fla fuses it with the gate."""
    return "g_norm_swish_gate" if s.fuse_norm and s.use_output_gate else "g_norm"


def linear_model(mixer: str, s: SimpleNamespace, options: dict[str, Any]) -> ModelConfig:
    width = s.intermediate_size or -(-int(s.hidden_size * (s.hidden_ratio or 4) * 2 / 3) // 256) * 256
    return configured(s, mixer, {**options, "norm_eps": s.norm_eps}, s.norm_eps, intermediate_size=width)


def qkv(s: SimpleNamespace, model: ModelConfig, *given: int, repeat: bool = True) -> Iterator[Rule]:
    """Yield the rules of queries, keys and values; `repeat` those that heads share, where the layer has no groups."""
    o = model.mixer_options
    sizes = o["head_dim"], o["head_dim"], o["value_dim"]
    return qkv_rules(s.hidden_size, given, sizes, o["conv_size"], ours=None if repeat else given)


def model_rules(model: ModelConfig, mixer: Iterable[Rule]) -> Iterator[Rule]:
    """Yield the rules of a model with SwiGLU, from those of its mixer."""
    mixer = list(mixer)
    yield copy("embedding.weight", "model.embeddings.weight")
    yield copy("norm.weight", "model.norm.weight")
    yield copy("head.weight", "lm_head.weight")
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        yield from (rule.under(f"{ours}mixer.", f"{theirs}attn.") for rule in mixer)
        for place, name in (("mixer", "attn"), ("mlp", "mlp")):
            yield copy(f"{ours}{place}_norm.weight", f"{theirs}{name}_norm.weight")
        for part in ("gate", "up", "down"):
            yield copy(f"{ours}mlp.{part}.weight", f"{theirs}mlp.{part}_proj.weight")


SOURCES.add("gla")(Source("fla's gla", "fla", _gla, _gla_rules, _describe_gla))
SOURCES.add("gated_deltanet")(
    Source("fla's gated_deltanet", "fla", _gated_deltanet, _gated_deltanet_rules, _describe_delta)
)
SOURCES.add("kda")(Source("fla's kda", "fla", _kda, _kda_rules, _describe_delta))
