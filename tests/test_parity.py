"""Comparison with other libraries on a CPU: layers and ops of transformers, and fla-core's naive recurrences."""

from types import SimpleNamespace

import pytest
import torch
from helpers import OPS, assert_close, cases, fla, leaves, on_linux, op_inputs, rounded, unchecked, with_grads
from transformers import Mamba2Config
from transformers.models.llama import modeling_llama as llama
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from halflife import decay, layers
from halflife.ops.fused import l2_normalize

# Both sides compute in float32. The tolerance is four times the worst measured error, relative to the largest entry.
TOLERANCE = 4 * 1.6e-6

each_length = pytest.mark.parametrize("length", [1, 16, 33, 70])


def copy_weights(theirs, ours, names):
    """Set random weights in both, without 1s and 0s, which could hide a term; `names` are ours where they differ."""
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    weights = {names.get(name, name): x for name, x in theirs.state_dict().items()}
    ours.load_state_dict({name: x.reshape(ours.state_dict()[name].shape) for name, x in weights.items()})


def check_layers(theirs, ours, length):
    """Compare outputs and gradients of the input. Each function maps `x` to `y`."""
    arguments = leaves({"x": torch.randn(2, length, 32)})
    expected = with_grads((theirs(arguments["x"]), None), arguments)
    assert_close(with_grads((ours(arguments["x"])[0], None), arguments), expected, TOLERANCE)


@each_length
@pytest.mark.parametrize("num_groups", [1, 4])
def test_mamba2_equals_transformers(num_groups, length):
    config = Mamba2Config(
        hidden_size=32, num_heads=8, head_dim=8, expand=2, state_size=16, n_groups=num_groups, chunk_size=16,
        num_hidden_layers=1,
    )  # fmt: skip
    theirs = Mamba2Mixer(config, layer_idx=0)
    ours = layers.build("mamba2", hidden_size=32, num_heads=8, state_size=16, num_groups=num_groups, chunk_size=32)
    names = {
        "conv1d.weight": "conv.weight", "conv1d.bias": "conv.bias", "A_log": "decay.A_log", "dt_bias": "decay.dt_bias",
        "D": "skip.D",
    }  # fmt: skip
    copy_weights(theirs, ours, names)
    check_layers(theirs, ours, length)


@each_length
def test_gated_deltanet_equals_transformers(length, monkeypatch):
    plain = unchecked(qwen3_5.torch_chunk_gated_delta_rule)  # else transformers takes fla's Triton kernel, if installed
    monkeypatch.setattr(qwen3_5, "torch_chunk_gated_delta_rule", plain)
    config = SimpleNamespace(
        hidden_size=32, linear_num_value_heads=4, linear_num_key_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, linear_conv_kernel_dim=4, hidden_act="silu", rms_norm_eps=1e-5,
        layer_types=["linear_attention"], dtype=torch.float32,
    )  # fmt: skip
    theirs, ours = qwen3_5.Qwen3_5GatedDeltaNet(config, 0), layers.build("gated_deltanet", hidden_size=32)
    names = {
        "in_proj_qkv.weight": "qkv_proj.weight", "in_proj_z.weight": "gate.proj.weight",
        "in_proj_b.weight": "beta_proj.weight", "in_proj_a.weight": "decay_proj.up.weight", "norm.weight":
        "gate.norm.weight", "conv1d.weight": "conv.weight", "A_log": "decay.A_log", "dt_bias": "decay.dt_bias",
    }  # fmt: skip
    copy_weights(theirs, ours, names)
    check_layers(theirs, ours, length)


@each_length
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_attention_equals_transformers(num_kv_heads, length):
    config = llama.LlamaConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=num_kv_heads, attn_implementation="sdpa"
    )
    theirs, turn = llama.LlamaAttention(config, 0), llama.LlamaRotaryEmbedding(config)
    ours = layers.build("attention", hidden_size=32, num_kv_heads=num_kv_heads)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    weights = theirs.state_dict()
    qkv = torch.cat([weights[f"{name}_proj.weight"] for name in "qkv"])
    ours.load_state_dict({"qkv_proj.weight": qkv, "out_proj.weight": weights["o_proj.weight"]})

    def attend(x):
        return theirs(x, turn(x, torch.arange(length).unsqueeze(0)), None)[0]

    check_layers(attend, ours, length)


