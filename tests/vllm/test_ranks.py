"""Decode context parallelism: a layer whose cache is dealt to two ranks, in vLLM's own process groups over gloo."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.ports import free_port
from torch_fdattn.testing import attention_oracle, check_close

pytest.importorskip("vllm", reason="make test-vllm")

RANKS, HEADS, DIM, BLOCK = 2, 6, 32, 16
QUERY_LENS, SEQ_LENS = {"decode": [1, 1, 1], "mixed": [1, 7, 20]}, [33, 50, 20]
SLOPES = [2.0**-i for i in range(HEADS)]
#: A layer's options, and the oracle's.
OPTIONS = {
    "plain": ({}, {}),
    "window": (dict(sliding_window=9), dict(window=(8, 0))),
    "softcap": (dict(logits_soft_cap=5.0), dict(softcap=5.0)),
    "alibi": (dict(alibi_slopes=SLOPES), dict(alibi_slopes=torch.tensor(SLOPES))),
}
DTYPES = torch.float32, torch.bfloat16


def join(rank: int, port: int) -> None:
    """This process as one of vLLM's tensor-parallel ranks, which deal out the cache too."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed.parallel_state import (
        init_distributed_environment,
        initialize_model_parallel,
    )

    address = f"tcp://127.0.0.1:{port}"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(RANKS, rank, address, rank, "gloo")
        initialize_model_parallel(RANKS, decode_context_model_parallel_size=RANKS, backend="gloo")


class Shard:
    """What one rank is given: all tokens of its heads, and a cache in which its old keys are stored."""

    def __init__(self, query_lens: list[int], interleave: int, rank: int, dtype: torch.dtype):
        from vllm.v1.attention.backend import CommonAttentionMetadata
        from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

        torch.manual_seed(0)  # the same tokens on all ranks
        self.keys = [torch.randn(1, n, DIM).to(dtype) for n in SEQ_LENS]
        self.values = [torch.randn(1, n, DIM).to(dtype) for n in SEQ_LENS]
        self.query = torch.randn(sum(query_lens), HEADS, DIM).to(dtype)
        blocks = 4
        table = torch.randperm(len(SEQ_LENS) * blocks).view(-1, blocks).to(torch.int32)
        self.cache = torch.full((table.numel(), 1, BLOCK, 2 * DIM), float("nan"), dtype=dtype)
        slots, new = [], []
        for row, k, v, count in zip(table, self.keys, self.values, query_lens, strict=True):
            at = torch.arange(k.shape[1])
            local = at // (interleave * RANKS) * interleave + at % interleave
            slot = row[local // BLOCK].long() * BLOCK + local % BLOCK
            slot[at // interleave % RANKS != rank] = -1
            rows, old = torch.cat([k, v], -1).transpose(0, 1), len(at) - count
            kept = slot[:old] >= 0
            mine = slot[:old][kept]
            self.cache[mine // BLOCK, :, mine % BLOCK] = rows[:old][kept]
            slots.append(slot[old:])
            new.append(rows[old:])
        self.slots, self.new = torch.cat(slots), torch.cat(new).split(DIM, -1)
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        seq_lens = torch.tensor(SEQ_LENS, dtype=torch.int32)
        self.batch = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=seq_lens,
            num_reqs=len(query_lens), num_actual_tokens=sum(query_lens),
            max_query_len=max(query_lens), max_seq_len=max(SEQ_LENS), block_table_tensor=table,
            slot_mapping=self.slots,
            dcp_local_seq_lens=get_dcp_local_seq_lens(seq_lens, RANKS, rank, interleave),
        )  # fmt: skip


def attend(shard: Shard, interleave: int, heads: slice, options: dict) -> torch.Tensor:
    from torch_fdattn.dropins.vllm.backend import FdattnImpl, FdattnMetadataBuilder

    parallel = SimpleNamespace(cp_kv_cache_interleave_size=interleave)
    builder = FdattnMetadataBuilder(
        SimpleNamespace(dcp_sharded=True), [], SimpleNamespace(parallel_config=parallel), None
    )
    if "alibi_slopes" in options:
        options = dict(alibi_slopes=options["alibi_slopes"][heads])
    impl = FdattnImpl(HEADS // RANKS, DIM, DIM**-0.5, 1, **options)
    assert (
        impl.need_to_return_lse_for_decode
    )  # what vLLM asks of a layer under decode context parallelism
    query = shard.query[:, heads]
    output = torch.full_like(query, float("nan"))
    impl.do_kv_cache_update(None, *shard.new, shard.cache, shard.slots)
    impl.forward(None, query, *shard.new, shard.cache, builder.build(0, shard.batch), output)
    return output


def check(shard: Shard, query_lens: list[int], output: torch.Tensor, heads: slice, options: dict):
    if "alibi_slopes" in options:
        options = dict(alibi_slopes=options["alibi_slopes"][heads])
    begin = 0
    for k, v, count in zip(shard.keys, shard.values, query_lens, strict=True):
        rows = slice(begin, begin + count)
        given = [x[None] for x in (shard.query[rows, heads].transpose(0, 1), k, v)]
        at_dtype, _ = attention_oracle(*given, causal=True, **options)
        exact, _ = attention_oracle(*(x.double() for x in given), causal=True, **options)
        got = output[rows].transpose(0, 1)[None]
        check_close("output", got, exact, [at_dtype.double() - exact])
        begin = rows.stop


def run_rank(rank: int, port: int) -> None:
    join(rank, port)
    heads = slice(rank * HEADS // RANKS, (rank + 1) * HEADS // RANKS)
    for query_lens in QUERY_LENS.values():
        for theirs, ours in OPTIONS.values():
            for interleave in (1, 4):
                for dtype in DTYPES:
                    shard = Shard(query_lens, interleave, rank, dtype)
                    output = attend(shard, interleave, heads, theirs)
                    check(shard, query_lens, output, heads, ours)
    refuse(rank)


def refuse(rank: int) -> None:
    from torch_fdattn.dropins.vllm.backend import FdattnImpl

    for kv_heads, options in ((2, {}), (1, dict(sinks=torch.zeros(2)))):
        with pytest.raises(NotImplementedError, match="takes one KV head a rank and no sinks"):
            FdattnImpl(2, DIM, 1.0, kv_heads, **options)


def test_two_ranks_attend_as_one():
    torch.multiprocessing.spawn(run_rank, (free_port(),), nprocs=RANKS)
