"""Converted GLA, Gated DeltaNet, KDA and RWKV-7 of fla, compared with their published names, shapes and equations."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_raises, assert_same, cases, fla, on_linux
from test_parity import heads_first

from halflife.models.convert import SOURCES, assemble

LENGTH, VOCABULARY, HIDDEN = 21, 19, 32

# Relative to the largest logit: four times the worst difference over four seeds, in float64, and in float32 with fla's
# loops.
EXACT, SINGLE = 4 * 3.9e-15, 4 * 2.8e-6


def widths(c):
    heads = c["num_heads"]
    if c["model_type"] == "gla":
        shared, key = c["num_kv_heads"] or heads, int(HIDDEN * c["expand_k"]) // heads
        return (heads, key), (shared, key), (shared, int(HIDDEN * c["expand_v"]) // heads)
    key = c["head_dim"]
    return (heads, key), (heads, key), (c["num_v_heads"] or heads, int(key * c["expand_v"]))


def linear_shapes(c):
    gla, kda, parts = c["model_type"] == "gla", c["model_type"] == "kda", widths(c)
    heads = c["num_heads"] if gla else parts[2][0]
    inner, size, gated = heads * parts[2][1], parts[2][1], not kda and c["use_output_gate" if gla else "use_gate"]
    norm = ("g_norm_swish_gate" if gated and c["fuse_norm"] else "g_norm") if gla else "o_norm"
    shapes = {f"attn.{n}_proj.weight": (own * dim, HIDDEN) for n, (own, dim) in zip("qkv", parts, strict=True)}
    if c["use_short_conv"]:
        shapes |= {f"attn.{n}_conv1d.weight": (own * dim, 1, 4) for n, (own, dim) in zip("qkv", parts, strict=True)}
    if gla:
        rows = math.prod(parts[1])
        shapes |= {"attn.gk_proj.0.weight": (16, HIDDEN), "attn.gk_proj.1.weight": (rows, 16)}
        shapes |= {"attn.gk_proj.1.bias": (rows,)}
    else:
        decays = heads * parts[0][1] if kda else heads
        shapes |= {"attn.b_proj.weight": (heads, HIDDEN), "attn.A_log": (heads,), "attn.dt_bias": (decays,)}
        shapes |= {} if kda else {"attn.a_proj.weight": (heads, HIDDEN)}
    for name, rows in (("f", decays), ("g", inner)) if kda else ():
        shapes |= {f"attn.{name}_proj.0.weight": (size, HIDDEN), f"attn.{name}_proj.1.weight": (rows, size)}
    shapes |= {"attn.g_proj.1.bias": (inner,)} if kda else {}
    shapes |= {"attn.g_proj.weight": (inner, HIDDEN)} if gated else {}
    return shapes | {
        f"attn.{norm}.weight": (size,), "attn.o_proj.weight": (HIDDEN, inner), "attn_norm.weight": (HIDDEN,),
        "mlp_norm.weight": (HIDDEN,), "mlp.gate_proj.weight": (256, HIDDEN), "mlp.up_proj.weight": (256, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, 256),
    }  # fmt: skip


def rwkv7_shapes(c, layer):
    shapes = {f"attn.x_{name}": (1, 1, HIDDEN) for name in "rwkvag"}
    shapes |= {f"attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "rkvo"}
    shapes |= {"attn.k_k": (HIDDEN,), "attn.k_a": (HIDDEN,), "attn.r_k": (4, 8)}
    for name, rank in (("w", 6), ("a", 5), ("g", 7), ("v", 3)):
        if name != "v" or layer > 0:
            shapes |= {f"attn.{name}_lora.lora.0.weight": (rank, HIDDEN)}
            shapes |= {f"attn.{name}_lora.lora.2.weight": (HIDDEN, rank)}
            shapes |= {f"attn.{name}_lora.lora.2.bias": (HIDDEN,)} if name != "g" else {}
    for norm in ("attn.g_norm", "attn_norm", "ffn_norm", *(["pre_norm"] if c["norm_first"] and layer == 0 else [])):
        shapes |= {f"{norm}.weight": (HIDDEN,), f"{norm}.bias": (HIDDEN,)}
    return shapes | {
        "ffn.x_k": (HIDDEN,), "ffn.key.weight": (4 * HIDDEN, HIDDEN), "ffn.value.weight": (HIDDEN, 4 * HIDDEN)
    }  # fmt: skip


CONFIGS = {
    "gla": {
        "hidden_ratio": 4, "expand_k": 0.5, "expand_v": 1, "num_heads": 4, "num_kv_heads": None, "fuse_norm": True,
        "feature_map": None, "use_short_conv": False, "use_output_gate": True, "clamp_min": None, "norm_eps": 1e-6,
        "hidden_act": "swish", "elementwise_affine": True, "use_gk": True, "use_gv": False, "conv_size": 4,
    },
    "gated_deltanet": {
        "hidden_ratio": 4, "expand_v": 2, "head_dim": 8, "num_heads": 3, "num_v_heads": None, "use_gate": True,
        "use_short_conv": True, "conv_size": 4, "hidden_act": "swish", "norm_eps": 1e-6, "fuse_norm": True,
    },
    "kda": {
        "hidden_ratio": 4, "expand_v": 1.5, "head_dim": 8, "num_heads": 2, "num_v_heads": 4, "use_short_conv": True,
        "conv_size": 4, "hidden_act": "swish", "norm_eps": 1e-3, "fuse_norm": True, "allow_neg_eigval": True,
    },
    "rwkv7": {
        "hidden_ratio": 4.0, "head_dim": 8, "num_heads": None, "decay_low_rank_dim": 6, "gate_low_rank_dim": 7,
        "a_low_rank_dim": 5, "v_low_rank_dim": 3, "hidden_act": "sqrelu", "norm_first": True, "norm_bias": True,
        "norm_eps": 1e-5, "fuse_norm": False, "value_dim": [HIDDEN] * 2,
    },
}  # fmt: skip


def published(model_type, dtype=torch.float64, **changes):
    """Write a `config.json` and random weights; no weight has a value that hides a term."""
    config = {
        "model_type": model_type, "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_hidden_layers": 2,
        "intermediate_size": None, "attn": None, "tie_word_embeddings": False, **CONFIGS[model_type], **changes,
    }  # fmt: skip
    shapes = {"model.embeddings.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= {} if config["tie_word_embeddings"] else {"lm_head.weight": (VOCABULARY, HIDDEN)}
    shapes |= {"model.norm.bias": (HIDDEN,)} if model_type == "rwkv7" else {}
    for i in range(2):
        layer = rwkv7_shapes(config, i) if model_type == "rwkv7" else linear_shapes(config)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return config, {name: 0.3 * torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def gla_loop(q, k, v, g):
    state, read = 0, []
    for t in range(q.shape[1]):
        state = g[:, t].exp().unsqueeze(-1) * state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        read.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) / q.shape[-1] ** 0.5)
    return torch.stack(read, 1)


def delta_loop(q, k, v, beta, g):
    state, read = q.new_zeros(*q[:, 0].shape, v.shape[-1]), []
    for t in range(q.shape[1]):
        decay = g[:, t].exp()
        state = decay.view(*decay.shape, *[1] * (4 - decay.ndim)) * state
        error = beta[:, t].unsqueeze(-1) * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t].unsqueeze(-1) * error.unsqueeze(-2)
        read.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) / q.shape[-1] ** 0.5)
    return torch.stack(read, 1)


def dplr_loop(r, k, v, removed, a, g):
    state, read = r.new_zeros(*r[:, 0].shape, v.shape[-1]), []
    for t in range(r.shape[1]):
        held = torch.einsum("bhk,bhkv->bhv", removed[:, t], state).unsqueeze(-2)
        state = g[:, t].exp().unsqueeze(-1) * state - (removed[:, t] * a[:, t]).unsqueeze(-1) * held
        state = state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        read.append(torch.einsum("bhk,bhkv->bhv", r[:, t], state))
    return torch.stack(read, 1)


def fla_dplr(r, k, v, removed, a, g):
    recurrence = heads_first(fla("generalized_delta_rule.dplr.naive", "dplr_recurrence"))
    return recurrence(None, True, q=r * r.shape[-1] ** 0.5, k=k, v=v, alpha=-removed, beta=removed * a, gk=g)[0]


LOOPS = {"gla": gla_loop, "gated_deltanet": delta_loop, "kda": delta_loop, "rwkv7": dplr_loop}
FLAS = {
    "gla": lambda q, k, v, g: fla("gla.naive", "naive_recurrent_gla")(q, k, v, g)[0],
    "gated_deltanet": lambda *x: fla("gated_delta_rule.naive", "naive_recurrent_gated_delta_rule")(*x)[0],
    "kda": lambda q, k, v, beta, g: fla("kda.naive", "naive_recurrent_kda")(q, k, v, g, beta)[0],
    "rwkv7": fla_dplr,
}


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def projected(c, w, x, sizes):
    """Queries, keys and values of heads and head sizes `sizes`, by a map and a short convolution."""
    for name, size in zip("qkv", sizes, strict=True):
        y = x @ w[f"{name}_proj.weight"].T
        if c["use_short_conv"]:
            taps = w[f"{name}_conv1d.weight"]
            y = F.silu(F.conv1d(F.pad(y.mT, (3, 0)), taps, groups=len(taps))).mT
        yield y.unflatten(-1, size)


def mix_linear(c, w, x, recur):
    """Compute GLA, Gated DeltaNet or KDA; `w` holds the weights of one `attn`."""
    kind = c["model_type"]
    heads = c["num_heads"] if kind == "gla" else widths(c)[2][0]
    q, k, v = (y.repeat_interleave(heads // y.shape[2], 2) for y in projected(c, w, x, widths(c)))
    if kind == "gla":
        logits = x @ w["gk_proj.0.weight"].T @ w["gk_proj.1.weight"].T + w["gk_proj.1.bias"]
        own, size = widths(c)[1]
        g = F.logsigmoid(logits).unflatten(-1, (own, size)).repeat_interleave(heads // own, 2)
        if c["feature_map"] is not None:
            q, k = q.clip(0), k.clip(0)
        o = recur(q, k, v, g / 16)
    else:
        q, k = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (q, k))
        if kind == "kda":
            f = x @ w["f_proj.0.weight"].T @ w["f_proj.1.weight"].T + w["dt_bias"]
            g = -w["A_log"].exp()[:, None] * F.softplus(f.unflatten(-1, (heads, -1)))
        else:
            g = -w["A_log"].exp() * F.softplus(x @ w["a_proj.weight"].T + w["dt_bias"])
        scale = 2 if c.get("allow_neg_eigval") else 1
        o = recur(q, k, v, scale * (x @ w["b_proj.weight"].T).sigmoid(), g)
    norm = next(w[name] for name in ("g_norm_swish_gate.weight", "g_norm.weight", "o_norm.weight") if name in w)
    o = rms(o, norm, c["norm_eps"]).flatten(-2)
    if kind == "kda":
        o = o * (x @ w["g_proj.0.weight"].T @ w["g_proj.1.weight"].T + w["g_proj.1.bias"]).sigmoid()
    return (o * F.silu(x @ w["g_proj.weight"].T) if "g_proj.weight" in w else o) @ w["o_proj.weight"].T


def shifted(x, mu):
    return x + (F.pad(x, (0, 0, 1, -1)) - x) * mu


def mix_rwkv7(c, w, x, first, recur):
    """Compute RWKV-7's time mix and its values; `first` holds the values of the first layer."""

    def lora(name, x, inner=lambda x: x):
        y = inner(x @ w[f"{name}_lora.lora.0.weight"].T) @ w[f"{name}_lora.lora.2.weight"].T
        return y if name == "g" else y + w[f"{name}_lora.lora.2.bias"]

    mixed = {name: shifted(x, w[f"x_{name}"]) for name in "rwkvag"}
    r, k, v = (mixed[name] @ w[f"{name}_proj.weight"].T for name in "rkv")
    v = v if first is None else torch.lerp(v, first, lora("v", mixed["v"]).sigmoid())
    a = lora("a", mixed["a"]).sigmoid()
    g = -math.exp(-0.5) * lora("w", mixed["w"], torch.tanh).sigmoid()
    per_head = [z.unflatten(-1, (4, 8)) for z in (r, k * (1 + (a - 1) * w["k_a"]), v, k * w["k_k"], a, g)]
    per_head[3] = F.normalize(per_head[3], dim=-1)
    o = recur(*per_head).flatten(0, 1).flatten(1)
    o = F.group_norm(o, 4, w["g_norm.weight"], w["g_norm.bias"], 8 * c["norm_eps"]).view_as(x)
    bonus = (per_head[0] * per_head[1] * w["r_k"]).sum(-1, keepdim=True) * per_head[2]
    return (o + bonus.flatten(-2)) * lora("g", mixed["g"], torch.sigmoid) @ w["o_proj.weight"].T, v


