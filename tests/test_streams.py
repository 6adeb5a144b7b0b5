"""Numbers over long streams: float32 against float64, with the bounds of docs/streaming.md. Tolerances are four times
the worst error measured.
"""

import gc
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_raises, generator, relative_error
from pairwise import slow_beyond

import halflife
from halflife import ops
from halflife.models.states import size
from halflife.ops.chunked.layout import running_angle
from halflife.ops.koopman import convert_state
from halflife.ops.slow_decay import decay_and_add, split_decay
from halflife.packing import Packing
from halflife.position import half_lrpe, lrpe, rope

DECAYS = (0.0, -1e-8, -1e-7, -1e-6, -1e-5, -1e-4, -1e-3, -1e-2)  # one per head
K = V = 8
PIECE = 2000
# The worst relative error of outputs and states of the token loop and of the chunked form after 2,000 tokens, and of
# both after 200,000, over all heads. With the decay as a product `e^g S`, the first number was 2.1e-5.
WORST = {
    "linear_attention": (2.3e-6, 3.2e-7, 2.0e-5),
    "delta_rule": (1.9e-7, 5.2e-7, 5.0e-7),
    "reflections": (2.9e-6, 1.5e-5, 5.0e-4),  # β = 2 at every token: nothing is forgotten, and errors add up
    "dplr": (2.6e-7, 7.7e-7, 9.5e-7),
    "gate_rank": (1.9e-6, 3.0e-7, 1.3e-5),
}


def piece_of(case, draw):
    def randn(*shape):
        return torch.randn(1, PIECE, len(DECAYS), *shape, generator=draw)

    g = torch.tensor(DECAYS).expand(1, PIECE, -1)
    x = {"q": randn(K), "k": F.normalize(randn(K), dim=-1), "v": randn(V)}
    if case == "delta_rule":
        x["beta"] = randn().sigmoid()
    elif case == "reflections":
        x["beta"] = torch.full_like(g, 2)
    elif case == "dplr":
        direction = F.normalize(randn(K), dim=-1)
        x |= {"a": -direction, "b": direction * randn(K).sigmoid()}
    elif case == "gate_rank":
        return x | {"g_fast": g, "g_slow": torch.where(randn() > 2, g, 0)}
    return x | {"g": g}


def token_by_token(op, x, state, backend):
    outputs = []
    for t in range(PIECE):
        one = {name: part[:, t : t + 1] for name, part in x.items()}
        o, state = op(**one, initial_state=state, output_final_state=True, backend=backend)
        outputs.append(o)
    return torch.cat(outputs, 1), state


