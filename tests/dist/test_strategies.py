"""The one-sided strategies of `dist.decode`, as one process decodes: with TRITON_INTERPRET=1 on CPUs, or on GPUs.

Interpreted kernels are slow, so each case crosses several features. `test_one_sided.py` has the merges alone.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_fdattn
from tests.dist.test_decode import make, rank_map, sharded
from tests.dist.test_decode_strategies import (
    drawn_call,
    drawn_table,
    expect_equal,
    paged,
    quantised,
)
from torch_fdattn import checks
from torch_fdattn.dist import check, decode
from torch_fdattn.dist.decode.op import ONE_SIDED
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.testing import attention_oracle, check_close, check_lse

DRAWN = 30 if torch.cuda.is_available() else 2


@pytest.fixture(autouse=True)
def _kernels(rank_device: torch.device) -> None:
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    if rank_device.type == "cpu" and not INTERPRET:
        pytest.skip("tests a kernel: needs a CUDA device or TRITON_INTERPRET=1")


def expect(found, expected, head_sharded: bool = False) -> None:
    """fp32: within its tolerances, and the same bits on every rank."""
    for ours, theirs in zip(found, own_part(expected, head_sharded), strict=True):
        torch.testing.assert_close(ours, theirs)
    same_everywhere(found, head_sharded)


def expect_by_rule(found, q, k, v, lens: Tensor, head_sharded: bool = False, **options) -> None:
    """16 bits, where single-process decode rounds as well: by the error rule, and the same bits on every rank."""
    samples = []
    for dtype in (torch.float64, q.dtype):
        inputs = [x.cpu().to(dtype) for x in (q, k, v)]
        exact = attention_oracle(*inputs, lens.tolist(), causal=True, **options)
        samples.append(own_part(exact, head_sharded))
    (out, lse), (torch_out, _) = samples
    check_close("out", found[0].cpu(), out, [torch_out.double() - out])
    check_lse(found[1].cpu(), lse, q.dtype)
    same_everywhere(found, head_sharded)


def own_part(whole, head_sharded: bool):
    """What this rank is to have of a whole result."""
    if not head_sharded:
        return whole
    return [x.chunk(dist.get_world_size(), 1)[dist.get_rank()] for x in whole]


def same_everywhere(found, head_sharded: bool) -> None:
    for x in found:
        assert x.is_contiguous()
        if not head_sharded:
            everywhere = [torch.empty_like(x) for _ in range(dist.get_world_size())]
            dist.all_gather(everywhere, x)
            assert all(torch.equal(part, x) for part in everywhere)


def call(strategy: str, *arguments, **options):
    """`decode` by this strategy, which must be the one that runs."""
    before = launches[f"dist_decode/{strategy}"]
    found = decode(*arguments, strategy=strategy, **options)
    assert launches[f"dist_decode/{strategy}"] == before + 1
    return found


def lengths(values: list[int], device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("strategy", ONE_SIDED)
def test_round_robin_blocks(group, rank_device, strategy: str) -> None:
    """Tokens whose keys are on several ranks, a window, a cap, sinks, heads for each rank."""
    heads = 2 * dist.get_world_size()
    q, k, v = make(rank_device, 1, heads, 1, 3, 20, 16)
    lens = lengths([19], rank_device)
    options = dict(window=(6, 0), softcap=5.0, sinks=torch.randn(heads, device=rank_device))
    shards = [sharded(x, rank_map(2)) for x in (k, v)]
    expected = torch_fdattn.decode(q, k, v, lens, **options)
    for head_sharded in (False, True):
        found = call(
            strategy, q, *shards, lens, group, kv_block=2, head_sharded=head_sharded, **options
        )
        expect(found, expected, head_sharded)


@pytest.mark.parametrize("strategy", ONE_SIDED)
def test_uneven_and_empty_shards(group, rank_device, strategy: str) -> None:
    """The last rank holds nothing; values of another head dim; fp16."""
    world, rank, length = dist.get_world_size(), dist.get_rank(), 17
    q, k, _ = make(rank_device, 2, 3, 1, 1, length, 16)
    v = torch.randn(2, 1, length, 24, device=rank_device)
    q, k, v = (x.half() for x in (q, k, v))
    cuts = [0, *(length - 4 * (world - 2 - i) for i in range(world - 1)), length]
    begin, end = cuts[rank], cuts[rank + 1]
    lens = lengths([length, 6], rank_device)
    slopes = torch.rand(3, device=rank_device)
    found = call(
        strategy, q, k[:, :, begin:end], v[:, :, begin:end], lens, group,
        kv_start=torch.full_like(lens, begin), alibi_slopes=slopes, batch_invariant=True,
    )  # fmt: skip
    expect_by_rule(found, q, k, v, lens, alibi_slopes=slopes.cpu())


@pytest.mark.parametrize("strategy", ONE_SIDED)
def test_pages_of_a_quantised_cache(group, rank_device, strategy: str) -> None:
    """And outputs of this rank's heads."""
    heads, page = dist.get_world_size(), 4
    q, k, v = make(rank_device, 2, heads, 1, 2, 22, 16)
    k, v = (quantised(x, torch.int8) for x in (k, v))
    lens = lengths([22, 3], rank_device)
    scales = dict(
        zip(("k_scale", "v_scale"), torch.rand(2, 1, 1, 1, device=rank_device) / 10, strict=True)
    )
    shards = [sharded(x, rank_map(page)) for x in (k, v)]
    table = drawn_table(random.Random(0), 2, shards[0].shape[2], page, rank_device)
    pages = [paged(x.float(), page, table).to(torch.int8) for x in shards]
    expected = torch_fdattn.decode(q, k, v, lens, **scales)
    found = call(
        strategy, q, *pages, lens, group, kv_block=page, page_table=table, head_sharded=True, **scales
    )  # fmt: skip
    expect(found, expected, head_sharded=True)


