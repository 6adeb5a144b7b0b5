"""The Triton kernels equal the float64 token loop: outputs, states and all gradients, for both updates and GateRank.

They are compiled where there is a GPU, and run in Triton's interpreter elsewhere. The interpreter is slow, so a table
with every value once is fast, and the rest of each cross is slow.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    assert_close,
    assert_raises,
    assert_same,
    call_of,
    check_custom_ops,
    everywhere,
    generator,
    leaves,
    relative_error,
    slices,
    slow_after_resets,
    with_grads,
)
from pairwise import crossed, slow_beyond

from halflife.ops.backends import triton as kernels

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from halflife.ops.backends.triton import gates, launch, segments
from halflife.ops.backends.triton import run as run_kernels
from halflife.ops.backends.triton.delta import host as delta

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OP = {"linear": "linear_attention", "delta": "delta_rule"}
MODES = ("none", "scalar", "gate_rank")
SCALE = 0.3

# The worst errors measured over this file's cases (interpreted), relative to the largest entry of a tensor. Four times
# that is allowed. bfloat16 and float16 also round the weighted operands of products. The worst case of the delta rule
# in float32 is the repetition of one key.
WORST = {
    "linear": {torch.float32: 9.0e-7, torch.bfloat16: 6.5e-3, torch.float16: 5.2e-4},
    "delta": {torch.float32: 1.9e-6, torch.bfloat16: 3.8e-3, torch.float16: 3.3e-4},
}


def inputs(
    update, mode, length, *, batch=1, heads=1, key=16, value=16, sequences=None, slow=None, fast=None, gain=False
):
    """Return arguments of a kernel in float64; `slow` and `fast` change the moderate log-decays in place."""
    draw = generator(update, mode, length, batch, heads, key, value)

    def randn(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    shape = (batch, length, heads)
    arguments = {name: randn(*shape, size) for name, size in (("q", key), ("k", key), ("v", value))}
    if update == "delta":
        arguments["k"] = F.normalize(arguments["k"], dim=-1)
        arguments["beta"] = 2 * randn(*shape).sigmoid()  # values above 1 give negative eigenvalues
    rows = 2 * key if mode == "gate_rank" else key
    arguments["initial_state"] = randn(sequences or batch, heads, rows, value)
    if mode != "none":
        arguments["g"] = chosen(fast, -randn(*shape).exp() / 8)
    if mode == "gate_rank":
        arguments["g_slow"] = chosen(slow, torch.where(randn(*shape) > 1, -randn(*shape).exp() / 4, 0.0))
    if gain:
        arguments["gain"] = randn(*shape)
        if update == "linear":
            arguments["skip"] = randn(heads)
    return arguments


def chosen(change, moderate):
    """Return `moderate` log-decays `[B, T, H]` after `change` has changed them in place."""
    if change is not None:
        change(moderate)
    return moderate


def token_loop(q, k, v, initial_state=None, beta=None, g=None, g_slow=None, gain=None, skip=None, cu_seqlens=None):
    """Compute the definition in float64, token by token, for each sequence."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    outputs, states = [], []
    for row, tokens in enumerate(slices(cu_seqlens or [0, q.shape[1]])):
        state = initial_state[row : row + 1] if cu_seqlens else initial_state
        fast, slow = (state, torch.zeros_like(state)) if g_slow is None else state.chunk(2, -2)
        for t in range(tokens.start, tokens.stop):
            if g is not None:
                fast = g[:, t].exp()[..., None, None] * fast
            if g_slow is not None:
                reset = (g_slow[:, t] != 0)[..., None, None]
                slow = torch.where(reset, g_slow[:, t].exp()[..., None, None] * (slow + fast), slow)
                fast = torch.where(reset, 0.0, fast)
            written = v[:, t] if gain is None else gain[:, t, :, None] * v[:, t]
            if beta is not None:
                written = beta[:, t, :, None] * (written - torch.einsum("bhk,bhkv->bhv", k[:, t], slow + fast))
            fast = fast + torch.einsum("bhk,bhv->bhkv", k[:, t], written)
            read = SCALE * torch.einsum("bhk,bhkv->bhv", q[:, t], slow + fast)
            outputs.append(read if skip is None else read + skip[:, None] * v[:, t])
        states.append(fast if g_slow is None else torch.cat((fast, slow), -2))
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v), torch.cat(states)


