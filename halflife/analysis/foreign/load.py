"""Loads models of transformers from folders or the hub, to be read in place.

Weights must be safetensors, and code that comes with a model is not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from halflife.analysis.foreign.families import MIXERS
from halflife.analysis.foreign.model import ForeignModel
from halflife.data.hub import model_name, no_model, unreachable
from halflife.models.tensor_file import Checkpoint

SHOWN_TENSORS = 3  # missing tensors that one message lists


def is_hub_name(source: str | Path) -> bool:
    """Whether a name can be a model of the hub, `owner/name` or `owner/name@revision`, because no such path exists."""
    return model_name(source) is not None


def is_known(model_type: str) -> bool:
    """Whether the installed transformers has this type of model."""
    if find_spec("transformers") is None:
        return False
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def has_mixers(model_type: str) -> bool:
    """Whether the installed transformers defines mixers whose decay is known for this type of model."""
    if not is_known(model_type):
        return False
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    name = model_type_to_module_name(model_type)
    try:
        module = import_module(f"transformers.models.{name}.modeling_{name}")
    except ModuleNotFoundError:  # a model whose code is elsewhere
        return False
    return any(hasattr(module, mixer) for mixer in MIXERS)


def load_foreign(source: str | Path, device: torch.device | str = "cpu") -> ForeignModel:
    """Load a model of transformers, with weights of the type in which they are stored, from a folder or by its name.

    The name on the hub is `owner/name` or `owner/name@revision`. A model in the hub's cache needs no network.

    Raises:
        FileNotFoundError: a file is missing.
        ConnectionError: the hub cannot be reached, and its cache does not hold the model.
        ValueError: the model has no layer whose decay can be read, needs code of its own, holds pickles, or its weights
            do not fit its configuration.
    """
    from transformers import AutoConfig

    where, options = _location(source)
    with _plain_errors(source), _quiet():
        config = AutoConfig.from_pretrained(where, **options)
        model_class = _model_class(config)
        with torch.device("meta"):
            planned = ForeignModel(model_class.from_config(config), config.model_type)
    _require_decay(source, planned)
    if Path(where).is_dir():
        Checkpoint(Path(where))  # its errors name missing, truncated and pickled files
    with _plain_errors(source), _quiet():
        model, report = model_class.from_pretrained(
            where, config=config, dtype="auto", use_safetensors=True, output_loading_info=True, **options
        )
    _require_weights(source, report)
    return ForeignModel(model.to(device), str(source) if is_hub_name(source) else config.model_type)


def _location(source: str | Path) -> tuple[str, dict[str, Any]]:
    """Return what `from_pretrained` takes: the folder or name, and where to look for it."""
    options: dict[str, Any] = {"trust_remote_code": False}
    if (found := model_name(source)) is None:
        return str(source), options
    name, options["revision"] = found[0], found[1] or "main"
    if (reason := unreachable(name, options["revision"])) is not None:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(name, "config.json", revision=options["revision"])
        if not isinstance(cached, str):
            raise no_model(source, reason)
        options["local_files_only"] = True
    return name, options


@contextmanager
def _plain_errors(source: str | Path) -> Iterator[None]:
    """Turn errors of transformers into errors of one line."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            reason = "it needs code that comes with the model, and such code is not run"
        raise ValueError(f"{source} cannot be read by transformers: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Let transformers load weights without a progress bar and without its report on them."""
    from transformers.utils import logging

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def _model_class(config: Any) -> Any:
    """The class of transformers that loads the model, with a head that predicts tokens if there is one."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    return next(
        (auto for auto in (AutoModelForCausalLM, AutoModelForImageTextToText) if type(config) in auto._model_mapping),
        AutoModel,
    )


def _require_decay(source: str | Path, model: ForeignModel) -> None:
    if any(block.mixer.decay is not None for block in model.blocks):
        return
    kinds = sorted({kind for block in model.blocks for kind in block.mixer.kinds})
    families = sorted({MIXERS[name].family for name in MIXERS})
    raise ValueError(
        f"{source} holds a {model.config.name}, which cannot be read: its layers are {', '.join(kinds) or 'unknown'}, "
        f"and the decays that can be read are those of {', '.join(families)}"
    )


def _require_weights(source: str | Path, report: Any) -> None:
    missing = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    wrong = [f"{key[0]} has another shape" for key in sorted(report["mismatched_keys"])]
    if problems := missing + wrong:
        more = f" ({len(problems)} in all)" if len(problems) > SHOWN_TENSORS else ""
        raise ValueError(f"the weights in {source} do not fit config.json: {'; '.join(problems[:SHOWN_TENSORS])}{more}")
