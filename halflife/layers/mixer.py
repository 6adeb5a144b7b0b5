"""The contract of a layer, and `build`, which makes one by name.

Every mixer is `(x, state) → (y, state)`. A state is a dict of tensors with one row for each sequence. A sequence may be
fed in pieces, each with the state that the previous piece returned; the outputs equal those of a single call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack

from halflife.layers.parts import set_backend
from halflife.packing import Packing
from halflife.registry import Registry, check_options, construct

State = dict[str, Tensor]


class SharedTensors:
    """Tensors by name that all layers of one forward pass share, and that a layer adds to for later ones.

    It is no `dict`, because accelerate and FSDP2 copy every dict that a module is given. What a layer writes into such
    a copy never reaches the later layers.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self._tensors = dict(tensors or {})

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __setitem__(self, name: str, x: Tensor) -> None:
        self._tensors[name] = x

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def values(self) -> Iterable[Tensor]:
        return self._tensors.values()

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(name)

    def update(self, other: Shared) -> None:
        self._tensors.update(other)  # pyright: ignore[reportCallIssue, reportArgumentType] (it has `keys`)


Shared = dict[str, Tensor] | SharedTensors

LAYERS: Registry[type[Mixer]] = Registry("layer")

FEATURES = ("ssm_query", "ssm_key", "ssm_value")  # in the tensors that layers share


def _share_all(part: Tensor, parts: Mapping[str, Tensor]) -> bool:
    """Whether parts of a state have one memory together, as GateRank's two from a kernel; compiled code cannot tell."""
    if part.is_cpu or torch.compiler.is_compiling():
        return False
    memory = part.untyped_storage()
    held = [x.numel() * x.itemsize for x in parts.values() if x.untyped_storage()._cdata == memory._cdata]
    return sum(held) == memory.size()


