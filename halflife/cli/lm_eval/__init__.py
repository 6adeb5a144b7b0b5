"""The model `halflife` of lm-evaluation-harness, and RULER's tasks made offline as tasks of the harness.

The harness looks for models in its own list and in what was imported before; it has no entry points for models.
Therefore `python -m halflife.cli.lm_eval` stands for `lm_eval`, with the same options. In Python, `register()` is
enough.
"""

from __future__ import annotations

from pathlib import Path

MODEL = "halflife"
TASKS = Path(__file__).parent / "tasks"  # for --include_path


def register() -> None:
    """Make `halflife` a model of the harness, for `lm_eval.simple_evaluate(model="halflife", …)` too."""
    import lm_eval.models  # noqa: F401 (registers the harness's own models, which happens in an empty registry only)
    from lm_eval.api.registry import model_registry

    if MODEL not in model_registry:
        model_registry.register(MODEL, target="halflife.cli.lm_eval.model:HalflifeLM")
