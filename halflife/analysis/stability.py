"""Stability of a recurrence whose gates change along a text: the state's Jacobian, and gradient norms."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.analysis.capture import capture
from halflife.analysis.decays import LEAST_LOG_DECAY
from halflife.analysis.forecast.ageing import MEMORIES
from halflife.analysis.records import Record
from halflife.evaluation import evaluating
from halflife.models import LanguageModel, ModelState
from halflife.tasks import IGNORED, TaskBatch

NUDGE = 1e-4  # size of a perturbation of the state, relative to the root mean square of its numbers


@dataclass(frozen=True, kw_only=True)
class PositionStability(Record):
    """How a disturbance of the state at a position t goes on."""

    position: int  # t, from 1
    # the largest singular value of ∂S_t / ∂S_{t−1} of a layer with given inputs. This Jacobian is diagonal, so it is
    # the largest λ of all channels.
    step: float
    # the same of ∂S_{2t} / ∂S_t, the largest product of λ from t + 1 to 2t. Both are means over texts, in the layer
    # where they are largest.
    octave: float
    # what is left at 2t of a small relative disturbance of all states at t, relative to the states, in the whole model,
    # where a layer also disturbs the inputs of later ones
    response: float


@dataclass(frozen=True, kw_only=True)
class GradientNorms(Record):
    """Norms of the gradient of the mean loss of a task."""

    length: int  # tokens of a text
    parameters: float  # over all parameters but the embedding
    facts: float  # of the embeddings of the tokens that hold the facts, as the root mean square over texts


@torch.no_grad()
def state_stability(model: LanguageModel, ids: Tensor, positions: Sequence[int]) -> list[PositionStability]:
    """Follow disturbances of the state from some positions t, from 1 to half of a text, to 2t in texts `ids [B, L]`.

    The layers decay one state and erase nothing. GateRank's slow state, SKA and softmax attention are not followed.
    """
    if not positions or min(positions) < 1 or 2 * max(positions) > ids.shape[1]:
        raise ValueError(f"positions must lie between 1 and {ids.shape[1] // 2}, half of a text; got {[*positions]}")
    decays: dict[int, list[Tensor]] = {}
    with evaluating(model), capture(model, decay=lambda i, g: decays.setdefault(i, []).append(g)):
        model(ids)
    if not decays:
        raise ValueError("the model has no decays")
    logs = [torch.cat(pieces, 1).flatten(2).double().clamp(min=LEAST_LOG_DECAY) for pieces in decays.values()]
    sums = [g.cumsum(1) for g in logs]
    wide = copy.deepcopy(model).double().eval()

    def largest(values: list[Tensor]) -> float:
        return max(x.exp().amax(1).mean().item() for x in values)

    return [
        PositionStability(
            position=t, step=largest([g[:, t - 1] for g in logs]),
            octave=largest([total[:, 2 * t - 1] - total[:, t - 1] for total in sums]),
            response=_response(wide, ids[:, :t], ids[:, t : 2 * t]),
        )
        for t in positions
    ]  # fmt: skip


def _response(model: LanguageModel, before: Tensor, after: Tensor) -> float:
    """The size of a disturbance of the state between two pieces of text after the second, over its size before it."""
    _, state = model(before)
    draw = torch.Generator().manual_seed(0)
    moved = tuple({name: _nudged(x, draw) if _is_memory(name) else x for name, x in layer.items()} for layer in state)
    (_, plain), (_, other) = model(after, state), model(after, moved)
    changes = torch.cat([(a - b).flatten() / _size(a) for a, b in zip(_memories(plain), _memories(other), strict=True)])
    return (_size(changes) / NUDGE).item()


def _nudged(x: Tensor, draw: torch.Generator) -> Tensor:
    noise = torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x)
    return x + NUDGE * _size(x) * noise


def _size(x: Tensor) -> Tensor:
    """The root mean square."""
    return x.square().mean().sqrt()


def _is_memory(name: str) -> bool:
    return name.rpartition(".")[2] in MEMORIES


def _memories(state: ModelState) -> list[Tensor]:
    return [x for layer in state for name, x in layer.items() if _is_memory(name)]


def gradient_norms(model: LanguageModel, batch: TaskBatch) -> GradientNorms:
    """The norms of the gradient of the mean cross-entropy over the scored positions of some examples."""
    weights = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("embedding.")]
    with torch.enable_grad(), evaluating(model):
        x = model.embedding(batch.inputs).detach().requires_grad_()
        hidden, _ = model.hidden(x)
        scored = batch.labels != IGNORED
        loss = F.cross_entropy(model.logits(hidden[scored]).float(), batch.labels[scored])
        own, *others = torch.autograd.grad(loss, [x, *weights], allow_unused=True)
    total = torch.stack([g.double().square().sum() for g in others if g is not None]).sum().sqrt().item()
    at_facts: Any = (own.double() * batch.action_mask().unsqueeze(-1)).square().sum((1, 2)) * len(batch) ** 2
    return GradientNorms(length=batch.inputs.shape[1], parameters=total, facts=at_facts.mean().sqrt().item())
