"""A connection that ends where its client takes nothing, or next to nothing, of its answer."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.auto import AutoHTTPProtocol

#: What a client must take in the time that it has: as much as asyncio lets wait before it holds a writer back.
_LEAST_BYTES = 1 << 16


def limited_connection(write_seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's connection, closed at once where more than asyncio's 64 KiB wait to be written and the client takes less than
    that in so many seconds: by itself asyncio waits for such a client for ever, which holds the answer, or a sequence's pages.
    """

    class Connection(AutoHTTPProtocol):
        _timer: asyncio.TimerHandle | None = None

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch()

        def resume_writing(self) -> None:
            self._stop()
            super().resume_writing()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _watch(self) -> None:
            left = self.transport.get_write_buffer_size()
            self._timer = self.loop.call_later(write_seconds, self._look, left)

        def _look(self, left: int) -> None:
            if self.transport.get_write_buffer_size() <= left - _LEAST_BYTES:
                self._watch()
            else:
                self.transport.abort()

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()

    return Connection
