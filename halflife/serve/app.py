"""The paths of the server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from halflife.serve import metrics
from halflife.serve.answering import Answering, JobFailed
from halflife.serve.answers import Form, error
from halflife.serve.engine import Engine
from halflife.serve.gate import Application, Gate
from halflife.serve.jobs import Full, Piece, Settings, Stopping
from halflife.serve.pages import CLIENT_LEFT, Pages, add_pages, has_chat, unless_left
from halflife.serve.schema import Chat, Completion, Generate, Sampling, Text
from halflife.serve.sessions import Busy, Crowded, Session, Sessions

RETRY = {"Retry-After": "1"}


@dataclass(frozen=True)
class Limits:
    """What the server takes at most."""

    max_input: int = 131_072  # tokens of a request's prompts, or that a session reads at once
    max_tokens: int = 4096  # of a continuation
    max_body: int = 8 << 20  # bytes of a request's body
    max_sessions: int = 1024
    session_bytes: int = 4 << 30  # of all sessions' states


class Server:
    """The paths of the server as methods. The engine's thread must have been started. `name` is the model's."""

    def __init__(self, engine: Engine, name: str, limits: Limits) -> None:
        self.engine, self.name, self.limits = engine, name, limits
        self.tokenizer, self.created = engine.tokenizer, int(time.time())
        self.sessions = Sessions(limits.max_sessions, limits.session_bytes)
        self.answers = metrics.Answers()

    async def health(self) -> Response:
        """Whether the engine runs."""
        well = self.engine.alive
        return JSONResponse({"status": "ok" if well else "stopped"}, 200 if well else 503)

    async def metrics(self) -> Response:
        """The numbers for Prometheus."""
        text = metrics.text(self.engine, self.answers, len(self.sessions), self.sessions.bytes)
        return PlainTextResponse(text, media_type=metrics.CONTENT_TYPE)

    async def models(self) -> Response:
        """The list of the one model."""
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def model(self, name: str) -> Response:
        """The model."""
        self._check_model(name)
        return JSONResponse(self._about())

    def _about(self) -> dict:
        return {"id": self.name, "object": "model", "created": self.created, "owned_by": "halflife"}

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise HTTPException(404, f"there is no model {name!r}; this server has {self.name!r}")

    async def completions(self, body: Completion, request: Request) -> Response:
        """Continue texts."""
        self._check_model(body.model)
        prompts = [await self.ids(prompt) for prompt in body.prompts(self.tokenizer.eos)]
        self._check_length(prompts)
        settings = body.settings(self._max_tokens(body.max_tokens), body.logprobs)
        form = Form(self.name, self.tokenizer, chat=False, logprobs=body.logprobs is not None)
        return await self._answer(request, body, Answering(self.engine, prompts, settings), form)

    async def chat(self, body: Chat, request: Request) -> Response:
        """Answer a chat."""
        self._check_model(body.model)
        prompt = await run_in_threadpool(self._template, [message.plain() for message in body.messages])
        self._check_length([prompt])
        most = self._max_tokens(body.max_completion_tokens or body.max_tokens or self.limits.max_tokens)
        if body.top_logprobs is not None and not body.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        settings = body.settings(most, (body.top_logprobs or 0) if body.logprobs else None)
        form = Form(self.name, self.tokenizer, chat=True, logprobs=body.logprobs)
        return await self._answer(request, body, Answering(self.engine, [prompt], settings), form)

    def _template(self, messages: list[dict]) -> list[int]:
        tokenizer: Any = self.tokenizer
        if not has_chat(tokenizer):
            raise ValueError("the model's tokenizer has no chat template; use /v1/completions")
        try:
            ids = tokenizer.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as reason:  # the template is a program of the model's author
            raise ValueError(f"the chat template refuses these messages: {' '.join(str(reason).split())}") from reason
        return list(ids)

    async def ids(self, text: str | Sequence[int]) -> list[int]:
        """Return the ids of a text, or ids that the model knows."""
        if isinstance(text, str):
            return (await run_in_threadpool(self.tokenizer.encode, text)).tolist()
        size = self.engine.model.config.vocab_size
        if wrong := [token for token in text if not 0 <= token < size]:
            raise ValueError(f"token ids must lie between 0 and {size - 1}; got {wrong[0]}")
        return list(text)

    def _check_length(self, prompts: Sequence[Sequence[int]]) -> None:
        if len(prompts) > self.engine.max_rows:
            raise ValueError(f"a request has at most {self.engine.max_rows} prompts; got {len(prompts)}")
        if (total := sum(map(len, prompts))) > self.limits.max_input:
            raise ValueError(f"a request has at most {self.limits.max_input:,} tokens; got {total:,}")

    def _max_tokens(self, wanted: int) -> int:
        if wanted > self.limits.max_tokens:
            raise ValueError(f"max_tokens must be at most {self.limits.max_tokens}; got {wanted}")
        return wanted

    async def _answer(self, request: Request, body: Sampling, answering: Answering, form: Form) -> Response:
        if body.stream:
            return StreamingResponse(self._events(answering, form, body.with_usage), media_type="text/event-stream")
        pieces = await self._whole(request, answering)
        if pieces is None:
            return Response(status_code=CLIENT_LEFT)
        return JSONResponse(form.whole(pieces, answering.done))

    async def _whole(self, request: Request, answering: Answering) -> list[list[Piece]] | None:
        """Return the pieces of each choice, or None if the client leaves before."""
        try:
            pieces = await unless_left(request, asyncio.ensure_future(answering.whole()))
        finally:
            answering.cancel()
        self.answers.left += pieces is None
        return pieces

    async def _events(self, answering: Answering, form: Form, with_usage: bool) -> AsyncIterator[str]:
        """Yield the events of a stream. If the client leaves, this generator is closed."""
        complete = False
        try:
            if form.chat:
                for choice in range(answering.choices):
                    yield _event(form.start(choice))
            async for choice, piece in answering.pieces():
                yield _event(form.part(choice, piece))
            if with_usage:
                yield _event(form.end(answering.done))
            complete = True
            yield "data: [DONE]\n\n"
        except JobFailed as reason:
            complete = True
            yield _event(error(str(reason), "server_error"))
        finally:
            answering.cancel()
            self.answers.left += not complete

    async def open_session(self, body: Text, request: Request) -> Response:
        """Open a session, which may read a text at once."""
        ids = await self.ids(body.input)
        self._check_length([ids])
        session = self.sessions.open()
        try:
            response = await self._append(session, ids, request)
        except Exception:
            self.sessions.delete(session.id)
            raise
        if response.status_code == CLIENT_LEFT:  # nobody knows its name
            self.sessions.delete(session.id)
        return response

    async def session(self, name: str) -> Response:
        """Describe a session."""
        return JSONResponse(self._session(name).about())

    async def append(self, name: str, body: Text, request: Request) -> Response:
        """Let a session read."""
        session, ids = self._session(name), await self.ids(body.input)
        self._check_length([ids])
        self.sessions.check_room()
        return await self._append(session, ids, request)

    async def _append(self, session: Session, ids: list[int], request: Request) -> Response:
        """Read all tokens but the last one, which the next request reads."""
        session.check_free()
        prompt = [*session.unread, *ids]
        if len(prompt) > 1 and ids:
            session.take(rest=prompt[-1:])
            answering = Answering(self.engine, [prompt[:-1]], Settings(max_tokens=0), session)
            if await self._whole(request, answering) is None:
                return Response(status_code=CLIENT_LEFT)
        session.unread = session.unread or tuple(ids)
        return JSONResponse(session.about())

    async def generate(self, name: str, body: Generate, request: Request) -> Response:
        """Continue a session, which then goes on from the end of the text."""
        self._check_model(body.model)
        session = self._session(name)
        self.sessions.check_room()
        settings = body.settings(self._max_tokens(body.max_tokens), body.logprobs)
        session.take()
        answering = Answering(self.engine, [session.unread], settings, session)
        form = Form(self.name, self.tokenizer, chat=False, logprobs=body.logprobs is not None)
        return await self._answer(request, body, answering, form)

    async def fork(self, name: str) -> Response:
        """Open a second session that goes on from the same place."""
        return JSONResponse(self.sessions.open(self._session(name)).about())

    async def delete(self, name: str) -> Response:
        """Forget a session."""
        self.sessions.delete(self._session(name).id)
        return JSONResponse({"id": name, "object": "session.deleted", "deleted": True})

    def _session(self, name: str) -> Session:
        try:
            return self.sessions.get(name)
        except KeyError:
            raise HTTPException(404, f"there is no session {name!r}") from None


def _event(data: dict) -> str:
    return f"data: {json.dumps(data)}\n\n"


def build(
    engine: Engine, name: str, limits: Limits | None = None, api_key: str | None = None, pages: Pages | None = None
) -> Application:
    """Return the ASGI application of a server of the model `name`. The engine is started and closed with it.

    Clients must send `api_key` as a bearer token, if it is not None. People get `pages`, if any.
    """
    limits = limits or Limits()
    server = Server(engine, name, limits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if not engine.alive:
            engine.start()
        yield
        await run_in_threadpool(engine.close)

    # The pages of documentation would load scripts from the network.
    app = FastAPI(title="halflife", lifespan=lifespan, docs_url=None, redoc_url=None)
    for method, path, handler in (
        ("GET", "/health", server.health), ("GET", "/metrics", server.metrics), ("GET", "/v1/models", server.models),
        ("GET", "/v1/models/{name}", server.model), ("POST", "/v1/completions", server.completions),
        ("POST", "/v1/chat/completions", server.chat), ("POST", "/v1/sessions", server.open_session),
        ("GET", "/v1/sessions/{name}", server.session), ("DELETE", "/v1/sessions/{name}", server.delete),
        ("POST", "/v1/sessions/{name}/append", server.append), ("POST", "/v1/sessions/{name}/fork", server.fork),
        ("POST", "/v1/sessions/{name}/generate", server.generate),
    ):  # fmt: skip
        app.add_api_route(path, handler, methods=[method], response_model=None)
    if pages is not None:
        add_pages(app, pages, engine, server.ids)
    _add_errors(app)
    return Gate(app, server.answers, limits.max_body, api_key)


def _fault(errors: Sequence[Any]) -> tuple[str, str]:
    """Return where the first fault of a request is, and what it is.

    A value of several forms has errors of each form. The true ones are those of the form that fits furthest.
    """
    field = errors[0]["loc"][:2]
    same = [each for each in errors if each["loc"][:2] == field]
    deepest = max(len(each["loc"]) for each in same)
    furthest = [each for each in same if len(each["loc"]) == deepest]
    place = [str(part) for part in furthest[0]["loc"][1:] if not (part == "str" or "[" in str(part))]
    return ".".join(place), "; or ".join(dict.fromkeys(each["msg"] for each in furthest))


def _add_errors(app: FastAPI) -> None:
    def answer(status: int, kind: str, code: str | None = None, headers: dict | None = None):
        async def handle(_: Request, reason: Exception) -> Response:
            return JSONResponse(error(str(reason), kind, code=code), status, headers)

        return handle

    async def refuse(_: Request, reason: Exception) -> Response:
        assert isinstance(reason, HTTPException)
        return JSONResponse(error(str(reason.detail)), reason.status_code, reason.headers)

    async def invalid(_: Request, reason: Exception) -> Response:
        assert isinstance(reason, RequestValidationError)
        place, message = _fault(reason.errors())
        return JSONResponse(error(f"{place or 'the body'}: {message}", param=place or None), 400)

    app.add_exception_handler(HTTPException, refuse)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ValueError, answer(400, "invalid_request_error"))
    app.add_exception_handler(JobFailed, answer(500, "server_error"))
    app.add_exception_handler(Busy, answer(409, "invalid_request_error", "session_busy"))
    app.add_exception_handler(Crowded, answer(429, "rate_limit_error", "too_many_sessions", RETRY))
    app.add_exception_handler(Full, answer(429, "rate_limit_error", "too_many_requests", RETRY))
    app.add_exception_handler(Stopping, answer(503, "server_error", "stopping", RETRY))
