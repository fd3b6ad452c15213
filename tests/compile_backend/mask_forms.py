"""Masks as models write them, and what a report is expected to say of them."""

import math

import torch
import torch.nn.functional as F

from tests.compile_backend.harness import check, mask_of, ops

sdpa = F.scaled_dot_product_attention


LEAST = torch.finfo(torch.float32).min


PADDING = torch.tensor([[1] * 8, [0] * 3 + [1] * 5])


LENGTHS = torch.tensor([3, 8])


SLOPES = torch.tensor([0.5, 0.25, 0.1, -0.03])


def index(n):
    return torch.arange(n)


def causal(size, fill=-math.inf):
    return torch.full((size, size), fill).triu(1)


def triangle(size=8, diagonal=0):
    return torch.ones(size, size, dtype=torch.bool).tril(diagonal)


def added(q, k, v, mask):
    return (q @ k.mT * 0.25 + mask).softmax(-1) @ v


def filled(q, k, v, mask, fill=-math.inf):
    return (q @ k.mT * 0.25).masked_fill(mask, fill).softmax(-1) @ v


def unpacked(length):
    """As transformers looks for sequences that are packed into one, where position ids follow one another."""
    positions = (index(length) + 0).unsqueeze(0)
    jumps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    sequence = jumps.cumsum(-1)
    return sequence[0][:, None] == sequence[0][None, :]


def transformers_mask(q, k, padding=None, window=None, offset=0):
    """As transformers' masking_utils make it."""
    queries = (index(q.shape[2]) + offset)[None, None, :, None]
    keys = (index(k.shape[2]) + 0)[None, None, None, :]
    mask = queries.new_ones((), dtype=torch.bool)
    if window:
        mask = mask & (keys > queries - window).to(q.device)
    mask = mask & (keys <= queries).to(q.device)
    if padding is not None:
        batch = index(q.shape[0])[:, None, None, None]
        mask = mask & padding.to(torch.bool)[batch, keys]
    return mask.expand(q.shape[0], -1, q.shape[2], k.shape[2])


def transformers_eager(q, k, v, mask):
    mask = torch.where(mask, torch.zeros((), dtype=q.dtype), torch.finfo(q.dtype).min)
    scores = (q @ k.mT) * 0.25 + mask
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def expect(mask, fn, *args, op="attention", operand=False, **options):
    found = check(fn, *args, **{"lower": "eager", **options})
    assert ops(found) == [op], str(found.report)
    assert mask_of(found) == mask
    assert ("attn_mask" in found.graph) == operand
    return found