def in_dtype(arguments, dtype):
    """Convert q, k, v and beta to `dtype`, states and log-decays to float32."""
    return {name: x.to(dtype if name in ("q", "k", "v", "beta") else torch.float32) for name, x in arguments.items()}


def single(update, mode, length, **options):
    """Convert the arguments to float32."""
    return in_dtype(inputs(update, mode, length, **options), torch.float32)


def run(update, arguments, cu_seqlens=None, chunk_size=64):
    """Return the kernels' outputs and gradients for these arguments."""
    arguments = leaves({name: x.to(DEVICE) for name, x in arguments.items()})
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32, device=DEVICE)
    op = "gate_rank" if "g_slow" in arguments else OP[update]
    given = dict(arguments)
    if op == "gate_rank":
        given["g_fast"] = given.pop("g")
        if "initial_state" in given:
            given["initial_state"] = given["initial_state"].chunk(2, -2)
    outputs = run_kernels(call_of(op, given, scale=SCALE, cu_seqlens=bounds, chunk_size=chunk_size))
    return {name: x.cpu() for name, x in with_grads(outputs, arguments).items()}


def expected(arguments, cu_seqlens=None):
    """Return the token loop's outputs and gradients for these arguments, in float64."""
    arguments = leaves({name: x.double() for name, x in arguments.items()})
    return with_grads(token_loop(**arguments, cu_seqlens=cu_seqlens), arguments)


def check(update, arguments, dtype=torch.float32, cu_seqlens=None, chunk_size=64):
    """Compare the kernels with the token loop, and return the kernels' results."""
    arguments = in_dtype(arguments, dtype)
    got = run(update, arguments, cu_seqlens, chunk_size)
    assert got["state"].dtype == got["dinitial_state"].dtype == torch.float32
    assert {got[name].dtype for name in ("o", "dq", "dbeta") if name in got} == {dtype}
    assert_close(got, expected(arguments, cu_seqlens), 4 * WORST[update][dtype])
    return got


def close(update, got, want):
    assert_close(got, want, 4 * WORST[update][torch.float32])


each_update = pytest.mark.parametrize("update", OP)


@crossed(strength=1, update=OP, mode=MODES, length=[0, 1, 7, 32, 65])
def test_lengths(update, mode, length):
    check(update, inputs(update, mode, length))


@crossed(strength=1, update=OP, mode=MODES, form=[(torch.bfloat16, 70), (torch.float16, 64), (torch.float16, 1)])
def test_narrow_inputs(update, mode, form):
    """Chunks have 64 tokens here, and 32 in float32."""
    dtype, length = form
    check(update, inputs(update, mode, length, key=24, value=32), dtype)


@each_update
def test_narrow_log_decays(update):
    arguments = {name: x.to(torch.bfloat16) for name, x in inputs(update, "gate_rank", 20).items()}
    arguments["initial_state"] = arguments["initial_state"].float()
    got = run(update, arguments)
    assert arguments["g_slow"].dtype == got["dg_slow"].dtype == torch.bfloat16
    assert_close(got, expected(arguments), 4 * WORST[update][torch.bfloat16])


@crossed(strength=1, update=OP, form=[("none", 64, 17), ("scalar", 24, 80), ("scalar", 80, 24), ("gate_rank", 80, 5)])
def test_head_sizes(update, form):
    """Head sizes are padded within a block, or fill more than one block."""
    mode, key, value = form
    check(update, inputs(update, mode, 37, key=key, value=value))


