"""Our Triton kernels of the delta rule and of GateRank on it equal the float64 token loop: outputs, states and all
gradients. Compiled where there is a GPU, else in Triton's interpreter."""

import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same, generator, leaves, relative_error, slices, with_grads

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

from halflife.ops.backends.triton import delta, systems
from halflife.ops.backends.triton.gates import make_chunks
from halflife.ops.call import OpCall

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# Four times the worst error measured over this file's cases (interpreted), relative to the largest entry of a tensor:
# in float32 that of the same key again and again, in the narrow formats the rounding of the results.
TOLERANCE = {torch.float32: 4 * 1.9e-6, torch.bfloat16: 4 * 7e-3, torch.float16: 4 * 3.3e-4}

SCALE = 0.3
MODES = ("none", "scalar", "gate_rank")
each_mode = pytest.mark.parametrize("mode", MODES)


def inputs(mode, length, *, batch=1, heads=1, key=16, value=16, sequences=None, slow=None, fast=None):
    """Arguments of a kernel in float64 as a dict; `slow` and `fast` change the moderate log-decays in place."""
    draw = generator("delta", mode, length, batch, key, value)

    def randn(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    shape = (batch, length, heads)
    arguments = {"q": randn(*shape, key), "k": F.normalize(randn(*shape, key), dim=-1), "v": randn(*shape, value)}
    arguments["beta"] = 2 * randn(*shape).sigmoid()  # above 1: negative eigenvalues
    if mode == "gate_rank":
        arguments["g_slow"] = torch.where(randn(*shape) > 1, -randn(*shape).exp() / 4, 0.0)
        if slow is not None:
            slow(arguments["g_slow"])
    if mode != "none":
        arguments["g_fast"] = -randn(*shape).exp() / 8
        if fast is not None:
            fast(arguments["g_fast"])
    arguments["initial_state"] = randn(sequences or batch, heads, 2 * key if mode == "gate_rank" else key, value)
    return arguments


def in_dtype(arguments, dtype):
    """q, k, v and beta in `dtype`, states and log-decays in float32."""
    return {name: x.to(dtype if name in ("q", "k", "v", "beta") else torch.float32) for name, x in arguments.items()}


def token_loop(q, k, v, beta, g_slow=None, g_fast=None, initial_state=None, cu_seqlens=None):
    """The definition in float64, token by token, sequence by sequence."""
    outputs, states = [], []
    for row, tokens in enumerate(slices(cu_seqlens or [0, q.shape[1]])):
        state = initial_state[row : row + 1] if cu_seqlens else initial_state
        fast, slow = (state, torch.zeros_like(state)) if g_slow is None else state.chunk(2, -2)
        for t in range(tokens.start, tokens.stop):
            if g_fast is not None:
                fast = g_fast[:, t].exp()[..., None, None] * fast
            if g_slow is not None:
                reset = (g_slow[:, t] != 0)[..., None, None]
                slow = torch.where(reset, g_slow[:, t].exp()[..., None, None] * (slow + fast), slow)
                fast = torch.where(reset, 0.0, fast)
            error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], slow + fast)
            fast = fast + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
            outputs.append(SCALE * torch.einsum("bhk,bhkv->bhv", q[:, t], slow + fast))
        states.append(fast if g_slow is None else torch.cat((fast, slow), -2))
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v), torch.cat(states)


def expected(arguments, cu_seqlens=None):
    """The token loop's outputs and gradients of these arguments, in float64."""
    arguments = leaves({name: x.double() for name, x in arguments.items()})
    return with_grads(token_loop(**arguments, cu_seqlens=cu_seqlens), arguments)


def run(arguments, cu_seqlens=None, chunk_size=64):
    """The kernels' outputs and gradients of these arguments."""
    arguments = leaves({name: x.to(DEVICE) for name, x in arguments.items()})
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32, device=DEVICE)
    given = {"g_fast": None, "initial_state": None, **arguments}
    op = "gate_rank" if "g_slow" in given else "delta_rule"
    call = OpCall(op, g=given.pop("g_fast"), **given, scale=SCALE, cu_seqlens=bounds, chunk_size=chunk_size)
    outputs = delta.run(call)
    return {name: x.cpu() for name, x in with_grads(outputs, arguments).items()}


