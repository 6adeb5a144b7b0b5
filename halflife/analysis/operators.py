"""The operators that spectral Koopman attention holds after a text, head by head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from halflife.analysis.decays import QUANTILES
from halflife.layers.ska import SKA
from halflife.models import LanguageModel
from halflife.ops.koopman import KoopmanResult
from halflife.theory import koopman
from halflife.theory.koopman import Operator
from halflife.theory.koopman_bounds import eigenvector_condition

Layer = Any  # an SKA: behind the registry's decorator the type checker sees any Mixer
KEPT = (2, 4)  # powers of the filter in the paper's tables (Prop. D.1)
DELTA, RHO = 0.3, 0.7  # which modes count as persistent and as transient, see `koopman.modes`


def ska_layers(model: LanguageModel) -> list[tuple[int, Layer]]:
    """(layer, mixer) of every layer of spectral Koopman attention."""
    return [(i, block.mixer) for i, block in enumerate(model.blocks) if isinstance(block.mixer, SKA)]


@torch.no_grad()
def koopman_survey(model: LanguageModel, ids: Tensor) -> list[dict[str, Any]]:
    """What the operators of every SKA layer are like at the end of a text.

    An operator is that of the op's state: of all full chunks. Numbers are the (lower) median over sequences, of
    `halflife.theory.koopman` with the same names; modes are of A_w, and of Â = γ A_w where they are filtered.

    Args:
        model: any language model.
        ids: sequences `[N, T]`, each read from its start.

    Returns:
        One dict a layer of SKA: "layer" (from 0), "tokens" that its operators are of, "rank", "width", "power",
        "ridge", "chunk_size"; "retries", operators whose factorisation had to be repeated with a larger ridge while
        reading; "state_floats" and "crossover" a head, and "heads", a dict each:
        "sigma_max"; "median", "q05", "q25", "q75", "q95" of |λ| over modes and sequences; "persistent", "transient",
        "neither", how many of Â; "kept_2" and "kept_4", the mean of |γλ|^K; "eigenvector_condition", κ(V);
        "condition", κ(G̃); "lambda_min" in units of m², as the paper's keys are; "unexplained", the share of Σ ‖v‖²
        that ridge regression leaves; "filter_bias", the share that the filter adds to its loss; "linear_bound" and
        "linear_distance" to linear attention; the layer's "gamma", "mix" and "eta"; and "eigenvalues", those of A_w
        in the first sequence as [real, imaginary].
        Shares are NaN where T is below a chunk, and "tokens" 0.

    Raises:
        ValueError: ids that are no sequences.
    """
    if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 1:
        raise ValueError(f"ids must be [N, T] with N ≥ 1 and T ≥ 1; got {tuple(ids.shape)}")
    found = ska_layers(model)
    seen: dict[int, list[_Seen]] = {layer: [] for layer, _ in found}
    with ExitStack() as stack:
        for layer, mixer in found:
            stack.enter_context(_tapped(mixer, seen[layer].append))
        for sequence in ids.to(model.embedding.weight.device).split(1):
            model.hidden(sequence)
    return [{"layer": layer, **_summary(mixer, seen[layer])} for layer, mixer in found]


class _Seen:
    """What a layer held after one sequence, on the CPU."""

    def __init__(self, state: dict[str, Tensor], values: Tensor, retries: int, heads: int) -> None:
        self.tokens = values.shape[1] - int(state["pending"].max())
        committed = values[:, : self.tokens].unflatten(-1, (heads, -1))
        self.energy = committed.cpu().double().square().sum((1, 3))
        self.state = {name: state[name].cpu().double() for name in ("gram", "transition", "values", "norm")}
        self.retries = retries


@contextmanager
def _tapped(mixer: Layer, take: Callable[[_Seen], object]) -> Iterator[None]:
    """One layer whose state after each sequence is taken, with its values, which the state only holds as a product."""
    during: dict[str, Any] = {}

    def read(module: nn.Module, inputs: Any, result: KoopmanResult) -> None:
        during["retries"] = result.retries

    def projected(module: nn.Module, inputs: Any, values: Tensor) -> None:
        during["values"] = values

    def after(module: nn.Module, inputs: Any, output: tuple[Tensor, dict[str, Tensor]]) -> None:
        take(_Seen(output[1], during.pop("values"), during.pop("retries"), mixer.num_heads))

    with (
        mixer.readout.register_forward_hook(read),
        mixer.v_proj.register_forward_hook(projected),
        mixer.register_forward_hook(after),
    ):
        yield


def _summary(mixer: Layer, seen: list[_Seen]) -> dict[str, Any]:
    """A layer's numbers, from what it held after each sequence."""
    options: dict[str, Any] = mixer.options
    state = {name: torch.cat([one.state[name] for one in seen]) for name in seen[0].state}
    energy = torch.cat([one.energy for one in seen])
    operator = Operator.of_state(state, options["ridge"])
    settings = {
        name: torch.as_tensor(x).detach().cpu().double().expand(mixer.num_heads)
        for name, x in {**mixer.readout.settings(), "eta": mixer.readout.eta}.items()
    }
    numbers = {
        **_numbers(operator, energy, settings, options["power"], options["ridge"]),
        **_mode_numbers(operator.eigenvalues, settings["gamma"]),
        **settings,
    }
    first = torch.view_as_real(operator.eigenvalues[0]).tolist()
    rank, width = operator.gram.shape[-1], operator.values.shape[-2]
    chunk_size = 1 if options["refresh"] == "token" else options["chunk_size"]
    return {
        "tokens": seen[0].tokens, "rank": rank, "width": width, "power": options["power"], "ridge": options["ridge"],
        "chunk_size": chunk_size, "retries": sum(one.retries for one in seen),
        "state_floats": koopman.state_floats(rank, width, chunk_size),
        "crossover": koopman.crossover(rank, width, chunk_size),
        "heads": [
            {"head": h, **{name: x[h].item() for name, x in numbers.items()}, "eigenvalues": first[h]}
            for h in range(mixer.num_heads)
        ],
    }  # fmt: skip


