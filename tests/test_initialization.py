"""Initial weights and optimiser settings of released code."""

import math

import pytest
import torch

from halflife import LanguageModel, preset
from halflife.training.checkpoints import CheckpointStore
from halflife.training.config import ExecutionConfig, TrainConfig
from halflife.training.fit import Objective, _arguments
from halflife.training.trainer import HalflifeTrainer

SIZES = {"hidden_size": 64, "num_layers": 4, "vocab_size": 997, "num_heads": 4}


def weights(name, **options):
    torch.manual_seed(0)
    return dict(LanguageModel(preset(name, **SIZES, **options)).named_parameters())


def test_released_mamba2():
    """Maps and taps have a standard deviation of 0.02; output projections are uniform in ±1/√(fan-in · layers)."""
    found = weights("mamba2", initialization="mamba2_released")
    for key in ("embedding.weight", "blocks.1.mixer.in_proj.weight", "blocks.1.mlp.up.weight"):
        assert found[key].std().item() == pytest.approx(0.02, rel=0.05)
    assert found["blocks.1.mixer.conv.weight"].std().item() == pytest.approx(0.02, rel=0.15)
    assert not found["blocks.1.mixer.conv.bias"].any()
    projection = found["blocks.3.mixer.out_proj.weight"]
    bound = 1 / math.sqrt(projection.shape[1] * SIZES["num_layers"])
    assert 0.99 * bound < projection.abs().max() <= bound
    decay = found["blocks.1.mixer.decay.A_log"].exp()
    assert ((decay >= 1) & (decay <= 16)).all()
    assert weights("mamba2")["blocks.1.mixer.in_proj.weight"].std() > 0.05


def test_released_rwkv7():
    """Embeddings alone change."""
    found, plain = weights("rwkv7", initialization="rwkv7_released"), weights("rwkv7")
    assert 0.99e-4 < found["embedding.weight"].abs().max() <= 1e-4
    assert torch.equal(found["blocks.1.mixer.k_proj.weight"], plain["blocks.1.mixer.k_proj.weight"])


def test_unknown_initialization():
    with pytest.raises(ValueError, match=r"unknown initialization 'mamba2'.*mamba2_released"):
        preset("mamba2", **SIZES, initialization="mamba2")


def test_the_optimiser_has_the_settings_of_the_run(tmp_path):
    """Both β, ε, and the factor of the released RWKV-7 with PoST."""
    config = TrainConfig(
        model=preset("rwkv7+post_released", **SIZES), steps=2, batch_size=2, learning_rate=1e-3, betas=(0.8, 0.99),
        epsilon=1e-18,
    )  # fmt: skip
    objective = Objective(LanguageModel(config.model))
    store, arguments = CheckpointStore(tmp_path), _arguments(config, tmp_path, ExecutionConfig())
    trainer = HalflifeTrainer(config, store, model=objective, args=arguments)
    groups = trainer.create_optimizer().param_groups
    assert all((group["betas"], group["eps"]) == ((0.8, 0.99), 1e-18) for group in groups)
    assert [group["lr"] for group in groups] == pytest.approx([1e-3, 1e-3, 2e-3])
    with pytest.raises(ValueError, match="epsilon must be positive"):
        TrainConfig(model=config.model, steps=1, batch_size=1, learning_rate=1e-3, epsilon=0)
