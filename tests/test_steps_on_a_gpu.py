"""A host that trains on a GPU launches steps ahead and waits for none. The GPU is a fake."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from torch.profiler import DeviceType

from halflife import LanguageModel, preset
from halflife.training.checkpoints import CheckpointStore
from halflife.training.config import ExecutionConfig, TrainConfig
from halflife.training.fit import Objective, _arguments
from halflife.training.profile import times
from halflife.training.speed import StepTimes
from halflife.training.trainer import HalflifeTrainer

MODEL = preset("gla", vocab_size=8, hidden_size=16, num_layers=1)
CONFIG = TrainConfig(model=MODEL, steps=1, batch_size=1, learning_rate=1e-3)


@pytest.fixture
def gpu(monkeypatch):
    for module in (torch.cuda, torch.accelerator):
        monkeypatch.setattr(module, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for state in (PartialState, AcceleratorState):
        monkeypatch.setattr(state, "_shared_state", {})


def trainer(folder, data=None):
    arguments = _arguments(CONFIG, folder, ExecutionConfig(show=False))
    return HalflifeTrainer(
        CONFIG, CheckpointStore(folder), model=Objective(LanguageModel(MODEL)), args=arguments, train_dataset=data
    )


def test_batches_arrive_from_pinned_memory_while_the_host_goes_on(gpu, monkeypatch, tmp_path):
    sent = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x, *given: x + 5)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *given: module)
    monkeypatch.setattr("accelerate.data_loader.send_to_device", lambda *given, **how: sent.append((*given, how)))
    next(iter(trainer(tmp_path, [{"labels": torch.zeros(1)}] * 2).get_train_dataloader()))
    assert sent == [({"labels": torch.full((1,), 5.0)}, torch.device("cuda"), {"non_blocking": True})]


def test_the_host_keeps_the_boundaries_of_a_packed_batch(gpu, monkeypatch, tmp_path):
    """As numbers beside the pinned and copied tensor, so that layers that need them do not wait."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x, *given: x + 0)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *given: module)
    waits, to = [], torch.Tensor.to

    def to_no_data(x, device, non_blocking=False):
        waits.append(not non_blocking)
        return to(x, "meta")

    monkeypatch.setattr(torch.Tensor, "to", to_no_data)
    item = {"input_ids": torch.zeros(1, 5), "cu_seqlens": torch.tensor([0, 2, 5])}
    packing = next(iter(trainer(tmp_path, [item] * 2).get_train_dataloader()))["cu_seqlens"]
    assert packing.cu_seqlens.is_meta
    assert (packing.bounds, packing.longest, waits) == ([0, 2, 5], 3, [False, False])


def test_without_torchrun_one_of_several_gpus_trains(gpu, monkeypatch, tmp_path):
    """Else the Trainer asks for a batch a GPU, and an item of our data is a whole one."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, *given: module)
    loader = trainer(tmp_path, [{"labels": torch.zeros(1)}] * 2).get_train_dataloader()
    assert loader.total_batch_size == 1


@pytest.mark.parametrize("fused", [True, None])
def test_the_optimiser_is_one_kernel(fused, request, monkeypatch, tmp_path):
    if fused:
        request.getfixturevalue("gpu")
        monkeypatch.setattr(torch.nn.Module, "to", lambda module, *given: module)
    groups = trainer(tmp_path).create_optimizer().param_groups
    assert [group["fused"] for group in groups] == [fused] * len(groups)


def test_a_profile_counts_each_kernel_once():
    """With the operation that launched it, and not as an event of the GPU, nor as the range of a module there."""

    def event(name, device, milliseconds, parent=None):
        return SimpleNamespace(
            name=name, device_type=device, self_device_time_total=1e3 * milliseconds, cpu_parent=parent, sequence_nr=-1
        )

    on_host, on_device = DeviceType.CPU, DeviceType.CUDA
    ranged = event("pass: op", on_host, 0)
    events = [ranged, event("halflife::triton_linear", on_host, 2, ranged)]
    events += [event("walk_kernel", on_device, 2), event("pass: op", on_device, 3)]
    assert times(events, on_device=True) == {"op": [0.002, 0.0]}


def test_a_gpu_times_its_own_steps(monkeypatch):
    """The host is done with each of three steps at once, of which the GPU has done two."""
    clock, done = iter((0.0, 30.0, 31.0, 51.0, 52.0, 99.0)), (30.0, 51.0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.milliseconds = next(clock)

        def query(self):
            return self.milliseconds in done

        def elapsed_time(self, end):
            return end.milliseconds - self.milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    times = StepTimes()
    for _ in range(3):
        times.begin(torch.device("cuda"))
        times.end()
    assert times.seconds() == times.seconds() == [0.03, 0.02]
