"""Ring attention's strategy `one_sided`: against `all_gather`, in graphs, after one another, refusals, lost copies."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torch_fdattn.dist import (
    PeerTimeout,
    SequenceShards,
    check,
    context_parallel,
    ring_attention,
    set_timeout,
)
from torch_fdattn.dist.consensus import assume_equal_on_all_ranks
from torch_fdattn.dist.ring_attention import head_groups, one_sided
from torch_fdattn.dist.symm import received_sums
from torch_fdattn.dist.symm.copies import Copies
from torch_fdattn.ops.library import INTERPRET, launches

from .test_ring_attention import drawn_shards

RUNS = INTERPRET or torch.cuda.is_available()
needs_kernels = pytest.mark.skipif(
    not RUNS, reason="tests a kernel: needs a CUDA device or TRITON_INTERPRET=1"
)
HALF = torch.float16 if INTERPRET else torch.bfloat16
SEEDS = [pytest.param(x, marks=() if x < 6 or not INTERPRET else pytest.mark.slow) for x in range(30)]  # fmt: skip


def results(group, whole, shards, strategy, douts, **given) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv) of this rank's shard."""
    rank = dist.get_rank()
    own = [shards.shard(x, rank, 2).clone().requires_grad_() for x in whole]
    out, lse = ring_attention(*own, group, shards=shards, strategy=strategy, **given)
    dout, dlse = (shards.shard(x, rank, 2) for x in douts)
    return out, lse, *torch.autograd.grad((out, lse), own, (dout, dlse.masked_fill(lse.isinf(), 0)))


@needs_kernels
@pytest.mark.parametrize("seed", SEEDS)
def test_drawn(group, rank_device, monkeypatch, seed) -> None:
    if seed % 2:  # groups of heads as of long sequences
        monkeypatch.setattr(head_groups, "_LIMITS", head_groups.Limits(1, 1, 0))
        monkeypatch.setattr(head_groups, "_MAX_CALLS", 1000)
    rng, world = random.Random(seed), dist.get_world_size()
    torch.manual_seed(seed)
    total, kv_heads = rng.choice([world, 24, 37, 64]), rng.choice([1, 2, 5])
    heads, batch = kv_heads * rng.choice([1, 2]), rng.choice([1, 2])
    dtype = rng.choice([torch.float32, HALF])
    shape = dict(device=rank_device, dtype=dtype)
    q, dout = torch.randn(2, batch, heads, total, 32, **shape)
    k, v = torch.randn(2, batch, kv_heads, total, 32, **shape)
    if rng.random() < 0.5:  # as models have them, heads behind tokens in memory
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    dlse = torch.randn(batch, heads, total, device=rank_device)
    given = dict(causal=rng.random() < 0.7)
    if given["causal"] and rng.random() < 0.4:
        given["window"] = min(rng.randint(0, 30), total), 0
    if rng.random() < 0.3:
        given["cu_seqlens"] = sorted({0, rng.randint(1, total), total})
    if rng.random() < 0.3:
        given["kv_lens"] = torch.randint(0, total + 1, (batch,), dtype=torch.int32).to(rank_device)
    if rng.random() < 0.3:
        given["sinks"] = torch.randn(heads, device=rank_device)
    if rng.random() < 0.3:
        given |= dict(dropout_p=0.3, dropout_seed=torch.tensor([seed, 1], device=rank_device))
    shards = drawn_shards(rng, total, world)
    expected = results(group, (q, k, v), shards, "all_gather", (dout, dlse), **given)
    before = Counter(launches)
    found = results(group, (q, k, v), shards, "one_sided", (dout, dlse), **given)
    if world > 1:
        made = Counter(launches) - before
        assert made["ring_attention/one_sided_gather"] == 2
        assert made["ring_attention/one_sided_sum"] == 1
    bounds = {} if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[:3], expected[:3], rtol=0, atol=0)  # the same calls
    torch.testing.assert_close(found[3:], expected[3:], **bounds)