@pytest.mark.slow
@pytest.mark.parametrize("update", OP)
def test_large_heads(update):
    check(update, inputs(update, "gate_rank", 20, key=256, value=80))


@crossed(strength=1, update=OP, chunk_size=[1, 31])
def test_chunk_sizes(update, chunk_size):
    """A chunk size is rounded up to a size of the kernels."""
    check(update, inputs(update, "gate_rank", 40), chunk_size=chunk_size)


@pytest.mark.parametrize("update", ["delta", pytest.param("linear", marks=pytest.mark.slow)])
def test_many_heads_and_sequences(update):
    check(update, inputs(update, "gate_rank", 18, batch=2, heads=2), chunk_size=16)


@crossed(strength=1, update=OP, mode=["scalar", "gate_rank"], shared=[(1, 1), (1, 2)])
def test_groups(update, mode, shared):
    """q and k with fewer heads than v: the results of repeated heads, and gradients that are sums over them."""
    arguments = single(update, mode, 17, heads=2)
    arguments |= {name: arguments[name][:, :, :count] for name, count in zip("qk", shared, strict=True)}
    close(update, run(update, arguments, chunk_size=16), expected(arguments))


@pytest.mark.parametrize("mode", ["scalar", pytest.param("gate_rank", marks=pytest.mark.slow)])
def test_the_heads_of_mamba2(mode):
    """Several blocks of keys and one of values, with tiles of their own, and gradients of heads in 16 bits."""
    given = in_dtype(inputs("linear", mode, 70, heads=2, key=128, value=64, gain=True), torch.bfloat16)
    given |= {name: given[name][:, :, :1] for name in "qk"}
    assert_close(run("linear", given), expected(given), 4 * WORST["linear"][torch.bfloat16])


@crossed(strength=1, update=OP, mode=MODES, bounds=[(0, 5, 5, 38, 38), (0, 0, 0)])
def test_packed(update, mode, bounds):
    """One boundary is inside a chunk. Empty sequences at the start, between and at the end keep their states."""
    arguments = inputs(update, mode, bounds[-1], sequences=len(bounds) - 1)
    got = check(update, arguments, cu_seqlens=bounds)
    for row, tokens in enumerate(slices(bounds)):
        if tokens.start == tokens.stop:
            assert_same(got["state"][row], arguments["initial_state"][row].float())


@crossed(strength=1, update=OP, mode=MODES)
def test_no_initial_state_is_zeros(update, mode):
    arguments = single(update, mode, 20)
    arguments["initial_state"].zero_()
    zeros = run(update, arguments, chunk_size=16)
    del arguments["initial_state"], zeros["dinitial_state"]
    assert_same(run(update, arguments, chunk_size=16), zeros)


@crossed(strength=1, update=OP, mode=["none", "gate_rank"])
def test_cut_equals_uncut(update, mode):
    """The second piece of a sequence continues from the state of the first."""
    arguments = single(update, mode, 40)
    whole = run(update, arguments)
    state, outputs = arguments["initial_state"], []
    for tokens in slices([0, 19, 20, 40]):
        part = {name: x[:, tokens] for name, x in arguments.items() if name != "initial_state"}
        got = run(update, {**part, "initial_state": state})
        state = got["state"]
        outputs.append(got["o"])
    close(update, {"o": torch.cat(outputs, 1), "state": state}, {name: whole[name] for name in ("o", "state")})


@crossed(strength=1, update=OP, mode=["none", "gate_rank"])
def test_nothing_flows_backwards(update, mode):
    """Other tokens and gates after t change no bit of the outputs up to t."""
    arguments = single(update, mode, 40)
    changed = {name: x.clone() for name, x in arguments.items()}
    for name, x in changed.items():
        if name != "initial_state":
            x[:, 35:] = {"g": -1000, "g_slow": -0.5}.get(name, 1 - x[:, 35:])
    assert_same(run(update, changed)["o"][:, :35], run(update, arguments)["o"][:, :35])


