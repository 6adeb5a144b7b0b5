"""Converted DeltaNet, DeltaProduct, Comba and RetNet of fla, compared with their published shapes and equations."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_raises, assert_same, cases, fla, on_linux, unit
from test_convert_fla import (
    EXACT,
    HIDDEN,
    LENGTH,
    SINGLE,
    VOCABULARY,
    convert_and_compare,
    delta_loop,
    gla_loop,
    projected,
    rms,
)

from halflife import LanguageModel, preset
from halflife.models.convert import SOURCES, assemble, back_to

CONFIGS = {
    "delta_net": {
        "num_heads": 2, "expand_k": 1, "expand_v": 1.5, "use_gate": True, "use_beta": True, "qk_norm": "l2",
        "qk_activation": "silu", "use_short_conv": True, "use_output_norm": True, "allow_neg_eigval": False,
    },
    "gated_deltaproduct": {
        "num_heads": 2, "head_dim": 8, "expand_v": 2, "use_output_gate": True, "use_forget_gate": True,
        "allow_neg_eigval": True, "num_householder": 3, "use_short_conv": True,
    },
    "comba": {
        "num_heads": 2, "num_v_heads": 4, "head_dim": 8, "expand_v": 1.5, "use_output_gate": True,
        "use_output_correction": True, "use_inner_decay": True, "correction_factor": 0.02, "use_short_conv": True,
    },
    "retnet": {
        "num_heads": 4, "num_kv_heads": 2, "expand_k": 0.5, "expand_v": 1, "feature_map": None, "use_short_conv": False,
        "use_output_gate": True, "fuse_norm": True, "elementwise_affine": True,
    },
}  # fmt: skip
COMMON = {
    "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_hidden_layers": 2, "intermediate_size": None, "attn": None,
    "hidden_ratio": 4, "conv_size": 4, "hidden_act": "swish", "norm_eps": 1e-6, "tie_word_embeddings": False,
    "attn_mode": "chunk", "use_cache": True, "fuse_swiglu": True, "attnres_block_size": None,
}  # fmt: skip
VARIANTS = [
    ("delta_net", {}),
    ("delta_net", {"use_gate": False, "allow_neg_eigval": True, "tie_word_embeddings": True}),
    ("gated_deltaproduct", {}),
    ("gated_deltaproduct", {"num_householder": 1, "use_forget_gate": False, "allow_neg_eigval": False}),
    ("gated_deltaproduct", {"num_householder": 2, "use_output_gate": False, "expand_v": 1}),
    ("comba", {}),
    ("comba", {"num_v_heads": None, "use_output_gate": False, "correction_factor": 1.0}),
    ("retnet", {}),
    ("retnet", {"num_kv_heads": None, "expand_v": 2, "hidden_ratio": 2}),
    ("retnet", {"fuse_norm": False, "feature_map": "relu"}),
    ("retnet", {"use_output_gate": False, "feature_map": "swish"}),
]


def sizes(c):
    """Return the heads and the head sizes of queries, keys and values."""
    heads, kind = c["num_heads"], c["model_type"]
    if kind in ("delta_net", "retnet"):
        key, value = int(HIDDEN * c["expand_k"]) // heads, int(HIDDEN * c["expand_v"]) // heads
        shared = c.get("num_kv_heads") or heads
        return (heads, key), (shared, key), (shared, value), heads
    key, value, more = c["head_dim"], int(c["head_dim"] * c["expand_v"]), c.get("num_v_heads") or heads
    steps = c.get("num_householder", 1)
    return (heads, key), (steps * heads, key), (steps * more, value), more


def shapes_of(c):
    kind, (*parts, heads), steps = c["model_type"], sizes(c), c.get("num_householder", 1)
    gated, inner = c["use_gate" if kind == "delta_net" else "use_output_gate"], heads * sizes(c)[2][1]
    shapes = {f"{n}_proj.weight": (own * size, HIDDEN) for n, (own, size) in zip("qkv", parts, strict=True)}
    if c["use_short_conv"]:
        shapes |= {f"{n}_conv1d.weight": (own * size, 1, 4) for n, (own, size) in zip("qkv", parts, strict=True)}
    if kind != "retnet":
        shapes["b_proj.weight"] = (steps * heads, HIDDEN)
    if kind == "comba" or c.get("use_forget_gate"):
        shapes |= {"a_proj.weight": (heads, HIDDEN), "A_log": (heads,), "dt_bias": (heads,)}
    if kind == "comba":
        shapes |= {"decay": (c["num_heads"],), "D": (c["num_heads"],)}
    norm = "o_norm" if kind != "retnet" else "g_norm_swish_gate" if gated and c["fuse_norm"] else "g_norm"
    shapes |= {"g_proj.weight": (inner, HIDDEN)} if gated else {}
    return shapes | {f"{norm}.weight": (parts[2][1],), "o_proj.weight": (HIDDEN, inner)}


def published(model_type, dtype=torch.float64, **changes):
    """Write a `config.json` and random weights; no weight has a value that hides a term."""
    config = {"model_type": model_type, **COMMON, **CONFIGS[model_type], **changes}
    shapes = {"model.embeddings.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= {} if config["tie_word_embeddings"] else {"lm_head.weight": (VOCABULARY, HIDDEN)}
    for i in range(2):
        layer = {f"attn.{name}": shape for name, shape in shapes_of(config).items()}
        layer |= {"attn_norm.weight": (HIDDEN,), "mlp_norm.weight": (HIDDEN,), "mlp.down_proj.weight": (HIDDEN, 256)}
        layer |= {f"mlp.{name}_proj.weight": (256, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return config, {name: 0.3 * torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def comba_loop(q, k, v, p, beta, g):
    """Read the state before it decays, as fla's kernels do."""
    state, read = q.new_zeros(*q[:, 0].shape, v.shape[-1]), []
    for t in range(q.shape[1]):
        new = v[:, t] - torch.einsum("bhk,bhkv->bhv", p[:, t], state)
        state = g[:, t].exp()[..., None, None] * state
        state = state + (beta[:, t, :, None] * k[:, t]).unsqueeze(-1) * new.unsqueeze(-2)
        read.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) / q.shape[-1] ** 0.5)
    return torch.stack(read, 1)


