"""Checks of models on a GPU without one, each for a process of its own: `python -c "import compiled; compiled.ops()"`.

Tests run our kernels in Triton's interpreter and check annotations at run time, and neither can be traced. Here models
are on the meta device and choose as on a GPU, and nothing is launched.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_functional
from torch.utils._python_dispatch import TorchDispatchMode

sys.path[:0] = [str(Path(__file__).parent.parent / "benchmarks")]

import offline  # noqa: E402
import offline_kernels  # noqa: E402
import offline_models  # noqa: E402

from halflife import LanguageModel, preset  # noqa: E402
from halflife.layers.parts import set_backend  # noqa: E402
from halflife.ops import arguments  # noqa: E402
from halflife.ops.backends import fla, fla_op, triton  # noqa: E402
from halflife.ops.spec import OPS  # noqa: E402
from halflife.packing import Packing  # noqa: E402


def kernels_of(graph: Any) -> Counter:
    """The kernels in a graph, by name."""
    nodes = [node for node in graph.graph.nodes if node.target is triton_kernel_wrapper_functional]
    kernels = [kernel_side_table.get_kernel(node.kwargs["kernel_idx"]) for node in nodes]
    for node, kernel in zip(nodes, kernels, strict=True):  # inductor would declare numbers float64
        given = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
        numbers = {name for name, x in given.items() if isinstance(x, float)}
        params = getattr(kernel, "params", None) or kernel.fn.params  # one with options is within an Autotuner
        runtime = numbers - {param.name for param in params if param.is_constexpr}
        assert not runtime, f"{kernel}: {runtime}"
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


@contextlib.contextmanager
def on_a_gpu(with_fla: bool) -> Iterator[None]:
    """Inside this block, ops choose as on an A100, with fla-core or without."""
    names = [name for name in OPS.names() if "fla" in OPS[name].backends and name not in fla.UNSEEN]
    kept = {name: OPS[name].backends["fla"] for name in names}
    with contextlib.ExitStack() as stack:
        stack.enter_context(offline_models.on_a_gpu())
        stack.enter_context(offline_kernels.captured([]))
        if with_fla:
            for function, value in (("_versions", ((0, 6, 0), (3, 8, 0))), ("_capability", 8)):
                stack.enter_context(mock.patch.object(fla, function, lambda *_, value=value: value))
            for name, backend in kept.items():
                stack.enter_context(mock.patch.dict(OPS[name].backends, {"fla": backend}))
        yield


def _model(name: str) -> Any:
    steps = {"mixer_options": {"iterations": 3}} if name == "mesa" else {}  # of 30, which all do the same
    with torch.device("meta"):
        return LanguageModel(preset(name, hidden_size=128, num_layers=2, vocab_size=256, **steps)).bfloat16()


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.zeros(batch, length, dtype=torch.long, device="meta")


def one_graph(name: str, packed: bool = True, with_fla: bool = False) -> None:
    """Check that Dynamo traces a forward pass, a packed one and a token of a model without a break.

    "auto" takes our kernels where no gradient is asked for, so a model with fla's names them.
    """
    model, rows, graphs = _model(name).eval(), _ids(2, 80), []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with on_a_gpu(False), torch.no_grad():
        state = model(rows)[1]
    if with_fla:
        set_backend(model, "fla")
    with on_a_gpu(with_fla), torch.no_grad():
        calls = [(rows, None, None), (rows[:, :1], state, None)]
        calls += [(_ids(1, 80), None, torch.tensor([0, 40, 80], device="meta"))] if packed else []
        for arguments in calls:
            torch._dynamo.reset()
            torch.compile(model, backend=keep, fullgraph=True)(*arguments)
    assert len(graphs) == len(calls)
    black = [node for node in graphs[0].graph.nodes if "halflife.fla" in str(node.target)]
    assert bool(black) == with_fla


class _NoWaits(TorchDispatchMode):
    """Raises where the host would wait for a device. Tensors without data raise by themselves for values of theirs."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if name == "repeat_interleave" and kwargs.get("output_size") is None and function is not SAME_COUNT:
            raise RuntimeError("the length of repeat_interleave depends on values of the device")
        out = function(*args, **kwargs)
        copied = name in ("_to_copy", "copy_") and {
            x.device.type for x in (args[0], args[-1], out) if torch.is_tensor(x)
        }
        if copied == {"cpu", "meta"} and not kwargs.get("non_blocking"):
            raise RuntimeError(f"{function} waits for the device")
        return out


SAME_COUNT = torch.ops.aten.repeat_interleave.self_int


class _Everything(set):
    """A set of which everything is a member."""

    def __contains__(self, x: Any) -> bool:
        return True


