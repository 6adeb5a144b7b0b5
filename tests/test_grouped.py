"""Heads that share queries and keys: an op on G groups is the op on H repeated heads, and nothing is copied for it."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from helpers import OPS, WIDEST, assert_close, assert_raises, generator, op_inputs, rounded, run_op, with_grads
from pairwise import crossed
from torch.profiler import profile

from halflife import ops
from halflife.ops.spec import OPS as SPECS

NAMES = [
    name for name in SPECS.names() if SPECS[name].state and any(shape.grouped for shape in SPECS[name].tensors.values())
]
# The worst measured over this file's cases, relative to the largest entry: those of sums in another order.
WORST = {torch.float64: 6.4e-16, torch.float32: 3.4e-7}
POSITION = 15  # of the states of log-linear attention, whose levels all have content there


def forms(op):
    """The ways to leave tensors away and to choose their shapes: name → the number of the shape, or None."""
    shapes = SPECS[op].tensors.items()
    choices = {name: [*range(len(s.choices)), *[None] * s.optional] for name, s in shapes}
    return [dict(zip(choices, form, strict=True)) for form in product(*choices.values())]


FORMS = [
    (op, i, backend, dtype)
    for op in NAMES for i in range(len(forms(op))) for backend in ops.available_backends(op) for dtype in WORST
    if backend not in WIDEST or dtype == torch.float32
]  # fmt: skip
LAYOUTS = [(2, 1), (2, 37), (1, 45, 0, 20, 20, 45)]  # the batch, the length, and the boundaries of packed sequences


def inputs(op, form, groups, layout):
    """Return the tensors and the states of a call in float64, by their specification."""
    draw, (heads, *shared) = generator(op, form, groups, layout), groups
    (batch, length), bounds = layout[:2], layout[2:]
    known = {"B": batch, "T": length, "N": len(bounds) - 1 if bounds else batch, "H": heads, "K": 16, "V": 24, "L": 5}

    def randn(shape, choice=0):
        sizes = [known[letter] + offset for letter, offset in shape.choices[choice]]
        return torch.randn(sizes, generator=draw, dtype=torch.float64)

    tensors, shared = {}, iter(shared)
    for (name, shape), choice in zip(SPECS[op].tensors.items(), forms(op)[form].values(), strict=True):
        if choice is None:
            continue
        if shape.grouped:
            known["G"] = next(shared)
        x = randn(shape, choice)
        if name in SPECS[op].log_decays:
            x = -x.exp() / 4
            x = torch.where(x < -0.4, x, 0) if name == "g_slow" else x
        elif name in ("k", "a", "b"):
            x = F.normalize(x, dim=-1) / (2 if name in "ab" else 1)
        elif name not in "qv":  # strengths, weights and ridges
            x = x.sigmoid() + 0.1
        tensors[name] = x
    states = {name: randn(shape) for name, shape in SPECS[op].state.items() if shape.dtype != "int"}
    if op == "ridge_attention":
        states["G"] = states["G"] @ states["G"].mT
    return tensors, states


def run(op, tensors, states, bounds, backend):
    """Return outputs, states and gradients, those of tensors under the names of these."""
    leaves = {name: x.detach().requires_grad_() for name, x in {**tensors, **states}.items()}
    initial = tuple(leaves[name] for name in states)
    if "position" in SPECS[op].state:
        initial = *initial, torch.full((len(initial[0]),), POSITION)
    o, final = getattr(ops, op)(
        **{name: leaves[name] for name in tensors}, initial_state=initial if len(SPECS[op].state) > 1 else initial[0],
        output_final_state=True, cu_seqlens=torch.tensor(bounds) if bounds else None, chunk_size=16, backend=backend,
    )  # fmt: skip
    finals = torch.cat([x.flatten() for x in final if x.is_floating_point()]) if type(final) is tuple else final
    return with_grads((o, finals), leaves)


def repeated(tensors, heads):
    """Every group once for each of its heads."""
    return {n: x.repeat_interleave(heads // x.shape[2], 2) if n in "qk" else x for n, x in tensors.items()}


@crossed(strength=1, form=FORMS, groups=[(4, 2, 2), (4, 1, 1), (6, 2, 3), (4, 1, 4)], layout=LAYOUTS)
def test_groups_are_repeated_heads(form, groups, layout):
    op, i, backend, dtype = form
    tensors, states = ({n: x.to(dtype) for n, x in part.items()} for part in inputs(op, i, groups, layout))
    got = run(op, tensors, states, layout[2:], backend)
    want = run(op, repeated(tensors, groups[0]), states, layout[2:], backend)
    for name in "qk":
        want[f"d{name}"] = want[f"d{name}"].unflatten(2, (tensors[name].shape[2], -1)).sum(3)
    assert_close(got, want, 4 * WORST[dtype])


@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("shared", [(2, 2), (1, 4), (4, 2)])
def test_single_tokens(op, shared):
    """A token of each sequence, as while decoding, through whatever "auto" takes."""
    for i in range(len(forms(op))):
        tensors, states = ({n: x.float() for n, x in part.items()} for part in inputs(op, i, (4, *shared), (2, 1)))
        with torch.no_grad():
            given = tuple(states.values())
            if "position" in SPECS[op].state:
                given = *given, torch.full((2,), POSITION)
            options = {"initial_state": given if len(given) > 1 else given[0], "output_final_state": False}
            got, _ = getattr(ops, op)(**tensors, **options)
            want, _ = getattr(ops, op)(**repeated(tensors, 4), **options)
        assert_close({"o": got}, {"o": want}, 4 * WORST[torch.float32])


@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("name", "qk")
@pytest.mark.parametrize("groups", [0, 3, 8])
def test_groups_that_do_not_divide(op, name, groups):
    tensors, _ = inputs(op, 0, (4, 2, 2), (2, 5))
    tensors[name] = torch.zeros(2, 5, groups, 16)
    message = rf"{name} must be \[B, T, G, K\] = \[2, 5, G, 16\], where G divides H = 4; got \[2, 5, {groups}, 16\]"
    assert_raises(ValueError, message, getattr(ops, op), **tensors)


@pytest.mark.parametrize("decayed", [False, True])
def test_heads_of_koopman_attention_that_share_keys(decayed):
    """They are one head with the channels of all."""
    draw, gates = generator("koopman", decayed), {"mix": torch.tensor([0.3, 1.0], dtype=torch.float64)}
    q, k, v = (torch.randn(2, 21, n, 6, generator=draw, dtype=torch.float64, requires_grad=True) for n in (2, 2, 6))
    if decayed:
        gates |= {"g": -torch.rand(2, 21, 2, generator=draw).double(), "beta": torch.rand(2, 21, 2).double()}
    every = {n: x.repeat_interleave(3, -1) for n, x in gates.items()}
    got, _ = ops.koopman_attention(q, k, v, **gates, chunk_size=4)
    want, _ = ops.koopman_attention(*(x.repeat_interleave(3, 2) for x in (q, k)), v, **every, chunk_size=4)
    results = [dict(zip("qkv", torch.autograd.grad(y.square().sum(), (q, k, v)), strict=True)) for y in (got, want)]
    assert_close({"o": got, **results[0]}, {"o": want, **results[1]}, 4 * 1e-14)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", [name for name in ("chunked", "native") if name in ops.available_backends("dplr")])
def test_no_group_is_copied_for_its_heads(op, backend):
    """Forward and backward, nothing has the size of the queries of all heads but the gradients of DPLR's a and b."""
    arguments = rounded(op_inputs(op, "scalar", 512, batch=8, heads=8, key=64, value=4), torch.float32)
    size = arguments["q"].numel() * arguments["q"].element_size()
    arguments |= {name: arguments[name][:, :, :1] for name in "qk"}
    with profile(profile_memory=True, acc_events=True) as profiled:
        run_op(op, arguments, backend=backend)
    allocated = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sum(bytes >= size for bytes in allocated) == (2 if op == "dplr" else 0)