def logits(config, weights, ids, recur, mix):
    rwkv7, first = config["model_type"] == "rwkv7", None

    def norm(x, name):
        if not rwkv7:
            return rms(x, weights[f"{name}.weight"], config["norm_eps"])
        return F.layer_norm(x, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"], config["norm_eps"])

    x = weights["model.embeddings.weight"][ids]
    x = norm(x, "model.layers.0.pre_norm") if "model.layers.0.pre_norm.weight" in weights else x
    for i in range(2):
        at = f"model.layers.{i}"
        w = {name[len(at) + 6 :]: z for name, z in weights.items() if name.startswith(f"{at}.attn.")}
        if rwkv7:
            y, v = mix_rwkv7(config, w, norm(x, f"{at}.attn_norm"), first, recur)
            first, x = v if i == 0 else first, x + y
            y = shifted(norm(x, f"{at}.ffn_norm"), weights[f"{at}.ffn.x_k"]) @ weights[f"{at}.ffn.key.weight"].T
            x = x + y.relu().square() @ weights[f"{at}.ffn.value.weight"].T
        else:
            x = x + mix(config, w, norm(x, f"{at}.attn_norm"), recur)
            y = norm(x, f"{at}.mlp_norm")
            gate, up, down = (weights[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
            x = x + (F.silu(y @ gate) * (y @ up)) @ down
    head = weights["model.embeddings.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return norm(x, "model.norm") @ head.T


VARIANTS = [
    ("gla", {}),
    ("gla", {"num_kv_heads": 2, "use_short_conv": True, "expand_k": 1, "expand_v": 2}),
    ("gla", {"use_output_gate": False, "tie_word_embeddings": True}),
    ("gla", {"fuse_norm": False, "use_short_conv": True}),
    ("gla", {"feature_map": "relu", "use_short_conv": True}),
    ("gated_deltanet", {}),
    ("gated_deltanet", {"num_v_heads": 6, "expand_v": 1.5}),
    ("gated_deltanet", {"use_gate": False, "tie_word_embeddings": True}),
    ("gated_deltanet", {"allow_neg_eigval": True}),
    ("kda", {}),
    ("kda", {"num_v_heads": None, "allow_neg_eigval": False, "expand_v": 1}),
    ("rwkv7", {}),
    ("rwkv7", {"norm_first": False, "head_dim": None, "num_heads": 4, "tie_word_embeddings": True}),
]


def convert_and_compare(config, weights, recur, tolerance, mix=mix_linear):
    """Compare a converted model with `logits` by mixers `mix`, whole and in two pieces."""
    ids = torch.randint(VOCABULARY, (2, LENGTH))
    model = assemble(*SOURCES[config["model_type"]](config, weights))
    got, _ = model(ids)
    assert_close(got, logits(config, weights, ids, recur, mix), tolerance)
    _, state = model(ids[:, :9])
    assert_close(model(ids[:, 9:], state)[0], got[:, 9:], tolerance)


@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_logits_equal_the_published_equations(model_type, changes):
    convert_and_compare(*published(model_type, **changes), LOOPS[model_type], EXACT)


@on_linux
@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_logits_equal_flas_recurrences(model_type, changes):
    convert_and_compare(*published(model_type, torch.float32, **changes), FLAS[model_type], SINGLE)


def test_dtypes_are_kept_but_for_the_decay():
    config, weights = published("rwkv7", torch.bfloat16)
    _, tensors = SOURCES["rwkv7"](config, weights)
    wide = {name for name, x in tensors.items() if x.dtype == torch.float32}
    assert wide == {f"blocks.{i}.mixer.decay.logit" for i in range(2)}
    assert {x.dtype for x in tensors.values()} == {torch.float32, torch.bfloat16}


def test_rwkv7s_first_version():
    """fla's first version stores six shifts in one tensor; ranks and sizes may be absent."""
    config, weights = published("rwkv7", decay_low_rank_dim=None, hidden_ratio=None)
    expected = SOURCES["rwkv7"]({**config, "decay_low_rank_dim": 6}, weights)[1]
    for i in range(2):
        at = f"model.layers.{i}.attn"
        weights[f"{at}.x_x"] = torch.cat([weights.pop(f"{at}.x_{name}")[0] for name in "rwkvag"])
        for end in ("0.weight", "2.weight"):
            name = f"{at}.w_lora.lora.{end}"
            shape = (32, HIDDEN) if end == "0.weight" else (HIDDEN, 32)
            weights[name] = F.pad(
                weights[name], [0, shape[1] - weights[name].shape[1], 0, shape[0] - len(weights[name])]
            )
    got = SOURCES["rwkv7"](config, weights)[1]
    same = [name for name in expected if "decay_lora" not in name]
    assert_same({name: got[name] for name in same}, {name: expected[name] for name in same})
    assert got["blocks.0.mixer.decay_lora.down"].shape == (32, HIDDEN)


@cases(
    "model_type, changes",
    ("gla", {"attn": {"layers": [1], "num_heads": 4}}),
    ("gla", {"feature_map": "mish"}),
    ("gla", {"clamp_min": -1.0}),
    ("gla", {"elementwise_affine": False}),
    ("gla", {"gate_logit_normalizer": 8}),
    ("gla", {"gate_low_rank_dim": 8}),
    ("gla", {"attnres_block_size": 4}),
    ("gla", {"hidden_act": "gelu"}),
    ("gated_deltanet", {"use_short_conv": False}),
    ("gated_deltanet", {"attnres_block_size": 1}),
    ("kda", {"safe_gate": True, "lower_bound": -5.0}),
    ("kda", {"new_gate": 1}),
    ("rwkv7", {"norm_bias": False}),
    ("rwkv7", {"hidden_act": "relu"}),
    ("rwkv7", {"value_dim": 64}),
    ("rwkv7", {"value_dim": [32, 64]}),
    ("rwkv7", {"head_dim": None}),
    ("rwkv7", {"head_dim": 5}),
    ("rwkv7", {"quantization_config": {"bits": 4}}),
    ("gated_deltanet", {"num_hidden_layers": 0}),
    ("gated_deltanet", {"hidden_size": "32"}),
    ("gated_deltanet", {"tie_word_embeddings": 1}),
)
def test_what_cannot_be_represented_is_named(model_type, changes):
    config, weights = published(model_type)
    assert_raises(ValueError, next(iter(changes)), SOURCES[model_type], {**config, **changes}, weights)


def test_heads_that_cannot_be_shared():
    config, weights = published("gated_deltanet")
    assert_raises(ValueError, "share", SOURCES["gated_deltanet"], {**config, "num_v_heads": 4}, weights)