class Mixer(nn.Module):
    """A sequence mixer: `y, state = mixer(x, state, cu_seqlens, attention_mask)`.

    A subclass writes `mix`. This class packs padded inputs, so that padding has no effect, and counts the tokens that
    each sequence has seen, which every state holds as `position [N]`.
    """

    pass_backend = "auto"  # see `parts.set_backend`
    reads_action_mask = False  # whether it uses `shared["action_mask"]`
    reads_longest = False  # whether its sizes depend on the longest of packed sequences
    loops_over_length = False  # whether a compiled graph of it is one of a single length
    maps_of_input: tuple[str, ...] = ()  # names of linear maps that read x, which for a token are one kernel
    reads_in_pieces = True  # whether a sequence in pieces has the outputs that it has as a whole
    chunk_size: int
    backend: str

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        attention_mask: Tensor | None = None,
        shared: Shared | None = None,
    ) -> tuple[Tensor, State]:
        """Mix `x [B, T, D]` along T.

        Args:
            x: inputs `[B, T, D]`.
            state: the state after the previous piece, one row per sequence, or None at the start. It is not modified.
            cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1), or the `Packing` of x.
            attention_mask: `[B, T]`, 0 at padding on the left or right. Padding is left out, and y is 0 there.
            shared: tensors that all layers of one forward pass share. They are values that a layer passes to later ones
                (RWKV-7's first values) and inputs of all layers (SKA's action mask, padded as x is).

        Returns:
            `y [B, T, D]` and the new state. Its tensors keep no other memory alive, such as the activations of x, but
            for the room of a cache that grows. A part that these tokens do not change may be the tensor that was given.

        Raises:
            ValueError: cu_seqlens and attention_mask are both given, or a shape does not fit.
        """
        if x.ndim != 3:
            raise ValueError(f"x must be [B, T, D]; got {tuple(x.shape)}")
        if self.reads_action_mask and shared is not None and (mask := shared.get("action_mask")) is not None:
            if mask.shape != x.shape[:2]:
                raise ValueError(f"action_mask must be [B, T] = {tuple(x.shape[:2])}; got {tuple(mask.shape)}")
            shared = shared if attention_mask is None else {"action_mask": unpad(mask, attention_mask)[0]}
        if attention_mask is not None:
            if cu_seqlens is not None:
                raise ValueError("give cu_seqlens (packed) or attention_mask (padded), not both")
            packed, bounds, index = unpad(x, attention_mask)
            y, new = self.forward(packed, state, Packing(1, packed.shape[1], bounds), None, shared)
            return repad(y, index, *x.shape[:2]), new
        packing, state = Packing.of(cu_seqlens, *x.shape[:2]), state or {}
        if state and len(state["position"]) != packing.num_sequences:
            raise ValueError(
                f"the state has {len(state['position'])} sequences, but the input has {packing.num_sequences}"
            )
        y, new = self.mix(x, state, packing, shared)
        if torch.compiler.is_compiling() or peek_interpreter_stack() is None:  # tensors of torch.func have no storage
            for name, part in new.items():
                held = part.numel() * part.itemsize  # not `nbytes`, which torch.compile cannot read of any length
                if part.untyped_storage().size() != held and not _share_all(part, new) and not self.has_room(part):
                    new[name] = part.clone(memory_format=torch.contiguous_format)
        return y, {"position": packing.ends(state.get("position"), x.device), **new}

    def has_room(self, part: Tensor) -> bool:
        """Whether a part of the state belongs to a larger buffer, whose room is for the next tokens."""
        return False

    @classmethod
    def complete(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options by name, with those that the layer defines."""
        return options

    @property
    def op_options(self) -> dict[str, Any]:
        """Options of the op."""
        return {"chunk_size": self.chunk_size, "backend": self.backend}

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        """Mix inputs without padding.

        Args:
            x, shared: as in `forward`.
            packing: where the sequences of x lie.
            state: the state after the previous piece; an empty dict at the start.

        Returns:
            `y [B, T, D]` and the new state without `position`. Its tensors may be views, which `forward` copies.
        """
        raise NotImplementedError


def build(name: str, *, hidden_size: int, **options: Any) -> Mixer:
    """Build the layer `name`, one of `LAYERS.names()`, with the options in its docstring.

    Raises:
        ValueError: a name is unknown (the message lists the choices), or the options contradict each other.
    """
    layer = LAYERS[name]
    check_options(f"layer {name}", layer, options)
    built = construct(layer, layer.complete({"hidden_size": hidden_size, **options}))
    return set_backend(built, options.get("backend", "auto"))


def pass_features(shared: Shared | None, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Put the keys, queries and values of a layer into `shared`, if there is one, for later layers (Echo, §6.1).

    They are `[B, T, G, K]`, `[B, T, G, K]` and `[B, T, H, V]`.
    """
    if shared is not None:
        for name, x in zip(FEATURES, (q, k, v), strict=True):
            shared[name] = x


def taken_features(
    shared: Shared | None, tokens: tuple[int, ...], num_heads: int, rank: int, width: int
) -> list[Tensor]:
    """The features of the nearest layer before, for each head: `[B, T, H, K]` twice and `[B, T, H, V]`.

    Args:
        shared: tensors of this forward pass.
        tokens: B and T of the layer that takes them.
        num_heads, rank, width: its H, K and H · V.

    Raises:
        ValueError: no layer before passes its features on, or they have other sizes.
    """
    if shared is None or any(name not in shared for name in FEATURES):
        raise ValueError("features 'mixer' are those of a Mamba layer before this one that has share_features=True")
    q, k, v = (shared[name] for name in FEATURES)
    if q.shape[:2] != tokens or q.shape[-1] != rank or v.shape[2:] != (num_heads, width // num_heads):
        raise ValueError(
            f"features 'mixer' must have {num_heads} heads, keys of {rank} (rank) and values of {width // num_heads} "
            f"numbers (value_dim); got {tuple(q.shape)} and {tuple(v.shape)}"
        )
    return [*(x.repeat_interleave(num_heads // x.shape[2], 2) for x in (q, k)), v]


def unpad(x: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pack a padded batch, row after row.

    Args:
        x: `[B, T, …]`.
        attention_mask: `[B, T]`, 1 for tokens and 0 for padding, which may stand anywhere.

    Returns:
        `(packed [1, tokens, …], cu_seqlens [B + 1], index [tokens])`. `repad` reverses this.
    """
    if attention_mask.shape != x.shape[:2]:
        raise ValueError(f"attention_mask must be [B, T] = {tuple(x.shape[:2])}; got {tuple(attention_mask.shape)}")
    mask = attention_mask.bool()
    index = mask.flatten().nonzero().squeeze(1)
    return x.flatten(0, 1).index_select(0, index).unsqueeze(0), F.pad(mask.sum(1).cumsum(0), (1, 0)), index


def repad(packed: Tensor, index: Tensor, batch: int, length: int) -> Tensor:
    """Undo `unpad`: `[1, tokens, …]` → `[B, T, …]`, with zeros at the padding."""
    rows = packed.new_zeros(batch * length, *packed.shape[2:])
    return rows.index_copy(0, index, packed[0]).unflatten(0, (batch, length))
