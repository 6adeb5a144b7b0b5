"""GateRank: recurrence, mask and chunks agree, gradients included, for any resets. The paper's mask, entry by entry."""

import math

import pytest
import torch
from helpers import (
    LOG_DECAYS,
    assert_close,
    assert_packs,
    assert_raises,
    assert_same,
    assert_streams,
    cases,
    generator,
    leaves,
    op_inputs,
    unchecked,
)
from pairwise import crossed

from halflife import ops
from halflife.ops.gate_rank import masks

BACKENDS = tuple(ops.available_backends("gate_rank"))
UPDATES = ("linear", "delta")
# The resets of a sequence of 70 tokens. Chunks of 16 have edges at 16, 32, 48, 64.
RESETS = {
    "never": [], "always": range(70), "first": [0], "last": [69], "edges": [15, 16, 31, 32, 63, 64],
    "some": [3, 5, 20, 50, 51, 52, 66],
}  # fmt: skip
# The worst errors measured in this file against the float64 token loop, relative to the largest entry.
WORST = {torch.float64: 8.5e-15, torch.float32: 4.4e-6, torch.bfloat16: 3.8e-3}
WORST_WITH_RESETS = 7.0e-13

each_update = pytest.mark.parametrize("update", UPDATES)
each_backend = pytest.mark.parametrize("backend", BACKENDS)
# The others are compared with the float64 token loop.
FORMS = [
    (b, dtype)
    for b in BACKENDS
    for dtype in WORST
    if (b, dtype) not in (("reference", torch.float64), ("native", torch.float64))
]
COMPUTED = [form for form in FORMS if form[0] != "reference"]
# Native kernels round the factors of every product to bfloat16.
WORST_NATIVE = 1.6e-2


def worst(backend, dtype):
    return WORST_NATIVE if backend == "native" and dtype == torch.bfloat16 else WORST[dtype]


def widest(backend, arguments):
    """float64 arguments in the widest dtype that `backend` takes, and the worst error there."""
    dtype = torch.float32 if backend == "native" else torch.float64
    return rounded(arguments, dtype), 4 * WORST[dtype]


def inputs(update, length, resets, *, slow=None, fast=None, sequences=None, **sizes):
    """Return arguments in float64; `resets` are positions, or the probability of a reset at each token and head."""
    arguments = op_inputs("delta_rule", "scalar", length, decay=fast, sequences=sequences, **sizes)
    arguments["g_fast"] = arguments.pop("g")
    if update == "linear":
        del arguments["beta"]
    draw = generator(update, length, str(resets), slow)
    size = arguments["g_fast"].shape
    where = torch.rand(size, generator=draw) < resets if isinstance(resets, float) else torch.zeros(size).bool()
    if not isinstance(resets, float):
        where[:, list(resets)] = True
    magnitude = torch.rand(size, generator=draw).double() + 0.01 if slow is None else torch.full(size, -slow).double()
    arguments["g_slow"] = -torch.where(where, magnitude, 0.0)
    initial = arguments.pop("initial_state")
    slow_state = torch.randn(initial.shape, generator=draw, dtype=initial.dtype)
    return {**arguments, "fast": initial, "slow": slow_state}


def run(arguments, **options):
    arguments = leaves(arguments)
    given = {name: x for name, x in arguments.items() if name not in ("fast", "slow")}
    states = (arguments["fast"], arguments["slow"])
    o, final = ops.gate_rank(**given, initial_state=states, output_final_state=True, **options)
    return gradients((o, *final), arguments)


def gradients(outputs, arguments):
    draw = generator("loss")
    loss = sum((x * torch.randn(x.shape, generator=draw).bfloat16().to(x.dtype)).sum() for x in outputs)
    grads = torch.autograd.grad(loss, list(arguments.values()), allow_unused=True, materialize_grads=True)
    named = {f"d{name}": grad for name, grad in zip(arguments, grads, strict=True)}
    return {**dict(zip(("o", "final_fast", "final_slow"), outputs, strict=True)), **named}


def rounded(arguments, dtype):
    wide = torch.promote_types(dtype, torch.float32)
    return {name: x.to(dtype if name in ("q", "k", "v", "beta") else wide) for name, x in arguments.items()}


def check(arguments, backend, dtype=torch.float64, **options):
    arguments = rounded(arguments, dtype)
    expected = run({name: x.double() for name, x in arguments.items()}, backend="reference")
    got = run(arguments, backend=backend, **options)
    assert got["o"].dtype == got["dq"].dtype == dtype
    assert_close(got, expected, 4 * worst(backend, dtype))


@crossed(strength=1, update=UPDATES, form=FORMS, resets=RESETS)
def test_resets(update, form, resets):
    backend, dtype = form
    check(inputs(update, 70, RESETS[resets]), backend, dtype, chunk_size=16)


