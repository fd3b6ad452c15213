"""`dist.decode` by `fused` where the exchange merges the parts of a split local decode itself.

A CPU is taken for two processors; here for more, so that caches are split which the interpreter can read in time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.dist.test_decode import make, rank_map, sharded
from tests.dist.test_decode_strategies import drawn_table, paged, quantised
from tests.dist.test_strategies import _kernels, expect, expect_by_rule, lengths
from torch_fdattn.dist import decode
from torch_fdattn.dist.decode import fused_parts, one_sided
from torch_fdattn.launch import prepared
from torch_fdattn.ops.decode import launch, op, schedule
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.ops.options import DecodeOptions
from torch_fdattn.ops.positions import Mask
from torch_fdattn.testing import attention_oracle

__all__ = ["_kernels"]  # a fixture

#: Keys of decode's tiles at most: a piece has one tile or more.
TILE = 16 if INTERPRET else 128


@pytest.fixture(autouse=True)
def _split(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(launch, "num_sms", lambda device: 24)
    monkeypatch.setattr(schedule, "MIN_SHARE", 1)
    prepared.forget()
    yield
    prepared.forget()


def own_run(x: Tensor, capacity: int) -> Tensor:
    """This rank's keys of a cache that is cut into runs of so many."""
    return x[:, :, dist.get_rank() * capacity :][:, :, :capacity]


def call(*arguments, merges: bool = True, **options):
    """`decode` by this strategy, whose exchange must merge the parts on this rank, or not."""
    before = launches["dist_merge/fused_parts"]
    found = decode(*arguments, strategy="fused", **options)
    assert launches["dist_merge/fused_parts"] == before + merges
    return found


def exact(q: Tensor, k: Tensor, v: Tensor, lens: Tensor, **options):
    """What one process gives, in fp32."""
    found = attention_oracle(
        *(x.double() for x in (q, k, v)), lens.tolist(), causal=True, **options
    )
    return [x.float() for x in found]


def test_lengths(group, rank_device, monkeypatch) -> None:
    """On the device: many pieces everywhere, on one rank alone, no key; values of another head dim."""
    monkeypatch.setattr(fused_parts, "CHUNK", 16)  # two programs a row
    world, capacity = dist.get_world_size(), 3 * TILE
    q, k, _ = make(rank_device, 1, 2 * world, 2, 2, world * capacity, 16)
    v = torch.randn(1, 2, world * capacity, 24, device=rank_device)
    shards, lens = [own_run(x, capacity) for x in (k, v)], lengths([world * capacity], rank_device)
    expected = exact(q, k, v, lens)
    found = call(q, *shards, lens, group)
    expect(found, expected)
    expect(call(q, *shards, lens, group, head_sharded=True), expected, head_sharded=True)
    monkeypatch.setattr(one_sided, "MERGES_PARTS", False)
    for ours, theirs in zip(found, call(q, *shards, lens, group, merges=False), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    monkeypatch.setattr(one_sided, "MERGES_PARTS", True)
    for length in (capacity + 1, 0):
        lens.fill_(length)
        expect(call(q, *shards, lens, group), exact(q, k, v, lens))
    lens.fill_(world * capacity)
    again = call(q, *shards, lens, group)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))


@pytest.mark.parametrize("at_once", [1, 2])
def test_more_rows_than_a_tile(group, rank_device, monkeypatch, at_once: int) -> None:
    """Of decode's: a KV head then has two items. Parts by one or two at a time; fp16; q in another order of memory."""
    capacity, heads = 3 * TILE, 36
    monkeypatch.setattr(fused_parts, "PART_ELEMENTS", at_once * 64 * 16)
    q, k, v = (x.half() for x in make(rank_device, 1, heads, 1, 2, 16, 16))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    k, v = (torch.randn_like(x[:, :, :1].expand(-1, -1, dist.get_world_size() * capacity, -1)) for x in (k, v))  # fmt: skip
    lens = lengths([k.shape[2] - 3], rank_device)
    found = call(q, *(own_run(x, capacity) for x in (k, v)), lens, group)
    expect_by_rule(found, q, k, v, lens)


