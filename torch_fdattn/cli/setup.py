"""From options to an engine: the model is loaded, spread over the ranks, and given its cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum

import torch
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from torch_fdattn.cli.errors import UsageError
from torch_fdattn.cli.terminal import position_bytes, stderr
from torch_fdattn.cli.world import World
from torch_fdattn.dist.decode.op import ONE_SIDED, STRATEGIES
from torch_fdattn.dist.kv_cache.scales import kv_format
from torch_fdattn.dist.symm.availability import unsupported_reason
from torch_fdattn.engine import Engine, Sampling
from torch_fdattn.models import Transformer, load_model


class DType(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class TPStrategy(StrEnum):
    auto = "auto"
    all_reduce = "all_reduce"
    ag_rs = "ag_rs"


KVStrategy = StrEnum("KVStrategy", {name: name for name in STRATEGIES})


class CacheKind(StrEnum):
    contiguous = "contiguous"
    paged = "paged"


class KVDType(StrEnum):
    auto = "auto"
    fp8_e4m3 = "fp8_e4m3"
    fp8_e5m2 = "fp8_e5m2"
    int8 = "int8"


@dataclass(frozen=True)
class CacheOptions:
    """--kv-cache, --page-size, --kv-dtype, --strategy."""

    kind: CacheKind
    page_size: int | None
    dtype: KVDType
    strategy: KVStrategy

    def check(self, tensor_parallel: int, world: World) -> None:
        """Before the model is loaded, which may take minutes."""
        if self.page_size is not None and self.kind is not CacheKind.paged:
            raise UsageError("--page-size needs --kv-cache paged")
        if self.strategy is KVStrategy.hierarchical and tensor_parallel > 1:
            raise UsageError(
                f"--strategy hierarchical needs --tensor-parallel 1, got {tensor_parallel}"
            )

    @property
    def positions_at_once(self) -> int:
        """How many positions the cache grows by: the engine's page_size, which a contiguous one ignores."""
        return (self.page_size or 16) if self.kind is CacheKind.paged else 1

    @property
    def stored(self) -> str | None:
        """The engine's kv_dtype."""
        return None if self.dtype is KVDType.auto else self.dtype.value


def make_sampling(temperature: float, top_p: float, seed: int | None) -> Sampling:
    try:
        return Sampling(temperature, top_p, seed)
    except ValueError as error:
        raise UsageError(str(error)) from None


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


def make_engine(
    model: Transformer, world: World, *, capacity: int, kv_block: int, prefill_chunk: int,
    tensor_parallel: int, tp_strategy: TPStrategy, cache: CacheOptions,
) -> Engine:  # fmt: skip
    """Ranks r and r + 1 of `tensor_parallel` share the model, and such groups the cache's positions."""
    kv_group = tp_group = None
    if tensor_parallel == 1:
        kv_group = None if world.group is None else world.group.group_name
    else:
        kv_group, tp_group = _spread(model, world, tensor_parallel, tp_strategy)
    strategy, hierarchy = cache.strategy.value, None
    if kv_group is None:  # nothing to exchange
        strategy = "auto"
    elif strategy == "hierarchical":
        hierarchy = _nodes(world)
    elif strategy in ONE_SIDED and (why_not := unsupported_reason(kv_group, world.device)):
        raise UsageError(
            f"--strategy {strategy} needs ranks that share symmetric memory: {why_not}"
        )
    try:
        return Engine(
            model,
            capacity=capacity,
            kv_group=kv_group,
            strategy=strategy,
            hierarchy=hierarchy,
            kv_block=kv_block or None,
            tp_group=tp_group,
            prefill_chunk=prefill_chunk,
            kv_cache=cache.kind.value,
            page_size=cache.positions_at_once,
            kv_dtype=cache.stored,
        )
    except RuntimeError as error:  # out of memory; on a CPU torch has no class of its own for it
        if not isinstance(error, torch.OutOfMemoryError) and "allocate" not in str(error):
            raise
        form = kv_format(cache.stored)
        dtype = model.norm.weight.dtype if form is None else form.dtype
        size = cache.positions_at_once
        positions = -(-capacity // size) * size
        pages = f" in pages of {size}" if size > 1 else ""
        raise UsageError(
            f"no memory on {world.device} for a KV cache of {positions} positions{pages}, "
            f"{positions * position_bytes(model, dtype):,} bytes in all"
        ) from None


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


def _nodes(world: World) -> tuple[str, str]:
    """The names of this rank's groups in its node and across nodes, which torchrun fills in order of ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    if world.size % world.local_size:
        raise UsageError(
            f"--strategy hierarchical needs as many ranks on each node, got {world.size} ranks, "
            f"{world.local_size} of them on this node"
        )
    shape = world.size // world.local_size, world.local_size
    mesh = init_device_mesh(world.device.type, shape, mesh_dim_names=("node", "place"))
    return mesh["place"].get_group().group_name, mesh["node"].get_group().group_name
