"""The readings of all layers of a model, taken while it reads a text."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from halflife.analysis.look.parts import KoopmanReading, TrapezoidReading
from halflife.analysis.look.readings import AttentionReading, OpReading, Reading
from halflife.evaluation import evaluating
from halflife.layers import Mixer, mamba3
from halflife.layers.attention import Attention
from halflife.layers.memory.mimo import MIMO
from halflife.layers.ska import SKA
from halflife.models import LanguageModel
from halflife.ops.backends import dispatch

READ = ("linear_attention", "delta_rule", "dplr", "gate_rank", "log_linear_attention", "ridge_attention")


class Place(NamedTuple):
    """A mixer of a model: the index of its layer, and "beside" or "attention" for another mixer than its first one."""

    layer: int
    part: str = ""

    def __str__(self) -> str:
        return f"layer {self.layer}{f' ({self.part})' if self.part else ''}"


Take = Callable[[Place, Reading], object]


@torch.no_grad()
def observe(model: LanguageModel, ids: Tensor, take: Take) -> dict[Place, str]:
    """Let a model read `ids [T]`, and call `take` with the reading of each mixer as soon as it is complete.

    Readings hold the tensors of one layer, so a caller that reduces them at once needs little memory. Return the reason
    why a mixer is not shown, by its place.
    """
    refused: dict[Place, str] = {}
    with evaluating(model), ExitStack() as hooks:
        for layer, block in enumerate(model.blocks):
            for part in ("", "beside"):
                mixer = getattr(block, part or "mixer")
                if mixer is None:
                    continue
                place = Place(layer, part)
                if (reason := why_not(mixer)) is not None:
                    refused[place] = reason
                    continue
                watcher = _Watcher(mixer, ids.shape[-1])
                hooks.callback(watcher.end)
                hooks.enter_context(mixer.register_forward_pre_hook(watcher.begin))
                hooks.enter_context(mixer.register_forward_hook(_ending(watcher, place, take, refused)))
        model.hidden(ids.view(1, -1).to(model.embedding.weight.device))
    return refused


def why_not(mixer: Any) -> str | None:
    """The reason why the reading of a mixer is not shown, or None."""
    if isinstance(getattr(mixer, "mimo", None), MIMO):
        return "each channel of a value has weights of its own in Mamba-3 with rank > 1"
    if getattr(getattr(mixer, "gate_rank", None), "reset_law", "mask") != "mask":
        return "GateRank's printed reset law writes each token into two states"
    if isinstance(mixer, SKA) and mixer.mode == "masked":
        return "the mode 'masked' of Koopman attention reads in both directions"
    return None


def reading_of(mixer: Mixer, x: Tensor) -> tuple[Tensor, Reading | str]:
    """Run a mixer on `x [1, T, D]`; return its output, and its reading or the reason why it is not shown."""
    watcher = _Watcher(mixer, x.shape[1])
    watcher.begin()
    try:
        y, _ = mixer(x)
    finally:
        watcher.end()
    return y, why_not(mixer) or watcher.result()


def _ending(watcher: _Watcher, place: Place, take: Take, refused: dict[Place, str]) -> Callable[..., None]:
    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        watcher.end()
        found = watcher.result()
        if isinstance(found, str):
            refused[place] = found
        else:
            take(place, found)

    return after


class _Watcher:
    """Collects the readings of one mixer between the beginning and the end of its forward pass."""

    def __init__(self, mixer: Mixer, tokens: int) -> None:
        self.mixer, self.tokens = mixer, tokens
        self.found: list[Reading] = []
        self.open = ExitStack()

    def begin(self, *given: Any) -> None:
        self.found = []
        if isinstance(self.mixer, SKA):
            self.open.enter_context(self.mixer.readout.register_forward_hook(self._koopman, with_kwargs=True))
        elif isinstance(self.mixer, Attention):
            self.open.enter_context(patch.object(self.mixer, "attend", self._attend))
        elif isinstance(self.mixer, (mamba3.Mamba3, mamba3.EchoMamba3)):
            self.open.enter_context(patch.object(mamba3, "integrate", self._integrate(mamba3.integrate)))
        else:
            choose = dispatch.implementation_of
            self.open.enter_context(patch.object(dispatch, "implementation_of", self._implementation(choose)))

    def end(self) -> None:
        self.open.close()

    def result(self) -> Reading | str:
        """The reading, or the reason why there is none."""
        if len(self.found) == 1:
            return self.found[0]
        return f"{len(self.found)} calls of ops on a state read for each token, and a lens shows layers with one"

    def _koopman(self, module: nn.Module, inputs: Any, options: dict[str, Any], result: Any) -> None:
        self.found.append(KoopmanReading(module, inputs, options))

    def _attend(self, *given: Any) -> Tensor:
        self.found.append(AttentionReading(self.mixer, given, self.tokens))
        return type(self.mixer).attend(self.mixer, *given)  # pyright: ignore[reportAttributeAccessIssue]

    def _integrate(self, integrate: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            self.found.append(TrapezoidReading(integrate, given, options))
            return integrate(*given, **options)

        return run

    def _implementation(self, choose: Callable[..., Any]) -> Callable[..., Any]:
        """Take each call of an op on a state, but not the calls that the op itself makes."""
        inside = False

        def chosen(call: Any, backend: str) -> Callable[..., Any]:
            implementation = choose(call, backend)
            if inside or call.op not in READ:
                return implementation

            def run(call: Any) -> Any:
                nonlocal inside
                self.found.append(OpReading(call, backend, self.tokens))
                inside = True
                try:
                    return implementation(call)
                finally:
                    inside = False

            return run

        return chosen