def _numbers(
    operator: Operator, energy: Tensor, settings: dict[str, Tensor], power: int, ridge: float
) -> dict[str, Tensor]:
    """What the statistics `[N, H, …]` and `energy [N, H]` of Σ ‖v‖² say, `[H]`."""
    numbers = {
        "sigma_max": koopman.sigma_max(operator),
        "eigenvector_condition": eigenvector_condition(operator.whitened),
        "condition": koopman.condition(operator),
        "lambda_min": koopman.lambda_min(operator) * ridge / operator.ridge,
        "unexplained": koopman.residual(operator, operator.readout, energy) / energy,
        "filter_bias": koopman.filter_bias(operator, power, settings["gamma"], settings["mix"]) / energy,
        "linear_bound": koopman.linear_bound(operator),
        "linear_distance": koopman.linear_distance(operator),
    }
    return {name: x.median(0).values for name, x in numbers.items()}


def _mode_numbers(eigenvalues: Tensor, gamma: Tensor) -> dict[str, Tensor]:
    """What the eigenvalues `[N, H, R]` of A_w say, `[H]`."""
    levels = np.quantile(
        eigenvalues.abs().transpose(0, 1).flatten(1).numpy(), list(QUANTILES.values()), axis=1, method="lower"
    )
    scaled = eigenvalues * gamma.unsqueeze(-1)
    kinds = koopman.modes(scaled, DELTA, RHO)
    return {
        **dict(zip(QUANTILES, torch.from_numpy(levels), strict=True)),
        **{name: mask.sum(-1).median(0).values for name, mask in kinds._asdict().items()},
        **{f"kept_{power}": koopman.kept(scaled, power).mean(-1).median(0).values for power in KEPT},
    }