@crossed(strength=1, form=[(update, *form) for update in UPDATES for form in FORMS], length=[65, 0, 1, 7, 63, 64, 200])
def test_lengths(form, length):
    update, backend, dtype = form
    check(inputs(update, length, 0.2, batch=2), backend, dtype)


@crossed(strength=1, update=UPDATES, form=COMPUTED, sizes=[(7, 80), (1, 1), (64, 7), (80, 64)])
def test_head_sizes(update, form, sizes):
    (backend, dtype), (key, value) = form, sizes
    check(inputs(update, 37, 0.1, batch=3, key=key, value=value), backend, dtype, chunk_size=16)


@crossed(strength=1, update=UPDATES, form=[form for form in COMPUTED if form[0] == "native"] or COMPUTED[:1])
def test_large_heads(update, form):
    check(inputs(update, 20, 0.1, key=256, value=256), *form, chunk_size=16)


@crossed(
    strength=1, update=UPDATES, form=COMPUTED, fast=["mixed", *LOG_DECAYS],
    slow=[None, -1e-30, -20.0, -1000.0, -math.inf],
)  # fmt: skip
def test_decays(update, form, fast, slow):
    """The mask's log-decay gradients are compared on the scale of dq, because they can be as small as 1e-9."""
    backend, dtype = form
    arguments = rounded(inputs(update, 70, 0.1, fast=fast, slow=slow), dtype)
    expected = run({name: x.double() for name, x in arguments.items()}, backend="reference")
    got = run(arguments, backend=backend, chunk_size=32)
    if backend == "mask":
        largest = expected["dq"].abs().max()
        for x in (got, expected):
            x |= {name: x[name] + largest for name in ("dg_fast", "dg_slow")}
    assert_close(got, expected, 4 * max(worst(backend, dtype), WORST_WITH_RESETS))


@each_update
@pytest.mark.parametrize("chunk_size", [1, 4, 32, 128])
def test_chunk_size_changes_nothing(update, chunk_size):
    check(inputs(update, 100, 0.1), "chunked", chunk_size=chunk_size)


@each_update
@each_backend
def test_without_resets_it_is_its_base(update, backend):
    """Without resets all results equal those of the base, and the slow state does not change."""
    arguments, tolerance = widest(backend, inputs(update, 70, []))
    got = run(arguments, backend=backend)
    base = ops.linear_attention if update == "linear" else ops.delta_rule
    plain = leaves({name: x for name, x in arguments.items() if name not in ("g_slow", "slow")})
    given = {("g" if name == "g_fast" else name): x for name, x in plain.items() if name != "fast"}
    zeros = run({**arguments, "slow": torch.zeros_like(arguments["slow"])}, backend=backend)
    o, state = base(**given, initial_state=plain["fast"], output_final_state=True, backend="reference")
    assert_close({"o": zeros["o"], "state": zeros["final_fast"]}, {"o": o, "state": state}, tolerance)
    assert_same(got["final_slow"], arguments["slow"])
    assert got["dg_slow"].count_nonzero() == 0


@each_update
@each_backend
def test_a_reset_is_any_value_but_zero(update, backend):
    """A slow log-decay of any size other than zero moves the fast state into the slow state."""
    arguments, _ = widest(backend, inputs(update, 9, [4], slow=-1e-30, fast=-1.0))
    got = run(arguments, backend=backend)
    kept = run(widest(backend, inputs(update, 9, [], fast=-1.0))[0], backend=backend)
    assert not torch.allclose(got["o"][:, 5:], kept["o"][:, 5:])
    assert got["dg_slow"][:, 4].all()
    assert got["dg_slow"].count_nonzero() == 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_papers_mask_entry_by_entry(backend):
    """Figure 2a: tokens with resets at 1, 3 and 5. With orthonormal keys as queries, o is a row of the mask."""
    resets, length = (1, 3, 5), 7
    slow = torch.zeros(length).double()
    slow[list(resets)] = torch.tensor([-0.3, -0.5, -0.7]).double()
    fast = -torch.arange(1, length + 1).double() / 10
    alpha, beta = slow.exp().tolist(), fast.exp().tolist()
    expected = torch.zeros(length, length).double()
    for i in range(length):
        for j in range(i + 1):
            entry, decays_fast = 1.0, True
            for t in range(j + 1, i + 1):  # the decays of token j's trace, step by step
                entry *= beta[t] if decays_fast else 1.0
                if t in resets:
                    entry *= alpha[t]
                    decays_fast = False
            expected[i, j] = entry
    # Entries by hand: token 0 has the factor α3 α5 β1 at the end, because it becomes slow at the reset at 1, and so on.
    by_hand = {
        (1, 0): alpha[1] * beta[1], (2, 0): alpha[1] * beta[1], (3, 0): alpha[1] * alpha[3] * beta[1],
        (6, 0): alpha[1] * alpha[3] * alpha[5] * beta[1], (2, 1): beta[2], (3, 1): alpha[3] * beta[2] * beta[3],
        (4, 1): alpha[3] * beta[2] * beta[3], (5, 2): alpha[3] * alpha[5] * beta[3], (4, 3): beta[4],
        (5, 4): alpha[5] * beta[5], (6, 4): alpha[5] * beta[5], (6, 5): beta[6], (6, 6): 1.0,
    }  # fmt: skip
    for (i, j), entry in by_hand.items():
        assert expected[i, j].item() == pytest.approx(entry, abs=1e-15)
    dtype, tolerance = (torch.float32, 2.4e-7) if backend == "native" else (torch.float64, 4e-16)
    eye = torch.eye(length, dtype=dtype)[None, :, None]
    gates = slow.to(dtype)[None, :, None], fast.to(dtype)[None, :, None]
    o, _ = ops.gate_rank(eye.flip(-1), eye.flip(-1), eye, *gates, backend=backend, scale=1, chunk_size=4)
    # Queries that see every key alike read the whole row.
    ones = torch.ones(1, length, 1, length, dtype=dtype)
    rows, _ = ops.gate_rank(ones, ones / length, eye, *gates, backend=backend, scale=1, chunk_size=4)
    assert_close(rows[0, :, 0], expected, tolerance)
    assert_close(o[0, :, 0], eye[0, :, 0], 1e-16)
    assert_close(torch.mul(*masks(*gates))[0, 0], expected, tolerance)


