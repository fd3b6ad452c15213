"""`fdattn serve`: from options to a server over the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch_fdattn.cli.errors import UsageError
from torch_fdattn.cli.setup import DType, KVDType, load
from torch_fdattn.cli.terminal import stderr
from torch_fdattn.cli.world import World
from torch_fdattn.models import Tokenizer, Transformer, load_tokenizer, resolve
from torch_fdattn.models.errors import require
from torch_fdattn.server import ServerOptions


@dataclass(frozen=True)
class EngineOptions:
    """What `engine.LLM` is told, under its names; ngram_tokens: its speculation's max_tokens, 0 for none."""

    max_num_seqs: int
    max_batch_tokens: int
    max_model_len: int | None
    pages: int | None
    page_size: int
    kv_dtype: KVDType
    enable_prefix_caching: bool
    ngram_tokens: int

    @property
    def stored(self) -> str | None:
        """The engine's kv_dtype."""
        return None if self.kv_dtype is KVDType.auto else self.kv_dtype.value

    def make(self, model: Transformer, tokenizer: Tokenizer | None):  # -> LLM
        """The engine; what it refuses is a UsageError that begins with the option."""
        from torch_fdattn.engine import LLM, NgramSpeculation

        speculation = None
        if self.ngram_tokens:
            speculation = NgramSpeculation(max_tokens=self.ngram_tokens)
        try:
            return LLM(
                model, tokenizer, max_num_seqs=self.max_num_seqs, max_batch_tokens=self.max_batch_tokens,
                max_model_len=self.max_model_len, pages=self.pages, page_size=self.page_size,
                kv_dtype=self.stored,
                enable_prefix_caching=self.enable_prefix_caching, speculation=speculation,
            )  # fmt: skip
        except (ValueError, NotImplementedError) as error:
            raise UsageError(_as_option(error)) from None


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
    from torch_fdattn.server.run import AddressError, serve

    if world.size > 1:
        raise UsageError("fdattn serve runs on one process: start it without torchrun")
    path = resolve(model)
    if server_options["model_name"] is None:  # of a file or folder the last part of its path
        is_local = Path(model).exists()
        name = (path.stem if path.is_file() else path.resolve().name) if is_local else model
        server_options = server_options | {"model_name": name}
    try:
        options = ServerOptions(**server_options)
    except ValueError as error:
        raise UsageError(_as_option(error)) from None
    tokenizer = load_tokenizer(path)
    network = load(path, dtype, world)
    llm = engine_options.make(network, tokenizer)

    def announce(url: str) -> None:
        stderr.print(f"fdattn: {options.model_name} on {world.device}: {url} (the page; the API is under /v1); Ctrl-C ends")  # fmt: skip
        if not options.is_loopback and options.api_key is None:
            stderr.print("fdattn: whoever reaches this address can use it: --api-key, or FDATTN_API_KEY, asks for a key")  # fmt: skip

    def make_engine():  # -> AsyncLLM
        from torch_fdattn.engine import AsyncLLM

        return AsyncLLM(llm)

    try:
        return serve(make_engine, options, announce)
    except AddressError as error:
        raise UsageError(str(error)) from None


def _as_option(error: Exception) -> str:
    """`max_num_seqs must be …` as `--max-num-seqs must be …`."""
    name, _, rest = str(error).partition(" ")
    return f"--{name.replace('_', '-')} {rest}"
