"""The two graphs of a model as ONNX files, checked by onnxruntime."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from halflife.export.graphs import check_max_length, export, fixed_caches, flat, initial_state, names, needs_loop
from halflife.files import write_json
from halflife.models.lm import LanguageModel, ModelState
from halflife.models.tensor_file import write_tensors

LARGEST_DIFFERENCE = 1e-4  # between a graph and the model
STEP, PROMPT = "step.onnx", "prompt.onnx"
INITIAL, ABOUT = "initial_state.safetensors", "graphs.json"
AFTER = ".after"  # ends the name of an output that is a state


# An operation that ONNX does not have, in operations that it has.
DECOMPOSITIONS: dict[Any, Any] = {torch.ops.aten.hypot.default: lambda x, y: (x.square() + y.square()).sqrt()}


@dataclass(frozen=True)
class Written:
    """A graph that was written and checked."""

    path: Path
    tokens: int  # tokens of a piece
    form: str  # "step" for one token; "chunked", or "token loop" where a graph or ONNX cannot express a chunked form
    difference: float  # largest difference of logits and states from the model's, relative to the largest entry of each


def write_onnx(
    model: LanguageModel, folder: Path, tokens: int = 16, batch: int = 1, max_length: int | None = None
) -> list[Written]:
    """Write both graphs, the state before the first token, and a description of them.

    The model is in evaluation mode, in float32 on the CPU. A piece of the prompt graph has `tokens` tokens. The other
    arguments are those of `graphs.export`.
    """
    check_max_length(model, tokens, max_length)
    folder.mkdir(parents=True, exist_ok=True)
    state = initial_state(model, batch, max_length)
    files = ((STEP, 1), (PROMPT, tokens))
    graphs = [write_graph(model, folder / file, count, state, max_length) for file, count in files]
    tensors = dict(zip(names(state), flat(state), strict=True))
    write_tensors(folder / INITIAL, tensors, {"format": "pt"})
    write_json(
        folder / ABOUT,
        {
            "model": model.config.to_dict(), "batch": batch, "max_length": max_length,
            "graphs": {graph.path.name: {"tokens": graph.tokens, "form": graph.form} for graph in graphs},
            "inputs": ["ids", *tensors], "outputs": ["logits", *(name + AFTER for name in tensors)],
            "state": {name: [str(x.dtype).removeprefix("torch."), *x.shape] for name, x in tensors.items()},
        },
    )  # fmt: skip
    return graphs


def write_graph(model: LanguageModel, path: Path, tokens: int, state: ModelState, max_length: int | None) -> Written:
    """Write the graph of one piece, and compare it with the model on random tokens; arguments as in `write_onnx`."""
    loop = needs_loop(model)
    try:
        program = _convert(model, tokens, state, max_length, loop)
    except _NoOperation:
        if loop:
            raise
        loop, program = True, _convert(model, tokens, state, max_length, loop=True)
    program.save(str(path))
    with fixed_caches(model, max_length):
        pieces = 2 if max_length is None else min(2, max_length // tokens)
        difference = _difference(model, path, tokens, state, pieces)
    if not difference <= LARGEST_DIFFERENCE:
        for file in path.parent.glob(f"{path.name}*"):  # large weights are in a file beside the graph
            file.unlink()
        raise ValueError(f"{path} differs from the model by {difference:.1e}, more than {LARGEST_DIFFERENCE:.0e}")
    return Written(path, tokens, "step" if tokens == 1 else "token loop" if loop else "chunked", difference)


class _NoOperation(ValueError):
    """ONNX has no operation that the graph needs."""


def _convert(model: LanguageModel, tokens: int, state: ModelState, max_length: int | None, loop: bool) -> Any:
    inputs = names(state)
    graph = export(model, tokens, len(state[0]["position"]), loop, max_length).run_decompositions(DECOMPOSITIONS)
    what = f"how {model.config.name} reads {tokens} token{'s' if tokens > 1 else ''} at once"
    return to_onnx(graph, ["ids", *inputs], ["logits", *(name + AFTER for name in inputs)], what)


def to_onnx(graph: ExportedProgram, inputs: list[str], outputs: list[str], what: str) -> Any:
    """The ONNX program of a graph of torch, with these names. A ValueError says that ONNX cannot express `what`."""
    try:
        return torch.onnx.export(graph, dynamo=True, verbose=False, input_names=inputs, output_names=outputs)
    except Exception as error:  # the exporter wraps whatever stopped it
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        raise _NoOperation(f"ONNX cannot express {what}: {' '.join(str(reason).split())[:300]}") from error


@torch.no_grad()
def _difference(model: LanguageModel, path: Path, tokens: int, state: ModelState, pieces: int) -> float:
    """The largest difference of logits, and of those tensors of the state that the model has in the same shape."""
    session = import_module("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    draw = torch.Generator().manual_seed(0)
    worst, batch = 0.0, len(state[0]["position"])
    given: list[Any] = [x.numpy() for x in flat(state)]
    inputs = [entry.name for entry in session.get_inputs()]
    for _ in range(pieces):
        ids = torch.randint(model.config.vocab_size, (batch, tokens), generator=draw)
        logits, state = model(ids, state)
        found = session.run(None, dict(zip(inputs, [ids.numpy(), *given], strict=True)))
        given = list(found)[1:]
        expected = {"ids": logits, **dict(zip(names(state), flat(state), strict=True))}
        pairs = [(torch.from_numpy(x), expected.get(name)) for name, x in zip(inputs, found, strict=True)]
        worst = max(worst, *(_relative(x, y) for x, y in pairs if y is not None and x.shape == y.shape))
    return worst


def _relative(got: Tensor, expected: Tensor) -> float:
    scale = expected.double().abs().max().clamp(min=1e-6)
    return float((got.double() - expected.double()).abs().max() / scale)
