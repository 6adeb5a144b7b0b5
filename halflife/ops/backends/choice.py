"""Which backend comes first on a CUDA device: the faster one, by measured or else predicted time.

`faster.json` has the faster one of our kernels and fla's, forward and with the backward pass. `make gpu-offline` writes
it from `benchmarks/results`, by one model for both (`benchmarks/offline_fla.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from halflife.ops.call import Call

ORDER = ("triton", "fla", "native", "chunked", "mask", "reference")  # best first
FLA_FIRST = ("fla", "triton", *ORDER[2:])
MANY = 100  # heads over all sequences, from which on a walk over whole sequences fills a card
FASTER: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("faster.json").read_text("utf-8"))


def order(op: str, call: Any) -> tuple[str, ...]:
    """The backends of an op, the fastest first. `call` is a `Call`, or None or a pass for the usual order.

    Under torch.compile ours come first, because fla's op runs the forward pass again for a gradient.
    """
    if not isinstance(call, Call) or torch.compiler.is_compiling():
        return ORDER
    if op == "ridge_attention":  # one kernel, where ours runs a product in float32 for each iteration
        return FLA_FIRST
    decay = call.get("g")
    row = FASTER.get(f"{op}, {'none' if decay is None else 'scalar' if decay.ndim == 3 else 'vector'}")
    if row is None:
        return ORDER
    heads = row["many" if call.sizes["N"] * call.sizes["H"] >= MANY else "few"]
    return FLA_FIRST if heads[call.differentiated] == "fla" else ORDER
