"""Runs every native kernel once over awkward inputs; `test_native.py` starts it with sanitizers loaded."""

import sys
from pathlib import Path

import torch
from helpers import GRANULARITIES, OPS, op_inputs, rounded, run_op

from halflife import ops
from halflife.ops.backends.native import build

build.use(Path(sys.argv[1]))
build.why_not = build.load = lambda: None
for op in OPS:
    for granularity in GRANULARITIES:
        for dtype in (torch.float32, torch.bfloat16):
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
    for dtype in (torch.float32, torch.bfloat16):
        arguments = rounded(op_inputs("delta_rule", "scalar", 130, heads=3, key=9), dtype)
        state = arguments.pop("initial_state")
        q, k, v, g = (arguments[name].requires_grad_() for name in ("q", "k", "v", "g"))
        g_slow = torch.where(g < -0.3, g, 0.0)
        strength = None if beta is None else arguments["beta"]
        o, _ = ops.gate_rank(q, k, v, g_slow, g, strength, initial_state=(state, state), backend="native")
        o.float().sum().backward()
print("clean")