@pytest.mark.parametrize("strategy", ONE_SIDED)
def test_lengths_that_change(group, rank_device, strategy: str) -> None:
    """On the device, between calls with the same tensors; the same call gives the same bits."""
    world, capacity = dist.get_world_size(), 6
    q, k, v = make(rank_device, 2, 2, 1, 1, world * capacity, 16)
    part = slice(dist.get_rank() * capacity, (dist.get_rank() + 1) * capacity)
    shards = [x[:, :, part] for x in (k, v)]
    lens, first = lengths([0, 0], rank_device), None
    for values in ([world * capacity, 3], [0, 1], [world * capacity, 3]):
        lens.copy_(lengths(values, rank_device))
        found = call(strategy, q, *shards, lens, group)
        if values == [0, 1]:
            assert not found[0][0].any()
            assert (found[1][0] == float("-inf")).all()
        elif first is None:
            expect(found, torch_fdattn.decode(q, k, v, lens))
            first = found
        else:
            assert all(torch.equal(x, y) for x, y in zip(first, found, strict=True))


@pytest.mark.parametrize("seed", range(DRAWN))
def test_drawn(group, rank_device, seed: int) -> None:
    """Draws of the portable strategies' tests, by these."""
    strategy, rng = ONE_SIDED[seed % len(ONE_SIDED)], random.Random(100 + seed)
    (q, k, v, lens), both, shards, local = drawn_call(rng, rank_device)
    head_sharded = q.shape[1] % dist.get_world_size() == 0 and seed % 3 == 0
    one_process = torch_fdattn.decode if q.shape[2] <= 16 else torch_fdattn.attention
    expected = one_process(q, k, v, lens, causal=True, **both)
    found = call(strategy, q, *shards, lens, group, head_sharded=head_sharded, **both, **local)
    expect_equal(found, expected, head_sharded, f"{both | local}")


@pytest.mark.parametrize("strategy", ONE_SIDED)
def test_bfloat16(group, rank_device, strategy: str) -> None:
    if rank_device.type != "cuda":
        pytest.skip("needs a CUDA device")
    heads = 4 * dist.get_world_size()
    q, k, v = (x.bfloat16() for x in make(rank_device, 3, heads, 2, 1, 300, 128))
    lens = lengths([300, 7, 120], rank_device)
    shards = [sharded(x, rank_map(16)) for x in (k, v)]
    for head_sharded in (False, True):
        found = call(strategy, q, *shards, lens, group, kv_block=16, head_sharded=head_sharded)
        expect_by_rule(found, q, k, v, lens, head_sharded)


class TestRanksThatDiffer:
    """They are told so before anything is sent: at the first call of a kind, and in checked mode at every one."""

    @pytest.fixture
    def good(self, group: str, rank_device: torch.device) -> dict:
        q, k, v = make(rank_device, 1, 2, 1, 1, 8, 16)
        names = dict(strategy="fused", kv_block=1)
        return (
            dict(q=q, k_shard=k, v_shard=v, kv_lens=lengths([8], rank_device), group=group) | names
        )

    @staticmethod
    def odd(name: str, good: dict) -> dict:
        if name == "shape":
            return dict(q=good["q"].repeat(1, 2, 1, 1))
        if name == "dtype":
            return {x: good[x].half() for x in ("q", "k_shard", "v_shard")}
        return dict(strategy="push_tiled")

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("shape", r"q's shape must be .* got \(1, 2, 1, 16\) on rank 0, \(1, 4, 1, 16\) on rank 1"),
            ("dtype", r"the dtype must be .* got torch\.float32 on rank 0, torch\.float16 on rank 1"),
            ("strategy", "strategy must be .* got fused on rank 0, push_tiled on rank 1"),
        ],
    )  # fmt: skip
    @pytest.mark.parametrize("seen", [False, True])
    def test_they_are_told(self, good: dict, monkeypatch, name: str, text: str, seen: bool) -> None:
        odd = self.odd(name, good)
        if seen:
            monkeypatch.setattr(checks, "CHECK_VALUES", True)
            for call in ({}, odd):
                decode(**good | call)
        else:  # a kind of call that no rank has made yet
            scale = 0.25 + 0.125 * ("shape", "dtype", "strategy").index(name)
            good = good | dict(scale=scale)
        with pytest.raises(ValueError, match=text):
            decode(**good | (odd if dist.get_rank() == 1 else {}))
        decode(**good)  # the group goes on
        check()
