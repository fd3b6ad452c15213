"""The strategies of `dist.decode` on the group's collectives: all features of decode, by every way of sharding."""

from __future__ import annotations

import logging
import random

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import torch_fdattn
from tests.dist.test_decode import make, rank_map, sharded
from torch_fdattn.dist import chosen_strategy, decode
from torch_fdattn.dist.decode.auto import FUSED_ROWS, choose
from torch_fdattn.ops.library import launches

PORTABLE = ("all_gather", "star", "ring", "hierarchical")


def by(strategy: str, hierarchies: list[tuple[str, str]], draw: int = 0) -> dict:
    """The options that name a strategy."""
    if strategy != "hierarchical":
        return {"strategy": strategy}
    return {"strategy": strategy, "hierarchy": hierarchies[draw % len(hierarchies)]}


def paged(x: Tensor, page: int, table: Tensor) -> Tensor:
    """A shard (B, H, N, D) as pages behind a table (B, pages a sequence); no other page is written."""
    batch, heads, length, dim = x.shape
    pages = x.new_full((table.numel() + 1, heads, page, dim), 3.0)
    filled = x.new_zeros(batch, heads, table.shape[1] * page, dim)
    filled[:, :, :length] = x
    pages[table.long()] = filled.unflatten(2, (-1, page)).transpose(1, 2)
    return pages