@contextlib.contextmanager
def _with_checks() -> Iterator[None]:
    """Inside this block, checks of values run for tensors without data too, and log-decays have been checked before."""
    real = arguments.is_traced
    with contextlib.ExitStack() as stack:
        for module in [m for name, m in sys.modules.items() if name.startswith("halflife")]:
            if getattr(module, "is_traced", None) is real:
                stack.enter_context(mock.patch.object(module, "is_traced", return_value=False))
        stack.enter_context(mock.patch.object(arguments, "_SEEN", _Everything()))
        yield


def _black_box(name: str, tensors: Any, scale: float) -> Any:
    given = {key: x for key, x in tensors.items() if x is not None}
    return fla_op.run(name, [*given], [*given.values()], scale)


@contextlib.contextmanager
def _no_waits() -> Iterator[None]:
    """Inside this block, models run as on a GPU with fla-core, and it is an error if the host waits for the device."""
    with on_a_gpu(True), _with_checks(), mock.patch.object(fla_op, "call", _black_box), _NoWaits():
        yield


def no_waits(name: str, packed: bool = True) -> None:
    """Check that the host waits for no value of the device, forward and backward, of packed input, and for a token.

    In training the host knows where the sequences of packed input lie. `packed`: it need not, either.
    """
    model, bounds = _model(name), torch.tensor([0, 30, 80])
    inputs = [Packing.of(bounds, 1, 80).to(torch.device("meta")), *([bounds.to("meta")] if packed else [])]
    with _no_waits():
        logits, state = model(_ids(2, 80))
        logits.float().sum().backward()
        for cu_seqlens in inputs:
            model(_ids(1, 80), cu_seqlens=cu_seqlens)[0].float().sum().backward()
        with torch.no_grad():
            model.eval()(_ids(2, 1), state)


class _AllRead(Exception):
    """The steps of a training are over."""


class _MicroBatches(list):
    """Six micro-batches: "rows", "packed", or "continued" by those of the next step."""

    def __init__(self, mode: str) -> None:
        ids = torch.zeros(1 if mode == "packed" else 2, 80, dtype=torch.long)
        more = {"cu_seqlens": torch.tensor([0, 30, 80])} if mode == "packed" else {}
        super().__init__({"input_ids": ids, "labels": ids, **more} for _ in range(6))
        for i, item in enumerate(self if mode == "continued" else ()):
            item["part"] = torch.tensor([i % 2, 2, int(i < 2)])

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: Any) -> Any:
        if i >= 6:
            raise _AllRead
        return super().__getitem__(i)


def trains_without_waits(name: str, mode: str) -> None:
    """Check that the host waits for no value of the device in two steps of two micro-batches, with all callbacks.

    A step that is logged, or validates, may wait; these do neither.
    """
    from accelerate.state import PartialState

    from halflife.training import fit
    from halflife.training.config import ExecutionConfig, TrainConfig

    real, model = fit._arguments, _model(name)

    def arguments(*given: Any) -> Any:
        """The Trainer's arguments for a device without data, to which it copies as to a GPU."""
        found = real(*given)
        assert found.device.type == "cpu"  # which sets up accelerate
        vars(found)["_setup_devices"] = PartialState._shared_state["device"] = torch.device("meta")
        found.accelerator_config.non_blocking = True
        return found

    config = TrainConfig(model=model.config, steps=5, batch_size=4, learning_rate=1e-3)
    execution = ExecutionConfig(micro_batch_size=2, show=False)
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(fit, "_arguments", arguments), _no_waits():
        settings = {"validate": None, "measure": "loss", "name": name, "execution": execution}
        try:
            fit.fit(model, config, _MicroBatches(mode), Path(folder), **settings)  # type: ignore[arg-type]
        except _AllRead:
            return
    raise AssertionError("the training ended before")


def validates_without_waits(name: str, mode: str) -> None:
    """Check that the host reads the loss of a validation after its last batch, and waits for nothing before."""
    from halflife.runs import language_run
    from halflife.training.fit import Objective

    rows, read = list(_MicroBatches(mode)), []
    split = mock.Mock(tokens=480, longest=80, batches=lambda *given, **how: rows)
    config = mock.Mock(context=80, validation_tokens=480, bf16=False)
    model = _model(name)
    model.embedding.register_forward_hook(lambda *_: read.append(1))
    # Tensors without data have no autocast, and no loss that could be read.
    patches = mock.patch.object(language_run, "MEASURED_TOKENS", 160), mock.patch.object(torch, "autocast")
    with patches[0], patches[1], _no_waits(), pytest.raises(RuntimeError):
        language_run._validation(split, config)(Objective(model))
    assert len(read) == 3
