"""Every op of the registry, with inputs drawn from its specification and states that it did not make itself."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, generator, leaves, relative_error
from pairwise import slow_beyond

from halflife import ops
from halflife.ops.backends.dispatch import CannotRun, available_backends, registered, run_pass
from halflife.ops.koopman.state import blank
from halflife.ops.spec import OPS

BOUNDS = [0, 37, 37, 100, 130]  # packed sequences, an empty one among them; no length is a multiple of a chunk
SIZES = {"B": 1, "T": 130, "N": 4, "G": 1, "H": 2, "K": 16, "V": 20, "D": 40, "W": 4, "R": 3, "P": 8, "L": 5}
CHUNK = 16
KOOPMAN = ({"refresh": "chunk"}, {"refresh": "token"})
# The worst errors measured, relative to the largest entry of a tensor. Koopman attention loses digits in proportion to
# the condition number of its sums.
WORST, WORST_OF_KOOPMAN = {torch.float64: 1.3e-15, torch.float32: 4.5e-7}, 1e-5


def variants(op):
    """How many ways there are to call an op: with each shape of its decay, and with and without optional tensors."""
    if op == "koopman_attention":
        return len(KOOPMAN)
    return max(len(shape.choices) + shape.optional for name, shape in OPS[op].tensors.items() if name != "cos")


@cache
def drawn(op, variant):
    """The tensors and the states of an op in float64, by name."""
    draw, spec = generator(op, variant), OPS[op]

    def randn(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    if op == "koopman_attention":
        return drawn_for_koopman(randn)
    sizes = SIZES if spec.state else SIZES | {"D": 2 * SIZES["V"]}
    tensors, states = {}, {}
    for name, shape in spec.tensors.items():
        if variant >= len(shape.choices) and shape.optional:
            continue
        axes = shape.choices[min(variant, len(shape.choices) - 1)]
        x = randn(*([2, sizes["T"]] if shape.leading else []), *(sizes[letter] + offset for letter, offset in axes))
        if name in spec.log_decays:
            x = -x.exp() / 8
            x = torch.where(x < -0.1, x, 0) if name == "g_slow" else x
        elif name == "labels":
            x = torch.arange(x.numel()).view(x.shape) % sizes["V"]
        elif name in ("k", "a", "b"):
            x = F.normalize(x, dim=-1)
        elif name in ("beta", "ridge"):
            x = x.sigmoid()
        tensors[name] = x
    if "b" in tensors and "k" in tensors:
        tensors["b"] = -tensors["a"] * tensors["b"].sigmoid()
    elif "a" in tensors and "k" in tensors:  # without b it is k
        tensors["a"] = -tensors["k"].repeat_interleave(sizes["H"] // sizes["G"], 2)
    for name, shape in spec.state.items():
        size = shape.sizes(sizes)
        states[name] = torch.arange(5, 5 + size[0]) if shape.dtype == "int" else randn(*size)
    if op == "ridge_attention":  # G is symmetric and positive by definition
        states["G"] = states["G"] @ states["G"].mT / sizes["K"]
    return tensors, states


def drawn_for_koopman(randn):
    q, k, v = (randn(1, SIZES["T"], SIZES["H"], size) for size in (8, 8, SIZES["P"]))
    state = blank(k, v, SIZES["N"], CHUNK).to_state()
    count = torch.tensor([3, 0, CHUNK - 1, 5])
    states = {name: randn(*x.shape) for name, x in state.items() if x.is_floating_point()}
    states["gram"] = states["gram"] @ states["gram"].mT / 8 + torch.eye(8)
    states["norm"] = states["norm"].square() + 8
    used = torch.arange(CHUNK - 1) < count.unsqueeze(1)
    for name in ("pending_keys", "pending_values"):
        states[name] = torch.where(used[..., None, None], states[name], 0)
    return {"q": q, "k": k, "v": v, "gamma": randn(2).exp(), "mix": randn(2).sigmoid()}, {**states, "pending": count}


def run(op, variant, backend, dtype, rounded_to=None):
    """`{"o", states, "d…"}` of a call in `dtype`, with the gradients of a fixed random sum of outputs and states.

    Log-decays and states are float32 or wider. `rounded_to` is the dtype that the numbers are rounded to before.
    """
    tensors, states = drawn(op, variant)
    narrow, wide = rounded_to or dtype, torch.promote_types(rounded_to or dtype, torch.float32)

    def cast(name, x):
        if not x.is_floating_point():
            return x
        kept = name in states or name in OPS[op].log_decays
        return x.to(wide if kept else narrow).to(torch.promote_types(dtype, torch.float32) if kept else dtype)

    given = {name: cast(name, x) for name, x in {**tensors, **states}.items()}
    learned = leaves({n: x for n, x in given.items() if x.is_floating_point() and n not in OPS[op].constants})
    given |= learned
    tensors, states = ({name: given[name] for name in part} for part in (tensors, states))
    o, final = call(op, variant, tensors, states, backend)
    outputs = {"o": o, **{f"final {name}": x for name, x in final.items() if x.is_floating_point()}}
    draw = generator("loss")
    # The weights are drawn in bfloat16, so that every dtype has exactly the same ones.
    loss = sum((x * torch.randn(x.shape, generator=draw).bfloat16().to(x.dtype)).sum() for x in outputs.values())
    grads = torch.autograd.grad(loss, list(learned.values()), allow_unused=True, materialize_grads=True)
    return {**outputs, **{f"d{name}": grad for name, grad in zip(learned, grads, strict=True)}}


def call(op, variant, tensors, states, backend):
    """The outputs and the final states by name."""
    bounds = torch.tensor(BOUNDS)
    if op == "koopman_attention":
        if KOOPMAN[variant]["refresh"] == "token":
            empty = {n: x[:, :0] for n, x in states.items() if n in ("pending_keys", "pending_values")}
            states = {**states, **empty, "pending": torch.zeros_like(states["pending"])}
        return ops.koopman_attention(
            **tensors, **KOOPMAN[variant], initial_state=states, cu_seqlens=bounds, chunk_size=CHUNK, backend=backend,
            output_final_state=True,
        )  # fmt: skip
    settings = OPS[op].settings
    if not OPS[op].state:
        found = run_pass(op, backend, [tensors.get(name) for name in OPS[op].tensors], *settings.values())
        o, *others = found if isinstance(found, tuple) else (found,)
        return o, {f"output {i}": x for i, x in enumerate(others, 1)}
    if op == "ridge_attention":
        settings = {"iterations": 24, "tolerance": 1e-16}
    initial = tuple(states.values()) if len(states) > 1 else next(iter(states.values()))
    o, final = getattr(ops, op)(
        **tensors, **settings, initial_state=initial, output_final_state=True, cu_seqlens=bounds, backend=backend,
        **({} if op == "causal_conv1d" else {"chunk_size": CHUNK}),
    )  # fmt: skip
    return o, dict(zip(states, final if isinstance(final, tuple) else (final,), strict=True))


@cache
def exact(op, variant, dtype):
    """The definition in float64, on numbers rounded to `dtype`."""
    return {name: x.detach() for name, x in run(op, variant, "reference", torch.float64, dtype).items()}


ON_STATES = [name for name in OPS.names() if OPS[name].state or name == "koopman_attention"]
CHECKED = [
    pytest.param(op, backend, marks=[pytest.mark.slow] if backend == "triton" else [])
    for op in ON_STATES for backend in registered(op)
    if backend in available_backends(op)[:-1] or backend == "triton"
]  # fmt: skip


@pytest.mark.parametrize(("op", "backend"), CHECKED)
def test_states_of_any_kind_have_the_gradients_of_the_definition(op, backend):
    """Outputs, final states and all gradients, those of the initial states too, where these are random numbers."""
    dtype, ran = torch.float32 if backend in ("native", "triton") else torch.float64, 0
    for variant in range(variants(op)):
        try:
            got = run(op, variant, backend, dtype)
        except CannotRun:
            continue
        ran += 1
        worst = WORST_OF_KOOPMAN if (op, dtype) == ("koopman_attention", torch.float32) else WORST[dtype]
        assert_close(got, exact(op, variant, dtype), 4 * worst)
    assert ran


NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NATIVE = [name for name in OPS.names() if "native" in available_backends(name)]
LEAST = 2e-6  # what float32 itself loses; Koopman attention's is in proportion to the condition number of its sums


@pytest.mark.parametrize("dtype", slow_beyond(["bfloat16"], NARROW))
@pytest.mark.parametrize("op", NATIVE)
def test_native_kernels_round_no_more_than_chunks(op, dtype):
    """In 16 bits the kernels read and write rounded numbers. All sums, states and products between are float32."""
    narrow = NARROW[dtype]
    for variant in range(variants(op)):
        expected = exact(op, variant, narrow)
        got, chunked = ({n: relative_error(x, expected[n]) for n, x in run(op, variant, backend, narrow).items()}
                        for backend in ("native", "chunked"))  # fmt: skip
        least = WORST_OF_KOOPMAN if op == "koopman_attention" else LEAST
        often = 2 if "dskip" in got else 1.1  # torch adds D ⊙ v to outputs that a kernel has rounded
        larger = {n: (error, chunked[n]) for n, error in got.items() if error > max(often * chunked[n], least)}
        assert not larger, f"native and chunked errors: {larger}"
