"""From the engine's options to its cache."""

from __future__ import annotations

from torch_fdattn.dist import ShardedKVCache
from torch_fdattn.dist.groups import Group
from torch_fdattn.engine.paged_kv_cache import PagedKVCache
from torch_fdattn.models import InferenceTransformer, Transformer
from torch_fdattn.models.parallelize import local_kv_heads

KV_CACHES = ("contiguous", "paged")
Cache = ShardedKVCache | PagedKVCache


def make_cache(
    model: Transformer | InferenceTransformer, batch: int, capacity: int, kind: str, *, kv_group: Group,
    kv_block: int | None, strategy: str, hierarchy: tuple[Group, Group] | None, page_size: int,
    pages: int | None, kv_dtype: str | None, invariant_block: int | None,
) -> Cache:  # fmt: skip
    """The cache of `Engine`'s arguments of these names; kind is its kv_cache."""
    if kind not in KV_CACHES:
        raise ValueError(f"kv_cache must be one of {KV_CACHES}, got {kind!r}")
    config, weight = model.config, model.norm.weight
    sizes = config.num_layers, batch, local_kv_heads(model), capacity, config.head_dim
    common = dict(
        dtype=weight.dtype, device=weight.device, kv_dtype=kv_dtype, group=kv_group,
        kv_block=kv_block, strategy=strategy, hierarchy=hierarchy, invariant_block=invariant_block,
    )  # fmt: skip
    if kind == "contiguous":
        if pages is not None:
            raise ValueError(f"pages must be None for a contiguous cache, got {pages}")
        return ShardedKVCache(*sizes, **common)
    return PagedKVCache(*sizes, **common, page_size=page_size, pages=pages)
