"""Every preset, and every decay in the design-space block, has the properties that the library promises."""

import dataclasses
import math
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from combinations import SIZES
from helpers import add_noise, assert_close, assert_packs, assert_pads, assert_same, assert_streams
from pairwise import slow_beyond
from safetensors.torch import load_file

from halflife import LanguageModel, param_groups, preset
from halflife.decay import DECAYS
from halflife.export.graphs import fixed_caches
from halflife.layers import LAYERS
from halflife.models import PRESETS, checkpoint
from halflife.precision import Float32Module

# Modifiers that change the function of a model, each on one base.
MODIFIED = (
    "mamba2+post", "mamba2+post_optimal", "mamba3+post", "rwkv7+post", "gated_deltanet+post", "simple+post",
    "retnet+post_norm", "gla+post",
    "simple+rope", "simple+lrpe", "simple+scalar+tpe", "simple+delta", "simple+dplr", "hgrn2+vector+share",
    "mamba2+gate_rank", "mamba3+gate_rank", "gated_deltanet+gate_rank+post", "retnet+gate_rank",
    "lightnet+scalar+delta+gate_rank", "echo+gate_rank",
    "mamba2+log_linear",
)  # fmt: skip
# Echo's parts with other mixers.
HYBRIDS = ("mamba2+ska", "mamba3+ska", "gla+ska", "rwkv7+ska", "mamba2+attention", "gated_deltanet+koopman_mlp")

# Several chunks in a short sequence, and small states.
SMALL = {layer: {"chunk_size": 4} for layer in LAYERS} | {
    "mamba2": {"state_size": 16, "chunk_size": 4},
    "mamba3": {"state_size": 16, "chunk_size": 4},
    "ska": {"rank": 8, "chunk_size": 4},
    "attention": {},
    "fox": {},
}

LENGTH, VOCABULARY = 11, SIZES["vocab_size"]

# Four times the worst measured error, relative to the largest entry. In float64, SKA is the worst (LightNet has 1e-13).
# Compiled in float32, the worst are gradients of A_log and θ, which are sums that cancel (eager ones are up to 2e-4
# from float64's); others have 9e-6. SKA solves systems of condition number 10³ and more, so A_log has larger errors in
# its model.
EXACT, COMPILED, COMPILED_SKA = 4 * 2e-13, 4 * 9e-5, 4 * 4e-4


def small(name, **options):
    """Return the narrow preset, with several chunks in a short sequence."""
    config = preset(name, **SIZES, mixer_options=options)
    options, hybrid = {**config.mixer_options, **SMALL[config.mixer]}, config.hybrid
    if hybrid:
        hybrid = {**hybrid, "options": {**hybrid["options"], **SMALL[hybrid["mixer"]]}}
    return dataclasses.replace(config, mixer_options=options, hybrid=hybrid)


@cache
def configuration(name):
    """Return the configuration of a preset, or of the block with another decay."""
    decay, _, granularity = name.partition("-")
    return small("simple", decay=decay, granularity=granularity) if granularity else small(name)


OTHER_DECAYS = tuple(f"{decay}-{granularity}" for decay in DECAYS for granularity in DECAYS[decay].granularities)
NAMES = (*PRESETS, *MODIFIED, *HYBRIDS, *OTHER_DECAYS)
# The float32 part of a layer's state, if it is not `memory`. A KV cache has the dtype of the model.
HELD = {"attention": (), "fox": ("forget",), "ska": ("gram", "transition", "values", "norm", "last")}
DECAYS_DRAWN = {"A_log", "dt_bias"}  # drawn after maps whose draws depend on their dtype
# One model of each kind. Others differ from one of these within a layer, whose tests are test_layers.py.
KINDS = (
    "mamba2", "mamba3", "gla", "tnl", "rwkv7+ska", "llama", "echo", "echo_paper", "simple+lrpe", "simple+scalar+tpe",
    "simple+dplr", "mamba2+post", "retnet+post_norm", "hgrn2+vector+share", "mamba2+log_linear", "mamba2+attention",
    "mamba3+gate_rank", "gated_deltanet+gate_rank+post", "gated_deltanet+koopman_mlp",
)  # fmt: skip
LEARNING = ["mamba2", "rwkv7", "echo"]
each_model = pytest.mark.parametrize("name", slow_beyond(KINDS, NAMES))
# Echo's paper normalises by the norm of a whole sequence and decodes in another way (test_ska_forms.py).
CAUSAL = [name for name in NAMES if name != "echo_paper"]
each_streamed_model = pytest.mark.parametrize("name", slow_beyond(KINDS, CAUSAL))


