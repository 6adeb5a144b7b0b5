"""The tasks and metrics of lm-evaluation-harness, for a halflife model.

Texts are truncated only if `max_length` is set. Special tokens are as in the harness's own models of transformers. A
tokenizer adds to a text what it adds by default, such as a token of the beginning (BOS). Special tokens in a text, as
in that of a chat template, are read as such. The first token of a text needs a preceding token, which is the BOS token
if the tokenizer has one, else the end token (`eos`), else a newline.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from halflife.evaluation import evaluating
from halflife.evaluation.batched import generate, in_batches, loglikelihoods, track
from halflife.extras import missing
from halflife.models import LanguageModel

SETTINGS = ("temperature", "top_k", "top_p")  # settings of `generate` that a task may set
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
BOOTSTRAP = 1000  # resamples for the standard error of metrics without a formula for it, such as perplexity


@runtime_checkable
class Tokenizer(Protocol):
    """The methods of `halflife.data.tokenizers.Tokenizer` that this module needs."""

    name: str
    vocab_size: int
    eos: int | None

    def encode(self, text: str) -> np.ndarray: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Adapter:
    """The methods that the harness calls on a model. `harness_model` adds the base class `TemplateLM`.

    Attributes:
        tokenizer: the tokenizer of transformers, or None for another one.
        batch_size: most texts in a batch. A batch that needs too much memory is divided.
        max_length: largest number of tokens that the model reads of one text; None means all.
        truncated: number of requests so far that were longer and lost their beginning.
    """

    def __init__(
        self, model: LanguageModel, tokenizer: Tokenizer, batch_size: int, max_length: int | None, show: bool,
        add_bos_token: bool | None = None, prefix_token_id: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.text, self.batch_size = model, tokenizer, batch_size
        self.max_length, self.show, self.truncated = max_length, show, 0
        self.add_bos_token, self.custom_prefix_token_id = add_bos_token, prefix_token_id
        self.tokenizer: Any = getattr(tokenizer, "tokenizer", None)
        self._device = model.embedding.weight.device

    @property
    def eot_token_id(self) -> int | None:
        return self.text.eos

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes the first token of a text."""
        if self._starts:
            return self._starts[0]
        if not (newline := self.text.encode("\n").tolist()):
            raise ValueError("the tokenizer has neither an end token nor a newline to precede a text")
        return newline[-1]

    @property
    def _starts(self) -> list[int]:
        bos = getattr(self.tokenizer, "bos_token_id", None)
        tokens = (self.custom_prefix_token_id, self.text.eos if bos is None else bos)
        return [token for token in tokens if token is not None]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return token ids. None for `add_special_tokens` adds what `add_bos_token` says, if they are not there."""
        if self.tokenizer is None:
            return self.text.encode(string).tolist()
        add = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(tuple(self.tokenizer.decode([i]) for i in self._starts)):
            add = False
        # Without truncation a text may be longer than the tokenizer's model could read.
        return self.tokenizer(string, add_special_tokens=add is not False, verbose=False)["input_ids"]

    @property
    def tokenizer_name(self) -> str:
        """A name under which the harness may store requests."""
        return self.text.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a chat. Without `add_generation_prompt` the last message is to be continued."""
        from jinja2 import TemplateError

        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError(f"the tokenizer {self.text.name!r} has no chat template: leave out --apply_chat_template")
        how = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        try:
            return self.tokenizer.apply_chat_template(chat_history, tokenize=False, **how)
        except TemplateError:  # as of a template that knows no system prompt, which the harness's own models leave out
            rest = [message for message in chat_history if message["role"] != "system"]
            return self.tokenizer.apply_chat_template(rest, tokenize=False, **how)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        pairs = [
            (self._truncate(context or [self.prefix_token_id], len(continuation) - 1), continuation)
            for _, context, continuation in requests
        ]
        return loglikelihoods(self.model, pairs, batch_size=self.batch_size, show=self.show)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts. With a max_length, each of the harness's windows starts afresh."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        owners, windows = [], []
        for i, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length or len(ids) or 1, 1):
                owners.append(i)
                windows.append(make_disjoint_window(window))
        total = [0.0] * len(requests)
        scores = loglikelihoods(self.model, windows, batch_size=self.batch_size, show=self.show)
        for i, (value, _) in zip(owners, scores, strict=True):
            total[i] += value
        return total

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return texts that end before a string of `until`, at the end token, or after `max_gen_toks` tokens.

        Decoding is greedy unless the task asks for sampling.

        Raises:
            ValueError: a task asks for a setting that is not supported, such as beams.
        """
        prompts = [self.tok_encode(request.args[0]) or [self.prefix_token_id] for request in requests]
        settings = [json.dumps(request.args[1], sort_keys=True) for request in requests]
        order = sorted(range(len(requests)), key=lambda i: (settings[i], -len(prompts[i])))
        # Rows of a batch share their settings.
        groups = (list(rows) for _, rows in groupby(order, key=settings.__getitem__))

        def write(batch: list[int]) -> list[str]:
            return self._generate_texts([prompts[i] for i in batch], requests[batch[0]].args[1])

        texts = [""] * len(requests)
        for i, text in track(in_batches(write, groups, self.batch_size), "texts", len(requests), self.show):
            texts[i] = text
        return texts

    def _generate_texts(self, prompts: list[list[int]], settings: dict[str, Any]) -> list[str]:
        from lm_eval.models.utils import normalize_gen_kwargs

        asked: dict[str, Any] = dict(normalize_gen_kwargs(settings))
        until, limit, sampled = [s for s in asked.pop("until") if s], asked.pop("max_gen_toks"), asked.pop("do_sample")
        if others := {k: v for k, v in asked.items() if k not in SETTINGS and (k, v) != ("num_beams", 1)}:
            raise ValueError(f"a task asks for {others}; texts are drawn with {', '.join(SETTINGS)} alone")
        special = {} if self.tokenizer is None else self.tokenizer.get_added_vocab()  # which are no part of a text
        ends = {self.text.eos, *(special[stop] for stop in until if stop in special)}
        # A character has at most four tokens, so the last tokens are enough to find a string of `until`.
        tail = 4 * max(map(len, until), default=0) + 4

        def done(tokens: list[int]) -> bool:
            text = self.text.decode(tokens[-tail:]) if until else ""
            return tokens[-1] in ends or any(stop in text for stop in until)

        prompts = [self._truncate(prompt, limit) for prompt in prompts]
        written = generate(
            self.model, prompts, limit, done, vocab_size=self.text.vocab_size,
            # Sampling without a temperature means temperature 1, as in transformers.
            temperature=float(asked.get("temperature", 1.0)) if sampled else 0.0,
            top_k=asked.get("top_k") or None, top_p=asked.get("top_p"),
        )  # fmt: skip
        texts = [self.text.decode(tokens[:-1] if ends.intersection(tokens[-1:]) else tokens) for tokens in written]
        return [text[: min((at for stop in until if (at := text.find(stop)) >= 0), default=None)] for text in texts]

    def _truncate(self, context: list[int], more: int) -> list[int]:
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
    add_bos_token: bool | None = None,
    prefix_token_id: int | None = None,
) -> Any:
    """Return the model (on its device, in evaluation mode) as a `TemplateLM` for `lm_eval.simple_evaluate`."""
    from lm_eval.api.model import TemplateLM

    if batch_size < 1 or (max_length is not None and max_length < 1):
        raise ValueError(f"batch_size and max_length must be at least 1; got {batch_size} and {max_length}")
    return type("HalflifeLM", (Adapter, TemplateLM), {})(
        model, tokenizer, batch_size, max_length, show, add_bos_token, prefix_token_id
    )  # fmt: skip


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
    add_bos_token: bool | None = None,
    prefix_token_id: int | None = None,
) -> dict[str, Any]:
    """Run tasks of the harness on a model.

    Args:
        model: the model, on its device; it is in evaluation mode during the call.
        tasks: names of tasks, groups or tags.
        batch_size: most texts in a batch.
        limit: largest number of examples of a task; below 1, the fraction of them; None means all.
        num_fewshot: number of examples before the question; None means the default of each task.
        include_path: folder with YAML files of further tasks.
        metadata: settings that some tasks need, such as RULER's `max_seq_lengths`.
        seed: seed of all random numbers, including the choice of few-shot examples; None means the harness's seeds,
            with which published numbers were made.
        max_length: largest number of tokens of one text; longer texts lose their beginning. None truncates nothing.
        add_bos_token: whether the tokenizer adds its special tokens to a text; None means its default.
        prefix_token_id: the token that precedes the first token of a text; None means BOS, else the end token.

    Returns:
        The result of `lm_eval.simple_evaluate`, with `"truncated"`, the number of requests cut to `max_length`.

    Raises:
        ImportError: lm-eval is missing.
        FileNotFoundError: `include_path` does not exist.
        ValueError: a task is unknown, its data are unavailable, or a setting is out of range.
    """
    if not tasks or (limit is not None and limit <= 0) or (num_fewshot is not None and num_fewshot < 0):
        raise ValueError(f"need a task, limit > 0 and num_fewshot ≥ 0; got {list(tasks)}, {limit} and {num_fewshot}")
    try:
        from lm_eval import simple_evaluate
    except ModuleNotFoundError as error:
        raise missing(f"lm-evaluation-harness ({error})", "lm_eval") from error
    adapter = harness_model(
        model, tokenizer, batch_size=batch_size, max_length=max_length, show=show, add_bos_token=add_bos_token,
        prefix_token_id=prefix_token_id,
    )  # fmt: skip
    manager = _task_manager(tasks, include_path, dict(metadata or {}))
    loaded = [part for name in dict.fromkeys(tasks) for part in _load_task(manager, name)]
    options: dict[str, Any] = {
        "tasks": loaded, "task_manager": manager, "limit": limit, "num_fewshot": num_fewshot, "batch_size": batch_size,
        "log_samples": False, "bootstrap_iters": BOOTSTRAP, **({} if seed is None else dict.fromkeys(SEEDS, seed)),
    }  # fmt: skip
    with evaluating(model):
        results: Any = simple_evaluate(adapter, **options)
    return {**results, "truncated": adapter.truncated}


def _task_manager(tasks: Sequence[str], include_path: str | Path | None, metadata: dict[str, Any]) -> Any:
    """The harness's index of tasks, without its own thousands, which take seconds, if `include_path` has all."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        if not Path(include_path).is_dir():
            raise FileNotFoundError(f"there is no folder {include_path}")
        included = TaskManager(include_path=str(include_path), include_defaults=False, metadata=metadata)
        if set(tasks) <= set(included.all_subtasks):
            return included
    manager = TaskManager(include_path=include_path and str(include_path), metadata=metadata)
    for name in tasks:
        if name not in manager.all_tasks:
            near = ", ".join(difflib.get_close_matches(name, manager.all_tasks, n=5)) or "none"
            raise ValueError(f"unknown task {name!r}; similar names, of {len(manager.all_tasks):,}: {near}")
    return manager


