"""What every request passes first: its size, its key, and the count of its answer."""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from halflife.serve.answers import error
from halflife.serve.metrics import Answers

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Gate:
    """An ASGI application around another one."""

    application: Application  # the inner one
    answers: Answers  # counts the answers
    max_body: int  # most bytes of a request's body
    api_key: str | None = None  # what `/v1/…` asks for as a bearer token; None for no key

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.application(scope, receive, send)
            return
        began, status, size = time.monotonic(), 500, 0

        async def counted_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        async def bounded_receive() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.max_body:
                raise HTTPException(413, self._too_large())
            return message

        refusal = self._refuse(scope)
        try:
            await (refusal or self.application)(scope, bounded_receive, counted_send)
        finally:
            path = getattr(scope.get("route"), "path", "other")
            self.answers.add(path, status, time.monotonic() - began)

    def _too_large(self) -> str:
        return f"the body of a request must have at most {self.max_body:,} bytes"

    def _refuse(self, scope: MutableMapping[str, Any]) -> JSONResponse | None:
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body:
            return JSONResponse(error(self._too_large(), code="request_too_large"), 413, {"Connection": "close"})
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if self.api_key is None or not scope["path"].startswith("/v1"):
            return None
        if hmac.compare_digest(given, self.api_key.encode()):
            return None
        message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
        return JSONResponse(error(message, code="invalid_api_key"), 401, {"WWW-Authenticate": "Bearer"})
