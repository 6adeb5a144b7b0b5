"""A model sharded over processes with FSDP2. Any number of processes can load what another number has saved."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.checkpoint.state_dict_saver import save as write
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from halflife.models import LanguageModel

SHARDS = "shards"
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # keys are parameter names, not indices


def shard(objective: nn.Module, model: LanguageModel, device: torch.device) -> None:
    """Shard every parameter of `objective`, which holds `model`, over all processes, in place and block by block.

    The parameters of a block are gathered while the block runs. Parameters outside the blocks (embedding, head) are
    gathered for the whole pass.
    """
    # FSDP2 warns of views in outputs: blocks return views of their state, but nothing writes into them in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for module in (*model.blocks, objective):
        fully_shard(module, mesh=mesh)


def save(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write a checkpoint into `folder`; every process writes its shards.

    Raises:
        OSError: a process could not write.
    """
    writer = HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True)
    try:
        write(cast(Any, _tensors(model, optimizer)), storage_writer=writer)
    except CheckpointException as error:  # no Exception, so that callers would miss it
        raise OSError(_first_failure(error)) from error


def load(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load a checkpoint of `save`. The number of processes may differ from that of `save`.

    Raises:
        ValueError: a shard cannot be read.
    """
    tensors = _tensors(model, optimizer)
    try:
        read(cast(Any, tensors), storage_reader=HuggingFaceStorageReader(str(folder / SHARDS)))
    except CheckpointException as error:
        raise ValueError(_first_failure(error)) from error
    settings = {k: v for k, v in _optimizer(model, optimizer).items() if not isinstance(v, torch.Tensor)}
    weights = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
    moments = {k.removeprefix("optimizer/"): v for k, v in tensors.items() if k.startswith("optimizer/")}
    set_model_state_dict(model, cast(Any, weights))
    set_optimizer_state_dict(model, optimizer, cast(Any, {**settings, **moments}), options=FLAT)


def _first_failure(error: CheckpointException) -> str:
    return next((f"process {rank}: {failure[0]}" for rank, failure in error.failures.items()), str(error))


def _tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint. The settings of the optimiser are not saved; the run's configuration has them."""
    weights: dict[str, Any] = {f"model/{name}": x for name, x in get_model_state_dict(model).items()}
    moments = {f"optimizer/{k}": v for k, v in _optimizer(model, optimizer).items() if isinstance(v, torch.Tensor)}
    return {**weights, **moments}


def _optimizer(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer, options=FLAT)


def gather(model: LanguageModel) -> dict[str, torch.Tensor]:
    """The unsharded parameters of a model, on the CPU of the first process; `{}` on the others."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, torch.Tensor], get_model_state_dict(model, options=options))