def worst_error(case, form, tokens):
    """The worst relative error of any head, in its state or in the outputs of the last piece."""
    op, draw = getattr(ops, "delta_rule" if case == "reflections" else case), generator("stream", case)
    state = exact = None
    if form == "float64 state, by token":
        state, form = first_state(case), "auto, by token"
    for _ in range(tokens // PIECE):
        x = piece_of(case, draw)
        if form.endswith(", by token"):
            o, state = token_by_token(op, x, state, form.partition(",")[0])
        else:
            o, state = op(**x, initial_state=state, output_final_state=True, backend=form)
        wide = {name: part.double() for name, part in x.items()}
        expected, exact = op(**wide, initial_state=exact, output_final_state=True, backend="chunked")
    pairs = [(o, expected), *zip(*((s if isinstance(s, tuple) else (s,)) for s in (state, exact)), strict=True)]
    heads = [2, *[1] * (len(pairs) - 1)]
    return max(
        relative_error(a.select(axis, h), b.select(axis, h))
        for (a, b), axis in zip(pairs, heads, strict=True) for h in range(len(DECAYS))
    )  # fmt: skip


NATIVE = pytest.mark.skipif("native" not in ops.available_backends("linear_attention"), reason="kernels are not built")
FORMS = [
    "reference", "chunked", pytest.param("native, by token", marks=NATIVE), pytest.param("native", marks=NATIVE)
]  # fmt: skip
each_form = pytest.mark.parametrize("form", FORMS)


@pytest.mark.parametrize("case", slow_beyond(["reflections", "gate_rank"], WORST))
@each_form
def test_slow_decays_do_not_drift(case, form):
    bound = WORST[case][0 if form in ("reference", "native, by token") else 1]
    assert worst_error(case, form, PIECE) <= 4 * bound


@pytest.mark.slow
@pytest.mark.parametrize("case", WORST)
@each_form
def test_200_000_tokens(case, form):
    assert worst_error(case, form, 200_000) <= 4 * WORST[case][2]


@pytest.mark.slow
def test_a_million_tokens():
    assert worst_error("linear_attention", "chunked", 1_000_000) <= 1e-5
    assert worst_error("linear_attention", "reference", 1_000_000) <= 4e-5  # 2.7e-5; it grows as √T
    for case in ("linear_attention", "gate_rank"):
        assert worst_error(case, "float64 state, by token", 1_000_000) <= 1e-6


@pytest.mark.slow
def test_a_float32_state_cannot_be_more_exact():
    """Token by token, the error is at most four times that of a state that is rounded correctly, once per token."""
    draw = generator("stream", "linear_attention")
    decay = torch.tensor(DECAYS).double().exp().view(1, -1, 1, 1)
    rounded = exact = torch.zeros(1, len(DECAYS), K, V, dtype=torch.float64)
    for _ in range(200_000 // PIECE):
        x = piece_of("linear_attention", draw)
        writes = torch.einsum("bthk,bthv->tbhkv", x["k"].double(), x["v"].double())
        for write in writes:
            rounded = (decay * rounded + write).float().double()
            exact = decay * exact + write
    limit = max(relative_error(rounded[:, h], exact[:, h]) for h in range(len(DECAYS)))
    assert worst_error("linear_attention", "reference", 200_000) <= 4 * limit <= 4 * WORST["linear_attention"][2]


def first_state(case, dtype=torch.float64):
    zeros = torch.zeros(1, len(DECAYS), K, V, dtype=dtype)
    return (zeros, zeros) if case == "gate_rank" else zeros


@pytest.mark.parametrize("case", WORST)
def test_a_state_in_float64_stays_so(case):
    """The inputs are float32. The state then has the error of float64, and the output that of one rounding."""
    op, state = getattr(ops, "delta_rule" if case == "reflections" else case), first_state(case)
    x = {name: part[:, :20] for name, part in piece_of(case, generator("stream", case)).items()}
    wide = {name: part.double() for name, part in x.items()}
    expected, exact = op(**wide, initial_state=state, output_final_state=True, backend="reference")
    o, whole = op(**x, initial_state=state, output_final_state=True)
    for t in range(20):
        one, state = op(**{k: v[:, t : t + 1] for k, v in x.items()}, initial_state=state, output_final_state=True)
    assert o.dtype == one.dtype == torch.float32
    for got, last in ((o, o[:, -1:]), (expected, one)):
        assert relative_error(last, expected[:, -1:]) <= 1.2e-7
        assert relative_error(got, expected) <= 1.2e-7
    pairs = (zip(s, exact, strict=True) if isinstance(s, tuple) else [(s, exact)] for s in (whole, state))
    for got, expected_state in (pair for part in pairs for pair in part):
        assert got.dtype == torch.float64
        assert relative_error(got, expected_state) <= 1e-12


def other_arguments(op):
    """Arguments in float64 of an op that does not take the common call, and its first state."""
    draw = generator("wide", op)
    shape, states = (1, 20, 2), 6

    def decays(*sizes):
        return -torch.rand(*shape, *sizes, generator=draw, dtype=torch.float64)

    x = {name: torch.randn(*shape, 4, generator=draw, dtype=torch.float64) / 2 for name in "qkv"}
    if op == "log_linear_attention":
        first = torch.zeros(1, 2, states - 1, 4, 4).double(), torch.zeros(1, dtype=torch.long)
        return x | {"g": decays(), "weights": -decays(states)}, first
    ridge = {"ridge": torch.ones(2, 4).double()}
    return x | ridge | {"g": decays(), "beta": -decays()}, tuple(torch.zeros(1, 2, 4, 4).double() for _ in range(2))


@pytest.mark.parametrize("op", ["log_linear_attention", "ridge_attention"])
def test_other_states_in_float64_stay_so(op):
    x, first = other_arguments(op)
    narrow = {name: part.float() for name, part in x.items()}
    wide = {name: part.double() for name, part in narrow.items()}
    whole_op = {"ridge": narrow["ridge"]} if op == "ridge_attention" else {}  # has no tokens
    options = {"output_final_state": True} | ({"tolerance": 1e-13} if whole_op else {})
    exact, last = getattr(ops, op)(**wide, initial_state=first, backend="reference", **options)
    o, whole = getattr(ops, op)(**narrow, initial_state=first, **options)
    state = first
    for t in range(20):
        token = {name: part[:, t : t + 1] for name, part in narrow.items() if name not in whole_op} | whole_op
        one, state = getattr(ops, op)(**token, initial_state=state, **options)
    assert o.dtype == one.dtype == torch.float32
    assert relative_error(o, exact) <= 1.2e-7
    assert relative_error(one, exact[:, -1:]) <= 1.2e-7
    for got in (whole, state):
        pairs = zip(got, last, strict=True) if isinstance(got, tuple) else [(got, last)]
        for part, expected in pairs:
            if part.is_floating_point():  # and not a position
                assert part.dtype == torch.float64
                assert relative_error(part, expected) <= 1e-12


@pytest.mark.parametrize("name", ["gated_deltanet+gate_rank", "rwkv7+tpe"])
def test_a_session_with_states_in_float64(name, tmp_path):
    config = halflife.preset(name, hidden_size=16, num_layers=1, vocab_size=256, num_heads=2)
    model = halflife.LanguageModel(config).eval()
    plain = halflife.Session(model)
    wide = halflife.Session(model, piece_size=4, state_dtype=torch.float64)
    for session in (plain, wide):
        session.feed("abcdefghij").feed("k")
    assert torch.allclose(wide.next_logits, plain.next_logits, atol=1e-5)

    def held(session, names):
        return sum(x.nbytes for layer in session.state for key, x in layer.items() if key.endswith(names))

    assert held(wide, ("memory", "slow")) == 2 * held(plain, ("memory", "slow")) > 0
    assert held(wide, "") - held(plain, "") == held(plain, ("memory", "slow"))
    again = halflife.Session(model, state_dtype=torch.float64).load(wide.save(tmp_path / "s"))
    assert torch.equal(again.fork().feed("l").next_logits, wide.feed("l").next_logits)
    assert_raises(ValueError, "state_dtype must be None", halflife.Session, model, state_dtype=torch.bfloat16)


@pytest.mark.parametrize("g", [0.0, -1e-9, -0.3, -math.log(2), -0.7, -5.0, -1000.0, -math.inf])
def test_a_decay_is_split_exactly(g):
    g = torch.tensor(g, dtype=torch.float64)
    kept, change = split_decay(g)
    assert kept in (0, 1)
    assert math.isclose(kept + change, g.exp(), rel_tol=1e-15)
    state, update = torch.full((1, 1, 2, 3), 1e30), torch.ones(1, 1, 2, 3)
    if g < -750:
        # An erased state leaves no rest.
        assert torch.equal(decay_and_add(state, g.float().view(1, 1, 1), update), update)


@pytest.mark.parametrize("encode", [rope, lrpe, half_lrpe])
@pytest.mark.parametrize("position", [1_000_000, 16_000_000])
def test_angles_at_a_million_tokens(encode, position):
    x, at = torch.randn(1, 1, 2, 64, generator=generator("angles")), torch.tensor([position])
    assert (encode(x, at).double() - encode(x.double(), at)).abs().max() <= 4 * 2.3e-7


def test_a_model_rotates_as_exactly():
    """The fused rotation of layers reads the same angles."""
    from halflife.layers.parts import rotary

    q, k = torch.randn(2, 1, 1, 2, 64, generator=generator("rotary"))
    at = torch.tensor([1_000_000])
    for got, x in zip(rotary(q, k, at), (q, k), strict=True):
        assert (got.double() - rope(x.double(), at)).abs().max() <= 4 * 2.3e-7


@pytest.mark.parametrize("turns", [0.1234567, 1e-5])
def test_equal_steps_of_an_angle_do_not_drift(turns):
    turns = torch.full((1, 2000, 1, 1), turns)
    rows, token = Packing(1, 2000), Packing(1, 1)
    expected, _ = running_angle(turns.double(), None, rows)
    whole, last = None, None
    for t in range(2000):
        whole, last = running_angle(turns[:, t : t + 1], last, token)
    for got in (running_angle(turns, None, rows)[0][:, -1:], whole):
        distance = got.double() - expected[:, -1:]
        assert (distance - distance.round()).abs().max() <= 1e-7


KOOPMAN = {"causal": (2.8e-3, 3.0e-2), "trace": (3.4e-5, 2.4e-4)}  # after 4,096 and after 200,704 tokens


def koopman_error(tokens, normalization):
    """The error with keys that hardly differ, 1 + 0.01 · noise."""
    draw, state, exact = torch.Generator().manual_seed(0), None, None
    options = {"gamma": 1.2, "mix": 0.5, "output_final_state": True, "backend": "chunked"}
    options["normalization"] = normalization
    for _ in range(tokens // 4096):
        k, q, v = (torch.randn(1, 4096, 1, size, generator=draw) for size in (16, 16, 8))
        k = 1 + 0.01 * k
        y, state = ops.koopman_attention(q, k, v, initial_state=state, **options)
        wide = (x.double() for x in (q, k, v))
        expected, exact = ops.koopman_attention(*wide, initial_state=exact, **options)
    return relative_error(y, expected)


@pytest.mark.parametrize("normalization", KOOPMAN)
def test_keys_that_hardly_differ(normalization):
    assert koopman_error(4096, normalization) <= 4 * KOOPMAN[normalization][0]


@pytest.mark.slow
@pytest.mark.parametrize("normalization", KOOPMAN)
def test_keys_that_hardly_differ_200_000_times(normalization):
    assert koopman_error(200_704, normalization) <= 4 * KOOPMAN[normalization][1]


@pytest.mark.parametrize("normalization", ["trace", "paper"])
def test_m_is_that_of_the_normalization_after_waiting_tokens_enter(normalization):
    """By chunk and then by token, with longer keys later: m² is tr G, or it is frozen."""
    q, k, v = (torch.randn(1, 11, 2, 4, generator=generator("m", name), dtype=torch.float64) for name in "qkv")
    k[:, 6:] *= 5
    options = {"chunk_size": 4, "normalization": normalization, "output_final_state": True}
    _, state = ops.koopman_attention(q[:, :6], k[:, :6], v[:, :6], **options)
    _, state = ops.koopman_attention(q[:, 6:7], k[:, 6:7], v[:, 6:7], initial_state=state, **options)
    state = convert_state(state, 1, normalization)
    for t in range(7, 11):
        x = (part[:, t : t + 1] for part in (q, k, v))
        _, state = ops.koopman_attention(*x, initial_state=state, refresh="token", **options)
    norms = k.square().sum(-1)
    expected = norms.sum(1) if normalization == "trace" else norms[:, :6].amax(1)
    assert torch.allclose(state["norm"], expected, rtol=1e-12)


def resident():
    """Resident bytes of this process."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the resident size is read from /proc")
def test_a_session_of_a_million_tokens_has_constant_memory():
    torch.manual_seed(0)
    config = halflife.preset("mamba2+post", hidden_size=32, num_layers=2, vocab_size=256, num_heads=2)
    session = halflife.Session(halflife.LanguageModel(config).eval())
    text = torch.randint(256, (50_000,))

    session.feed(text).feed(text)
    held, before = size(session.state), resident()
    for _ in range(18):
        session.feed(text)
        assert size(session.state) == held
    assert session.position == 1_000_000
    assert resident() - before <= 8 * 2**20
    assert session.next_logits.isfinite().all()
