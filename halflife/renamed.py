"""Names of version 0.1.0 that have moved. Using one is an error that gives the new name."""

from __future__ import annotations

import sys
from functools import partial
from importlib.abc import MetaPathFinder
from typing import Any, NoReturn

# Old module → new module, both below `halflife`.
MODULES = {
    "analysis.approximation": "theory.approximation", "analysis.correlations": "theory.correlations",
    "analysis.decay_values": "analysis.decays", "analysis.koopman": "theory.koopman",
    "analysis.koopman_bounds": "theory.koopman_bounds", "analysis.mask": "analysis.masks",
    "analysis.results": "runs.folder", "analysis.spectra": "theory.spectra", "analysis.style": "report.style",
    "decay.power_law": "decay.minimax", "experiments.language": "experiments.train",
    "experiments.post": "experiments.mqar", "layers.koopman_mlp": "layers.mlp", "layers.linear": "layers.init",
    "layers.norm": "layers.parts", "models.io": "models.checkpoint", "models.modifiers": "models.presets.modifiers",
    "models.sizes": "models.presets.sizes", "ops.backend": "ops.backends.dispatch",
    "ops.chunk_decay": "ops.chunked.decays", "ops.chunking": "ops.chunked.layout", "ops.fla": "ops.backends.fla",
    "ops.gate_decay": "ops.chunked.gate_decay", "ops.triton": "ops.backends.triton",
    "training.batches": "data.batches", "training.cache": "data.cache", "training.corpus": "data.corpus",
    "training.data": "data.task_stream", "training.documents": "data.documents", "training.hub": "data.hub",
    "training.language": "runs.language_run", "training.pool": "runs.pool", "training.run": "runs.task_run",
    "training.splits": "data.splits", "training.store": "data.store", "training.sweep": "runs.sweep",
    "training.text": "runs.language_run",
    "training.tokens": "data.tokenizers",
}  # fmt: skip
# Old name → new name, both below `halflife`. A name that stood in a module above is told with the module.
NAMES = {
    "decay.base.inverse_softplus": "precision.inverse_softplus",
    "decay.power_law.best_ends": "decay.minimax.best_endpoints",
    "decay.base.Decay.step": "decay.base.Decay.step_size",
    "models.io.load_any": "models.load.load_any",
    "models.lm.LanguageModel.state_floats": "models.lm.LanguageModel.state_size",
    "tasks.base.Task.guess": "tasks.base.Task.shortcut_accuracy",
    "training.language.run": "runs.one.run_one",
    "training.pool.executor": "runs.pool.make_runner",
    "training.run.run": "runs.one.run_one",
    "training.sweep.sweep": "runs.sweep.run_sweep",
    "training.text.TextConfig": "runs.language_run.LanguageConfig",
}


class RenamedFinder(MetaPathFinder):
    """The last finder of `sys.meta_path`, which is asked for modules that no other finder has."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        old = fullname.removeprefix("halflife.")
        if fullname.startswith("halflife.") and old in MODULES:
            moved = (f"; {name} is now halflife.{new}" for name, new in NAMES.items() if name.startswith(f"{old}."))
            raise ModuleNotFoundError(f"{fullname} is now halflife.{MODULES[old]}{''.join(moved)}")


def install() -> None:
    """Answer the use of old modules, and of old names in the modules and classes loaded so far, with the new names."""
    if not any(type(finder).__name__ == "RenamedFinder" for finder in sys.meta_path):
        sys.meta_path.append(RenamedFinder())
    for old, new in NAMES.items():
        owner, _, name = old.rpartition(".")
        parent, _, cls = owner.rpartition(".")
        if owner in MODULES:
            continue
        if module := sys.modules.get(f"halflife.{owner}"):
            vars(module)["__getattr__"] = partial(_refuse_name, owner)
        elif target := getattr(sys.modules.get(f"halflife.{parent}"), cls, None):
            refuse = partial(_refuse, f"{cls}.{name} is now {new.split('.', parent.count('.') + 1)[-1]}")
            is_property = isinstance(vars(target).get(new.rpartition(".")[2]), property)
            setattr(target, name, property(refuse) if is_property else refuse)


def _refuse(message: str, *arguments: Any, **options: Any) -> NoReturn:
    raise AttributeError(message)


def _refuse_name(owner: str, name: str) -> NoReturn:
    new = NAMES.get(f"{owner}.{name}")
    _refuse(f"module 'halflife.{owner}' has no attribute {name!r}{f'; it is now halflife.{new}' if new else ''}")
