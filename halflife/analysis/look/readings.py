"""What the tokens of a layer read from each other, and what is left of each write in its state.

Every op reads values linearly, `o_t = Σ_j w[t, j] v_j` with one weight for each head, whatever erases, decays or resets
between the tokens j and t. Values that are columns of the identity therefore come out as the weights themselves,
exactly and by the backend that the model runs. The column of token j in the state is what its write became, so its norm
over the norm right after token j is the share that is left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.analysis.horizon import next_reset
from halflife.ops.backends.dispatch import folded, implementation_of
from halflife.ops.call import Call
from halflife.ops.chunked.decays import FLOOR
from halflife.precision import compute_dtype, wide

COLUMNS = 256  # tokens whose weights are computed at once
# Ops whose state depends on the tokens after a write alone, so that the tokens before it need not be read.
FROM_ZERO = ("linear_attention", "delta_rule", "dplr", "gate_rank")


class Reading(ABC):
    """One reading of a text by the heads of a layer."""

    kind: str  # the op, as "delta_rule", or "attention"
    tokens: int  # T
    heads: int  # H
    sizes: Tensor  # the norm of the value of every token, `[H, T]`; it weighs what a token adds to an output
    stored: tuple[int, int]  # the bytes that one head stores of a text, and those that it stores for each token
    resets: Tensor | None = None  # where a token resets, `[H, T]`, or None without resets

    @abstractmethod
    def respond(self, columns: slice) -> Tensor:
        """The weights with which all tokens read the tokens `columns`, `[H, T, n]`."""

    @abstractmethod
    def left(self, columns: Tensor, cursors: Tensor) -> Tensor:
        """The shares of the writes of the tokens `columns [n]` that are left after the tokens `cursors [C]`.

        They are `[H, C, n]`, and 0 where a write is still to come.
        """

    def faded(self, columns: Tensor, cursors: Tensor) -> Tensor:
        """What `left` would be if no other token overwrote anything."""
        return self.left(columns, cursors)

    @abstractmethod
    def of(self, heads: Sequence[int]) -> Reading:
        """The reading of some heads."""

    def weights(self) -> Tensor:
        """w of all tokens: token t reads token j with the weight `[h, t, j]` of `[H, T, T]`."""
        starts = range(0, self.tokens, COLUMNS)
        return torch.cat([self.respond(slice(j, min(j + COLUMNS, self.tokens))) for j in starts], -1)


class OpReading(Reading):
    """The reading of a layer by one call of an op on a state.

    Args:
        call: the call, of one sequence from its start.
        backend: the backend that the layer asked for.
        tokens: T. A layer may write several times for a token, in neighbouring rows of the call; its last row reads.
    """

    def __init__(self, call: Call, backend: str, tokens: int) -> None:
        call = folded(call)
        self.call, self.backend, self.kind, self.tokens = call, backend, call.op, tokens
        self.heads, self.steps = call.sizes["H"], call.sizes["T"] // tokens
        dtype = compute_dtype(call["q"])
        self.tensors: dict[str, Any] = {name: None if x is None else x.to(dtype) for name, x in call.tensors.items()}
        values = self.tensors["v"].unflatten(1, (tokens, self.steps))
        self.sizes = values.square().sum((2, 4)).sqrt()[0].T
        self.stored = sum(x[:1, :1].nbytes for x in call.first_states(torch.float32) if x.is_floating_point()), 0
        if "g_slow" in self.tensors:
            self.resets = self.tensors["g_slow"][0].T != 0

    def of(self, heads: Sequence[int]) -> OpReading:
        index = torch.as_tensor(heads, device=self.call.device)

        def pick(name: str, x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            axis = 0 if name == "ridge" else 2
            return x.index_select(axis, index * x.shape[axis] // self.heads)

        tensors = {name: pick(name, x) for name, x in self.tensors.items()}
        return OpReading(self._call(tensors), self.backend, self.tokens)

    def _call(self, tensors: dict[str, Any], state: Any = None) -> Call:
        call = self.call
        return Call.of(call.op, tensors, state, scale=call.scale, chunk_size=call.chunk_size, **call.options)

    def _run(self, rows: slice, values: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """The op on some rows with other values, `[1, rows, H, n]`."""
        cut = {n: x if x is None or n == "ridge" else x[:, rows] for n, x in self.tensors.items()}
        call = self._call({**cut, "v": values}, state)
        return implementation_of(call, self.backend)(call)

    def _identity(self, columns: Tensor, first: int = 0) -> Tensor:
        """Values `[1, rows, H, n]` from token `first` on, 1 in the rows of token `columns[c]` and channel c."""
        at = torch.arange(first, self.tokens, device=columns.device).repeat_interleave(self.steps)
        ones = (at.unsqueeze(-1) == columns).to(self.tensors["v"].dtype)
        return ones[None, :, None].expand(1, -1, self.heads, -1).contiguous()

    def respond(self, columns: slice) -> Tensor:
        first = columns.start if self.kind in FROM_ZERO else 0
        at = torch.arange(columns.start, columns.stop, device=self.call.device)
        o, _ = self._run(slice(first * self.steps, None), self._identity(at, first))
        o = o[0, self.steps - 1 :: self.steps].transpose(0, 1)
        return F.pad(o, (0, 0, first, 0))

    def left(self, columns: Tensor, cursors: Tensor) -> Tensor:
        g = self.call.decay
        scalar = g is None or g.ndim == 3
        if self.kind in ("linear_attention", "ridge_attention", "log_linear_attention") and scalar:
            return faded(self.tensors["g"], self.heads, columns, cursors)
        if self.kind == "gate_rank" and self.tensors["beta"] is None:
            return self.faded(columns, cursors)
        return self._propagated(columns, cursors)

    def faded(self, columns: Tensor, cursors: Tensor) -> Tensor:
        if self.kind == "gate_rank":
            return faded_by_two(self.tensors["g_slow"], self.tensors["g_fast"], columns, cursors)
        if (g := self.tensors.get("g")) is None:
            return faded(g, self.heads, columns, cursors)
        g = g.unflatten(1, (self.tokens, self.steps)).sum(2)  # of several rows of a token, only the first one decays
        if g.ndim == 3:
            return faded(g, self.heads, columns, cursors)
        return faded_channels(g, self._written().unsqueeze(0), columns, cursors)

    def _propagated(self, columns: Tensor, cursors: Tensor) -> Tensor:
        """Run the recurrence from cursor to cursor, with the norms of the columns of its state at each."""
        first = int(columns.min())
        norms, state, at = [], None, first
        values = self._identity(columns, first)
        for cursor in cursors.tolist():
            if cursor >= at:
                rows = slice(at * self.steps, (cursor + 1) * self.steps)
                taken = slice(rows.start - first * self.steps, rows.stop - first * self.steps)
                _, state = self._run(rows, values[:, taken], self._states(state))
                at = cursor + 1
            empty = values.new_zeros(self.heads, len(columns))
            norms.append(empty if state is None else self._whole(state)[0].norm(dim=-2))
        written = self._written()[columns].norm(dim=-1).T
        return torch.stack(norms, 1) / written.unsqueeze(1).clamp(min=1e-30)

    def _states(self, state: Any) -> Any:
        """The states that the op returned as it takes them."""
        if isinstance(state, Tensor) and self.call.num_states == 2:
            return tuple(part.contiguous() for part in state.chunk(2, -2))
        return state

    def _whole(self, state: Any) -> Tensor:
        """What queries read of a state: the sum of two, or the only one."""
        parts = self._states(state)
        return parts if isinstance(parts, Tensor) else parts[0] + parts[1]

    def _written(self) -> Tensor:
        """Each token's column right after its write, `[T, H, K]`, from states of zeros."""
        apart: dict[str, Any] = {
            n: None if x is None else x[0].unflatten(0, (self.tokens, self.steps)) for n, x in self.tensors.items()
        }
        ones = apart["v"].new_ones(self.tokens, self.steps, self.heads, 1)
        call = self._call({**apart, "v": ones})
        return self._whole(implementation_of(call, self.backend)(call)[1])[..., 0]


