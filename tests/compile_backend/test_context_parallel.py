"""Attention over sequences that are split over ranks: what becomes ring attention, and what is refused.

A group of two in one process, whose collectives do nothing: graphs alone are looked at. `tests/dist` has numbers.
"""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_fdattn
from tests.compile_backend.harness import qkv
from torch_fdattn.compile_backend import fdattn
from torch_fdattn.compile_backend.cache_key import CacheKey
from torch_fdattn.compile_backend.context_parallel.options import parse
from torch_fdattn.compile_backend.options import split
from torch_fdattn.compile_backend.report import Report, UnsupportedAttention
from torch_fdattn.compile_backend.rewrite import rewrite
from torch_fdattn.dist import SequenceShards

sdpa = F.scaled_dot_product_attention


@pytest.fixture(scope="module")
def group():
    if dist.is_initialized():
        pytest.skip("a process group exists")
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


def rewritten(fn, args, option) -> tuple[Report, str]:
    """The report, and the calls of the graph that the backend would lower."""
    found = []

    def backend(gm, inputs):
        report = rewrite(gm, context=parse(option))
        gm.graph.lint()
        found.append((report, gm.graph))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    ((report, graph),) = found
    calls = [n.format_node() for n in graph.nodes if n.op.startswith("call")]
    return report, "\n".join(re.sub(r"^(%\w+) : .*?= ", r"\1 = ", call) for call in calls)


def test_the_rewritten_graph(group):
    def fn(q, k, v):
        return sdpa(q, k, v, is_causal=True, enable_gqa=True)

    report, calls = rewritten(fn, qkv(8, kv_heads=2), {"group": group, "shards": "zigzag"})
    assert [site.op for site in report] == ["ring_attention"]
    assert_expected_inline(
        calls,
        """\
%ring_attention_default = call_function[target=torch.ops.fdattn.ring_attention.default](args = (%l_q_, %l_k_, %l_v_, 0, [2, 0, 0, 4, 0, 12, 4, 1, 4, 8]), kwargs = {causal: True, scale: None, rank: 0, world_size: 2, strategy: ring})
%getitem = call_function[target=operator.getitem](args = (%ring_attention_default, 0), kwargs = {})""",
    )


@pytest.mark.parametrize("kind", ["name", "group", "mesh", "dict", "default"])
def test_what_names_the_group(group, kind):
    option = {
        "name": group,
        "group": dist.group.WORLD,
        "mesh": DeviceMesh("cpu", [0, 1]),
        "default": {"group": None},
        "dict": {"group": dist.group.WORLD, "strategy": "all_gather"},
    }[kind]
    found = parse(option)
    assert (found.rank, found.world_size) == (0, 2)
    assert found.strategy == ("all_gather" if kind == "dict" else "ring")
    group_of = dist.distributed_c10d._resolve_process_group(found.group_name)
    assert dist.get_process_group_ranks(group_of) == [0, 1]


