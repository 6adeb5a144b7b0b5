"""Groups of options that several layers have. `layers.build` makes them from options by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halflife.decay import Decay, PoST
from halflife.decay.base import build as build_named_decay
from halflife.registry import check_options


@dataclass(frozen=True, kw_only=True)
class Place:
    """The sizes of a layer, and its place in the model.

    Attributes:
        hidden_size, num_heads: D and H.
        layer_idx, num_layers: the index of the layer and the number of layers.
    """

    hidden_size: int
    num_heads: int = 4
    layer_idx: int = 0
    num_layers: int = 1

    def head_size(self, expand: int = 1) -> int:
        """The channels of a head, `expand` · D / H.

        Raises:
            ValueError: H does not divide it.
        """
        width = expand * self.hidden_size
        if self.num_heads < 1 or width % self.num_heads:
            whole = "hidden_size" if expand == 1 else f"{expand} times hidden_size"
            raise ValueError(f"num_heads must divide {whole}; got {self.num_heads} and {width}")
        return width // self.num_heads


@dataclass(frozen=True, kw_only=True)
class Run:
    """How an op runs.

    Attributes:
        chunk_size: tokens of a chunk.
        backend: the implementation, or "auto" for the fastest.
    """

    chunk_size: int = 64
    backend: str = "auto"


@dataclass(frozen=True, kw_only=True)
class DecayChoice:
    """A decay, and PoST around it.

    Attributes:
        decay: a name of `decay.DECAYS`, or None for no decay.
        decay_options: options of that decay.
        post: options of `decay.PoST`, which then wraps the decay, or None.
    """

    decay: str | None = None
    decay_options: Mapping[str, Any] | None = None
    post: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.post is not None:
            check_options("post", PoST, self.post, ["decay"])

    def build(self, place: Place, *, head_dim: int, granularity: str = "scalar") -> Decay | None:
        """The decay of a layer with keys of `head_dim` channels.

        Raises:
            ValueError: there are options of a decay, and no decay; or they do not fit.
        """
        if self.decay is None:
            if self.post is not None:
                raise ValueError("PoST orders decay rates, and a layer without a decay has none")
            if self.decay_options:
                names = ", ".join(self.decay_options)
                raise ValueError(f"the decay_options {names} need a decay, and this layer has none")
            return None
        decay = build_named_decay(
            self.decay, num_heads=place.num_heads, head_dim=head_dim, granularity=granularity,
            layer_idx=place.layer_idx, num_layers=place.num_layers, **(self.decay_options or {}),
        )  # fmt: skip
        return decay if self.post is None else PoST(decay, **self.post)


@dataclass(frozen=True, kw_only=True)
class StepDecay(DecayChoice):
    """One of Mamba-2's decays, whose step size also scales what the layer writes."""

    decay: str | None = "mamba2"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay is None or not self.decay.startswith("mamba2"):
            raise ValueError(
                f"the layer scales its values by the step size of its decay, but {self.decay!r} has no step size; "
                "for other decays use the design-space block (layer 'linear')"
            )
        if self.decay == "mamba2_no_a" and self.post is not None:
            raise ValueError(
                "PoST orders Δ of mamba2_no_a, by which the layer scales its values too; "
                "use the decay mamba2, or the design-space block (layer 'linear')"
            )

    def build(self, place: Place, *, head_dim: int, granularity: str = "scalar") -> Decay:
        """The decay of a layer, as in `DecayChoice`."""
        decay = super().build(place, head_dim=head_dim, granularity=granularity)
        assert decay is not None
        return decay


def check_gain(post: Mapping[str, Any] | None, *, delta: bool) -> None:
    """Check that PoST can stretch what a layer writes (`stretch_gain`).

    Args:
        post: the options of PoST.
        delta: whether the layer writes by a delta rule, whose writing strength β must not grow beyond 2.

    Raises:
        ValueError: there is no PoST, or a delta rule has t_ref > 1, so that the factor at early positions is above 1.
    """
    if post is None:
        raise ValueError("stretch_gain stretches the input as PoST stretches the decay; give post too")
    if delta and post.get("reference_length", 1) > 1:
        raise ValueError(
            "with reference_length above 1, stretch_gain enlarges the writing strength of a delta rule at early "
            "positions, and its state diverges; leave one of them out"
        )