def faded(g: Tensor | None, heads: int, columns: Tensor, cursors: Tensor) -> Tensor:
    """What a decay alone leaves, `e^{g_{j+1} + … + g_t}`: `[H, C, n]` from log-decays `[1, T, H]`, or None."""
    later = (cursors.unsqueeze(-1) >= columns).unsqueeze(0)
    if g is None:
        return later.double().expand(heads, -1, -1)
    total = g[0].double().clamp(min=-1e4).cumsum(0).T
    return torch.where(later, (total[:, cursors].unsqueeze(-1) - total[:, None, columns]), -torch.inf).exp()


class AttentionReading(Reading):
    """The reading of a layer of softmax attention, whose cache keeps all tokens of its window, with decays in FoX.

    Args:
        mixer: the layer.
        given: the arguments of its `attend`.
        tokens: T.
    """

    kind = "attention"

    def __init__(self, mixer: Any, given: tuple[Any, ...], tokens: int, chosen: Sequence[int] | None = None) -> None:
        self.mixer, self.given, self.tokens = mixer, given, tokens
        self.chosen = range(mixer.num_heads) if chosen is None else chosen
        self.heads = len(self.chosen)
        values = given[1]["values"][0, -tokens:]
        # Heads of a group share what they store.
        cached = sum(x[0, 0, 0].nbytes if x.ndim > 3 else x.element_size() for x in given[1].values())
        each, window = cached * mixer.num_kv_heads // mixer.num_heads, mixer.window
        self.stored = (0, each) if window is None else (each * (window - 1), 0)
        self.sizes = values.norm(dim=-1).T[[self._group(h, values.shape[1]) for h in self.chosen]]

    def of(self, heads: Sequence[int]) -> AttentionReading:
        return AttentionReading(self.mixer, self.given, self.tokens, [self.chosen[h] for h in heads])

    def _group(self, head: int, groups: int) -> int:
        return head * groups // self.mixer.num_heads

    def respond(self, columns: slice) -> Tensor:
        return self.weights()[:, :, columns]

    def weights(self) -> Tensor:
        q, cache, at, visible = self.given
        keys, dtype = cache["keys"], compute_dtype(q)
        slots = torch.arange(keys.shape[1], device=q.device)
        place = slots if at is None else at[0]
        if visible is None:
            visible = slots <= place.unsqueeze(-1)
        rows = []
        for head in self.chosen:
            group = self._group(head, keys.shape[2])
            scores = q[0, :, head].to(dtype) @ keys[0, :, group].to(dtype).T * q.shape[-1] ** -0.5
            if "forget" in cache:
                total = wide(cache["forget"][0, :, head]).clamp(min=FLOOR[dtype]).cumsum(0)
                scores = scores + (total[place].unsqueeze(-1) - total).to(dtype)
            weights = scores.masked_fill(~visible.view(scores.shape), -torch.inf).softmax(-1)
            rows.append(weights[:, -self.tokens :])
        return torch.stack(rows)

    def left(self, columns: Tensor, cursors: Tensor) -> Tensor:
        forget = self.given[1].get("forget")  # log-decays, which lower the scores of earlier keys
        g = None if forget is None else forget[:, -self.tokens :, list(self.chosen)]
        kept = faded(g, self.heads, columns, cursors)
        if self.mixer.window is None:
            return kept
        return kept.masked_fill(cursors.unsqueeze(-1) - columns >= self.mixer.window, 0.0)


