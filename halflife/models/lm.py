"""The language model: embedding, blocks, norm and head. Its recurrent state is an argument and a result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife import layers
from halflife.initial import draws
from halflife.layers import Mixer, Shared, SharedTensors, State
from halflife.layers.init import reset
from halflife.layers.parts import is_watched, normed, set_backend
from halflife.layers.tpe import Toeplitz
from halflife.models.choices import mlp_of, norm_of, tpe_of
from halflife.models.config import ModelConfig
from halflife.models.loss import logits_of
from halflife.ops.backends.dispatch import beside
from halflife.ops.linear import cast_weights, fast_linears
from halflife.packing import Packing
from halflife.precision import lacks_products
from halflife.registry import taken

ModelState = tuple[State, ...]

_AS_THEY_ARE = nullcontext()


class Block(nn.Module):
    """One block: `x + mixer(norm(x))`, then `x + mlp(norm(x))` if the block has an MLP.

    A kind of hybrid layers may have its norms after mixer and MLP, `x + norm(mixer(x))`.
    A mixer beside the first one adds `mixer(x)` between them. Its state is stored in the block's state under
    `beside.…`. An MLP that reads the previous token is a mixer itself, and its state is stored under `mlp.…`.
    """

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        self.mixer_norm = norm_of(config)
        name, options = config.mixer_of(layer_idx)
        backend = config.mixer_options.get("backend", "auto")
        place = {"layer_idx": layer_idx, "num_layers": config.num_layers, "backend": backend}

        def build(mixer: str, own: Mapping[str, Any]) -> Mixer:
            offered = taken(layers.LAYERS[mixer], place)
            return layers.build(mixer, hidden_size=config.hidden_size, **{**offered, **own})

        self.mixer: Mixer = build(name, options)
        self.beside: Mixer | None = None
        if (beside := config.beside_of(layer_idx)) is not None:
            self.beside = build(*beside)
        self.mlp = mlp_of(config, layer_idx)
        self.mlp_norm = None if self.mlp is None else norm_of(config)
        self.norms_after = config.norms_after(layer_idx)
        for part in (self.mixer_norm, self.mlp, self.mlp_norm):
            if part is not None:
                set_backend(part, backend)

    def forward(
        self, x: Tensor, state: State | None, packing: Packing, shared: Shared, branch: Tensor | None = None,
        adds: bool = True,
    ) -> tuple[Any, State]:  # fmt: skip
        """Return `(x, state)`. With `adds=False` it is `((x, y), state)`, whose sum the next norm is to add.

        `branch` is such a y of the block before.
        """
        plain = x.is_cpu and x.dtype.itemsize > 2 and not torch.is_autocast_enabled("cpu")
        with _AS_THEY_ARE if plain or torch.compiler.is_compiling() else self._fast_maps(x):
            if shared:  # earlier layers may be on another device
                for name in shared:
                    shared[name] = shared[name].to(x.device)
            x, (y, new) = self._run(self.mixer, self.mixer_norm, x, branch, _part(state), packing, shared=shared)
            if self.beside is not None:
                x, (y, after) = self._run(self.beside, None, x, y, _part(state, "beside"), packing, shared=shared)
                new = {**new, **{f"beside.{name}": part for name, part in after.items()}}
            if isinstance(self.mlp, Mixer):
                both = (x + y, None) if x.is_cpu else (x, y)  # which there is faster
                x, (y, after) = self._run(self.mlp, self.mlp_norm, *both, _part(state, "mlp"), packing)
                new = {**new, **{f"mlp.{name}": part for name, part in after.items()}}
            elif self.mlp is not None and self.mlp_norm is not None and x.is_cpu and not self.norms_after:
                x = x + y
                y = self.mlp(self.mlp_norm(x))
            elif self.mlp is not None:
                x, y = self._run(self.mlp, self.mlp_norm, x, y)
            return (x + y if adds else (x, y)), new

    def _fast_maps(self, x: Tensor) -> AbstractContextManager[None]:
        narrow = fast_linears(self) if lacks_products(x) else _AS_THEY_ARE
        return narrow if x.is_cpu else cast_weights(self, x)

    @property
    def takes_branch(self) -> bool:
        """Whether it runs with a `branch`: nothing but its first norm reads its input."""
        return takes_sum(self.mixer_norm) and not self.norms_after

    def _run(
        self, part: nn.Module, norm: Any, x: Tensor, branch: Tensor | None, *given: Any, **options: Any
    ) -> tuple[Tensor, Any]:
        """`x + branch` (None: x), and what a mixer or MLP gives for it, with a norm before or after it, or none."""
        if branch is not None and norm is not None and (self.norms_after or not takes_sum(norm)):
            x, branch = x + branch, None
        if norm is not None and self.norms_after:
            found = part(x, *given, **options)
            return x, (norm(found[0]), found[1]) if isinstance(found, tuple) else norm(found)
        if x.is_cpu and norm is not None and branch is None:
            return x, part(norm(x), *given, **options)
        x, n, known = normed(norm, x, branch, part, *given)
        with known:
            return x, part(n, *given, **options)


def takes_sum(norm: nn.Module) -> bool:
    """Whether a norm also adds, in one pass over memory on a GPU."""
    return getattr(norm, "adds", False)


def _part(state: State | None, owner: str = "") -> State | None:
    """The state of one part of a block, whose names begin with `owner.`, or of its mixer; None at the start."""
    if not state:
        return None
    start = len(owner) + 1 if owner else 0
    return {name[start:]: x for name, x in state.items() if name.rpartition(".")[0] == owner}


class Backbone(nn.Module):
    """What turns token ids into hidden states: embedding, blocks and norm, which a subclass sets."""

    embedding: nn.Embedding
    embedding_norm: nn.Module
    embedding_dropout: float
    tpe: Toeplitz | None
    blocks: nn.ModuleList
    norm: nn.Module
    pass_backend = "auto"  # of the loss, see `parts.set_backend`
    context_parallel: Any = None  # a `halflife.parallel.ContextParallel`, if ids are pieces on several processes

    def hidden(
        self,
        ids: Tensor,
        state: Sequence[State] | None = None,
        cu_seqlens: Tensor | Packing | None = None,
        attention_mask: Tensor | None = None,
        action_mask: Tensor | None = None,
        call: Callable[..., tuple[Tensor, State]] | None = None,
    ) -> tuple[Tensor, ModelState]:
        """The normalised hidden states `[B, T, D]` before the head, and the new state.

        Args:
            ids: token ids `[B, T]`, or embeddings `[B, T, D]`.
            state, cu_seqlens, attention_mask, action_mask: as in `LanguageModel.forward`.
            call: function that runs a block, `call(block, x, state, packing, shared=shared)`, for activation
                checkpoints or to record inputs; None means `block(x, …)`.
        """
        if not isinstance(ids, Tensor):
            raise TypeError(f"ids must be a torch.Tensor; got {type(ids).__name__}")
        if ids.dtype == torch.bool or ids.is_complex() or ids.ndim != 2 + ids.is_floating_point():
            raise ValueError(
                f"ids must be integers [B, T] (or embeddings [B, T, D]); got {ids.dtype} {tuple(ids.shape)}"
            )
        depth = len(self.blocks) + (self.tpe is not None)
        if state is not None and len(state) != depth:
            raise ValueError(f"this state has {len(state)} layers; the model has {depth}")
        shape, index, shared = ids.shape[:2], None, self._shared(ids, action_mask)
        if attention_mask is None:
            packing = Packing.of(cu_seqlens, *shape)
        else:
            if cu_seqlens is not None:
                raise ValueError("give cu_seqlens (packed) or attention_mask (padded), not both")
            shared = SharedTensors({name: layers.unpad(shared[name], attention_mask)[0] for name in shared})
            ids, bounds, index = layers.unpad(ids, attention_mask)
            packing = Packing(1, ids.shape[1], bounds)
        context, padded = self.context_parallel, index is not None
        x, new, toeplitz = self.embedding_norm(self._embed(ids)), [], []
        if self.embedding_dropout:
            x = F.dropout(x, self.embedding_dropout, self.training)
        if self.tpe is not None:
            run = self.tpe if context is None else context.around(self.tpe, padded)
            encoded, tpe_state = run(x, None if state is None else state[-1], packing)
            x, toeplitz = (x + encoded if self.tpe.adds else encoded), [tpe_state]
        joins, branch = call is None and context is None and self._joins(x), None
        for i, block in enumerate(self.blocks):
            before = None if state is None else state[i]
            run = block if call is None else partial(call, block)
            run = run if context is None else context.around(run, padded)
            if joins:
                (x, branch), layer_state = run(x, before, packing, shared, branch, adds=False)
            else:
                x, layer_state = run(x, before, packing, shared=shared)
            new.append(layer_state)
        new += toeplitz
        x = self.norm(x) if branch is None else self.norm(x, branch)[1]
        return (x if index is None else layers.repad(x, index, *shape)), tuple(new)

    def _joins(self, x: Tensor) -> bool:
        """Whether the sum at the end of a block is left to the norm after it: on a GPU, if nobody looks at blocks."""
        if x.is_cpu or torch.compiler.is_compiling() or not takes_sum(self.norm):
            return False
        return all(block.takes_branch and not is_watched(block) for block in self.blocks)

    def _embed(self, ids: Tensor) -> Tensor:
        if ids.is_floating_point():
            return ids
        if ids.is_meta and not self.embedding.weight.is_meta:
            raise ValueError("ids are on the meta device, which has no values, and the model is not")
        try:
            return self.embedding(ids if ids.dtype == torch.int32 else ids.long())
        except IndexError as error:  # on a CPU; an accelerator does not tell
            message = f"ids must lie between 0 and {self.embedding.num_embeddings - 1}"
            raise ValueError(f"{message}; got {int(ids.min())} to {int(ids.max())}") from error

    def _shared(self, ids: Tensor, action_mask: Tensor | None) -> SharedTensors:
        if action_mask is None:
            return SharedTensors()
        if action_mask.shape != ids.shape[:2]:
            raise ValueError(f"action_mask must be [B, T] = {tuple(ids.shape[:2])}; got {tuple(action_mask.shape)}")
        if not any(isinstance(module, Mixer) and module.reads_action_mask for module in self.blocks.modules()):
            raise ValueError("action_mask is for layers of Koopman attention (ska), and this model has none")
        return SharedTensors({"action_mask": action_mask})


class LanguageModel(Backbone):
    """A causal language model with any mixer: `logits, state = model(ids, state, cu_seqlens, attention_mask)`.

    Args:
        config: the configuration; `preset` builds one by name.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embedding_norm = norm_of(config) if config.embedding_norm else nn.Identity()
        self.embedding_dropout = config.embedding_dropout
        self.tpe = tpe_of(config)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.norm = norm_of(config)
        # A tied head adds no parameter: the weight is one tensor with one name in a checkpoint.
        self.head = None if config.tie_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        backend = config.mixer_options.get("backend", "auto")
        self.pass_backend = beside(backend)
        for part in (self.embedding_norm, self.norm):
            set_backend(part, backend)
        self.reset_parameters()

    @draws
    def reset_parameters(self) -> None:
        """Draw every parameter again, each module by its own law; also works after construction on the meta device."""
        reset(self)
        nn.init.normal_(self.embedding.weight, std=self.config.initializer_range)
        if self.config.initialization == "rwkv7_released":
            nn.init.uniform_(self.embedding.weight, -1e-4, 1e-4)
        elif self.config.initialization != "default":
            self._reset_as_released()

    @torch.no_grad()
    def _reset_as_released(self) -> None:
        """Draw linear maps and convolutions again, from the law of PoST's released Mamba-2 or Gated DeltaNet."""
        for module in self.modules():
            if isinstance(module, (nn.Linear, layers.ShortConv)):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks if self.config.initialization == "mamba2_released" else ():
            projection = getattr(getattr(block, "mixer", None), "out_proj", None)
            if isinstance(projection, nn.Linear):
                nn.Linear.reset_parameters(projection)
                projection.weight /= math.sqrt(self.config.num_layers)

    def forward(
        self,
        ids: Tensor,
        state: Sequence[State] | None = None,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        action_mask: Tensor | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Return the logits of the token after each of `ids`.

        Args:
            ids: token ids `[B, T]`, integers below vocab_size.
            state: the state that the call on the previous piece returned; None at the start. It is not modified.
            cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1).
            attention_mask: `[B, T]`, 0 at padding, on the left or the right. The logits there are 0.
            action_mask: `[B, T]`, 0 at tokens that Koopman attention leaves out of its sums.

        Returns:
            `logits [B, T, vocab_size]` and the new state, one dict for each layer. The state of the Toeplitz layer, if
            the model has one, comes last.

        Raises:
            ValueError: a shape or dtype does not fit, the state is of another model, or the model has no layer that
                reads the action mask.
        """
        hidden, state = self.hidden(ids, state, cu_seqlens, attention_mask, action_mask)
        return self.logits(hidden), state

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the output head: `[…, D]` → `[…, vocab_size]`."""
        return logits_of(hidden, self.embedding.weight) if self.head is None else self.head(hidden)

    @property
    def head_or_weight(self) -> nn.Module | Tensor:
        """The output head, as `models.loss` takes it; if it is tied, the weight of the embedding `[vocab_size, D]`."""
        return self.embedding.weight if self.head is None else self.head

    def num_parameters(self) -> int:
        """Return the number of parameters; a tied head is counted once."""
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def state_size(self, length: int = 1) -> int:
        """Numbers that the state of one sequence holds after `length` tokens, counters of tokens not counted.

        It is the same for every length, but for softmax attention, whose cache grows, and for log-linear attention.
        """
        device = self.embedding.weight.device
        _, state = self.hidden(torch.zeros(1, length, dtype=torch.long, device=device))
        return sum(x.numel() for layer in state for x in layer.values() if x.is_floating_point())


def on_meta(config: ModelConfig) -> LanguageModel:
    """The model on the meta device, without memory for its weights."""
    with torch.device("meta"):
        return LanguageModel(config)
