"""Attention of CPU tensors by torch's own flash kernel, which returns the lse; by the reference where it cannot.

A call is cut into parts that one call of the kernel can answer (`cpu_parts.py`): sequences of one length together, so
that nothing beyond a sequence's keys is read, windows as bands of rows.

What the kernel asks for and its schema does not say: the last dim of its inputs is contiguous, rows do not share
memory, and no dim is empty. A row whose keys are all hidden gets out 0 and lse 0, not -inf. The backward takes P from
the lse that it is given, so the lse of more keys gives these keys' gradients, as everywhere here; it takes no gradient
of the lse.

`TORCH_FDATTN_REFERENCE=1` takes the reference, which is the definition, for all calls.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from torch_fdattn.ops.attention.cpu_parts import (
    FEW_KEYS,
    CpuPart,
    are_small,
    only_part,
    parts,
    together,
)
from torch_fdattn.ops.attention.dropout import NO_DROPOUT, Dropout
from torch_fdattn.ops.attention.reference import (
    attention_backward_reference,
    attention_reference,
)
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import NO_SCORES, Scores, add_sinks, sink_gradient

#: Whether every call is the reference's.
REFERENCE_ALONE = os.environ.get("TORCH_FDATTN_REFERENCE", "") == "1"
_DTYPES = torch.float32, torch.bfloat16, torch.float16
#: Queries up to which half-precision keys are converted one sequence after the other, and keys (elements) from which on.
FEW_QUERIES, LARGE = 16, 1 << 17
#: From 2.13 on the kernel reads each KV head for all of its query heads.
TAKES_GROUPS = tuple(int(x) for x in torch.__version__.split(".")[:2]) >= (2, 13)
#: Some microseconds less than by `torch.ops.aten`.
FORWARD = torch._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, scores: Scores | None = None,
    keys_in: Tensor | None = None, dropout: Dropout = NO_DROPOUT, first_sequence: int = 0, *, alone: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out (B, H, S, DV), lse (B, H, S)), as `attention_reference`.

    alone: a sequence's bits do not follow from the others.
    """
    scores = scores or NO_SCORES
    call = q, k, v, mask, scale, scores, keys_in, dropout, first_sequence
    if alone and q.shape[0] > 1:
        states = [attention_on_cpu(*_sequence(call, b)) for b in range(q.shape[0])]
        return tuple(torch.cat(x) for x in zip(*states, strict=True))
    if not _takes(q, k, v, mask, scores, dropout) or not _holds_all(keys_in, mask):
        return attention_reference(*call)
    if _are_together(q, k, mask):
        state = _forward_together(q, k, v, mask, scores, scale)
        return attention_reference(*call) if state is None else _with_sinks(state, scores)
    # Copies of one sequence's keys stay in the processor's caches.
    copied = k.dtype != torch.float32 and q.shape[2] <= FEW_QUERIES
    each = copied and k[0].numel() >= LARGE
    only = None if each else only_part(q, k, mask, scores)
    states = []
    for part in parts(q, k, mask, scores, each) if only is None else (only,):
        state = _forward(part, q, k, v, scale)
        if state is None:
            return attention_reference(*call)
        states.append((part, state))
    if len(states) == 1 and states[0][1][1].shape == q.shape[:3]:
        return _with_sinks(states[0][1], scores)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float32)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=torch.float32)
    for part, (own_out, own_lse) in states:
        out[part.sequences, :, part.rows] = own_out
        lse[part.sequences, :, part.rows] = own_lse
    return _with_sinks((out, lse), scores)


def _with_sinks(state: tuple[Tensor, Tensor], scores: Scores) -> tuple[Tensor, Tensor]:
    return state if scores.sinks is None else add_sinks(*state, scores.sinks)


