"""A port for a test's own processes."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
