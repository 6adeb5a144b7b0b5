"""Checks of what torch's compiler sees, each for a process of its own: `python -c "import compiled; compiled.ops()"`.

Tests run our kernels in Triton's interpreter and check annotations at run time, and neither can be traced. Here models
are on the meta device and choose as on a GPU, and nothing is launched.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional

sys.path[:0] = [str(Path(__file__).parent.parent / "benchmarks")]

import offline  # noqa: E402
import offline_kernels  # noqa: E402

from halflife.ops.backends import triton  # noqa: E402


def kernels_of(graph: Any) -> Counter:
    """The kernels in a graph, by name."""
    nodes = [node for node in graph.graph.nodes if node.target is triton_kernel_wrapper_functional]
    kernels = [kernel_side_table.get_kernel(node.kwargs["kernel_idx"]) for node in nodes]
    return Counter(getattr(kernel, "base_fn", kernel.fn).__name__ for kernel in kernels)


def ops() -> None:
    """Check that the graphs of compiled ops launch the kernels that the ops launch by themselves."""
    for name in ("linear, scalar, 64", "linear, mamba2", "delta, gate_rank, 64"):
        case = offline.CASES[name]
        graphs: list[Counter] = []

        def keep(graph: Any, inputs: Any, graphs: list[Counter] = graphs) -> Any:
            graphs.append(kernels_of(graph))
            return make_boxed_func(graph.forward)

        torch._dynamo.reset()
        compiler = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        compiled = torch.compile(triton.run, backend=compiler, fullgraph=True, dynamic=True)
        with offline_kernels.captured([]):  # a compiler asks for the device of the kernels
            o, _ = compiled(offline.call_of(case, 2, 100))
            o.float().sum().backward()
        eager = [Counter(launch.name for launch in part) for part in offline.launches_of(case, 2, 100)]
        assert graphs == eager, f"{name}: compiled {graphs}, eager {eager}"
