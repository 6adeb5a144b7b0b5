"""One sequence over several processes: each has a piece of it, and states pass from one process to the next.

    context = context_parallel(model, group)
    logits, _ = model(context.piece.of(ids))

A block of rank r waits for the state that the same block of rank r − 1 ends with, and its own goes to rank r + 1 while
the next block runs. Gradients of states go back the same way. Nothing but states is sent, so the bytes do not depend on
the length, and no layer needs to know: what reads a sequence in pieces reads it on several processes. Ranks work one
block apart. A pass of N ranks over L blocks takes as long as L + N − 1 blocks of one piece.
"""

from __future__ import annotations

import atexit
import json
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from halflife.layers import SharedTensors, State
from halflife.layers.mixer import Mixer
from halflife.models.lm import Backbone
from halflife.packing import Packing
from halflife.parallel.pieces import Piece, Pieces

__all__ = ["ContextParallel", "InTurn", "Piece", "Pieces", "context_parallel", "read_as_a_whole"]

HEADER = 2  # numbers before each message: the bytes of its description and of its tensors
UNDER_WAY = 4  # messages that a rank may have sent before the first of them is received: two states
# Messages, and the memory that they are sent from, by group: a rank may drop its model before the next one has them.
_UNDER_WAY: WeakKeyDictionary[Any, deque[tuple[Any, Tensor]]] = WeakKeyDictionary()
atexit.register(_UNDER_WAY.clear)  # before the threads of the group end


def context_parallel(model: nn.Module, group: Any = None) -> ContextParallel:
    """Let a model read sequences of which each process of a group has a piece, in the order of their ranks.

    Its ids, labels, masks and logits are those of the piece from then on, and the state it returns is the one after the
    piece. A state that it is given counts on the first rank, and for sequences that begin in the piece. Every rank sums
    the loss of its own piece. Gradients add up over the ranks (`ContextParallel.add_gradients`).

    Args:
        model: a `LanguageModel`, a model of `halflife.hf`, or a module with one inside.
        group: a `torch.distributed.ProcessGroup`, a `DeviceMesh` of one dimension, or None for all processes.

    Raises:
        ValueError: the model has layers that read a sequence in pieces otherwise than as a whole; there is no process
            group; or the module holds no model of ours.
    """
    if names := read_as_a_whole(model):
        raise ValueError(f"these layers read a sequence in pieces otherwise than as a whole: {', '.join(names)}")
    backbones = [part for part in model.modules() if isinstance(part, Backbone)]
    if not backbones:
        raise ValueError(f"{type(model).__name__} holds no model of halflife")
    context = ContextParallel(group)
    for backbone in backbones:
        backbone.context_parallel = context
    return context


def read_as_a_whole(model: nn.Module) -> list[str]:
    """The names of the layers that read a sequence in pieces otherwise than as a whole."""
    return [name for name, part in model.named_modules() if isinstance(part, Mixer) and not part.reads_in_pieces]


