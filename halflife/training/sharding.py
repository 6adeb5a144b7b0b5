"""A model sharded over processes with FSDP2. Any number of processes can load what another number has saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as shard_unit

from halflife.models import LanguageModel
from halflife.models.lm import Block
from halflife.precision import Float32Module

SHARDS = "shards"
FLAT = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)  # keys are parameter names, not indices


# The modules that are sharded apart. FSDP1 and FSDP2 need parameters of one dtype in each, and those of decays are
# float32 in a bfloat16 model. FSDP1: `auto_wrap_policy=ModuleWrapPolicy(UNITS)`.
UNITS = {Block, Float32Module}


def fully_shard(model: nn.Module, mp_policy: MixedPrecisionPolicy | None = None, **options: Any) -> nn.Module:
    """Shard a model with FSDP2, in place: each module of `UNITS` apart, the inner ones first, and then the rest.

    The parameters of a unit are gathered while it runs. Those outside the units (embedding, head) are gathered for the
    whole pass.

    Args:
        model: a `LanguageModel`, a model of `halflife.hf`, or a module with one inside.
        mp_policy: dtypes of all parameters but those of `Float32Module`s, which stay as they are.
        **options: other arguments of `torch.distributed.fsdp.fully_shard`.

    Returns:
        The model.
    """
    # FSDP2 warns of views in outputs: blocks and decays return some, but nothing writes into them in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    options["mp_policy"] = mp_policy or MixedPrecisionPolicy()
    mixed = mp_policy is not None or len({x.dtype for x in model.parameters()}) > 1
    for module in reversed([*model.modules()]):
        if isinstance(module, Float32Module) and mixed:
            shard_unit(module, **{**options, "mp_policy": MixedPrecisionPolicy()})
        elif isinstance(module, Block):
            shard_unit(module, **options)
    return shard_unit(model, **options)  # pyright: ignore[reportReturnType]


def save(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write a checkpoint into `folder`; every process writes its shards."""
    writer = HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True)
    try:
        write(cast(Any, _parts(model, optimizer)[0]), storage_writer=writer)
    except CheckpointException as error:  # no Exception, so that callers would miss it
        raise OSError(_first_failure(error)) from error


def load(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load a checkpoint of `save`. The number of processes may differ from that of `save`."""
    tensors, settings = _parts(model, optimizer)
    try:
        read(cast(Any, tensors), storage_reader=HuggingFaceStorageReader(str(folder / SHARDS)))
    except CheckpointException as error:
        raise ValueError(_first_failure(error)) from error
    weights = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
    moments = {k.removeprefix("optimizer/"): v for k, v in tensors.items() if k.startswith("optimizer/")}
    states: dict[str, Any] = {"model_state_dict": weights, "optim_state_dict": {**settings, **moments}}
    state_dict.set_state_dict(model, optimizer, **states, options=FLAT)


def _first_failure(error: CheckpointException) -> str:
    return next((f"process {rank}: {failure[0]}" for rank, failure in error.failures.items()), str(error))


def _parts(model: Any, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a checkpoint, and the optimiser's settings, which are not saved: the configuration has them."""
    weights, state = state_dict.get_state_dict(model, optimizer, options=FLAT)
    moments = {f"optimizer/{k}": v for k, v in state.items() if isinstance(v, torch.Tensor)}
    settings = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
    return {**{f"model/{k}": v for k, v in weights.items()}, **moments}, settings


def gather(model: LanguageModel) -> dict[str, torch.Tensor]:
    """The unsharded parameters of a model, on the CPU of the first process; `{}` on the others."""
    options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, torch.Tensor], state_dict.get_model_state_dict(model, options=options))