@cases("function", qwen3_next.torch_chunk_gated_delta_rule, qwen3_next.torch_recurrent_gated_delta_rule)
@pytest.mark.parametrize("normalised", [False, True])
def test_gated_delta_rule_equals_qwen3_next(function, normalised):
    arguments = leaves(rounded(op_inputs("delta_rule", "scalar", 70, batch=2), torch.float32))
    q, k, v, state, beta, g = arguments.values()
    function = unchecked(function)  # transformers would take fla's Triton kernels if fla is installed
    expected = function(
        q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=normalised
    )
    if normalised:
        q, k = l2_normalize(q), l2_normalize(k)
    got = OPS["delta_rule"](q, k, v, beta, g, initial_state=state, output_final_state=True)
    assert_close(with_grads(got, arguments), with_grads(expected, arguments), TOLERANCE)


def heads_first(function):
    def call(initial_state, output_final_state, **tensors):
        swapped = {name: x.transpose(1, 2) for name, x in tensors.items()}
        o, state = function(**swapped, initial_state=initial_state, output_final_state=output_final_state)
        return o.transpose(1, 2), state

    return call


# op, granularity, module and function of fla, and the call
NAIVE = [
    ("linear_attention", "none", "linear_attn.naive", "naive_recurrent_linear_attn"),
    ("linear_attention", "scalar", "simple_gla.naive", "naive_recurrent_simple_gla"),
    ("linear_attention", "scalar", "simple_gla.naive", "naive_chunk_simple_gla"),
    ("linear_attention", "vector", "gla.naive", "naive_recurrent_gla"),
    ("delta_rule", "none", "delta_rule.naive", "delta_rule_recurrence"),
    ("delta_rule", "scalar", "gated_delta_rule.naive", "naive_recurrent_gated_delta_rule"),
    ("delta_rule", "scalar", "gated_delta_rule.naive", "naive_chunk_gated_delta_rule"),
    ("delta_rule", "vector", "kda.naive", "naive_recurrent_kda"),
    ("dplr", "vector", "generalized_delta_rule.dplr.naive", "dplr_recurrence"),
]
HEADS_FIRST = ("delta_rule_recurrence", "dplr_recurrence")
RENAMED = {"naive_recurrent_gla": {"g": "gk"}, "dplr_recurrence": {"a": "alpha", "b": "beta", "g": "gk"}}


@on_linux
@pytest.mark.parametrize(("op", "granularity", "module", "name"), NAIVE, ids=[case[3] for case in NAIVE])
def test_op_equals_fla(op, granularity, module, name):
    arguments = leaves(rounded(op_inputs(op, granularity, 70, batch=2), torch.float32))
    function = heads_first(fla(module, name)) if name in HEADS_FIRST else fla(module, name)
    renamed = {RENAMED.get(name, {}).get(n, n): x for n, x in arguments.items()}
    expected = function(**renamed, output_final_state=True)
    got = OPS[op](**arguments, output_final_state=True)
    assert_close(with_grads(got, arguments), with_grads(expected, arguments), TOLERANCE)


@on_linux
def test_retention_equals_fla():
    """With four heads, RetNet's exponents 5 + 3j/(h−1) are fla's 5 + j."""
    arguments = op_inputs("linear_attention", "none", 70, heads=4)
    del arguments["initial_state"]
    arguments = leaves(rounded(arguments, torch.float32))
    o = fla("retention.naive", "naive_retention")(*(x.transpose(1, 2) for x in arguments.values())).transpose(1, 2)
    g = decay.build("retnet", num_heads=4, head_dim=6)(torch.zeros(1, 70, 4))
    got = OPS["linear_attention"](**arguments, g=g)
    assert_close(with_grads(got, arguments), with_grads((o, None), arguments), TOLERANCE)
