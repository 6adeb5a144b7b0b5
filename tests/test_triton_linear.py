"""Our Triton kernels of linear attention and of GateRank on it equal the float64 token loop: outputs, states and all
gradients. Compiled where there is a GPU, else in Triton's interpreter."""

import sys

import pytest
import torch
from helpers import assert_close, assert_same, generator, leaves, rounded, slices, with_grads

from halflife.ops.backends import triton as kernels

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

from halflife.ops.backends.triton import linear
from halflife.ops.backends.triton.gates import make_chunks
from halflife.ops.call import OpCall

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The worst error measured over this file's cases (interpreted), relative to the largest entry of a tensor; four times
# that is allowed. The narrow formats round the weighted operands of products once more than their inputs, bfloat16
# by truncation in the interpreter.
WORST = {torch.float32: 9.0e-7, torch.bfloat16: 8.8e-3, torch.float16: 5.2e-4}

MODES = ("none", "scalar", "gate_rank")
each_mode = pytest.mark.parametrize("mode", MODES)


def inputs(mode, length, *, batch=1, heads=1, key=16, value=16, sequences=None, slow=None, fast=None):
    """Arguments of a kernel in float64 as a dict; `slow` and `fast` say which log-decays, None for moderate ones."""
    draw = generator(mode, length, batch, heads, key, value)

    def randn(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    shape = (batch, length, heads)
    rows = 2 * key if mode == "gate_rank" else key
    arguments = {name: randn(*shape, size) for name, size in (("q", key), ("k", key), ("v", value))}
    arguments["initial_state"] = randn(sequences or batch, heads, rows, value)
    if mode != "none":
        arguments["g_fast"] = chosen(fast, -randn(*shape).exp() / 8)
    if mode == "gate_rank":
        arguments["g_slow"] = chosen(slow, torch.where(randn(*shape) > 1, -randn(*shape).exp() / 4, 0.0))
    return arguments


def chosen(how, moderate):
    """`moderate` log-decays `[B, T, H]`, with those that `how` (a function of them, in place) changes."""
    if how is not None:
        how(moderate)
    return moderate


def token_loop(q, k, v, scale, initial_state, g_fast=None, g_slow=None, cu_seqlens=None):
    """The definition in float64, token by token, sequence by sequence."""
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens
    outputs, states = [], []
    for row, tokens in enumerate(slices(bounds)):
        state = initial_state if cu_seqlens is None else initial_state[row : row + 1]
        fast, slow = state.chunk(2, -2) if g_slow is not None else (state, torch.zeros_like(state))
        for t in range(tokens.start, tokens.stop):
            if g_fast is not None:
                fast = g_fast[:, t].exp()[..., None, None] * fast
            if g_slow is not None:
                reset = (g_slow[:, t] != 0)[..., None, None]
                slow = torch.where(reset, g_slow[:, t].exp()[..., None, None] * (slow + fast), slow)
                fast = torch.where(reset, 0.0, fast)
            fast = fast + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], slow + fast))
        states.append(torch.cat((fast, slow), -2) if g_slow is not None else fast)
    o = torch.stack(outputs, 1) if outputs else v
    return o, torch.cat(states)


def run(arguments, *, scale=0.3, cu_seqlens=None, chunk_size=64):
    """The kernels' outputs and gradients of these arguments."""
    arguments = leaves({name: x.to(DEVICE) for name, x in arguments.items()})
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32, device=DEVICE)
    given = {name.replace("g_fast", "g"): x for name, x in arguments.items()}
    op = "gate_rank" if "g_slow" in given else "linear_attention"
    outputs = linear.run(OpCall(op, **given, scale=scale, cu_seqlens=bounds, chunk_size=chunk_size))
    return {name: x.cpu() for name, x in with_grads(outputs, arguments).items()}


def expected(arguments, *, scale=0.3, cu_seqlens=None):
    """The token loop's outputs and gradients of these arguments, in float64."""
    arguments = leaves({name: x.double() for name, x in arguments.items()})
    return with_grads(token_loop(**arguments, scale=scale, cu_seqlens=cu_seqlens), arguments)


