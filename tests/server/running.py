"""The server under test: in this process, without a socket or behind one of uvicorn's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve")
pytest.importorskip("prometheus_client", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

pytest.importorskip("httpx", reason="needs the package httpx")

import httpx
import uvicorn

from tests.server.fake_engine import FakeEngine
from torch_fdattn.server import ServerOptions
from torch_fdattn.server.app import make_app
from torch_fdattn.server.run import make_config

LIMIT_SECONDS = 60  # a test that waits longer waits in vain
#: Above the objects that Python 3.12 keeps from garbage collection by itself, far below those of a frozen heap.
IMMORTAL = 10_000


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), LIMIT_SECONDS))


def options(**given) -> ServerOptions:
    return ServerOptions(**{"model_name": "fake", "port": 0} | given)


def client_of(engine: FakeEngine, headers: dict | None = None, **given) -> httpx.AsyncClient:
    """A client of the application itself; it sees a streamed answer at its end."""
    transport = httpx.ASGITransport(make_app(engine, options(**given)), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)


@contextlib.asynccontextmanager
async def served(engine: FakeEngine, **given) -> AsyncIterator[str]:
    """A real server on a free port; its URL."""
    app = make_app(engine, options(**given))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = make_config(app, app.state.service.options)
        config.timeout_graceful_shutdown = 2
        server = uvicorn.Server(config)
        server.capture_signals = contextlib.nullcontext
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Waits for what must come soon."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def chat(text: str = "Hi", **more) -> dict:
    return {"messages": [{"role": "user", "content": text}], **more}
