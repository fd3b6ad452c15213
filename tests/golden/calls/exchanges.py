"""`dist.decode` by the strategies through symmetric memory, and `dist.ring_attention` by `one_sided`, as rank 1 of 4 (or 2 or 8)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import torch_fdattn
from tests.golden.calls.common import Call, fp32, lengths, new
from tests.golden.device import A100
from torch_fdattn.dist import one_sided_all_gather

B, H, KV, N, D = 4, 32, 8, 8192, 128


def shard(b: int = B, t: int = 1, d: int = D, dtype: torch.dtype = torch.bfloat16) -> dict[str, object]:  # fmt: skip
    q, k = new(b, H, t, d, dtype=dtype), new(b, KV, N, d, dtype=dtype)
    v = torch.empty_like(k)
    return dict(q=q, k_shard=k, v_shard=v, kv_lens=lengths(b), group="0", kv_block=16)


def pages() -> dict[str, object]:
    caches = dict(k_shard=new(4096, KV, 16, D), v_shard=new(4096, KV, 16, D))
    return shard() | caches | dict(page_table=lengths(B, N // 16))


def one(name: str, given: dict, strategy: str, **options) -> Call:
    op = torch_fdattn.dist.decode
    return Call(f"dist_decode/{strategy}/{name}", op, given | dict(strategy=strategy), **options)


def calls() -> Iterator[Call]:
    for strategy in ("symm_all_gather", "push", "push_tiled", "two_shot", "fused"):
        yield one("b4", shard(), strategy)
        yield one("b64", shard(64), strategy)
    for strategy in ("push", "two_shot", "fused"):
        yield one("head_sharded", shard() | dict(head_sharded=True), strategy)
    yield one("parts", shard(1), "fused")
    yield one("parts/window", shard(1, t=4) | dict(window=(4095, 0)), "fused")
    yield one("parts/head_sharded", shard(1) | dict(head_sharded=True), "fused", world=8)
    explicit = dict(q_start=lengths(1), kv_start=lengths(1), kv_block=None)
    yield one("parts/positions", shard(1, t=2) | explicit, "fused", world=2)
    yield one("sinks", shard(1) | dict(sinks=new(H)), "fused")
    yield one("alibi", shard() | dict(alibi_slopes=fp32(H), softcap=30.0), "two_shot")
    yield one("invariant", shard() | dict(batch_invariant=True), "fused")
    yield one("blocks", shard() | dict(kv_block=None), "fused")
    yield one("one_node", shard() | dict(kv_block=None, invariant_block=1024), "fused")
    yield one("paged", pages(), "two_shot")
    yield one("d256", shard(d=256), "two_shot", world=8)
    yield one("fp32", shard(dtype=torch.float32, d=64), "two_shot")
    yield one("a100", shard(), "fused", device=A100)
    for name, count in dict(words=1 << 10, tiles=1 << 18).items():
        x = dict(x=fp32(count), group="0")
        yield Call(f"one_sided_all_gather/{name}", one_sided_all_gather, x, ("gathered",))
    q, k, v = (new(1, heads, 4096, D) for heads in (H, KV, KV))
    own = dict(q=q, k=k, v=v, group="0", shards="zigzag", causal=True, strategy="one_sided")
    yield Call("ring_attention/one_sided", torch_fdattn.dist.ring_attention, own, world=2)
