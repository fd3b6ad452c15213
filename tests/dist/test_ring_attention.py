"""`dist.ring_attention` against attention on one process: strategies, shards, masks, gradients, compile."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import torch_fdattn
from torch_fdattn.dist import SequenceShards, ring_attention
from torch_fdattn.testing import AttentionCase, expected_attention

STRATEGIES = ("ring", "all_gather", "ulysses", "query_split", "star")
#: Draws; two ranks take more of them at once than many ranks on few processors.
DRAWN, QUICK = 200, 100 if os.environ.get("WORLD_SIZE") == "2" else 60
SEEDS = [pytest.param(x, marks=pytest.mark.slow if x >= QUICK else ()) for x in range(DRAWN)]


def drawn_shards(rng: random.Random, total: int, world: int) -> SequenceShards:
    """Even, zigzag, uneven, with empty shards, or any map of positions."""
    kind = rng.choice(["contiguous", "zigzag", "zigzag", "uneven", "empty", "any"])
    if kind == "contiguous":
        return SequenceShards.contiguous(total, world)
    if kind == "zigzag":
        return SequenceShards.zigzag(total, world)
    if kind == "any":
        blocks = list(range(0, total, rng.choice([5, 8])))
        size = blocks[1] if len(blocks) > 1 else total
        rng.shuffle(blocks)
        ranks = [
            [p for b in blocks[r::world] for p in range(b, min(b + size, total))]
            for r in range(world)
        ]
        return SequenceShards.from_positions(ranks)
    cuts = sorted(rng.randint(0, total) for _ in range(world - 1))
    if kind == "empty" and cuts:
        cuts[-1] = cuts[0] if world > 2 else total
        cuts.sort()
    edges = [0, *cuts, total]
    return SequenceShards.from_lengths([b - a for a, b in itertools.pairwise(edges)])


def run(group, shards, whole, douts, strategy, **options):
    """(out, lse, dq, dk, dv) of this rank's shard; dout or dlse None: that output is not used."""
    rank = dist.get_rank()
    q, k, v = (shards.shard(x, rank, 2).clone().requires_grad_() for x in whole)
    if strategy == "query_split":
        k, v = (x.clone().requires_grad_() for x in whole[1:])
    out, lse = ring_attention(q, k, v, group, shards=shards, strategy=strategy, **options)
    used = [
        (y, shards.shard(d, rank, 2))
        for y, d in zip((out, lse), douts, strict=True)
        if d is not None
    ]
    grads = torch.autograd.grad([y for y, _ in used], (q, k, v), [d for _, d in used])
    return out, lse, *grads


def joined(shards: SequenceShards, part: torch.Tensor) -> torch.Tensor:
    """The whole sequence of all ranks' parts."""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part.detach().cpu())
    return shards.join(parts, 2).to(part.device)


def assert_near(name: str, value: torch.Tensor, exact: torch.Tensor, largest: float) -> None:
    """Within 1e-5 of the largest value; the same rows empty."""
    empty = exact == float("-inf")
    assert torch.equal(value == float("-inf"), empty), name
    worst = max_abs((value.double() - exact.double()).masked_fill(empty, 0))
    assert worst <= 1e-5 * largest, f"{name}: {worst:.3g}, largest {largest:.3g}"


def max_abs(x: torch.Tensor) -> float:
    return x.abs().masked_fill(x == float("-inf"), 0).max().item() if x.numel() else 0.0


def draw(seed: int, world: int, device: str):
    """(case, shards, strategy, which outputs are used) of a seed, the same on all ranks."""
    rng = random.Random(f"ring {seed}")
    strategy = rng.choice(STRATEGIES)
    kv_heads, per_head = rng.choice([(1, 1), (2, 2), (3, 3), (1, 4), (3, 1)])
    if strategy == "ulysses":
        kv_heads = world * rng.choice([1, 1, 2])
    total = rng.choice([rng.randint(0, 12), rng.randint(20, 60), rng.randint(60, 100)])
    causal = rng.random() < 0.6
    window = None
    if rng.random() < 0.4:
        left = rng.choice([-1, 0, min(rng.randint(1, 40), total)])
        window = (left, -1 if causal else rng.choice([-1, 0, min(rng.randint(1, 30), total)]))
    dtypes = [torch.float32, torch.float32, torch.float16, torch.bfloat16]
    case = AttentionCase(
        seed, rng.choice([1, 2]), kv_heads * per_head, kv_heads, total, total, rng.choice([16, 32, 40]),
        rng.choice(dtypes), 16, causal=causal, window=window, scale=rng.choice([None, None, 0.3]),
    )  # fmt: skip
    # The error rule for 16 bits speaks of gradients from both outputs.
    which = "both" if case.dtype != torch.float32 else rng.choice(["out", "lse", "both"])
    return case, drawn_shards(rng, total, world), strategy, which


