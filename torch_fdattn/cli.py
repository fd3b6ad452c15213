"""The command line: `fdattn generate` and `fdattn doctor`.

`generate` runs on one process, or on every rank of torchrun with the KV cache sharded over them.
Generated text alone goes to stdout; progress and statistics go to stderr, from rank 0. An error that
the user can mend is one line and exit code 2; 1 where the output cannot be written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from torch_fdattn.dist import ShardedKVCache
from torch_fdattn.engine import PromptError, Sampling, Stats, generate
from torch_fdattn.models import (
    MissingExtra,
    ModelError,
    Tokenizer,
    Transformer,
    load_model,
    load_tokenizer,
    resolve,
)
from torch_fdattn.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_TIMEOUT = timedelta(seconds=120)  # of every wait for another rank
_stderr = Console(stderr=True, highlight=False, soft_wrap=True)


class UsageError(ValueError):
    """An option or an environment that this machine cannot honour."""


class OutputError(OSError):
    """Text that could not be written."""


class DType(str, Enum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


@dataclass(frozen=True)
class World:
    """Where this process stands: alone (no group), or one of torchrun's ranks."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fdattn {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and end.")
    ] = False,
) -> None:
    """Attention kernels for PyTorch, with a small engine that puts them to work."""


@app.command("generate")
def generate_command(
    model: Annotated[
        str, typer.Option(help="Folder with safetensors, .gguf file, hub id, or smollm2.")
    ],
    prompt: Annotated[str, typer.Option(help="What to continue, or with --chat to answer.")],
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the chat template.")] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(max=1.0, help="Draw from this share of the mass.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text.")] = None,
    dtype: Annotated[DType, typer.Option(help="auto: the checkpoint's.")] = DType.auto,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …")] = None,
    kv_block: Annotated[
        int, typer.Option(min=0, help="Cache positions dealt to ranks in turn; 0: a run each.")
    ] = 16,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens per step.")] = 512,
) -> None:
    """Write text that continues a prompt, streaming to the terminal."""
    with _one_line_errors(), _world(device) as world:
        sampling = _sampling(temperature, top_p, seed)
        path = resolve(model)
        tokenizer = load_tokenizer(path)
        prompt = prompt.encode("utf-8", "replace").decode()  # bytes that were no UTF-8
        turn = [{"role": "user", "content": prompt}]
        ids = tokenizer.chat(turn) if chat else tokenizer.encode(prompt)
        network = _load(path, dtype, world)
        cache = _cache(network, len(ids) + max_new_tokens, kv_block or None, world)
        stats = Stats()
        tokens = generate(
            network,
            cache,
            ids,
            max_new_tokens,
            sampling=sampling,
            eos_ids=tokenizer.eos_ids,
            prefill_chunk=prefill_chunk,
            group=world.group,
            stats=stats,
        )
        _write(tokens, tokenizer, ids, world)
        _report(stats, network, cache, world)


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Say what this machine can run, and why not."""
    from torch_fdattn.doctor import main

    raise typer.Exit(main(json=json))


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (
        ModelError, MissingExtra, PromptError, UsageError, OutputError, torch.OutOfMemoryError
    ) as error:  # fmt: skip
        rank = os.environ.get("RANK") if os.environ.get("WORLD_SIZE") != "1" else None
        who = f"fdattn (rank {rank})" if rank else "fdattn"
        print(f"{who}: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(1 if isinstance(error, OutputError) else 2) from None


@contextmanager
def _world(device_name: str | None) -> Iterator[World]:
    """Join torchrun's group where there is one, and leave it at the end."""
    size = _from_environment("WORLD_SIZE", 1, least=1)
    rank = _from_environment("RANK", None if size > 1 else 0, least=0)
    if rank >= size:
        raise UsageError(
            f"the environment variable RANK must be below WORLD_SIZE {size}, got {rank}"
        )
    local = _from_environment("LOCAL_RANK", 0, least=0)
    local_size = _from_environment("LOCAL_WORLD_SIZE", size, least=1)
    device = _device(device_name, local if size > 1 else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        yield World(0, 1, device, None)
        return
    if device.type == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    try:
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device, timeout=_TIMEOUT)
        else:
            dist.init_process_group("gloo", timeout=_TIMEOUT)
    except (ValueError, dist.DistError) as error:  # ValueError: a variable of torchrun is missing
        raise UsageError(f"no process group ({error}); `fdattn doctor` says more") from None
    try:
        yield World(rank, size, device, dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def _from_environment(name: str, default: int | None, least: int) -> int:
    """One of torchrun's variables; one that is empty is not set."""
    text = os.environ.get(name) or default
    try:
        value = int(text)
    except (TypeError, ValueError):
        value = least - 1
    if value < least:
        raise UsageError(
            f"the environment variable {name} must be an integer of at least {least}, got "
            f"{os.environ.get(name)!r}; `fdattn doctor` says more"
        )
    return value


def _device(name: str | None, local_rank: int | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {name}") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device must be cpu, cuda or cuda:N, got {name}")
    if device.type == "cpu":
        return torch.device("cpu")
    if device.index is None:
        device = torch.device("cuda", local_rank or 0)
    elif local_rank is not None:
        raise UsageError(f"--device must be cpu or cuda under torchrun, got {name}")
    if device.index >= torch.cuda.device_count():
        raise UsageError(
            f"--device {device}: this process sees {torch.cuda.device_count()} GPUs; start one rank "
            "for each GPU, or use --device cpu"
        )
    return device


def _sampling(temperature: float, top_p: float, seed: int | None) -> Sampling:
    try:
        return Sampling(temperature, top_p, seed)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _load(path: os.PathLike[str], dtype: DType, world: World) -> Transformer:
    wanted = None if dtype is DType.auto else getattr(torch, dtype.value)
    columns = TextColumn("loading {task.description}"), BarColumn(), DownloadColumn()
    quiet = world.rank > 0 or not _stderr.is_terminal
    with Progress(
        *columns, TimeElapsedColumn(), console=_stderr, disable=quiet, transient=True
    ) as bar:
        task = bar.add_task(os.path.basename(path), total=None)
        return load_model(
            path,
            dtype=wanted,
            device=world.device,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _cache(model: Transformer, capacity: int, kv_block: int | None, world: World) -> ShardedKVCache:
    config = model.config
    if capacity > config.max_positions:
        raise PromptError(
            f"prompt and --max-new-tokens take {capacity} positions, the model has "
            f"{config.max_positions}"
        )
    try:
        return ShardedKVCache(
            config.num_layers,
            1,
            config.num_kv_heads,
            capacity,
            config.head_dim,
            dtype=model.norm.weight.dtype,
            device=world.device,
            group_name=None if world.group is None else world.group.group_name,
            kv_block=kv_block,
        )
    except RuntimeError as error:  # out of memory; on a CPU torch has no class of its own for it
        if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
            raise
        raise UsageError(
            f"no memory on {world.device} for a KV cache of {capacity} positions, "
            f"{capacity * _position_bytes(model):,} bytes in all"
        ) from None


def _position_bytes(model: Transformer) -> int:
    """What the K and V of one position take."""
    config = model.config
    elements = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return elements * model.norm.weight.itemsize


def _write(tokens: Iterator[int], tokenizer: Tokenizer, prompt: list[int], world: World) -> None:
    decoder = tokenizer.stream(prompt)
    if sys.stdout is not None:  # an encoding without all of Unicode
        sys.stdout.reconfigure(errors="replace")
    for token in tokens:
        if world.rank == 0:
            _print(decoder.push(token))
    if world.rank == 0:
        _print(decoder.flush() + "\n")


def _print(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # Python writes what the buffer still holds when it ends: let that not fail once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(f"cannot write the text ({error.strerror})") from None


def _report(stats: Stats, model: Transformer, cache: ShardedKVCache, world: World) -> None:
    nbytes = model.config.num_layers * sum(view.nbytes for view in cache.layer(0))
    held: list[int] = [nbytes] * world.size
    if world.group is not None:
        dist.all_gather_object(held, nbytes, group=world.group)
    if world.rank > 0:
        return
    _stderr.print(
        f"{stats.prompt_tokens} prompt tokens, {stats.new_tokens} new; "
        f"first token after {stats.first_token_s:.3f} s; "
        f"{stats.tokens_per_s:.1f} tokens/s, {stats.gb_per_s:.2f} GB/s of weights and KV cache "
        f"read{' by rank 0' if world.size > 1 else ''}"
    )
    total = cache.capacity * _position_bytes(model)
    for rank, nbytes in enumerate(held):
        _stderr.print(
            f"rank {rank}: KV cache of {nbytes:,} bytes, {nbytes / total:.1%} of {total:,} in all"
        )
    _stderr.print(f"+ one spare position of {_position_bytes(model):,} bytes on each rank")
