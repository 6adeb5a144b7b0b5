"""The optional packages, and the extra of the distribution that installs each of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DISTRIBUTION = "halflife-lm"
# Package, as Python imports it → extra, as `pip install 'halflife-lm[extra]'` names it.
EXTRAS = {
    "tyro": "cli", "rich": "cli", "yaml": "cli",
    "transformers": "train", "tokenizers": "train", "accelerate": "train", "huggingface_hub": "train",
    "datasets": "train", "pyarrow": "train", "filelock": "train",
    "matplotlib": "report", "jinja2": "report", "markupsafe": "report", "PIL": "report",
    "fla": "gpu", "lm_eval": "eval", "ray": "sweep", "submitit": "slurm",
    "tensorboard": "tensorboard", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow",
    "fastapi": "serve", "uvicorn": "serve", "starlette": "serve", "pydantic": "serve",
    "onnx": "onnx", "onnxscript": "onnx", "onnxruntime": "onnx",
}  # fmt: skip


def install_anywhere(extra: str) -> str:
    """Return what files that leave this machine say about an extra. The distribution is not published yet."""
    return f"pip install '.[{extra}]' in a checkout of halflife, or '{DISTRIBUTION}[{extra}]' once it is published"


def install(*extras: str) -> str:
    """Return the command that installs the extras, from the checkout if this is one."""
    checkout = Path(__file__).parents[1]
    source = f"-e '{checkout}" if (checkout / "pyproject.toml").is_file() else f"'{DISTRIBUTION}"
    return f"pip install {source}[{','.join(dict.fromkeys(extras))}]'"


def missing(what: str, *packages: str) -> ModuleNotFoundError:
    """Return the error that says what (such as "hf:owner/name") needs the packages, and how to install them."""
    advice = install(*(EXTRAS[package] for package in packages))
    return ModuleNotFoundError(f"{what} needs {', '.join(packages)}: {advice}", name=packages[0])


def require(what: str, *packages: str) -> None:
    """Raise the error `missing` if some of the packages are not installed."""
    if absent := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise missing(what, *absent)
