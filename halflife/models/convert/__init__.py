"""Conversion of models of transformers and fla to halflife, and back.

| `model_type` | library | direction | in halflife |
|---|---|---|---|
| mamba2 | transformers (also fla's, import) | import, export | mixer "mamba2", no MLP |
| qwen3_5_text | transformers | import, export | mixer "gated_deltanet" and attention with gates, SwiGLU |
| qwen3_5 | transformers | import of the text model | the same |
| olmo_hybrid | transformers | import, export | mixer "gated_deltanet" and attention with norms after it, SwiGLU |
| gla | fla | import, export | mixer "gla", SwiGLU |
| gated_deltanet | fla | import, export | mixer "gated_deltanet", SwiGLU |
| rwkv7 | fla (also the author's `.pth`) | import, export | mixer "rwkv7" and its channel mix |
| kda | fla | import, export | mixer "kda", SwiGLU |
| delta_net | fla | import, export | mixer "deltanet", SwiGLU |
| gated_deltaproduct | fla | import, export | mixer "deltaproduct", SwiGLU |
| comba | fla | import, export | mixer "comba" with `normalize_feedback`, SwiGLU |
| retnet | fla | import, export | mixer "retnet" with the decays of its paper, SwiGLU |
| mamba3 | fla | import, export | mixer "mamba3" with rates that depend on the input, no MLP |

Conversion is strict. It is an error if a setting would change the function, or if a tensor is missing, unknown or of
another shape.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from halflife.files import CONFIG_JSON, WEIGHTS, read_json_object, write_json
from halflife.models import checkpoint
from halflife.models.convert import fla, fla_rows, hybrids, mamba2, mamba3  # noqa: F401 (each registers its kinds)
from halflife.models.convert.mixers import MIXERS, take_mixer
from halflife.models.convert.rwkv7 import SUFFIX, from_rwkv7_pth, read_pth
from halflife.models.convert.source import SOURCES, assemble
from halflife.models.lm import LanguageModel
from halflife.models.tensor_file import Checkpoint, has_checksum, write_tensors
from halflife.registry import check_choice

__all__ = ["MIXERS", "SOURCES", "assemble", "back_to", "convert", "from_rwkv7_pth", "take_mixer"]

FORMATS = ("halflife", "transformers", "fla")
# The files in which transformers keeps a tokenizer.
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
# The file and the settings of config.json that say where `generate` of transformers begins and ends a text.
GENERATION = "generation_config.json"
ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def convert(source: str | Path, target: str | Path, *, to: str = "halflife") -> Path:
    """Write the model in `source` into `target` in another format, and return `target`.

    Args:
        source: Hugging Face folder (`config.json` and safetensors, sharded or not), halflife checkpoint, or a `.pth` of
            RWKV-7. A tokenizer in a folder is copied, and what tells `generate` of transformers where a text ends.
        target: folder, in which a checkpoint is a FileExistsError.
        to: "halflife", or "transformers" or "fla" to export a halflife checkpoint.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the model cannot be converted; the message says why. Then nothing is written.
    """
    source, target = Path(source), Path(target)
    check_choice("format", to, FORMATS)
    # Weights alone are what a conversion leaves that was killed before it wrote their description.
    killed = not (target / CONFIG_JSON).exists() and has_checksum(target / WEIGHTS)
    for name in (CONFIG_JSON, *[WEIGHTS] * (not killed)):
        if (target / name).exists():
            raise FileExistsError(f"{target} holds {name} already; give another folder")
    if source.suffix == SUFFIX and not source.is_dir():
        if to != "halflife":
            raise ValueError(f"a {SUFFIX} is converted to halflife")
        return checkpoint.save(assemble(*from_rwkv7_pth(read_pth(source))), target)
    config = read_json_object(source / CONFIG_JSON)
    ours, kind = checkpoint.is_ours(config), str(config.get("model_type"))
    if to != "halflife":
        if not ours:
            raise ValueError(f"only a halflife checkpoint can be written for {to}; {source} is not one")
        return _with_tokenizer(source, _write(target, *back_to(to, checkpoint.load(source))))
    if "format" in config:
        raise ValueError(f"{source} is a halflife checkpoint already; --to transformers writes it for transformers")
    if ours:
        return _with_tokenizer(source, checkpoint.save(checkpoint.load(source), target, config.get("tokenizer")))
    if kind in MIXERS and kind not in SOURCES:
        raise ValueError(f"a {kind} has layers that halflife lacks; `halflife look` and `spectrum` read it in place")
    if "model_type" not in config and checkpoint.runs_below(source):
        raise checkpoint.no_checkpoint(source)
    model = assemble(*SOURCES[kind](config, Checkpoint(source)))
    return _with_tokenizer(source, checkpoint.save(model, target))


def back_to(library: str, model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the `config.json` and the tensors of a model of another library that computes what `model` does.

    Args:
        library: "transformers" or "fla".
        model: the model. Of transformers' hybrids, one whose norms have weights 1 + w becomes a Qwen3.5, any other one
            an OLMo Hybrid.

    Raises:
        ValueError: the library has no such model, or the model has options that the library's lacks.
    """
    kind = model.config.mixer
    if library == "fla":
        names = {SOURCES[name].mixer or name: name for name in SOURCES if SOURCES[name].library == "fla"}
        if kind not in names:
            raise ValueError(f"fla has models for mixers {', '.join(names)}; this one has {kind!r}")
        kind = names[kind]
    elif kind != "mamba2":
        kind = "qwen3_5_text" if model.config.norm == "rms_plus_one" else "olmo_hybrid"
    return SOURCES[kind].back(kind, model)


def _write(folder: Path, config: dict[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    write_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    write_json(folder / CONFIG_JSON, {name: _encoded(value) for name, value in config.items()})
    return folder


def _encoded(value: Any) -> Any:
    """The inverse of `source.plain`. JSON has no infinity; transformers writes `{"__float__": "Infinity"}`."""
    if isinstance(value, list):
        return [_encoded(each) for each in value]
    return {"__float__": "Infinity"} if value == math.inf else value


def _with_tokenizer(source: Path, target: Path) -> Path:
    """Copy the tokenizer into the folder `target`, and what says where a text ends; return `target`."""
    for name in (*TOKENIZER, GENERATION):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    config, written = (read_json_object(folder / CONFIG_JSON) for folder in (source, target))
    given = {**(config.get("text_config") or {}), **config}
    write_json(target / CONFIG_JSON, {**written, **{name: given[name] for name in ENDS if name in given}})
    return target
