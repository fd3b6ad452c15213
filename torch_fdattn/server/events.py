"""Answers that end when their client has gone: one JSON body, or server-sent events.

Source of the events' form: https://html.spec.whatwg.org/multipage/server-sent-events.html, and OpenAI's
last one, `data: [DONE]`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from torch_fdattn.server.errors import APIError, internal_error

T = TypeVar("T")
_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_CLIENT_GONE = 499  # nginx's number for it: nobody reads it but the metrics


class ClientGoneError(Exception):
    """The client has closed the connection."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and waited for, where the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def json_answer(request: Request, work: Coroutine[Any, Any, dict]) -> Response:
    """The JSON that `work` makes."""
    try:
        answer = await until_disconnect(request.receive, work)
        return Response(_encoded(answer), media_type="application/json")
    except ClientGoneError:
        return Response(status_code=_CLIENT_GONE)


async def event_answer(request: Request, chunks: AsyncIterator[dict[str, Any]]) -> Response:
    """A stream of the chunks. It begins with the first one: what is refused before it has a status of its own."""
    events = _events(chunks)
    try:
        first = await until_disconnect(request.receive, anext(events))
    except ClientGoneError:
        await events.aclose()
        return Response(status_code=_CLIENT_GONE)
    return EventStream(first, events)


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Chunks as events; after the first one an error is an event too, and the last one."""
    has_begun = False
    try:
        async for chunk in chunks:
            yield _event(chunk)
            has_begun = True
        yield b"data: [DONE]\n\n"
    except Exception as error:
        if not has_begun:
            raise
        told = error if isinstance(error, APIError) else internal_error(error)
        yield _event(told.body())
    finally:
        await chunks.aclose()


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _encoded(chunk) + b"\n\n"


def _encoded(value: dict[str, Any]) -> bytes:
    # A model's JSON may escape half of a surrogate pair, which has no UTF-8.
    return _JSON.encode(value).encode("utf-8", "replace")


class EventStream(Response):
    """Server-sent events that stop where the client has gone."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: AsyncIterator[bytes]) -> None:
        # Without a length; proxies are not to hold events back.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except (ClientGoneError, OSError):
            pass  # the server closes what is left of the connection
        finally:
            await self._rest.aclose()

    async def _send_all(self, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        await self._send_part(send, self._first)
        async for event in self._rest:
            await self._send_part(send, event)
        await self._send_part(send, b"", more=False)

    async def _send_part(self, send: Send, body: bytes, more: bool = True) -> None:
        await send({"type": "http.response.body", "body": body, "more_body": more})
