"""Masks that a graph makes of its input's positions, compiled over the ranks: what is understood, and what is not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from torch_fdattn.compile_backend import fdattn
from torch_fdattn.compile_backend.report import UnsupportedAttention
from torch_fdattn.dist import SequenceShards, shard_batch


def documents(positions):
    """As transformers numbers them."""
    before = positions[:, :1] - 1
    return (torch.diff(positions, prepend=before, dim=-1) != 1).cumsum(-1)


def compared(x, y=None):
    return x[:, None, :, None], (x if y is None else y)[:, None, None, :]


def causal(positions, _):
    q, k = compared(positions)
    return q >= k


def window(positions, _):
    q, k = compared(positions)
    return (q >= k) & (k > q - 5) & (k - q + 9 >= 0)


def both_sides(positions, _):
    q, k = compared(positions)
    return (k - q <= 2) & (q - k <= 3)


def packed(positions, _):
    q, k = compared(positions)
    first, second = compared(documents(positions))
    return (q >= k) & (first == second)


def by_other_numbers(positions, others):
    first, second = compared(others)
    return causal(positions, None) & (first == second)


def by_other_steps(positions, _):
    first, second = compared((torch.diff(positions, prepend=positions[:, :1], dim=-1) != 2).cumsum(-1))  # fmt: skip
    return causal(positions, None) & (first == second)


def counted_by_sequences(positions, _):
    """A sum over the batch."""
    both = positions.expand(2, -1)
    numbers = (torch.diff(both, prepend=both[:, :1] - 1, dim=-1) != 1).cumsum(0)
    first, second = compared(numbers)
    return causal(positions, None) & (first == second)


def second_differences(positions, _):
    numbers = (torch.diff(positions, n=2, prepend=positions[:, :2], dim=-1) != 1).cumsum(-1)
    first, second = compared(numbers)
    return causal(positions, None) & (first == second)


def before_it(positions, _):
    q, k = compared(positions)
    return q > k


def of_two_inputs(positions, others):
    q, k = compared(positions, others)
    return q >= k


def of_a_sum(positions, others):
    return causal(positions + others, None)


def written_to(positions, others):
    positions.add_(others)
    return causal(positions, None)


def attended(make):
    def run(q, k, v, positions, others):
        return F.scaled_dot_product_attention(q, k, v, make(positions, others))

    return run


LOWEST = torch.finfo(torch.float32).min


def numbers(mask, hidden: float = LOWEST):
    """As transformers makes them for eager attention."""
    return torch.where(mask, torch.zeros((), dtype=torch.float32, device=mask.device), hidden)


def weighed(scores, mask, v):
    return torch.softmax(scores + mask, -1, dtype=torch.float32).to(v.dtype) @ v


def eager(q, k, v, mask):
    return weighed(q @ k.transpose(2, 3) * 0.25, numbers(mask), v)


def by_infinity(q, k, v, mask):
    return weighed(q @ k.transpose(2, 3) * 0.25, numbers(mask, -torch.inf), v)


def capped(q, k, v, mask):
    return weighed(torch.tanh(q @ k.transpose(2, 3) / 3) * 3, numbers(mask), v)


def with_sinks(q, k, v, mask):
    scores = q @ k.transpose(2, 3) * 0.25 + numbers(mask)
    sinks = v.new_full((1, 4, 1, 1), 0.5).expand(q.shape[0], -1, q.shape[2], -1)
    joined = torch.cat([scores, sinks], -1)
    joined = joined - joined.max(-1, keepdim=True).values
    return torch.softmax(joined, -1)[..., :-1] @ v


def added_to_sdpa(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, numbers(mask))


def filled(q, k, v, mask):
    return torch.softmax((q @ k.transpose(2, 3) * 0.25).masked_fill(~mask, LOWEST), -1) @ v


def hidden_by_little(q, k, v, mask):
    return weighed(q @ k.transpose(2, 3), numbers(mask, -1e4), v)


def with_a_bias(q, k, v, mask):
    near = torch.arange(k.shape[2], device=k.device) * 0.1
    return weighed(q @ k.transpose(2, 3), numbers(mask) + near, v)


def with_a_second_mask(q, k, v, mask):
    index = torch.arange(k.shape[2], device=k.device)
    return weighed(q @ k.transpose(2, 3) + numbers(index <= index[:, None]), numbers(mask), v)


def masked_by(make, form):
    def run(q, k, v, positions, others):
        return form(q, k, v, make(positions, others))

    return run


def given(group, device):
    world = dist.get_world_size()
    shards = SequenceShards.zigzag(8 * world, world)
    inputs = [torch.randn(2, 4, 8 * world, 16, device=device) for _ in range(3)]
    positions = torch.arange(8 * world, device=device)[None]
    others = torch.zeros_like(positions)
    own = [*shard_batch(group, shards, *inputs, dim=2), *shard_batch(group, shards, positions, others)]  # fmt: skip
    torch._dynamo.reset()
    options = {"context_parallel": {"group": group, "shards": shards}, "lower": "aot_eager"}

    def compiled(run):
        return torch.compile(run, backend=fdattn, fullgraph=True, options=options)

    return shards, [*inputs, positions, others], own, compiled


@pytest.mark.parametrize("make", [causal, window, both_sides, packed], ids=lambda x: x.__name__)
def test_understood(group, rank_device, make) -> None:
    shards, whole, own, compiled = given(group, rank_device)
    expected = shards.shard(attended(make)(*whole), dist.get_rank(), 2)
    torch.testing.assert_close(compiled(attended(make))(*own), expected)


def check_shards(given_here, run, **tolerances: float) -> None:
    """What `run` gives of this rank's shard, compiled over the ranks, and its gradients are the shard of what it gives of all.

    given_here: as `given` gives it. tolerances: of the gradients, rtol and atol.
    """
    (shards, whole, own, compiled), rank = given_here, dist.get_rank()
    for x in (*whole[:3], *own[:3]):
        x.requires_grad_()
    expected, found = run(*whole), compiled(run)(*own)
    torch.testing.assert_close(found, shards.shard(expected, rank, 2))
    weights = torch.randn_like(expected)
    expected_grads = torch.autograd.grad((expected * weights).sum(), whole[:3])
    grads = torch.autograd.grad((found * shards.shard(weights, rank, 2)).sum(), own[:3])
    for value, right in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(value, shards.shard(right, rank, 2), **tolerances)


@pytest.mark.parametrize(
    ("form", "make"),
    [
        (eager, causal), (eager, packed), (by_infinity, window), (capped, window), (with_sinks, packed),
        (added_to_sdpa, both_sides), (filled, window),
    ],
    ids=lambda x: x.__name__,
)  # fmt: skip
def test_numbers_understood(group, rank_device, form, make) -> None:
    """Masks of numbers, of eager attention's; gradients too."""
    check_shards(given(group, rank_device), masked_by(make, form))


