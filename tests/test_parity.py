"""Against code that is not ours: transformers' Mamba-2 and Qwen3-Next, and fla-core's naive recurrences, on a CPU."""

import importlib
import sys
import warnings

import pytest
import torch
from helpers import OPS, assert_close, leaves, op_inputs, rounded, unchecked, with_grads
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from halflife import decay, layers
from halflife.layers.norm import l2_normalize

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="fla-core imports triton, which has Linux wheels only")

# Both sides compute in float32; four times the worst measured difference, relative to the largest entry.
TOLERANCE = 4 * 1.6e-6

# transformers' name of a weight and ours, where they differ
OUR_NAMES = {
    "conv1d.weight": "conv.weight",
    "conv1d.bias": "conv.bias",
    "A_log": "decay.A_log",
    "dt_bias": "decay.dt_bias",
    "D": "skip.D",
}


def mamba2_pair(num_groups):
    """transformers' mixer and ours with the same weights."""
    theirs = Mamba2Mixer(
        Mamba2Config(
            hidden_size=32, num_heads=8, head_dim=8, expand=2, state_size=16, n_groups=num_groups, chunk_size=16,
            num_hidden_layers=1, time_step_limit=(0.0, float("inf")),
        ),
        layer_idx=0,
    )  # fmt: skip
    ours = layers.build("mamba2", hidden_size=32, num_heads=8, state_size=16, num_groups=num_groups, chunk_size=32)
    for parameter in theirs.parameters():  # no 1s and 0s that would hide a term
        torch.nn.init.normal_(parameter, std=0.3)
    weights = theirs.state_dict()
    renamed = {ours_name: weights.pop(name) for name, ours_name in OUR_NAMES.items()}
    ours.load_state_dict({**weights, **renamed, "conv.weight": renamed["conv.weight"].squeeze(1)})
    return theirs, ours


@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("length", [1, 16, 33, 70])
def test_mamba2_equals_transformers(num_groups, length):
    theirs, ours = mamba2_pair(num_groups)
    arguments = leaves({"x": torch.randn(2, length, 32)})
    expected = with_grads((theirs(arguments["x"]), None), arguments)
    assert_close(with_grads((ours(arguments["x"])[0], None), arguments), expected, TOLERANCE)


@pytest.mark.parametrize("function", [qwen.torch_chunk_gated_delta_rule, qwen.torch_recurrent_gated_delta_rule])
@pytest.mark.parametrize("normalised", [False, True])
def test_gated_delta_rule_equals_qwen3_next(function, normalised):
    arguments = leaves(rounded(op_inputs("delta_rule", "scalar", 70, batch=2), torch.float32))
    q, k, v, state, beta, g = arguments.values()
    function = unchecked(function)  # else transformers takes fla's Triton kernels where fla is installed
    expected = function(
        q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=normalised
    )
    if normalised:
        q, k = l2_normalize(q), l2_normalize(k)
    got = OPS["delta_rule"](q, k, v, beta, g, initial_state=state, output_final_state=True)
    assert_close(with_grads(got, arguments), with_grads(expected, arguments), TOLERANCE)


def fla(module, name):
    """A function of fla.ops, imported only when its test runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that neither a GPU nor flash-attn is there
        return getattr(importlib.import_module(f"fla.ops.{module}"), name)


def heads_first(function):
    """For functions that take and give `[B, H, T, …]`."""

    def call(q, k, v, beta, **options):
        o, state = function(*(x.transpose(1, 2) for x in (q, k, v, beta)), **options)
        return o.transpose(1, 2), state

    return call


# op, granularity, module and function of fla, and how it is called
NAIVE = [
    ("linear_attention", "none", "linear_attn.naive", "naive_recurrent_linear_attn"),
    ("linear_attention", "scalar", "simple_gla.naive", "naive_recurrent_simple_gla"),
    ("linear_attention", "scalar", "simple_gla.naive", "naive_chunk_simple_gla"),
    ("linear_attention", "vector", "gla.naive", "naive_recurrent_gla"),
    ("delta_rule", "none", "delta_rule.naive", "delta_rule_recurrence"),
    ("delta_rule", "scalar", "gated_delta_rule.naive", "naive_recurrent_gated_delta_rule"),
    ("delta_rule", "scalar", "gated_delta_rule.naive", "naive_chunk_gated_delta_rule"),
    ("delta_rule", "vector", "kda.naive", "naive_recurrent_kda"),
]


@on_linux
@pytest.mark.parametrize(("op", "granularity", "module", "name"), NAIVE, ids=[case[3] for case in NAIVE])
def test_op_equals_fla(op, granularity, module, name):
    arguments = leaves(rounded(op_inputs(op, granularity, 70, batch=2), torch.float32))
    function = fla(module, name)
    if module == "delta_rule.naive":
        function = heads_first(function)
    renamed = {"gk" if n == "g" and module == "gla.naive" else n: x for n, x in arguments.items()}
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