@pytest.fixture
def short_segments(monkeypatch):
    """Segments of one chunk, which are joined by a scan."""
    monkeypatch.setattr(segments, "LEAST_CHUNKS", 1)


@crossed(strength=1, update=OP, mode=MODES, bounds=[None, (0, 5, 5, 38, 38)])
def test_segments(short_segments, update, mode, bounds):
    """Of a batch and of packed sequences."""
    arguments = inputs(update, mode, 38, sequences=4 if bounds else 1)
    check(update, arguments, cu_seqlens=bounds, chunk_size=16)


@pytest.mark.slow
@crossed(update=OP, mode=MODES, dtype=[torch.bfloat16, torch.float16])
def test_segments_of_narrow_inputs(short_segments, update, mode, dtype):
    check(update, inputs(update, mode, 70, batch=2, heads=2), dtype, chunk_size=16)


def test_segment_table():
    """Packed sequences may have more segments than needed, which contain no tokens."""
    found = segments.make_segments(1, 700, torch.tensor([0, 5, 5, 600, 700]), 64, 100)
    assert (found.length, found.count, found.whole) == (512, 5, False)
    assert [row for row in found.table.tolist() if row[1]] == [[0, 5], [5, 512], [517, 83], [600, 100]]
    assert found.sequences.tolist() == [[0, 1], [1, 0], [1, 2], [3, 1]]
    assert segments.make_segments(16, 2048, None, 64, 16).whole
    one = segments.make_segments(1, 32768, None, 64, 16)
    assert (one.per_sequence, one.length) == (16, 32 * 64)


def put_cards(monkeypatch, *cards):
    """Let GPUs be of these kinds; return a list with the number of the current one."""
    current = [0]

    def exchange(device):
        before, current[0] = current[0], device if device >= 0 else current[0]
        return before

    for name in ("_exchange_device", "_maybe_exchange_device"):
        monkeypatch.setattr(torch.cuda, name, exchange)
    for module in (segments, gates):
        monkeypatch.setattr(module, "interpreted", lambda: False)
    monkeypatch.setattr(launch, "_target", launch._target.__wrapped__)
    driver = SimpleNamespace(get_current_target=lambda: cards[current[0]])
    monkeypatch.setattr(segments.triton.runtime, "driver", SimpleNamespace(active=driver))
    return current


@pytest.mark.parametrize(
    ("arch", "kind"), [(80, "ampere"), (89, "ampere"), (90, "hopper"), (100, "hopper"), (120, "ampere")]
)
def test_a_card_is_known_by_its_tensor_cores(arch, kind, monkeypatch):
    """Those of sm_120 are not Hopper's, and it has less than half of the shared memory."""
    put_cards(monkeypatch, GPUTarget("cuda", arch, 32))
    assert segments.architecture(torch.empty(0)) == kind


def test_tiles_are_those_of_the_card_that_has_the_tensors(monkeypatch):
    """The current one may be of another kind, with less shared memory or other tensor cores."""
    current = put_cards(monkeypatch, GPUTarget("hip", "gfx90a", 64), GPUTarget("cuda", 90, 32))
    with FakeTensorMode():
        first, second = (torch.empty(0, device=f"cuda:{n}", dtype=torch.bfloat16) for n in range(2))
    assert [segments.architecture(x) for x in (second, first)] == ["hopper", "amd"]
    assert gates.precision_of(second) == "tf32" != gates.precision_of(first)
    assert current == [0]