@pytest.mark.parametrize(
    ("option", "error", "text"),
    [
        (3, TypeError, "must be a process group, its name or .*, got int"),
        ({"group": 3}, TypeError, "must be a process group, its name or .*, got int"),
        ("no such", ValueError, "must name a process group of this process, got 'no such'"),
        ({}, ValueError, r'must have "group" .*, got \[\]'),
        ({"group": 0, "ring": 1}, ValueError, r"must have .*, got \['group', 'ring'\]"),
        ({"shards": "striped"}, ValueError, "shards must be 'contiguous', .*, got 'striped'"),
        ({"shards": 3}, ValueError, "shards must be 'contiguous', .*, got 3"),
        (
            {"shards": SequenceShards.zigzag(8, 3)},
            ValueError,
            "shards must be for the group's 2 ranks, got 3",
        ),
        ({"cache": "striped"}, ValueError, "cache must be 'contiguous' or the block .*'striped'"),
        ({"cache": True}, ValueError, "cache must be 'contiguous' or the block .*, got True"),
        ({"cache": 0}, ValueError, "cache must be 'contiguous' or the block .*, got 0"),
        ({"strategy": "query_split"}, ValueError, "strategy must be one of .*'query_split'"),
        (
            {"strategy": "ulysses_ring"},
            ValueError,
            "hierarchy must be a pair of groups .*, got None",
        ),
        (
            {"strategy": "ulysses_ring", "hierarchy": 3},
            TypeError,
            "hierarchy must be a pair .*, got 3",
        ),
        ({"hierarchy": ("a", "b")}, ValueError, "hierarchy must be None with strategy='ring'"),
        ({"strategy": "pigeon"}, ValueError, "strategy must be one of .*'pigeon'"),
        ({"cu_seqlens": [0, 2.5]}, TypeError, "cu_seqlens must be an integer tensor"),
        ({"cu_seqlens": torch.tensor([0, 8])}, TypeError, "must be a list of ints, got a tensor"),
        ({"cu_seqlens": [0, 8], "cache": 4}, ValueError, "must not have both cu_seqlens and cache"),
    ],
)
def test_bad_values(group, option, error, text):
    if isinstance(option, dict) and option and "group" not in option:
        option["group"] = group
    with pytest.raises(error, match=text) as raised:
        split({"context_parallel": option}, None)
    assert 'options["context_parallel"]' in str(raised.value)


def test_a_mesh_of_two_dimensions(group):
    with pytest.raises(
        ValueError, match=r"must be a DeviceMesh of one dimension .*, got 2 dimensions"
    ):
        parse(DeviceMesh("cpu", [[0, 1]]))


def test_written_out_without_a_mask(group):
    def fn(q, k, v):
        return (q @ k.mT / 4).softmax(-1) @ v

    report, calls = rewritten(fn, qkv(8), group)
    assert [site.op for site in report] == ["ring_attention"]
    assert "softmax" not in calls


def test_our_own_op(group):
    def fn(q, k, v):
        out, lse = torch_fdattn.attention(q, k, v, causal=True, window=(5, 0))
        return out, lse

    report, calls = rewritten(fn, qkv(8), {"group": group, "strategy": "all_gather"})
    assert str(report).endswith("torch_fdattn -> fdattn.ring_attention")
    assert_expected_inline(
        calls,
        """\
%ring_attention_default = call_function[target=torch.ops.fdattn.ring_attention.default](args = (%l_q_, %l_k_, %l_v_, 0, [2, 0, 0, 8, 1, 8, 8]), kwargs = {causal: True, window_left: 5, window_right: 0, scale: None, softcap: 0, alibi_slopes: None, sinks: None, dropout_p: 0, dropout_seed: None, rank: 0, world_size: 2, strategy: all_gather})
%out = call_function[target=operator.getitem](args = (%ring_attention_default, 0), kwargs = {})
%lse = call_function[target=operator.getitem](args = (%ring_attention_default, 1), kwargs = {})""",
    )


def test_a_softcap_goes_over_ranks(group):
    def fn(q, k, v):
        return (10 * (q @ k.mT / 40).tanh()).softmax(-1) @ v

    report, calls = rewritten(fn, qkv(8), {"group": group})
    assert str(report).endswith("-> fdattn.ring_attention (softcap 10)")
    assert "softcap: 10" in calls


def test_calls_that_speak_of_all_ranks_stay(group):
    def fn(q, k, v):
        out, _ = torch_fdattn.dist.ring_attention(q, k, v, group, causal=True)
        return out + torch_fdattn.dist.decode(q, k, v, lens(16), group)[0]

    report, calls = rewritten(fn, qkv(8, grad=False), group)
    assert not len(report)
    assert "fdattn.ring_attention" in calls
    assert "fdattn.dist_decode" in calls


def lens(n=8):
    return torch.full((2,), n, dtype=torch.int32)


