"""Packed sequences of CPU tensors in which the diagonal alone hides keys: one call of torch's flash kernel for each.

What `attention_on_cpu` does of them, checked once for all: it costs a sequence of few tokens half of its time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fdattn.ops.attention.cpu import FORWARD, REFERENCE_ALONE, TAKES_GROUPS
from torch_fdattn.ops.attention.dropout import Dropout
from torch_fdattn.ops.packed import Packed
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores
from torch_fdattn.ops.varlen_attention.reference import by_heads, spans_of


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, mask: Mask, scale: float, scores: Scores, dropout: Dropout,
    written: tuple[Tensor, Tensor],
) -> bool:  # fmt: skip
    """Writes (out, lse); False: it is no such call, or the kernel may have lost a NaN. Then nothing written counts."""
    right = mask.window_right
    if (
        REFERENCE_ALONE or not TAKES_GROUPS or packed.page_table is not None or right > 0 or mask.window_left >= 0
        or any(x is not None for x in mask[:3]) or mask.kv_block or not scores.is_plain or dropout.threshold
        or not all(_is_taken(x) and x.shape[2] == q.shape[2] for x in (q, k, v))
    ):  # fmt: skip
        return False
    rows, keys = spans_of(q, k, packed)
    if right == 0 and rows != keys and [_length(x) for x in rows] != [_length(x) for x in keys]:
        return False
    if not rows or not all(map(_length, rows)) or not all(map(_length, keys)):
        return False
    out, lse = written
    if rows[0].start > 0 or rows[-1].stop < q.shape[0]:
        out.zero_()
        lse.fill_(float("-inf"))
    parts = (_cut(by_heads(x), 2, at) for x, at in ((q, rows), (k, keys), (v, keys), (out, rows)))
    for own_q, own_k, own_v, own_out, own_lse in zip(*parts, _cut(lse, 1, rows), strict=True):
        found = FORWARD(own_q, own_k, own_v, 0.0, right == 0 and own_q.shape[2] > 1, scale=scale)
        own_out.copy_(found[0])
        own_lse.copy_(found[1][0])
    # Of a row without a finite score the kernel says lse 0.
    return int(lse.count_nonzero()) == lse.numel()


def _cut(x: Tensor, dim: int, spans: list[slice]) -> Sequence[Tensor]:
    """Views of these parts of a dim, in one call where they lie one after the other."""
    sizes = [span.stop - span.start for span in spans]
    if spans and sum(sizes) == spans[-1].stop - spans[0].start:
        return x.split([spans[0].start, *sizes, x.shape[dim] - spans[-1].stop], dim)[1:-1]
    return [x.narrow(dim, span.start, size) for span, size in zip(spans, sizes, strict=True)]


def _is_taken(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.stride(2) == 1 and x.stride(0) >= x.shape[2] > 0


def _length(span: slice) -> int:
    return span.stop - span.start