@pytest.mark.parametrize("card", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", 75, 80, 90, 100, 120])
def test_the_precision_of_products_is_one_that_the_card_has(card, monkeypatch):
    """Triton refuses TF32 for all of AMD's cards but the MI300."""
    target = GPUTarget("cuda", card, 32) if isinstance(card, int) else GPUTarget("hip", card, 64)
    put_cards(monkeypatch, target)
    found = gates.precision_of(torch.empty(0, dtype=torch.bfloat16))
    options = make_backend(target).parse_options({"enable_fp_fusion": True})
    assert found in options.allowed_dot_input_precisions
    assert (found == "tf32") == (isinstance(card, int) or card == "gfx942")
    assert gates.precision_of(torch.empty(0)) == "ieee"


@pytest.mark.parametrize(("kind", "states", "stages"), [("ampere", 2, 1), ("ampere", 1, 1), ("hopper", 2, 2)])
def test_the_largest_states_fit_99_kb_of_shared_memory(kind, states, stages, monkeypatch):
    monkeypatch.setattr(delta, "architecture", lambda x: kind)
    q = torch.empty(0, dtype=torch.bfloat16)
    assert delta.settings_of("gradients", 256, 256, q, states, 32).stages == stages
    assert {delta.settings_of(walk, 256, 256, q.float(), states, 32).chunk for walk in ("out", "gradients")} == {16}


@crossed(strength=1, mode=MODES, bounds=[None, (0, 5, 5, 38)], dtype=[torch.float32, torch.bfloat16], shared=[1, 2])
def test_gain(short_segments, mode, bounds, dtype, shared):
    """Factors of values and a skip, with heads of more than one block, and segments of one chunk."""
    given = inputs("linear", mode, 38, heads=2, key=24, value=20, sequences=3 if bounds else 1, gain=True)
    given |= {name: given[name][:, :, :shared] for name in "qk"}
    got = check("linear", given, dtype, cu_seqlens=bounds, chunk_size=16)
    assert got["dgain"].dtype == got["dskip"].dtype == torch.float32


@each_update
def test_gain_of_whole_sequences(update):
    """The kernels of the delta rule read values that are multiplied before."""
    check(update, inputs(update, "gate_rank", 20, batch=2, gain=True))


def test_channels_of_one_tensor():
    """Queries, keys and values that are slices of one tensor are not copied first."""
    arguments = single("linear", "scalar", 20, heads=2, batch=2)
    mixed = torch.cat([arguments[name] for name in "qkv"], -1)
    sliced = arguments | dict(zip("qkv", mixed.split(16, -1), strict=True))
    assert_same(run("linear", sliced), run("linear", arguments))


@each_update
def test_heads_before_tokens(update):
    """Of single tokens torch takes such tensors, gradients among them, for contiguous ones."""
    given = single(update, "scalar", 1, batch=3, heads=2)
    swapped = {name: x.squeeze(1).unsqueeze(2).transpose(1, 2) for name, x in given.items() if name in "qkv"}
    assert {(x.is_contiguous(), *x.stride()) for x in swapped.values()} == {(True, 32, 16, 16, 1)}
    check(update, {name: x.double() for name, x in (given | swapped).items()})


def at(*steps):
    """Return a change that sets resets at these steps only."""

    def change(g):
        g.zero_()
        g[:, list(steps)] = -0.3

    return change


def strong(value):
    """Return a change in which every seventh step forgets all but e^value."""

    def change(g):
        g[:, ::7] = value

    return change


RESETS = {
    "none": everywhere(0.0),
    "every": everywhere(-0.05),
    "first": at(0),
    "last": at(39),
    "edges": at(15, 16, 31, 32),
    "tiny": everywhere(-1e-30),
}
DECAYS = {
    **{str(g): everywhere(g) for g in (0.0, -1e-6, -20.0, -torch.inf)},
    **{f"some {g}": strong(g) for g in (-1000.0, -torch.inf)},
    "slow after resets": slow_after_resets,
}
# The float32 solves of the delta rule are less exact over a run of full resets; it has its own cases.
DELTA_DECAYS = ("0.0", "-20.0", "some -1000.0", "some -inf")
CASES = [("linear", decay) for decay in DECAYS] + [("delta", decay) for decay in DELTA_DECAYS]


@crossed(strength=1, update=OP, resets=RESETS)
def test_resets(update, resets):
    check(update, inputs(update, "gate_rank", 40, slow=RESETS[resets]))


@crossed(strength=1, case=CASES, where=[("scalar", "fast"), ("gate_rank", "fast"), ("gate_rank", "slow")])
def test_decays(case, where):
    (update, decay), (mode, state) = case, where
    check(update, inputs(update, mode, 40, **{state: DECAYS[decay]}))


@pytest.mark.parametrize("decay", slow_beyond(["some -1000.0", "some -inf"], DECAYS))
def test_decays_of_heads_that_share_keys(decay):
    given = inputs("linear", "scalar", 40, heads=4, fast=DECAYS[decay], gain=True)
    given |= {name: given[name][:, :, :1] for name in "qk"}
    gradient = check("linear", given)["dg"]
    assert gradient[given["g"] <= -1000].count_nonzero() == 0  # exactly, as terms that cancel would not be


def test_decays_of_both_states():
    slow, fast = DECAYS["some -1000.0"], DECAYS["some -inf"]
    check("linear", inputs("linear", "gate_rank", 40, slow=slow, fast=fast))


@crossed(strength=1, update=OP, name=["g_slow", "g"], floor=[-1000.0, -torch.inf])
def test_a_full_reset_has_no_gradient(update, name, floor):
    """It is exactly 0, without the rounding error of terms that cancel."""
    state = "slow" if name == "g_slow" else "fast"
    arguments = single(update, "gate_rank", 40, **{state: strong(floor)})
    gradient, gates = run(update, arguments)[f"d{name}"], arguments[name]
    assert gradient[gates == floor].count_nonzero() == 0
    assert gradient[gates > -1].any()


@each_update
def test_without_a_reset_the_slow_log_decay_has_no_gradient(update):
    arguments = single(update, "gate_rank", 40)
    gradient, resets = run(update, arguments)["dg_slow"], arguments["g_slow"] != 0
    assert gradient[~resets].count_nonzero() == 0
    assert (gradient[resets] != 0).all()


@each_update
def test_without_resets_it_is_its_base(update):
    """The slow state is empty and stays empty."""
    arguments = single(update, "gate_rank", 40, slow=everywhere(0.0))
    fast, slow = arguments["initial_state"].chunk(2, -2)
    slow.zero_()
    got = run(update, arguments)
    want = run(update, {name: x for name, x in arguments.items() if name != "g_slow"} | {"initial_state": fast})
    assert_same(got["state"].chunk(2, -2)[1], slow)
    close(update, got["o"], want["o"])
    close(update, got["state"].chunk(2, -2)[0], want["state"])


@each_update
def test_zero_vectors_stay_finite(update):
    arguments = {name: torch.zeros_like(x) for name, x in inputs(update, "gate_rank", 20).items()}
    for x in run(update, in_dtype(arguments, torch.float32)).values():
        assert x.isfinite().all()


@pytest.mark.parametrize("mode", ["scalar", pytest.param("gate_rank", marks=pytest.mark.slow)])
def test_strength_of_zero_writes_nothing(mode):
    arguments = inputs("delta", mode, 40)
    arguments["beta"][:, ::3] = 0
    assert check("delta", arguments)["dbeta"][:, ::3].count_nonzero()


@pytest.mark.parametrize("strength", [1.0, 2.0])
def test_the_same_key_again_and_again(strength):
    """This is the worst system: every token overlaps fully with every other."""
    arguments = inputs("delta", "none", 70)
    arguments["k"] = arguments["k"][:, :1].expand(-1, 70, -1, -1).clone()
    arguments["beta"].fill_(strength)
    check("delta", arguments)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1.8e-7), (torch.bfloat16, 1.5e-5)])