@needs_kernels
def test_calls_after_one_another(group, rank_device) -> None:
    """Their copies go to the same memory; larger ones to more of it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    expected, found = [], []
    for i, length in enumerate((16, 16, 40, 16)):
        shards = SequenceShards.zigzag(length * world, world)
        torch.manual_seed(i)
        own = [
            shards.shard(torch.randn(1, 2, length * world, 32), rank, 2).to(rank_device)
            for _ in range(3)
        ]
        for into, strategy in ((expected, "all_gather"), (found, "one_sided")):
            with context_parallel(group, shards=shards, strategy=strategy):
                into.append(torch.nn.functional.scaled_dot_product_attention(*own, is_causal=True))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@needs_kernels
def test_a_call_waits_for_the_keys_that_it_sees(group, rank_device, monkeypatch) -> None:
    """Zigzag and causal: the call of early queries for the others' first parts, if for any; forward and backward alike."""
    rank, world = dist.get_rank(), dist.get_world_size()
    log: list[object] = []
    wait, attend = Copies.await_, one_sided.attend_unsharded

    def awaits(self: Copies, peer: int, ahead: bool = False) -> None:
        log.append((peer, ahead))
        wait(self, peer, ahead)

    def attends(q, k, v, problem, arriving):
        return attend(q, k, v, problem, lambda calls: (log.append("call") or x for x in arriving(calls)))  # fmt: skip

    monkeypatch.setattr(Copies, "await_", awaits)
    monkeypatch.setattr(one_sided, "attend_unsharded", attends)
    shards = SequenceShards.zigzag(16 * world, world)
    own = [torch.randn(1, 1, 16, 32, device=rank_device).requires_grad_() for _ in range(3)]
    out = ring_attention(*own, group, shards=shards, causal=True, strategy="one_sided")[0]
    early = [(peer, True) for peer in range(rank)]
    late = [(peer, False) for peer in range(rank + 1, world)]
    # The last rank's two runs are neighbours, hence one.
    assert log == ([*early, "call", *late, "call"] if rank + 1 < world else [*early, "call"])
    log.clear()
    torch.autograd.grad(out.sum(), own)
    assert log == [*early, *late]
    log.clear()
    ring_attention(*own, group, shards=shards, strategy="one_sided")
    everything = [((rank + i) % world, False) for i in range(1, world)]
    assert [x for x in log if x != "call"] == everything


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("groups", [1, 4])
def test_in_a_graph(group, rank_device, monkeypatch, groups: int) -> None:
    if groups > 1:
        monkeypatch.setattr(head_groups, "_LIMITS", head_groups.Limits(1, 1, 0))
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = SequenceShards.zigzag(64 * world, world)
    own = [torch.randn(1, groups, 64, 64, device=rank_device, dtype=HALF) for _ in range(3)]

    def call(strategy: str) -> Tensor:
        return ring_attention(*own, group, shards=shards, causal=True, strategy=strategy)[0]

    with torch.no_grad():
        call("one_sided")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = call("one_sided")
        for i in range(5):
            torch.manual_seed(10 * i + rank)
            for x in own:
                x.normal_()
            graph.replay()
            torch.testing.assert_close(found, call("all_gather"), rtol=0, atol=0)


def raising_on_cpus(device: torch.device):
    """There a call whose wait timed out has no result, not even NaN."""
    return pytest.raises(PeerTimeout) if device.type == "cpu" else contextlib.nullcontext()


def assert_the_next_call_ends(call: Callable[[], object], what: str) -> None:
    """Behind a call that rank 0 left: within the time limit, and each rank is told why."""
    begin = time.monotonic()
    said = f"left ring_attention's {what}" if dist.get_rank() == 0 else "waited for rank 0 "
    with pytest.raises(PeerTimeout, match=said):
        call()
    assert time.monotonic() - begin < 30  # an unbounded wait is one of minutes