def check(arguments, dtype=torch.float32, **options):
    """Compares the kernels with the token loop, and returns what they gave."""
    arguments = in_dtype(arguments, dtype)
    got = run(arguments, **options)
    options.pop("chunk_size", None)
    assert got["state"].dtype == got["dinitial_state"].dtype == torch.float32
    assert got["o"].dtype == got["dq"].dtype == got["dbeta"].dtype == dtype
    assert_close(got, expected(arguments, **options), TOLERANCE[dtype])
    return got


# ------------------------------------------------------------------------------------------------ shapes


@each_mode
@pytest.mark.parametrize("length", [0, 1, 7, 65])
def test_lengths(mode, length):
    check(inputs(mode, length))


def test_many_heads_and_sequences():
    check(inputs("gate_rank", 20, batch=2, heads=3), chunk_size=16)


@pytest.mark.parametrize(
    ("mode", "dtype", "length"),
    [
        ("none", torch.float16, 64),
        ("scalar", torch.bfloat16, 70),
        ("gate_rank", torch.bfloat16, 130),
        ("gate_rank", torch.float16, 64),
    ],
    ids=str,
)
def test_narrow_inputs(mode, dtype, length):
    """In chunks of 64, where float32 has 32."""
    check(inputs(mode, length, key=24, value=32), dtype)


@pytest.mark.parametrize(
    ("mode", "key", "value"), [("none", 64, 17), ("scalar", 24, 80), ("scalar", 80, 24), ("gate_rank", 80, 24)]
)
def test_head_sizes(mode, key, value):
    """Padded in a block, and in more blocks than one."""
    check(inputs(mode, 37, key=key, value=value))


def test_large_heads():
    check(inputs("gate_rank", 33, key=256, value=80))


@pytest.mark.parametrize("chunk_size", [1, 31])
def test_chunk_sizes(chunk_size):
    """Rounded to 16, where 40 tokens have chunks of 32."""
    check(inputs("gate_rank", 40), chunk_size=chunk_size)


# --------------------------------------------------------------------------------------------- sequences


@each_mode
@pytest.mark.parametrize("bounds", [[0, 5, 5, 38, 38], [0, 0, 0]])
def test_packed(mode, bounds):
    """A boundary inside a chunk; empty sequences, first, last and between, keep their states."""
    arguments = inputs(mode, bounds[-1], sequences=len(bounds) - 1)
    got = check(arguments, cu_seqlens=bounds)
    for row, tokens in enumerate(slices(bounds)):
        if tokens.start == tokens.stop:
            assert_same(got["state"][row], arguments["initial_state"][row].float())


@each_mode
def test_no_initial_state_is_zeros(mode):
    arguments = in_dtype(inputs(mode, 20), torch.float32)
    arguments["initial_state"].zero_()
    zeros = run(arguments)
    del arguments["initial_state"], zeros["dinitial_state"]
    assert_same(run(arguments), zeros)


@pytest.mark.parametrize("mode", ["none", "gate_rank"])
def test_nothing_flows_backwards(mode):
    """To the bit: other tokens and gates after t, the same outputs up to t."""
    arguments = in_dtype(inputs(mode, 40), torch.float32)
    changed = {name: x.clone() for name, x in arguments.items()}
    for name, x in changed.items():
        if name != "initial_state":
            x[:, 35:] = -0.5 if name.startswith("g_") else 1 - x[:, 35:]
    assert_same(run(changed)["o"][:, :35], run(arguments)["o"][:, :35])


# ------------------------------------------------------------------------------------------------ decays


def at(*steps):
    """Resets at these steps, and nowhere else."""

    def change(g):
        g.zero_()
        g[:, list(steps)] = -0.3

    return change


def everywhere(value):
    return lambda g: g.fill_(value)


def some(value):
    """Every seventh step forgets all but e^value."""

    def change(g):
        g[:, ::7] = value

    return change


