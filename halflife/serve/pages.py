"""The pages of a server for people, and what the lens among them reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from halflife.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from halflife.serve.engine import Engine
from halflife.serve.schema import Text

Result = TypeVar("Result")
CLIENT_LEFT = 499
MOST_LOOKED_AT = 1024  # tokens; while a text is looked at, no other client gets a token


@dataclass(frozen=True)
class Pages:
    """Pages, and the lens."""

    html: Mapping[str, str]  # the pages by their paths
    # returns what the page of the lens draws, as JSON, from token ids. The engine's thread calls it.
    look: Callable[[Sequence[int]], dict[str, Any]]


def has_chat(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer has a template for chats."""
    return isinstance(tokenizer, HuggingFaceTokenizer) and bool(tokenizer.tokenizer.chat_template)


async def unless_left(request: Request, work: asyncio.Future[Result]) -> Result | None:
    """Return the result of some work, or None if the client leaves before. The work is cancelled then."""
    leaving = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        leaving.cancel()


def add_pages(app: FastAPI, pages: Pages, engine: Engine, encode: Callable[[Any], Awaitable[list[int]]]) -> None:
    """Let an application answer the paths of the pages, and `/v1/look`, which takes what `encode` makes ids from."""

    async def page(text: str) -> Response:
        return HTMLResponse(text)

    async def look(body: Text, request: Request) -> Response:
        """What the model remembers of a text."""
        ids = await encode(body.input)
        if not 1 <= len(ids) <= MOST_LOOKED_AT:
            raise ValueError(f"the lens takes 1 to {MOST_LOOKED_AT:,} tokens; got {len(ids):,}")
        found = await unless_left(request, asyncio.wrap_future(engine.call(partial(pages.look, ids))))
        return Response(status_code=CLIENT_LEFT) if found is None else JSONResponse(found)

    for path, text in pages.html.items():
        app.add_api_route(path, partial(page, text), methods=["GET"], response_model=None, include_in_schema=False)
    app.add_api_route("/v1/look", look, methods=["POST"], response_model=None)
