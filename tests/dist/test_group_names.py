"""Every public entry takes a group as a name, as itself, as a DeviceMesh of one dimension, or by default."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import torch_fdattn
from torch_fdattn.compile_backend.context_parallel.options import OPTION, parse
from torch_fdattn.dist import (
    TPMLP,
    DistributedDecodeAttention,
    SequenceShards,
    ShardedKVCache,
    TPAttention,
    all_gather_matmul,
    chosen_strategy,
    context_parallel,
    decode,
    matmul_all_reduce,
    matmul_all_reduce_rms_norm,
    matmul_reduce_scatter,
    one_sided_all_gather,
    ring_attention,
    shard_batch,
    unshard_batch,
)
from torch_fdattn.dist.groups import name_of
from torch_fdattn.engine import LLM, PagedKVCache, SamplingParams
from torch_fdattn.models import ModelConfig, Transformer, parallelize

HEADS, KV_HEADS, HEAD_DIM, TOKENS = 8, 2, 16, 8  # heads, and rows of matmuls, for up to 8 ranks


def model(device) -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(
        architecture="llama", vocab_size=13, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, max_positions=32,
    )  # fmt: skip
    return Transformer(config).to(device).eval()


def tensors(device, *shapes: tuple[int, ...]) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device=device) for shape in shapes]


def qkv(device, queries: int = TOKENS) -> list[Tensor]:
    key = 1, KV_HEADS, TOKENS, HEAD_DIM
    return tensors(device, (1, HEADS, queries, HEAD_DIM), key, key)


def lens(device) -> Tensor:
    return torch.tensor([TOKENS], dtype=torch.int32, device=device)


def shards() -> SequenceShards:
    world = dist.get_world_size()
    return SequenceShards.contiguous(TOKENS * world, world)


def in_context(group, device) -> Tensor:
    q, k, v = qkv(device)
    with context_parallel(group, shards=shards()):
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def cache_of(kind: type, group, device) -> Tensor:
    q, k, v = qkv(device)
    sizes = 1, 1, KV_HEADS, 2 * TOKENS, HEAD_DIM
    cache = kind(*sizes, dtype=q.dtype, device=device, group=group)
    cache.append(0, k, v)
    return cache.attend(0, q)


def attention_over_a_cache(group, device) -> Tensor:
    q, k, v = qkv(device)
    sizes = 1, KV_HEADS, 2 * TOKENS, HEAD_DIM
    return DistributedDecodeAttention(*sizes, dtype=q.dtype, device=device, group=group)(q, k, v)


def engine(device, tensor_parallel: bool, **groups) -> Tensor:
    given = model(device)
    if tensor_parallel:
        parallelize(given, None)
    llm = LLM(given, pages=2, cuda_graph=False, **groups)
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, logprobs=0))
    listed = [entry.logprob for row in output.outputs[0].logprobs for entry in row.values()]
    return torch.tensor(listed)


def layer(kind: type, group, device) -> Tensor:
    block = model(device).layers[0]
    if kind is TPMLP:
        return TPMLP.from_module(block.mlp, group, "all_reduce")(*tensors(device, (1, 4, 32)))
    x, cos, sin = tensors(device, (1, 4, 32), (1, 1, 4, HEAD_DIM // 2), (1, 1, 4, HEAD_DIM // 2))
    return TPAttention.from_module(block.self_attn, group, "all_reduce")(x, cos, sin)


def one_sided(group, device) -> Tensor | str:
    """CPU tensors that are not interpreted have no such memory, whatever the group."""
    try:
        return one_sided_all_gather(*tensors(device, (4,)), group)
    except NotImplementedError as error:
        return str(error)


def explained(group, device) -> str:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    option = {"group": group, "shards": "contiguous"}
    return str(torch_fdattn.explain(attend, context_parallel=option)(*qkv(device)))


def matmul(entry: Callable, group, device, *more: tuple[int, ...]) -> object:
    x, weight, *others = tensors(device, (8, 8), (8, 8), *more)
    if entry is matmul_all_reduce_rms_norm:
        return entry(x, weight, group, *others, 1e-6)
    return entry(x, [weight] if entry is all_gather_matmul else weight, group)


#: What is called, and what errors call the group, with whether None is the default group.
ENTRIES = {
    "decode": (lambda g, d: decode(*qkv(d, 1), lens(d), g), "group", True),
    "chosen_strategy": (lambda g, d: chosen_strategy(qkv(d, 1)[0], g), "group", True),
    "one_sided_all_gather": (one_sided, "group", True),
    "ring_attention": (lambda g, d: ring_attention(*qkv(d), g), "group", True),
    "all_gather_matmul": (lambda g, d: matmul(all_gather_matmul, g, d), "group", True),
    "matmul_reduce_scatter": (lambda g, d: matmul(matmul_reduce_scatter, g, d), "group", True),
    "matmul_all_reduce": (lambda g, d: matmul(matmul_all_reduce, g, d), "group", True),
    "matmul_all_reduce_rms_norm": (
        lambda g, d: matmul(matmul_all_reduce_rms_norm, g, d, (8, 8), (8,)), "group", True,
    ),
    "shard_batch": (lambda g, d: shard_batch(g, shards(), *tensors(d, (1, shards().total))), "group", True),
    "unshard_batch": (lambda g, d: unshard_batch(g, shards(), *tensors(d, (1, TOKENS))), "group", True),
    "context_parallel": (in_context, "group", True),
    "ShardedKVCache": (lambda g, d: cache_of(ShardedKVCache, g, d), "group", False),
    "PagedKVCache": (lambda g, d: cache_of(PagedKVCache, g, d), "group", False),
    "DistributedDecodeAttention": (attention_over_a_cache, "group", False),
    "TPMLP": (lambda g, d: layer(TPMLP, g, d), "group", True),
    "TPAttention": (lambda g, d: layer(TPAttention, g, d), "group", True),
    "parallelize": (lambda g, d: parallelize(model(d), g)(torch.ones(1, 4, dtype=torch.long, device=d)), "mesh", True),
    "LLM, kv_group": (lambda g, d: engine(d, False, kv_group=g), "kv_group", False),
    "LLM, tp_group": (lambda g, d: engine(d, True, tp_group=g), "tp_group", False),
    "LLM, sync_group": (lambda g, d: engine(d, False, kv_group=dist.group.WORLD, sync_group=g), "sync_group", False),
    "backend": (lambda g, d: parse({"group": g})._asdict(), OPTION, True),
    "backend, alone": (lambda g, d: parse(g)._asdict(), OPTION, False),
    "explain": (explained, OPTION, True),
}  # fmt: skip
KINDS = "group", "mesh", "default"


def forms(group: str, mesh) -> dict[str, object]:
    return {"name": group, "group": dist.group.WORLD, "mesh": mesh, "default": None}


def entries(default: bool) -> list:
    return [
        pytest.param(kind, call, id=f"{name}-{kind}")
        for name, (call, _, by_default) in ENTRIES.items()
        for kind in KINDS
        if (kind == "default") == default and (by_default or not default)
    ]


@pytest.mark.parametrize(("kind", "call"), [*entries(False), *entries(True)])
def test_all_kinds_are_one_group(group, mesh, rank_device, kind: str, call: Callable) -> None:
    with torch.no_grad():
        expected, found = (call(forms(group, mesh)[k], rank_device) for k in ("name", kind))
    if isinstance(expected, (Tensor, tuple, list)):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    else:
        assert found == expected


@pytest.mark.parametrize("kind", KINDS[:2])
def test_check_takes_all_kinds(group, mesh, kind: str) -> None:
    torch_fdattn.dist.check(forms(group, mesh)[kind])


@pytest.mark.parametrize("kind", ["group", "mesh"])
def test_a_hierarchy_of_any_kind(group, rank_device, kind: str) -> None:
    names = "nodes", "places"
    mesh = init_device_mesh(rank_device.type, (1, dist.get_world_size()), mesh_dim_names=names)
    pair = tuple(mesh[name] for name in reversed(names))
    named = tuple(x.get_group().group_name for x in pair)
    given = pair if kind == "mesh" else tuple(x.get_group() for x in pair)
    q, k, v = qkv(rank_device, 1)
    expected, found = (
        decode(q, k, v, lens(rank_device), group, strategy="hierarchical", hierarchy=x)
        for x in (named, given)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["name", *KINDS])
def test_a_compiled_call(group, mesh, rank_device, kind: str) -> None:
    """The name stands in the graph, whatever was given."""
    torch._dynamo.reset()
    given = forms(group, mesh)[kind]
    q, k, v = qkv(rank_device, 1)

    def attend(q: Tensor, k: Tensor, v: Tensor, lens: Tensor) -> Tensor:
        return (
            decode(q, k, v, lens, given)[0] + ring_attention(q, k[:, :, :1], v[:, :, :1], given)[0]
        )

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    arguments = q, k, v, lens(rank_device)
    torch.testing.assert_close(compiled(*arguments), attend(*arguments))


WRONG = [
    pytest.param(call, argument, id=name)
    for name, (call, argument, _) in ENTRIES.items()
    if call is not one_sided  # whose tensors are refused first where nothing is interpreted
]


@pytest.mark.parametrize(("call", "argument"), WRONG)
def test_errors_name_the_argument(group, rank_device, call: Callable, argument: str) -> None:
    square = init_device_mesh(
        rank_device.type, (1, dist.get_world_size()), mesh_dim_names=("rows", "columns")
    )
    outsider = dist.GroupMember.NON_GROUP_MEMBER
    for wrong, error, text in (
        (3, TypeError, "must be a process group, its name or a DeviceMesh of one dimension, got int"),
        (square, ValueError, "must be a DeviceMesh of one dimension .*, got 2 dimensions: rows, columns"),
        (outsider, ValueError, "must be a process group that this process is in"),
        ("nosuch", ValueError, "must name a process group of this process, got 'nosuch'"),
    ):  # fmt: skip
        with pytest.raises(error) as raised:
            call(wrong, rank_device)
        said = str(raised.value)
        assert argument in said
        raised.match(text)


def test_the_default_group_needs_one(monkeypatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"group None, .* needs an initialised"):
        name_of(None)


def test_copies_of_a_mesh_are_one_group(group, mesh) -> None:
    assert name_of(copy.copy(mesh)) == name_of(mesh)
