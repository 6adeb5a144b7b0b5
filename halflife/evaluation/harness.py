"""lm-evaluation-harness on a language model: its tasks and metrics, read and written with the model's own state.

Nothing is cut unless a `max_length` says so. The first token of a text has to follow something: the end token (`eos`)
where the tokenizer has one, else a newline. No special token is put before a context, as none is in training.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from halflife.evaluation.batched import generate, loglikelihoods
from halflife.models import LanguageModel

SETTINGS = ("temperature", "top_k", "top_p")  # of `generate`, that a task may set
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
BOOTSTRAP = 1000  # resamples for the error of metrics that have no formula for it, perplexity for example


@runtime_checkable
class Tokenizer(Protocol):
    """What is needed of `halflife.data.tokenizers.Tokenizer`."""

    vocab_size: int
    eos: int | None

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Adapter:
    """What the harness asks of a model; `harness_model` adds its base class, `TemplateLM`.

    Attributes:
        max_length: tokens that the model reads of one text at most, None for all.
        truncated: requests so far that were longer, and lost their beginning.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, batch_size: int, max_length: int | None, show: bool
    ) -> None:
        super().__init__()
        self.model, self.text, self.batch_size = model, tokenizer, batch_size
        self.max_length, self.show, self.truncated = max_length, show, 0
        self._device = model.embedding.weight.device

    @property
    def eot_token_id(self) -> int | None:
        return self.text.eos

    @property
    def prefix_token_id(self) -> int:
        """What the first token of a text follows."""
        if self.text.eos is not None:
            return self.text.eos
        if not (newline := self.tok_encode("\n")):
            raise ValueError("the tokenizer has no end token and no newline, so that a text's first token follows none")
        return newline[-1]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; special tokens are not added, whatever the harness asks for."""
        return self.text.encode(string).tolist()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        pairs = [
            (self._cut(context or [self.prefix_token_id], len(continuation) - 1), continuation)
            for _, context, continuation in requests
        ]
        return loglikelihoods(self.model, pairs, batch_size=self.batch_size, show=self.show)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts; with a max_length, in windows that are read anew, as the harness defines them."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        owners, windows = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length or len(ids) or 1, 1):
                owners.append(i)
                windows.append(make_disjoint_window(window))
        total = [0.0] * len(requests)
        found = loglikelihoods(self.model, windows, batch_size=self.batch_size, show=self.show)
        for i, (value, _) in zip(owners, found, strict=True):
            total[i] += value
        return total

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first of a task's `until`, the end token, or `max_gen_toks`; greedy unless it says otherwise.

        Raises:
            ValueError: a setting that is not offered, beams for example.
        """
        from rich.progress import track

        prompts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        settings = [json.dumps(request.args[1], sort_keys=True) for request in requests]
        order = sorted(range(len(requests)), key=lambda i: (settings[i], -len(prompts[i])))
        batches: list[list[int]] = []
        for i in order:  # rows of a batch share their settings
            if not batches or len(batches[-1]) == self.batch_size or settings[batches[-1][0]] != settings[i]:
                batches.append([])
            batches[-1].append(i)
        texts = [""] * len(requests)
        for batch in track(batches, "texts", disable=not self.show):
            written = self._write([prompts[i] for i in batch], requests[batch[0]].args[1])
            for i, text in zip(batch, written, strict=True):
                texts[i] = text
        return texts

    def _write(self, prompts: list[list[int]], settings: dict[str, Any]) -> list[str]:
        from lm_eval.models.utils import normalize_gen_kwargs

        asked: dict[str, Any] = dict(normalize_gen_kwargs(settings))
        until, limit, sampled = [s for s in asked.pop("until") if s], asked.pop("max_gen_toks"), asked.pop("do_sample")
        if others := {k: v for k, v in asked.items() if k not in SETTINGS and (k, v) != ("num_beams", 1)}:
            raise ValueError(f"a task asks for {others}; texts are drawn with {', '.join(SETTINGS)} alone")
        # A character takes four tokens at most: the last ones are enough to see that a text has ended.
        tail = 4 * max(map(len, until), default=0) + 4

        def done(tokens: list[int]) -> bool:
            text = self.text.decode(tokens[-tail:]) if until else ""
            return tokens[-1] == self.text.eos or any(stop in text for stop in until)

        prompts = [self._cut(prompt, limit) for prompt in prompts]
        written = generate(
            self.model, prompts, limit, done, vocab_size=self.text.vocab_size,
            # Sampling without a temperature is plain sampling, as in transformers.
            temperature=float(asked.get("temperature", 1.0)) if sampled else 0.0,
            top_k=asked.get("top_k") or None, top_p=asked.get("top_p"),
        )  # fmt: skip
        texts = [self.text.decode(tokens[:-1] if tokens[-1:] == [self.text.eos] else tokens) for tokens in written]
        return [text[: min((at for stop in until if (at := text.find(stop)) >= 0), default=None)] for text in texts]

    def _cut(self, context: list[int], more: int) -> list[int]:
        """The end of a context after which so many tokens can be read."""
        if self.max_length is None or len(context) + more <= self.max_length:
            return context
        if more >= self.max_length:
            raise ValueError(f"max_length {self.max_length} leaves no context before {more} tokens of an answer")
        self.truncated += 1
        return context[more - self.max_length :]


