"""Softcap, ALiBi and sinks in `dist.ring_attention` against attention on one process."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

import torch_fdattn
from torch_fdattn.compile_backend import fdattn
from torch_fdattn.dist import SequenceShards, context_parallel, ring_attention, shard_batch

from .test_ring_attention import STRATEGIES, drawn_shards

FEATURES = ("softcap", "alibi_slopes", "sinks")


def drawn_options(rng: random.Random, heads: int, batch: int, device) -> dict[str, object]:
    """At least one feature; slopes of heads, or of sequences and heads, which are trained or not."""
    names = [x for x in FEATURES if rng.random() < 0.5] or [rng.choice(FEATURES)]
    sinks = torch.randn(heads)
    sinks[0] = -torch.inf
    made = {
        "softcap": 2.0,
        "alibi_slopes": torch.rand(*rng.choice([(), (batch,)]), heads)
        .to(device)
        .requires_grad_(rng.random() < 0.5),
        "sinks": sinks.to(device).requires_grad_(),
    }
    return {x: made[x] for x in names}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(8))
def test_drawn(group, rank_device, seed, strategy) -> None:
    rng = random.Random(f"scores {seed} {strategy}")
    torch.manual_seed(seed)
    world, rank = dist.get_world_size(), dist.get_rank()
    heads, total = 2 * world, rng.choice([7, 24, 61])
    shards = drawn_shards(rng, total, world)
    window = rng.choice([None, (min(rng.randint(0, 30), total), 0)])
    given = dict(causal=window is not None or rng.random() < 0.5, window=window)
    given |= drawn_options(rng, heads, 2, rank_device)
    trained = [x for x in given if isinstance(given[x], torch.Tensor) and given[x].requires_grad]
    inputs = [torch.randn(2, h, total, 16, device=rank_device) for h in (heads, world, world)]
    dout, dlse = torch.randn_like(inputs[0]), torch.randn_like(inputs[0][..., 0])
    wide = [x.double().cpu().requires_grad_() for x in inputs]
    exact_given = {
        x: y.detach().double().cpu() if isinstance(y, torch.Tensor) else y for x, y in given.items()
    }
    wide += [exact_given[x].requires_grad_() for x in trained]
    exact = torch_fdattn.attention(*wide[:3], **exact_given)
    exact_grads = torch.autograd.grad(exact, wide, [dout.double().cpu(), dlse.double().cpu()])

    own = [shards.shard(x, rank, 2).clone().requires_grad_() for x in inputs]
    if strategy == "query_split":
        own[1:] = [x.clone().requires_grad_() for x in inputs[1:]]
    found = ring_attention(*own, group, shards=shards, strategy=strategy, **given)
    leaves = [*own, *(given[x] for x in trained)]
    douts = [shards.shard(x, rank, 2) for x in (dout, dlse)]
    grads = list(torch.autograd.grad(found, leaves, douts))
    for grad in grads[3:]:
        dist.all_reduce(grad)
    # With query_split the gradients of K and V are whole on every rank.
    sharded = 3 if strategy == "query_split" else 5
    results = zip((*found, *grads), (*exact, *exact_grads), strict=True)
    for i, (value, right) in enumerate(results):
        right = right.detach() if i >= sharded else shards.shard(right.detach(), rank, 2)
        torch.testing.assert_close(value.double().cpu(), right, rtol=1e-5, atol=2e-5)


def test_half_precision_follows_one_process(group, rank_device) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(16 * world, world)
    inputs = [torch.randn(1, 4, 16 * world, 32, device=rank_device).bfloat16() for _ in range(3)]
    options = dict(causal=True, softcap=5.0, sinks=torch.randn(4, device=rank_device).bfloat16())
    exact = torch_fdattn.attention(*(x.double().cpu() for x in inputs), **options | {"sinks": options["sinks"].cpu()})  # fmt: skip
    for strategy in ("ring", "star"):
        out, lse = ring_attention(*(shards.shard(x, rank, 2) for x in inputs), group, shards=shards, strategy=strategy, **options)  # fmt: skip
        for value, right in zip((out, lse), exact, strict=True):
            torch.testing.assert_close(
                value.double().cpu(), shards.shard(right, rank, 2), rtol=8e-3, atol=8e-3
            )


def test_in_context_parallel_and_compiled(group, rank_device) -> None:
    """`torch_fdattn.attention` in a model, eager and by the compile backend."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(8 * world, world)
    inputs = [torch.randn(2, 4, 8 * world, 16, device=rank_device) for _ in range(3)]
    slopes, sinks = (torch.rand(4, device=rank_device) for _ in range(2))

    def layer(q, k, v):
        options = dict(causal=True, softcap=2.0, alibi_slopes=slopes, sinks=sinks)
        return torch_fdattn.attention(q, k, v, **options)[0]

    expected = shards.shard(layer(*inputs), rank, 2)
    own = shard_batch(group, shards, *inputs, dim=2)
    with context_parallel(group, shards=shards):
        torch.testing.assert_close(layer(*own), expected)
    torch._dynamo.reset()
    option = {"context_parallel": {"group": group, "shards": shards}, "lower": "aot_eager"}
    compiled = torch.compile(layer, backend=fdattn, fullgraph=True, options=option)
    torch.testing.assert_close(compiled(*own), expected)