REFUSED = {
    "got a mask of local tokens": lambda q, k, v: sdpa(q, k, v, torch.ones(8, 8, dtype=torch.bool).tril()),
    "dropout_p is 0.5": lambda q, k, v: sdpa(q, k, v, dropout_p=0.5),
    "or a cache": lambda q, k, v: sdpa(q[:, :, :1], k, v),
    "values of another head dim": lambda q, k, v: sdpa(q, k, torch.cat([v, v], -1)),
    "the softmax is over dimension": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "got kv_lens": lambda q, k, v: torch_fdattn.attention(q, k, v, lens())[0],
    "decode would see": lambda q, k, v: torch_fdattn.decode(q[:, :, :1], k, v, lens())[0],
    "decode_out would see": lambda q, k, v: torch_fdattn.decode(
        q, k, v, lens(), out=(torch.empty_like(q), q.new_empty(2, 4, 8))
    ),
    "holds its attention inside": lambda q, k, v: F.multi_head_attention_forward(
        *[x[0].transpose(0, 1).flatten(1) for x in (q, k, v)], 64, 4, torch.ones(192, 64),
        None, None, None, False, 0.0, torch.ones(64, 64), None, need_weights=False,
    )[0],
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(group, text):
    """By name and before anything runs; a dry run reports it alone."""
    options = {"context_parallel": group, "lower": "eager"}
    args = qkv(8, grad=False)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=text) as raised:
        torch.compile(REFUSED[text], backend=fdattn, options=options)(*args)
    assert isinstance(raised.value.inner_exception, UnsupportedAttention)
    assert "test_context_parallel.py:" in str(raised.value)
    torch._dynamo.reset()
    torch.compile(REFUSED[text], backend=fdattn, options={**options, "dryrun": True})(*args)


def test_a_mask_that_hides_nothing_locally_is_refused_too(group):
    """A window longer than the shard: over local tokens alone it cannot be told from no window."""

    def fn(q, k, v):
        i = torch.arange(8)
        return sdpa(q, k, v, i[:, None] - i < 16)

    options = {"context_parallel": group, "lower": "eager"}
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="got a mask of local tokens"):
        torch.compile(fn, backend=fdattn, options=options)(*qkv(8, grad=False))


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        (SequenceShards.contiguous(20, 2), "8 tokens where the shards of rank 0 have 10"),
        ("zigzag", "needs an even number of tokens on every rank, got 7"),
    ],
)
def test_shards_of_other_lengths(group, shards, text):
    args = qkv(8 if shards != "zigzag" else 7, grad=False)
    options = {"context_parallel": {"group": group, "shards": shards}, "lower": "eager"}
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=text):
        torch.compile(sdpa, backend=fdattn, options=options)(*args)


def over_cache(group, cache="contiguous"):
    return {"group": group, "cache": cache}


@pytest.mark.parametrize("cache", ["contiguous", 4])
def test_a_step_over_a_sharded_cache(group, cache):
    """Lengths and where queries start are those of whole sequences, as dist.decode takes them."""

    def fn(q, k, v):
        step = torch_fdattn.decode(q[:, :, :2], k, v, lens(), q_start=lens(6), softcap=20.0)
        return step[0] + torch_fdattn.attention(q, k, v, causal=True)[0][:, :, :2]

    report, calls = rewritten(fn, qkv(8, grad=False), over_cache(group, cache))
    assert [site.op for site in report] == ["dist_decode", "ring_attention"]
    (call,) = (x for x in calls.splitlines() if "target=torch.ops.fdattn.dist_decode" in x)
    block = "" if cache == "contiguous" else ", kv_block: 4"
    assert call.endswith(f"batch_invariant: False, rank: 0, world_size: 2{block}}})"), call


def test_a_step_over_pages(group):
    def fn(q, k, v):
        table = torch.arange(2, dtype=torch.int32)[:, None]
        return torch_fdattn.paged_decode(q[:, :, :1], k, v, table, lens())[0]

    report, calls = rewritten(fn, qkv(8, grad=False), over_cache(group, 4))
    assert [site.op for site in report] == ["dist_decode"]
    assert "page_table: %" in calls


