"""The ops with random shapes, dtypes, values and settings: right numbers, or a sentence of ours."""

import inspect
import traceback
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import halflife
from halflife import ops
from halflife.ops.spec import OPS as SPECS

LIBRARY = str(Path(halflife.__file__).parent)
OPS = ("linear_attention", "delta_rule", "dplr", "gate_rank", "koopman_attention")
DTYPES = [torch.float32] * 6 + [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.complex64]
VALUES = {
    "normal": lambda x: x,
    "zero": torch.zeros_like,
    "large": lambda x: x * 1e4,
    "tiny": lambda x: x * 1e-30,
    "one row": lambda x: x[:, :1].expand_as(x),
    "strided": lambda x: torch.stack([x, -x], -1)[..., 0],
}
LOG_DECAYS = [0.0, -0.0, -1e-30, -1e-8, -0.1, -5.0, -200.0, -1e30, -torch.inf]
sizes = st.sampled_from([0, 1, 1, 2, 2, 3, 3, 4, 5])


def any_call(draw):
    """An op, its tensors, and its settings."""
    op = draw(st.sampled_from(OPS))
    batch, length, heads, key, value = draw(sizes), draw(st.integers(0, 9)), draw(sizes), draw(sizes), draw(sizes)
    generator, arguments = torch.Generator().manual_seed(draw(st.integers(0, 99))), {}
    common = draw(st.sampled_from(DTYPES))
    known = {"B": batch, "T": length, "S": length, "H": heads, "K": key, "R": key, "V": value, "P": value}
    for name, form in SPECS[op].tensors.items():
        if form.number or form.dtype == "any" or (form.optional and draw(st.booleans())):
            continue
        axes = draw(st.sampled_from(form.choices))
        known["G"] = draw(st.sampled_from([number for number in range(1, heads + 1) if heads % number == 0] or [0]))
        shape = [known[letter] + offset for letter, offset in axes]
        if draw(st.integers(0, 39)) == 0:  # one axis too long
            shape[draw(st.integers(0, len(shape) - 1))] += 1
        x = VALUES[draw(st.sampled_from(list(VALUES)))](torch.randn(shape, generator=generator))
        if name.startswith("g"):
            logs = LOG_DECAYS if draw(st.integers(0, 9)) else [*LOG_DECAYS, 1e-6, 3.0]
            chosen = draw(st.lists(st.sampled_from(logs), min_size=1, max_size=3))
            x = torch.tensor(chosen)[torch.randint(len(chosen), shape, generator=generator)]
        elif name == "k" or name == "beta":
            x = torch.nn.functional.normalize(x, dim=-1) if name == "k" else x.sigmoid()
        elif name in ("a", "b"):
            x = x / (10 + x.abs().amax()) if x.numel() else x  # larger ones let the state grow without bound
        arguments[name] = x.to(common if draw(st.integers(0, 9)) else draw(st.sampled_from(DTYPES)))
    options = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "chunk_size": st.sampled_from([1, 2, 3, 16, 64, 200, 0, -3]),
                "cu_seqlens": st.lists(st.integers(-1, 9), max_size=4).map(lambda x: torch.tensor(x, dtype=torch.long)),
                "backend": st.sampled_from([*ops.available_backends(op), "triton", "none"]),
                "output_final_state": st.booleans(),
            },
        )
    )
    return op, arguments, options


def inside(error):
    """Whether the error was raised by a line of ours, as a sentence; else it comes from inside a library."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, ValueError | TypeError) and frame.filename.startswith(LIBRARY) and len(str(error)) > 10


@settings(max_examples=1500, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.data())
def test_an_op_gives_its_result_or_a_sentence(data):
    op, arguments, options = any_call(data.draw)
    before = {name: x.clone() for name, x in arguments.items()}
    function = inspect.unwrap(getattr(ops, op))
    try:
        o, state = function(**arguments, **options)
    except Exception as error:
        if not inside(error):
            raise
        return
    assert all(torch.equal(arguments[name], x) for name, x in before.items()), "an argument was changed"
    assert (o.shape, o.dtype) == (arguments["v"].shape, arguments["v"].dtype)
    assert (state is not None) == options.get("output_final_state", False)
    # A result is given for right arguments alone.
    assert all(x.is_floating_point() for x in arguments.values())
    assert all(not (x > 0).any() for name, x in arguments.items() if name.startswith("g"))
    wide = {name: x.double() for name, x in arguments.items()}
    exact, _ = function(**wide, **{**options, "backend": "reference"})
    narrow = min(torch.finfo(x.dtype).bits for x in arguments.values())
    tolerance = {16: 0.05, 32: 1e-3, 64: 1e-9}[narrow] * (10 if op == "koopman_attention" else 1)
    if o.numel() and exact.abs().max() < 1e4 and o.isfinite().all():
        assert (o.double() - exact).abs().max() <= tolerance * exact.abs().max().clamp(min=1)
    elif o.numel() and exact.abs().max() < 1e4:
        raise AssertionError("the result is not finite")
