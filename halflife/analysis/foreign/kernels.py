"""PyTorch instead of kernels for GPUs, where a model of transformers runs on another device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from unittest.mock import patch

from torch import nn

CHOOSER = "hub_kernels"  # the module of transformers that chooses between a package's kernel and PyTorch


@contextmanager
def runnable_kernels(model: nn.Module) -> Iterator[None]:
    """Let a model on a CPU compute in PyTorch while the context is open.

    transformers takes the kernels of fla-core, mamba-ssm and causal-conv1d wherever these packages are installed. They
    need a GPU. Each function that chooses a kernel wraps one in PyTorch, which replaces it here.
    """
    with ExitStack() as patches:
        if next(model.parameters()).device.type == "cpu":
            for module in {sys.modules[type(part).__module__] for part in model.modules()}:
                for name, function in _choosers(module):
                    patches.enter_context(patch.object(module, name, function.__wrapped__))
        yield


def _choosers(module: ModuleType) -> list[tuple[str, FunctionType]]:
    """Return the functions of a module that choose a kernel, with their names."""
    return [
        (name, value) for name, value in vars(module).items()
        if isinstance(value, FunctionType) and hasattr(value, "__wrapped__") and CHOOSER in value.__code__.co_filename
    ]  # fmt: skip
