"""The online softmax in Triton: the one update of a running softmax, its end, and the merge of states.

State of a row: `row_max` (of the scores in log2 units, -inf before the first visible key), `row_sum`
(of exp2(score - row_max)) and the accumulator of P V under the same maximum (arXiv:1805.02867;
FlashAttention-2, arXiv:2307.08691, algorithm 1). Rows that have seen no key yet are handled here and
nowhere else.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite_max(row_max):
    """The maximum to subtract: 0 for a row that has seen no key, so that exp2(-inf - 0) = 0."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def softmax_update(products, row_max, row_sum, scale_log2, MASKED: tl.constexpr):
    """One tile of q·k products (M, N) to (p, row_max, row_sum, alpha); scale_log2 > 0.

    The maximum is taken before scaling, so that scaling and subtraction are one FMA per element.
    """
    new_max = tl.maximum(row_max, tl.max(products, 1) * scale_log2)
    safe_max = new_max
    if MASKED:
        safe_max = finite_max(new_max)
    p = tl.exp2(products * scale_log2 - safe_max[:, None])
    alpha = tl.exp2(row_max - safe_max)
    return p, new_max, row_sum * alpha + tl.sum(p, 1), alpha


@triton.jit
def softmax_finish(acc, row_max, row_sum):
    """(out, lse in natural log): zero and -inf for a row that saw no key."""
    empty = row_sum == 0.0
    out = acc / tl.where(empty, 1.0, row_sum)[:, None]
    lse = tl.where(empty, float("-inf"), row_max * LN2 + tl.log(tl.where(empty, 1.0, row_sum)))
    return out, lse


@triton.jit
def merge_update(acc, row_max, row_sum, outs, lses):
    """Adds a chunk of partial states, outs (N, M, D) and lses (N, M), to the running states (M, D).

    Here row_max is in natural units: differences of large lses are exact, their multiples of log2(e) are
    not. A part with lse = -inf weighs nothing, whatever its outs hold (they may be uninitialised).
    """
    new_max = tl.maximum(row_max, tl.max(lses, 0))
    safe_max = finite_max(new_max)
    weights = tl.exp2((lses - safe_max[None, :]) * LOG2E)
    alpha = tl.exp2((row_max - safe_max) * LOG2E)
    outs = tl.where((lses == float("-inf"))[:, :, None], 0.0, outs)
    acc = acc * alpha[:, None] + tl.sum(weights[:, :, None] * outs, 0)
    return acc, new_max, row_sum * alpha + tl.sum(weights, 0)


@triton.jit
def merge_finish(acc, row_max, row_sum):
    """(out (M, D), lse (M,)) of merged states: zero and -inf for a row to which no part saw a key."""
    empty = row_sum == 0.0
    total = tl.where(empty, 1.0, row_sum)
    return acc / total[:, None], tl.where(empty, float("-inf"), row_max + tl.log(total))