class ContextParallel:
    """The processes of a group as one line along the sequence, in the order of their ranks; see `context_parallel`.

    Attributes:
        rank, size: the place of this process, and their number.
        piece: the piece of this process.
        sent: bytes that this process has sent, gradients included.
    """

    def __init__(self, group: Any = None) -> None:
        if group is None:
            group = torch.distributed.group.WORLD
        self.group: Any = group.get_group() if hasattr(group, "get_group") else group
        if self.group is None:
            raise ValueError("there is no process group: call torch.distributed.init_process_group, or use torchrun")
        self.rank, self.size = self.group.rank(), self.group.size()
        self.piece, self.sent = Piece(self.rank, self.size), 0

    def add_gradients(self, model: nn.Module) -> None:
        """Add up the gradients of all parameters over the ranks. A parameter that no rank has used stays without.

        Parameters may be shards of FSDP2 over other ranks: those with the same piece of other rows.
        """
        parameters = [x for x in model.parameters() if x.requires_grad]
        used = torch.tensor([float(x.grad is not None) for x in parameters], device=_local(parameters[0]).device)
        self.group.allreduce([used]).wait()
        waiting = []
        for x, count in zip(parameters, used.tolist(), strict=True):
            if count:
                x.grad = torch.zeros_like(x) if x.grad is None else x.grad
                waiting.append(self.group.allreduce([_local(x.grad)]))
        for work in waiting:
            work.wait()

    def around(
        self, run: Callable[..., tuple[Tensor, State]], padded: bool = False
    ) -> Callable[..., tuple[Tensor, State]]:
        """Let a block, or a function that runs it, begin with the state of the rank before and pass its own on.

        Of packed sequences, the last one continues on the next rank; of `padded` rows, which are packed too, all do.
        """
        return partial(self._run, run, padded)

    def _run(
        self, run: Callable[..., tuple[Tensor, State]], padded: bool, x: Tensor, state: State | None, packing: Packing,
        **options: Any,
    ) -> tuple[Tensor, State]:  # fmt: skip
        packed = packing.cu_seqlens is not None and not padded
        if self.rank > 0:
            if packed and not state:
                state = self._fresh(run, x, packing, options)
            entering, trained = self._receive(self.rank - 1, x.device)
            if trained and not torch.is_grad_enabled():
                raise RuntimeError("the rank before records gradients, and this one does not: use one mode on all")
            x, entering = self._enter(x, entering, trained)
            state = self._rows(entering, state)
        y, state = run(x, state, packing, **options)
        if self.rank + 1 < self.size:
            y, state = self._leave(y, state, slice(-1 if packed else None, None))
        return y, state

    def _enter(self, x: Tensor, state: State, trained: list[str]) -> tuple[Tensor, State]:
        if not trained:
            return x, state
        leaves = [state[name].requires_grad_() for name in trained]
        x, *parts = _Enter.apply(self, x, *leaves)
        return x, {**state, **dict(zip(trained, parts, strict=True))}

    def _rows(self, entering: State, others: State | None) -> State:
        """The states before this piece: the one received, and for further packed sequences those given, or fresh."""
        if not others or len(others["position"]) == len(entering["position"]):
            return entering
        return {name: _stacked(part, others[name][len(part) :].to(part)) for name, part in entering.items()}

    @torch.no_grad()
    def _fresh(self, run: Any, x: Tensor, packing: Packing, options: dict[str, Any]) -> State:
        nothing = Packing(1, 0, torch.zeros(packing.num_sequences + 1, dtype=torch.long, device=x.device))
        if (shared := options.get("shared")) is not None:
            options = {"shared": SharedTensors({name: shared[name][:, :0] for name in shared})}
        return run(x[:, :0].detach(), None, nothing, **options)[1]

    def _leave(self, y: Tensor, state: State, last: slice) -> tuple[Tensor, State]:
        trained = [name for name, part in state.items() if part.requires_grad and torch.is_grad_enabled()]
        self._send(self.rank + 1, {name: part[last] for name, part in state.items()}, trained)
        if trained:
            y, *parts = _Leave.apply(self, last, y, *(state[name] for name in trained))
            state = {**state, **dict(zip(trained, parts, strict=True))}
        return y, state

    def _send(self, rank: int, tensors: State, trained: list[str]) -> None:
        """Send tensors in two messages: their names, dtypes and shapes with their sizes, and their bytes."""
        sent = _UNDER_WAY.setdefault(self.group, deque())
        order = sorted(tensors, key=lambda name: -tensors[name].element_size())  # each begins where its dtype may
        listed = [(name, str(tensors[name].dtype), tensors[name].shape, name in trained) for name in order]
        text = json.dumps(listed).encode()
        device = next(iter(tensors.values())).device
        description = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        flat = [tensors[name].detach().contiguous().flatten().view(torch.uint8) for name in order]
        body = torch.cat([*flat, description])
        for message in (torch.tensor([len(text), len(body)], device=device), body):
            if len(sent) == UNDER_WAY:  # under gloo a message never counts as received before somebody waits for it
                sent.popleft()[0].wait()
            sent.append((self.group.send([message], rank, 0), message))
            self.sent += message.nbytes

    def _receive(self, rank: int, device: torch.device) -> tuple[State, list[str]]:
        """The tensors of a message, and the names of those that a gradient is awaited for."""
        header = torch.empty(HEADER, dtype=torch.long, device=device)
        self.group.recv([header], rank, 0).wait()
        described, total = header.tolist()
        body = torch.empty(total, dtype=torch.uint8, device=device)
        self.group.recv([body], rank, 0).wait()
        listed = json.loads(bytes(body[total - described :].tolist()))
        tensors, start = {}, 0
        for name, dtype, shape, _ in listed:
            kind = getattr(torch, dtype.removeprefix("torch."))
            stop = start + torch.Size(shape).numel() * kind.itemsize
            tensors[name] = body[start:stop].view(kind).view(shape).clone()
            start = stop
        return tensors, [name for name, *_, is_trained in listed if is_trained]


class InTurn(ContextParallel):
    """The pieces of a sequence one after the other in this process, without gradients."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self._states: deque[State] = deque()  # of the blocks, in their order

    def pieces(self) -> Iterator[Piece]:
        """The pieces, each of which a model has to read before the next."""
        for rank in range(self.size):
            self.rank = rank
            yield Piece(rank, self.size)

    def _send(self, rank: int, tensors: State, trained: list[str]) -> None:
        self._states.append(tensors)

    def _receive(self, rank: int, device: torch.device) -> tuple[State, list[str]]:
        return self._states.popleft(), []


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _stacked(a: Tensor, b: Tensor) -> Tensor:
    """The rows of two states. Caches of softmax attention, and levels of log-linear, may have free slots behind."""
    slots = [max(sizes) for sizes in zip(a.shape[1:], b.shape[1:], strict=True)]

    def grown(x: Tensor) -> Tensor:
        missing = [size - had for size, had in zip(slots, x.shape[1:], strict=True)]
        return F.pad(x, [n for m in reversed(missing) for n in (0, m)]) if any(missing) else x

    return torch.cat([grown(a), grown(b)])


class _Enter(torch.autograd.Function):
    """The identity of x and of a received state, whose gradients go to the rank that sent it.

    x is there so that the gradients are sent wherever x has one, even if no token has read the state.
    """

    @staticmethod
    def forward(ctx, line: ContextParallel, x: Tensor, *state: Tensor):  # type: ignore[override]
        ctx.line = line
        return x.view_as(x), *(part.view_as(part) for part in state)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx: Tensor, *grads: Tensor):  # type: ignore[override]
        ctx.line._send(ctx.line.rank - 1, {str(i): grad for i, grad in enumerate(grads)}, [])
        return None, dx, *[None] * len(grads)


class _Leave(torch.autograd.Function):
    """The identity of y and of a state that was sent, whose gradients come from the rank that received it."""

    @staticmethod
    def forward(ctx, line: ContextParallel, last: slice, y: Tensor, *state: Tensor):  # type: ignore[override]
        ctx.line, ctx.last = line, last
        return y.view_as(y), *(part.view_as(part) for part in state)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor, *grads: Tensor):  # type: ignore[override]
        received, _ = ctx.line._receive(ctx.line.rank + 1, dy.device)
        sums = [grad.clone() for grad in grads]
        for i, total in enumerate(sums):
            total[ctx.last] += received[str(i)]
        return None, None, dy, *sums