RESETS = {
    "none": everywhere(0.0),
    "every": everywhere(-0.05),
    "first": at(0),
    "last": at(39),
    "edges": at(15, 16, 31, 32),
}
DECAYS = {**{str(g): everywhere(g) for g in (0.0, -20.0)}, **{f"some {g}": some(g) for g in (-1000.0, -torch.inf)}}


@pytest.mark.parametrize("resets", RESETS)
def test_resets(resets):
    check(inputs("gate_rank", 40, slow=RESETS[resets]))


@pytest.mark.parametrize("fast", DECAYS)
def test_scalar_decays(fast):
    check(inputs("scalar", 40, fast=DECAYS[fast]))


@pytest.mark.parametrize(("slow", "fast"), [*((x, None) for x in DECAYS), *((None, x) for x in DECAYS)])
def test_decays_with_resets(slow, fast):
    check(inputs("gate_rank", 40, slow=DECAYS.get(slow), fast=DECAYS.get(fast)))


@pytest.mark.parametrize("floor", [-1000.0, -torch.inf])
@pytest.mark.parametrize("name", ["g_slow", "g_fast"])
def test_a_full_reset_has_no_gradient(name, floor):
    """Exactly: not the rounding that is left where terms of other steps cancel."""
    arguments = in_dtype(inputs("gate_rank", 40, **{name[2:]: some(floor)}), torch.float32)
    gradient, gates = run(arguments)[f"d{name}"], arguments[name]
    assert gradient[gates == floor].count_nonzero() == 0
    assert gradient[gates > -1].any()


def test_without_a_reset_the_slow_log_decay_has_no_gradient():
    arguments = in_dtype(inputs("gate_rank", 40), torch.float32)
    gradient, resets = run(arguments)["dg_slow"], arguments["g_slow"] != 0
    assert gradient[~resets].count_nonzero() == 0
    assert (gradient[resets] != 0).all()


def test_without_resets_it_is_the_delta_rule():
    """With nothing in the slow state, to which nothing comes."""
    arguments = in_dtype(inputs("gate_rank", 40, slow=everywhere(0.0)), torch.float32)
    fast, slow = arguments["initial_state"].chunk(2, -2)
    slow.zero_()
    got = run(arguments)
    want = run({name: x for name, x in arguments.items() if name != "g_slow"} | {"initial_state": fast})
    assert_same(got["state"].chunk(2, -2)[1], slow)
    assert_close(got["o"], want["o"], TOLERANCE[torch.float32])
    assert_close(got["state"].chunk(2, -2)[0], want["state"], TOLERANCE[torch.float32])


# ---------------------------------------------------------------------------------------------- the systems


@pytest.mark.parametrize("mode", ["scalar", "gate_rank"])
def test_strength_of_zero_writes_nothing(mode):
    arguments = inputs(mode, 40)
    arguments["beta"][:, ::3] = 0
    assert check(arguments)["dbeta"][:, ::3].count_nonzero()


@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_the_same_key_again_and_again(strength):
    """The worst that a system can be: every token overlaps fully with every other."""
    arguments = inputs("none", 70)
    arguments["k"] = arguments["k"][:, :1].expand(-1, 70, -1, -1).clone()
    arguments["beta"].fill_(strength)
    check(arguments, chunk_size=64)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_inverse(size):
    """In float32, whatever the inputs' dtype: (I + L)⁻¹ of a chunk without decay, L_ij = β_i k_i · k_j for j < i."""
    arguments = in_dtype(inputs("none", size), torch.bfloat16)
    k, v, beta = (arguments[name].to(DEVICE) for name in ("k", "v", "beta"))
    got = systems.solve(k, v, beta, (None, None), make_chunks(k, 64, None), keep=True).inverse[0, :, 0].cpu()
    k, beta = k[0, :, 0].double().cpu(), beta[0].double().cpu()
    want = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + (beta * (k @ k.T)).tril(-1))
    assert relative_error(got, want) <= 4 * 2.6e-7  # measured: 2.6e-7 at 64
    assert got.triu(1).count_nonzero() == 0
