"""Ranks that differ are told so, also where each of them makes a call that it has made before."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dist import (
    SequenceShards,
    all_gather_matmul,
    consensus,
    context_parallel,
    decode,
    ring_attention,
    unshard_batch,
)

pytestmark = pytest.mark.usefixtures("compared_in_every_call")


def heads_of(rank: int, device) -> list[Tensor]:
    return [torch.randn(1, 2 + 2 * rank, 8, 16, device=device) for _ in range(3)]


@pytest.mark.parametrize("seen", ["both", "rank 0", "none"])
@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_ring_attention(group, rank_device, strategy, seen) -> None:
    rank = dist.get_rank()
    if seen != "none":
        for kind in (0, 1) if seen == "both" else (0,):
            ring_attention(*heads_of(kind, rank_device), group, strategy=strategy)
    mine = heads_of(min(rank, 1), rank_device)
    with pytest.raises(
        ValueError, match=r"heads and head dim must be the same on all ranks, got .* on rank 1"
    ):
        ring_attention(*mine, group, strategy=strategy)
    ring_attention(*heads_of(0, rank_device), group, strategy=strategy)  # the group goes on


def runs(*numbers) -> SequenceShards:
    return SequenceShards(((numbers,),) * dist.get_world_size())


WRONG = {
    "no tensor": ({"q": None}, TypeError, r"q must be a torch\.Tensor, got NoneType"),
    "a sparse tensor": ({"q": "sparse"}, TypeError, "q must be a strided tensor, got layout torch.sparse_coo"),
    "documents beyond 64 bits": ({"cu_seqlens": [0, 2**70]}, ValueError, "cu_seqlens must be numbers of 64 bits"),
    "prefixes beyond 64 bits": ({"prefix_lens": [2**70]}, ValueError, "prefix_lens must be numbers of 64 bits"),
    "a prefix beyond 64 bits": ({"prefix_lens": 2**70}, ValueError, "prefix_lens must be numbers of 64 bits"),
    "runs of no ints": ({"shards": ("a", 1)}, TypeError, r"shards must hold runs \(start, length\) of ints"),
    "runs beyond 64 bits": ({"shards": (0, 2**70)}, ValueError, "shards must be numbers of 64 bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_one_rank_gives_and_no_op_could_take(group, rank_device, name) -> None:
    """Every rank raises, and none waits."""
    wrong, kind, said = WRONG[name]
    q, k, v = heads_of(0, rank_device)
    given = {"q": q, "causal": True}
    if dist.get_rank() == dist.get_world_size() - 1:
        given |= wrong
        if name == "a sparse tensor":
            given["q"] = q.to_sparse()
        if "shards" in wrong:
            given["shards"] = runs(*wrong["shards"])
    with pytest.raises(kind, match=said):
        ring_attention(given.pop("q"), k, v, group, **given)
    ring_attention(q, k, v, group, causal=True)  # the group goes on


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ({"seq_dims": [4]}, ValueError, "seq_dims must be dims of the buffers, got 4 of 2"),
        ({"buffers": ["tokens"]}, TypeError, r"buffers must be a torch\.Tensor, got str"),
        ({"shards": ("a", 1)}, TypeError, r"shards must hold runs \(start, length\) of ints"),
    ],
    ids=["dims", "buffers", "shards"],
)
def test_what_one_rank_gives_to_context_parallel(group, rank_device, wrong, kind, said) -> None:
    world = dist.get_world_size()
    tokens = torch.zeros(1, 8 * world, device=rank_device)
    given = {"shards": SequenceShards.zigzag(8 * world, world), "buffers": [tokens], "seq_dims": [1]}  # fmt: skip
    if dist.get_rank() == world - 1:
        given |= {x: runs(*y) if x == "shards" else y for x, y in wrong.items()}
    with pytest.raises(kind, match=said), context_parallel(group, **given):
        pass


def test_a_dim_of_one_ranks_part(group, rank_device) -> None:
    world = dist.get_world_size()
    shards = SequenceShards.zigzag(8 * world, world)
    dim = 4 if dist.get_rank() == world - 1 else 1
    with pytest.raises(IndexError):
        unshard_batch(group, shards, torch.ones(1, 8, device=rank_device), dim=dim)


def test_capacities_of_block_shards(group, rank_device) -> None:
    """Where a rank's keys stand follows from its own capacity."""
    capacity = 16 if dist.get_rank() else 8
    q = torch.randn(1, 2, 1, 16, device=rank_device)
    k = torch.randn(1, 2, capacity, 16, device=rank_device)
    lens = torch.tensor([24], dtype=torch.int32, device=rank_device)
    with pytest.raises(
        ValueError, match=r"k_shard's capacity must be the same on all ranks, got 8 on rank 0"
    ):
        decode(q, k, k, lens, group)
    decode(q, k, k, lens, group, kv_block=8)


