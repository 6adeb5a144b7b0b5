"""What a training step and a decoded token of a model ask of a GPU, counted on tensors without data.

Models run on the meta device, where the library chooses the implementations that it has for a GPU without fla-core: our
Triton kernels, whose launches are captured, and plain torch. Each operation of torch that touches memory counts as one
launch, and as the bytes of its inputs and outputs. Autocast is imitated, because the meta device has none.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import offline_kernels
import torch
from offline_kernels import Launch, unique_bytes
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

HIDDEN, LAYERS, BATCH, LENGTH = 1024, 4, 16, 2048  # of the step whose time is predicted
HYBRIDS = ("ska", "attention", "swa")  # modifiers that give a preset a second kind of layers
LAUNCH = 3e-6  # seconds, the least that a kernel takes
ATEN = torch.ops.aten
# Operations that start no kernel, beside views.
FREE = {
    ATEN.empty.memory_format, ATEN.empty_like.default, ATEN.empty_strided.default, ATEN.new_empty.default,
    ATEN.new_empty_strided.default, ATEN.detach.default, ATEN._unsafe_view.default, ATEN.lift_fresh.default,
}  # fmt: skip
NARROW = {
    functional.linear, functional.conv1d, functional.scaled_dot_product_attention, torch.matmul, torch.mm, torch.bmm,
    torch.addmm, torch.baddbmm, torch.einsum, torch.conv1d, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__,
    Tensor.bmm, Tensor.mm,
}  # fmt: skip
WIDE = {
    functional.softplus, functional.softmax, torch.softmax, Tensor.softmax, torch.exp, Tensor.exp, torch.log,
    Tensor.log, torch.cumsum, Tensor.cumsum, torch.sum, Tensor.sum, torch.rsqrt, Tensor.rsqrt, functional.normalize,
    torch.pow, Tensor.pow, Tensor.__pow__, torch.norm, Tensor.norm, torch.expm1,
}  # fmt: skip


@dataclass
class Count:
    """What one run asks for."""

    launches: int = 0
    bytes: int = 0
    syncs: int = 0
    seconds: float = 0.0
    tokens: int = BATCH * LENGTH  # the length of what depends on data, such as the sequence of each token
    kernels: list[Launch] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)  # storage → bytes kept for the backward pass

    def add(self, size: int, seconds: float) -> None:
        self.launches += 1
        self.bytes += size
        self.seconds += max(seconds, LAUNCH)


class _Autocast(TorchFunctionMode):
    """The products and the float32 functions of CUDA's autocast in bfloat16, and torch's choice of an attention.

    It is not `active` in a model in bfloat16, and where autocast is switched off.
    """

    def __init__(self, active: bool = True) -> None:
        super().__init__()
        self.active = active

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        dtype = torch.bfloat16 if function in NARROW else torch.float32 if function in WIDE else None
        kwargs = kwargs or {}
        if dtype is not None and self.active:
            cast = lambda x: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
            args = [[cast(y) for y in x] if isinstance(x, list | tuple) else cast(x) for x in args]
            kwargs = {name: cast(x) for name, x in kwargs.items()}
        if function is functional.scaled_dot_product_attention and kwargs.get("attn_mask") is None:
            function = _flash
        return function(*args, **kwargs)


def _flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, **options: Any) -> Tensor:
    """FlashAttention, which torch takes on a GPU; the meta device would get the products of all pairs."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) if x.shape[1] != q.shape[1] else x for x in (k, v))
    return ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def _is_composite(function: Any) -> bool:
    """Whether torch runs other operations in its place. Before autograd it does so itself, and inside our ops not."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), "CompositeImplicitAutograd")


class _Counting(TorchDispatchMode):
    """Counts operations, and answers where the host asks for a value."""

    inside = False  # of one of our ops

    def __init__(self, count: Count, rates: dict[str, float]) -> None:
        super().__init__()
        self.count, self.rates = count, rates

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from halflife.ops.backends.triton.op import HOST

        kwargs = kwargs or {}
        if function in HOST:  # counted as what it consists of
            with self, mock.patch.object(self, "inside", True):
                return HOST[function](*args, **kwargs)
        if self.inside and _is_composite(function):
            with self:
                return function.decompose(*args, **kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if function is ATEN._local_scalar_dense.default and tensors[0].device.type == "meta":
            self.count.syncs += 1
            return torch.zeros((), dtype=tensors[0].dtype, device="cpu").item()
        if function is ATEN.nonzero.default and tensors[0].device.type == "meta":
            self.count.syncs += 1
            return torch.empty(tensors[0].numel(), tensors[0].ndim, dtype=torch.long, device="meta")
        if function is ATEN.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self.count.syncs += 1
            kwargs = {**kwargs, "output_size": self.count.tokens}
        out = function(*args, **kwargs)
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if function is ATEN._foreach_copy_.default:  # it returns nothing
            results = [x for x in args[0] if x.is_meta]
        view = function.is_view or function in FREE or "meta" not in {x.device.type for x in results}
        if not view and any(x.numel() for x in results):
            work = flop_registry.get(function.overloadpacket)
            operations = work(*args, **kwargs, out_val=out) if work else 0
            size = sum({id(x): unique_bytes(x) for x in (*tensors, *results)}.values())
            self.count.add(size, max(size / self.rates["copy"], operations / self.rates["product"]))
        return out


@contextlib.contextmanager
def on_a_gpu(cast: _Autocast | None = None) -> Iterator[None]:
    """Inside this block the ops choose as on a CUDA device without fla-core, and leave autocast (`cast`) as there."""
    from halflife.ops import recurrent
    from halflife.ops.backends import dispatch
    from halflife.ops.spec import OPS

    choose, step_of = dispatch.choose, dispatch.step_of

    @contextlib.contextmanager
    def without_autocast(device: torch.device) -> Iterator[None]:
        with mock.patch.object(cast, "active", False):
            yield

    def autocast_dtype(device: torch.device) -> torch.dtype | None:
        return torch.bfloat16 if cast is not None and cast.active else None

    def on_cuda(op: str, backend: str, device: torch.device, call: Any = None) -> Callable[..., Any]:
        return choose(op, backend, torch.device("cuda"), call)

    def step_on_cuda(call: Any, backend: str, device: torch.device) -> Callable[..., Any] | None:
        return step_of(call, backend, torch.device("cuda"))

    def everywhere(device: torch.device) -> bool:  # no mock, which Dynamo cannot trace
        return True

    with contextlib.ExitStack() as stack:
        for module in [m for name, m in sys.modules.items() if name.startswith("halflife")]:
            if cast is not None and "without_autocast" in vars(module):
                stack.enter_context(mock.patch.object(module, "without_autocast", without_autocast))
            if cast is not None and "autocast_dtype" in vars(module):
                stack.enter_context(mock.patch.object(module, "autocast_dtype", autocast_dtype))
        stack.enter_context(mock.patch.object(dispatch, "choose", on_cuda))
        stack.enter_context(mock.patch.object(dispatch, "step_of", step_on_cuda))
        stack.enter_context(mock.patch.object(dispatch, "SMALLEST_PASS", 0))
        stack.enter_context(mock.patch.object(recurrent, "runs_kernels", everywhere))
        for name in OPS.names():
            kept = {k: v for k, v in OPS[name].backends.items() if k not in ("native", "fla")}
            stack.enter_context(mock.patch.dict(OPS[name].backends, kept, clear=True))
        yield


_ROLES: dict[tuple[Any, ...], dict[str, set[str]]] = {}


def _moved(launch: Launch) -> int:
    """The bytes of a launch; what a kernel does with its arguments does not depend on the sizes of heads."""
    flags = [x for name, x in launch.constants().items() if isinstance(x, bool) or name == "MODE"]
    given = [name for name, x in launch.arguments.items() if isinstance(x, Tensor)]
    key = (launch.function.fn.__module__, launch.name, *flags, *given)
    if key not in _ROLES:
        _ROLES[key] = offline_kernels.roles(offline_kernels.intermediate(launch))
    return offline_kernels.moved(launch, _ROLES[key])


@contextlib.contextmanager
def counted(rates: dict[str, float], own: set[int] | None = None) -> Iterator[Count]:
    """Count what this block asks for. `own` are storages that would exist anyway, such as those of parameters."""
    count, kept = Count(), own or set()

    def pack(x: Tensor) -> Tensor:
        if (storage := x.untyped_storage())._cdata not in kept and x.device.type == "meta":
            count.saved[storage._cdata] = storage.nbytes()
        return x

    def tolist(x: Tensor) -> list[Any]:
        count.syncs += 1
        return torch.zeros(x.shape, dtype=x.dtype, device="cpu").numpy().tolist()

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    host = mock.patch.object(Tensor, "tolist", tolist)
    with offline_kernels.captured(count.kernels), host, hooks, _Counting(count, rates):
        yield count
    for launch in count.kernels:
        size = _moved(launch)
        count.add(size, size / rates["triton"])


def model_of(name: str, layers: int) -> Any:
    from halflife import LanguageModel, preset

    with torch.device("meta"):
        return LanguageModel(preset(name, hidden_size=HIDDEN, num_layers=layers, vocab_size=256))


def step(name: str, layers: int, rates: dict[str, float], narrow: bool = False) -> tuple[Count, Count]:
    """Count the forward and the backward pass of a training step, under autocast or of a model in bfloat16."""
    model, cast = model_of(name, layers), _Autocast(active=not narrow)
    model = model.bfloat16() if narrow else model
    own = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long, device="meta")
    with on_a_gpu(cast):
        with offline_kernels.captured([]), cast:
            model(ids)  # the first pass finds the maps of one input
        with counted(rates, own) as forward, cast:
            out = model(ids)[0].float().sum()
        with counted(rates) as backward:
            out.backward()
    return forward, backward


def token(name: str, layers: int, rates: dict[str, float]) -> Count:
    """Count the decoding of a token of one sequence by a model in bfloat16."""
    model, ids = model_of(name, layers).eval().bfloat16(), torch.zeros(1, 64, dtype=torch.long, device="meta")
    with on_a_gpu(), torch.no_grad():
        with counted(rates) as count:
            count.tokens = 64
            state = model(ids)[1]
        with counted(rates) as count:
            count.tokens = 1
            model(ids[:, :1], state)
    return count


def graph_breaks(name: str, layers: int) -> int | None:
    """How often `torch.compile` breaks the graph of a forward pass, once for each function on the way to a cause.

    It is None where the graph depends on data.
    """
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model, ids = model_of(name, layers).eval(), torch.zeros(2, 128, dtype=torch.long, device="meta")
    with on_a_gpu(), offline_kernels.captured([]):
        try:
            torch.compile(model, backend=lambda graph, inputs: graph.forward)(ids)
        except NotImplementedError:
            return None
    return sum(counters["graph_break"].values())


def row_of(name: str, rates: dict[str, float]) -> dict[str, Any]:
    """A row of the table: figures of a layer, from the difference of two models, and the time of a whole step.

    The layer of a hybrid is the one that its modifier adds.
    """
    hybrid = any(part in HYBRIDS for part in name.split("+"))
    base = name.split("+")[0] if hybrid else name
    step(base, 1, rates)  # fills caches, such as that of the table of chunks
    (f, b), (f_more, b_more) = step(base, 1, rates), step(name, 2, rates)
    narrow, narrow_more = step(base, 1, rates, narrow=True), step(name, 2, rates, narrow=True)
    single, double = token(base, 1, rates), token(name, 2, rates)

    def layer(less: tuple[Count, ...], more: tuple[Count, ...], key: str) -> Any:
        return sum(getattr(x, key) for x in more) - sum(getattr(x, key) for x in less)

    both, both_more = (f, b), (f_more, b_more)
    if hybrid:
        seconds = sum(x.seconds for x in step(name, LAYERS, rates))
    else:
        seconds = f.seconds + b.seconds + (LAYERS - 1) * layer(both, both_more, "seconds")
    return {
        "launches": layer(both, both_more, "launches"), "forward_launches": layer((f,), (f_more,), "launches"),
        "bf16_launches": layer(narrow, narrow_more, "launches"),
        "bytes": layer(both, both_more, "bytes"), "forward_bytes": layer((f,), (f_more,), "bytes"),
        "syncs": layer(both, both_more, "syncs"), "graph_breaks": graph_breaks(name, 2),
        "saved_bytes": sum(f_more.saved.values()) - sum(f.saved.values()),
        "decode_launches": layer((single,), (double,), "launches"),
        "decode_bytes": layer((single,), (double,), "bytes"),
        "decode_syncs": layer((single,), (double,), "syncs"), "predicted_ms": round(1e3 * seconds, 1),
    }  # fmt: skip
