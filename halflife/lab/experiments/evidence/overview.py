"""One table of all models, to choose by: recall, needles and state tracking, with equal states."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from halflife.lab.experiments.base import EXPERIMENTS
from halflife.lab.experiments.echo import EchoMQAR, EchoMQARSettings
from halflife.lab.experiments.recall import RecallExperiment, RecallSettings
from halflife.models import ModelConfig

MODELS = (
    "mamba2", "mamba3", "mamba3_mimo", "mamba3_echo", "rwkv7", "gated_deltanet", "deltaproduct", "deltanet", "kda",
    "gdn2", "comba", "mesa", "longhorn", "gla", "retnet", "hgrn2", "lightnet", "tnl", "tnl_released", "tnl_l", "simple",
    "llama", "fox", "mamba2+post", "mamba2+gate_rank", "gated_deltanet+gate_rank", "mamba2+attention", "mamba2+ska",
    "gated_deltanet+attention", "gated_deltanet+ska",
)  # fmt: skip
DELTA_RULE = {"gated_deltanet", "deltaproduct", "deltanet", "kda", "gdn2", "comba", "mesa"}
SMALL = RecallSettings(
    hidden_size=128, num_layers=2, num_heads=4, train_length=64, pairs=(1, 4, 8, 16), warm_length=32, warm_pairs=(1, 4),
    tasks=("mqar", "niah:hard", "s5:s3"), test_tasks=("mqar", "niah:hard", "s5:s3"), lengths=(64, 128, 256, 512, 1024),
    test_pairs=(1, 4, 8, 16, 32), steps=3000, batch_size=64, test_examples=256, test_tokens=1 << 17, chunk_size=16,
    validate_every=250, save_every=500,
)  # fmt: skip


@EXPERIMENTS.add("overview")
class Overview(RecallExperiment):
    """All presets and hybrids with states of one size on recall, needles among decoys and tracking in S3, up to 16 T.

    | column | task |
    |---|---|
    | mqar | as many pairs as in training (persistence), and more (capacity) |
    | niah:hard | one needle among decoys |
    | s5:s3 | the running product of a word in S3 |

    `docs/overview.py` joins these with speed, bytes of state, and text (`--experiment post-taken-apart-text`).
    """

    scales: ClassVar = {
        "smoke": dataclasses.replace(
            SMALL, hidden_size=64, steps=400, batch_size=32, lengths=(64, 256), test_pairs=(1, 8), test_examples=64
        ),
        "small": SMALL,
        "large": dataclasses.replace(
            SMALL, hidden_size=512, num_layers=4, train_length=512, pairs=(4, 16, 64, 128), warm_length=128,
            warm_pairs=(4, 16), lengths=(512, 1024, 2048, 4096, 8192), test_pairs=(4, 32, 128, 256), steps=20_000,
            test_tokens=1 << 20, chunk_size=64, bf16=True,
        ),
    }  # fmt: skip
    models: ClassVar = MODELS

    def learning_rates(self, model: str, scale: str) -> tuple[float, ...]:
        if scale == "large":
            return (1e-3, 10**-2.5, 1e-2)
        # At `small` the best rate of Mamba-2 and Llama is 3e-3, that of Gated DeltaNet 1e-2 (seed 0). DeltaProduct's
        # validation is perfect from 3e-3 to 3e-2. With attention, Gated DeltaNet does not learn at 1e-2.
        base, *others = model.split("+")
        return (3e-3, 1e-2, 3e-2) if base in DELTA_RULE and "attention" not in others else (1e-3, 3e-3, 1e-2)

    def model(self, name: str, settings: RecallSettings) -> ModelConfig:
        """The models of the MQAR experiments: states of d²/h numbers per layer, and no MLP."""
        return EchoMQAR().model(name, EchoMQARSettings(**settings.shared_with(EchoMQARSettings), vocab_size=128))