def run_from(arguments, **options):
    """Return the tokens' arguments, and the op as a function of them and of the pair of states."""
    states = arguments.pop("fast"), arguments.pop("slow")

    def run(x, state, **more):
        return ops.gate_rank(**x, initial_state=state, output_final_state=True, **options, **more)

    return leaves(arguments), run, states


@each_update
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
def test_streams_like_the_full_pass(update, backend):
    arguments, tolerance = widest(backend, inputs(update, 20, 0.2))
    x, run, states = run_from(arguments, chunk_size=8, backend=backend)
    assert_streams(run, x, tolerance, states, cuts=(0, 3, 7, 8, 9, 16, 20))


@each_update
@each_backend
def test_packed_equals_separate(update, backend):
    def draw(batch, length):
        return run_from(widest(backend, inputs(update, length, 0.2))[0])[0]

    arguments, tolerance = widest(backend, inputs(update, 3, 0.2))
    state, alone = assert_packs(run_from(arguments, chunk_size=8, backend=backend)[1], draw, tolerance)
    for row, own in enumerate(alone):
        assert_close(torch.stack(state)[:, row], torch.stack(own)[:, 0], tolerance)


@each_backend
def test_nothing_flows_backwards(backend):
    arguments, _ = widest(backend, inputs("delta", 40, 0.2))
    arguments = {n: x for n, x in arguments.items() if n not in ("fast", "slow")}
    before, _ = ops.gate_rank(**arguments, chunk_size=16, backend=backend)
    later = {
        n: torch.cat([x[:, :23], torch.rand_like(x[:, 23:]) * (-1 if "g_" in n else 1)], 1)
        for n, x in arguments.items()
    }
    after, _ = ops.gate_rank(**later, chunk_size=16, backend=backend)
    assert_same(after[:, :23], before[:, :23])


@each_update
def test_gradcheck(update):
    """A reset has a derivative in its magnitude. Elsewhere the slow gate is held fixed."""
    arguments = inputs(update, 6, [1, 4], heads=1, key=2, value=3)
    states = (arguments.pop("fast"), arguments.pop("slow"))
    reset = arguments["g_slow"] != 0
    names = list(arguments)

    def function(fast, slow, *values):
        given = dict(zip(names, values, strict=True))
        given["g_slow"] = torch.where(reset, given["g_slow"], 0.0)
        o, final = ops.gate_rank(**given, initial_state=(fast, slow), output_final_state=True, chunk_size=2)
        return o, *final

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in (*states, *arguments.values())])


@cases(
    "change, message",
    ({"g_slow": torch.zeros(1, 5, 1)}, "g_slow must be"),
    ({"g_fast": torch.zeros(1, 5, 2, 4)}, "g_fast must be"),
    ({"beta": torch.zeros(1, 4, 2)}, "beta must be"),
    ({"initial_state": torch.zeros(1, 2, 4, 3)}, "pair"),
    ({"initial_state": (torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 3, 4))}, "initial_state must be"),
    ({"backend": "nonsense"}, "unknown backend"),
)
def test_errors_say_what_is_wrong(change, message):
    arguments = inputs("delta", 5, 0.2, key=4, value=3)
    arguments = {n: x.float() for n, x in arguments.items() if n not in ("fast", "slow")}
    assert_raises(ValueError, message, unchecked(ops.gate_rank), **{**arguments, **change})
