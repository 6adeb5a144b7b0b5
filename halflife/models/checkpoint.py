"""halflife's checkpoint of one model: a folder with `config.json` and `model.safetensors`.

`save` writes this format. `load` reads it, and also what `save_pretrained` of transformers writes for a halflife model:
the same weights, perhaps in shards, with names that begin with "model.". `halflife.models.load` reads others too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from halflife import extensions
from halflife.files import CONFIG_JSON, WEIGHTS, read_json, write_json
from halflife.models.config import ModelConfig
from halflife.models.lm import LanguageModel, on_meta
from halflife.models.tensor_file import INDEX, Checkpoint, read_tensors, write_tensors

FORMAT = 1  # increased when older checkpoints can no longer be read


def save(model: LanguageModel, folder: str | Path, tokenizer: str | None = None) -> Path:
    """Write the configuration and the weights of `model` into `folder`, and return the folder.

    After `import halflife.hf`, `AutoModelForCausalLM.from_pretrained(folder)` of transformers reads it too.

    Args:
        model: the model.
        folder: the folder, which is created if needed.
        tokenizer: name of the model's built-in tokenizer ("bytes", "bytes+eos"), or None.
    """
    folder = Path(folder)
    write_tensors(folder / WEIGHTS, model.state_dict(), {"format": "pt"})
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    known: dict[str, Any] = {"model_type": "halflife", "architectures": ["HalflifeForCausalLM"], "dtype": dtype}
    named: dict[str, Any] = {} if tokenizer is None else {"tokenizer": tokenizer}
    if tokenizer == "bytes+eos":
        named["eos_token_id"] = 256  # for `generate` of transformers
    known |= {**named, **extensions.record()}
    write_json(folder / CONFIG_JSON, {"format": FORMAT, **known, "model": model.config.to_dict()})
    return folder


def is_ours(config: Any) -> bool:
    """Whether a `config.json` describes a model of halflife, which `save` or `save_pretrained` wrote."""
    return isinstance(config, dict) and ("format" in config or config.get("model_type") == "halflife")


def runs_below(folder: Path) -> list[Path]:
    """The folders of the models of a comparison, none of another folder."""
    return sorted(weights.parent for weights in folder.glob(f"*/*/{WEIGHTS}"))


def no_checkpoint(folder: Path) -> ValueError:
    """The error for a folder whose `config.json` describes no model; of a comparison it names one of the runs."""
    runs = runs_below(folder)
    why = f"its models are in folders below it, such as {runs[0]}" if runs else f"its {CONFIG_JSON} names no format"
    return ValueError(f"{folder} holds no checkpoint of halflife: {why}")


def load(folder: str | Path, device: torch.device | str = "cpu") -> LanguageModel:
    """Return the model that `save`, or `save_pretrained` of a halflife model, wrote into `folder`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the format is another one, a file is damaged, or the weights do not fit the configuration.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG_JSON)
    if not is_ours(config):
        raise no_checkpoint(folder)
    if config.get("format", FORMAT) != FORMAT:
        raise ValueError(f"{folder} holds a checkpoint of format {config['format']}; this version reads {FORMAT}")
    if not isinstance(config.get("model"), dict):
        raise ValueError(f"{folder} holds a damaged checkpoint: its config.json describes no model")
    if (folder / INDEX).exists() and not (folder / WEIGHTS).exists():
        tensors = {name: x.to(device) for name, x in Checkpoint(folder).items()}
    else:
        tensors, _ = read_tensors(folder / WEIGHTS, device)
    tensors = {name.removeprefix("model.").replace("lm_head.", "head."): x for name, x in tensors.items()}
    try:
        described = ModelConfig.from_dict(config["model"])
        layers = len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})
        if layers != described.num_layers:  # told before as many layers are built
            raise ValueError(
                f"{folder / WEIGHTS} is of another model: it has {layers} layers, and {CONFIG_JSON} describes "
                f"{described.num_layers}"
            )
        model = on_meta(described)
        model.load_state_dict(tensors, assign=True)
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ValueError(f"{folder / CONFIG_JSON} is damaged: it holds a value that cannot be ({error})") from error
    except ValueError as error:
        if advice := extensions.advice(config):
            raise ValueError(f"{error}{advice}") from error
        raise
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder / WEIGHTS} is of another model: {reason}") from error
    return model
