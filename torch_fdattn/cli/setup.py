"""From options to an engine: the model is loaded, spread over the ranks, and given its pages."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from torch_fdattn.cli.errors import UsageError
from torch_fdattn.cli.terminal import stderr
from torch_fdattn.cli.world import World
from torch_fdattn.dist.decode.op import STRATEGIES
from torch_fdattn.dist.kv_cache.scales import kv_format
from torch_fdattn.engine import LLM, NgramSpeculation, SamplingParams
from torch_fdattn.engine.paged_step import PagedKV
from torch_fdattn.models import Tokenizer, Transformer, load_model
from torch_fdattn.models.parallelize import local_kv_heads

#: Of a server's prompts, so many in a pass are captured in CUDA graphs, where nothing else was asked for.
SERVED_PROMPT_GRAPH_TOKENS = 1024


class DType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class TPStrategy(StrEnum):
    auto = "auto"
    all_reduce = "all_reduce"
    ag_rs = "ag_rs"


#: The engine's: no hierarchical exchange over shared pages.
KVStrategy = StrEnum("KVStrategy", {name: name for name in STRATEGIES if name != "hierarchical"})


class KVDType(StrEnum):
    auto = "auto"
    fp8_e4m3 = "fp8_e4m3"
    fp8_e5m2 = "fp8_e5m2"
    int8 = "int8"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What `engine.LLM` is told, under its names, and how ranks share it.

    ngram_tokens: its speculation's max_tokens, 0 for none.
    prompt_graph_tokens: None: SERVED_PROMPT_GRAPH_TOKENS where that was measured, on one GPU of sm_90 with a cache in the model's
        dtype, else 0.
    """

    max_num_seqs: int = 1
    max_batch_tokens: int
    max_model_len: int | None = None
    pages: int | None = None
    page_size: int
    kv_dtype: KVDType
    enable_prefix_caching: bool
    ngram_tokens: int
    prompt_graph_tokens: int | None = 0
    strategy: KVStrategy = KVStrategy.auto
    tensor_parallel: int = 1
    tp_strategy: TPStrategy = TPStrategy.auto

    def of_one_sequence(self, tokens: int, world: World) -> EngineOptions:
        """With pages for one sequence of so many tokens, of which the last is not stored."""
        page_size = self.page_size * (world.size // self.tensor_parallel)  # of all ranks
        pages = max(-(-(tokens - 1) // page_size), 1)
        return replace(self, max_num_seqs=1, max_model_len=tokens, pages=pages)

    @property
    def stored(self) -> str | None:
        """The engine's kv_dtype."""
        return None if self.kv_dtype is KVDType.auto else self.kv_dtype.value

    def _prompt_graph_tokens(self, world: World) -> int:
        if self.prompt_graph_tokens is not None:
            return self.prompt_graph_tokens
        is_alone = world.device.type == "cuda" and world.group is None and self.stored is None
        is_measured = is_alone and torch.cuda.get_device_capability(world.device) == (9, 0)
        return SERVED_PROMPT_GRAPH_TOKENS if is_measured else 0

    def make(self, model: Transformer, tokenizer: Tokenizer | None, world: World) -> LLM:
        """The engine on this rank; what it refuses is a UsageError that begins with the option.

        Ranks r and r + 1 of `tensor_parallel` share the model, and such groups the cache's positions.
        """
        kv_group = tp_group = None
        if self.tensor_parallel > 1:
            kv_group, tp_group = _spread(model, world, self.tensor_parallel, self.tp_strategy)
        elif world.group is not None:
            kv_group = world.group.group_name
        speculation = None
        if self.ngram_tokens:
            speculation = NgramSpeculation(max_tokens=self.ngram_tokens)
        # Without ranks that share positions nothing is exchanged.
        strategy = "auto" if kv_group is None else self.strategy.value
        try:
            return LLM(
                model, tokenizer, max_num_seqs=self.max_num_seqs, max_batch_tokens=self.max_batch_tokens,
                max_model_len=self.max_model_len, pages=self.pages, page_size=self.page_size,
                kv_dtype=self.stored, enable_prefix_caching=self.enable_prefix_caching, kv_group=kv_group,
                strategy=strategy, tp_group=tp_group, speculation=speculation,
                prompt_graph_tokens=self._prompt_graph_tokens(world), run_ahead=world.device.type != "cpu",
            )  # fmt: skip
        except (ValueError, NotImplementedError) as error:
            raise UsageError(as_option(error)) from None
        except RuntimeError as error:
            # On a CPU torch has no class of its own for it.
            is_memory = isinstance(error, torch.OutOfMemoryError) or "allocate" in str(error)
            if self.pages is None or not is_memory:
                raise
            raise UsageError(
                f"no memory on {world.device} for {self._described_pages(model)}"
            ) from None

    def _described_pages(self, model: Transformer) -> str:
        config, form = model.config, kv_format(self.stored)
        shape = config.num_layers, self.page_size, local_kv_heads(model), config.head_dim
        nbytes = self.pages * PagedKV.page_bytes(*shape, model.norm.weight.dtype, form)
        return f"a KV cache of {self.pages} pages of {self.page_size} positions, {nbytes:,} bytes on each rank"


def as_option(error: Exception) -> str:
    """`max_num_seqs must be …` as `--max-num-seqs must be …`."""
    name, _, rest = str(error).partition(" ")
    name = {"speculation": "ngram_tokens", "max_tokens": "max_new_tokens"}.get(name, name)
    return f"--{name.replace('_', '-')} {rest}"


def make_params(
    max_new_tokens: int, temperature: float, top_p: float, seed: int | None
) -> SamplingParams:
    """What a completion of `generate` or a reply of `chat` asks for."""
    try:
        return SamplingParams(
            max_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
        )
    except ValueError as error:
        raise UsageError(as_option(error)) from None


def load(path: os.PathLike[str], dtype: DType, world: World) -> Transformer:
    chosen = None if dtype is DType.auto else getattr(torch, dtype.value)
    columns = TextColumn("loading {task.description}"), BarColumn(), DownloadColumn()
    quiet = world.rank > 0 or not stderr.is_terminal
    with Progress(
        *columns, TimeElapsedColumn(), console=stderr, disable=quiet, transient=True
    ) as bar:
        task = bar.add_task(os.path.basename(path), total=None)
        return load_model(
            path,
            dtype=chosen,
            device=world.device,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def check_ranks(tensor_parallel: int, world: World) -> None:
    """Before the model is loaded, which may take minutes."""
    if world.size % tensor_parallel:
        raise UsageError(
            f"--tensor-parallel must divide the number of ranks, {world.size}, got {tensor_parallel}"
        )


def _spread(
    model: Transformer, world: World, ranks: int, strategy: TPStrategy
) -> tuple[str | None, str]:
    """Splits the model over each `ranks` neighbours; the names of the groups for cache and model."""
    from torch.distributed.device_mesh import init_device_mesh

    from torch_fdattn.models.parallelize import parallelize

    shape = world.size // ranks, ranks
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("kv", "tp"))
    try:
        parallelize(model, mesh["tp"], strategy=strategy.value)
    except ValueError as error:  # more ranks than heads
        raise UsageError(f"--tensor-parallel {ranks}: {error}") from None
    kv_group = mesh["kv"].get_group().group_name if shape[0] > 1 else None
    return kv_group, mesh["tp"].get_group().group_name
