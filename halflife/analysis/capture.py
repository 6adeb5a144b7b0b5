"""Hooks that show what a model computes inside while it reads: decays, gates, Koopman states.

All hooks of the package that only observe a model are here. They are removed when the context ends, also after an
error. Nothing is stored here, so a caller that reduces each value at once needs little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halflife.analysis.foreign.families import MixerDecay
from halflife.analysis.foreign.recurrent import RecurrentModel
from halflife.analysis.readable import Readable
from halflife.decay import Decay, DecayParts
from halflife.layers import State
from halflife.layers.memory.gate_rank import SlowGate
from halflife.layers.ska import SKA
from halflife.models import LanguageModel, ModelState
from halflife.models.timescales import layer_decays
from halflife.ops.koopman import KoopmanResult

SKALayer = Any  # an SKA; behind the registry's decorator the type checker sees any Mixer
TakeDecay = Callable[[int, Tensor], object]


@dataclass(frozen=True)
class KoopmanReading:
    """The state of a layer of spectral Koopman attention (SKA) after one forward pass, and its settings."""

    state: dict[str, Tensor]  # contains the statistics of the committed tokens, `[B, H, …]` each
    values: Tensor  # v of all tokens that were read, `[B, T, H, P]`; the state only holds products of them
    weights: dict[str, Tensor]  # the log-decays `g` and the strengths `beta` of these tokens, where the layer has them
    retries: int  # operators whose factorisation was repeated with a larger ridge


@contextmanager
def capture(
    model: Readable,
    *,
    decay: TakeDecay | None = None,
    slow_decay: TakeDecay | None = None,
    koopman: Callable[[int, KoopmanReading], object] | None = None,
) -> Iterator[None]:
    """Call the given functions with what each layer computes, in every forward pass while the context is open.

    Args:
        model: any language model, also one of transformers.
        decay: is called with the layer's index (from 0) and its log-decays, `[B, T, H]` or `[B, T, H, K]`. Under
            GateRank these are the log-decays of the fast state. A model of transformers reads a text in windows, with a
            call for each.
        slow_decay: is called with the index of a layer with GateRank and the log-decays of its slow state, `[B, T, H]`.
            The call comes after the one of `decay`.
        koopman: is called with the index of an SKA layer and its reading.
    """
    with ExitStack() as hooks:
        if decay is not None:
            for layer, module in layer_decays(model):
                hooks.enter_context(_decay_hook(module, partial(decay, layer)))
        if slow_decay is not None:
            for layer, gate in slow_gates(model):
                take = partial(slow_decay, layer)
                hooks.enter_context(gate.register_forward_hook(lambda *call, take=take: take(call[-1][0])))
        if koopman is not None:
            for layer, mixer in ska_layers(model):
                hooks.enter_context(_koopman_hooks(mixer, partial(koopman, layer)))
        yield


def slow_gates(model: Readable) -> list[tuple[int, SlowGate]]:
    """Return (layer, slow gate) for every layer with GateRank."""
    gates = ((i, getattr(block.mixer, "gate_rank", None)) for i, block in enumerate(model.blocks))
    found = [(i, gate) for i, gate in gates if gate is not None]
    if any(gate.reset_law != "mask" for _, gate in found):
        raise ValueError("horizons are computed for the reset law 'mask', and this model has 'printed'")
    return [(i, gate.slow_gate) for i, gate in found]


def ska_layers(model: Readable) -> list[tuple[int, SKALayer]]:
    """Return (layer, mixer) for every layer of spectral Koopman attention, also beside another mixer."""
    parts = ("mixer", "beside")
    mixers = [(i, getattr(block, part, None)) for i, block in enumerate(model.blocks) for part in parts]
    return [(i, mixer) for i, mixer in mixers if isinstance(mixer, SKA)]


@torch.no_grad()
def read_from(
    model: LanguageModel | RecurrentModel, ids: Tensor, state: ModelState, starts: Sequence[Sequence[State]]
) -> tuple[ModelState, list[list[State]]]:
    """Read `ids [B, T]` after `state`, and run each block again from other states over the same inputs.

    `starts` has one state per layer for each repetition. Return the model's state after `ids`, and for each repetition
    the state that each block ends in.
    """
    if isinstance(model, RecurrentModel):
        return model.read_from(ids, state, starts)
    layers = iter(zip(*starts, strict=True))
    ends: list[list[State]] = [[] for _ in starts]

    def run_block(block: Any, x: Tensor, own: State, packing: Any, *, shared: Any) -> tuple[Tensor, State]:
        for end, start in zip(ends, next(layers), strict=True):
            end.append(block(x, start, packing, shared=dict(shared))[1])
        return block(x, own, packing, shared=shared)

    _, after = model.hidden(ids.to(model.embedding.weight.device), state, call=run_block)
    return after, ends


@contextmanager
def _decay_hook(decay: Decay | MixerDecay, take: Callable[[Tensor], object]) -> Iterator[None]:
    """Call `take` with the log-decays. A stateful decay does not pass through `forward`, so its `scan` is wrapped."""

    def after_forward(module: nn.Module, inputs: Any, output: Tensor | DecayParts) -> None:
        take(output if isinstance(output, Tensor) else output.g)

    if isinstance(decay, MixerDecay) or not decay.stateful:
        with decay.register_forward_hook(after_forward):
            yield
        return
    scan = decay.scan

    def wrapped_scan(*args: Any, **options: Any) -> tuple[Any, Tensor | None]:
        g, state = scan(*args, **options)
        take(g if isinstance(g, Tensor) else g.g)
        return g, state

    decay.scan = wrapped_scan  # the instance's attribute hides the method of the class
    try:
        yield
    finally:
        del decay.scan


@contextmanager
def _koopman_hooks(mixer: SKALayer, take: Callable[[KoopmanReading], object]) -> Iterator[None]:
    during: dict[str, Any] = {}

    def after_readout(module: nn.Module, inputs: Any, options: dict[str, Any], result: KoopmanResult) -> None:
        weights = {name: options[name] for name in ("g", "beta") if name in options}
        during.update(values=inputs[2], weights=weights, retries=int(result.retries))

    def after(module: nn.Module, inputs: Any, output: tuple[Tensor, dict[str, Tensor]]) -> None:
        take(KoopmanReading(output[1], during.pop("values"), during.pop("weights"), during.pop("retries")))

    with mixer.readout.register_forward_hook(after_readout, with_kwargs=True), mixer.register_forward_hook(after):
        yield
