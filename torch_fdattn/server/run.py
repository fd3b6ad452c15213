"""Running the application: uvicorn, an end that is asked for, an end because the engine has failed."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from torch_fdattn.engine.heap import frozen_heap
from torch_fdattn.server.app import make_app
from torch_fdattn.server.connection import limited_connection
from torch_fdattn.server.engine_protocol import AsyncEngine
from torch_fdattn.server.options import ServerOptions
from torch_fdattn.server.service import Service

#: Of a dead engine, and behind the time that a signal gives: how long answers may take to end, and the process.
_ANSWERS_SECONDS, _PROCESS_SECONDS = 4.0, 8.0
#: Of a connection. Longer than clients keep theirs (httpx, and OpenAI's client by it, 5 s): where both end it at the
#: same time, a request on its way is lost.
_IDLE_SECONDS = 75
#: How long a thread may keep Python's lock while another one waits for it. The engine's thread, which wants it all the time where the
#: host is what a step waits for, would keep it for Python's 5 ms each time that the event loop has something to do, and a request
#: needs it a dozen times before its first token.
_SWITCH_SECONDS = 1e-4
_POLL_SECONDS = 1.0  # between looks at whether the engine lives while nobody asks it anything


def exit_within_limit(seconds: float = _PROCESS_SECONDS) -> threading.Timer:
    """Ends the process with exit code 1 in time, whatever its threads wait for: those that wait for a device, or for another
    rank, do not end by themselves."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()
    return timer


class AddressError(OSError):
    """The server cannot listen where it was told to."""


def serve(
    make_engine: Callable[[], AsyncEngine], options: ServerOptions, announce: Callable[[str], None]
) -> int:
    """Serves until SIGINT or SIGTERM, or until the engine fails; the process's exit code.

    The first signal ends it gracefully: no new requests, and `options.grace_seconds` for those in
    progress, which then get 503 or an error event. The second ends it at once. Where the engine has failed
    the process is gone within 10 s with exit code 1, whatever its threads wait for; so it is, 10 s behind the
    grace, where the server does not end. Who ends the process then calls `exit_within_limit` before: a thread
    that compiles a grammar is waited for.

    Args:
        make_engine: called in the event loop, once the address is the server's.
        announce: called with the server's URL when it listens.

    Raises:
        AddressError: the address is taken, or not this machine's.
    """
    with _listen(options) as listener, contextlib.ExitStack() as at_end:
        at_end.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_SECONDS)
        return asyncio.run(_serve(make_engine, options, announce, listener, at_end))


async def _serve(
    make_engine: Callable[[], AsyncEngine], options: ServerOptions, announce: Callable[[str], None],
    listener: socket.socket, at_end: contextlib.ExitStack,
) -> int:  # fmt: skip
    engine = make_engine()
    app = make_app(engine, options)
    service: Service = app.state.service
    server = _Server(make_config(app, options))
    has_failed = False

    def end() -> None:
        server.force_exit = server.should_exit
        if not server.should_exit:
            loop.call_later(options.grace_seconds, lambda: loop.create_task(service.end_answers()))
            at_end.callback(exit_within_limit(options.grace_seconds + _PROCESS_SECONDS).cancel)
        server.should_exit = service.is_draining = True

    def fail() -> None:
        nonlocal has_failed
        if has_failed:
            return
        has_failed = True
        server.config.timeout_graceful_shutdown = round(_ANSWERS_SECONDS)
        server.should_exit = service.is_draining = True
        exit_within_limit()

    service.on_dead = fail
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    address = listener.getsockname()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    at_end.enter_context(frozen_heap())
    announce(f"http://{host}:{address[1]}")
    watch = asyncio.ensure_future(_watch(service))
    try:
        await server.serve(sockets=[listener])
        service.stats()  # it may have failed while the server ended
    finally:
        watch.cancel()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        with contextlib.suppress(Exception if has_failed else ()):
            await engine.close()
    return int(has_failed)


def make_config(app: FastAPI, options: ServerOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app, http=limited_connection(options.write_seconds), log_level="warning", access_log=False, server_header=False,
        lifespan="off", timeout_graceful_shutdown=math.ceil(options.grace_seconds + _ANSWERS_SECONDS),
        timeout_keep_alive=_IDLE_SECONDS,
    )  # fmt: skip


async def _watch(service: Service) -> None:
    """Sees an engine that fails while no request is in progress."""
    while service.stats() is not None:
        await asyncio.sleep(_POLL_SECONDS)


class _Server(uvicorn.Server):
    """Leaves signals to `serve`: uvicorn raises them once more at the end, and the exit code is a signal's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(options: ServerOptions) -> socket.socket:
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        raise AddressError(
            f"cannot listen on {options.host} port {options.port} ({error.strerror}): choose another --port or --host"
        ) from None
