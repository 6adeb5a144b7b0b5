"""A step of a model that also returns what a lens shows, as a graph of the playground.

Columns of the identity run beside the values of every op: token t writes the column of its slot. What the op reads from
the columns are the weights of the tokens, and the norm of a column of the state, over its norm right after its token,
is the share of the write that is left. These are the numbers of `lens`, token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from halflife.export.graphs import Piece, flat, initial_state, names, plain
from halflife.export.onnx import DECOMPOSITIONS, to_onnx
from halflife.files import atomic_path
from halflife.models.lm import LanguageModel
from halflife.ops.backends import dispatch
from halflife.ops.call import Call

FEWEST_ENTRIES = 1024  # of a matrix that is rounded
OPS = ("linear_attention", "delta_rule", "dplr")  # their state is one matrix `[1, H, K, V]`
SEEN = ("weights", "norms", "size")  # of a layer: `[H, N]`, `[H, N]` and the norm of the token's value, `[H]`


class LensStep(nn.Module):
    """`logits, *after, *columns, *seen = step(ids, slot, *state, *columns)` for one token.

    Args:
        model: a model whose mixers have one op on a state each, and the op is one of `OPS`.
        slots: N, the most tokens of a text.
    """

    def __init__(self, model: LanguageModel, slots: int) -> None:
        super().__init__()
        state = initial_state(model)
        self.piece, self.slots = Piece(model, [list(layer) for layer in state]), slots
        self.state, self.names = flat(state), names(state)
        with _widened(torch.zeros(slots, dtype=model.embedding.weight.dtype), None) as seen:
            self.piece(torch.zeros(1, 1, dtype=torch.long), *self.state)
        if len(seen) != len(model.blocks):
            raise ValueError(
                f"{model.config.name} has {len(seen)} ops of {', '.join(OPS)} in {len(model.blocks)} layers"
            )
        self.columns = [torch.zeros_like(columns) for columns, *_ in seen]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The arguments for the first token, with id 0."""
        slot = torch.zeros(self.slots, dtype=self.columns[0].dtype)
        return torch.zeros(1, 1, dtype=torch.long), slot, *self.state, *self.columns

    @property
    def input_names(self) -> list[str]:
        """The names of the arguments."""
        return ["ids", "slot", *self.names, *(f"{layer}.columns" for layer in range(len(self.columns)))]

    @property
    def output_names(self) -> list[str]:
        """The names of the results: a state has the name of its argument and ".after"."""
        seen = (f"{layer}.{name}" for name in SEEN for layer in range(len(self.columns)))
        return ["logits", *(f"{name}.after" for name in self.input_names[2:]), *seen]

    def forward(self, ids: Tensor, slot: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """Read one token, `ids [1, 1]`, whose place in the text is the 1 in `slot [N]`."""
        count = len(self.state)
        with _widened(slot, iter(given[count:])) as seen:
            logits, *after = self.piece(ids, *given[:count])
        return logits, *after, *(x for kind in zip(*seen, strict=True) for x in kind)


@contextmanager
def _widened(slot: Tensor, columns: Iterator[Tensor] | None) -> Iterator[list[tuple[Tensor, ...]]]:
    """Give every op further values, `slot`, and further columns of its state; None is zeros.

    The list gets the new columns of each op and its `SEEN`.
    """
    choose, seen, inside = dispatch.implementation_of, [], False

    def chosen(call: Call, backend: str) -> Any:
        if inside or call.op not in OPS:
            return choose(call, backend)

        def run(call: Call) -> tuple[Tensor, Tensor]:
            nonlocal inside
            call = dispatch.folded(call)  # columns have no gain
            v, state = call["v"], call.first_state()
            before = state.new_zeros(*state.shape[:-1], len(slot)) if columns is None else next(columns)
            values = torch.cat([v, slot.to(v.dtype).expand(*v.shape[:-1], -1)], -1)
            wide = Call.of(
                call.op, {**call.tensors, "v": values}, torch.cat([state, before], -1), scale=call.scale,
                chunk_size=call.chunk_size, **call.options,
            )  # fmt: skip
            inside = True
            try:
                o, after = choose(wide, backend)(wide)
            finally:
                inside = False
            width = v.shape[-1]
            added = after[..., width:]
            seen.append((added, o[0, -1, :, width:], added[0].norm(dim=-2), v[0, -1].norm(dim=-1)))
            return o[..., :width], after[..., :width]

        return run

    with patch.object(dispatch, "implementation_of", chosen):
        yield seen


def write_lens(model: LanguageModel, path: Path, slots: int) -> LensStep:
    """Write the step of a model with its lens as an ONNX file with int8 weights, to which the model is rounded.

    Args:
        model: the model in evaluation mode, in float32 on the CPU.
        slots: N, the most tokens of a text.

    Raises:
        ValueError: the model has no such step, or ONNX cannot express it.
    """
    round_weights(model)
    step = LensStep(model, slots).eval()
    with plain(model):
        graph = torch.export.export(step, step.inputs, strict=False).run_decompositions(DECOMPOSITIONS)
    to_onnx(graph, step.input_names, step.output_names, f"a step of {model.config.name}").save(str(path))
    store_int8(path)
    return step


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Round the rows of every large matrix to multiples of 1/127 of their largest entries, in place.

    A file may then hold them as int8 (`store_int8`), and the model gives what the file gives.
    """
    for weight in model.parameters():
        if weight.ndim == 2 and weight.numel() >= FEWEST_ENTRIES:
            scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
            weight.copy_((weight / scale).round() * scale)


def store_int8(path: Path) -> None:
    """Let an ONNX file hold the weights that `round_weights` has rounded as int8, and their scales beside them."""
    onnx = import_module("onnx")
    model, nodes = onnx.load(path), []
    for tensor in list(model.graph.initializer):
        weight = onnx.numpy_helper.to_array(tensor)
        if weight.ndim != 2 or weight.dtype != np.float32 or weight.size < FEWEST_ENTRIES:
            continue
        for axis in (0, 1):  # of the rows, which are columns of a transposed matrix
            scale = np.abs(weight).max(1 - axis, keepdims=True).clip(1e-12) / np.float32(127)
            integers = np.round(weight / scale)
            if np.allclose(integers * scale, weight, rtol=1e-5, atol=0):
                break
        else:
            continue
        name = tensor.name
        model.graph.initializer.remove(tensor)
        for part, array in (("int8", integers.astype(np.int8)), ("scale", scale)):
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, f"{name}.{part}"))
        # Behind DequantizeLinear, onnxruntime would round the activations too.
        nodes.append(onnx.helper.make_node("Cast", [f"{name}.int8"], [f"{name}.float"], to=onnx.TensorProto.FLOAT))
        nodes.append(onnx.helper.make_node("Mul", [f"{name}.float", f"{name}.scale"], [name]))
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    for node in model.graph.node:
        del node.metadata_props[:]  # the lines of Python that it came from
    onnx.checker.check_model(model)
    with atomic_path(path) as temporary:
        temporary.write_bytes(model.SerializeToString())
