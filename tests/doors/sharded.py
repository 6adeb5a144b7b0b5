"""A process of `test_fsdp.py`, which trains sharded models beside unsharded ones: `sharded.py HOW DTYPE [NAME …]`.

The unsharded model reads the rows of each process in turn, and takes the mean of the gradients. The first process
prints what differs, a JSON object a model: the loss, the saved weights, and errors.
"""

import copy
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from helpers import add_noise
from test_registry import NAMES, VOCABULARY, build
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from halflife.hf import HalflifeForCausalLM
from halflife.training import sharding

ROWS, LENGTH, STEPS, RATE = 2, 11, 2, 0.5
CPU = torch.device("cpu")
WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # of views, into which nothing writes


def by_fsdp1(model):
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy(sharding.UNITS), use_orig_params=True, device_id=CPU
    )


def by_fsdp2(model):
    for module in reversed([*model.modules()]):
        if isinstance(module, (*sharding.UNITS,)):
            fully_shard(module)
    return fully_shard(model)


def by_our_function(model):
    return sharding.fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))


def by_accelerate(version):
    def shard(model):
        as_on_accelerators()
        options = {"use_orig_params": True} if version == 1 else {"reshard_after_forward": True}
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version, auto_wrap_policy="transformer_based_wrap", sync_module_states=False, **options
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        assert accelerator.distributed_type == DistributedType.FSDP
        AcceleratorState._shared_state["device"] = CPU
        sharded, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
        return sharded

    return shard


def as_on_accelerators():
    """accelerate shards on accelerators alone; on CPUs it would take DDP without a word."""
    PartialState(cpu=True)
    AcceleratorState._shared_state.clear()
    PartialState._shared_state |= {"distributed_type": DistributedType.MULTI_GPU, "device": CPU}


HOW = {
    "fsdp1": by_fsdp1, "fsdp2": by_fsdp2, "fully_shard": by_our_function,
    "accelerate-1": by_accelerate(1), "accelerate-2": by_accelerate(2),
}  # fmt: skip


def saved(model):
    """The whole state dict of a sharded model."""
    if not isinstance(model, FullyShardedDataParallel):
        return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    # torch 2.13 crashes where it offloads parameters that are on the CPU already, as accelerate asks for
    with FullyShardedDataParallel.state_dict_type(
        model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=False)
    ):
        return model.state_dict()


def train_alone(model, ids):
    """Train the unsharded model, and return its losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for step in range(STEPS):
        parts = ids[step].split(ROWS)
        found = [model(input_ids=part, labels=part).loss for part in parts]
        grads = [torch.autograd.grad(loss, [*model.parameters()], allow_unused=True) for loss in found]
        for parameter, *mine in zip(model.parameters(), *grads, strict=True):
            parameter.grad = None if mine[0] is None else sum(mine) / WORLD
        optimizer.step()
        losses.append(sum(loss.detach() for loss in found) / WORLD)
    return torch.stack(losses)


def train_sharded(model, ids):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE), []
    for step in range(STEPS):
        mine = ids[step].split(ROWS)[RANK]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
        dist.all_reduce(losses[-1])
    return torch.stack(losses) / WORLD


def train_by_trainer(model, ids, version):
    """Train with `fsdp=True` of transformers, and return the losses and what was saved."""
    folder = Path(os.environ["FOLDER"])
    if dist.is_initialized():
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU
    arguments = TrainingArguments(
        str(folder), use_cpu=True, ddp_backend="gloo", fsdp=True, per_device_train_batch_size=ROWS, max_steps=STEPS,
        fsdp_config={"version": version, "sync_module_states": False}, optim="sgd", learning_rate=RATE,
        lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1, logging_strategy="steps", report_to=[],
        save_strategy="no", disable_tqdm=True, train_sampling_strategy="sequential",
    )  # fmt: skip
    arguments.device
    as_on_accelerators()
    # accelerate gives the batches to the processes in turn.
    data = [{"input_ids": row, "labels": row} for row in ids.flatten(0, 1)]
    trainer = Trainer(model, arguments, train_dataset=data)
    AcceleratorState._shared_state["device"] = CPU
    assert trainer.is_fsdp_enabled
    trainer.train()
    losses = torch.tensor([line["loss"] for line in trainer.state.log_history if "loss" in line])
    if version == 1:
        return losses, saved(trainer.model)
    trainer.save_model(str(folder))
    dist.barrier()
    return losses, AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()


def distance(found, expected):
    """The largest difference of two tensors, relative to the largest entry; names, dtypes and shapes are equal."""
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    worst = 0.0
    for name, x in expected.items():
        assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape), name
        if x.numel():
            error = (found[name].double() - x.double()).abs().max() / x.double().abs().max().clamp(min=1e-30)
            worst = max(worst, error.item())
    return worst


def compare(how, dtype, name):
    torch.manual_seed(0)
    alone = add_noise(HalflifeForCausalLM.of(build(name)), 0.01).to(dtype)
    sharded = copy.deepcopy(alone)
    ids = torch.randint(VOCABULARY, (STEPS, WORLD * ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    if how.startswith("trainer"):
        losses, weights = train_by_trainer(sharded, ids, int(how[-1]))
    else:
        sharded = HOW[how](sharded)
        losses, weights = train_sharded(sharded, ids), saved(sharded)
    before = copy.deepcopy(alone.state_dict())
    expected = train_alone(alone, ids)
    assert distance(before, alone.state_dict()) > 1e-3, "nothing was trained"
    return {"loss": (losses - expected).abs().max().item(), "weights": distance(weights, alone.state_dict())}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if not sys.argv[1].startswith("trainer"):
        dist.init_process_group("gloo")
    for each in sys.argv[3:] or NAMES:
        try:
            found = compare(sys.argv[1], getattr(torch, sys.argv[2]), each)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        if RANK == 0:
            print(json.dumps({"name": each, **found}), flush=True)
    dist.destroy_process_group()
