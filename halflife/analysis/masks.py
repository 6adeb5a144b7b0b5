"""Decay masks of scalar gates: their entries, their rank below the diagonal, and the gates that models use.

`o = (Q Kᵀ ⊙ D) V` with D = Γ ⊙ Λ under GateRank, and D = Λ (Γ is all ones) under one scalar decay (Mamba-2).

Let A and B be the cumulative sums of the slow and of the fast log-decays, and n(j) the first reset after token j. Then
`D_ij = e^{A_i − A_j + B_min(n(j), i) − B_j}` for j ≤ i.

Below the diagonal, D has rank 1 without resets and at most 2 with them, however many segments the resets make. Proof:
take any rows i and columns j with all j ≤ m ≤ all i. A key j with a reset in (j, m] has n(j) ≤ i, so
`D_ij = e^{A_i} · e^{B_n(j) − A_j − B_j}`. All other keys share n = n(m), so
`D_ij = e^{A_i + B_min(n, i)} · e^{−A_j − B_j}`. These are two outer products. The rank is 2 if and only if both kinds
of key occur and `B_min(n, i)` takes two values on the rows. This needs a reset between two of the columns, no reset
between the last column and the first row, and some fast decay after it. Two states cannot give more than rank 2
(N-semiseparable matrices, Dao & Gu 2024). GateRank, §3.2, says that several segments give a rank above 1. More segments
do not give a higher rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.analysis.capture import capture
from halflife.analysis.decays import half_life
from halflife.analysis.readable import TextIds
from halflife.analysis.records import Record
from halflife.data.tokenizers import check_ids
from halflife.evaluation import evaluating
from halflife.files import RUN_JSON, read_json
from halflife.layers.memory.log_linear import LogLinear
from halflife.models import LanguageModel, ModelConfig
from halflife.models.load import checkpoints, load_any
from halflife.models.timescales import layer_decays
from halflife.ops.gate_rank import masks
from halflife.shapes import Float, Int
from halflife.tasks import TASKS, build, stream_seed, with_tier

RANK_TOLERANCE = torch.finfo(torch.float32).eps  # relative to the largest; a float32 mask cannot tell less from 0
FORGOTTEN_VALUE = 1e-290  # below it, rounding to denormal numbers would create singular values: the rank is 0


@dataclass(frozen=True)
class Gates:
    """The log-decays of one layer on some sequences, in float64 on the CPU.

    Attributes:
        layer: the index of the layer, from 0.
        g_fast: log-decays of the fast state, or of the only state, `[B, T, H]`.
        g_slow: log-decays of the slow state, `[B, T, H]`, 0 where there is no reset. None without GateRank.
        factors: Γ and Λ `[B, H, T, T]` of log-linear attention. None for other layers.
    """

    layer: int
    g_fast: Tensor
    g_slow: Tensor | None = None
    factors: tuple[Tensor, Tensor] | None = None

    def of(self, sequences: slice) -> Gates:
        """The gates of some of the B sequences."""
        slow = None if self.g_slow is None else self.g_slow[sequences]
        factors = None if self.factors is None else (self.factors[0][sequences], self.factors[1][sequences])
        return Gates(self.layer, self.g_fast[sequences], slow, factors)

    def masks(self) -> tuple[Tensor, Tensor]:
        """Return Γ and Λ, `[B, H, T, T]` in float64."""
        return decay_masks(self.g_fast, self.g_slow) if self.factors is None else self.factors

    def resets(self) -> Tensor:
        """Return where a token resets, `[B, T, H]`. A reset at the first token has no effect and does not count."""
        resets = torch.zeros_like(self.g_fast, dtype=torch.bool) if self.g_slow is None else self.g_slow != 0
        return resets & (torch.arange(resets.shape[1]) > 0).unsqueeze(-1)


@dataclass(frozen=True)
class HeadMask(Record):
    """The mask of one head, over all sequences.

    Attributes:
        layer, head: the indices of the layer and the head, from 0.
        resets: the mean number of resets in a sequence. A reset at the first token does not count.
        segment: the mean length of a segment, in tokens.
        fast: the half-life of the fast state at its mean log-decay, in tokens, without first tokens.
        slow: the same of the slow state. None without GateRank.
        rank_max: the largest rank of the blocks below the diagonal, see `off_diagonal_rank`.
        rank_mean: the mean rank of these blocks.
    """

    layer: int
    head: int
    resets: float
    segment: float
    fast: float | None
    slow: float | None
    rank_max: int
    rank_mean: float


def decay_masks(
    g_fast: Float[Tensor, "B T H"], g_slow: Float[Tensor, "B T H"] | None = None
) -> tuple[Float[Tensor, "B H T T"], Float[Tensor, "B H T T"]]:
    """Return Γ and Λ in float64, 0 above the diagonal (`ops.gate_rank.masks`). Without `g_slow`, Γ is all ones."""
    g_slow = torch.zeros_like(g_fast) if g_slow is None else g_slow
    gamma, lam = masks(g_slow.double(), g_fast.double())
    return gamma, lam


def off_diagonal_rank(mask: Float[Tensor, "*M T T"], block: int) -> tuple[Int[Tensor, "*M"], Float[Tensor, "*M"]]:
    """Return the numerical rank of the blocks below the diagonal, in a partition into blocks of `block` tokens.

    The rank is the number of singular values above `RANK_TOLERANCE` (2⁻²³) times the largest one, in float64. A block
    in which everything is forgotten (all values below 1e-290) has rank 0. The exact rank is 1 for one scalar
    decay and at most 2 for GateRank. A block of rank 2 has a reset between two columns, and none between its last
    column and its first row, as the module's text proves. If segments are shorter than blocks, only neighbouring blocks
    can have rank 2.

    Args:
        mask: `[…, T, T]`.
        block: the tokens of a block. The last block may be shorter.

    Returns:
        The maximum and the mean over the blocks, `[…]`.

    Raises:
        ValueError: if a block has no token, or contains all of them, so that no block is off the diagonal.
    """
    ranks = block_ranks(mask, block)
    return ranks.amax(-1), ranks.double().mean(-1)


def block_ranks(mask: Float[Tensor, "*M T T"], block: int) -> Int[Tensor, "*M P"]:
    """Return the rank of each of the P = N (N − 1) / 2 blocks below the diagonal, row by row (`off_diagonal_rank`)."""
    length = mask.shape[-1]
    if not 1 <= block < length:
        raise ValueError(
            f"with blocks of {block} tokens, a sequence of {length} has no block below the diagonal; "
            f"choose 1 to {length - 1}"
        )
    count = -(-length // block)
    missing = count * block - length
    padded = F.pad(mask.double(), (0, missing, 0, missing))  # rows of zeros do not change the rank
    tiles = padded.unflatten(-1, (count, block)).unflatten(-3, (count, block)).transpose(-3, -2)
    rows, columns = torch.tril_indices(count, count, -1)
    values = torch.linalg.svdvals(tiles[..., rows, columns, :, :])
    largest = values[..., :1]
    return ((values > RANK_TOLERANCE * largest) & (largest > FORGOTTEN_VALUE)).sum(-1)


def cut_values(mask: Float[Tensor, "T T"], count: int = 3) -> Float[Tensor, "T R"]:
    """Return the largest singular values of the block of rows ≥ m and columns ≤ m, for every m, over the first one.

    Such a block is what tokens from m on read from tokens up to m. These blocks contain all others that have no entry
    above the diagonal. Their rank is the number of states that a recurrence with this mask must hold after token m is
    written. Values are NaN where a block has fewer than `count`.
    """
    values = torch.full((mask.shape[-1], count), torch.nan, dtype=torch.float64)
    for m in range(mask.shape[-1]):
        largest = torch.linalg.svdvals(mask[m:, : m + 1].double())[:count]
        values[m, : len(largest)] = largest / largest[0]
    return values


@torch.no_grad()
def capture_gates(model: LanguageModel, ids: Int[Tensor, "B T"]) -> list[Gates]:
    """Return the log-decays that each layer uses on `ids`, for all layers with one decay per head.

    The model reads in evaluation mode and stays as it is. The counts that GateRank makes in training do not change.
    """
    fast: dict[int, Tensor] = {}
    slow: dict[int, Tensor] = {}

    def keep(gates: dict[int, Tensor], layer: int, g: Tensor) -> None:
        gates[layer] = g.double().cpu()

    factors: dict[int, tuple[Tensor, Tensor]] = {}
    with (
        evaluating(model), capture(model, decay=partial(keep, fast), slow_decay=partial(keep, slow)),
        _factors(model, factors),
    ):  # fmt: skip
        model.hidden(ids.to(model.embedding.weight.device))
    scalar = [layer for layer, decay in layer_decays(model) if decay.granularity == "scalar"]
    return [Gates(layer, fast[layer], slow.get(layer), factors.get(layer)) for layer in scalar]


@contextmanager
def _factors(model: LanguageModel, found: dict[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Put Γ and Λ of the layers with log-linear attention into `found`, as the model reads."""

    def keep(layer: int, module: LogLinear, arguments: tuple[Any, ...]) -> None:
        gamma, lam = module.masks(arguments[0], arguments[4])  # from x and g
        found[layer] = gamma.cpu(), lam.cpu()

    with ExitStack() as hooks:
        for layer, block in enumerate(model.blocks):
            if (module := getattr(block.mixer, "log_linear", None)) is not None:
                hooks.enter_context(module.register_forward_pre_hook(partial(keep, layer)))
        yield