def retention(q, k, v):
    g = (1 - 2.0 ** (-5 - torch.arange(q.shape[2], dtype=torch.float64))).log().to(q.dtype)
    return gla_loop(q, k, v, g[:, None].expand_as(q))


LOOPS = {"delta_net": delta_loop, "gated_deltaproduct": delta_loop, "comba": comba_loop, "retnet": retention}


def by_heads(name, function):
    """Call one of fla's functions whose tensors have the heads before the tokens."""

    def call(*tensors):
        o = fla(name, function)(*(x.transpose(1, 2) for x in tensors))
        return (o[0] if isinstance(o, tuple) else o).transpose(1, 2)

    return call


FLAS = {
    "delta_net": lambda q, k, v, beta, g: by_heads("delta_rule.naive", "delta_rule_recurrence")(q, k, v, beta),
    "gated_deltaproduct": lambda *x: fla("gated_delta_rule.naive", "naive_recurrent_gated_delta_rule")(*x)[0],
    "comba": lambda q, k, v, p, beta, g: fla("comba.naive", "naive_chunk_comba")(q, k, v, p, g, beta)[0],
    "retnet": by_heads("retention.naive", "naive_retention"),
}


def mix(c, w, x, recur):
    """Compute one `attn`, whose weights are `w`."""
    kind, (*parts, heads), steps = c["model_type"], sizes(c), c.get("num_householder", 1)
    q, k, v = projected(c, w, x, parts)
    if kind == "retnet":
        mapped = {None: lambda z: z, "swish": F.silu, "relu": torch.relu}[c["feature_map"]]
        q, k = turn(mapped(q)), turn(mapped(k))
        k, v = (z.repeat_interleave(heads // z.shape[2], 2) for z in (k, v))
        o = recur(q, k, v)
    else:
        beta = (2 if c.get("allow_neg_eigval") else 1) * (x @ w["b_proj.weight"].T).sigmoid()
        g = x.new_zeros(*x.shape[:2], heads)
        if "A_log" in w:
            g = -w["A_log"].exp() * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"])
        if kind == "comba":
            p = k * w["decay"].sigmoid()[:, None]
            q = q - w["D"][:, None] * p
            q, k, p = (unit(z).repeat_interleave(heads // c["num_heads"], 2) for z in (q, k, p))
            o = recur(q, k, v, p, beta, g)
        else:  # the rows of the steps of a token; the first one decays, and the last one is read
            k, v, beta = (z.unflatten(2, (steps, heads)).flatten(1, 2) for z in (unit(k), v, beta))
            q = F.pad(unit(q)[:, :, None], (0, 0, 0, 0, steps - 1, 0)).flatten(1, 2)
            g = F.pad(g[:, :, None], (0, 0, 0, steps - 1)).flatten(1, 2)
            o = recur(q, k, v, beta, g)[:, steps - 1 :: steps]
    norm = next(w[name] for name in ("g_norm_swish_gate.weight", "g_norm.weight", "o_norm.weight") if name in w)
    o = rms(o, norm, c["norm_eps"]).flatten(-2)
    if "g_proj.weight" in w:
        o = o * (torch.sigmoid if kind == "comba" else F.silu)(x @ w["g_proj.weight"].T)
    return o @ w["o_proj.weight"].T


def turn(x):
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[1])[:, None] * 10_000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    cos, sin = (z.to(x.dtype)[:, None] for z in (angle.cos(), angle.sin()))
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_logits_equal_the_published_equations(model_type, changes):
    convert_and_compare(*published(model_type, **changes), LOOPS[model_type], EXACT, mix)


@on_linux
@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_logits_equal_flas_recurrences(model_type, changes):
    convert_and_compare(*published(model_type, torch.float32, **changes), FLAS[model_type], SINGLE, mix)


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_the_tensors_come_back_as_they_were(model_type, changes):
    config, weights = published(model_type, torch.float32, **changes)
    model = assemble(*SOURCES[model_type](config, weights))
    described, back = back_to("fla", model)
    assert described["model_type"] == model_type
    if not config.get("fuse_norm", True):  # a norm is written under the name of the fused one
        back = {name.replace("g_norm_swish_gate", "g_norm"): x for name, x in back.items()}
    assert_same(back, weights)
    same = [name for name in CONFIGS[model_type] if name not in ("use_output_norm", "fuse_norm")]
    for name in same:
        default = {"num_v_heads": config["num_heads"], "num_kv_heads": config["num_heads"]}.get(name)
        value = default if config[name] is None and default else config[name]
        value = {"swish": "silu"}.get(value, value)
        assert described[name] == value, name


@cases(
    "model_type, changes",
    ("delta_net", {"use_short_conv": False}),
    ("delta_net", {"use_beta": False}),
    ("delta_net", {"conv_bias": True}),
    ("gated_deltaproduct", {"num_householder": 0}),
    ("comba", {"use_inner_decay": False}),
    ("comba", {"correction_factor": -1.0}),
    ("retnet", {"elementwise_affine": False}),
    ("retnet", {"feature_map": "mish"}),
    ("retnet", {"gate_fn": "gelu"}),
)
def test_what_cannot_be_represented_is_named(model_type, changes):
    config, weights = published(model_type)
    assert_raises(ValueError, next(iter(changes)), SOURCES[model_type], {**config, **changes}, weights)


@cases(
    "name, options, message",
    ("comba", {}, "normalize_feedback = True"),
    ("retnet", {}, "PaperRetNetDecay"),
    ("deltanet", {"position": "rope"}, "position"),
    ("deltaproduct", {"gate": "sigmoid"}, "gate"),
    ("mesa", {}, "fla has models for mixers"),
)
def test_what_fla_lacks_is_named_on_the_way_back(name, options, message):
    config = preset(name, hidden_size=HIDDEN, num_layers=1, vocab_size=VOCABULARY, num_heads=2)
    config = type(config)(**{**config.to_dict(), "mixer_options": {**config.mixer_options, **options}})
    assert_raises(ValueError, message, back_to, "fla", LanguageModel(config))


@cases(
    "name, options",
    ("deltanet", {"backend": "chunked"}),  # which changes no logits
    ("deltaproduct", {}),
    ("comba", {"normalize_feedback": True}),
    ("retnet", {"decay": "retnet_paper"}),
)
def test_models_of_ours_go_to_fla_and_back(name, options):
    """Also those with double precision, whose fixed decays were rounded to float32 before."""
    config = preset(name, hidden_size=HIDDEN, num_layers=2, vocab_size=VOCABULARY, num_heads=2, intermediate_size=24)
    config = dataclasses.replace(config, mixer_options={**config.mixer_options, **options})
    ids = torch.randint(VOCABULARY, (1, LENGTH))
    for model in (LanguageModel(config).eval(), LanguageModel(config).eval().double()):
        theirs, tensors = back_to("fla", model)
        again = assemble(*SOURCES[theirs["model_type"]](theirs, tensors))
        assert_close(again(ids)[0], model(ids)[0], SINGLE)