def test_pages_of_a_quantised_cache(group, rank_device) -> None:
    """By round-robin blocks, with a window, a cap and slopes."""
    world, page = dist.get_world_size(), 8
    q, k, v = make(rank_device, 1, 2 * world, 1, 2, world * 3 * TILE, 16)
    k, v = (quantised(x, torch.int8) for x in (k, v))
    lens = lengths([k.shape[2] - 5], rank_device)
    scales = torch.rand(2, 1, 1, 1, device=rank_device) / 10
    options = dict(
        window=(world * 2 * TILE, 0), softcap=5.0, alibi_slopes=torch.rand(2 * world, device=rank_device)
    )  # fmt: skip
    shards = [sharded(x, rank_map(page)) for x in (k, v)]
    table = drawn_table(random.Random(0), 1, shards[0].shape[2], page, rank_device)
    pages = [paged(x.float(), page, table).to(torch.int8) for x in shards]
    found = call(
        q, *pages, lens, group, kv_block=page, page_table=table, k_scale=scales[0], v_scale=scales[1], **options
    )  # fmt: skip
    expect(found, exact(q, k * scales[0], v * scales[1], lens, **options))


def test_ranks_that_merge_otherwise(group, rank_device) -> None:
    """Uneven runs, of which the last is empty: nothing to split. And rank 0 adds the sinks, with the merge kernel."""
    world, rank = dist.get_world_size(), dist.get_rank()
    sizes = [(2 + r) * TILE for r in range(world - 1)] + [0]
    start = sum(sizes[:rank])
    q, k, v = make(rank_device, 1, 4, 2, 1, sum(sizes), 32)
    lens, part = lengths([sum(sizes)], rank_device), slice(start, start + sizes[rank])
    for sinks in (None, torch.randn(4, device=rank_device)):
        found = call(
            q, k[:, :, part], v[:, :, part], lens, group, kv_start=torch.full_like(lens, start), sinks=sinks,
            merges=rank < world - 1 and (rank > 0 or sinks is None),
        )  # fmt: skip
        expect(found, exact(q, k, v, lens, sinks=sinks))


def test_what_the_merge_kernel_keeps(group, rank_device) -> None:
    """Sequences of lengths that may differ; bits that do not depend on the batch."""
    capacity = 2 * TILE
    q, k, v = make(rank_device, 2, 2, 1, 1, dist.get_world_size() * capacity, 16)
    shards, lens = [own_run(x, capacity) for x in (k, v)], lengths([k.shape[2], 5], rank_device)
    expected = exact(q, k, v, lens)
    expect(call(q, *shards, lens, group, merges=False), expected)
    one = [x[:1] for x in (q, *shards, lens)]
    found = call(*one, group, merges=False, batch_invariant=True)
    expect(found, [x[:1] for x in expected])


def test_a_batch_without_lengths(group, rank_device) -> None:
    """Which `dist.decode` always has: the exchange alone."""
    torch.manual_seed(dist.get_rank())
    q, k, v = make(rank_device, 2, 4, 2, 1, 2 * TILE, 16)
    call = q, k, v, None, DecodeOptions(Mask(window_right=0), dtype=torch.float32)
    *part, unmerged = op.decode_eagerly(*call, leave_parts=True)
    found = fused_parts.merge(*part, unmerged, torch.float32, group, False)
    part = op.decode_eagerly(*call)
    expect(found, one_sided.merge(*part, torch.float32, group, "fused", False))


def test_graphs_and_streams(group, rank_device) -> None:
    """Replays between eager calls on another stream, with lengths that change from many pieces to one."""
    if rank_device.type != "cuda":
        pytest.skip("needs a CUDA device")
    capacity = 8 * TILE
    q, k, v = make(rank_device, 1, 8, 2, 1, dist.get_world_size() * capacity, 128)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    shards, lens = [own_run(x, capacity) for x in (k, v)], lengths([k.shape[2]], rank_device)
    call(q, *shards, lens, group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(q, *shards, lens, group)
    other = torch.cuda.Stream()
    for i in range(20):
        lens.fill_((k.shape[2], 5, capacity + 1, 0)[i % 4])
        graph.replay()
        torch.cuda.synchronize()
        with torch.cuda.stream(other if i % 2 else torch.cuda.current_stream()):
            found = call(q, *shards, lens, group)
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(captured, found, strict=True))
        expect_by_rule(found, q, k, v, lens)