@pytest.mark.parametrize("seed", SEEDS)
def test_drawn(group, rank_device, seed) -> None:
    case, shards, strategy, which = draw(seed, dist.get_world_size(), rank_device.type)
    whole = case.inputs(rank_device)
    dout, dlse = case.output_gradients(rank_device)
    used = (dout if which != "lse" else None, dlse if which != "out" else None)
    options = dict(causal=case.causal, window=case.window, scale=case.scale)
    out, lse, *grads = run(group, shards, whole, used, strategy, **options)
    found = [joined(shards, x) for x in (out, lse, grads[0])]
    # With query_split every rank already holds the whole gradients of K and V.
    found += [x if strategy == "query_split" else joined(shards, x) for x in grads[1:]]
    names = ("out", "lse", "dq", "dk", "dv")
    if case.dtype == torch.float32:
        inputs = [x.double().cpu().requires_grad_() for x in whole]
        exact = torch_fdattn.attention(*inputs, **options)
        pairs = [(y, d) for y, d in zip(exact, used, strict=True) if d is not None]
        exact += torch.autograd.grad(
            [y for y, _ in pairs], inputs, [d.double().cpu() for _, d in pairs]
        )
        # Gradients share their largest value: where a row sees one key, dq is a difference of equals.
        gradient = max(max_abs(x) for x in exact[2:])
        scales = [*(max(max_abs(x), 1e-3) for x in exact[:2]), *3 * [max(gradient, 1e-3)]]
        for name, value, right, largest in zip(names, found, exact, scales, strict=True):
            assert_near(name, value.cpu(), right.detach(), largest)
    else:
        results = dict(zip(names, found, strict=True))
        expected_attention(case, str(rank_device)).check(results.pop("lse"), **results)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_same_bits_on_every_run(group, rank_device, strategy) -> None:
    world = dist.get_world_size()
    whole = [torch.randn(2, 2 * world, 16 * world, 32, device=rank_device) for _ in range(3)]
    used = (torch.randn_like(whole[0]), torch.randn(whole[0].shape[:-1], device=rank_device))
    shards = SequenceShards.zigzag(16 * world, world)
    runs = [run(group, shards, whole, used, strategy, causal=True) for _ in range(3)]
    for first, *others in zip(*runs, strict=True):
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("strategy", "backend"),
    [
        *((s, "aot_eager") for s in STRATEGIES),
        *(pytest.param(s, "inductor", marks=pytest.mark.slow) for s in ("all_gather", "ring")),
    ],
)
def test_compiles_into_one_graph(group, rank_device, strategy, backend) -> None:
    torch._dynamo.reset()
    world = dist.get_world_size()
    whole = [torch.randn(1, world, 8 * world, 16, device=rank_device) for _ in range(3)]
    used = (torch.randn_like(whole[0]), torch.randn(whole[0].shape[:-1], device=rank_device))
    shards = SequenceShards.zigzag(8 * world, world)
    eager = run(group, shards, whole, used, strategy, causal=True)
    rank = dist.get_rank()
    q, k, v = (shards.shard(x, rank, 2).clone().requires_grad_() for x in whole)
    if strategy == "query_split":
        k, v = (x.clone().requires_grad_() for x in whole[1:])

    @torch.compile(fullgraph=True, backend=backend)
    def call(q, k, v):
        return ring_attention(q, k, v, group, shards=shards, causal=True, strategy=strategy)

    out, lse = call(q, k, v)
    douts = [shards.shard(d, rank, 2) for d in used]
    grads = torch.autograd.grad((out, lse), (q, k, v), douts)
    for a, b in zip(eager, (out, lse, *grads), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_result_lies_as_on_one_rank(group, rank_device, strategy, grad) -> None:
    """In q's order of memory: models take a view of it."""
    world = dist.get_world_size()
    x = torch.randn(2, 4, 2 * world, 16, device=rank_device, requires_grad=grad).transpose(1, 2)
    keys = x.repeat(1, 1, world, 1) if strategy == "query_split" else x
    out, lse = ring_attention(x, keys, keys, group, strategy=strategy)
    assert out.stride() == x.stride()
    assert lse.is_contiguous()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_may_use_different_outputs(group, rank_device, strategy) -> None:
    """Rank 1's loss takes lse alone, others' out or both: no rank waits for another."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shards = SequenceShards.zigzag(8 * world, world)
    whole = [torch.randn(1, world, 8 * world, 16, device=rank_device) for _ in range(3)]

    def loss(out, lse, r):
        return (out.sum() if r != 1 else 0) + (lse.sum() if r < 2 else 0)

    q, k, v = (shards.shard(x, rank, 2).clone().requires_grad_() for x in whole)
    if strategy == "query_split":
        k, v = (x.clone().requires_grad_() for x in whole[1:])
    outputs = ring_attention(q, k, v, group, shards=shards, causal=True, strategy=strategy)
    grads = torch.autograd.grad(loss(*outputs, rank), (q, k, v))
    inputs = [x.clone().requires_grad_() for x in whole]
    exact = torch_fdattn.attention(*inputs, causal=True)
    total = sum(loss(*(shards.shard(y, r, 2) for y in exact), r) for r in range(world))
    for found, right in zip(grads, torch.autograd.grad(total, inputs), strict=True):
        own = right if found.shape == right.shape else shards.shard(right, rank, 2)
        torch.testing.assert_close(found, own)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_alone(group, rank_device, strategy) -> None:
    """A group in which nothing is split, on each rank."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    alone = groups[dist.get_rank()].group_name
    whole = [torch.randn(1, 2, 12, 16, device=rank_device, requires_grad=True) for _ in range(3)]
    shards = SequenceShards.from_positions([[3, 4, 5, 0, 1, 2, *range(6, 12)]])
    dout, dlse = torch.randn(1, 2, 12, 16), torch.randn(1, 2, 12)
    results = []
    for run, take in (
        (
            lambda *x: ring_attention(*x, alone, shards=shards, causal=True, strategy=strategy),
            lambda x: shards.shard(x, 0, 2),
        ),
        (lambda *x: torch_fdattn.attention(*x, causal=True), lambda x: x),
    ):
        keys = whole[1:] if strategy == "query_split" else map(take, whole[1:])
        outputs = run(take(whole[0]), *keys)
        grads = torch.autograd.grad(outputs, whole, [take(x.to(rank_device)) for x in (dout, dlse)])
        results.append((*outputs, *grads))
    out, lse, *grads = results[1]
    expected = shards.shard(out, 0, 2), shards.shard(lse, 0, 2), *grads
    torch.testing.assert_close(results[0], expected)
    for each in groups:
        dist.destroy_process_group(each)


def test_shards_by_name(group, rank_device) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    whole = [torch.randn(1, 2, 8 * world, 16, device=rank_device) for _ in range(3)]
    exact = torch_fdattn.attention(*whole, causal=True)[0]
    for name, shards in (
        ("contiguous", SequenceShards.contiguous(8 * world, world)),
        ("zigzag", SequenceShards.zigzag(8 * world, world)),
    ):
        part = [shards.shard(x, rank, 2) for x in whole]
        out, _ = ring_attention(*part, group, shards=name, causal=True)
        torch.testing.assert_close(out, shards.shard(exact, rank, 2))


def test_autocast_casts_q_k_v(group, rank_device) -> None:
    x = torch.randn(1, 2, 8, 16, device=rank_device)
    with torch.autocast(rank_device.type, torch.bfloat16):
        out, lse = ring_attention(x, x, x, group)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def wrong_calls(world: int):
    """(changes to the call, the error's type and text); every one raises on every rank."""
    odd = torch.randn(1, world + 1, 8, 16)
    return [
        (dict(strategy="star2"), ValueError, "strategy must be one of .*got 'star2'"),
        (dict(shards="striped"), ValueError, "shards must be 'contiguous', 'zigzag'.*got 'striped'"),
        (dict(shards=SequenceShards.contiguous(8, world + 1)), ValueError, "shards must be for the group's"),
        (dict(shards=SequenceShards.contiguous(9 * world, world)), ValueError, "q must have 9 tokens on rank"),
        (dict(group="nobody"), ValueError, "group must name a process group"),
        (dict(group=3), TypeError, "group must be a process group, its name or"),
        (dict(scale=-1.0), ValueError, "scale must be a positive"),
        (dict(window=(-2, 0)), ValueError, "window must be"),
        (dict(k=torch.randn(1, 2, 7, 16), v=torch.randn(1, 2, 7, 16)), ValueError, "k must have 8 tokens on rank"),
        (dict(q=torch.randn(1, 2, 7, 16), shards="zigzag"), ValueError, "even number of tokens"),
        (dict(q=torch.randn(2, 8, 16)), ValueError, "q must"),
        (dict(k=torch.randn(1, 2, 8, 16).double()), TypeError, "k must have dtype"),
        (dict(strategy="query_split", k=torch.randn(1, 2, 3, 16), v=torch.randn(1, 2, 3, 16)), ValueError,
         "k must have .* tokens on rank"),
        *([(dict(q=odd, k=odd, v=odd, strategy="ulysses"), ValueError, "divisible by the")] * (world > 1)),
    ]  # fmt: skip


def test_wrong_calls_before_any_communication(group, rank_device) -> None:
    x = torch.randn(1, 2, 8, 16)
    world = dist.get_world_size()
    overlapping = [world, *(number for r in range(world) for number in (r, 0, 8))]
    if world > 1:
        with pytest.raises(ValueError, match="shards must hold each position"):
            torch.ops.fdattn.ring_attention(*3 * [x.to(rank_device)], group, overlapping)
    for changes, kind, text in wrong_calls(dist.get_world_size()):
        arguments = dict(q=x, k=x, v=x, group=group) | changes
        arguments = {
            name: value.to(rank_device) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }
        with pytest.raises(kind, match=text):
            ring_attention(**arguments)


@pytest.mark.parametrize("what", ["heads", "dtype", "causal", "shards", "strategy"])
def test_disagreeing_ranks_are_named_on_every_rank(group, rank_device, what) -> None:
    if dist.get_world_size() == 1:
        pytest.skip("needs 2 ranks")
    odd = dist.get_rank() == 1
    q = torch.randn(1, 4 if odd and what == "heads" else 2, 24, 16, device=rank_device)
    if odd and what == "dtype":
        q = q.half()
    options = dict(
        causal=odd and what == "causal",
        shards="zigzag" if odd and what == "shards" else "contiguous",
        strategy="all_gather" if odd and what == "strategy" else "ring",
        scale=0.123,  # a signature that no other test has
    )
    text = {"heads": "heads and head dim", "causal": "causal and window"}.get(what, what)
    with pytest.raises(
        ValueError, match=rf"{text}.* must be the same on all ranks, got .* on rank 1"
    ):
        ring_attention(q, q, q, group, **options)


class _LiveTensors(TorchDispatchMode):
    """How many tensors with `heads` heads, besides those given, are alive at most, by their number of dims.

    Tensors of a kernel's inside do not count: the mode sees ops, not what they are made of.
    """

    def __init__(self, heads: int, *given: torch.Tensor) -> None:
        super().__init__()
        self._heads, self.most = heads, Counter()
        self._given = {x.untyped_storage()._cdata for x in given}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.dim() in (4, 5) and x.shape[-3] == self._heads:
                storage = x.untyped_storage()
                if storage._cdata not in self._given:
                    found = (StorageWeakRef(storage), x.dim())
                    self._alive.setdefault(storage._cdata, found)  # views keep their base's dims
        self._alive = {key: found for key, found in self._alive.items() if not found[0].expired()}
        self.most |= Counter(dims for _, dims in self._alive.values())
        return out


@pytest.mark.parametrize("heads_first", [True, False])
def test_ring_holds_two_blocks_besides_its_own(group, rank_device, heads_first) -> None:
    """Whatever the number of ranks: K and V of two blocks, and in the backward three sums of gradients."""
    world = dist.get_world_size()
    q = torch.randn(1, 6, 16, 32, device=rank_device).requires_grad_()
    k, v = (torch.randn(1, 3, 16, 32, device=rank_device) for _ in range(2))
    if not heads_first:  # as projections leave them
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    k, v = k.requires_grad_(), v.requires_grad_()
    with _LiveTensors(3, k, v) as forward:
        out, lse = ring_attention(q, k, v, group, shards="zigzag", causal=True)
    # What is sent must be contiguous: such K and V are copied once, and the copy is one of the blocks.
    assert forward.most[4] == (0 if world == 1 else 2 if world == 2 and heads_first else 4)
    assert forward.most[5] == 0
    with _LiveTensors(3, k, v) as backward:
        torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    # K and V of two blocks, and a kernel's own dK and dV.
    assert backward.most[4] <= 4 + 2
    assert backward.most[5] <= 3
