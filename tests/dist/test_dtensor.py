"""A training step on DTensors, eager and compiled: batch- and head-sharded, out only, lse only, both."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torch_fdattn


def loss_of(which: str, out: Tensor, lse: Tensor) -> Tensor:
    if which == "out":
        return out.sin().sum()
    if which == "lse":
        return lse.cos().sum()
    return out.sin().sum() + lse.cos().sum()


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


@pytest.mark.parametrize(
    ("placement", "which", "compiled"),
    [
        *itertools.product([Replicate(), Shard(0), Shard(1)], ["out", "lse", "both"], [False]),
        (Shard(1), "both", True),
        *(
            pytest.param(placement, which, True, marks=pytest.mark.slow)
            for placement, which in (
                (Replicate(), "out"),
                (Shard(0), "out"),
                (Shard(0), "both"),
                (Shard(1), "lse"),
            )
        ),
    ],
    ids=str,
)
def test_attention_step(mesh, rank_device, placement, which: str, compiled: bool) -> None:
    torch._dynamo.reset()
    world = dist.get_world_size()
    shapes = [(2 * world, heads * world, 12, 16) for heads in (4, 2, 2)]
    plain = [torch.randn(shape, device=rank_device).requires_grad_() for shape in shapes]
    loss_of(which, *torch_fdattn.attention(*plain, causal=True)).backward()
    parts = [
        distribute_tensor(x.detach().clone(), mesh, [placement]).requires_grad_() for x in plain
    ]

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return loss_of(which, *torch_fdattn.attention(q, k, v, causal=True))

    full((torch.compile(step, fullgraph=True) if compiled else step)(*parts)).backward()
    for part, expected in zip(parts, plain, strict=True):
        assert part.grad.placements == (placement,)
        torch.testing.assert_close(part.grad.full_tensor(), expected.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("slopes", [False, True])
def test_packed_sequences_are_split_by_heads(mesh, rank_device, slopes: bool) -> None:
    """Never by tokens; replicated slopes are split with the heads."""
    world = dist.get_world_size()
    plain = [torch.randn(12, h * world, 16, device=rank_device).requires_grad_() for h in (2, 1, 1)]
    begins = torch.tensor([0, 5, 11], dtype=torch.int32, device=rank_device)
    given = [torch.rand(2 * world, device=rank_device)] * slopes
    whole = [begins, *given]
    mine = [distribute_tensor(x, mesh, [Replicate()]) for x in whole]
    parts = [
        distribute_tensor(x.detach().clone(), mesh, [Shard(1)]).requires_grad_() for x in plain
    ]
    for leaves, (cu_seqlens, *tensors) in ((plain, whole), (parts, mine)):
        named = dict(zip(("alibi_slopes",), tensors, strict=False))
        out, lse = torch_fdattn.varlen_attention(*leaves, cu_seqlens, causal=True, **named)
        loss = out.sin().sum() + lse.exp().sum()
        full(loss).backward()
    assert (out.placements, lse.placements) == ((Shard(1),), (Shard(0),))
    for part, expected in zip(parts, plain, strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), expected.grad, atol=1e-5, rtol=1e-4)


def test_groups_that_a_mesh_would_tear_are_replicated(mesh, rank_device) -> None:
    """9 query heads over 3 KV heads on 2 ranks: sharding heads would tear a group."""
    world = dist.get_world_size()
    kv_heads = world + 1
    q, k, v = (
        torch.randn(2, h, 5, 16, device=rank_device) for h in (3 * kv_heads, kv_heads, kv_heads)
    )
    parts = [distribute_tensor(x, mesh, [Shard(1)]) for x in (q, k, v)]
    out, lse = torch_fdattn.attention(*parts)
    expected, expected_lse = torch_fdattn.attention(q, k, v)
    torch.testing.assert_close(out.full_tensor(), expected)
    torch.testing.assert_close(lse.full_tensor(), expected_lse)


def as_partial(x: Tensor, mesh) -> DTensor:
    """x as a sum over the ranks of unequal parts."""
    share = (dist.get_rank() + 1) * 2 / (dist.get_world_size() * (dist.get_world_size() + 1))
    return DTensor.from_local(x * share, mesh, [Partial()] * mesh.ndim)


@pytest.mark.parametrize("op", [torch_fdattn.attention, torch_fdattn.decode])
@pytest.mark.parametrize("which", ["out", "lse", "both"])
@pytest.mark.parametrize("placement", [Replicate(), Shard(1)], ids=str)
def test_partial_gradients_tear_no_groups(mesh, rank_device, placement, which: str, op) -> None:
    """To reduce-scatter them over the heads is cheapest, and wrong where KV heads do not divide.

    A batch of 1, since to reduce-scatter them over the batch would be as cheap.
    """
    heads = dist.get_world_size() + 1
    shapes = [(1, 2 * heads * (heads - 1), 1, 16), (1, heads, 5, 16), (1, heads, 5, 16)]
    plain = [torch.randn(shape, device=rank_device).requires_grad_() for shape in shapes]
    parts = [
        distribute_tensor(x.detach().clone(), mesh, [placement]).requires_grad_() for x in plain
    ]
    results, expected = op(*parts), op(*plain)
    grads = [torch.randn_like(x) for x in expected]
    wanted = {"out": [0], "lse": [1], "both": [0, 1]}[which]
    torch.autograd.backward([expected[i] for i in wanted], [grads[i] for i in wanted])
    torch.autograd.backward(
        [results[i] for i in wanted], [as_partial(grads[i], mesh) for i in wanted]
    )
    for part, whole in zip(parts, plain, strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), whole.grad, atol=1e-5, rtol=1e-4)


def test_partial_inputs_tear_no_groups(mesh, rank_device) -> None:
    heads = dist.get_world_size() + 1
    q, k, v = (
        torch.randn(1, h, s, 16, device=rank_device)
        for h, s in ((2 * heads * (heads - 1), 1), (heads, 16), (heads, 16))
    )
    table = torch.zeros(1, 1, dtype=torch.int32, device=rank_device)
    placed_table = distribute_tensor(table, mesh, [Replicate()])
    lens = torch.full((1,), 16, dtype=torch.int32, device=rank_device)
    placed_lens = distribute_tensor(lens, mesh, [Replicate()])
    partial = [as_partial(x, mesh) for x in (q, k, v)]
    expected = torch_fdattn.attention(q, k, v)
    for results in (
        torch_fdattn.attention(*partial),
        torch_fdattn.decode(*partial),
        torch_fdattn.paged_decode(*partial, placed_table, placed_lens),
    ):
        for result, whole in zip(results, expected, strict=True):
            torch.testing.assert_close(result.full_tensor(), whole, atol=1e-5, rtol=1e-4)
    stacks = [torch.stack([x, 2 * x]) for x in expected]
    merged = torch_fdattn.merge_states(*(as_partial(x, mesh) for x in stacks))
    for result, whole in zip(merged, torch_fdattn.merge_states(*stacks), strict=True):
        torch.testing.assert_close(result.full_tensor(), whole, atol=1e-5, rtol=1e-4)


def test_batch_and_heads_over_a_mesh_of_two_dimensions(mesh, rank_device) -> None:
    """The dimension that splits the batch does not count against the heads."""
    world = dist.get_world_size()
    grid = init_device_mesh(rank_device.type, (world, 1), mesh_dim_names=("data", "heads"))
    plain = [torch.randn(world, h, 5, 16, device=rank_device).requires_grad_() for h in (2, 1, 1)]
    placed = [Shard(0), Shard(1)]
    parts = [distribute_tensor(x.detach().clone(), grid, placed).requires_grad_() for x in plain]
    results, expected = torch_fdattn.attention(*parts), torch_fdattn.attention(*plain)
    assert all(x.placements == tuple(placed) for x in results)
    grads = [torch.randn_like(x) for x in expected]
    torch.autograd.backward(expected, grads)
    torch.autograd.backward(results, [as_partial(x, grid) for x in grads])
    for part, whole in zip(parts, plain, strict=True):
        assert part.grad.placements == tuple(placed)
        torch.testing.assert_close(part.grad.full_tensor(), whole.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
def test_decode_and_merge(mesh, rank_device, placement) -> None:
    world = dist.get_world_size()
    q, k, v = (
        torch.randn(2 * world, h * world, s, 16, device=rank_device)
        for h, s in ((4, 1), (2, 9), (2, 9))
    )
    lens = torch.randint(1, 9, (2 * world,), dtype=torch.int32, device=rank_device)
    per_sequence = placement if placement == Shard(0) else Replicate()
    parts = [distribute_tensor(x, mesh, [placement]) for x in (q, k, v)]
    out, lse = torch_fdattn.decode(*parts, distribute_tensor(lens, mesh, [per_sequence]))
    expected, expected_lse = torch_fdattn.decode(q, k, v, lens)
    torch.testing.assert_close(out.full_tensor(), expected)
    outs, lses = torch.stack([out, out]), torch.stack([lse, lse])
    merged, merged_lse = torch_fdattn.merge_states(outs, lses)
    torch.testing.assert_close(merged.full_tensor(), expected)
    torch.testing.assert_close(
        merged_lse.full_tensor(), expected_lse + torch.log(torch.tensor(2.0))
    )


def append_arguments(world: int, device) -> dict[str, Tensor]:
    """A call of append_kv whose heads and batch divide among the ranks."""
    batch, heads, tokens = 2 * world, 2 * world, 3
    angles = torch.rand(20, 8, device=device)
    return dict(
        k_cache=torch.zeros(batch, heads, 20, 16, dtype=torch.int8, device=device),
        v_cache=torch.zeros(batch, heads, 20, 16, dtype=torch.int8, device=device),
        k=torch.randn(batch, heads, tokens, 16, device=device),
        v=torch.randn(batch, heads, tokens, 16, device=device),
        kv_lens=torch.randint(0, 17, (batch,), dtype=torch.int32, device=device),
        k_scale=torch.rand(heads, 1, device=device) + 0.01,
        v_scale=torch.rand(batch, heads, 20, device=device) + 0.01,
        q=torch.randn(batch, 3 * heads, tokens, 16, device=device),
        cos=angles.cos(),
        sin=angles.sin(),
    )


@pytest.mark.parametrize(
    ("op", "placement"),
    [
        (torch_fdattn.append_kv, Replicate()),
        (torch_fdattn.append_kv, Shard(0)),
        (torch_fdattn.append_kv, Shard(1)),
        (torch_fdattn.paged_append_kv, Replicate()),
        (torch_fdattn.paged_append_kv, Shard(1)),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_append_writes_into_the_shards(mesh, rank_device, op, placement) -> None:
    plain = append_arguments(dist.get_world_size(), rank_device)
    if op is torch_fdattn.paged_append_kv:
        batch = len(plain["kv_lens"])
        plain["page_table"] = torch.randperm(batch, device=rank_device).int()[:, None]
    placed = dict.fromkeys(plain, placement) | dict.fromkeys(
        ("cos", "sin", "page_table"), Replicate()
    )
    if placement == Shard(1):
        placed |= {"kv_lens": Replicate(), "k_scale": Shard(0)}
    elif placement == Shard(0):
        placed["k_scale"] = Replicate()
    parts = {name: distribute_tensor(x.clone(), mesh, [placed[name]]) for name, x in plain.items()}
    # distribute_tensor draws rank 0's numbers; the plain call takes the same.
    plain = {name: x.full_tensor().clone() for name, x in parts.items()}
    places = {name: parts[name].to_local().data_ptr() for name in ("k_cache", "v_cache", "q")}
    op(**plain)
    op(**parts)
    for name, place in places.items():
        assert parts[name].to_local().data_ptr() == place
        assert torch.equal(parts[name].full_tensor(), plain[name]), name


def test_append_into_caches_placed_otherwise_is_refused(mesh, rank_device) -> None:
    """To redistribute a cache would be to write into a copy."""
    plain = append_arguments(dist.get_world_size(), rank_device)
    parts = {name: distribute_tensor(x, mesh, [Replicate()]) for name, x in plain.items()}
    parts["v"] = distribute_tensor(plain["v"], mesh, [Shard(1)])
    with pytest.raises(Exception, match=r"v must be placed .*Replicate.* where k_cache is placed"):
        torch_fdattn.append_kv(**parts)
    for x in (parts["k_cache"], parts["v_cache"]):
        assert not x.full_tensor().any()
