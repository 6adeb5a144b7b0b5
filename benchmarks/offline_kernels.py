"""Triton kernels compiled without a GPU: what our host code launches, for the targets of `TARGETS`.

A stand-in driver reports a target, and `JITFunction.run` notes a launch in place of making it. So the host code of the
library runs on tensors of the meta device, and every kernel has the grid and specialisation that it has on a GPU.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import autotuner, driver, jit

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_80": GPUTarget("cuda", 80, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Host code may ask for the architecture in place of a device's number, so devices are numbered by it.
NUMBERS = {"sm_90": 90, "sm_80": 80, "gfx942": 0}
# Of the configurations between which the autotuner chooses on a GPU, the one that is compiled: 4 warps, 2 stages.
CONFIGURATION = 1


class _Driver:
    """What Triton asks of a driver before a launch."""

    def __init__(self, target: str) -> None:
        self.target, self.number = TARGETS[target], NUMBERS[target]

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: Any = None) -> int:
        return 0


@dataclass
class Launch:
    """A launch of a kernel: its function, grid, arguments by name, and the options of the compiler."""

    function: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.function.fn.__name__

    @property
    def programs(self) -> int:
        return math.prod(self.grid)

    def constants(self) -> dict[str, Any]:
        return {p.name: self.arguments.get(p.name) for p in self.function.params if p.is_constexpr}


def stand_in(value: Any) -> Any:
    """A value for Triton in the place of a tensor: it has a dtype and an aligned address."""
    return jit.MockTensor(value.dtype) if isinstance(value, Tensor) else value


def compiled(launch: Launch, target: str) -> Any:
    """Compile the kernel of a launch for a target; Triton keeps the result in its cache."""
    driver.set_active(_Driver(target))
    arguments = {name: stand_in(value) for name, value in launch.arguments.items()}
    return launch.function.__class__.run(launch.function, **arguments, grid=launch.grid, warmup=True, **launch.options)


@contextlib.contextmanager
def captured(launches: list[Launch], compile_for: str = "sm_90") -> Iterator[list[Launch]]:
    """Inside this block, launches of kernels are appended to `launches`, and nothing runs."""
    run, tuned = jit.JITFunction.run, autotuner.Autotuner.run

    def record(function: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        bound = dict(zip(function.arg_names, args, strict=False))
        bound |= {name: options.pop(name) for name in list(options) if name in function.arg_names}
        size = grid(bound) if callable(grid) else grid
        # Tensors that this list held would count as in use, and autograd would copy gradients.
        bound = {name: x.detach() if isinstance(x, Tensor) else x for name, x in bound.items()}
        launches.append(Launch(function, tuple(int(x) for x in size), bound, options))

    def first(tuner: Any, *args: Any, **options: Any) -> None:
        config = tuner.configs[min(CONFIGURATION, len(tuner.configs) - 1)]
        tuner.fn.run(*args, **options, **config.all_kwargs())

    driver.set_active(_Driver(compile_for))
    jit.JITFunction.run, autotuner.Autotuner.run = record, first
    try:
        yield launches
    finally:
        jit.JITFunction.run, autotuner.Autotuner.run = run, tuned


# ------------------------------------------------------------------------------------------- bytes of arguments


def intermediate(launch: Launch, target: str = "sm_90") -> str:
    """Triton's first intermediate code of a launch, with the functions that the kernel calls inlined."""
    from triton._C.libtriton import ir

    driver.set_active(_Driver(target))
    function, options = launch.function, dict(launch.options)
    options |= {"debug": False, "instrumentation_mode": ""}
    _, _, where, backend, bind = function.create_binder()
    bound, specialization, options = bind(**{k: stand_in(v) for k, v in launch.arguments.items()}, **options)
    parsed, signature, constants, attributes = function._pack_args(backend, options, bound, specialization, options)
    source = ASTSource(function, signature, constants, attributes)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    code = backend.get_codegen_implementation(parsed)
    module = source.make_ir(where, parsed, code, backend.get_module_map(), context)
    stages: dict[str, Callable] = {}
    backend.add_stages(stages, parsed, source.language)
    return str(stages["ttir"](module, {}))


_ARGUMENT = re.compile(r"(%\w+): !tt\.ptr<")
_MADE = re.compile(r"^\s*(%[\w#:]+) = ([\w.]+) (.*)$")
_VALUE = re.compile(r"%\w+(?:#\d+)?")


def roles(text: str) -> dict[str, set[str]]:
    """Argument → which of "load" and "store" the kernel does with it, from Triton's first intermediate code."""
    head = next(line for line in text.splitlines() if "tt.func public" in line)
    root = {name: {name.removeprefix("%")} for name in _ARGUMENT.findall(head)}
    found: dict[str, set[str]] = {name: set() for names in root.values() for name in names}
    for line in text.splitlines():
        for carried, start in re.findall(r"(%\w+) = (%\w+(?:#\d+)?)[,)]", line.partition("iter_args(")[2]):
            if start in root:
                root[carried] = root[start]
        made = _MADE.match(line)
        operation = made[2] if made else line.split()[0] if line.strip() else ""
        values = _VALUE.findall(made[3] if made else line)
        values = values[1:] if operation == "arith.select" else values[:1]
        where = {name for value in values for name in root.get(value, ())}
        if operation in ("tt.load", "tt.store") or operation.startswith("tt.atomic"):
            for name in where:
                found[name] |= {"load", "store"} if "atomic" in operation else {operation[3:]}
        elif where and made and "!tt.ptr" in line:
            root[made[1]] = where
    return found


def moved(launch: Launch, does: dict[str, set[str]]) -> int:
    """The bytes of a launch: each tensor that it loads, once, and each that it stores, once."""
    passed: dict[tuple[str, int, int], int] = {}
    for name, kinds in does.items():
        tensor = launch.arguments.get(name)
        for kind in kinds:
            if isinstance(tensor, Tensor):
                passed[kind, tensor.untyped_storage()._cdata, tensor.storage_offset()] = unique_bytes(tensor)
    return sum(passed.values())


def unique_bytes(x: Tensor) -> int:
    """The bytes of the entries of a tensor, of repeated ones (stride 0) once."""
    sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride != 0]
    return math.prod(sizes) * x.element_size() if x.numel() else 0