def faded_by_two(g_slow: Tensor, g_fast: Tensor, columns: Tensor, cursors: Tensor, entry: int = 0) -> Tensor:
    """What GateRank's gates leave, `[H, C, n]`: the fast decay up to the first reset, and the slow one all along.

    Args:
        g_slow, g_fast: log-decays `[1, T, H]`; where g_slow is not 0 is a reset.
        entry: the tokens after which a write is in the fast state, see `horizon.retained_energy`.
    """
    resets = g_slow[0] != 0
    slow = torch.where(resets, g_slow[0], 0.0).double().clamp(min=-1e4).cumsum(0)
    fast = g_fast[0].double().clamp(min=-1e4).cumsum(0)
    entered = (columns + entry).clamp(max=len(fast) - 1)
    until = torch.minimum(next_reset(resets.cpu()).to(columns.device)[entered], cursors.view(-1, 1, 1))  # [C, n, H]
    total = (slow[cursors].unsqueeze(1) - slow[entered]).clamp(max=0)
    total = total + fast.gather(0, until.flatten(0, 1)).view_as(until)
    later = (cursors.unsqueeze(-1) >= columns).unsqueeze(-1)
    return torch.where(later, total - fast[columns], -torch.inf).exp().permute(2, 0, 1)


def faded_channels(g: Tensor, k: Tensor, columns: Tensor, cursors: Tensor) -> Tensor:
    """What decays of channels leave of each key, `‖e^{g_{j+1} + … + g_t} k_j‖ / ‖k_j‖`: `[H, C, n]`.

    Args:
        g: log-decays `[1, T, H, K]`.
        k: keys, or what each token wrote, `[1, T, H, K]`.
    """
    total = g[0].double().clamp(min=-1e4).cumsum(0)
    keys = F.normalize(k[0].double(), dim=-1)[columns]
    rows = []
    for cursor in cursors.tolist():
        seen = (columns <= cursor).view(-1, 1, 1)
        rows.append((torch.where(seen, total[cursor] - total[columns], -torch.inf).exp() * keys).norm(dim=-1).T)
    return torch.stack(rows, 1)