@pytest.mark.parametrize("size", [16, 32])
def test_inverse(size, dtype, error):
    """(I + L)⁻¹ of a chunk without decay, with L_ij = β_i k_i · k_j for j < i; bfloat16 pairs round it."""
    arguments = in_dtype(inputs("delta", "none", size), dtype)
    q, k, v, beta = (arguments[name].to(DEVICE) for name in ("q", "k", "v", "beta"))
    pieces = delta.prepare(q, k, v, beta, None, None, None, 1.0, 64, "out").inverse.flatten().cpu().double()
    pieces = pieces.unflatten(0, (-1, 1 if dtype == torch.float32 else 2, 16)).sum(1)
    rows = (
        [pieces[:16]] if size == 16 else [F.pad(pieces[:16], (0, 16)), pieces[16:48].unflatten(0, (16, 2)).flatten(1)]
    )
    got = torch.cat(rows)
    k, beta = k[0, :, 0].double().cpu(), beta[0].double().cpu()
    want = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + (beta * (k @ k.T)).tril(-1))
    assert relative_error(got, want) <= 4 * error
    assert got.triu(1).count_nonzero() == 0


@pytest.mark.slow
@pytest.mark.parametrize("update", OP)
@pytest.mark.parametrize(("mode", "bounds"), [("none", None), ("gate_rank", [0, 2, 5])])
def test_ops_are_registered_right(update, mode, bounds):
    arguments = single(update, mode, 5, sequences=2 if bounds else None, gain=bool(bounds))
    found = check_custom_ops(lambda: run(update, arguments, bounds))
    assert found == {f"triton_{update}", f"triton_{update}_backward"}