def harness_model(
    model: LanguageModel,
    tokenizer: Tokenizer,
    *,
    batch_size: int = 8,
    max_length: int | None = None,
    show: bool = False,
) -> Any:
    """The model as a `TemplateLM`, to be given to `lm_eval.simple_evaluate` (in evaluation mode, on its device)."""
    from lm_eval.api.model import TemplateLM

    if batch_size < 1 or (max_length is not None and max_length < 1):
        raise ValueError(f"batch_size and max_length must be at least 1; got {batch_size} and {max_length}")
    return type("HalflifeLM", (Adapter, TemplateLM), {})(model, tokenizer, batch_size, max_length, show)


def evaluate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    *,
    batch_size: int = 8,
    limit: float | None = None,
    num_fewshot: int | None = None,
    include_path: str | Path | None = None,
    metadata: Mapping[str, Any] | None = None,
    seed: int | None = None,
    max_length: int | None = None,
    show: bool = False,
) -> dict[str, Any]:
    """Runs tasks of the harness on a model.

    Args:
        model: on its device; put into evaluation mode for the call.
        tokenizer: of the model.
        tasks: names of tasks, groups or tags.
        batch_size: texts at once.
        limit: examples a task at most; below 1, a fraction of them. None for all.
        num_fewshot: examples before the question; None is each task's own number.
        include_path: a folder with YAML files of further tasks.
        metadata: what some tasks ask for, RULER's `max_seq_lengths` for example.
        seed: of all random numbers, the choice of examples before the question too; None means the harness's own,
            those of published numbers.
        max_length: tokens of one text at most; longer ones lose their beginning. None cuts nothing.
        show: progress bars.

    Returns:
        What `lm_eval.simple_evaluate` returns, and `"truncated"`: the number of requests cut to `max_length`.

    Raises:
        ImportError: lm-eval is missing.
        FileNotFoundError: there is no such folder.
        ValueError: an unknown task, one whose data cannot be had, or a setting out of range.
    """
    if not tasks or (limit is not None and limit <= 0) or (num_fewshot is not None and num_fewshot < 0):
        raise ValueError(f"need a task, limit > 0 and num_fewshot ≥ 0; got {list(tasks)}, {limit} and {num_fewshot}")
    try:
        from lm_eval import simple_evaluate
    except ModuleNotFoundError as error:
        raise ImportError(f"tasks of the harness need lm-eval ({error}): pip install 'halflife[eval]'") from error
    adapter = harness_model(model, tokenizer, batch_size=batch_size, max_length=max_length, show=show)
    manager = _manager(tasks, include_path, dict(metadata or {}))
    loaded = [part for name in dict.fromkeys(tasks) for part in _load(manager, name)]
    options: dict[str, Any] = {
        "tasks": loaded, "task_manager": manager, "limit": limit, "num_fewshot": num_fewshot, "batch_size": batch_size,
        "log_samples": False, "bootstrap_iters": BOOTSTRAP, **({} if seed is None else dict.fromkeys(SEEDS, seed)),
    }  # fmt: skip
    training = model.training
    model.eval()
    try:
        found: Any = simple_evaluate(adapter, **options)
    finally:
        model.train(training)
    return {**found, "truncated": adapter.truncated}


def _manager(tasks: Sequence[str], include_path: str | Path | None, metadata: dict[str, Any]) -> Any:
    """The harness's index of tasks; its own thousands take seconds to read, and are left out where nothing needs them.

    The metadata belong here: `simple_evaluate` does not hand its own on to a manager.
    """
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not Path(include_path).is_dir():
            raise FileNotFoundError(f"there is no folder {include_path}")
        own = TaskManager(include_path=str(include_path), include_defaults=False, metadata=metadata)
        if set(tasks) <= set(own.all_subtasks):
            return own
    manager = TaskManager(include_path=include_path and str(include_path), metadata=metadata)
    for name in tasks:
        if name not in manager.all_tasks:
            near = ", ".join(difflib.get_close_matches(name, manager.all_tasks, n=5)) or "none"
            raise ValueError(f"unknown task {name!r}; of the {len(manager.all_tasks):,} names, near it: {near}")
    return manager


def _load(manager: Any, name: str) -> list[Any]:
    """The group, the task, or the tasks of a tag, with their data."""
    try:
        loaded = manager.load([name])
    except Exception as error:  # each task has its own code and its own way to fail
        failed = "cannot get its data" if isinstance(error, OSError) else f"cannot be made ({type(error).__name__})"
        raise ValueError(f"the task {name} {failed}: {' '.join(str(error).split())}") from error
    return [loaded["groups"][name]] if name in loaded["groups"] else list(loaded["tasks"].values())


def rows(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What `evaluate` returns as a table: `{"task", "shots", "metric", "filter", "value", "stderr"}`, a row a metric.

    "filter" is how an answer was taken from a text, "none" where it was not; "stderr" is None where there is none.
    """
    table = []
    for task, results in {**found["results"], **found.get("groups", {})}.items():
        for key, value in results.items():
            metric, comma, rule = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = results.get(f"{metric}_stderr,{rule}")
            table.append({
                "task": task, "shots": found["n-shot"].get(task), "metric": metric, "filter": rule, "value": value,
                "stderr": error if isinstance(error, float) else None,
            })  # fmt: skip
    return table