def head_masks(gates: Gates, block: int) -> list[HeadMask]:
    """Measure the masks of one layer, head by head, over all sequences; `block` as in `off_diagonal_rank`."""
    sequences, length, heads = gates.g_fast.shape
    highest, mean = off_diagonal_rank(torch.mul(*gates.masks()), block)
    resets = gates.resets().sum((0, 1)).tolist()

    def lives(g: Tensor | None) -> list[float | None]:
        if g is None:
            return [None] * heads
        return [half_life(decay) for decay in g[:, 1:].mean((0, 1)).exp().tolist()]

    fast, slow = lives(gates.g_fast), lives(gates.g_slow)
    return [
        HeadMask(
            layer=gates.layer, head=h, resets=resets[h] / sequences,
            segment=sequences * length / (resets[h] + sequences), fast=fast[h], slow=slow[h],
            rank_max=int(highest[:, h].max()), rank_mean=mean[:, h].mean().item(),
        )
        for h in range(heads)
    ]  # fmt: skip


def measure_masks(
    folders: Sequence[Path],
    *,
    text: Sequence[Path] = (),
    task: str | None = None,
    tokens: int = 64,
    sequences: int = 8,
    tokenizer: str | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, list[Gates]]:
    """Return the gates of every model below the folders, by its label (`models.load.checkpoints`).

    Args:
        folders: checkpoints, or runs with checkpoints below them.
        task: a task to read, `name` or `name:tier`. Without text and task, each model reads the task of its training.
        tokens: the length of a sequence. Each is read from its start.
        sequences: the number of sequences.
        tokenizer: for text, the name or folder of a tokenizer of transformers. None takes the one in the folder
            of each model, and reads bytes where there is none.

    Raises:
        FileNotFoundError: if there is no checkpoint, no such file, or no task that a checkpoint was trained on.
        ValueError: if text and task are given, if one does not fit the model, or if a model has no scalar decay.
    """
    if text and task:
        raise ValueError("give a text or a task to read, not both")
    source, gates = TextIds(text, tokenizer, tokens, sequences), {}
    for label, folder in checkpoints(folders).items():
        model = load_any(folder, device)
        ids, name = source.ids_for(model, folder)
        if ids is not None:
            check_ids(model.config, ids, name)
        else:
            read = _validation_task(folder) if task is None else task
            ids = _task_ids(read, model.config, tokens, sequences)
        gates[label] = capture_gates(model, ids)
        if not gates[label]:
            raise ValueError(f"{label} has no layer with one decay per head, and so no mask: {folder}")
    return gates


