"""What a server is told when it is started."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Where a server listens, whom it answers, and its limits; a value that cannot be is a ValueError.

    Args:
        model_name: what `/v1/models` calls the model, and what a request's `model` must be.
        host: an address of this machine; anything but loopback lets others in.
        port: 0 takes a free one.
        api_key: what `Authorization: Bearer …` must hold; None: nobody is asked.
        max_body_bytes: of a request's body; 413 beyond.
        max_prompt_tokens: of one prompt; 400 beyond. None: what the engine takes.
        max_sequences: answers in progress, which is prompts times n; 429 beyond.
        body_seconds: within which a request's body must have come; 408 beyond.
        write_seconds: within which a reader must take 64 KiB of what waits for it; its connection is closed otherwise.
        grace_seconds: how long a shutdown waits for answers in progress.

    Examples:
        >>> from torch_fdattn.server import ServerOptions
        >>> ServerOptions(model_name="smollm2").is_loopback
        True
        >>> ServerOptions(model_name="smollm2", port=99999)
        Traceback (most recent call last):
            ...
        ValueError: port must be from 0 to 65535, got 99999
    """

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_body_bytes: int = 4 << 20
    max_prompt_tokens: int | None = None
    max_sequences: int = 256
    body_seconds: float = 30.0
    write_seconds: float = 60.0
    grace_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not self.model_name:
            raise ValueError("model_name must not be empty, got ''")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ValueError("api_key must be printable ASCII, as a header carries it")
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("api_key must not be empty: leave it out where nobody is to be asked")
        for name in ("max_body_bytes", "max_prompt_tokens", "max_sequences"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("body_seconds", "write_seconds", "grace_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def is_loopback(self) -> bool:
        """Whether this machine alone reaches the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            return False
