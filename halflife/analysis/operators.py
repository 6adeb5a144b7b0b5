"""The operators that spectral Koopman attention (SKA) holds after a text, head by head."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halflife.analysis import koopman
from halflife.analysis.capture import KoopmanReading, SKALayer, capture, ska_layers
from halflife.analysis.decays import QUANTILES, Quantiles
from halflife.analysis.koopman import Operator
from halflife.analysis.records import Record
from halflife.evaluation import evaluating
from halflife.evaluation.memory import ska_crossover, ska_state_size
from halflife.models import LanguageModel
from halflife.ops.koopman.decays import weigh_tokens

PERSISTENT_DELTA = 0.3  # the limit of persistent modes, see `koopman.modes`


@dataclass(frozen=True, kw_only=True)
class HeadOperator(Quantiles):
    """The operator of one head, with quantiles of |λ| over modes and sequences.

    Other numbers are (lower) medians over the sequences.

    Modes are eigenvalues λ of A_w. After the filter they are those of Â = γ A_w. Fractions are NaN if the text is
    shorter than a chunk.
    """

    head: int  # the index of the head, from 0
    sigma_max: float  # σ_max(A_w)
    condition: float  # κ(G̃)
    unexplained: float  # the fraction of Σ ‖v‖² that ridge regression leaves
    filter_bias: float  # what the filter adds to the loss of ridge regression, as a fraction of Σ ‖v‖²
    linear_distance: float  # the distance to linear attention, see `koopman.linear_distance`
    persistent: float  # the number of persistent modes of Â, see `koopman.modes`
    kept_2: float  # the mean of |γλ|², what a filter of K = 2 keeps
    # gamma, mix, eta: the layer's γ, μ and η for this head
    gamma: float
    mix: float
    eta: float
    eigenvalues: list[list[float]]  # the eigenvalues of A_w in the first sequence, `[R]` pairs [real, imaginary]


@dataclass(frozen=True, kw_only=True)
class LayerOperators(Record):
    """The operators of one SKA layer."""

    layer: int  # the index of the layer, from 0
    tokens: int  # the number of tokens that the operators are made of. It is 0 if the text is shorter than a chunk.
    # rank, width: R and P, the sizes of a key and of a value
    rank: int
    width: int
    # power, ridge: the filter's power K, and ε
    power: int
    ridge: float
    chunk_size: int  # the tokens of a chunk, 1 if the operator is refreshed at every token
    retries: int  # the number of operators whose factorisation was repeated with a larger ridge while reading
    state_size: int  # the numbers in the state of a head, see `evaluation.memory.ska_state_size`
    crossover: float  # the length in tokens beyond which a cache of keys and values is larger than this state
    heads: list[HeadOperator]  # one entry for each head


@torch.no_grad()
def measure_operators(model: LanguageModel, ids: Tensor) -> list[LayerOperators]:
    """Measure the operators of every SKA layer at the end of a text, with the functions of `halflife.analysis.koopman`.

    The operator is the one in the op's state, so it is made of all full chunks.

    Args:
        ids: sequences `[N, T]`. Each is read from its start.
    """
    if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 1:
        raise ValueError(f"ids must be [N, T] with N ≥ 1 and T ≥ 1; got {tuple(ids.shape)}")
    layers = dict(ska_layers(model))
    statistics: dict[int, list[_Statistics]] = {layer: [] for layer in layers}
    with evaluating(model), capture(model, koopman=lambda i, reading: statistics[i].append(_Statistics(reading))):
        for sequence in ids.to(model.embedding.weight.device).split(1):
            model.hidden(sequence)
    return [_summarise(layer, mixer, statistics[layer]) for layer, mixer in layers.items()]


class _Statistics:
    """The statistics that a layer holds after one sequence, in float64 on the CPU."""

    def __init__(self, reading: KoopmanReading) -> None:
        state, values = reading.state, reading.values
        self.tokens = values.shape[1] - int(state["pending"].max())
        committed = values[:, : self.tokens].cpu().double()
        weights = {name: x[:, : self.tokens].cpu().double() for name, x in reading.weights.items()}
        if "beta" in weights:
            committed = committed * weights["beta"].sqrt().unsqueeze(-1)
        if (g := weights.get("g")) is not None:
            slowest = g.view(*g.shape[:3], -1).amax(-1, keepdim=True)
            committed = weigh_tokens(committed, committed, committed, slowest, 1).values
        self.energy = committed.square().sum((1, 3))
        self.state = {name: state[name].cpu().double() for name in ("gram", "transition", "values", "norm")}
        self.retries = reading.retries


def _summarise(layer: int, mixer: SKALayer, statistics: list[_Statistics]) -> LayerOperators:
    options: dict[str, Any] = mixer.options
    state = {name: torch.cat([one.state[name] for one in statistics]) for name in statistics[0].state}
    energy = torch.cat([one.energy for one in statistics])
    operator = Operator.of_state(state, options["ridge"])
    settings = {
        name: torch.as_tensor(x).detach().cpu().double().expand(mixer.num_heads)
        for name, x in {**mixer.readout.settings(), "eta": mixer.readout.eta}.items()
    }
    numbers = {
        **_numbers(operator, energy, settings, options["power"]),
        **_mode_numbers(operator.eigenvalues, settings["gamma"]),
        **settings,
    }
    first = torch.view_as_real(operator.eigenvalues[0]).tolist()
    rank, width = operator.gram.shape[-1], operator.values.shape[-2]
    chunk_size = 1 if options["refresh"] == "token" else options["chunk_size"]
    sizes = rank, width, chunk_size, 0 if mixer.decay is None else math.prod(mixer.decay.shape[1:])
    return LayerOperators(
        layer=layer, tokens=statistics[0].tokens, rank=rank, width=width, power=options["power"],
        ridge=options["ridge"], chunk_size=chunk_size, retries=sum(one.retries for one in statistics),
        state_size=ska_state_size(*sizes), crossover=ska_crossover(*sizes),
        heads=[
            HeadOperator(head=h, **{name: x[h].item() for name, x in numbers.items()}, eigenvalues=first[h])
            for h in range(mixer.num_heads)
        ],
    )  # fmt: skip


def _numbers(operator: Operator, energy: Tensor, settings: dict[str, Tensor], power: int) -> dict[str, Tensor]:
    """The numbers of `HeadOperator` from statistics `[N, H, …]` and `energy [N, H]`, Σ ‖v‖²; each `[H]`."""
    numbers = {
        "sigma_max": koopman.sigma_max(operator),
        "condition": koopman.condition(operator),
        "unexplained": koopman.residual(operator, operator.readout, energy) / energy,
        "filter_bias": koopman.filter_bias(operator, power, settings["gamma"], settings["mix"]) / energy,
        "linear_distance": koopman.linear_distance(operator),
    }
    return {name: x.median(0).values for name, x in numbers.items()}


def _mode_numbers(eigenvalues: Tensor, gamma: Tensor) -> dict[str, Tensor]:
    """The numbers of `HeadOperator` from the eigenvalues `[N, H, R]` of A_w; each `[H]`."""
    levels = np.quantile(
        eigenvalues.abs().transpose(0, 1).flatten(1).numpy(), list(QUANTILES.values()), axis=1, method="lower"
    )
    scaled = eigenvalues * gamma.unsqueeze(-1)
    return {
        **dict(zip(QUANTILES, torch.from_numpy(levels), strict=True)),
        "persistent": koopman.modes(scaled, PERSISTENT_DELTA).persistent.sum(-1).median(0).values,
        "kept_2": koopman.filtered_amplitude(scaled, 2).mean(-1).median(0).values,
    }
