"""Conversion of models of transformers and fla to halflife, and of those of transformers back.

| `model_type` | library | direction | in halflife |
|---|---|---|---|
| mamba2 | transformers | import, export | mixer "mamba2", no MLP |
| qwen3_5_text | transformers | import, export | mixer "gated_deltanet" and attention with gates, SwiGLU |
| qwen3_5 | transformers | import of the text model | the same |
| olmo_hybrid | transformers | import, export | mixer "gated_deltanet" and attention with norms after it, SwiGLU |
| gla | fla | import | mixer "gla", SwiGLU |
| gated_deltanet | fla | import | mixer "gated_deltanet", SwiGLU |
| rwkv7 | fla | import | mixer "rwkv7" and its channel mix |
| qwen3_next, kimi_linear, falcon_h1, zamba2, … | transformers | import of one mixer | a layer, see `mixers` |

Conversion is strict. It is an error if a setting would change the function, or if a tensor is missing, unknown or of
another shape.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from halflife.files import CONFIG_JSON, WEIGHTS, read_json_object
from halflife.models import checkpoint
from halflife.models.convert import (  # noqa: F401 (each registers itself)
    fla_linear,
    fla_rwkv7,
    hybrids,
    mamba2,
    qwen3_next,
)
from halflife.models.convert.files import Checkpoint, load_layer, save_layer, write_model
from halflife.models.convert.fla_linear import from_fla_gated_deltanet, from_fla_gla
from halflife.models.convert.fla_rwkv7 import from_fla_rwkv7
from halflife.models.convert.hybrids import from_olmo_hybrid, from_qwen3_5, to_transformers_hybrid
from halflife.models.convert.mamba2 import from_transformers_mamba2, to_transformers_mamba2
from halflife.models.convert.mixers import MIXERS, mixers, take_mixer
from halflife.models.convert.qwen3_next import qwen3_next_mixer
from halflife.models.convert.source import SOURCES, assemble
from halflife.models.tensor_file import has_checksum
from halflife.registry import unknown

__all__ = [
    "MIXERS", "SOURCES", "assemble", "convert", "from_fla_gated_deltanet", "from_fla_gla", "from_fla_rwkv7",
    "from_olmo_hybrid", "from_qwen3_5", "from_transformers_mamba2", "load_layer", "qwen3_next_mixer",
    "to_transformers_hybrid", "to_transformers_mamba2",
]  # fmt: skip

FORMATS = ("halflife", "transformers")
# The files in which transformers keeps a tokenizer.
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip


def convert(source: str | Path, target: str | Path, *, to: str = "halflife", layer: int | None = None) -> Path:
    """Write the model in `source` into `target` in another format, and return `target`.

    Args:
        source: Hugging Face folder (`config.json` and safetensors, sharded or not), or halflife checkpoint. A tokenizer
            in it is copied.
        target: folder without a checkpoint.
        to: "halflife", or "transformers" to export a halflife checkpoint.
        layer: index, from 0, of the one mixer to convert of a model in `MIXERS`; `load_layer` reads the result.

    Raises:
        FileNotFoundError: a file is missing.
        FileExistsError: the target holds a checkpoint.
        ValueError: the model cannot be converted; the message says why. Then nothing is written.
    """
    source, target = Path(source), Path(target)
    if to not in FORMATS:
        raise unknown("format", to, list(FORMATS))
    for name, described_by in (
        (CONFIG_JSON, None), ("layer.json", None), (WEIGHTS, CONFIG_JSON), ("layer.safetensors", "layer.json")
    ):  # fmt: skip
        # Weights alone are what a conversion leaves that was killed before it wrote their description.
        killed = described_by and not (target / described_by).exists() and has_checksum(target / name)
        if (target / name).exists() and not killed:
            raise FileExistsError(f"{target} holds {name} already; give another folder")
    config = read_json_object(source / CONFIG_JSON)
    ours, kind = checkpoint.is_ours(config), config.get("model_type")
    if to == "transformers":
        if not ours or layer is not None:
            raise ValueError(f"only a whole halflife checkpoint can be written for transformers; {source} is not one")
        model = checkpoint.load(source)
        back = to_transformers_mamba2 if model.config.mixer == "mamba2" else to_transformers_hybrid
        return _with_tokenizer(source, write_model(target, *back(model)))
    if "format" in config:
        raise ValueError(f"{source} is a halflife checkpoint already; --to transformers writes it for transformers")
    if ours and layer is None:
        return _with_tokenizer(source, checkpoint.save(checkpoint.load(source), target, config.get("tokenizer")))
    if layer is not None:
        return save_layer(target, *take_mixer(str(kind), config, Checkpoint(source), layer))
    if kind in MIXERS and kind not in SOURCES:
        found = ", ".join(map(str, mixers(Checkpoint(source))))
        raise ValueError(
            f"a whole {kind} has layers that halflife lacks; --layer N converts one mixer, with N one of {found}"
        )
    converter = SOURCES[str(kind)]
    return _with_tokenizer(source, checkpoint.save(assemble(*converter(config, Checkpoint(source))), target))


def _with_tokenizer(source: Path, target: Path) -> Path:
    """Copy the files of the tokenizer, if there are some, and return `target`."""
    for name in TOKENIZER:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    return target