def drawn_table(rng: random.Random, batch: int, slots: int, page: int, device) -> Tensor:
    columns = -(-slots // page)
    order = list(range(batch * columns))
    rng.shuffle(order)
    return torch.tensor(order, dtype=torch.int32, device=device).view(batch, columns)


def quantised(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x * 20).round().clamp(-127, 127).to(dtype)


def expect_equal(found, expected, head_sharded: bool, draw: str) -> None:
    """As one process, and the same bits on every rank."""
    if head_sharded:
        expected = [x.chunk(dist.get_world_size(), 1)[dist.get_rank()] for x in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, msg=lambda m: f"{draw}: {m}")
        if not head_sharded:
            everywhere = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
            dist.all_gather(everywhere, ours)
            assert all(torch.equal(part, ours) for part in everywhere), draw


def drawn_call(rng: random.Random, device: torch.device):
    """(whole q, k, v, lens), the options of both calls, and this rank's shards with their options."""
    world = dist.get_world_size()
    plain = rng.random() < 0.2  # a chunk of a prompt
    length, kv_heads, batch = rng.randint(1, 70), rng.choice([1, 2]), 2
    heads = kv_heads * rng.choice([1, 3, 4])
    new = rng.randint(17, 24) if plain else min(rng.choice([1, 1, 2, 16]), length)
    q, k, v = make(device, batch, heads, kv_heads, new, length, rng.choice([16, 40]))
    lens = torch.tensor([length, rng.randint(0, length)], dtype=torch.int32, device=device)
    both = dict(window=rng.choice([None, (rng.randint(0, 30), 0)]), scale=rng.choice([None, 0.3]))
    if not plain:
        both["batch_invariant"] = rng.random() < 0.3
        both["softcap"] = rng.choice([0.0, 5.0])
        if rng.random() < 0.3:
            both["alibi_slopes"] = torch.rand(heads, device=device)
        if rng.random() < 0.4:
            both["sinks"] = torch.randn(heads, device=device)
        if rng.random() < 0.3:
            v = torch.randn(batch, kv_heads, length, 24, device=device)
        if rng.random() < 0.4:
            dtype = rng.choice([torch.int8, torch.float8_e4m3fn])
            k, v = quantised(k, dtype), quantised(v, dtype)
            both["k_scale"], both["v_scale"] = torch.rand(2, 1, kv_heads, 1, device=device) / 10
    local = {}
    if rng.random() < 0.3:  # uneven runs, of which the last is empty
        cuts = sorted(rng.randint(0, length) for _ in range(world - 1))
        begin, end = [0, *cuts][dist.get_rank()], [*cuts, length][dist.get_rank()]
        k_shard, v_shard = k[:, :, begin:end], v[:, :, begin:end]
        local["kv_start"] = torch.full_like(lens, begin)
    else:
        local["kv_block"] = rng.choice([1, 3, 16, 40])
        k_shard, v_shard = (sharded(x, rank_map(local["kv_block"])) for x in (k, v))
    if not plain and rng.random() < 0.4:
        page = rng.choice([1, 4, 16]) if "kv_block" in local else 1  # a run ends with its last page
        local["page_table"] = drawn_table(rng, batch, k_shard.shape[2], page, device)
        k_shard, v_shard = (
            paged(x.float(), page, local["page_table"]).to(x.dtype) for x in (k_shard, v_shard)
        )
    return (q, k, v, lens), both, (k_shard, v_shard), local


@pytest.mark.parametrize("strategy", PORTABLE)
@pytest.mark.parametrize("seed", range(24))
def test_equals_one_process(group, rank_device, hierarchies, strategy: str, seed: int) -> None:
    rng = random.Random(seed)
    (q, k, v, lens), both, shards, local = drawn_call(rng, rank_device)
    head_sharded = q.shape[1] % dist.get_world_size() == 0 and seed % 3 == 0
    one_process = torch_fdattn.decode if q.shape[2] <= 16 else torch_fdattn.attention
    expected = one_process(q, k, v, lens, causal=True, **both)
    options = both | local | by(strategy, hierarchies, seed)
    found = decode(q, *shards, lens, group, head_sharded=head_sharded, **options)
    expect_equal(found, expected, head_sharded, f"{options}")


@pytest.mark.parametrize("strategy", PORTABLE)
def test_block_sharding_of_pages(group, rank_device, hierarchies, strategy: str) -> None:
    """Where a rank's keys stand follows from the capacity of its page table; all but rank 0 are empty."""
    rng, world, page, columns = random.Random(0), dist.get_world_size(), 4, 3
    capacity = page * columns
    q, k, v = make(rank_device, 2, 4, 2, 2, world * capacity, 16)
    part = slice(dist.get_rank() * capacity, (dist.get_rank() + 1) * capacity)
    table = drawn_table(rng, 2, capacity, page, rank_device)
    pages = [paged(x[:, :, part], page, table) for x in (k, v)]
    for lengths in ([5, 2], [world * capacity, 13]):
        lens = torch.tensor(lengths, dtype=torch.int32, device=rank_device)
        expected = torch_fdattn.decode(q, k, v, lens)
        found = decode(q, *pages, lens, group, page_table=table, **by(strategy, hierarchies))
        expect_equal(found, expected, False, strategy)


@pytest.mark.parametrize("strategy", PORTABLE)
def test_sinks_count_once_where_no_rank_has_a_key(
    group, rank_device, hierarchies, strategy
) -> None:
    q, k, v = make(rank_device, 2, 4, 2, 1, 4, 16)
    lens = torch.zeros(2, dtype=torch.int32, device=rank_device)
    sinks = torch.randn(4, device=rank_device)
    out, lse = decode(q, k, v, lens, group, sinks=sinks, **by(strategy, hierarchies))
    assert not out.any()
    torch.testing.assert_close(lse, sinks[None, :, None].expand_as(lse))
    out, lse = decode(q, k, v, lens, group, **by(strategy, hierarchies))
    assert not out.any()
    assert (lse == float("-inf")).all()


@pytest.mark.parametrize("strategy", PORTABLE)
def test_gradients_do_not_depend_on_the_strategy(group, rank_device, hierarchies, strategy) -> None:
    q, k, v = make(rank_device, 1, 4, 2, 2, 20, 16)
    lens = torch.tensor([20], dtype=torch.int32, device=rank_device)
    k, v = (sharded(x, rank_map(3)) for x in (k, v))
    found = []
    for options in ({}, by(strategy, hierarchies, 1)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out, _ = decode(*inputs, lens, group, kv_block=3, **options)
        found.append(torch.autograd.grad(out.sin().sum(), inputs))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("strategy", ["auto", *PORTABLE])
def test_traces_without_a_graph_break(group, rank_device, hierarchies, strategy) -> None:
    torch._dynamo.reset()
    q, k, v = make(rank_device, 1, 4, 2, 1, 24, 16)
    lens = torch.tensor([24], dtype=torch.int32, device=rank_device)
    sinks = torch.randn(4, device=rank_device)
    expected = torch_fdattn.decode(q, k, v, lens, sinks=sinks)
    k, v = (sharded(x, rank_map(3)) for x in (k, v))
    options = dict(kv_block=3, sinks=sinks, **by(strategy, hierarchies, 1))

    def call(q: Tensor) -> tuple[Tensor, Tensor]:
        return decode(q, k, v, lens, group, **options)

    for head_sharded in (False, True) if 4 % dist.get_world_size() == 0 else (False,):
        options["head_sharded"] = head_sharded
        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        expect_equal(compiled(q), expected, head_sharded, strategy)


@pytest.mark.parametrize("strategy", PORTABLE)
def test_half_precision_and_no_queries(group, rank_device, hierarchies, strategy) -> None:
    """Rounded to the output's dtype once, after the merge; and no tokens at all."""
    q, k, v = make(rank_device, 2, 4, 2, 1, 30, 16)
    lens = torch.tensor([30, 17], dtype=torch.int32, device=rank_device)
    q, k, v = (x.half() for x in (q, k, v))
    options = by(strategy, hierarchies)
    shards = [sharded(x, rank_map(4)) for x in (k, v)]
    out, lse = decode(q, *shards, lens, group, kv_block=4, **options)
    exact, _ = torch_fdattn.decode(q.float(), k.float(), v.float(), lens)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    torch.testing.assert_close(out.float(), exact, atol=1e-3, rtol=1e-3)
    out, lse = decode(q[:, :, :0], *shards, lens, group, kv_block=4, **options)
    assert (out.shape, lse.shape) == ((2, 4, 0, 16), (2, 4, 0))


class TestAuto:
    @pytest.mark.parametrize(
        ("rows", "world", "one_sided", "head_sharded", "chosen"),
        [
            (64, 1, True, False, "none"),
            (64, 4, False, False, "all_gather"),
            (FUSED_ROWS, 4, True, False, "fused"),
            (FUSED_ROWS + 1, 4, True, False, "two_shot"),
            (FUSED_ROWS + 1, 4, True, True, "fused"),
        ],
    )
    def test_crossovers(self, rows, world, one_sided, head_sharded, chosen) -> None:
        assert choose(rows, world, one_sided, head_sharded) == chosen

    def test_says_what_it_picks(self, group, rank_device, caplog) -> None:
        q, k, v = make(rank_device, 1, 4, 2, 1, 8, 16)
        lens = torch.tensor([8], dtype=torch.int32, device=rank_device)
        chosen = chosen_strategy(q, group)
        if dist.get_world_size() == 1:
            assert chosen == "none"
        elif rank_device.type == "cpu":
            assert chosen == "all_gather"
        before = launches[f"dist_decode/{chosen}"]
        with caplog.at_level(logging.DEBUG, logger="torch_fdattn"):
            decode(q, k, v, lens, group)
        assert launches[f"dist_decode/{chosen}"] == before + 1
        if chosen != "none":
            assert f"strategy {chosen} for 4 rows on" in caplog.text


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
                dict(strategy="hierarchical"),
                ValueError,
                "hierarchy must be the names of an inner and an outer group .* got None",
            ),
            (
                dict(hierarchy=("a", "b")),
                ValueError,
                r"hierarchy must be None with strategy='auto', got \('a', 'b'\)",
            ),
            (
                dict(strategy="hierarchical", hierarchy=("a", "b")),
                ValueError,
                "hierarchy must name a process group of this process, got 'a'",
            ),
            (dict(hierarchy="a"), TypeError, "hierarchy must be a pair of groups"),
            (dict(softcap=-1.0), ValueError, "softcap must be positive, or 0 for none, got -1.0"),
            (
                dict(sinks=torch.zeros(3)),
                ValueError,
                r"sinks must have shape \(4,\) like q's heads",
            ),
            (dict(sinks=[0.0]), TypeError, r"sinks must be a torch\.Tensor, got list"),
            (dict(k_scale=torch.ones(1)), ValueError, "k_scale must be None for an unquantised"),
            (
                dict(page_table=torch.zeros(2, dtype=torch.int32)),
                ValueError,
                r"page_table must have shape \(batch, pages a sequence\), got \(2,\)",
            ),
            (
                dict(page_table=torch.zeros(3, 1, dtype=torch.int32)),
                ValueError,
                r"page_table must have shape \(2, pages a sequence\) like q's batch, got \(3, 1\)",
            ),
        ],
    )
    def test_options(self, good: dict, wrong: dict, error: type, message: str) -> None:
        wrong = {
            name: x.to(good["q"].device) if isinstance(x, Tensor) else x
            for name, x in wrong.items()
        }
        with pytest.raises(error, match=message):
            decode(**good | wrong)

    def test_heads_that_do_not_divide(self, good: dict) -> None:
        world = dist.get_world_size()
        if world == 1:
            pytest.skip("needs 2 ranks")
        q = good["q"].new_zeros(2, world + 1, 1, 16)
        shards = {name: good[name][:, :1] for name in ("k_shard", "v_shard")}
        with pytest.raises(ValueError, match=rf"head_sharded must be False .* on {world} ranks"):
            decode(**good | shards | dict(q=q), head_sharded=True)

    @pytest.mark.parametrize("name", ["softcap", "sinks", "alibi_slopes", "page_table", "v"])
    def test_long_queries_know_attention_alone(self, good: dict, rank_device, name: str) -> None:
        heads = torch.zeros(4, device=rank_device)
        table = torch.zeros(2, 1, dtype=torch.int32, device=rank_device)
        options = {
            "softcap": dict(softcap=2.0), "sinks": dict(sinks=heads),
            "alibi_slopes": dict(alibi_slopes=heads), "page_table": dict(page_table=table),
            "v": dict(v_shard=torch.zeros(2, 2, 8, 32, device=rank_device)),
        }[name]  # fmt: skip
        q = torch.zeros(2, 4, 17, 16, device=rank_device)
        text = "different head dims of k_shard and v_shard" if name == "v" else name
        with pytest.raises(
            NotImplementedError, match=f"q must have 1 to 16 query tokens .* with {text}, got 17"
        ):
            decode(**good | dict(q=q) | options)

    @pytest.mark.parametrize("name", ["softcap", "sinks", "head_sharded"])
    def test_gradients_that_are_not_defined(self, good: dict, rank_device, name: str) -> None:
        if 4 % dist.get_world_size():
            pytest.skip("needs 2 ranks")
        value = {"softcap": 2.0, "sinks": torch.zeros(4, device=rank_device), "head_sharded": True}
        q = good["q"].requires_grad_()
        with pytest.raises(NotImplementedError, match=rf"dist\.decode has no gradient with {name}"):
            decode(**good | dict(q=q), **{name: value[name]})
        with torch.no_grad():
            decode(**good | dict(q=q), **{name: value[name]})

    @pytest.mark.parametrize(
        ("odd", "text"),
        [
            (dict(strategy="star"), "strategy must be the same"),
            (dict(head_sharded=True), "head_sharded must be the same"),
            (dict(softcap=3.0), "softcap must be the same"),
            (dict(sinks="heads"), "which of decode's tensors are given must be the same"),
            (dict(batch_invariant=True), "batch_invariant must be the same"),
        ],
    )
    def test_ranks_that_differ(self, good: dict, rank_device, monkeypatch, odd, text) -> None:
        if 4 % dist.get_world_size() or dist.get_world_size() == 1:
            pytest.skip("needs 2 ranks")
        monkeypatch.setattr(torch_fdattn.checks, "CHECK_VALUES", True)  # on GPUs too, every time
        if "sinks" in odd:
            odd = dict(sinks=torch.zeros(4, device=rank_device))
        with pytest.raises(ValueError, match=f"{text} on all ranks, got .* on rank 1"):
            decode(**good, **(odd if dist.get_rank() == 1 else {}))
        decode(**good)  # the group goes on

    def test_a_hierarchy_of_other_ranks(self, good: dict, group: str) -> None:
        if dist.get_world_size() == 1:
            pytest.skip("needs 2 ranks")
        with pytest.raises(ValueError, match="hierarchy must name groups of this rank's row and"):
            decode(**good, strategy="hierarchical", hierarchy=(group, group))