def test_who_gives_positions(group, rank_device) -> None:
    q = torch.randn(1, 2, 1, 16, device=rank_device)
    lens = torch.tensor([8], dtype=torch.int32, device=rank_device)
    start = {"q_start": lens} if dist.get_rank() else {}
    with pytest.raises(ValueError, match="whether q_start and kv_start are given must be the same"):
        decode(q, q, q, lens, group, **start)


def test_matmuls(group, rank_device) -> None:
    weight = torch.randn(4, 6, device=rank_device)
    for features in (5, 6):
        x = torch.randn(3, features, device=rank_device)
        all_gather_matmul(x, [weight[:, :features].contiguous()], group)
    features = 6 if dist.get_rank() else 5
    x = torch.randn(3, features, device=rank_device)
    with pytest.raises(ValueError, match="x_shard's features must be the same on all ranks"):
        all_gather_matmul(x, [weight[:, :features].contiguous()], group)


def test_parts_of_a_batch(group, rank_device) -> None:
    shards = SequenceShards.zigzag(8 * dist.get_world_size(), dist.get_world_size())
    for batch in (1, 2):
        unshard_batch(group, shards, torch.ones(batch, 8, device=rank_device))
    part = torch.ones(2 if dist.get_rank() else 1, 8, device=rank_device)
    with pytest.raises(ValueError, match="parts' shape beside dim must be the same on all ranks"):
        unshard_batch(group, shards, part)


def test_steps_that_follow_from_one_another_are_compared_once(
    group, rank_device, monkeypatch
) -> None:
    monkeypatch.setattr(checks, "CHECK_VALUES", False)
    q = torch.randn(1, 2, 1, 16, device=rank_device)
    lens = torch.tensor([1 + dist.get_world_size()], dtype=torch.int32, device=rank_device)
    k = torch.randn(1, 2, 11, 16, device=rank_device)
    compared = []
    monkeypatch.setattr(consensus, "_digests_are_equal", lambda *_: compared.append(1) or True)
    for _ in range(2):
        decode(q, k, k, lens, group, strategy="all_gather")
    assert len(compared) == (2 if rank_device.type == "cpu" else 0)
    with consensus.assume_equal_on_all_ranks():
        decode(q, k, k, lens, group, strategy="all_gather")
    assert len(compared) == (2 if rank_device.type == "cpu" else 0)


class TestADeviceOfItsOwn:
    """What a group of two backends, "cpu:gloo,cuda:nccl", does: no device but the CPU needs to be there."""

    def test_a_refusal_is_logged_before_the_collective(self, group, caplog) -> None:
        """Ranks that have compared the call do not come to it."""
        like = torch.empty(0, device="meta")
        if dist.get_rank() == 0:
            with caplog.at_level("ERROR", logger="torch_fdattn"):
                consensus.tell_refusal(group, like, NotImplementedError("no such mask"))
            assert "rank 0 refuses a call: NotImplementedError: no such mask" in caplog.text
        else:
            with pytest.raises(NotImplementedError, match=r"no such mask \(on rank 0\)"):
                consensus.check_equal_on_all_ranks(group, like, {"shards": 1})

    @pytest.mark.parametrize(
        ("backends", "device"), [("cpu:gloo,meta:nccl", "meta"), ("cpu:gloo,meta:gloo", None)]
    )
    def test_calls_without_tensors(self, group, monkeypatch, backends, device) -> None:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
        objects = consensus.empty_of_group(group).device.type
        monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
        assert consensus.empty_of_group(group).device.type == (device or objects)
