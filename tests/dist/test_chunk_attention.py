"""Chunks of prompts over pages that ranks share, their queries split over the ranks: each rank's rows of one process's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torch_fdattn
from tests.dist.parts import assert_near
from torch_fdattn.dist import ShardMap
from torch_fdattn.dist.kv_cache.chunk_attention import attend_chunks, chunk_mask
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.packed import Packed
from torch_fdattn.ops.scores import Scores

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 16, 4
#: (tokens before the chunk, tokens of the chunk) of each sequence.
SEQUENCES = {
    "prompts from their beginning": [(0, 7), (0, 1), (0, 30)],
    "over what is stored": [(40, 3), (5, 20), (64, 64)],
    "fewer queries than ranks": [(33, 1)],
    "chunks that begin and end within a page": [(1, 2), (3, 2), (6, 11), (0, 5)],
}


def sharded_pages(x: torch.Tensor, table: torch.Tensor, pages: int, shards: ShardMap):
    """The rank's pages (pages, KV_HEADS, PAGE, DIM) of x (positions, KV_HEADS, DIM), 0 where it has no position."""
    own = x.new_zeros(pages, KV_HEADS, PAGE, DIM)
    is_own, places = shards.locate(torch.arange(len(x)))
    at = table[places[is_own] // PAGE].long()
    own[at.to(x.device), :, (places[is_own] % PAGE).to(x.device)] = x[is_own.to(x.device)]
    return own


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"window": (9, 0)}, {"softcap": 2.0, "scale": 0.3}], ids=str
)
@pytest.mark.parametrize("sequences", SEQUENCES.values(), ids=SEQUENCES)
def test_equals_one_process(group: str, rank_device, sequences, options, dtype) -> None:
    if dtype == torch.float64 and rank_device.type == "cuda":
        pytest.skip("float64 runs on the CPU only")
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = ShardMap(rank, world, PAGE)
    lens = [before + new for before, new in sequences]
    width = max(-(-length // shards.kv_stride) for length in lens)
    pages = width * len(lens)
    tables = torch.randperm(pages).view(len(lens), width).int()
    queries, expected, own_k, own_v = [], [], 0, 0
    for (_, new), length, table in zip(sequences, lens, tables, strict=True):
        q = torch.randn(new, HEADS, DIM, dtype=dtype).to(rank_device)
        k, v = torch.randn(2, length, KV_HEADS, DIM, dtype=dtype).to(rank_device)
        by_head = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, _ = torch_fdattn.attention(*by_head, causal=True, **options)
        expected.append(out[0].transpose(0, 1))
        queries.append(q)
        own_k += sharded_pages(k, table, pages, shards)
        own_v += sharded_pages(v, table, pages, shards)
    tokens = sum(new for _, new in sequences)
    share = -(-tokens // world)
    # What lies behind the last chunk counts for nothing, whatever it holds.
    rest = torch.full((share * world - tokens, HEADS, DIM), float("nan"), dtype=dtype)
    own_q = torch.cat([*queries, rest.to(rank_device)]).narrow(0, rank * share, share)
    ints = dict(dtype=torch.int32, device=rank_device)
    cu_seqlens = torch.tensor([0, *(new for _, new in sequences)], **ints).cumsum(0).int()
    mask = chunk_mask(cu_seqlens, torch.tensor(lens, **ints), shards)
    mask = mask._replace(window_left=options.get("window", (-1, 0))[0])
    scale, scores = options.get("scale", DIM**-0.5), Scores(options.get("softcap", 0.0))
    call = (
        own_q, own_k, own_v, Packed(cu_seqlens, None, tables.to(rank_device)),
        AttentionOptions(mask, scale, scores), shards, group,
    )  # fmt: skip
    found = attend_chunks(*call)
    assert found.dtype == dtype
    mine = torch.cat(expected)[rank * share : (rank + 1) * share]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_near(found[: len(mine)], mine, tolerance, torch.cat(expected))
    assert not found[len(mine) :].any()
    assert torch.equal(attend_chunks(*call), found)
