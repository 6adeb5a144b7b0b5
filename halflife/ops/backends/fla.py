"""Adapter to fla-core's kernels (flash-linear-attention): the inputs that they can run, and their conventions.

Both sides take `[B, T, H, D]`, natural logarithms (fla converts them to base 2 itself) and float32 states
`[N, H, K, V]`. In DPLR `a` reads the state before the decay on both sides. These points differ:

- `scale` is passed as a float. Triton compiles the integer 1 into the kernel, and NVIDIA's assembler then writes
  outside of shared memory on Hopper.
- fla computes −inf − (−inf) = NaN, so log-decays are clamped where e^g is 0 in float32.
- Each kernel takes either scalar or vector decays. DPLR takes vector decays only.
- The gated delta rule (scalar and vector decays) takes groups of q and k, and the other kernels do not.
- `cu_seqlens` are int64, and the initial state is float32.
- The kernels are called without their option to normalise queries and keys.
- Log-linear attention takes the weights of levels in q's dtype. Its states are others than ours, so it runs
  without, and ours are computed beside it.
- The solver of ridge attention stops at residuals of 3e-3, whatever their scale. Queries and gradients are therefore
  scaled to sizes near 1, which is exact, because the result is linear in them.

fla is imported only when one of its kernels is asked for, or when `auto` considers it on a CUDA device.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halflife.ops.arguments import cached_constant, not_plain
from halflife.ops.backends import fla_op
from halflife.ops.backends.fla_op import function as _function
from halflife.ops.call import Call
from halflife.ops.chunked.decays import FLOOR

MATRICES = ("q", "k", "v", "a", "b")
# Earlier versions give wrong gradients of the delta rule on Hopper and past 2³¹ elements. Later ones are not tested.
VERSIONS = ((0, 6), (0, 7))
CHUNKS = {"linear_attention": 64, "delta_rule": 64, "ridge_attention": 64, "dplr": 16}  # tokens of fla's chunks
UNSEEN = ("forgetting_attention", "log_linear_attention", "ridge_attention")  # not calls of `fla_op`, so Dynamo stops


def why_not(op: str, device: torch.device, call: Call | None = None) -> str | None:
    """Return the reason why fla cannot run `op` on `device`, or would give wrong results; None if it can.

    Without a call, only the device and the installed packages are judged.
    """
    if torch.compiler.is_compiling() and op in UNSEEN:
        return f"torch.compile cannot see fla's kernels of {op}"
    if device.type != "cuda":
        return f"fla's kernels run on CUDA devices, not on {device.type}"
    versions = _versions()
    if isinstance(versions, str):
        return versions
    if not VERSIONS[0] <= versions[0] < VERSIONS[1]:
        least, below = map(_text, VERSIONS)
        return f"the adapter is for fla-core ≥ {least}, < {below}; {_text(versions[0])} is installed"
    return None if call is None else _refused(call) or _known_wrong(call, device, versions[1])


def why_not_forgetting(op: str, device: torch.device, tensors: Sequence[Tensor] | None = None) -> str | None:
    """`why_not` of forgetting attention, a pass over `q, k, v, g`."""
    if (reason := why_not(op, device)) is not None or tensors is None:
        return reason
    q, k, v, _ = tensors
    key, value = q.shape[-1], v.shape[-1]
    if (reason := _misfit(tensors, (q, k, v), key, value, q.shape[0] * q.shape[2])) is not None:
        return reason
    if max(key, value) > 256:
        return f"fla's {op} takes heads of at most 256; K is {key}, V is {value}"
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if differentiated and k.shape[2] != q.shape[2]:
        return f"fla's {op} gives log-decays the gradient of the {k.shape[2]} heads of k, not of the {q.shape[2]} of q"
    return _wrong_on_hopper(device, _triton(), key, value, differentiated)


def _refused(call: Call) -> str | None:
    op, q, key, value = call.op, call["q"], call.sizes["K"], call.sizes["V"]
    heads, groups = call.sizes["H"], (q.shape[2], call["k"].shape[2])
    matrices = [x for name in MATRICES if (x := call.get(name)) is not None]
    odd = _misfit((*call.tensors.values(), *(call.state or ())), matrices, key, value, q.shape[0] * heads)
    if odd is not None:
        return odd
    if op != "linear_attention" and key > 256:
        return f"fla's {op} holds states of at most 256 rows; K is {key}"
    shares = (op == "delta_rule" and call["g"] is not None) or op == "log_linear_attention"
    if groups != (heads, heads) and (groups[0] != groups[1] or not shares):
        return (
            "fla shares heads of q and k in its gated delta rule and log-linear attention alone, and equally many of "
            f"both; q and k have {groups[0]} and {groups[1]} for {heads} of v"
        )
    if op == "ridge_attention" and (key != value or key > 128):
        return f"fla's ridge_attention has K = V ≤ 128; K is {key}, V is {value}"
    return _refused_levels(call) if op == "log_linear_attention" else None


def _refused_levels(call: Call) -> str | None:
    key, value, levels = (call.sizes[letter] for letter in "KVL")
    if call.state is not None:
        return "fla's log_linear_attention starts from no state; its own has the tokens of an unfinished chunk in it"
    if key not in (64, 128) or value not in (16, 32, 64, 128):
        return f"fla's log_linear_attention takes K of 64 or 128 and V of 16, 32, 64 or 128; K is {key}, V is {value}"
    longest = call.packing.longest
    if longest > 1 << 17 or longest > 1 << (levels - 1):
        return f"fla's log_linear_attention has one level a distance; {levels} levels do not reach {longest} tokens"
    return None


def _misfit(tensors: Sequence[Any], matrices: Sequence[Tensor], key: int, value: int, programs: int) -> str | None:
    if (odd := not_plain(*tensors)) is not None:
        return odd
    dtype = matrices[0].dtype
    if dtype not in (torch.bfloat16, torch.float16):
        return f"fla multiplies in bfloat16 or float16 (float32 in TF32, three digits); the inputs are {dtype}"
    if len({x.dtype for x in matrices}) > 1:
        return "fla takes all of its matrices in one dtype"
    if matrices[0].shape[1] == 0:
        return "fla cannot launch on no tokens"
    if min(key, value) < 16 or key % 2 or value % 2:
        return f"fla's head sizes are even and at least 16; K is {key}, V is {value}"
    if programs > 65535:
        return f"fla launches at most 65535 heads over the batch; these are {programs}"
    return None


def _known_wrong(call: Call, device: torch.device, triton: tuple[int, ...]) -> str | None:
    """The reason why the results would be wrong on this device with this version of Triton, or None."""
    g = call["g"]
    if call.op == "dplr" or (g is not None and g.ndim == 4):  # other kernels, without these faults
        return None
    gated = g is not None and call.differentiated
    if (reason := _wrong_on_hopper(device, triton, call.sizes["K"], call.sizes["V"], gated)) is not None:
        return reason
    if call.op == "delta_rule" and _capability(device) >= 10 and triton < (3, 8):
        return f"fla's delta rule races and gives NaN on Blackwell with Triton below 3.8; {_text(triton)} is installed"
    return None


def _wrong_on_hopper(device: torch.device, triton: tuple[int, ...], key: int, value: int, gated: bool) -> str | None:
    """The reason why Triton miscompiles kernels of these heads on Hopper, where `gated` gradients are asked for."""
    if _capability(device) != 9:
        return None
    if gated and (3, 4) <= triton < (3, 7, 1):
        return f"fla's gated gradients are wrong on Hopper with Triton 3.4.0 to 3.7.0; {_text(triton)} is installed"
    # Without a decay K = 32, V = 48 crashed on an H100, and K = V = 64 was right (docs/log.md, 2026-11-26).
    if key % 64 or value % 64:
        return f"fla's kernels crash on Hopper with some heads; sizes must be multiples of 64; K is {key}, V is {value}"
    return None


@cached_constant
def _capability(device: torch.device) -> int:
    """The major compute capability of an NVIDIA device (9: Hopper, 10 and above: Blackwell); 0 for AMD's."""
    return 0 if torch.version.hip else torch.cuda.get_device_capability(device)[0]


