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

from halflife.layers.attention import Attention
from halflife.layers.memory.log_linear import LogLinear
from halflife.models.lm import LanguageModel, ModelState
from halflife.ops.backends.native import build


class Piece(nn.Module):
    """`logits, state = piece(ids, *state)` with the tensors of the state, of these names in each layer, in a row."""

    def __init__(self, model: LanguageModel, names: list[list[str]]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, ids: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        """Read `ids [B, T]`."""
        tensors = iter(state)
        layers = tuple({name: next(tensors) for name in names} for names in self.names)
        logits, after = self.model(ids, layers)
        return logits, *(after[i][name] for i, names in enumerate(self.names) for name in names)


def growing(model: LanguageModel) -> dict[str, Attention]:
    """Return the layers whose cache grows with every token by their place: softmax attention without a window."""
    attention = ((place, layer) for place, layer in model.named_modules() if isinstance(layer, Attention))
    return {place: layer for place, layer in attention if layer.window is None}


def needs_loop(model: LanguageModel) -> bool:
    """Whether some op has no chunked form as a graph: chunks of log-linear attention start at powers of two."""
    return any(isinstance(layer, LogLinear) for layer in model.modules())


def check_max_length(model: LanguageModel, tokens: int, max_length: int | None) -> None:
    """Check that caches which grow get a fixed number of slots.

    Raises:
        ValueError: they get none, no cache grows, or a piece of `tokens` tokens does not fit.
    """
    places, name = [*growing(model)], model.config.name
    if places and max_length is None:
        raise ValueError(
            f"{name} needs max_length, the most tokens of a sequence, because a graph has fixed shapes and the cache "
            f"of softmax attention grows with every token ({', '.join(places)})"
        )
    if max_length is not None and not places:
        raise ValueError(f"{name} reads sequences of any length, so it takes no max_length; got {max_length}")
    if max_length is not None and max_length < tokens:
        raise ValueError(f"max_length must be at least {tokens}, the tokens of a piece; got {max_length}")


@torch.no_grad()
def initial_state(model: LanguageModel, batch: int = 1, max_length: int | None = None) -> ModelState:
    """Return the state before the first token as tensors, from which a graph gives what `model(ids)` gives.

    The arguments are those of `export`.
    """
    check_max_length(model, 1, max_length)
    ids = torch.arange(5, device=model.embedding.weight.device).remainder(model.config.vocab_size).expand(batch, -1)
    ids = ids[:, :max_length]
    with fixed_caches(model, max_length):
        expected, after = model(ids)
        # Layers may share a tensor, as their position. An input of a graph is one layer's.
        zeros = tuple({name: torch.zeros_like(x) for name, x in layer.items()} for layer in after)
        sums = tuple(
            {name: x - torch.inf if name.endswith("decay") else x for name, x in layer.items()} for layer in zeros
        )  # fmt: skip
        for state in (zeros, sums):
            if torch.equal(model(ids, state)[0], expected):
                return state
    raise ValueError(f"{model.config.name} has no tensors that stand for the state before the first token")


@contextmanager
def fixed_caches(model: LanguageModel, max_length: int | None) -> Iterator[None]:
    """Let the caches of softmax attention have `max_length` slots (None: they grow), and log-linear ones all levels."""
    layers = growing(model).values()
    trees = [layer for layer in model.modules() if isinstance(layer, LogLinear)]
    before = [layer.max_length for layer in layers]
    try:
        for tree in trees:
            tree.all_levels = True
        for layer in layers:
            layer.max_length = max_length
        yield
    finally:
        for tree in trees:
            tree.all_levels = False
        for layer, length in zip(layers, before, strict=True):
            layer.max_length = length


@contextmanager
def plain(model: LanguageModel, loop: bool = False) -> Iterator[None]:
    """Let every op run in plain torch, so that a graph holds no operation of ours; with `loop`, token by token."""
    layers: list[Any] = [module for module in model.modules() if getattr(module, "backend", None) == "auto"]
    passes: list[Any] = [module for module in model.modules() if getattr(module, "pass_backend", None) == "auto"]
    before, build.why_not = build.why_not, lambda: "a graph for other programs holds torch's own operations alone"
    try:
        for layer in layers if loop else ():
            layer.backend = "reference"
        for module in passes:
            module.pass_backend = "chunked"
        with torch.no_grad():
            yield
    finally:
        build.why_not = before
        for layer in layers:
            layer.backend = "auto"
        for module in passes:
            module.pass_backend = "auto"


def export(
    model: LanguageModel, tokens: int = 1, batch: int = 1, loop: bool = False, max_length: int | None = None
) -> ExportedProgram:
    """Return the graph that reads a piece.

    Args:
        model: the model in evaluation mode, on the CPU.
        tokens: T, tokens of a piece; 1 for the step graph. `batch` is B, the number of sequences.
        loop: whether the graph repeats the step T times instead of the chunked forms of the ops. Models for which
            `needs_loop` is true always do.
        max_length: the most tokens of a sequence, for models whose cache would grow with every token. The graph raises
            an error beyond it. None for all other models.

    Raises:
        ValueError: `max_length` does not fit, or torch cannot trace the model; the message gives the reason.
    """
    check_max_length(model, tokens, max_length)
    state = initial_state(model, batch, max_length)
    with plain(model, loop or needs_loop(model)), fixed_caches(model, max_length):
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
