"""Runs every native kernel once over awkward inputs; `test_native.py` starts it with sanitizers loaded."""

import sys
from functools import partial
from pathlib import Path

import test_fused as layer
import torch
from helpers import GRANULARITIES, OPS, op_inputs, rounded, run_op

from halflife import ops
from halflife.ops.backends import dispatch
from halflife.ops.backends.native import build

build.use(Path(sys.argv[1]))
build.why_not = build.load = lambda: None
dispatch.SMALLEST_PASS = 0
for op in OPS:
    for granularity in GRANULARITIES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for length, sizes in ((0, (3, 5)), (1, (1, 1)), (70, (7, 80)), (150, (33, 17))):
                arguments = op_inputs(op, granularity, length, heads=3, key=sizes[0], value=sizes[1])
                run_op(op, rounded(arguments, dtype), backend="native")
                with torch.no_grad():
                    OPS[op](**rounded(arguments, dtype), backend="native")
            packed = rounded(op_inputs(op, granularity, 60, heads=1, sequences=4), dtype)
            run_op(op, packed, backend="native", cu_seqlens=torch.tensor([0, 0, 1, 40, 60]))
            if granularity != "none":
                run_op(op, rounded(op_inputs(op, granularity, 70, decay="mixed"), dtype), backend="native")
for beta in (None, "beta"):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        arguments = rounded(op_inputs("delta_rule", "scalar", 130, heads=3, key=9), dtype)
        state = arguments.pop("initial_state")
        q, k, v, g = (arguments[name].requires_grad_() for name in ("q", "k", "v", "g"))
        g_slow = torch.where(g < -0.3, g, 0.0)
        strength = None if beta is None else arguments["beta"]
        gain = g_slow.exp()
        o, _ = ops.gate_rank(q, k, v, g_slow, g, strength, gain, initial_state=(state, state), backend="native")
        o.float().sum().backward()
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for name, function in layer.CASES.items():
        for shape in layer.SHAPES:
            if name != "rotate" or shape[-1] % 2 == 0:
                layer.results(function, layer.arguments(shape, dtype))
    for width in (1, 4, 80):
        packed = layer.arguments((1, 204, 3, 50), dtype, width, 5)
        layer.results(partial(layer.conv, cu_seqlens=torch.tensor([0, 70, 70, 71, 73, 204])), packed)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for mode, refresh in (("chunk", "chunk"), ("chunk", "token"), ("prefix", "chunk"), ("masked", "chunk")):
        for length, heads, sizes in ((0, 2, (3, 5)), (1, 2, (1, 1)), (70, 3, (7, 80)), (150, 1, (33, 17))):
            draw = partial(torch.randn, 2, length, heads, generator=torch.Generator().manual_seed(length))
            x = [draw(size).to(dtype).requires_grad_() for size in (sizes[0], *sizes)]
            options = {"refresh": refresh, "chunk_size": 16, "output_final_state": True, "backend": "native"}
            mask = torch.ones(2, length) if mode == "masked" else None
            y, state = ops.koopman_attention(*x, mode=mode, mask=mask, **options)
            (y.float().sum() + state["gram"].sum()).backward()
            with torch.no_grad():
                for t in range(min(length, 3)):
                    _, state = ops.koopman_attention(
                        *(part[:, t : t + 1] for part in x), initial_state=state, **options
                    )
    x = [torch.randn(1, 60, 2, 9).to(dtype).requires_grad_() for _ in range(3)]
    y, _ = ops.koopman_attention(*x, cu_seqlens=torch.tensor([0, 0, 1, 40, 60]), chunk_size=8, backend="native")
    y.float().sum().backward()
print("clean")
