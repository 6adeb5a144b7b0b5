"""A training step of whole models by what the library runs on a GPU: its kernels, in Triton's interpreter on a CPU."""

import sys
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from pairwise import slow_beyond

from halflife import LanguageModel, preset
from halflife.models.presets import PRESETS

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

from offline_models import on_a_gpu

MODELS = [*sorted(PRESETS), "mamba2+post+gate_rank", "gated_deltanet+gate_rank", "mamba2+ska", "tnl_l+post"]
FAST = [("gdn2", True), ("gla", True)]


def step(model, ids, narrow, as_gpu=False):
    """The loss and the gradients of the second pass; the first one finds the maps that are one product."""
    model.zero_grad()
    for _ in range(2):
        with torch.autocast("cpu", torch.float16, enabled=narrow), on_a_gpu() if as_gpu else nullcontext():
            loss = model(ids)[0].float().square().mean()
    with on_a_gpu() if as_gpu else nullcontext():
        (1024 * loss).backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def distance(found, want):
    assert found.keys() == want.keys()
    scale = max(float(x.norm()) for x in want.values())
    return max(float((found[name] - x).norm() / (x.norm() + 1e-4 * scale)) for name, x in want.items())


@pytest.mark.parametrize("case", slow_beyond(FAST, [*product(MODELS, (False, True))]), ids=str)
def test_training_step(case, monkeypatch):
    """Against the chunked forms in float32. Under autocast those are rounded too."""
    name, narrow = case
    torch.manual_seed(0)
    model = LanguageModel(preset(name, vocab_size=16, hidden_size=64, num_layers=2, num_heads=2))
    ids = torch.randint(0, 16, (2, 21))
    truth, want = step(model, ids, False), step(model, ids, narrow)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    found = step(model, ids, narrow, as_gpu=True)
    assert distance(found, truth) <= 2.5 * distance(want, truth) + (1e-3 if narrow else 6e-5)