def _validation_task(folder: Path) -> dict[str, Any]:
    """Return the arguments of `tasks.build` for the first task that the run in this folder was validated on."""
    path = folder / RUN_JSON
    if not path.is_file():
        raise FileNotFoundError(f"{folder} does not say what its model was trained on; give --text FILE or --task NAME")
    run = read_json(path)
    tasks = run.get("validation") if isinstance(run, dict) else None
    if not tasks or "name" not in tasks[0]:
        raise ValueError(f"{path} names no task; give --text FILE or --task NAME")
    return tasks[0]


def _task_ids(task: str | dict[str, Any], config: ModelConfig, tokens: int, sequences: int) -> Tensor:
    """Return the first `tokens` ids of examples, `[B, T]`, of a task by its name or by arguments of `tasks.build`."""
    if tokens < 2 or sequences < 1:
        raise ValueError(f"need 2 tokens or more and at least 1 sequence; got {tokens} and {sequences}")
    if isinstance(task, str):
        arguments = _task_arguments(task, config.vocab_size, tokens)
    else:
        arguments = {**task, **({"length": tokens} if "length" in task else {})}
    ids = build(**arguments).generate(sequences, stream_seed("test", 0)).inputs[:, :tokens]
    if (largest := int(ids.max())) >= config.vocab_size:
        raise ValueError(
            f"{arguments['name']} has token {largest:,}; {config.name} has a vocabulary of {config.vocab_size:,}"
        )
    return ids


def _task_arguments(written: str, vocab_size: int, tokens: int) -> dict[str, Any]:
    """Return the arguments of `tasks.build` for `name` or `name:tier`, with sizes that fit the model."""
    own = with_tier(written)
    sizes = {"length": tokens, "vocab_size": vocab_size, "num_pairs": max(1, tokens // 16)}
    fields = {field.name for field in dataclasses.fields(TASKS[own["name"]])}
    return {**{key: size for key, size in sizes.items() if key in fields}, **own}
