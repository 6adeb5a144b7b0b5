"""States that training carries from a row to the row that continues it: truncated back-propagation through time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from halflife.models import LanguageModel, ModelState
from halflife.models.states import changed, stack

Part = Tensor | Sequence[int]
PATTERN = "states-{}.pt"  # in a checkpoint, one file for each process


class CarriedStates:
    """The state after the last row of each micro-batch. No gradient crosses the cut between two rows.

    A micro-batch has a `part`: its number i, the number m of micro-batches in a step, and whether its rows begin anew.
    They are numbers, or a tensor, whose values are read.
    """

    def __init__(self) -> None:
        self.parts: dict[int, ModelState] = {}
        self.rows: ModelState | None = None  # of all rows of a step, from a checkpoint

    def before(self, part: Part, device: torch.device) -> ModelState | None:
        """Return the state before the rows of a micro-batch on `device`, or None where they begin anew."""
        index, count, begins = map(int, part)
        if begins:
            return None
        if index not in self.parts and self.rows is None:
            raise ValueError("the checkpoint holds no carried states, so a run with --carry-state cannot go on from it")
        if index not in self.parts and self.rows is not None:
            self.parts[index] = changed(self.rows, lambda x: x.chunk(count)[index].to(device))
        return self.parts[index]

    def after(self, part: Part, state: ModelState) -> None:
        """Store the state after the rows of a micro-batch, without its gradient."""
        self.parts[int(part[0])] = changed(state, Tensor.detach)

    def save(self, folder: Path, rank: int) -> None:
        """Write the states of this process into a checkpoint."""
        states = {index: [dict(layer) for layer in state] for index, state in self.parts.items()}
        torch.save(states, folder / PATTERN.format(rank))

    def load(self, folder: Path) -> None:
        """Read the states of all processes. The micro-batches may be cut otherwise from now on."""
        files = [torch.load(path, map_location="cpu", weights_only=True) for path in folder.glob(PATTERN.format("*"))]
        states = {index: state for file in files for index, state in file.items()}
        if states:
            self.rows = stack([tuple(states[index]) for index in sorted(states)])


def require_constant_state(model: LanguageModel, name: str) -> None:
    """Raise a ValueError if the state of a model grows with the text, as in softmax attention."""
    if model.state_size(1) != model.state_size(2):
        raise ValueError(f"--carry-state needs a state of constant size, and that of {name} grows with the text")
