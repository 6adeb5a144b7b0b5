"""Conversion of fla's DeltaNet, DeltaProduct, Comba and RetNet, in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from halflife.decay.retnet import PaperRetNetDecay
from halflife.layers.parts import FEATURE_MAPS
from halflife.models.config import ModelConfig
from halflife.models.convert import fla
from halflife.models.convert.rules import Rule, divide, heads, qkv_rules, shared_heads
from halflife.models.convert.source import SOURCES, Config, Source, known_keys, settings
from halflife.models.lm import LanguageModel

DELTA_NET = {
    **fla.DEFAULTS, "num_hidden_layers": 24, "num_heads": 16, "expand_k": 1.0, "expand_v": 1.0, "use_gate": False,
    "allow_neg_eigval": False,
}  # fmt: skip
PRODUCT = {
    **fla.DEFAULTS, "num_hidden_layers": 21, "num_heads": 6, "head_dim": 256, "expand_v": 2.0, "use_output_gate": True,
    "use_forget_gate": False, "allow_neg_eigval": False, "num_householder": 1,
}  # fmt: skip
COMBA = {
    **fla.DEFAULTS, "num_hidden_layers": 21, "num_heads": 6, "num_v_heads": None, "head_dim": 256, "expand_v": 2.0,
    "use_output_gate": True, "correction_factor": 1.0,
}  # fmt: skip
RETNET = {
    **fla.DEFAULTS, "num_hidden_layers": 24, "num_heads": 8, "num_kv_heads": None, "expand_k": 1.0, "expand_v": 2.0,
    "hidden_ratio": 2.0, "use_output_gate": True, "fuse_norm": True,
}  # fmt: skip

CONVOLVED = {**fla.FIXED, "use_short_conv": (True,)}
DELTA_NET_FIXED = {**CONVOLVED, "use_beta": (True,), "qk_norm": ("l2",), "qk_activation": ("silu",)}
# fla's models of Comba and RetNet do not pass these settings on to their layers.
COMBA_FIXED = {**CONVOLVED, "use_inner_decay": (True,), "use_output_correction": (True,)}
RETNET_FIXED = {
    **fla.FIXED, "use_short_conv": (False,), "elementwise_affine": (True,),
    "feature_map": (None, "swish", *FEATURE_MAPS),
}  # fmt: skip


def _read(config: Config, defaults: Config, fixed: Any, *more: str) -> SimpleNamespace:
    known_keys(config, {*defaults, *fixed, *fla.SPEED, *more})
    return settings(config, defaults, fixed, fla.NULLABLE)


def _sizes(s: SimpleNamespace) -> dict[str, int]:
    """The sizes of a head, where the settings give those of all heads together."""
    key, value = (divide(s.hidden_size * x, s.num_heads, "a head's size") for x in (s.expand_k, s.expand_v))
    return {"num_heads": s.num_heads, "head_dim": key, "value_dim": value}


def _delta_net(config: Config) -> fla.Parsed:
    s = _read(config, DELTA_NET, DELTA_NET_FIXED, "use_output_norm")
    return s, fla.linear_model("deltanet", s, {
        **_sizes(s), "conv_size": s.conv_size, "allow_neg_eigval": s.allow_neg_eigval,
        "gate": "swish" if s.use_gate else "none",
    })  # fmt: skip


def _delta_net_rules(s: SimpleNamespace, model: ModelConfig) -> Iterator[Rule]:
    number = s.num_heads
    return fla.model_rules(model, [*fla.qkv(s, model, number, number, number), fla.STRENGTH, *fla.output(s.use_gate)])


def _describe_delta_net(model: LanguageModel, mixers: list[Any]) -> dict[str, Any]:
    one = mixers[0]
    return {
        **fla.expanded(model, one), "use_gate": hasattr(one.gate, "proj"), "use_beta": True, "qk_norm": "l2",
        "qk_activation": "silu", "allow_neg_eigval": one.update.allow_neg_eigval,
    }  # fmt: skip


def _product(config: Config) -> fla.Parsed:
    s = _read(config, PRODUCT, CONVOLVED)
    return s, fla.linear_model("deltaproduct", s, {
        "num_heads": s.num_heads, "head_dim": s.head_dim, "value_dim": int(s.head_dim * s.expand_v),
        "conv_size": s.conv_size, "allow_neg_eigval": s.allow_neg_eigval, "num_householder": s.num_householder,
        "gate": "swish" if s.use_output_gate else "none", **({} if s.use_forget_gate else {"decay": None}),
    })  # fmt: skip


def _product_rules(s: SimpleNamespace, model: ModelConfig) -> Iterator[Rule]:
    o, steps = model.mixer_options, s.num_householder
    # The keys and values of the steps of a token lie side by side in both.
    sizes = (o["head_dim"], steps * o["head_dim"], steps * o["value_dim"])
    joint = qkv_rules(s.hidden_size, (s.num_heads,) * 3, sizes, s.conv_size)
    return fla.model_rules(model, [*joint, fla.STRENGTH, *fla.DECAY, *fla.output(s.use_output_gate)])


def _describe_product(model: LanguageModel, mixers: list[Any]) -> dict[str, Any]:
    one = mixers[0]
    return {
        "num_heads": one.num_heads, "head_dim": one.head_dim, "expand_v": one.value_dim / one.head_dim,
        **fla.common(model, one), "use_output_gate": hasattr(one.gate, "proj"),
        "use_forget_gate": one.decay is not None, "allow_neg_eigval": one.update.allow_neg_eigval,
        "num_householder": one.update.num_householder,
    }  # fmt: skip


def _comba(config: Config) -> fla.Parsed:
    s = _read(config, COMBA, COMBA_FIXED)
    return s, fla.linear_model("comba", s, {
        "num_heads": s.num_v_heads or s.num_heads, "head_dim": s.head_dim, "value_dim": int(s.head_dim * s.expand_v),
        "conv_size": s.conv_size, "gate": "sigmoid" if s.use_output_gate else "none", "normalize_feedback": True,
        "correction": float(s.correction_factor),
    })  # fmt: skip


def _comba_rules(s: SimpleNamespace, model: ModelConfig) -> Iterator[Rule]:
    number = model.mixer_options["num_heads"]
    shared = heads(0, s.num_heads, 1, divide(number, s.num_heads, "heads that share a key or a value"))
    return fla.model_rules(model, [
        *fla.qkv(s, model, s.num_heads, s.num_heads, number), fla.STRENGTH, *fla.DECAY, *fla.output(s.use_output_gate),
        Rule("feedback.share", (("decay", (s.num_heads,)),), shared),
        Rule("feedback.output", (("D", (s.num_heads,)),), shared),
    ])  # fmt: skip


def _describe_comba(model: LanguageModel, mixers: list[Any]) -> dict[str, Any]:
    one, shares = mixers[0], [x for mixer in mixers for x in (mixer.feedback.share, mixer.feedback.output)]
    return {
        "num_heads": one.num_heads // shared_heads(mixers, slice(0, 2), shares), "num_v_heads": one.num_heads,
        "head_dim": one.head_dim, "expand_v": one.value_dim / one.head_dim, **fla.common(model, one),
        "use_output_gate": hasattr(one.gate, "proj"), "use_inner_decay": True, "use_output_correction": True,
        "correction_factor": one.feedback.correction,
    }  # fmt: skip


def _retnet(config: Config) -> fla.Parsed:
    s = _read(config, RETNET, RETNET_FIXED)
    return s, fla.linear_model("retnet", s, {
        **_sizes(s), "decay": "retnet_paper", "conv_size": 0, "gate": "swish" if s.use_output_gate else "none",
        **({"feature_map": {"swish": "silu"}.get(name, name)} if (name := config.get("feature_map")) else {}),
    })  # fmt: skip


def _retnet_rules(s: SimpleNamespace, model: ModelConfig) -> Iterator[Rule]:
    shared = s.num_kv_heads or s.num_heads
    return fla.model_rules(model, [
        *fla.qkv(s, model, s.num_heads, shared, shared), *fla.output(s.use_output_gate, fla.fused_norm(s)),
        Rule("decay.log_rate", (), value=PaperRetNetDecay(num_heads=s.num_heads, head_dim=1).rates().log()),
    ])  # fmt: skip


SOURCES.add("delta_net")(
    Source("fla's delta_net", "fla", _delta_net, _delta_net_rules, _describe_delta_net, mixer="deltanet")
)
SOURCES.add("gated_deltaproduct")(
    Source("fla's gated_deltaproduct", "fla", _product, _product_rules, _describe_product, mixer="deltaproduct")
)
SOURCES.add("comba")(Source("fla's comba", "fla", _comba, _comba_rules, _describe_comba))
SOURCES.add("retnet")(Source(
    "fla's retnet", "fla", _retnet, _retnet_rules,
    lambda model, mixers: {**fla.describe_gla(model, mixers), "elementwise_affine": True},
))  # fmt: skip
