"""`dist.decode` against the same attention on one process: sharding, empty shards, gradients, compile."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import torch_fdattn
from torch_fdattn.dist import ShardMap, decode
from torch_fdattn.testing import assert_launched, expected_path


def sharded(x: Tensor, shards: ShardMap) -> Tensor:
    """This rank's part of a whole cache (B, H, N, D)."""
    positions = torch.arange(x.shape[2], device=x.device)
    return x[:, :, shards.locate(positions)[0]]


def make(
    device: torch.device, batch: int, heads: int, kv_heads: int, new: int, length: int, dim: int
):
    q = torch.randn(batch, heads, new, dim, device=device)
    k = torch.randn(batch, kv_heads, length, dim, device=device)
    return q, k, torch.randn_like(k)


def rank_map(kv_block: int) -> ShardMap:
    return ShardMap(dist.get_rank(), dist.get_world_size(), kv_block)


@pytest.mark.parametrize("seed", range(40))
def test_equals_one_process(group: str, rank_device: torch.device, seed: int) -> None:
    rng = random.Random(seed)
    world = dist.get_world_size()
    kv_block = rng.choice([1, 3, 8, 16, 40])
    length = rng.randint(1, 90)
    kv_heads, group_size = rng.choice([1, 2, 3]), rng.choice([1, 3, 4])
    new = min(rng.choice([1, 1, 2, 5, 16, 24]), length)
    q, k, v = make(
        rank_device, 3, kv_heads * group_size, kv_heads, new, length, rng.choice([16, 40])
    )
    lens = torch.tensor([length, rng.randint(0, length), rng.randint(0, length)], dtype=torch.int32)
    lens = lens.to(rank_device)
    window = rng.choice([None, None, (rng.randint(0, 30), 0)])
    causal = rng.random() < 0.8
    shards = rank_map(kv_block)
    options = dict(causal=causal, window=window, scale=rng.choice([None, 0.3]))
    op = "decode_forward" if new <= 16 else "attention_forward"
    paths = [expected_path(name, rank_device, q.dtype) for name in (op, "merge_states_forward")]
    with assert_launched(*paths, "dist_decode/all_gather"):
        out, lse = decode(
            q, sharded(k, shards), sharded(v, shards), lens, group, kv_block=kv_block,
            strategy="all_gather", **options,
        )  # fmt: skip
    expected, expected_lse = torch_fdattn.attention(q, k, v, lens, **options)
    torch.testing.assert_close(out, expected, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
    # The same bits everywhere.
    everywhere = [torch.empty_like(out) for _ in range(world)]
    dist.all_gather(everywhere, out.contiguous())
    assert all(torch.equal(part, out) for part in everywhere)


def test_block_sharding_is_the_default_and_late_shards_are_empty(group, rank_device) -> None:
    world, capacity = dist.get_world_size(), 16
    q, k, v = make(rank_device, 2, 4, 2, 2, world * capacity, 16)
    lens = torch.tensor([5, 16], dtype=torch.int32, device=rank_device)  # only rank 0 holds keys
    part = slice(dist.get_rank() * capacity, (dist.get_rank() + 1) * capacity)
    out, lse = decode(q, k[:, :, part], v[:, :, part], lens, group)
    expected, expected_lse = torch_fdattn.decode(q, k, v, lens)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_uneven_explicit_shards_with_one_of_no_capacity(group, rank_device) -> None:
    """kv_start gives each rank any contiguous run; the last rank's storage is empty."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sizes = [7 + 13 * r for r in range(world - 1)] + [0]
    start = sum(sizes[:rank])
    q, k, v = make(rank_device, 2, 6, 2, 3, sum(sizes), 32)
    lens = torch.tensor([sum(sizes), 4], dtype=torch.int32, device=rank_device)
    part = slice(start, start + sizes[rank])
    out, lse = decode(
        q, k[:, :, part], v[:, :, part], lens, group, kv_start=torch.full_like(lens, start)
    )
    expected, expected_lse = torch_fdattn.decode(q, k, v, lens)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)


def test_no_key_anywhere(group, rank_device) -> None:
    q, k, v = make(rank_device, 2, 2, 1, 1, 4, 16)
    lens = torch.zeros(2, dtype=torch.int32, device=rank_device)
    out, lse = decode(q, k, v, lens, group)
    assert not out.any()
    assert (lse == float("-inf")).all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("new", [3, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("which", ["out", "lse", "both"])
def test_gradients(group, rank_device, new: int, which: str, compiled: bool) -> None:
    torch._dynamo.reset()
    shards = rank_map(8)
    whole = make(rank_device, 2, 6, 2, new, 50, 32)
    lens = torch.tensor([50, 33], dtype=torch.int32, device=rank_device)

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        terms = {"out": [out.sin().sum()], "lse": [lse.cos().sum()]}
        return sum(terms["out"] + terms["lse"] if which == "both" else terms[which])

    one = [x.clone().requires_grad_() for x in whole]
    loss(*torch_fdattn.attention(*one, lens, causal=True)).backward()
    q = whole[0].clone().requires_grad_()
    k, v = (sharded(x, shards).clone().requires_grad_() for x in whole[1:])

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return loss(*decode(q, k, v, lens, group, kv_block=8))

    run = torch.compile(step, backend="aot_eager", fullgraph=True) if compiled else step
    run(q, k, v).backward()
    torch.testing.assert_close(q.grad, one[0].grad, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(k.grad, sharded(one[1].grad, shards), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(v.grad, sharded(one[2].grad, shards), atol=1e-5, rtol=1e-4)


def test_compiles_once_for_all_lengths(group, rank_device) -> None:
    torch._dynamo.reset()
    q, k, v = make(rank_device, 2, 4, 2, 1, 32, 16)
    counter = CompileCounterWithBackend("aot_eager")  # the next test has Inductor
    step = torch.compile(
        lambda lens: decode(q, k, v, lens, group)[0], backend=counter, fullgraph=True
    )
    for length in (1, 17, 32):
        lens = torch.full((2,), length, dtype=torch.int32, device=rank_device)
        torch.testing.assert_close(step(lens), decode(q, k, v, lens, group)[0])
    assert counter.frame_count == 1


def test_compile_caches_are_not_shared_between_ranks(group, rank_device) -> None:
    """All ranks compile the same code with one cache folder, one after the other."""
    shards = rank_map(4)
    q, k, v = make(rank_device, 1, 2, 1, 1, 24, 16)
    lens = torch.full((1,), 24, dtype=torch.int32, device=rank_device)
    expected = torch_fdattn.decode(q, k, v, lens)[0]
    k, v = sharded(k, shards), sharded(v, shards)
    for _ in range(2):  # the second round meets a full cache
        torch._dynamo.reset()
        out = torch.compile(lambda: decode(q, k, v, lens, group, kv_block=4)[0], fullgraph=True)()
        torch.testing.assert_close(out, expected)
        dist.barrier()


def test_op_without_rank_refuses_to_be_compiled(group, rank_device) -> None:
    torch._dynamo.reset()
    q, k, v = make(rank_device, 1, 2, 1, 1, 8, 16)
    lens = torch.full((1,), 8, dtype=torch.int32, device=rank_device)
    op = torch.ops.fdattn.dist_decode
    torch.testing.assert_close(op(q, k, v, lens, group)[0], decode(q, k, v, lens, group)[0])
    with pytest.raises(
        Exception, match="rank and world_size must be given where the op is compiled"
    ):
        torch.compile(lambda: op(q, k, v, lens, group)[0], fullgraph=True)()


def test_half_precision_keeps_the_exchange_in_fp32(group, rank_device) -> None:
    """Rounding to fp16 happens once, after the merge: within one ulp of the exact result's rounding."""
    shards = rank_map(4)
    q, k, v = (x.half() for x in make(rank_device, 2, 4, 2, 1, 64, 32))
    lens = torch.tensor([64, 50], dtype=torch.int32, device=rank_device)
    out, lse = decode(q, sharded(k, shards), sharded(v, shards), lens, group, kv_block=4)
    exact, exact_lse = torch_fdattn.attention(q.float(), k.float(), v.float(), lens, causal=True)
    assert out.dtype == torch.float16
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.float(), exact, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(lse, exact_lse, atol=2e-3, rtol=0)


def test_double_backward_is_refused(group, rank_device) -> None:
    q, k, v = make(rank_device, 1, 2, 1, 1, 8, 16)
    lens = torch.full((1,), 8, dtype=torch.int32, device=rank_device)
    out, _ = decode(q.requires_grad_(), k, v, lens, group)
    with pytest.raises(NotImplementedError, match="dist_decode has no second derivative"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def test_lengths_beyond_the_whole_capacity_are_clamped(group, rank_device) -> None:
    """Block sharding knows the whole capacity: as decode on one process, also for the queries' positions."""
    world = dist.get_world_size()
    q, k, v = make(rank_device, 1, 2, 1, 3, 5 * world, 16)
    part = slice(5 * dist.get_rank(), 5 * dist.get_rank() + 5)
    for length in (99, -4, 2**40):
        lens = torch.full((1,), length, dtype=torch.int64, device=rank_device)
        out, lse = decode(q, k[:, :, part], v[:, :, part], lens, group)
        expected, expected_lse = torch_fdattn.decode(q, k, v, lens)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)


class TestBadInput:
    """Every wrong call raises on every rank, before any collective."""

    @pytest.fixture
    def good(self, group: str, rank_device: torch.device) -> dict:
        q, k, v = make(rank_device, 2, 4, 2, 1, 8, 16)
        lens = torch.tensor([8, 3], dtype=torch.int32, device=rank_device)
        return dict(q=q, k_shard=k, v_shard=v, kv_lens=lens, group=group)

    @pytest.mark.parametrize(
        ("wrong", "error", "message"),
        [
            (
                dict(group="nosuch"),
                ValueError,
                "group must name a process group .* got 'nosuch'",
            ),
            (dict(group=3), (TypeError, RuntimeError), "group"),
            (
                dict(strategy="teleport"),
                ValueError,
                "strategy must be one of .*all_gather.* got 'teleport'",
            ),
            (dict(kv_block=0), ValueError, "kv_block must be at least 1, got 0"),
            (dict(scale=-1.0), ValueError, "scale must be a positive finite number, got -1.0"),
            (
                dict(kv_block=2**31 - 2),
                ValueError,
                r"kv_block must be at most 2\*\*29 // \d ranks, got 2147483646",
            ),
            (dict(window=(-2, 0)), ValueError, r"window must be \(left, right\) .* got \(-2, 0\)"),
        ],
    )
    def test_options(self, good: dict, wrong: dict, error: type, message: str) -> None:
        with pytest.raises(error, match=message):
            decode(**{**good, **wrong})

    def test_lengths_are_required(self, good: dict) -> None:
        with pytest.raises((TypeError, RuntimeError), match="kv_lens"):
            decode(**{**good, "kv_lens": None})

    def test_lengths_of_another_batch(self, good: dict) -> None:
        with pytest.raises(
            ValueError, match=r"kv_lens must have shape \(2,\) like q's batch, got \(3,\)"
        ):
            decode(**{**good, "kv_lens": good["kv_lens"].new_ones(3)})

    def test_starts_of_another_batch(self, good: dict) -> None:
        with pytest.raises(
            ValueError, match=r"kv_start must have shape \(2,\) like q's batch, got \(3,\)"
        ):
            decode(**good, kv_start=good["kv_lens"].new_ones(3))

    def test_shards_that_differ(self, good: dict) -> None:
        with pytest.raises(
            ValueError, match=r"v_shard must have shape \(2, 2, 8, 16\) like k_shard, got"
        ):
            decode(**{**good, "v_shard": good["v_shard"][:, :, :5]})

    def test_block_and_start_exclude_each_other(self, good: dict) -> None:
        with pytest.raises(ValueError, match="kv_block and kv_start exclude each other"):
            decode(**good, kv_block=4, kv_start=torch.zeros_like(good["kv_lens"]))


def test_without_a_process_group() -> None:
    if dist.is_initialized():
        pytest.skip("a process group exists")
    q = torch.randn(1, 1, 1, 16)
    with pytest.raises(RuntimeError, match="init_process_group first"):
        decode(q, q, q, torch.ones(1, dtype=torch.int32), "0")


@pytest.mark.parametrize("what", ["batch", "gradients"])
def test_disagreeing_ranks_are_named_on_every_rank(group, rank_device, what) -> None:
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    odd = dist.get_rank() == 1
    batch = 7 if odd and what == "batch" else 6
    q, k, v = make(rank_device, batch, 2, 1, 1, 8, 16)
    q.requires_grad_(odd and what == "gradients")
    lens = torch.full((batch,), 8, dtype=torch.int32, device=rank_device)
    text = {"batch": "q's shape", "gradients": "whether gradients are wanted"}[what]
    with pytest.raises(
        ValueError, match=rf"{text} must be the same on all ranks, got .* on rank 1"
    ):
        decode(q, k, v, lens, group, scale=0.321)
