"""Answers in the JSON of OpenAI's API."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from halflife.data.tokenizers import Tokenizer
from halflife.serve.jobs import Done, Piece, Written

REPLACED = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Form:
    """The form of the answers to one request."""

    model: str  # its name
    tokenizer: Tokenizer
    chat: bool  # whether the answer is a message of a chat
    logprobs: bool  # whether log-probabilities are reported
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def _envelope(self, choices: list[dict[str, Any]], chunk: bool) -> dict[str, Any]:
        kind = "text_completion" if not self.chat else "chat.completion.chunk" if chunk else "chat.completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model,
            "choices": choices,
        }  # fmt: skip

    def whole(self, choices: Sequence[Sequence[Piece]], done: Sequence[Done]) -> dict[str, Any]:
        """Return the answer from all pieces of each choice and the ends of the jobs."""
        answers = []
        for i, pieces in enumerate(choices):
            text = "".join(piece.text for piece in pieces)
            tokens = [token for piece in pieces for token in piece.tokens]
            said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            answers.append({"index": i, **said, **self._logprobs(tokens), "finish_reason": pieces[-1].finish})
        return {**self._envelope(answers, chunk=False), "usage": usage(done)}

    def start(self, choice: int) -> dict[str, Any]:
        """Return the first event of a choice of a chat."""
        delta = {"role": "assistant", "content": ""}
        return self._envelope([{"index": choice, "delta": delta, "finish_reason": None}], chunk=True)

    def part(self, choice: int, piece: Piece) -> dict[str, Any]:
        """Return one event of a stream."""
        said = {"delta": {"content": piece.text} if piece.text else {}} if self.chat else {"text": piece.text}
        answer = {"index": choice, **said, **self._logprobs(piece.tokens), "finish_reason": piece.finish}
        return self._envelope([answer], chunk=True)

    def end(self, done: Sequence[Done]) -> dict[str, Any]:
        """Return the event of a stream that reports the numbers of tokens."""
        return {**self._envelope([], chunk=True), "usage": usage(done)}

    def _logprobs(self, tokens: Sequence[Written]) -> dict[str, Any]:
        if not self.logprobs:
            return {"logprobs": None}
        if self.chat:
            return {"logprobs": {"content": [self._chat_token(token) for token in tokens]}}
        return {
            "logprobs": {
                "tokens": [self._name(token.token) for token in tokens],
                "token_logprobs": [token.logprob for token in tokens],
                "top_logprobs": [{self._name(t): p for t, p in token.top} for token in tokens],
                "text_offset": [token.offset for token in tokens],
            }
        }

    def _chat_token(self, written: Written) -> dict[str, Any]:
        pairs = [(written.token, written.logprob), *written.top]
        first, *top = (
            {"token": (name := self._name(token)), "logprob": p, "bytes": list(name.encode())} for token, p in pairs
        )
        return {**first, "top_logprobs": top}

    def _name(self, token: int) -> str:
        """Return a token's text behind other text, with its space, so that names of tokens join to the answer.

        Tokens that are no whole characters would share a text, so they get their id.
        """
        alone, twice = self.tokenizer.decode([token]), self.tokenizer.decode([token, token])
        text = twice[len(alone) :]
        return f"token_id:{token}" if not text or REPLACED in text else text


def usage(done: Sequence[Done]) -> dict[str, Any]:
    """Return the numbers of tokens of a request, from the ends of its jobs."""
    read, written = sum(job.read for job in done), sum(job.written for job in done)
    return {
        "prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(job.reused for job in done)},
    }  # fmt: skip


def error(message: str, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None) -> dict:
    """Return an error in OpenAI's form."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
