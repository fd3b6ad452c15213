"""HTTP/1.1 and server-sent events over asyncio's streams: what the benchmark asks of a client, and no more.

A library's client takes as long for a chunk as the server that is to be measured.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

_LIMIT = 1 << 20  # bytes of a line


class AnswerError(Exception):
    """An answer that is an error, or ends too early."""


async def post_events(
    url: str, body: dict[str, Any], api_key: str | None = None
) -> AsyncIterator[dict[str, Any]]:
    """The events of a streamed answer, up to [DONE].

    Raises:
        AnswerError: another status than 200, an error in the stream, a stream without its end.
        OSError: no connection.
    """
    parts = urlsplit(url)
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    port = parts.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(
        parts.hostname, port, ssl=secure, limit=_LIMIT
    )  # fmt: skip
    try:
        content = json.dumps(body | {"stream": True}).encode()
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        head = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"{key}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + content)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        headers = {}
        while line := (await reader.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        if status != 200:
            text = await reader.read(4096)
            raise AnswerError(f"status {status}: {_message(text)}")
        chunked = headers.get("transfer-encoding") == "chunked"
        async for line in _lines(reader, chunked):
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]":
                return
            event = json.loads(line[6:])
            if "error" in event:
                raise AnswerError(event["error"]["message"])
            yield event
        raise AnswerError("the stream ended without [DONE]")
    except (asyncio.IncompleteReadError, IndexError, ValueError) as error:
        raise AnswerError(f"no HTTP answer that can be read ({error})") from None
    finally:
        writer.close()


async def _lines(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    if not chunked:
        while line := await reader.readline():
            yield line.strip()
        return
    text = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        text += (await reader.readexactly(size + 2))[:-2]
        *lines, text = text.split(b"\n")
        for line in lines:
            yield line.strip()


def _message(text: bytes) -> str:
    try:
        return json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return text[:200].decode("utf-8", "replace")
