"""Text to stdout, lines from stdin, notes and statistics to stderr: all of it on rank 0."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from rich.console import Console

from torch_fdattn import stdout
from torch_fdattn.cli.world import TIMEOUT, World
from torch_fdattn.engine import Engine, PagedKVCache, Stats
from torch_fdattn.models import Tokenizer, Transformer

stderr = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
_PROMPT = "> "
_HEARTBEAT = TIMEOUT.total_seconds() / 4  # the other ranks hear of a user who is thinking


def any_text() -> None:
    """Lets stdout take text that its encoding lacks, and stdin bytes that are no text."""
    for stream in (sys.stdout, sys.stdin):
        if hasattr(stream, "reconfigure"):  # not None, nor what a test put there
            stream.reconfigure(errors="replace")


def write(text: str, world: World) -> None:
    if world.rank == 0:
        stdout.write(text)


def note(sentence: str, world: World) -> None:
    if world.rank == 0:
        stderr.print(f"fdattn: {sentence}")


def greet(sentence: str, world: World) -> None:
    """A first line for who sits at a terminal; text that is piped in is no conversation."""
    if world.rank == 0 and _at_terminal():
        stderr.print(sentence)


def write_tokens(
    tokens: Iterator[int], tokenizer: Tokenizer, prompt: list[int], world: World
) -> None:
    """Streams the text of `tokens`, which every rank must iterate."""
    decoder = tokenizer.stream(prompt)
    for token in tokens:
        write(decoder.push(token), world)
    write(decoder.flush() + "\n", world)


def lines(world: World) -> Iterator[str]:
    """The lines of rank 0's stdin, on every rank, until its end."""
    if world.group is None:
        source = _lines_alone()
    else:
        source = _lines_of_rank_0(world)
    for line in source:
        yield line.encode("utf-8", "replace").decode().strip()


def _lines_alone() -> Iterator[str]:
    edits = _at_terminal() and sys.stdout is not None and sys.stdout.isatty()
    if edits:
        # Where Python has it, `input` edits lines and remembers them by it.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    while True:
        if edits:
            try:
                yield input(_PROMPT)
            except (EOFError, KeyboardInterrupt) as end:
                print(file=sys.stderr)  # the shell's prompt is to begin a line
                if isinstance(end, EOFError):
                    return
                raise
            continue
        _ask()
        if not (line := sys.stdin.readline() if sys.stdin else ""):
            return
        yield line


def _lines_of_rank_0(world: World) -> Iterator[str]:
    source = _polled_lines() if world.rank == 0 else None
    while True:
        said: list[str | None] = [next(source, "") if source else None]
        dist.broadcast_object_list(said, group=world.group, group_src=0)
        if said[0] == "":
            return
        if said[0] is not None:
            yield said[0]


def _polled_lines() -> Iterator[str | None]:
    """Lines of stdin as they come, and None for every _HEARTBEAT without one.

    From the file descriptor itself: lines that sys.stdin had buffered would not wake select.
    """
    if sys.stdin is None:
        return
    descriptor, pending = sys.stdin.fileno(), b""
    _ask()
    while True:
        if not select.select([descriptor], [], [], _HEARTBEAT)[0]:
            yield None
            continue
        more = os.read(descriptor, 1 << 16)
        *whole, pending = (pending + more).split(b"\n")
        if not more and pending:
            whole, pending = [pending], b""
        for line in whole:
            yield line.decode("utf-8", "replace") + "\n"
            _ask()
        if not more:
            return


def _at_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _ask() -> None:
    if _at_terminal():
        print(_PROMPT, end="", file=sys.stderr, flush=True)


def report(stats: Stats, engine: Engine, world: World) -> None:
    """Statistics of one run, and what the cache takes on each rank; all ranks call it."""
    cache = engine.cache
    held = [_pages(cache) if isinstance(cache, PagedKVCache) else cache.nbytes] * world.size
    if world.group is not None:
        dist.all_gather_object(held, held[0], group=world.group)
    if world.rank > 0:
        return
    stderr.print(
        f"{stats.prompt_tokens} prompt tokens, {stats.new_tokens} new; "
        f"first token after {stats.first_token_s:.3f} s; "
        f"{stats.tokens_per_s:.1f} tokens/s, {stats.gb_per_s:.2f} GB/s of weights and KV cache "
        f"read{' by rank 0' if world.size > 1 else ''}"
    )
    if isinstance(cache, PagedKVCache):
        same = len(set(held)) == 1 < world.size
        for rank, pages in enumerate(held[:1] if same else held):
            stderr.print(f"{'each rank' if same else f'rank {rank}'}: {pages}")
        return
    total = cache.capacity * position_bytes(engine.model, cache.stored_dtype)
    for rank, nbytes in enumerate(held):
        stderr.print(
            f"rank {rank}: KV cache of {nbytes:,} bytes, {nbytes / total:.1%} of {total:,} in all"
        )


def _pages(cache: PagedKVCache) -> str:
    table = cache.table
    return (
        f"KV cache of {cache.nbytes:,} bytes in {table.pages} pages of {table.page_size} positions, "
        f"{table.pages - len(table.free)} in use"
    )


def position_bytes(model: Transformer, dtype: torch.dtype) -> int:
    """What the K and V of one position take in a cache of this dtype, on all ranks together."""
    config = model.config
    elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return elements * dtype.itemsize