def attention_backward_on_cpu(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    mask: Mask, scale: float, scores: Scores, dropout: Dropout = NO_DROPOUT, first_sequence: int = 0, *,
    score_grads: Scores = NO_SCORES,
) -> tuple[Tensor, Tensor, Tensor, Scores]:  # fmt: skip
    """(dq, dk, dv, gradients of the scores' tensors), as `attention_backward_reference`.

    score_grads: tensors for the gradients that are asked for; the others may be None.
    """
    call = dout, dlse, q, k, v, out, lse, mask, scale, scores, dropout, first_sequence
    of_entries = score_grads.alibi_slopes is not None or score_grads.attn_mask is not None
    if dlse is not None or of_entries or not _takes(q, k, v, mask, scores, dropout):
        return attention_backward_reference(*call)
    # P = exp(-inf - lse) = 0 where all is hidden.
    finite = lse.masked_fill(lse == float("-inf"), 0.0)
    sums: list[Tensor] | None = None
    for part in parts(q, k, mask, scores):
        grads = _backward(part, dout, q, k, v, out, finite, scale)
        if part.bias is not None and any(x.isnan().any() for x in grads):
            return attention_backward_reference(*call)
        if sums is None:
            if all(x.shape == of.shape for x, of in zip(grads, (q, k, v), strict=True)):
                sums = [*grads]
                continue
            sums = [torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v)]
        for total, own, where in zip(sums, grads, (part.rows, part.keys, part.keys), strict=True):
            total[part.sequences, :, where] += own
    if sums is None:
        sums = [torch.zeros(x.shape, dtype=torch.float32) for x in (q, k, v)]
    dsinks = None
    if score_grads.sinks is not None:
        dsinks = sink_gradient(scores.sinks, lse, (dout.float() * out.float()).sum(-1))
    return *sums, Scores(0.0, None, dsinks, None)


def _sequence(call: tuple, b: int) -> tuple:
    """The call of one of its sequences, over its own keys alone."""
    q, k, v, mask, scale, scores, keys_in, dropout, first_sequence = call
    own, keys = slice(b, b + 1), slice(None)
    if mask.kv_lens is not None:
        keys = slice(0, max(int(mask.kv_lens[b]), 0))
    mask, scores = of_sequence(mask, scores, b)
    entries = scores.attn_mask
    if entries is not None and entries.dim() and entries.shape[-1] > 1:
        scores = scores._replace(attn_mask=entries[..., keys])
    return (
        q[own], k[own, :, keys], v[own, :, keys], mask, scale, scores,
        None if keys_in is None else keys_in[own, keys], dropout, first_sequence + b,
    )  # fmt: skip


def of_sequence(mask: Mask, scores: Scores, b: int) -> tuple[Mask, Scores]:
    """One sequence's own, with a batch of 1."""
    own, (slopes, entries) = slice(b, b + 1), (scores.alibi_slopes, scores.attn_mask)
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[own]
    if entries is not None and entries.dim() == 4 and entries.shape[0] > 1:
        entries = entries[own]
    mask = Mask(*(None if x is None else x[own] for x in mask[:3]), *mask[3:])
    return mask, scores._replace(alibi_slopes=slopes, attn_mask=entries)


def _takes(q, k, v, mask: Mask, scores: Scores, dropout: Dropout) -> bool:
    """Whether the kernel can answer the call, in parts."""
    return (
        not REFERENCE_ALONE
        and q.dtype in _DTYPES
        and k.dtype in _DTYPES
        and not scores.softcap
        and not dropout.threshold
        and q.numel() > 0
        and k.numel() > 0
        and v.numel() > 0
        # Keys between the shards of a window may hold anything.
        and not (mask.kv_block and mask.window_left >= 0)
        and not are_small(q, k, mask, scores)
    )


def _are_together(q: Tensor, k: Tensor, mask: Mask) -> bool:
    """Whether sequences of different lengths are one part: so few keys, all of which some query may see."""
    return (
        mask.kv_lens is not None
        and mask.q_start is None
        and mask.window_left < 0
        and q.shape[0] > 1
        and q.shape[2] <= FEW_QUERIES
        and k.numel() <= FEW_KEYS
        and min(mask.kv_lens.tolist()) < k.shape[2]  # full ones are one part without a mask
    )


def _forward_together(q, k, v, mask: Mask, scores: Scores, scale: float):
    part = together(q, k, mask, scores)
    state = _forward(part, q, k, v, scale)
    if state is None or state[0].isnan().any():  # maybe of what lies beyond a length
        beyond = (torch.arange(k.shape[2]) >= mask.kv_lens[:, None])[:, None, :, None]
        k, v = (x.masked_fill(beyond, 0.0) for x in (k, v))
        # By the same kernel: bits do not follow from what lies there.
        state = _forward(part, q, k, v, scale)
    return state


