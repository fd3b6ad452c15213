"""The two errors that a user's model can cause, and the lazy import of optional packages."""

from __future__ import annotations

import importlib
import reprlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from torch_fdattn.extras import install_command

# What reading a file raises where a value is not what the format says.
MALFORMED = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, OSError,
    struct.error,
)  # fmt: skip


class ModelError(ValueError):
    """A model name, folder or file that cannot be used; the message says which one and why.

    Examples:
        >>> torch_fdattn.models.ModelConfig("gpt5", 64, 32, 48, 1, 2, 2, 16, 128)
        Traceback (most recent call last):
            ...
        torch_fdattn.models.errors.ModelError: architecture must be one of llama, qwen3, got 'gpt5'
    """


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever is malformed within becomes a ModelError that names `path`."""
    try:
        yield
    except ModelError as error:
        if str(path) in str(error):
            raise
        raise ModelError(f"{path}: {error}") from None
    except MALFORMED as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"{path}: malformed ({cause})") from None


def expect_text(value: object) -> str:
    """A string of a file, or TypeError, which `reading` turns into a ModelError."""
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {reprlib.repr(value)}")
    return value


class MissingExtra(ImportError):
    """An optional package that is not installed; the message names the extra that brings it.

    Examples:
        >>> issubclass(torch_fdattn.models.MissingExtra, ImportError)
        True
    """


def require(module: str, purpose: str, extra: str = "models") -> ModuleType:
    """Import `module`, or say that this extra of torch-fdattn installs it and what it is needed for."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # the package is there and something below it is missing: not ours to explain
        raise MissingExtra(
            f"{purpose} needs the package {error.name}: {install_command(extra)}"
        ) from None