@pytest.mark.parametrize(
    ("form", "make", "said"),
    [
        (hidden_by_little, causal, "a mask of local tokens that is no window"),
        (with_a_bias, causal, "a mask of local tokens that is no window"),
        (with_a_second_mask, causal, "a mask of local tokens that is no window"),
        (eager, by_other_numbers, "a mask of local tokens that is no window"),
        (eager, before_it, "a mask of local tokens that is no window"),
        (eager, written_to, "a mask of local tokens that is no window"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_numbers_not_understood(group, rank_device, form, make, said) -> None:
    _, _, own, compiled = given(group, rank_device)
    with pytest.raises(Exception, match=said) as raised:
        compiled(masked_by(make, form))(*own)
    assert isinstance(raised.value.inner_exception, UnsupportedAttention)
    assert f"{__file__}:" in str(raised.value)


@pytest.mark.parametrize(
    "make", [by_other_numbers, by_other_steps, counted_by_sequences, second_differences, before_it, of_two_inputs, of_a_sum, written_to],
    ids=lambda x: x.__name__,
)  # fmt: skip
def test_not_understood(group, rank_device, make) -> None:
    """Whatever the numbers hold, it could be another mask."""
    _, _, own, compiled = given(group, rank_device)
    with pytest.raises(Exception, match="a mask of local tokens that is no window") as raised:
        compiled(attended(make))(*own)
    assert isinstance(raised.value.inner_exception, UnsupportedAttention)


def made_outside(q, k, v, positions, others):
    """As layers are given their model's mask."""
    mask = packed(positions, others)
    for _ in range(2):
        q = checkpoint(lambda *x: F.scaled_dot_product_attention(*x), q, k, v, mask, use_reentrant=False)  # fmt: skip
    return q


def numbers_made_outside(q, k, v, positions, others):
    mask = numbers(window(positions, others))
    for _ in range(2):
        q = checkpoint(lambda q, k, v, mask: weighed(q @ k.transpose(2, 3), mask, v), q, k, v, mask, use_reentrant=False)  # fmt: skip
    return q


def made_inside(q, k, v, positions, others):
    for _ in range(2):
        q = checkpoint(attended(window), q, k, v, positions, others, use_reentrant=False)
    return q


@pytest.mark.parametrize(
    "run", [made_outside, numbers_made_outside, made_inside], ids=lambda x: x.__name__
)
def test_in_checkpoints(group, rank_device, run) -> None:
    """Whose graphs have inputs of their own."""
    shards, whole, own, compiled = given(group, rank_device)
    for x in (whole[0], own[0]):
        x.requires_grad_()
    expected = run(*whole)
    found = compiled(run)(*own)
    rank = dist.get_rank()
    torch.testing.assert_close(found, shards.shard(expected, rank, 2))
    grads = [torch.autograd.grad((x * y).sum(), z)[0] for x, y, z in ((expected, whole[1], whole[0]), (found, own[1], own[0]))]  # fmt: skip
    # Of the largest gradient, through two attentions: sums over ranks are in another order.
    atol = 1e-5 * float(grads[0].abs().max())
    torch.testing.assert_close(grads[1], shards.shard(grads[0], rank, 2), rtol=0, atol=atol)


def written_outside(q, k, v, positions, others):
    positions.add_(others)
    return made_inside(q, k, v, positions, others)


def written_inside(q, k, v, positions, others):
    def run(*x):
        x[3].add_(x[4])
        return attended(causal)(*x)

    return checkpoint(run, q, k, v, positions, others, use_reentrant=False)


def another_mask_outside(q, k, v, positions, others):
    mask = by_other_numbers(positions, others)
    return checkpoint(lambda *x: F.scaled_dot_product_attention(*x), q, k, v, mask, use_reentrant=False)  # fmt: skip


@pytest.mark.parametrize(
    "run", [written_outside, written_inside, another_mask_outside], ids=lambda x: x.__name__
)
def test_not_understood_in_checkpoints(group, rank_device, run) -> None:
    _, _, own, compiled = given(group, rank_device)
    own[0].requires_grad_()
    with pytest.raises(Exception):  # noqa: B017, PT011 -- Dynamo refuses writes in checkpoints itself
        compiled(run)(*own)
