"""A piece of a sequence as a graph of torch's own operations: ids and state in, logits and state out.

A recurrent model needs two graphs. The step graph reads one token. The prompt graph reads a piece of a fixed number of
tokens, so a prompt is read in pieces and the rest token by token. Both take the state that the other returned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from halflife.layers import LAYERS
from halflife.models.lm import LanguageModel, ModelState
from halflife.ops import fused
from halflife.ops.backends.native import build

# Layers that have no graph of fixed shapes, and the reasons.
REFUSED = {
    "attention": "its cache of keys and values grows with every token, so no state has a fixed shape",
    "ska": "it refreshes its operator when a chunk is full, and how full it is depends on the state's values",
}


class Piece(nn.Module):
    """`logits, state = piece(ids, *state)` with the tensors of the state one after the other.

    Args:
        model: the model.
        names: names of the tensors of each layer's state.
    """

    def __init__(self, model: LanguageModel, names: list[list[str]]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, ids: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Read `ids [B, T]`."""
        tensors = iter(state)
        layers = tuple({name: next(tensors) for name in names} for names in self.names)
        logits, after = self.model(ids, layers)
        return logits, *(after[i][name] for i, names in enumerate(self.names) for name in names)


def check(model: LanguageModel) -> None:
    """Check that every layer has a graph.

    Raises:
        ValueError: some have none; the message names each with the reason.
    """
    kinds = {name: LAYERS[name] for name in REFUSED}
    found: dict[str, list[str]] = {}
    for place, module in model.named_modules():
        for name, kind in kinds.items():
            if isinstance(module, kind):
                found.setdefault(name, []).append(place)
    if found:
        reasons = "; ".join(f"{name} ({', '.join(places)}): {REFUSED[name]}" for name, places in found.items())
        raise ValueError(f"{model.config.name} cannot be exported because of {reasons}")


@torch.no_grad()
def initial_state(model: LanguageModel, batch: int = 1) -> ModelState:
    """Return the state before the first token as tensors, from which a graph gives what `model(ids)` gives.

    Raises:
        ValueError: neither zeros nor a log-sum of nothing, −∞, is that state.
    """
    ids = torch.arange(5, device=model.embedding.weight.device).remainder(model.config.vocab_size).expand(batch, -1)
    expected, after = model(ids)
    zeros = tuple({name: torch.zeros_like(x) for name, x in layer.items()} for layer in after)
    sums = tuple(
        {name: x - torch.inf if name.endswith("decay") else x for name, x in layer.items()} for layer in zeros
    )  # fmt: skip
    for state in (zeros, sums):
        if torch.equal(model(ids, state)[0], expected):
            return state
    raise ValueError(f"{model.config.name} has no tensors that stand for the state before the first token")


@contextmanager
def plain(model: LanguageModel, loop: bool = False) -> Iterator[None]:
    """Let every op run in plain torch, so that a graph holds no operation of ours.

    Args:
        model: the model.
        loop: whether ops run token by token, also where a layer would choose their chunked form.
    """
    layers: list[Any] = [module for module in model.modules() if getattr(module, "backend", None) == "auto"]
    before, build.why_not = build.why_not, lambda: "a graph for other programs holds torch's own operations alone"
    try:
        for layer in layers if loop else ():
            layer.backend = "reference"
        with fused.off(), torch.no_grad():
            yield
    finally:
        build.why_not = before
        for layer in layers:
            layer.backend = "auto"


def export(model: LanguageModel, tokens: int = 1, batch: int = 1, loop: bool = False) -> ExportedProgram:
    """Return the graph that reads a piece.

    Args:
        model: the model in evaluation mode, on the CPU.
        tokens: T, tokens of a piece; 1 for the step graph.
        batch: B, sequences.
        loop: whether the graph repeats the step T times instead of the chunked forms of the ops.

    Raises:
        ValueError: a layer has no graph, or torch cannot trace the model; the message gives the reason.
    """
    check(model)
    with plain(model, loop):
        state = initial_state(model, batch)
        piece = Piece(model, [list(layer) for layer in state]).eval()
        ids = torch.zeros(batch, tokens, dtype=torch.long)
        try:
            graph = torch.export.export(piece, (ids, *flat(state)), strict=False)
        except Exception as error:  # what torch raises depends on where it stops
            reason = str(error).strip().split("\n")[0]
            raise ValueError(f"torch cannot export {model.config.name}: {type(error).__name__}: {reason}") from error
    ours = sorted({str(node.target) for node in graph.graph.nodes if "halflife" in str(node.target)})
    if ours:
        raise ValueError(f"the graph of {model.config.name} holds operations of ours: {', '.join(ours)}")
    return graph


def flat(state: ModelState) -> list[Tensor]:
    """Return the tensors of a state one after the other."""
    return [x for layer in state for x in layer.values()]


def names(state: ModelState) -> list[str]:
    """Return a name for each tensor of `flat(state)`: "0.memory"."""
    return [f"{i}.{name}" for i, layer in enumerate(state) for name in layer]
