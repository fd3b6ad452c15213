"""Who may ask, and how much: checks of a request before anything reads it, as ASGI middleware."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from torch_fdattn.server.errors import APIError, internal_error
from torch_fdattn.server.service import Service

#: What needs no key: the page, which asks for it, and whether the server is well.
_OPEN = ("/", "/health")
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)


class Guard:
    """The key, the origin and the size of each request; a 500 for what fails; each answer's status for the metrics.

    A page of another origin must not use a server on its reader's machine: a browser's `Origin` must be
    the server's own, and a server on a loopback address answers to loopback names alone (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._options, self._metrics = app, service.options, service.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        has_begun = False

        async def counted(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                # Of routes alone: anybody can think of new paths.
                path = getattr(scope.get("route"), "path", "other")
                self._metrics.http_requests.labels(path, message["status"]).inc()
            await send(message)

        try:
            headers = Headers(scope=scope)
            self._check_origin(headers)
            self._check_key(scope["path"], headers)
            body = await self._read(headers, receive)
        except APIError as error:
            await error.response()(scope, receive, counted)
            return
        if body is None:
            return
        try:
            await self._app(scope, _replayed(body, receive), counted)
        except Exception as error:
            if has_begun:
                raise
            await internal_error(error).response()(scope, receive, counted)

    def _check_origin(self, headers: Headers) -> None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if self._options.is_loopback and host and not _LOOPBACK.fullmatch(host):
            raise APIError(403, "the Host header must name this machine's loopback address")
        if origin is not None and origin.partition("://")[2] != host:
            raise APIError(403, "requests of another site's page are refused")

    def _check_key(self, path: str, headers: Headers) -> None:
        if self._options.api_key is None or path in _OPEN:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        # Digests have one length, so neither the key's length nor its beginning shows in the time.
        given, expected = (
            hashlib.sha256(x.strip().encode()).digest() for x in (key, self._options.api_key)
        )
        if not (hmac.compare_digest(given, expected) and scheme.lower() == "bearer"):
            raise APIError(
                401, "the server's API key must be given as Authorization: Bearer …", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body, refused before it is held where it is too large; None where the client has gone."""
        limit = self._options.max_body_bytes
        told = headers.get("content-length", "0")
        too_large = APIError(
            413, f"the body must have at most {limit} bytes", code="body_too_large"
        )
        if told.isdecimal() and int(told[:20]) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._options.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise too_large
                    if not message.get("more_body"):
                        return bytes(body)
        except TimeoutError:
            raise APIError(408, f"the body must come within {self._options.body_seconds:g} s") from None  # fmt: skip


def _replayed(body: bytes, receive: Receive) -> Receive:
    """What the application receives: the body, then what comes after it."""
    first: dict[str, Any] | None = {"type": "http.request", "body": body, "more_body": False}

    async def replay() -> Message:
        nonlocal first
        if first is None:
            return await receive()
        message, first = first, None
        return message

    return replay
