"""Softmax attention with a KV cache, the baseline whose state grows with the context."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from halflife.layers.mixer import LAYERS, Mixer, Shared, State
from halflife.layers.options import Place
from halflife.layers.parts import PlusOneRMSNorm, RMSNorm, rotary, turns
from halflife.ops.arguments import is_transformed
from halflife.ops.recurrent import attention_of_token, takes_attention
from halflife.packing import Packing
from halflife.position import check_pairs
from halflife.precision import lacks_products, product_dtype, without_autocast
from halflife.registry import check_choice


@LAYERS.add("attention")
class Attention(Mixer):
    """LLaMA's causal softmax attention `softmax(q kᵀ / √K) v` with RoPE. Its state is the KV cache.

    With a sliding window of W tokens, each token sees itself and the W − 1 tokens before it. The cache then holds the
    last W − 1 tokens of each sequence, `[N, W − 1, H_kv, K]` with the last token at the end, and does not grow.

    Args:
        place: a group of options, with the query heads H.
        num_kv_heads: heads of keys and values, each shared by H / num_kv_heads query heads; None means H.
        head_dim: K; None means D / H.
        rope_base: base of the rotary frequencies.
        rope_fraction: share of the K channels that is rotated, the first ones, in (0, 1].
        position: "rope", or "none" for attention without positions (NoPE).
        window: W, or None to see all tokens.
        qk_norm: RMS norm of queries and keys before RoPE: "none"; "head", over each head; "head_plus_one", the same
            with weights 1 + w (Qwen3.5); or "all", over all heads together (OLMo).
        norm_eps: eps of that norm.
        gate: whether the output is `(σ(x W_g) ⊙ o) W_o` (Qwen3.5). W_g are then the last rows of `qkv_proj`.
        backend: that of its norms and rotations.

    Raises:
        ValueError: a number of heads does not divide, the rotated channels do not pair up, a name is unknown, or the
            window is below 1.
    """

    maps_of_input = ("qkv_proj",)
    POSITIONS = ("rope", "none")
    QK_NORMS = ("none", "head", "head_plus_one", "all")
    reads_longest = True
    # Slots of the cache of each sequence. `halflife.export` sets them, so that all shapes are fixed. None lets it grow.
    max_length: int | None = None

    def __init__(
        self,
        place: Place,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        rope_base: float = 10_000.0,
        rope_fraction: float = 1.0,
        position: str = "rope",
        window: int | None = None,
        qk_norm: str = "none",
        norm_eps: float = 1e-5,
        gate: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.backend = backend
        hidden_size, num_heads = place.hidden_size, place.num_heads
        self.head_dim = head_dim or place.head_size()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads; got {self.num_kv_heads} and {num_heads}")
        check_choice("position", position, self.POSITIONS)
        check_choice("qk_norm", qk_norm, self.QK_NORMS)
        if not 0 < rope_fraction <= 1:
            raise ValueError(f"rope_fraction must lie in (0, 1]; got {rope_fraction}")
        if not 0 < rope_base < math.inf:
            raise ValueError(f"rope_base must be positive and finite; got {rope_base}")
        self.rotated = int(self.head_dim * rope_fraction)
        if position == "rope":
            check_pairs(self.rotated)
            if not self.rotated:
                raise ValueError(
                    f"rope_fraction {rope_fraction} rotates none of the {self.head_dim} channels; take a larger one, "
                    "or position 'none'"
                )
        self.rope_base, self.position, self.window = rope_base, position, window
        queries, keys = num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        self.splits = [queries, keys, keys] + [queries] * gate
        self.qkv_proj = nn.Linear(hidden_size, sum(self.splits), bias=False)
        norm = PlusOneRMSNorm if qk_norm == "head_plus_one" else RMSNorm
        self.over_all = qk_norm == "all"
        sizes = (queries, keys) if self.over_all else (self.head_dim, self.head_dim)
        self.q_norm, self.k_norm = (None if qk_norm == "none" else norm(size, eps=norm_eps) for size in sizes)
        self.out_proj = nn.Linear(queries, hidden_size, bias=False)

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        q, k, v, *gate = self.qkv_proj(x).split(self.splits, -1)
        q, k = self._normalized(q, self.q_norm), self._normalized(k, self.k_norm)
        v = v.unflatten(-1, (-1, self.head_dim))
        if not x.is_cpu and self._decodes(q, k, v, state, packing):
            o, cache = self._token(q, k, v, state, packing)
            return self.out_proj(o * gate[0].sigmoid() if gate else o), cache
        if self.position == "rope":
            position = packing.positions(state.get("position"), x.device)
            q, k = self._rotated(q, k, position, packing.kept)
        tokens = self.cached(x, k, v)
        if not state and packing.cu_seqlens is None and self.window is None and self.max_length is None:
            cache, o = tokens, self.attend(q, tokens, None, None)
        else:
            o, cache = self._with_cache(q, tokens, state, packing)
        o = o.flatten(-2)
        return self.out_proj(o * gate[0].sigmoid() if gate else o), cache

    def _decodes(self, q: Tensor, k: Tensor, v: Tensor, state: State, packing: Packing) -> bool:
        """Whether kernels take one token of each sequence; they have one form of attention, and caches that grow."""
        one = bool(state) and packing.length == 1 and packing.cu_seqlens is None
        plain = type(self).attend is Attention.attend and type(self).cached is Attention.cached
        grows = self.window is None and self.max_length is None and self.pass_backend == "auto"
        whole = self.position == "none" or self.rotated == self.head_dim
        return one and plain and grows and whole and takes_attention(q, k, v, state["keys"], state["values"])

    def _token(self, q: Tensor, k: Tensor, v: Tensor, state: State, packing: Packing) -> tuple[Tensor, State]:
        """The outputs `[N, 1, H · K]` of one token of each sequence, and the new cache."""
        angles = None
        if self.position == "rope":
            position = packing.positions(state["position"], q.device)
            angles = turns(q, position, self.rope_base, packing.kept)
        o, keys, values = attention_of_token(q, k, v, angles, state["keys"], state["values"], state["position"])
        return o.flatten(-2), {"keys": keys, "values": values}

    def _normalized(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """`[B, T, H·K]` → `[B, T, H, K]` with the norm over each head or over all."""
        heads = x.unflatten(-1, (-1, self.head_dim))
        if norm is None:
            return heads
        normed = norm((x if self.over_all else heads).to(norm.weight.dtype))  # autocast gives x in bfloat16
        return normed.to(x.dtype).view(heads.shape)

    def _rotated(self, q: Tensor, k: Tensor, position: Tensor, kept: dict[Any, Any] | None) -> tuple[Tensor, Tensor]:
        if self.rotated == self.head_dim:
            return rotary(q, k, position, self.rope_base, self.pass_backend, kept)
        (q, *q_rest), (k, *k_rest) = (x.tensor_split([self.rotated], -1) for x in (q, k))
        q, k = rotary(q, k, position, self.rope_base, self.pass_backend, kept)
        return torch.cat([q, *q_rest], -1), torch.cat([k, *k_rest], -1)

    def cached(self, x: Tensor, k: Tensor, v: Tensor) -> State:
        """What the cache holds of each token `[B, T, …]`: `k` and `v [B, T, H_kv, K]` of `x [B, T, D]`."""
        return {"keys": k, "values": v}

    def _with_cache(self, q: Tensor, tokens: State, state: State, packing: Packing) -> tuple[Tensor, State]:
        """Attention of the new tokens of each sequence to the cache and to themselves, one row per sequence.

        Rows may differ in length. The new tokens of a row come after its cache, and later slots are masked. Under a
        window, all caches have W − 1 slots, of which the last are filled.
        """
        if self._appends(q, state, packing):
            cache = {name: appended(state[name], x) for name, x in tokens.items()}
            slots = torch.arange(cache["keys"].shape[1] - q.shape[1], cache["keys"].shape[1])
            return self.attend(q, cache, slots.expand(len(q), -1), None), cache
        new, cu_seqlens = packing.lengths(q.device), packing.cu_seqlens
        rows, seen = len(new), state["position"] if state else torch.zeros_like(new)
        first = seen if self.window is None else torch.full_like(seen, self.window - 1)
        if cu_seqlens is None:
            row = torch.arange(rows, device=q.device).repeat_interleave(q.shape[1])
            slot = torch.arange(q.shape[1], device=q.device).repeat(rows)
        else:
            row = packing.sequence
            slot = torch.arange(q.shape[1], device=q.device) - cu_seqlens[row]
        width, held = packing.longest, state["keys"].shape[1] if state else 0
        longest = self._slots(first + new, width, held + width if cu_seqlens is None or not state else None)

        def place(tokens: Tensor, size: int, at: Tensor, old: Tensor | None) -> Tensor:
            filled = tokens.new_zeros(rows, size if old is None else max(size - old.shape[1], 0), *tokens.shape[2:])
            if old is not None:
                filled = torch.cat([old[:, :size].to(tokens.dtype), filled], 1)
            return filled.index_put_((row, at), tokens.flatten(0, 1))

        cache = {name: place(x, longest, slot + first[row], state.get(name)) for name, x in tokens.items()}
        at = torch.arange(width, device=q.device) + first.unsqueeze(1)  # [N, width]: index of each query
        column, last = torch.arange(longest, device=q.device), at.unsqueeze(-1)
        visible = column <= last
        if self.window is not None:
            visible = visible & (column > last - self.window) & (column >= (first - seen).view(-1, 1, 1))
        o = self.attend(place(q, width, slot, None), cache, at, visible)
        if self.window is not None:
            cache = {name: _take(x, new, self.window - 1) for name, x in cache.items()}
        return o[row, slot].unflatten(0, q.shape[:2]), cache

    def _appends(self, q: Tensor, state: State, packing: Packing) -> bool:
        """Whether the new tokens come behind caches that every sequence has filled. A GPU would have to be asked."""
        grows = self.window is None and self.max_length is None and packing.cu_seqlens is None
        if not (state and grows and q.is_cpu) or type(q) is not Tensor or torch.compiler.is_compiling():
            return False
        return not is_transformed() and bool((state["position"] == state["keys"].shape[1]).all())

    def has_room(self, part: Tensor) -> bool:
        return not torch.compiler.is_compiling() and part in _ROOMS

    def _slots(self, stop: Tensor, width: int, enough: int | None) -> int:
        """The slots of the caches, of which the last new token ends at `stop`; rows of equal length have `enough`."""
        if self.window is not None:
            return self.window - 1 + width
        if self.max_length is None:
            return enough if enough is not None else int(stop.max()) if len(stop) else 0
        message = f"the cache of softmax attention is full: it holds {self.max_length} tokens (max_length)"
        torch.ops.aten._assert_async.msg((stop <= self.max_length).all(), message)
        return self.max_length

    def attend(self, q: Tensor, cache: State, at: Tensor | None, visible: Tensor | None) -> Tensor:
        """Attention of `q [N, T, H, K]` to a cache of S tokens: `[N, T, H, K]`.

        Args:
            cache: tensors `[N, S, …]` of the names of `cached`.
            at: index in the cache of each query's token, `[N, T]`. None means that S = T.
            visible: which tokens a query sees, `[N, T, S]`. None means those up to its own.
        """
        if visible is None and at is not None and q.shape[1] > 1:
            visible = torch.arange(cache["keys"].shape[1], device=q.device) <= at.unsqueeze(-1)
        q, k, v = (t.transpose(1, 2) for t in (q, cache["keys"], cache["values"]))
        mask = None if visible is None else visible.unsqueeze(1)
        causal = at is None and mask is None  # else a single query sees the whole cache
        with nullcontext() if (dtype := _widened(q)) is None else without_autocast(q.device):
            o = F.scaled_dot_product_attention(
                *(t if dtype is None else t.float() for t in (q, k, v)), attn_mask=mask, is_causal=causal,
                enable_gqa=self.num_kv_heads != self.num_heads,
            )  # fmt: skip
        return (o if dtype is None else o.to(dtype)).transpose(1, 2)


def _widened(q: Tensor) -> torch.dtype | None:
    """The dtype of attention to queries `[N, H, T, K]`, if float32 takes its place; see `ops.backends.widened`."""
    wide = q.shape[2] > 1 and lacks_products(q) and not is_transformed()
    return product_dtype(q) if wide else None


@dataclass(eq=False)
class _Room:
    """A buffer `[N, C, heads, …]` of which the first slots are filled."""

    buffer: Tensor
    filled: int

    def take(self, size: int, end: int) -> bool:
        """Take the slots from `size` to `end` and return True, if nobody has them and they can be written."""
        writable = torch.is_inference_mode_enabled() or not self.buffer.is_inference()
        with _LOCK:  # of two threads, one takes them
            free = writable and self.filled == size and end <= self.buffer.shape[1]
            self.filled = end if free else self.filled
        return free


ROOM = 128  # tokens, at most, for which a cache has room: it is copied once for so many
_ROOMS = WeakTensorKeyDictionary()  # the filled slots of a buffer → its `_Room`
_LOCK = Lock()


def appended(old: Tensor, new: Tensor) -> Tensor:
    """`old [N, S, heads, …]` with `new [N, T, heads, …]` behind it.

    Without gradients the result is a part of a larger buffer, whose room the next tokens take, so that not every token
    copies the cache. Tokens that came first keep their slots: `old` does not change, and what is appended to it once
    more goes into a new buffer.
    """
    size, end = old.shape[1], old.shape[1] + new.shape[1]
    fits = old.dtype == new.dtype and old[:, :0].shape == new[:, :0].shape  # else `cat` casts it or says why not
    if torch.is_grad_enabled() or not fits:
        return torch.cat([old.to(new.dtype), new], 1)
    room = _ROOMS.get(old)
    if room is None or not room.take(size, end):
        shape = (len(new), new.shape[2], end + min(ROOM, 16 + end // 8), *new.shape[3:])
        room = _Room(new.new_empty(shape).transpose(1, 2), end)  # attention reads head after head
        room.buffer[:, :size] = old
        room.buffer[:, end:] = 0  # who saves the memory of a state saves its room
    room.buffer[:, size:end] = new
    result = room.buffer[:, :end]
    _ROOMS[result] = room
    return result


def _take(x: Tensor, start: Tensor, size: int) -> Tensor:
    """Take `size` entries of each row of `x [N, S, …]`, from index `start [N]` on."""
    index = start.unsqueeze(1) + torch.arange(size, device=x.device)
    return x[torch.arange(len(x), device=x.device).unsqueeze(1), index]
