"""CUDA graphs of a decoded token: one launch by the host in place of one for each kernel.

The host logic is tested with a graph that is faked. Nothing here has run on a GPU yet.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from halflife.models.lm import LanguageModel, ModelState
from halflife.models.states import changed, form
from halflife.precision import autocast_dtype

# From a model, its token ids `[B, T]` and the state before them: results of one shape for every T, and the next state.
Step = Callable[[LanguageModel, Tensor, ModelState | None], tuple[list[Tensor], ModelState]]


def capture(function: Callable[[], None]) -> Callable[[], None]:
    """Return what replays the kernels of `function`, which reads and writes tensors that stay in place."""
    before, stream, graph = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    # A graph would read autocast's copies of weights, which end with the context that autocast is on in.
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels and makes workspaces, which no graph can
                function()
        before.wait_stream(stream)
        # The server has other threads. torch has one stream for all captures, and it is of the first device.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            function()
    finally:
        torch.cuda.set_stream(before)  # after an error torch stays in the stream of the capture
        torch.set_autocast_cache_enabled(cached)
    return graph.replay


class TokenGraph:
    """One token of each sequence: `results, state = graph(ids [B, 1], state)`.

    The results are overwritten by the next call. A call that gets the state of the last one copies nothing.

    Args:
        model: in evaluation mode; its weights stay where they are.
        state: of B sequences, of the form that the graph takes.
        step: computes the results.

    Raises:
        ValueError: the state grows by a token, as that of softmax attention does.
    """

    def __init__(self, model: LanguageModel, state: ModelState, step: Step) -> None:
        self.ids = torch.zeros(len(state[0]["position"]), 1, dtype=torch.long, device=model.embedding.weight.device)
        self.state = changed(state, torch.clone)
        self.results, after = step(model, self.ids, self.state)
        if form(after) != form(state):
            raise ValueError("the state of this model grows with every token")

        def run() -> None:
            results, new = step(model, self.ids, self.state)
            torch._foreach_copy_(self.results, results)  # pyright: ignore[reportPrivateImportUsage]
            _copy(self.state, new)

        with torch.cuda.device_of(self.ids):
            self._replay = capture(run)

    def __call__(self, ids: Tensor, state: ModelState) -> tuple[list[Tensor], ModelState]:
        if state is not self.state:
            _copy(self.state, state)
        self.ids.copy_(ids)
        self._replay()
        return self.results, self.state


def _copy(goal: ModelState, source: ModelState) -> None:
    pairs = [(x, y[name]) for to, y in zip(goal, source, strict=True) for name, x in to.items()]
    torch._foreach_copy_([x for x, _ in pairs], [y for _, y in pairs])  # pyright: ignore[reportPrivateImportUsage]


class TokenGraphs:
    """`step(model, ids, state)`, by a graph for each number of sequences where it decodes tokens on a GPU.

    Of the states with one form and number of sequences only one may go on at a time, because they share a graph.
    """

    def __init__(self, model: LanguageModel, step: Step) -> None:
        self.model, self.step = model, step
        self._graphs: dict[tuple, TokenGraph] | None = {}  # None where no graph is possible

    def __call__(self, ids: Tensor, state: ModelState | None) -> tuple[list[Tensor], ModelState]:
        if state is None or ids.shape[1] != 1 or not self._possible():
            return self.step(self.model, ids, state)
        graph = self._graph(state)
        return self.step(self.model, ids, state) if graph is None else graph(ids, state)

    def own(self, state: ModelState) -> ModelState:
        """The state itself, or a copy of one that later calls overwrite."""
        return changed(state, torch.clone) if any(state is x.state for x in (self._graphs or {}).values()) else state

    def _graph(self, state: ModelState) -> TokenGraph | None:
        if self._graphs is None:
            return None
        key = len(state[0]["position"]), form(state), self._setting()
        if key not in self._graphs:
            try:
                self._graphs[key] = TokenGraph(self.model, state, self.step)
            except (ValueError, RuntimeError) as error:
                if isinstance(error, RuntimeError):
                    warnings.warn(f"tokens are decoded without CUDA graphs: {error}", stacklevel=3)
                self._graphs = None
                return None
        return self._graphs[key]

    def _setting(self) -> tuple:
        """What a graph depends on beside its state: where the weights are, autocast, and inference mode."""
        weight = self.model.embedding.weight
        return weight.data_ptr(), autocast_dtype(weight.device), torch.is_inference_mode_enabled()

    def _possible(self) -> bool:
        return self.model.embedding.weight.is_cuda and not torch.is_grad_enabled()