class Failure(RuntimeError):
    """As if memory ran out."""


@needs_kernels
@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_a_call_that_fails_half_way(group, rank_device, monkeypatch, who) -> None:
    """It raises what made it fail, and its copies are not taken for those of the next call."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = SequenceShards.contiguous(16 * world, world)

    def fails(*_: object) -> None:
        raise Failure

    for i in range(3):
        torch.manual_seed(i)
        own = [shards.shard(torch.randn(1, 2, 16 * world, 32), rank, 2).to(rank_device) for _ in range(3)]  # fmt: skip
        with monkeypatch.context() as patch:
            if i == 1 and (who == "all" or rank == 0):
                patch.setattr(one_sided, "attend_unsharded", fails)
                with pytest.raises(Failure):
                    ring_attention(*own, group, shards=shards, strategy="one_sided")
                continue
            found = ring_attention(*own, group, shards=shards, strategy="one_sided")
        if i != 1:
            expected = ring_attention(*own, group, shards=shards, strategy="all_gather")
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@needs_kernels
@pytest.mark.parametrize(
    ("first", "who"),
    [
        *((first, "all") for first in (True, False)),
        *((False, who) for who in ("rank 0", "all, then rank 0")),
        *(
            pytest.param(True, who, marks=pytest.mark.slow)
            for who in ("rank 0", "all, then rank 0")
        ),
    ],
)
def test_a_backward_that_fails(group, rank_device, monkeypatch, who, first) -> None:
    """On all ranks: the next call is as if nothing was. On one: an error that says so, there and on the others."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        pytest.skip("needs 2 ranks")
    new = dist.new_group()
    shards = SequenceShards.contiguous(16 * world, world)
    own = [torch.randn(1, 2, 16, 32, device=rank_device).requires_grad_() for _ in range(3)]

    def gradients() -> list[Tensor]:
        out = ring_attention(*own, new.group_name, shards=shards, strategy="one_sided")[0]
        return torch.autograd.grad(out.sum(), own)

    def fails(*_: object) -> None:
        raise Failure

    set_timeout(5)
    try:
        expected = None if first else gradients()
        for who_now in who.split(", then "):
            with monkeypatch.context() as patch:
                if who_now == "all" or rank == 0:
                    patch.setattr(one_sided, "unsharded_gradients", fails)
                    with pytest.raises(Failure):
                        gradients()
                else:
                    with raising_on_cpus(rank_device):
                        _, *dkv = gradients()
                        assert all(x.isnan().all() for x in dkv)
            if who_now == "all":
                found = gradients()
                assert expected is None or all(map(torch.equal, found, expected))
        if who == "all":
            return
        assert_the_next_call_ends(gradients, "backward")
    finally:
        set_timeout(10)
        dist.barrier()
        dist.destroy_process_group(new)


