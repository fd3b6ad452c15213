"""Activation checkpoints with use_reentrant=True inside `context_parallel`: gradients of all tokens, or an exception.

Their forward leaves no trace of attention, so a backward elsewhere would attend to a rank's own tokens in silence.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import torch_fdattn
from torch_fdattn.dist import SequenceShards, context_parallel, shard_batch

LENGTH = 8
REFUSED = "must be inside of the context_parallel that its forward was in"


def attend(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


def varlen(x):
    begins = torch.tensor([0, LENGTH * dist.get_world_size()], dtype=torch.int32, device=x.device)
    flat = x[0].transpose(0, 1)
    out = torch_fdattn.varlen_attention(flat, flat, flat, begins, causal=True)[0]
    return out.transpose(0, 1)[None]


def nested(x):
    return attend(checkpoint(attend, x, use_reentrant=True) * 2)


def close(found, expected) -> None:
    """Gradients of sums of squares: numbers up to thousands."""
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.fixture
def parts(group, rank_device):
    """(shards, this rank's x, its gradient by a function)"""
    world = dist.get_world_size()
    shards = SequenceShards.zigzag(LENGTH * world, world)
    torch.manual_seed(0)
    whole = torch.randn(1, 2, shards.total, 16, device=rank_device)
    (x,) = shard_batch(group, shards, whole, dim=2)

    def gradient(run):
        leaf = whole.clone().requires_grad_()
        run(leaf).square().sum().backward()
        return shard_batch(group, shards, leaf.grad, dim=2)[0]

    return shards, x.requires_grad_(), gradient


@pytest.mark.parametrize("run", [attend, varlen, nested])
def test_the_backward_belongs_inside(group, parts, run) -> None:
    shards, x, gradient = parts
    with context_parallel(group, shards=shards):
        loss = checkpoint(run, x, use_reentrant=True).square().sum()
    if dist.get_world_size() > 1 or run is not varlen:  # which is alone as it is over one rank
        with pytest.raises(RuntimeError, match=REFUSED):
            loss.backward()
    with context_parallel(group, shards=shards):  # entered anew
        checkpoint(run, x, use_reentrant=True).square().sum().backward()
    expected = gradient((lambda y: attend(attend(y) * 2)) if run is nested else attend)
    close(x.grad, expected)


def test_another_context_is_as_none(group, parts) -> None:
    shards, x, gradient = parts
    with context_parallel(group, shards=shards):
        losses = [checkpoint(attend, x, use_reentrant=True).square().sum() for _ in range(2)]
    with (
        context_parallel(group, shards=shards, cu_seqlens=[0, 3, shards.total]),
        pytest.raises(RuntimeError, match=REFUSED),
    ):
        losses[0].backward()
    with context_parallel(group, shards=shards):
        losses[1].backward()
    close(x.grad, gradient(attend))


def test_a_context_within_the_function(group, parts) -> None:
    """Comes again with it."""
    shards, x, gradient = parts

    def run(y):
        with context_parallel(group, shards=shards):
            return attend(y)

    checkpoint(run, x, use_reentrant=True).square().sum().backward()
    close(x.grad, gradient(attend))


def test_what_has_no_attention_may_go_backward_anywhere(group, parts) -> None:
    shards, x, _ = parts
    with context_parallel(group, shards=shards):
        y = checkpoint(torch.sin, x, use_reentrant=True)
        loss = attend(y).sum()
    loss.backward()
    assert x.grad.abs().sum() > 0
