"""Errors that are one line on stderr and an exit code, not a traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import typer

from torch_fdattn.engine import LogitsError, PromptError, RankLost
from torch_fdattn.models import MissingExtra, ModelError
from torch_fdattn.stdout import OutputError


class UsageError(ValueError):
    """An option or an environment that this machine cannot honour."""


@contextmanager
def one_line_errors() -> Iterator[None]:
    try:
        yield
    except (
        ModelError, MissingExtra, PromptError, LogitsError, UsageError, OutputError, RankLost,
        torch.OutOfMemoryError,
    ) as error:  # fmt: skip
        rank = os.environ.get("RANK") if os.environ.get("WORLD_SIZE") != "1" else None
        who = f"fdattn (rank {rank})" if rank else "fdattn"
        print(f"{who}: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(1 if isinstance(error, OutputError | RankLost) else 2) from None