def check(mode, length, dtype=torch.float32, cu_seqlens=None, chunk_size=64, **options):
    arguments = rounded_gates(inputs(mode, length, **options), dtype)
    got = run(arguments, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
    assert got["state"].dtype == got["dinitial_state"].dtype == torch.float32
    assert got["o"].dtype == got["dq"].dtype == dtype
    assert_close(got, expected(arguments, cu_seqlens=cu_seqlens), 4 * WORST[dtype])
    return got


def rounded_gates(arguments, dtype):
    """The arguments in `dtype`, states and log-decays in float32."""
    gates = {name: x.float() for name, x in arguments.items() if name.startswith("g_")}
    return {**rounded(arguments, dtype), **gates}


# ------------------------------------------------------------------------------------------------ shapes


@each_mode
@pytest.mark.parametrize("length", [0, 1, 7, 32, 65])
def test_lengths(mode, length):
    check(mode, length)


@each_mode
@pytest.mark.parametrize(("dtype", "length"), [(torch.bfloat16, 130), (torch.float16, 64), (torch.float16, 1)], ids=str)
def test_narrow_inputs(mode, dtype, length):
    """In chunks of 64, where float32 has 32."""
    check(mode, length, dtype, key=24, value=32)


def test_narrow_log_decays():
    arguments = rounded(inputs("gate_rank", 20), torch.bfloat16)
    assert arguments["g_slow"].dtype == run(arguments)["dg_slow"].dtype == torch.bfloat16
    assert_close(run(arguments), expected(arguments), 4 * WORST[torch.bfloat16])


@pytest.mark.parametrize(
    ("mode", "key", "value"), [("none", 64, 17), ("scalar", 24, 80), ("scalar", 80, 24), ("gate_rank", 80, 24)]
)
def test_head_sizes(mode, key, value):
    """Padded in a block, and in more blocks than one."""
    check(mode, 37, key=key, value=value)


def test_large_heads():
    check("gate_rank", 20, key=256, value=80)


@pytest.mark.parametrize("chunk_size", [1, 31])
def test_chunk_sizes(chunk_size):
    """Rounded to 16, where 40 tokens have chunks of 32."""
    check("gate_rank", 40, chunk_size=chunk_size)


def test_many_heads_and_sequences():
    check("gate_rank", 20, batch=2, heads=3, chunk_size=16)


# --------------------------------------------------------------------------------------------- sequences


@each_mode
@pytest.mark.parametrize("bounds", [[0, 5, 5, 38, 38], [0, 0, 0]])
def test_packed(mode, bounds):
    """A boundary inside a chunk; empty sequences, first, last and between, keep their states."""
    got = check(mode, bounds[-1], cu_seqlens=bounds, sequences=len(bounds) - 1)
    given = rounded_gates(inputs(mode, bounds[-1], sequences=len(bounds) - 1), torch.float32)["initial_state"]
    for row, tokens in enumerate(slices(bounds)):
        if tokens.start == tokens.stop:
            assert_same(got["state"][row], given[row])


@each_mode
def test_no_initial_state_is_zeros(mode):
    arguments = rounded_gates(inputs(mode, 20), torch.float32)
    arguments["initial_state"] = torch.zeros_like(arguments["initial_state"])
    zeros = run(arguments, chunk_size=16)
    del arguments["initial_state"], zeros["dinitial_state"]
    assert_same(run(arguments, chunk_size=16), zeros)


@pytest.mark.parametrize("mode", ["none", "gate_rank"])
def test_cut_equals_uncut(mode):
    """A sequence continued from its state."""
    arguments = leaves(rounded_gates(inputs(mode, 40), torch.float32))
    whole = run(arguments)
    state, outputs = arguments["initial_state"], []
    for tokens in slices([0, 19, 20, 40]):
        part = {name: x[:, tokens] for name, x in arguments.items() if name != "initial_state"}
        got = run({**part, "initial_state": state})
        state = got["state"]
        outputs.append(got["o"])
    assert_close(
        {"o": torch.cat(outputs, 1), "state": state},
        {name: whole[name] for name in ("o", "state")},
        4 * WORST[torch.float32],
    )


def test_chunk_table():
    """Of packed sequences there may be more chunks than needed, all without tokens."""
    q = torch.empty(1, 71, 1, 16)
    chunks = make_chunks(q, 32, torch.tensor([0, 5, 5, 38, 71]))
    used = chunks.chunks[chunks.chunks[:, 1] > 0].tolist()
    assert used == [[0, 5, 0], [5, 32, 2], [37, 1, 2], [38, 32, 3], [70, 1, 3]]
    assert chunks.chunks[:5].tolist() == used
    assert chunks.sequences.tolist() == [[0, 1], [1, 0], [1, 2], [3, 2]]
    batch = make_chunks(torch.empty(2, 70, 3, 16), 32, None)
    assert batch.chunks.tolist() == [[s * 70 + c * 32, min(32, 70 - c * 32), s] for s in range(2) for c in range(3)]


# ------------------------------------------------------------------------------------------------ decays


def at(*steps):
    """Resets at these steps, and nowhere else."""

    def change(g):
        resets = torch.zeros_like(g)
        resets[:, list(steps)] = -0.3
        g.copy_(resets)

    return change


def everywhere(value):
    return lambda g: g.fill_(value)


def strong(value):
    """Every seventh step forgets all but e^value."""

    def change(g):
        g[:, ::7] = value

    return change


def slow_after_resets(g):
    """A run of full resets, then log-decays of −0.01: their sums differ by what float32 would lose beside −2,000."""
    g[:, :20] = -1000
    g[:, 20:] = -0.01


RESETS = {
    "none": everywhere(0.0),
    "every": everywhere(-0.05),
    "first": at(0),
    "last": at(39),
    "edges": at(15, 16, 31, 32),
    "tiny": everywhere(-1e-30),
}


@pytest.mark.parametrize("resets", RESETS)
def test_resets(resets):
    check("gate_rank", 40, slow=RESETS[resets])


DECAYS = {
    **{str(g): everywhere(g) for g in (-1e-6, -20.0, -torch.inf)},
    **{f"some {g}": strong(g) for g in (-1000.0, -torch.inf)},
    "slow after resets": slow_after_resets,
}


@pytest.mark.parametrize("fast", DECAYS)
def test_scalar_decays(fast):
    check("scalar", 40, fast=DECAYS[fast])


@pytest.mark.parametrize(
    ("slow", "fast"),
    [(slow, None) for slow in DECAYS] + [(None, fast) for fast in DECAYS] + [("some -1000.0", "some -inf")],
)
def test_decays_with_resets(slow, fast):
    check("gate_rank", 40, slow=DECAYS.get(slow), fast=DECAYS.get(fast))


@pytest.mark.parametrize("floor", [-1000.0, -torch.inf])
def test_a_full_reset_has_no_gradient(floor):
    """Exactly: not the rounding that is left where terms of other steps cancel."""
    for name in ("g_slow", "g_fast"):
        arguments = rounded_gates(inputs("gate_rank", 40, **{name[2:]: strong(floor)}), torch.float32)
        gradient, gates = run(arguments)[f"d{name}"], arguments[name]
        assert gradient[gates == floor].count_nonzero() == 0
        assert gradient[gates > -1].any()


def test_without_a_reset_the_slow_log_decay_has_no_gradient():
    arguments = rounded_gates(inputs("gate_rank", 40), torch.float32)
    gradient = run(arguments)["dg_slow"]
    resets = arguments["g_slow"] != 0
    assert gradient[~resets].count_nonzero() == 0
    assert (gradient[resets] != 0).all()


def test_without_resets_it_is_linear_attention():
    arguments = rounded_gates(inputs("gate_rank", 40, slow=everywhere(0.0)), torch.float32)
    fast, slow = arguments["initial_state"].chunk(2, -2)
    slow.zero_()
    got = run(arguments)
    plain = {name: x for name, x in arguments.items() if name != "g_slow"} | {"initial_state": fast}
    want = run(plain)
    assert_close(got["o"], want["o"], 4 * WORST[torch.float32])
    assert_close(got["state"].chunk(2, -2)[0], want["state"], 4 * WORST[torch.float32])


def test_zero_vectors_stay_finite():
    arguments = {name: torch.zeros_like(x) for name, x in inputs("gate_rank", 20).items()}
    for x in run(rounded_gates(arguments, torch.float32)).values():
        assert x.isfinite().all()


@pytest.mark.parametrize("mode", ["none", "gate_rank"])
def test_nothing_flows_backwards(mode):
    """To the bit: other tokens and gates after t, the same outputs up to t."""
    arguments = rounded_gates(inputs(mode, 40), torch.float32)
    changed = {name: x.clone() for name, x in arguments.items()}
    for name, x in changed.items():
        if name != "initial_state":
            x[:, 35:] = -1000 if name == "g_fast" else -x[:, 35:] - 1 if not name.startswith("g_") else -0.5
    assert_same(run(changed)["o"][:, :35], run(arguments)["o"][:, :35])


def test_a_nan_is_seen_from_its_token_on():
    arguments = rounded_gates(inputs("gate_rank", 40), torch.float32)
    for name in ("g_fast", "g_slow", "q"):
        broken = {**arguments, name: arguments[name].clone()}
        broken[name][:, 20] = torch.nan
        o = run(broken)["o"]
        assert o[:, :20].isfinite().all()
        assert o[:, 20].isnan().all()


# ----------------------------------------------------------------------------------------------- refusals


def test_second_derivatives_say_what_has_them():
    arguments = leaves(rounded_gates(inputs("scalar", 20), torch.float32))
    q, k, v, g = (arguments[x].to(DEVICE) for x in ("q", "k", "v", "g_fast"))
    o, _ = linear.run(OpCall("linear_attention", q, k, v, g, scale=1.0))
    with pytest.raises(RuntimeError, match="reference"):
        torch.autograd.grad(o.sum(), arguments["q"], create_graph=True)


def test_what_the_kernels_do_not_take():
    q = torch.zeros(1, 3, 2, 16, device=DEVICE)
    gate = torch.zeros(1, 3, 2, device=DEVICE)
    assert kernels.unsupported(OpCall("linear_attention", q, q, q, gate)) is None
    for message, arguments in {
        "one a channel": (q, q, q, q),
        "K = 8": (q[..., :8], q[..., :8], q),
        "V = 257": (q, q, q.new_zeros(1, 3, 2, 257)),
        "float64": (q.double(), q.double(), q.double()),
        "bfloat16": (q, q, q.bfloat16()),
        "gates in": (q, q, q, gate.double()),
    }.items():
        assert message in kernels.unsupported(OpCall("linear_attention", *arguments))


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is for machines without a GPU")
def test_a_cpu_needs_the_interpreter(monkeypatch):
    q = torch.zeros(1, 3, 2, 16)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1" in kernels.unsupported(OpCall("linear_attention", q, q, q))