@cached_constant
def _versions() -> tuple[tuple[int, ...], tuple[int, ...]] | str:
    """The versions of fla-core and Triton, or the reason why they cannot be used."""
    if importlib.util.find_spec("fla") is None:
        return "fla-core is not installed (pip install fla-core)"
    try:
        fla, triton = (importlib.import_module(name) for name in ("fla", "triton"))
        importlib.import_module("fla.ops.simple_gla")
    except Exception as error:  # a foreign import may raise anything
        return f"fla-core cannot be imported: {type(error).__name__}: {error}"
    return _release(fla.__version__), _release(triton.__version__)


def _triton() -> tuple[int, ...]:
    versions = _versions()
    assert not isinstance(versions, str)
    return versions[1]


def _text(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _release(version: str) -> tuple[int, ...]:
    """`"3.7.1+git"` → `(3, 7, 1)`."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])


def linear_attention(call: Call) -> tuple[Tensor, Tensor]:
    """Run `chunk_gla` for vector decays, else `chunk_simple_gla`."""
    g = call["g"]
    name = "gla" if g is not None and g.ndim == 4 else "simple_gla"
    return _run(f"{name}.chunk_{name}", call, g=_clamped(g))


def delta_rule(call: Call) -> tuple[Tensor, Tensor]:
    """Run `chunk_delta_rule`, `chunk_gated_delta_rule` (scalar decays) or `chunk_kda` (vector decays)."""
    g, beta = call["g"], call["beta"]
    if g is None:
        return _run("delta_rule.chunk_delta_rule", call, beta=beta)
    name = "kda" if g.ndim == 4 else "gated_delta_rule"
    return _run(f"{name}.chunk_{name}", call, g=_clamped(g), beta=beta)


def dplr(call: Call) -> tuple[Tensor, Tensor]:
    """Run `chunk_dplr_delta_rule`, which takes vector decays only."""
    g, shape = call["g"], call["q"].shape
    if g is None:
        g = call["q"].new_zeros(shape, dtype=torch.float32)
    elif g.ndim == 3:
        g = g.unsqueeze(-1).expand(shape)
    return _run("generalized_delta_rule.chunk_dplr_delta_rule", call, a=call["a"], b=call["b"], gk=_clamped(g))


def log_linear_attention(call: Call) -> Tensor:
    """Run `chunk_log_linear_attn` without its states."""
    q = call["q"]
    o, _ = _function("log_linear_attn.chunk_log_linear_attn")(
        q, call["k"], call["v"], _clamped(call["g"]), call["weights"].to(q.dtype), scale=float(call.output_scale),
        cu_seqlens=_bounds(call),
    )  # fmt: skip
    return o.to(call.output_dtype)


def ridge_attention(call: Call) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run `chunk_mesa_net`, with all `iterations` and no tolerance."""
    q = call["q"]
    size = q.detach().float().norm(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    tensors = (
        (q / size).half(), call["k"], call["v"], _clamped(call["g"]),
        *(call[name].float() for name in ("beta", "ridge")), *call.first_states(torch.float32),
    )  # fmt: skip
    solve = partial(
        _function("mesa_net.chunk_mesa_net"), output_final_state=True, max_CG_iteration=call.options["iterations"],
        cu_seqlens=_bounds(call),
    )  # fmt: skip
    y, gram, values = _ScaledGradients.apply(solve, *tensors) if call.differentiated else solve(*tensors)
    return (y * size).to(call.output_dtype), (gram, values)


class _ScaledGradients(torch.autograd.Function):
    """Runs `function(*tensors)` with a backward pass on gradients whose largest entry is `SIZE`, and scales back."""

    SIZE = 8.0

    @staticmethod
    def forward(ctx, function, *tensors):
        ctx.leaves = [x.detach().requires_grad_() for x in tensors]
        with torch.enable_grad():
            ctx.outputs = function(*ctx.leaves)
        return tuple(x.detach() for x in ctx.outputs)

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled():  # only under create_graph=True
            raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
        largest = torch.stack([grad.abs().amax().float() for grad in grads]).amax().clamp(min=1e-30)
        scaled = [(grad * (_ScaledGradients.SIZE / largest)).to(grad.dtype) for grad in grads]
        found = torch.autograd.grad(ctx.outputs, ctx.leaves, scaled, retain_graph=True)
        return None, *((grad * (largest / _ScaledGradients.SIZE)).to(grad.dtype) for grad in found)


def forgetting_attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """Run `parallel_forgetting_attn`."""
    return _function("forgetting_attn.parallel_forgetting_attn")(q, k, v, _clamped(g), scale=q.shape[-1] ** -0.5)


def _bounds(call: Call) -> Tensor | None:
    """The boundaries in int64, one tensor for all layers: fla waits for the device once for each tensor that is new.

    Where the host knows the lengths, fla finds that it has the chunks of this tensor already.
    """
    packing, chunk = call.packing, CHUNKS.get(call.op)
    if packing.cu_seqlens is None:
        return None
    if "int64" not in packing.kept:
        packing.kept["int64"] = packing.cu_seqlens.to(torch.int64)
    bounds = packing.kept["int64"]
    if chunk and packing.is_known and ("fla", chunk) not in packing.kept and not torch.compiler.is_compiling():
        index_of_chunks = fla_op.function("utils.prepare_chunk_indices")
        with fla_op.OutputSize(sum(-(-n // chunk) for n in packing.counts)):
            for options in ({}, {"cu_seqlens_cpu": None}):  # as fla calls it; its cache keeps them apart
                packing.kept["fla", chunk] = index_of_chunks(bounds, chunk, **options)
    return bounds


def _run(name: str, call: Call, **gates: Tensor | None) -> tuple[Tensor, Tensor]:
    """Call `fla.ops.<name>` on q, k, v and these gates; return `(o, final state [N, H, K, V])`."""
    tensors = {
        "q": call["q"], "k": call["k"], "v": call["v"], **gates,
        "initial_state": None if call.state is None else call.state[0].float(),
        "cu_seqlens": _bounds(call),
    }  # fmt: skip
    if torch.compiler.is_compiling():
        given = {name: x for name, x in tensors.items() if x is not None}
        o, state = fla_op.run(name, [*given], [*given.values()], float(call.output_scale))
    else:
        o, state = fla_op.call(name, tensors, float(call.output_scale))
    return o.to(call.output_dtype), state


def _clamped(g: Tensor | None) -> Tensor | None:
    """Log-decays in float32, clamped (with gradient 0) where e^g is 0 in float32; None stays None."""
    return None if g is None else g.float().clamp(min=FLOOR[torch.float32])