@pytest.mark.parametrize("written_out", [False, True])
def test_a_step_that_sees_all_of_a_cache(group, written_out):
    def fn(q, k, v):
        return (q @ k.mT / 4).softmax(-1) @ v if written_out else sdpa(q, k, v, enable_gqa=True)

    report, calls = rewritten(
        fn, qkv(2, 24, kv_heads=4 if written_out else 2, grad=False), over_cache(group)
    )
    assert [site.op for site in report] == ["dist_decode"]
    assert_expected_inline(
        re.sub("scale: .*?, ", "", calls),
        """\
%full = call_function[target=torch.full](args = ((2,), 48), kwargs = {dtype: torch.int32, device: cpu})
%dist_decode_default = call_function[target=torch.ops.fdattn.dist_decode.default](args = (%l_q_, %l_k_, %l_v_, %full, 0), kwargs = {causal: False, rank: 0, world_size: 2})
%getitem = call_function[target=operator.getitem](args = (%dist_decode_default, 0), kwargs = {})""",
    )


STEPS_REFUSED = {
    "a mask or is_causal": lambda q, k, v: sdpa(q[:, :, :2], k, v, is_causal=True),
    "say lengths to torch_fdattn.decode": lambda q, k, v: sdpa(
        q[:, :, :1], k, v, (torch.arange(8) < lens()[:, None])[:, None, None]
    ),
    "few queries that want gradients, or over as many keys": lambda q, k, v: sdpa(q, k, v),
    "with no kv_lens": lambda q, k, v: torch_fdattn.decode(q, k, v)[0],
    "with kv_start": lambda q, k, v: torch_fdattn.decode(q, k, v, lens(), kv_start=lens())[0],
    "with attn_mask": lambda q, k, v: torch_fdattn.decode(q, k, v, lens(), attn_mask=q[0, 0, 0, :8])[0],
}  # fmt: skip


@pytest.mark.parametrize("text", STEPS_REFUSED)
def test_steps_that_are_refused(group, text):
    options = {"context_parallel": over_cache(group), "lower": "eager"}
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=text):
        torch.compile(STEPS_REFUSED[text], backend=fdattn, options=options)(*qkv(8, grad=False))


def test_a_symbolic_length_becomes_a_number(group):
    """The shards follow from it."""
    x = torch.randn(2, 4, 8, 16)
    torch._dynamo.maybe_mark_dynamic(x, 2)
    report, calls = rewritten(lambda x: sdpa(x, x, x), [x], group)
    assert [site.op for site in report] == ["ring_attention"]
    assert "[2, 0, 0, 8, 1, 8, 8]" in calls


def test_explain(group):
    layer = nn.Identity()
    report = torch_fdattn.explain(
        lambda x: layer(sdpa(x, x, x, is_causal=True)), context_parallel=group
    )(torch.randn(1, 2, 8, 16))
    assert str(report).endswith("scaled_dot_product_attention -> fdattn.ring_attention")


def test_the_cache_key_has_group_and_shards(group):
    keys = [
        CacheKey(split({"context_parallel": option}, None)[0]).uuid()
        for option in (
            None, group, {"group": group}, {"group": group, "shards": "zigzag"},
            {"group": group, "shards": SequenceShards.zigzag(8, 2)},
            {"group": group, "strategy": "star"}, over_cache(group), over_cache(group, 4),
        )
    ]  # fmt: skip
    assert keys[1] == keys[2]
    assert len({repr(key) for key in keys}) == 7


def test_the_layout_of_our_calls(group):
    """The entries' is views before the op, which a rewritten graph keeps; the op's own is refused by name."""
    inputs = [x.transpose(1, 2).contiguous() for x in qkv(8, grad=False)]

    def entry(q, k, v):
        return torch_fdattn.attention(q, k, v, causal=True, layout="bshd")[0]

    def op(q, k, v):
        return torch.ops.fdattn.attention(q, k, v, causal=True, layout="bshd")[0]

    report, _ = rewritten(entry, inputs, group)
    assert [site.op for site in report] == ["ring_attention"]
    report, _ = rewritten(op, inputs, group)
    (site,) = report.left
    assert 'layout="bshd"' in site.detail
