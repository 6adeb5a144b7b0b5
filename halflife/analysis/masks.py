"""Decay masks of scalar gates: their entries, their rank below the diagonal, and the gates that models use.

`o = (Q Kᵀ ⊙ D) V` with D = Γ ⊙ Λ under GateRank, and D = Λ, Γ of ones, under one scalar decay (Mamba-2).

Below the diagonal, D has rank 1 without resets and at most 2 with them, however many segments they make. Take any rows
i and columns j with all j ≤ m ≤ all i. A key j with a reset in (j, m] has n(j) ≤ i, so `D_ij = e^{A_i} · e^{B_n(j) −
A_j − B_j}`; all others share n = n(m), so `D_ij = e^{A_i + B_min(n, i)} · e^{−A_j − B_j}`: two outer products. The rank
is 2 if and only if both kinds of key are there and `B_min(n, i)` takes two values on the rows: it needs a reset between
two of the columns, none between the last column and the first row, and some fast decay after it. Two is what two
states can give (N-semiseparable matrices, Dao & Gu 2024). GateRank, §3.2, says that several segments give a rank above
1; more of them do not give more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.analysis.decays import half_life, recording
from halflife.analysis.spectrum import layer_decays
from halflife.data.tokenizers import check_ids, pieces, read_ids
from halflife.files import read_json
from halflife.models import LanguageModel, ModelConfig
from halflife.models.load import checkpoints, load_any
from halflife.ops.gate_rank import masks
from halflife.registry import unknown
from halflife.shapes import Float, Int
from halflife.tasks import TASKS, build, stream_seed

TOLERANCE = torch.finfo(torch.float32).eps  # what a mask in float32 could not tell from 0, relative to the largest
FORGOTTEN = 1e-290  # below, rounding to denormal numbers would make up singular values: a block of those has rank 0


class Gates(NamedTuple):
    """The log-decays `[B, T, H]`, float64 on the CPU, of one layer; without GateRank there is no `g_slow`."""

    layer: int
    g_fast: Tensor
    g_slow: Tensor | None = None

    def masks(self) -> tuple[Tensor, Tensor]:
        """Γ and Λ, `[B, H, T, T]` in float64."""
        return decay_masks(self.g_fast, self.g_slow)

    def resets(self) -> Tensor:
        """Where a token makes the fast state slow, `[B, T, H]`; at the first there is nothing to take over."""
        found = torch.zeros_like(self.g_fast, dtype=torch.bool) if self.g_slow is None else self.g_slow != 0
        return found & (torch.arange(found.shape[1]) > 0).unsqueeze(-1)


def decay_masks(
    g_fast: Float[Tensor, "B T H"], g_slow: Float[Tensor, "B T H"] | None = None
) -> tuple[Float[Tensor, "B H T T"], Float[Tensor, "B H T T"]]:
    """Γ and Λ in float64, 0 above the diagonal (`ops.gate_rank.masks`); without `g_slow`, one decay: Γ is of ones."""
    slow = torch.zeros_like(g_fast) if g_slow is None else g_slow
    gamma, lam = masks(slow.double(), g_fast.double())
    return gamma, lam


# ------------------------------------------------------------------------------------------------- rank


def off_diagonal_rank(mask: Float[Tensor, "*M T T"], block: int) -> tuple[Int[Tensor, "*M"], Float[Tensor, "*M"]]:
    """Numerical rank of the blocks below the diagonal of a partition into blocks of `block` tokens.

    The singular values above `TOLERANCE` (2⁻²³) of a block's largest count, in float64; a block in which all is
    forgotten (below 1e-290) has rank 0. The exact rank is 1 for one scalar decay and at most 2 for GateRank; a block of
    rank 2 has a reset between two columns, and none between its last column and its first row (the proof: above). So
    where segments are shorter than blocks, only neighbouring blocks can have it.

    Args:
        mask: `[…, T, T]`.
        block: tokens; the last block may be shorter.

    Returns:
        The maximum and the mean over the blocks, `[…]`.

    Raises:
        ValueError: a block of no token, or of all of them: then no block is off the diagonal.
    """
    ranks = block_ranks(mask, block)
    return ranks.amax(-1), ranks.double().mean(-1)


def block_ranks(mask: Float[Tensor, "*M T T"], block: int) -> Int[Tensor, "*M P"]:
    """The rank of each of the P = N (N − 1) / 2 blocks below the diagonal, row after row, as `off_diagonal_rank`."""
    length = mask.shape[-1]
    if not 1 <= block < length:
        raise ValueError(f"blocks of {block} tokens leave none off the diagonal of {length}; choose 1 to {length - 1}")
    count = -(-length // block)
    missing = count * block - length
    padded = F.pad(mask.double(), (0, missing, 0, missing))  # rows of zeros change no rank
    tiles = padded.unflatten(-1, (count, block)).unflatten(-3, (count, block)).transpose(-3, -2)
    rows, columns = torch.tril_indices(count, count, -1)
    values = torch.linalg.svdvals(tiles[..., rows, columns, :, :])
    largest = values[..., :1]
    return ((values > TOLERANCE * largest) & (largest > FORGOTTEN)).sum(-1)


def cut_values(mask: Float[Tensor, "T T"], count: int = 3) -> Float[Tensor, "T R"]:
    """The largest singular values of what tokens from m on read from tokens up to m, for every m, over the first.

    Those blocks, rows ≥ m and columns ≤ m, hold all others that have no entry above the diagonal. Their rank is the
    number of states that a recurrence with this mask must hold after m's write. NaN where a block has fewer values.
    """
    values = torch.full((mask.shape[-1], count), torch.nan, dtype=torch.float64)
    for m in range(mask.shape[-1]):
        found = torch.linalg.svdvals(mask[m:, : m + 1].double())[:count]
        values[m, : len(found)] = found / found[0]
    return values


# ------------------------------------------------------------------------------------- gates of a model


@torch.no_grad()
def capture_gates(model: LanguageModel, ids: Int[Tensor, "B T"]) -> list[Gates]:
    """The log-decays that each layer uses on `ids`, for all layers with one decay a head.

    The model stays as it is: it reads in evaluation mode, and what GateRank counts while it trains does not move.
    """
    scalar = [layer for layer, decay in layer_decays(model) if decay.granularity == "scalar"]
    fast: dict[int, Tensor] = {}
    slow: dict[int, Tensor] = {}

    def tapped(layer: int, gate: nn.Module) -> Any:
        def after(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            slow[layer] = output[0].double().cpu()

        return gate.slow_gate.register_forward_hook(after)  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]

    with ExitStack() as stack:
        stack.enter_context(_evaluating(model))
        stack.enter_context(recording(model, lambda layer, g: fast.update({layer: g.double().cpu()})))
        for layer in scalar:
            if (gate := getattr(model.blocks[layer].mixer, "gate_rank", None)) is not None:
                stack.enter_context(tapped(layer, gate))
        model.hidden(ids.to(model.embedding.weight.device))
    return [Gates(layer, fast[layer], slow.get(layer)) for layer in scalar]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def head_numbers(gates: Gates, block: int) -> list[dict[str, Any]]:
    """What the gates of one layer come to, head by head, over all sequences.

    Returns:
        One dict a head: "layer", "head"; "resets", the mean number of a sequence (the first token's takes over nothing
        and does not count), and "segment", the mean tokens of a segment; "fast" and "slow", the half-lives (tokens) at
        the mean log-decay of the states (slow: None without GateRank; the first token has nothing to forget and is
        left out); "rank_max" and "rank_mean" of the blocks off the diagonal.

    Raises:
        ValueError: see `off_diagonal_rank`.
    """
    sequences, length, heads = gates.g_fast.shape
    highest, mean = off_diagonal_rank(torch.mul(*gates.masks()), block)
    resets = gates.resets().sum((0, 1)).tolist()

    def lives(g: Tensor | None) -> list[float | None]:
        if g is None:
            return [None] * heads
        return [half_life(decay) for decay in g[:, 1:].mean((0, 1)).exp().tolist()]

    fast, slow = lives(gates.g_fast), lives(gates.g_slow)
    return [
        {"layer": gates.layer, "head": h, "resets": resets[h] / sequences,
         "segment": sequences * length / (resets[h] + sequences), "fast": fast[h], "slow": slow[h],
         "rank_max": int(highest[:, h].max()), "rank_mean": mean[:, h].mean().item()}
        for h in range(heads)
    ]  # fmt: skip


# --------------------------------------------------------------------------------------- several models


def survey(
    folders: Sequence[Path],
    *,
    text: Sequence[Path] = (),
    task: str | None = None,
    tokens: int = 64,
    sequences: int = 8,
    tokenizer: str | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, list[Gates]]:
    """The gates of every model below the folders, by its label (see `decay_survey.checkpoints`).

    Args:
        folders: checkpoints, or runs with checkpoints below them.
        text: files to read; `task`: a task to read, `name` or `name:tier`. With neither, each model reads the task
            that it was trained on.
        tokens, sequences: how much is read, each sequence from its start.
        tokenizer: for text, name or folder of a tokenizer of transformers; None reads bytes.
        device: where the models run.

    Raises:
        FileNotFoundError: no checkpoint, no such file, or no task that a checkpoint was trained on.
        ValueError: text and task, a text or task that does not fit the model, or a model with no scalar decay.
    """
    if text and task:
        raise ValueError("give a text or a task to read, not both")
    found = {}
    for label, folder in checkpoints(folders).items():
        model = load_any(folder, device)
        if text:
            ids = pieces(read_ids(text, tokenizer), tokens, sequences)
            check_ids(model.config, ids, tokenizer)
        else:
            ids = _task_ids(_own_task(folder) if task is None else task, model.config, tokens, sequences)
        found[label] = capture_gates(model, ids)
        if not found[label]:
            raise ValueError(f"{label} has no layer with one decay a head, and so no mask: {folder}")
    return found


def _own_task(folder: Path) -> dict[str, Any]:
    """The task, as `tasks.build` takes it, that the run in this folder was validated on."""
    path = folder / "run.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} does not say what its model was trained on: name --text FILE or --task NAME")
    run = read_json(path)
    tasks = run.get("validation") if isinstance(run, dict) else None
    if not tasks or "name" not in tasks[0]:
        raise ValueError(f"{path} names no task: name --text FILE or --task NAME")
    return tasks[0]


def _task_ids(task: str | dict[str, Any], config: ModelConfig, tokens: int, sequences: int) -> Tensor:
    """The first `tokens` ids of examples, `[B, T]`, of a task by its name, or by what `tasks.build` takes."""
    if tokens < 2 or sequences < 1:
        raise ValueError(f"need 2 tokens or more and at least 1 sequence; got {tokens} and {sequences}")
    if isinstance(task, str):
        settings = _settings(task, config.vocab_size, tokens)
    else:
        settings = {**task, **({"length": tokens} if "length" in task else {})}
    ids = build(**settings).generate(sequences, stream_seed("test", 0)).inputs[:, :tokens]
    if (largest := int(ids.max())) >= config.vocab_size:
        raise ValueError(
            f"{settings['name']} has token {largest:,}; {config.name} has a vocabulary of {config.vocab_size:,}"
        )
    return ids


def _settings(written: str, vocab_size: int, tokens: int) -> dict[str, Any]:
    name, _, tier = written.partition(":")
    kind = TASKS[name]
    tiers: dict[str, dict[str, Any]] = getattr(kind, "tiers", {})
    if tier and tier not in tiers:
        raise unknown(f"tier of {name}", tier, list(tiers)) if tiers else ValueError(f"task {name} has no tiers")
    sizes = {"length": tokens, "vocab_size": vocab_size, "num_pairs": max(1, tokens // 16)}
    fields = {field.name for field in dataclasses.fields(kind)}
    return {"name": name, **{key: size for key, size in sizes.items() if key in fields}, **tiers.get(tier, {})}
