"""Models in float16: finite wherever the activations of float32 fit into float16, and closer to them than bfloat16."""

import copy

import pytest
import torch
from helpers import generator
from torch import nn

from halflife import LanguageModel, preset
from halflife.models import PRESETS
from halflife.ops.backends import dispatch

# The worst relative errors measured. Large activations saturate gates and make some states nearly cancel.
WORST = {"usual": 2.4e-3, "large": 3.5e-2}
LARGEST = torch.finfo(torch.float16).max
MODIFIED = (
    "mamba2+gate_rank", "gated_deltanet+gate_rank", "mamba3+gate_rank", "mamba2+log_linear", "simple+dplr",
    "simple+scalar+delta", "simple+scalar+tpe", "gla+ska", "gated_deltanet+koopman_mlp",
)  # fmt: skip


def model(name, factor):
    """A float32 model of float16 numbers, whose mixers get inputs of about the size `factor`."""
    torch.manual_seed(0)
    built = LanguageModel(preset(name, hidden_size=48, num_layers=2, num_heads=3, vocab_size=50))
    draw = generator(name)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=draw)
        for name, module in built.named_modules():
            if name.endswith("mixer_norm") and factor > 1:
                module.weight *= factor
    return built.half().float()


def largest_activation(built, ids):
    """The largest input or output of a linear map."""
    found = [0.0]

    def see(module, inputs, output):
        found.extend(x.abs().max().item() for x in (*inputs, output))

    hooks = [m.register_forward_hook(see) for m in built.modules() if isinstance(m, nn.Linear)]
    built(ids)
    for hook in hooks:
        hook.remove()
    return max(found)


def fits(x):
    return x.abs().max() < LARGEST / 2


def error(got, expected):
    got = got.float()
    return ((got - expected).norm() / expected.norm()).item() if got.isfinite().all() else float("inf")


FEW = ("mamba2", "mamba3", "gated_deltanet", "deltanet", "rwkv7", "retnet", "gla", "echo", "mesa")
CASES = [
    pytest.param(name, smallest, marks=[] if name in FEW and not smallest else [pytest.mark.slow])
    for name in (*PRESETS, *MODIFIED) for smallest in (0, 1 << 30)  # passes by kernels, and by torch's expressions
]  # fmt: skip


@pytest.mark.parametrize(("name", "smallest"), CASES)
def test_what_fits_into_float16_is_finite_and_close(name, smallest, monkeypatch):
    """Activations as they start, and the largest ones of which every input and output of a linear map fits."""
    monkeypatch.setattr(dispatch, "SMALLEST_PASS", smallest)
    ids = torch.randint(50, (2, 24), generator=generator("ids"))
    for kind, factors in (("usual", (1,)), ("large", (1000, 100, 3))):
        wide = next(m for factor in factors if largest_activation(m := model(name, factor), ids) < LARGEST / 2)
        expected, _ = wide(ids)
        bound = min(4 * WORST[kind], error(copy.deepcopy(wide).bfloat16()(ids)[0], expected))
        narrow = copy.deepcopy(wide).half()
        found, _ = narrow(ids)
        assert error(found, expected) <= bound, kind
        with torch.no_grad():
            _, state = narrow(ids[:, :-1])
            assert error(narrow(ids[:, -1:], state)[0], found[:, -1:].float()) <= bound, kind
        weights = torch.randn(expected.shape, generator=generator("loss"))
        for logits in (expected, found):
            (logits.float() * weights).mean().backward()
        pairs = zip(narrow.named_parameters(), wide.parameters(), strict=True)
        learned = [(path, p.grad) for (path, p), other in pairs if p.grad is not None and fits(other.grad)]
        assert not [path for path, gradient in learned if not gradient.isfinite().all()], kind
