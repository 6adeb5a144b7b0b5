"""A model in shards on several processes (FSDP2), saved and loaded by any number of them as safetensors."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
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
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)  # names of parameters, not their numbers


def shard(objective: nn.Module, model: LanguageModel, device: torch.device) -> None:
    """Shares out every parameter of `objective`, which holds `model`, over all processes, in place, block by block.

    A block's parameters are gathered when it runs, and dropped after; what stands outside the blocks (embedding, head)
    is gathered for the whole pass. Scalars stay whole, and the Trainer keeps them equal.
    """
    # Blocks return parts of their state as views; nothing is written into them in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    scalars = {x for x in objective.parameters() if not x.ndim}
    for module in (*model.blocks, objective):
        fully_shard(module, mesh=mesh, ignored_params=scalars)


def save(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Every process writes its part into `folder`."""
    writer = HuggingFaceStorageWriter(str(folder / SHARDS), save_distributed=True)
    write(cast(Any, _tensors(model, optimizer)), storage_writer=writer)


def load(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """The inverse of `save`, by however many processes.

    Raises:
        ValueError: the checkpoint was not written by `save`.
    """
    if not (folder / SHARDS).is_dir():
        raise ValueError(f"{folder} is no checkpoint in shards: go on without --fsdp, as the run began")
    tensors = _tensors(model, optimizer)
    read(cast(Any, tensors), storage_reader=HuggingFaceStorageReader(str(folder / SHARDS)))
    settings = {k: v for k, v in _optimizer(model, optimizer).items() if not isinstance(v, torch.Tensor)}
    weights = {k.removeprefix("model/"): v for k, v in tensors.items() if k.startswith("model/")}
    moments = {k.removeprefix("optimizer/"): v for k, v in tensors.items() if k.startswith("optimizer/")}
    set_model_state_dict(model, cast(Any, weights))
    set_optimizer_state_dict(model, optimizer, cast(Any, {**settings, **moments}), options=FLAT)


def _tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds. An optimiser's settings are no tensors: they are the run's configuration's."""
    weights: dict[str, Any] = {f"model/{name}": x for name, x in get_model_state_dict(model).items()}
    moments = {f"optimizer/{k}": v for k, v in _optimizer(model, optimizer).items() if isinstance(v, torch.Tensor)}
    return {**weights, **moments}


def _optimizer(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer, options=FLAT)


def gather(model: LanguageModel) -> dict[str, torch.Tensor]:
    """The whole parameters of a model in shards, on the CPU of the first process; nothing on the others."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return cast(dict[str, torch.Tensor], get_model_state_dict(model, options=options))