def _load_task(manager: Any, name: str) -> list[Any]:
    try:
        loaded = manager.load([name])
    except Exception as error:  # a task runs code of its own, which may raise any error
        failed = "cannot get its data" if isinstance(error, OSError) else f"cannot be loaded ({type(error).__name__})"
        raise ValueError(f"the task {name} {failed}: {' '.join(str(error).split())}") from error
    return [loaded["groups"][name]] if name in loaded["groups"] else list(loaded["tasks"].values())


def metric_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a table of the results of `evaluate`, one row for each metric.

    A row is `{"task", "shots", "metric", "filter", "value", "stderr", "guess"}`. "filter" names what extracts an answer
    from a text, or is "none". "stderr", and "guess", the accuracy of a guess, are None if the harness does not say.
    """
    table = []
    for task, metrics in {**results["results"], **results.get("groups", {})}.items():
        for key, value in metrics.items():
            metric, comma, rule = key.partition(",")
            if not comma or metric.endswith("_stderr") or (metric.isdecimal() and value == -1):
                continue  # −1 is at a length of RULER's tasks that was not measured
            error = metrics.get(f"{metric}_stderr,{rule}")
            choices = results.get("configs", {}).get(task, {}).get("doc_to_choice")
            table.append({
                "task": task, "shots": results["n-shot"].get(task), "metric": metric, "filter": rule, "value": value,
                "stderr": error if isinstance(error, float) else None,
                "guess": 1 / len(choices) if metric.startswith("acc") and isinstance(choices, list) else None,
            })  # fmt: skip
    return table