def test_written_out_and_compiled(group, rank_device) -> None:
    """As models write capped scores and sinks without our ops."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.contiguous(8 * world, world)
    inputs = [torch.randn(2, 4, 8 * world, 16, device=rank_device) for _ in range(3)]
    sinks = torch.randn(4, device=rank_device, requires_grad=True)

    def layer(q, k, v, sinks):
        scores = 2.0 * torch.tanh(q @ k.mT * 0.25 / 2.0)
        column = sinks[None, :, None, None].expand(q.shape[0], -1, q.shape[2], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v

    whole = [x.clone().requires_grad_() for x in inputs]
    expected = layer(*whole, sinks)
    weights = torch.randn_like(expected)
    expected_grads = torch.autograd.grad((expected * weights).sum(), [*whole, sinks])
    torch._dynamo.reset()
    option = {"context_parallel": {"group": group, "shards": shards}, "lower": "aot_eager"}
    compiled = torch.compile(layer, backend=fdattn, fullgraph=True, options=option)
    own = [x.requires_grad_() for x in shard_batch(group, shards, *inputs, dim=2)]
    found = compiled(*own, sinks)
    grads = list(torch.autograd.grad((found * shards.shard(weights, rank, 2)).sum(), [*own, sinks]))
    dist.all_reduce(grads[3])
    torch.testing.assert_close(found, shards.shard(expected, rank, 2))
    for value, right in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(
            value, right if right.dim() == 1 else shards.shard(right, rank, 2)
        )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiles_with_gradients(group, rank_device, strategy) -> None:
    torch._dynamo.reset()
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(8 * world, world)
    inputs = [torch.randn(1, world, 8 * world, 16, device=rank_device) for _ in range(3)]
    own = [shards.shard(x, rank, 2).clone().requires_grad_() for x in inputs]
    if strategy == "query_split":
        own[1:] = [x.clone().requires_grad_() for x in inputs[1:]]
    slopes = torch.rand(world, device=rank_device)
    sinks = torch.randn(world, device=rank_device, requires_grad=True)

    def call(q, k, v, slopes, sinks):
        return ring_attention(
            q, k, v, group, shards=shards, causal=True, strategy=strategy, softcap=2.0, alibi_slopes=slopes,
            sinks=sinks,
        )  # fmt: skip

    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        outputs = function(*own, slopes, sinks)
        grads = torch.autograd.grad([x.sum() for x in outputs], [*own, sinks])
        results.append((*outputs, *grads))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])
def test_gradients_of_half_precision_are_summed_in_single(group, rank_device, strategy) -> None:
    """Of a mask of one number, whose gradient's parts cancel: each is beyond float16's largest number."""
    world, rank = dist.get_world_size(), dist.get_rank()
    total = 16 * world
    shards = SequenceShards.zigzag(total, world)
    inputs = [torch.randn(1, 2, total, 16, device=rank_device).half() for _ in range(3)]
    mask = torch.zeros(1, 1, 1, 1, device=rank_device, dtype=torch.float16, requires_grad=True)
    dlse = torch.full((1, 2, total), 1e4, device=rank_device)
    dlse[..., 1::2] *= -1
    lse = ring_attention(
        *(shards.shard(x, rank, 2) for x in inputs), group, shards=shards, strategy=strategy, causal=True, attn_mask=mask
    )[1]  # fmt: skip
    (grad,) = torch.autograd.grad(lse, mask, shards.shard(dlse, rank, 2))
    torch.testing.assert_close(grad.float(), torch.zeros_like(grad, dtype=torch.float32), rtol=0, atol=1.0)  # fmt: skip


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "query_split"])
@pytest.mark.parametrize("shape", [(2, 4, 1, 1), (1, 1, 0, 1), (1, 4, 0, 0), (2, 1, 1, 0)])
def test_gradient_of_a_mask(group, rank_device, shape, strategy) -> None:
    """shape: with 1 where the mask is broadcast, 0 for all rows or keys."""
    world, rank = dist.get_world_size(), dist.get_rank()
    total = 8 * world
    shards = SequenceShards.zigzag(total, world)
    inputs = [torch.randn(2, h, total, 16, device=rank_device) for h in (4, 2, 2)]
    mask = torch.randn(*(n or total for n in shape), device=rank_device)
    leaves = [x.requires_grad_() for x in (*inputs, mask)]
    expected = torch_fdattn.attention(*inputs, attn_mask=mask, causal=True, softcap=3.0)[0]
    weights = torch.randn_like(expected)
    expected_grads = torch.autograd.grad((expected * weights).sum(), leaves)
    own = [shards.shard(x.detach(), rank, 2).requires_grad_() for x in inputs]
    if strategy == "query_split":
        own[1:] = [x.detach().requires_grad_() for x in inputs[1:]]
    rows = mask.detach() if shape[2] == 1 else shards.shard(mask.detach(), rank, 2)
    rows = rows.clone().requires_grad_()
    found = ring_attention(*own, group, shards=shards, strategy=strategy, attn_mask=rows, causal=True, softcap=3.0)[0]  # fmt: skip
    (grad,) = torch.autograd.grad((found * shards.shard(weights, rank, 2)).sum(), rows)
    right = expected_grads[3]
    if shape[2] == 1:
        dist.all_reduce(grad)
    else:
        right = shards.shard(right, rank, 2)
    torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (dict(softcap=-1.0), ValueError, "softcap must be positive, or 0 for none, got -1.0"),
        (dict(sinks=torch.zeros(3)), ValueError, r"sinks must have shape \(2,\) like q's heads"),
        (dict(sinks=[0.0]), TypeError, r"sinks must be a torch\.Tensor, got list"),
        (dict(alibi_slopes=torch.rand(3)), ValueError, r"alibi_slopes must have shape \(2,\)"),
    ],
)  # fmt: skip
def test_wrong_calls(group, rank_device, options, kind, text) -> None:
    x = torch.randn(1, 2, 8, 16, device=rank_device)
    given = {
        name: y.detach().to(rank_device).requires_grad_(y.requires_grad) if isinstance(y, torch.Tensor) else y
        for name, y in options.items()
    }  # fmt: skip
    with pytest.raises(kind, match=text):
        ring_attention(x, x, x, group, **given)


@pytest.mark.parametrize("what", ["softcap", "sinks", "gradient"])
def test_ranks_that_disagree_are_named_on_every_rank(group, rank_device, what) -> None:
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    odd = dist.get_rank() == 1
    x = torch.randn(1, 2, 8, 16, device=rank_device)
    sinks = torch.zeros(2, device=rank_device, requires_grad=odd and what == "gradient")
    options = dict(scale=0.217, softcap=2.0 if odd and what == "softcap" else 3.0)  # of this test
    if what == "gradient" or (odd and what == "sinks"):
        options["sinks"] = sinks
    text = {
        "sinks": "which of alibi_slopes, sinks, kv_lens, attn_mask and dropout_seed are given",
        "gradient": "sinks",
    }.get(what, what)
    with pytest.raises(
        ValueError, match=rf"{text}.* must be the same on all ranks, got .* on rank 1"
    ):
        ring_attention(x, x, x, group, **options)
