"""`fdattn serve`: from options to a server over the engine; on several ranks the first one's, which the others follow."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path
from typing import Any

from torch_fdattn.cli.errors import UsageError
from torch_fdattn.cli.setup import DType, EngineOptions, as_option, check_ranks, load
from torch_fdattn.cli.terminal import stderr
from torch_fdattn.cli.world import World
from torch_fdattn.engine import LLM, AsyncLLM, Follower, frozen_heap
from torch_fdattn.models import load_tokenizer, resolve
from torch_fdattn.models.errors import require
from torch_fdattn.server import ServerOptions

#: For the engine and the process group to be closed, and for a thread that compiles a grammar.
_END_SECONDS = 30.0


def run(
    world: World,
    model: str,
    dtype: DType,
    engine_options: EngineOptions,
    server_options: dict[str, Any],
) -> int:
    """Everything behind the options; the process's exit code."""
    for module in ("fastapi", "uvicorn", "prometheus_client"):
        require(module, "fdattn serve", extra="serve")
    check_ranks(engine_options.tensor_parallel, world)
    path = resolve(model)
    if server_options["model_name"] is None:  # of a file or folder the last part of its path
        is_local = Path(model).exists()
        name = (path.stem if path.is_file() else path.resolve().name) if is_local else model
        server_options = server_options | {"model_name": name}
    try:
        options = ServerOptions(**server_options)
    except ValueError as error:
        raise UsageError(as_option(error)) from None
    tokenizer = load_tokenizer(path)
    network = load(path, dtype, world)
    with closing(engine_options.make(network, tokenizer, world)) as llm:
        return _serve(llm, options, world) if world.rank == 0 else _follow(llm)


def _serve(llm: LLM, options: ServerOptions, world: World) -> int:
    from torch_fdattn.server.run import AddressError, exit_within_limit, serve

    where = f"{world.device}, {world.size} ranks" if world.size > 1 else world.device

    def announce(url: str) -> None:
        stderr.print(f"fdattn: {options.model_name} on {where}: {url} (the page; the API is under /v1); Ctrl-C ends")  # fmt: skip
        if not options.is_loopback and options.api_key is None:
            stderr.print("fdattn: whoever reaches this address can use it: --api-key, or FDATTN_API_KEY, asks for a key")  # fmt: skip

    try:
        code = serve(lambda: AsyncLLM(llm), options, announce)
    except AddressError as error:
        raise UsageError(str(error)) from None
    exit_within_limit(_END_SECONDS)
    return code


def _follow(llm: LLM) -> int:
    """Until rank 0 ends, to which signals are left: it has answers to finish."""
    from torch_fdattn.server.run import exit_within_limit

    follower = Follower(llm, exit_within_limit)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with frozen_heap():
        follower.run()
    return 0