def test_second_derivatives_say_what_has_them():
    arguments = leaves(single("linear", "scalar", 20))
    q, k, v, g = (arguments[x].to(DEVICE) for x in ("q", "k", "v", "g"))
    o, _ = run_kernels(call_of("linear_attention", {"q": q, "k": k, "v": v, "g": g}, scale=1.0))
    assert_raises(RuntimeError, "reference", torch.autograd.grad, o.sum(), arguments["q"], create_graph=True)


def why_not(*tensors):
    """The reason why the kernels do not take these q, k, v and g."""
    call = call_of("linear_attention", dict(zip("qkvg", tensors, strict=False)))
    return kernels.why_not("linear_attention", call.device, call)


def test_what_the_kernels_do_not_take():
    q = torch.zeros(1, 3, 2, 16, device=DEVICE)
    gate = torch.zeros(1, 3, 2, device=DEVICE)
    assert why_not(q, q, q, gate) is None
    for message, arguments in {
        "K = 257": (q.new_zeros(1, 3, 2, 257), q.new_zeros(1, 3, 2, 257), q),
        "V = 257": (q, q, q.new_zeros(1, 3, 2, 257)),
        "float64": (q.double(), q.double(), q.double()),
        "bfloat16": (q, q, q.bfloat16()),
        "gates in": (q, q, q, gate.double()),
        "at most 65000 sequences": [q[:, :, :1, :1].expand(70_000, -1, -1, -1)] * 3,
    }.items():
        assert message in why_not(*arguments)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is for machines without a GPU")
def test_a_cpu_needs_the_interpreter(monkeypatch):
    q = torch.zeros(1, 3, 2, 16)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET=1" in why_not(q, q, q)


@pytest.mark.parametrize("update", ["linear", "delta"])
def test_float16_beside_float32_is_float32(update):
    """As in a float16 model, whose values are float32 so that outputs do not overflow."""
    arguments = {name: x.float() for name, x in inputs(update, "scalar", 20).items()}
    arguments |= {name: arguments[name].half().float() for name in "qk"}
    narrow = {name: x.half() if name in "qk" else x for name, x in arguments.items()}
    got, expected = (
        dict(zip("os", run_kernels(call_of(OP[update], given)), strict=True)) for given in (narrow, arguments)
    )
    assert got["o"].dtype == torch.float32
    assert_same(got, expected)
