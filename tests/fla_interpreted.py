"""Runs fla's own kernels in Triton's interpreter, and prints their errors against the token loops in float64 as JSON.

A process of its own, because `TRITON_INTERPRET` counts when triton is imported. Limits of the interpreter are worked
around: it multiplies bfloat16 as whole numbers, loop variables of `range` are no tensors in it, and it refuses masks of
whole numbers. Autotuners take their first configuration, for there is nothing to time.

usage: python fla_interpreted.py CASE…
"""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import autotuner, interpreter  # noqa: E402

from halflife import ops  # noqa: E402
from halflife.layers.fox import forgetting_attention  # noqa: E402
from halflife.ops.backends import fla  # noqa: E402
from halflife.ops.spec import OPS  # noqa: E402


def loop(*bounds):
    """`range`, whose numbers are tensors inside of a kernel."""
    numbers = builtins.range(*map(int, bounds))
    try:
        tl.to_tensor(0)
    except ValueError:  # outside of kernels
        return iter(numbers)
    return map(tl.to_tensor, numbers)


def work_around():
    memory = interpreter._interpreter
    interpreter._interpreter = SimpleNamespace(**{
        **vars(memory),
        "load": lambda pointers, mask, *rest: memory.load(pointers, mask.astype(bool), *rest),
        "store": lambda pointers, values, mask: memory.store(pointers, values, mask.astype(bool)),
    })  # fmt: skip
    product = interpreter.InterpreterBuilder.create_dot

    def dot(builder, a, b, *rest):
        return product(builder, as_float(a), as_float(b), *rest)

    def as_float(x):
        if x.dtype != tl.bfloat16:
            return x
        wide = interpreter._convert_float(x.data, tl.bfloat16, tl.float32, None).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    interpreter.InterpreterBuilder.create_dot = dot
    autotuner.Autotuner.run = lambda tuner, *args, **options: tuner.fn.run(
        *args, **options, **tuner.configs[0].all_kwargs()
    )


def inputs(op, decay, length, heads, groups, key, value, sequences):
    draw = torch.Generator().manual_seed(length)

    def randn(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    at = (1, length, heads)
    x = {"q": randn(1, length, groups, key), "k": F.normalize(randn(1, length, groups, key), dim=-1)}
    x["v"] = randn(*at, value)
    if op == "forgetting_attention":
        x["v"] = randn(1, length, groups, value)
    if op in ("delta_rule", "ridge_attention"):
        x["beta"] = randn(*at).sigmoid()
    if op == "ridge_attention":
        x["ridge"] = 0.25 + randn(heads, key).square()
    if op == "log_linear_attention":
        x["weights"] = F.softplus(randn(*at, (length - 1).bit_length() + 1))
    if decay != "none":
        x["g"] = -randn(*at, key).exp() / 4 if decay == "vector" else -randn(*at).exp() / 4
        x["g"][:, 3::29] = -torch.inf
        x["g"][:, 5::31] = 0
    if op == "ridge_attention":
        gram = randn(sequences, heads, key, key)
        x |= {"G": gram @ gram.mT / key, "C": randn(sequences, heads, key, value)}
    elif op not in ("log_linear_attention", "forgetting_attention"):
        x["state"] = randn(sequences, heads, key, value)
    return x


def run(op, x, backend, bounds, loss):
    """Outputs, final states and gradients of all inputs."""
    leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
    states = [leaves[name] for name in ("state", "G", "C") if name in leaves]
    rest = {name: value for name, value in leaves.items() if name not in ("state", "G", "C")}
    if op == "forgetting_attention":
        found = [forgetting_attention(**rest, backend=backend)]
    else:
        initial = None if not states else states[0] if len(states) == 1 else tuple(states)
        o, final = getattr(ops, op)(
            **rest, initial_state=initial, cu_seqlens=bounds, output_final_state=True, backend=backend
        )
        found = [o, *(y for y in (final if isinstance(final, tuple) else (final,)) if y.is_floating_point())]
    draw = torch.Generator().manual_seed(0)
    total = sum((y.double() * torch.randn(y.shape, generator=draw, dtype=torch.float64)).sum() for y in found)
    grads = torch.autograd.grad(loss * total, list(leaves.values()))
    names = ["o", "final", "final values"][: len(found)]
    return dict(zip([*names, *(f"d{name}" for name in leaves)], [*found, *grads], strict=True))


CASES = {
    "linear_attention none": {}, "linear_attention scalar": {}, "linear_attention vector": {},
    "delta_rule none": {}, "delta_rule scalar": {"groups": 1}, "delta_rule vector": {},
    "log_linear_attention scalar": {"key": 64, "groups": 1}, "ridge_attention scalar": {},
    "forgetting_attention scalar": {},
}  # fmt: skip


def errors(case, bounds, loss=1.0):
    """The largest error of each result, relative to the largest entry of the right one."""
    op, decay = case.split()
    sizes = {"heads": 2, "groups": 2, "key": 16, "value": 16, **CASES[case]}
    ends = None if bounds is None else torch.tensor(bounds)
    length, sequences = (70, 1) if bounds is None else (bounds[-1], len(bounds) - 1)
    x = inputs(op, decay, length, sequences=sequences, **sizes)
    narrow = {n: y.half() if n in (*fla.MATRICES, "weights") else y.float() for n, y in x.items()}
    got = run(op, narrow, "fla", ends, loss)
    expected = run(op, {n: y.double() for n, y in narrow.items()}, "reference", ends, loss)
    return {
        name: ((got[name].double() - right).abs().max() / right.abs().max().clamp(min=1e-30)).item()
        for name, right in expected.items()
    }


def main():
    work_around()
    for op in OPS.names():
        if "fla" in OPS[op].backends:
            OPS[op].backends["fla"] = replace(OPS[op].backends["fla"], why_not=None)
    importlib.import_module("fla.ops")
    for module in [m for name, m in sys.modules.items() if name.startswith("fla.ops")]:
        module.range = loop
    found = {}
    for case in sys.argv[1:] or CASES:
        ways = {"plain": None} if case.startswith("forgetting") else {"plain": None, "packed": [0, 1, 66, 66, 80]}
        for way, bounds in ways.items():
            found[f"{case} {way}"] = errors(case, bounds)
        if case.startswith("ridge"):
            found[f"{case} small gradients"] = errors(case, None, 1e-5)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