def _holds_all(keys_in: Tensor | None, mask: Mask) -> bool:
    """Whether the keys that are in are those below the lengths: what lies elsewhere may be anything."""
    if keys_in is None:
        return True
    if mask.kv_lens is not None:
        beyond = torch.arange(keys_in.shape[1]) >= mask.kv_lens[:, None]
        keys_in = keys_in | beyond
    return bool(keys_in.all())


def _as_kernel_takes(*tensors: Tensor) -> list[Tensor]:
    """In float32, rows apart, the last dim contiguous and of one size, which zeros fill.

    The kernel's own lse of bfloat16 and float16 inputs is off by 1e-4, and it is seldom faster by them.
    """
    dim = max([x.shape[-1] for x in tensors])
    made = []
    for x in tensors:
        if x.dtype != torch.float32:
            x = x.float()
        if x.shape[-1] < dim:
            x = torch.nn.functional.pad(x, (0, dim - x.shape[-1]))
        apart = x.stride(-1) == 1 and (x.stride(-2) >= dim or x.shape[-2] == 1)
        made.append(x if apart else x.contiguous())
    return made


def _heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values for each query head."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _cut(tensors: tuple[Tensor, ...], sequences: slice, rows: slice) -> tuple[Tensor, ...]:
    """These sequences and rows of each, all of which have as many; themselves where that is all."""
    batch, _, length, _ = tensors[0].shape
    if sequences == slice(0, batch) and rows == slice(0, length):
        return tensors
    return tuple(x[sequences, :, rows] for x in tensors)


def _forward(part: CpuPart, q, k, v, scale: float) -> tuple[Tensor, Tensor] | None:
    """(out, lse) of the part's rows; None: the kernel may have lost or spread a NaN."""
    v_dim = v.shape[3]
    k, v = _cut((k, v), part.sequences, part.keys)
    q, k, v = _as_kernel_takes(*_cut((q,), part.sequences, part.rows), k, v)
    if not TAKES_GROUPS:
        k, v = _heads(k, q.shape[1]), _heads(v, q.shape[1])
    out, lse = FORWARD(q, k, v, 0.0, part.causal, attn_mask=part.bias, scale=scale)
    # Of a row without a finite score the kernel says lse 0: of one whose keys are all hidden, and of NaN.
    if int(lse.count_nonzero()) < lse.numel():  # half of `all`'s time
        suspect = lse == 0.0
        if part.bias is not None:
            hidden = (part.bias == float("-inf")).all(-1)
            lse = lse.masked_fill(suspect & hidden, float("-inf"))
            suspect = suspect & ~hidden
        if suspect.any() and not (q.abs().amax() * k.abs().amax() * (2 * q.shape[3])).isfinite():
            return None  # of NaN, infinities and products that overflow
    if part.bias is not None and lse.isnan().any():
        return None  # maybe of a key that the bias hides: NaN - inf is NaN
    return (out if out.shape[3] == v_dim else out[..., :v_dim]), lse


def _backward(part: CpuPart, dout, q, k, v, out, lse, scale: float) -> tuple[Tensor, ...]:
    kv_heads, dims = k.shape[1], (q.shape[3], k.shape[3], v.shape[3])
    of_rows = _cut((dout, q, out), part.sequences, part.rows)
    of_keys = _cut((k, v), part.sequences, part.keys)
    dout, q, out, k, v = _as_kernel_takes(*of_rows, *of_keys)
    if not TAKES_GROUPS:
        k, v = _heads(k, q.shape[1]), _heads(v, q.shape[1])
    lse = lse[part.sequences, :, part.rows]
    dq, dk, dv = _BACKWARD(
        dout, q, k, v, out, lse, 0.0, part.causal, attn_mask=part.bias, scale=scale
    )
    if dk.shape[1] != kv_heads:
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return tuple(x[..., :dim] for x, dim in zip((dq, dk, dv), dims, strict=True))
