"""FSDP1, FSDP2, accelerate and transformers' Trainer shard any model over processes."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from combinations import SIZES, combinations
from helpers import port
from pairwise import slow_beyond
from test_registry import KINDS, NAMES, build, kept
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from halflife import LanguageModel, preset
from halflife.hf import HalflifeForCausalLM
from halflife.models import PRESETS
from halflife.precision import Float32Module
from halflife.training import sharding

TESTS = Path(__file__).parent.parent


@pytest.mark.slow  # test_registry.py has one of each kind
@pytest.mark.parametrize("base", PRESETS)
def test_every_parameter_has_an_axis_to_shard(base):
    for name in combinations(base)[0]:
        with torch.device("meta"):
            model = LanguageModel(preset(name, **SIZES))
        assert all(x.ndim and x.numel() for x in model.parameters()), name


@pytest.mark.parametrize("name", slow_beyond(KINDS, NAMES))
def test_what_is_wrapped_has_one_dtype(name):
    """Neither FSDP1 nor FSDP2 takes float32 and bfloat16 in one unit. Its parameters are those of no inner unit."""
    with torch.device("meta"):
        model = HalflifeForCausalLM.of(build(name))
    model, kinds = model.to(torch.bfloat16), (*sharding.UNITS,)
    named = {type(module) for module in model.modules() if type(module).__name__ in model._no_split_modules}
    for units in (kinds, tuple(named)):  # of the documented policy, and of accelerate
        taken = set()
        for module in reversed([*model.modules()]):
            if module is model or isinstance(module, units):
                mine = {x for x in module.parameters() if x not in taken}
                taken |= mine
                assert len({x.dtype for x in mine}) <= 1, (units, type(module).__name__)
    wide = kept(model)
    assert {x.dtype for x in model.parameters() if id(x) in wide} <= {torch.float32}


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["mamba2+post", "rwkv7"])
def test_decays_are_gathered_in_float32(name, one_process):
    """Under a policy of mixed precision all other parameters are in bfloat16 while the model runs."""
    model, seen = LanguageModel(preset(name, **SIZES)), {True: set(), False: set()}
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    sharding.fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)

    def look(module, inputs):
        seen[isinstance(module, Float32Module)] |= {x.dtype for x in module.parameters(recurse=False)}

    for module in model.modules():
        module.register_forward_pre_hook(look)
    logits, _ = model(torch.arange(8).unsqueeze(0))
    logits.float().logsumexp(-1).sum().backward()
    assert seen == {True: {torch.float32}, False: {torch.bfloat16}}
    assert all(x.dtype == x.grad.dtype == torch.float32 for x in model.parameters())


@pytest.mark.parametrize("name", ["mamba2", "simple+post"])
def test_a_policy_that_rounds_decays_is_told(name, one_process):
    model = LanguageModel(preset(name, **SIZES))
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.warns(UserWarning, match="rounds the parameters of decays"):
        model(torch.arange(8).unsqueeze(0))


def test_one_channel_of_post_is_sharded(one_process):
    """Its spectrum has no gaps, so nothing is in δ."""
    model = LanguageModel(preset("mamba2+post", **{**SIZES, "num_heads": 1}))
    assert all(x.numel() for x in model.parameters())
    sharding.fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
    model(torch.arange(8).unsqueeze(0))[0].logsumexp(-1).sum().backward()
    assert all(x.grad is not None for x in model.parameters())
    assert model.state_dict()["blocks.0.mixer.decay.delta"].shape == (0,)


def test_no_unit_has_a_name_of_fsdps(one_process):
    """FSDP1 stands in the place of a unit, so a layer that reads `unit.rank` would get the rank of the process."""
    whole = ShardingStrategy.NO_SHARD  # as one process asks for
    wrapped = FullyShardedDataParallel(torch.nn.Linear(1, 1), sharding_strategy=whole, device_id=torch.device("cpu"))
    taken = vars(wrapped).keys() - vars(torch.nn.Linear(1, 1)).keys()
    assert "rank" in taken
    for name in PRESETS:
        with torch.device("meta"):
            model = LanguageModel(preset(name, **SIZES))
        for unit in model.modules():
            if isinstance(unit, (*sharding.UNITS,)):
                assert not taken & vars(unit).keys(), (name, type(unit).__name__)


@pytest.mark.parametrize("flat", [True, False])
def test_fsdp1_under_autocast_where_a_gpu_would_be(flat, one_process, monkeypatch):
    """Its weights are no parameters, so they are not cast with the others, nor joined in one product."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    torch.manual_seed(0)
    whole, ids = LanguageModel(preset("gated_deltanet", **SIZES)), torch.randint(8, (2, 12))
    parts = FullyShardedDataParallel(
        copy.deepcopy(whole), auto_wrap_policy=ModuleWrapPolicy(sharding.UNITS), use_orig_params=not flat,
        sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu"),
    )  # fmt: skip
    losses = []
    for model in (whole, parts):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):  # from the second step on it is known which maps read one input
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(ids)[0].float().square().mean()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad()
            losses.append(loss.item())
    # Four times the largest difference of two CPUs, 2.2e-3.
    assert losses[:3] == pytest.approx(losses[3:], rel=9e-3)


WAYS = ("fsdp1", "fsdp2", "fully_shard", "accelerate-1", "accelerate-2", "trainer-1", "trainer-2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "dtype"), [*((how, "bfloat16") for how in WAYS), ("fsdp1", "float32"), ("fsdp2", "float32")]
)
def test_two_processes_train_as_one(how, dtype, tmp_path):
    """Losses and saved weights after two steps are those of an unsharded model, to the bit."""
    path = os.pathsep.join(map(str, (TESTS.parent, TESTS)))
    environment = {**os.environ, "PYTHONPATH": path, "FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port())]
    done = subprocess.run(
        [*command, str(TESTS / "doors" / "sharded.py"), how, dtype], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"name"')]
    assert [line["name"] for line in lines] == [*NAMES]
    assert not [line for line in lines if line.keys() != {"name", "loss", "weights"} or line["loss"] or line["weights"]]