@needs_kernels
def test_a_backward_that_fails_when_all_is_sent(group, rank_device, monkeypatch) -> None:
    """On rank 0: nobody waits for it, so the others have their gradients, and the next call is as any."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        pytest.skip("needs 2 ranks")
    shards = SequenceShards.contiguous(16 * world, world)
    own = [torch.randn(1, 2, 16, 32, device=rank_device).requires_grad_() for _ in range(3)]

    def gradients() -> list[Tensor]:
        out = ring_attention(*own, group, shards=shards, strategy="one_sided")[0]
        return torch.autograd.grad(out.sum(), own)

    def fails(*_: object) -> None:
        raise Failure

    expected = gradients()
    with monkeypatch.context() as patch:
        if rank == 0:
            patch.setattr(received_sums, "sum_received", fails)
            with pytest.raises(Failure):
                gradients()
        else:
            assert all(map(torch.equal, gradients(), expected))
    assert all(map(torch.equal, gradients(), expected))


@needs_kernels
@pytest.mark.parametrize(("batch", "length"), [(1, 0), (0, 8)])
def test_no_tokens_and_no_sequences(group, rank_device, batch, length) -> None:
    world = dist.get_world_size()
    shards = SequenceShards.from_positions([range(r * length, (r + 1) * length) for r in range(world)])  # fmt: skip
    whole = torch.randn(3, batch, 2, world * length, 32, device=rank_device)
    douts = torch.zeros_like(whole[0]), whole.new_zeros(batch, 2, world * length)
    found = results(group, whole, shards, "one_sided", douts)
    assert found[0].shape == (batch, 2, length, 32)
    assert all(x.shape == found[0].shape for x in found[2:])


@needs_kernels
@pytest.mark.parametrize("where", ["attend_unsharded", "unsharded_gradients"])
def test_a_wait_that_is_too_short(group, rank_device, monkeypatch, where) -> None:
    """A rank that is slow, as on a busy machine: results that are right or an exception, and NaN nowhere."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        pytest.skip("needs 2 ranks")
    if rank_device.type != "cpu":
        pytest.skip("of memory that CPU processes share")
    new = dist.new_group()
    shards = SequenceShards.contiguous(16 * world, world)
    own = [torch.randn(1, 1, 16, 32).requires_grad_() for _ in range(3)]

    def gradients() -> list[Tensor]:
        out = ring_attention(*own, new.group_name, shards=shards, strategy="one_sided")[0]
        assert not out.isnan().any()
        return torch.autograd.grad(out.sum(), own)

    computed = getattr(one_sided, where)

    def slow(*given: object) -> object:
        time.sleep(3.0)
        return computed(*given)

    expected = gradients()
    set_timeout(0.5)
    raised = 0
    with monkeypatch.context() as patch:
        if rank == 0:
            patch.setattr(one_sided, where, slow)
        try:  # of a slow forward the others notice in the backward, whose copies it keeps waiting
            found = gradients()
        except PeerTimeout:
            raised = 1
        else:
            assert all(map(torch.equal, found, expected))
    set_timeout(10)
    times_out = torch.tensor([raised])
    dist.all_reduce(times_out)
    assert times_out.item() >= 1
    assert raised or rank == 0
    dist.destroy_process_group(new)


@needs_kernels
def test_a_rank_that_does_not_come(group, rank_device) -> None:
    """An exception on the others, on GPUs NaN before it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        pytest.skip("needs 2 ranks")
    new = dist.new_group()
    shards = SequenceShards.contiguous(16 * world, world)
    x = torch.randn(1, 1, 16, 32, device=rank_device)

    def call() -> Tensor:
        with torch.no_grad():
            given = dict(shards=shards, strategy="one_sided")
            return ring_attention(x, x, x, new.group_name, **given)[0]

    assert call().isfinite().all()
    dist.barrier()
    set_timeout(1)
    if rank:
        with assume_equal_on_all_ranks(), raising_on_cpus(rank_device):
            assert call().isnan().all()
        with pytest.raises(PeerTimeout, match="waited for rank 0 "):
            check(new.group_name)
    dist.barrier()
    set_timeout(10)
    dist.destroy_process_group(new)


def test_refusals(group, rank_device) -> None:
    world = dist.get_world_size()
    x = torch.randn(1, 2, 8, 32, device=rank_device)
    if world > 1 and not RUNS:
        with pytest.raises(NotImplementedError, match="'one_sided' needs ranks that share symmetric memory"):  # fmt: skip
            ring_attention(x, x, x, group, strategy="one_sided")
    if rank_device.type == "cpu":
        with pytest.raises(TypeError, match="q must not be float64 with strategy='one_sided'"):
            ring_attention(x.double(), x.double(), x.double(), group, strategy="one_sided")
    for fullgraph in (True, False):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"must not be 'one_sided' under torch\.compile"):
            torch.compile(
                lambda x: ring_attention(x, x, x, group, strategy="one_sided")[0], backend="aot_eager",
                fullgraph=fullgraph,
            )(x)  # fmt: skip