def build(name):
    return LanguageModel(configuration(name))


def fresh(name):
    torch.manual_seed(0)
    return build(name)


def trained(name):
    """Build the model in float64 with noise in every parameter, because zeros (RWKV-7's outputs) hide terms."""
    return add_noise(build(name)).double()


def tokens(*shape):
    return torch.randint(VOCABULARY, shape)


def everything(model):
    """Return all parameters and buffers, with those that checkpoints leave out."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def kept(model):
    """Return the ids of the parameters and buffers of modules that stay in float32."""
    modules = [module for module in model.modules() if isinstance(module, Float32Module)]
    return {id(x) for module in modules for x in (*module.parameters(), *module.buffers())}


@pytest.mark.parametrize("name", slow_beyond(LEARNING, NAMES))
def test_learns_sixteen_sequences_by_heart(name):
    """A bigram model would stay at 2 nats. The first tokens differ, so that every token can be known."""
    model = build(name)
    ids = torch.cat([torch.randperm(VOCABULARY)[:16].unsqueeze(1), tokens(16, 16)], 1)
    before = {key: x.detach().clone() for key, x in model.named_parameters()}
    optimizer, losses = torch.optim.AdamW(param_groups(model, 0.0), lr=1e-2), [math.inf]
    while losses[-1] > 0.1 and len(losses) < 200:
        logits, _ = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(math.log(VOCABULARY), abs=0.3)
    assert losses[-1] < 0.1
    assert not [key for key, x in model.named_parameters() if torch.equal(x, before[key])]


@each_streamed_model
def test_streams_like_the_full_pass(name):
    """At cuts around a chunk, and without a first or a second piece. Layers are cut everywhere (`test_layers.py`)."""
    assert_streams(trained(name), tokens(2, LENGTH), EXACT, cuts=(0, 3, 4, 5, LENGTH))


@each_model
def test_packed_equals_separate(name):
    assert_packs(trained(name), tokens, EXACT)


@each_model
@pytest.mark.parametrize("side", slow_beyond(["left"], ["left", "right"]))
def test_padding_changes_nothing(name, side):
    assert_pads(trained(name), tokens, side, EXACT)


@each_model
def test_starts_from_the_meta_device(name):
    """On memory with any content, `reset_parameters` gives the values of the constructor."""
    with torch.device("meta"):
        model = build(name)
    assert all(x.is_meta for x in everything(model).values())
    assert all(x.ndim for x in everything(model).values())  # FSDP shards the first axis
    model.to_empty(device="cpu")
    direct = build(name)
    for x in everything(model).values():
        x.data.fill_(1e30)
    for each in (model, direct):
        torch.manual_seed(3)
        each.reset_parameters()
    assert everything(model).keys() == everything(direct).keys()
    assert_same(everything(model), everything(direct))
    assert all((x.abs() < 100).all() for x in everything(model).values())
    ids = tokens(2, LENGTH)
    assert_same(model(ids)[0], direct(ids)[0])


@each_model
@pytest.mark.parametrize("dtype", slow_beyond([torch.bfloat16], [torch.float32, torch.bfloat16]), ids=str)
def test_files_round_trip(name, dtype, tmp_path):
    """Weights are equal to the bit, and decays are float32 in the file too."""
    model, ids = build(name).to(dtype), tokens(2, LENGTH)
    loaded = checkpoint.load(checkpoint.save(model, tmp_path))
    assert not list(tmp_path.glob(".*"))
    assert loaded.config == model.config
    assert everything(loaded).keys() == everything(model).keys()
    assert_same(everything(loaded), everything(model))
    assert_same(loaded(ids)[0], model(ids)[0])
    dtypes = {key: x.dtype for key, x in everything(model).items()}
    assert {key: x.dtype for key, x in everything(loaded).items()} == dtypes
    stored, wide = load_file(tmp_path / "model.safetensors"), kept(model)
    assert {key: x.dtype for key, x in stored.items()} == {key: dtypes[key] for key in stored}
    assert all(stored[key].dtype == torch.float32 for key, x in model.named_parameters() if id(x) in wide)


@each_model
@pytest.mark.parametrize("cast", slow_beyond(["bfloat16"], ["bfloat16", "half", "to"]))
def test_decays_stay_float32(name, cast):
    """Decays get no weight decay. All other parameters are cast, and the model runs and trains."""
    model = build(name)
    model.to(torch.bfloat16) if cast == "to" else getattr(model, cast)()
    narrow, wide = torch.float16 if cast == "half" else torch.bfloat16, kept(model)
    for key, x in everything(model).items():
        assert x.dtype == (torch.float32 if id(x) in wide else narrow), key
    assert all(id(x) in wide for key, x in everything(model).items() if ".decay." in key or ".skip." in key)
    logits, state = model(tokens(2, LENGTH))
    assert logits.dtype == narrow
    for layer, parts in enumerate(state):
        held = HELD.get(model.config.mixer_of(layer)[0], ("memory",))
        assert all(parts[part].dtype == torch.float32 for part in held)
    logits.float().logsumexp(-1).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())
    decayed, spared = param_groups(model, 0.1)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0)
    assert all(x.ndim >= 2 and id(x) not in wide for x in decayed["params"])
    assert any(x is model.embedding.weight for x in decayed["params"])
    assert {id(x) for x in (*decayed["params"], *spared["params"])} == {id(x) for x in model.parameters()}


@each_model
def test_decays_are_made_in_float32(name):
    """A default dtype of bfloat16, which transformers sets to build models, does not change values or dtypes."""
    expected = {key: x for key, x in everything(fresh(name)).items() if ".decay." in key or ".skip." in key}
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = fresh(name)
    finally:
        torch.set_default_dtype(torch.float32)
    found, wide = everything(model), kept(model)
    assert all(x.dtype == (torch.float32 if id(x) in wide else torch.bfloat16) for x in found.values())
    for key, x in expected.items():
        if DECAYS_DRAWN.isdisjoint(key.split(".")):
            assert_same(found[key], x)
        assert found[key].isfinite().all()


def compare_compiled(name):
    """Raise an error if logits, states or gradients differ. This runs in another process."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, ids = trained(name).float(), tokens(2, 8)

    def run(forward):
        model.zero_grad()
        logits, state = forward(ids)
        logits.square().sum().backward()
        states = {f"{layer} {key}": x.detach() for layer, part in enumerate(state) for key, x in part.items()}
        return {"logits": logits.detach(), **states, **{key: x.grad for key, x in model.named_parameters()}}

    with fixed_caches(model, None):  # as in compiled code, where no shape depends on the position
        expected = run(model)
    error = COMPILED_SKA if name.startswith("echo") else COMPILED
    assert_close(run(torch.compile(model, fullgraph=True)), expected, error)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PRESETS, *MODIFIED])
def test_compiled_equals_eager(name):
    """Models are compiled as users run them, without pytest's shape checks, which no compiler can trace.

    The C++ compiler takes a minute for each model on one core. test_compiled_blocks.py traces one by default.
    """
    code = f"import test_registry; test_registry.compare_compiled({name!r})"
    torchs_own = (
        "ignore::DeprecationWarning",
        "ignore:`torch._prims_common.check` is deprecated:FutureWarning",
        # The compiler looks for `.grad` where it continues after a break. SKA reads the number of pending tokens there.
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    )
    filters = [part for action in ("error", *torchs_own) for part in ("-W", action)]
    done = subprocess.run(
        [sys.executable, *filters, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
