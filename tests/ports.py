"""A port for a test's own processes."""

from __future__ import annotations

import random
import socket

#: Below what a kernel gives to whoever asks for any port, each torchrun and each connection beside a test (Linux: 32768
#: on), which take a port between its choice and its use.
PORTS = range(20_000, 32_000)


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    while True:
        port = random.SystemRandom().choice(PORTS)  # tests seed the other one
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
