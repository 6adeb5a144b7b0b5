"""`halflife serve`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Serve:
    """Serve a trained model over HTTP, with the paths of OpenAI's API and sessions of constant memory.

    A browser gets a page to talk to the model at /, and its memory of a text that one types at /look. The other paths
    are /v1/completions, /v1/chat/completions (if the tokenizer has a chat template), /v1/models,
    /v1/sessions, /health and /metrics. All clients share the steps of the model. SIGTERM and Ctrl-C let the answers
    that have begun end, for 30 seconds.

    examples:
      halflife serve my-checkpoint
      halflife serve my-checkpoint --port 9000 --max-rows 64 --api-key "$KEY"
      HALFLIFE_API_KEY=secret halflife serve my-checkpoint --host 0.0.0.0
    """

    checkpoint: Positional[Path]
    """The folder of the model."""
    host: str = "127.0.0.1"
    """The address to listen on. The default is this machine alone; 0.0.0.0 is every network."""
    port: int = 8000
    """The port; 0 for a free one."""
    name: str | None = None
    """The model's name for clients. Default: the name of the folder."""
    api_key: str | None = None
    """What clients must send as a bearer token. Default: the variable HALFLIFE_API_KEY, or no key."""
    max_rows: int = 32
    """Most continuations and prompts in work at one time."""
    max_waiting: int = 256
    """Most requests that wait for a row. Further ones get status 429."""
    max_input: int = 131_072
    """Most tokens of a request's prompts."""
    max_tokens: int = 4096
    """Most tokens that a request may write."""
    max_sessions: int = 1024
    """Most sessions."""
    max_connections: int = 1024
    """Most connections. Further ones get status 503."""
    piece: int = 512
    """Tokens of prompts that are read between two steps."""
    cache_mb: int = 256
    """Megabytes of states of earlier prompts, from which prompts with the same beginning start; 0 for none."""
    session_mb: int = 4096
    """Megabytes of states of sessions."""
    quantize: Literal["none", "int8"] = "none"
    """int8 stores the weights of linear maps in a quarter of the bytes, on a CPU."""
    device: str | None = None
    """The device. Default: the GPU if there is one, else the CPU."""

    def run(self) -> None:
        from halflife.cli.checkpoint import load_model, load_tokenizer
        from halflife.cli.options import default_device
        from halflife.registry import check_least
        from halflife.report.look import looker
        from halflife.report.page.chat import chat_page, live_page
        from halflife.serve.app import Limits, build
        from halflife.serve.engine import Engine
        from halflife.serve.listen import bind, listen
        from halflife.serve.pages import Pages, has_chat

        positive = ("max_input", "max_tokens", "max_sessions", "max_connections", "session_mb")
        check_least(**{name: getattr(self, name) for name in positive})
        if not 0 <= self.port < 65_536:
            raise ValueError(f"port must lie between 0 and 65535; got {self.port}")
        model = load_model(self.checkpoint, self.quantize).to(default_device(self.device)).eval()
        tokenizer = load_tokenizer(self.checkpoint, model.config.vocab_size)
        engine = Engine(
            model, tokenizer, max_rows=self.max_rows, max_waiting=self.max_waiting, piece=self.piece,
            cache_bytes=self.cache_mb * 10**6,
        )  # fmt: skip
        limits = Limits(
            max_input=self.max_input, max_tokens=self.max_tokens, max_sessions=self.max_sessions,
            session_bytes=self.session_mb * 10**6,
        )  # fmt: skip
        name = self.name or self.checkpoint.resolve().name
        key = self.api_key or os.environ.get("HALFLIFE_API_KEY") or None
        talk = chat_page(name, chat=has_chat(tokenizer), key=key is not None, most=self.max_tokens)
        pages = Pages({"/": talk, "/look": live_page(name, key=key is not None)}, looker(model, tokenizer))
        print(f"{name}: {model.num_parameters():,} parameters, {4 * model.state_size():,} bytes of state a row")
        listen(build(engine, name, limits, key, pages), bind(self.host, self.port), self.max_connections)
