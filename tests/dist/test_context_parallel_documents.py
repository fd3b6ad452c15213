"""Packed documents of a model's own attention calls, by `context_parallel(cu_seqlens=…)` and by the option of the compile backend."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import torch_fdattn
from torch_fdattn.compile_backend import fdattn
from torch_fdattn.compile_backend.report import UnsupportedAttention
from torch_fdattn.dist import SequenceShards, context_parallel, shard_batch

from .test_compiled_chunks import causal_chunks, chunks, prefix
from .test_compiled_positions import attended, causal, eager, masked_by, packed, window
from .test_ring_chunks import mask_of_prefixes
from .test_ring_documents import same_document


def documents() -> list[int]:
    """Of 12 tokens a rank; one is empty, one lies over the border."""
    total = 12 * dist.get_world_size()
    return [0, 5, 5, total - 4, total]


def given(group, device, dtype=torch.float32):
    """(shards, inputs of all tokens, of this rank's)"""
    total = documents()[-1]
    shards = SequenceShards.zigzag(total, dist.get_world_size())
    inputs = [torch.randn(2, heads, total, 16, device=device) for heads in (4, 2, 2)]
    return shards, inputs, shard_batch(group, shards, *inputs, dim=2)


def check(found, own, expected, whole, shards, compared=torch.testing.assert_close) -> None:
    """Values and gradients; own, whole: what they are of."""
    rank = dist.get_rank()
    compared(found, shards.shard(expected, rank, 2))
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(
        found.device
    )
    right = torch.autograd.grad((expected * weights).sum(), whole)
    grads = torch.autograd.grad((found * shards.shard(weights, rank, 2)).sum(), own)
    for value, x in zip(grads, right, strict=True):
        compared(value, shards.shard(x, rank, 2), rtol=1e-5, atol=1e-5)


CALLS = ("sdpa", "not causal", "window and mask", "prefixes")


@pytest.mark.parametrize("call", CALLS)
def test_eager(group, rank_device, call) -> None:
    shards, whole, own = given(group, rank_device)
    for x in (*whole, *own):
        x.requires_grad_()
    total, rank, more = documents()[-1], dist.get_rank(), {}
    seen = same_document(documents())
    at = torch.arange(total)
    begins = torch.tensor(documents(), dtype=torch.int32, device=rank_device)
    if call == "sdpa":
        seen = seen & (at <= at[:, None])
    elif call == "window and mask":
        explicit = torch.rand(total, total, generator=torch.Generator().manual_seed(1)) < 0.7
        explicit.fill_diagonal_(True)
        seen = seen & (at <= at[:, None]) & (at >= at[:, None] - 3) & explicit
        rows = shards.shard(explicit, rank, 0).to(rank_device)
    elif call == "prefixes":
        more["prefix_lens"] = [3, 0, 2, 4]
        seen = mask_of_prefixes(documents(), more["prefix_lens"])
    expected = torch_fdattn.attention(*whole, attn_mask=seen.to(rank_device))[0]
    with context_parallel(group, shards=shards, cu_seqlens=begins, **more):
        if call == "window and mask":
            found = torch_fdattn.attention(*own, causal=True, window=(3, 0), attn_mask=rows)[0]
        else:
            found = F.scaled_dot_product_attention(*own, is_causal=call != "not causal", enable_gqa=True)  # fmt: skip
        check(found, own, expected, whole, shards)


def test_documents_of_a_call_are_those_of_the_context(group, rank_device) -> None:
    shards, _, own = given(group, rank_device)
    rows = [x[0].transpose(0, 1) for x in own]
    begins = torch.tensor(documents(), dtype=torch.int32, device=rank_device)
    with context_parallel(group, shards=shards, cu_seqlens=begins):
        found = torch_fdattn.varlen_attention(*rows, begins, causal=True)[0]
        expected = torch_fdattn.attention(*own, causal=True)[0]
        torch.testing.assert_close(found, expected[0].transpose(0, 1))
        with pytest.raises(NotImplementedError, match="has other cu_seqlens_q than it"):
            torch_fdattn.varlen_attention(*rows, begins[[0, 3, 4]], causal=True)


@pytest.mark.parametrize("wrong", ["short", "of one rank", "no numbers"])
def test_wrong_documents(group, rank_device, wrong) -> None:
    """Of one rank alone, too: named on all."""
    shards, _, own = given(group, rank_device)
    odd = dist.get_rank() == 1
    if wrong == "no numbers":
        with (
            pytest.raises(TypeError, match="cu_seqlens must be an integer tensor"),
            context_parallel(group, shards=shards, cu_seqlens="x"),
        ):
            pass
        return
    told = documents()[:-1] if wrong == "short" else [0, 7 if odd else 6, *documents()[2:]]
    match = r"cu_seqlens must begin with 0, end with the \d+ tokens"
    if wrong == "of one rank":
        if dist.get_world_size() < 2:
            pytest.skip("needs 2 ranks")
        match = r"cu_seqlens must be the same on all ranks, got .* on rank 1"
    with pytest.raises(ValueError, match=match), context_parallel(group, shards=shards, cu_seqlens=told):  # fmt: skip
        F.scaled_dot_product_attention(
            *own, is_causal=True, enable_gqa=True, scale=0.217
        )  # of this test


def compiled(run, group, shards):
    torch._dynamo.reset()
    option = {"group": group, "shards": shards, "cu_seqlens": documents()}
    options = {"context_parallel": option, "lower": "aot_eager"}
    return torch.compile(run, backend=fdattn, fullgraph=True, options=options)


def by_sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def by_ours(q, k, v):
    return torch_fdattn.attention(q, k, v, causal=True)[0]


@pytest.mark.parametrize("run", [by_sdpa, by_ours], ids=lambda x: x.__name__)
def test_compiled_calls(group, rank_device, run) -> None:
    shards, whole, own = given(group, rank_device)
    for x in (*whole, *own):
        x.requires_grad_()
    at = torch.arange(documents()[-1])
    seen = (same_document(documents()) & (at <= at[:, None])).to(rank_device)
    expected = torch_fdattn.attention(*whole, attn_mask=seen)[0]
    check(compiled(run, group, shards)(*own), own, expected, whole, shards)


def test_other_documents_are_compiled_anew(group, rank_device) -> None:
    """Of one function, without a reset: torch compares options."""
    shards, whole, own = given(group, rank_device)
    total, rank = documents()[-1], dist.get_rank()
    at = torch.arange(total)
    torch._dynamo.reset()
    for told in (documents(), None, [0, 7, total], documents()):
        option = {"group": group, "shards": shards, "cu_seqlens": told}
        options = {"context_parallel": option, "lower": "aot_eager"}
        found = torch.compile(by_ours, backend=fdattn, fullgraph=True, options=options)(*own)
        seen = same_document(told or [0, total]) & (at <= at[:, None])
        expected = torch_fdattn.attention(*whole, attn_mask=seen.to(rank_device))[0]
        torch.testing.assert_close(found, shards.shard(expected, rank, 2))


@pytest.mark.parametrize(
    ("form", "make"),
    [
        (None, packed), (eager, causal), (None, causal_chunks), (None, prefix),
        *(pytest.param(eager, make, marks=pytest.mark.slow) for make in (window, chunks, prefix)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_compiled_masks(group, rank_device, form, make) -> None:
    """Of positions that begin with 0 in each document. Those of the full sequence say the same of windows, and of chunks and
    prefixes another thing: these are refused.
    """
    shards, whole, own = given(group, rank_device)
    whole, own = ([x.repeat_interleave(4 // x.shape[1], 1) for x in each] for each in (whole, own))
    rank, total = dist.get_rank(), documents()[-1]
    run = attended(make) if form is None else masked_by(make, form)
    in_documents = SequenceShards.contiguous(total, 1).positions(0, cu_seqlens=documents())[None]
    seen = make(in_documents, None)[0, 0] & same_document(documents())
    expected = torch_fdattn.attention(*whole, attn_mask=seen.to(rank_device))[0]
    over_ranks = compiled(run, group, shards)
    others = torch.zeros(1, 12, dtype=torch.int64, device=rank_device)
    mine, in_sequence = (
        shards.positions(rank, rank_device, cu_seqlens=x)[None] for x in (documents(), None)
    )
    torch.testing.assert_close(over_ranks(*own, mine, others), shards.shard(expected, rank, 2))
    if make in (chunks, causal_chunks, prefix):
        with pytest.raises(ValueError, match=r"give the model position_ids, .*\(on rank"):
            over_ranks(*own, in_sequence, others)
    else:
        found = over_ranks(*own, in_sequence, others)
        torch.testing.assert_close(found, shards.shard(expected, rank, 2))


def test_compiled_documents_that_do_not_fit(group, rank_device) -> None:
    """Shards by name are as long as the graph's tokens."""
    _, _, own = given(group, rank_device)
    torch._dynamo.reset()
    option = {"group": group, "shards": "zigzag", "cu_seqlens": documents()[:-1]}
    run = torch.compile(
        by_sdpa, backend=fdattn, options={"context_parallel": option, "lower": "eager"}
    )
    with pytest.raises(Exception, match="cu_seqlens must begin with 0, end with the") as raised:
        run(*own)
    assert isinstance(raised.value.inner_exception, UnsupportedAttention)
