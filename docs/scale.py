"""Write docs/results/scale.json, what the pictures of docs/scale.md show, with `python docs/scale.py` in a minute."""

from __future__ import annotations

from typing import Any

from join import RESULTS  # beside this file

from halflife.files import write_json
from halflife.models import preset
from halflife.models.presets.sizes import SIZES
from halflife.training.config import TrainConfig
from halflife.training.plan import H100, Needs

SIZE = "decay-160m"
MODELS = ("mamba2+post", "gated_deltanet", "llama")
COUNTS = tuple(2**i for i in range(11))  # of GPUs
LENGTHS = tuple(2**i for i in range(10, 21))  # tokens of a row


def predicted() -> dict[str, Any]:
    """The largest row by the number of GPUs that share it, and the operations of a token by the length of its row."""
    models = []
    for name in MODELS:
        model = preset(name, train_length=LENGTHS[0], **SIZES[SIZE])
        config = TrainConfig(model=model, steps=1, batch_size=1, learning_rate=1e-3, bf16=True)
        needs = Needs.of(config, LENGTHS[0])
        operations = [needs.costs.training_operations(length) for length in LENGTHS]
        longest = [needs.longest(count, count, H100) for count in COUNTS]
        models.append({"model": name, "longest": longest, "operations": operations})
    return {"size": SIZE, "gpus": COUNTS, "lengths": LENGTHS, "models": models}


if __name__ == "__main__":
    write_json(RESULTS / "scale.json", predicted())
