"""How a call of attention on a CPU is cut into parts that torch's flash kernel can answer (`cpu.py`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn.ops.positions import FAR, Mask, query_key_positions, sees
from torch_fdattn.ops.scores import MASK_LIMIT, Scores

#: Query rows of a part with a bias: of a causal mask, and the limits within which a window's width decides.
CAUSAL_ROWS, MIN_ROWS, MAX_ROWS = 1024, 128, 1024
#: Elements of one bias.
MAX_BIAS = 1 << 24
#: Elements of all keys up to which few queries of all sequences are one part, whatever their lengths.
FEW_KEYS = 1 << 16
#: Sequences up to which each may be a part, however small, and multiplications of a part that is small.
FEW_SEQUENCES, SMALL = 8, 1 << 17


class CpuPart(NamedTuple):
    """Rows and keys of some sequences that one call of the kernel answers."""

    sequences: slice
    rows: slice
    keys: slice
    causal: bool = False  # row i of the part sees its keys 0 … i
    bias: Tensor | None = None  # added to the scores: four dims, each of full size or 1


def are_small(q: Tensor, k: Tensor, mask: Mask, scores: Scores) -> bool:
    """Whether a part for each sequence would have so little to do that many of them take longer than the reference."""
    if q.shape[0] <= FEW_SEQUENCES or all(x is None for x in mask[:3]):
        return False
    work = q.shape[1] * q.shape[2] * k.shape[2] * k.shape[3]
    return work < (SMALL if scores.alibi_slopes is None else 4 * SMALL)


class _Run(NamedTuple):
    """Sequences next to each other that have equal lengths and positions."""

    sequences: slice
    kv_len: int
    offset: int | None  # of the first query's position from the first key's; None: each has its own
    mask: Mask  # of one of them, or of each


def parts(
    q: Tensor, k: Tensor, mask: Mask, scores: Scores, alone: bool = False
) -> Iterator[CpuPart]:
    """Of a call with q (B, H, S, D) and k (B, H_kv, S_kv, D); rows in no part see no key.

    alone: no part has more than one sequence.
    """
    entries = None if scores.attn_mask is None else _of_four_dims(scores.attn_mask)
    for run in _runs(q, k, mask, alone):
        for rows, keys, hides in _bands(run, q.shape[2], q.shape[1] * _width(run), scores):
            causal = hides and entries is None and scores.alibi_slopes is None
            if causal and _is_causal(run, rows):
                yield CpuPart(run.sequences, rows, keys, causal=True)
                continue
            bias = None
            if entries is not None:
                bias = _bias_of_mask(_cut(entries, run.sequences, rows, keys))
            if hides or scores.alibi_slopes is not None:
                bias = _with_positions(bias, run, rows, keys, hides, scores.alibi_slopes)
            yield CpuPart(run.sequences, rows, keys, bias=bias)


def only_part(q: Tensor, k: Tensor, mask: Mask, scores: Scores) -> CpuPart | None:
    """The only part of a call in which the diagonal alone hides keys, as `parts` gives it, in a fifth of the time."""
    rows, keys, right = q.shape[2], k.shape[2], mask.window_right
    if (
        mask.window_left >= 0 or right > 0 or (right == 0 and rows != keys) or mask.kv_block
        or scores.alibi_slopes is not None or scores.attn_mask is not None or any(x is not None for x in mask[:3])
    ):  # fmt: skip
        return None
    return CpuPart(slice(0, q.shape[0]), slice(0, rows), slice(0, keys), right == 0 and rows > 1)


def together(q: Tensor, k: Tensor, mask: Mask, scores: Scores) -> CpuPart:
    """All sequences, the last of whose keys the queries are, as one part: NaN beyond a length reaches its results."""
    rows, keys = slice(0, q.shape[2]), slice(0, k.shape[2])
    entries = scores.attn_mask
    bias = None if entries is None else _bias_of_mask(_of_four_dims(entries))
    if scores.alibi_slopes is None and (mask.window_right < 0 or q.shape[2] == 1):
        beyond = (torch.arange(keys.stop) >= mask.kv_lens[:, None])[:, None, None]
        bias = torch.zeros(beyond.shape, dtype=torch.float32) if bias is None else bias
        bias = bias.masked_fill(beyond, float("-inf"))
    else:
        run = _Run(slice(0, q.shape[0]), keys.stop, None, mask)
        bias = _with_positions(bias, run, rows, keys, True, scores.alibi_slopes)
    return CpuPart(slice(0, q.shape[0]), rows, keys, bias=bias)


def _width(run: _Run) -> int:
    return (run.sequences.stop - run.sequences.start) * max(run.kv_len, 1)


def _runs(q: Tensor, k: Tensor, mask: Mask, alone: bool) -> Iterator[_Run]:
    batch, capacity = q.shape[0], k.shape[2]
    if not alone and mask.kv_lens is None and mask.q_start is None and mask.kv_start is None:
        yield _Run(slice(0, batch), capacity, capacity - q.shape[2], mask)
        return
    bounds = [[None] * batch if x is None else x.tolist() for x in mask[:3]]
    numbered = zip(*bounds, range(batch) if alone else [0] * batch, strict=True)
    start = 0
    for (kv_len, q_start, kv_start, _), group in itertools.groupby(numbered):
        stop = start + len(list(group))
        kv_len = capacity if kv_len is None else min(max(kv_len, 0), capacity)
        first_key = 0 if kv_start is None else min(max(kv_start, -FAR), FAR)
        first_query = first_key + kv_len - q.shape[2]
        if q_start is not None:
            first_query = min(max(q_start, -FAR), FAR)
        own = Mask(*(None if x is None else x[start : start + 1] for x in mask[:3]), *mask[3:])
        yield _Run(slice(start, stop), kv_len, first_query - first_key, own)
        start = stop


def _bands(
    run: _Run, q_len: int, bias_per_row: int, scores: Scores
) -> Iterator[tuple[slice, slice, bool]]:
    """Rows, the keys that they see, and whether one of the rows does not see all of these."""
    left, right = run.mask.window_left, run.mask.window_right
    kv_len, offset = run.kv_len, run.offset
    if not kv_len or not q_len:
        return
    if run.mask.kv_block:  # keys that a row sees lie in no one stretch
        yield slice(0, q_len), slice(0, kv_len), left >= 0 or right >= 0
        return
    first = max(0, -offset - right) if right >= 0 else 0
    last = min(q_len, kv_len - offset + left) if left >= 0 else q_len
    bounded_left = left >= 0 and offset + last - 1 > left
    bounded_right = right >= 0 and offset + first + right < kv_len - 1
    step = last - first
    if bounded_left:
        step = min(max(left + max(right, 0) + 1, MIN_ROWS), MAX_ROWS)
    elif bounded_right and not _is_causal(run, slice(first, last)):
        step = CAUSAL_ROWS
    if scores.alibi_slopes is not None:
        step = min(step, max(MAX_BIAS // bias_per_row, 1))
    for start in range(first, last, max(step, 1)):
        stop = min(start + step, last)
        low = max(0, offset + start - left) if left >= 0 else 0
        high = min(kv_len, offset + stop + right) if right >= 0 else kv_len
        hides = left >= 0 and offset + stop - 1 - left > low
        hides = hides or (right >= 0 and offset + start + right < high - 1)
        yield slice(start, stop), slice(low, high), hides


def _is_causal(run: _Run, rows: slice) -> bool:
    """Whether the first of the rows sees the first key alone, and each of the others one more."""
    left, right = run.mask.window_left, run.mask.window_right
    bounded_left = left >= 0 and run.offset + rows.stop - 1 > left
    return (
        right >= 0
        and not run.mask.kv_block
        and not bounded_left
        and run.offset + rows.start + right == 0
    )


def _with_positions(
    bias: Tensor | None, run: _Run, rows: slice, keys: slice, hides: bool, slopes: Tensor | None
) -> Tensor:
    """The bias less what ALiBi takes, and -inf where a row does not see a key: (B or 1, H or 1, rows, keys)."""
    q_pos, k_pos, lens = query_key_positions(run.mask, rows.stop, keys.stop, torch.device("cpu"))
    if (
        run.offset is not None and run.mask.q_start is None
    ):  # the last of the keys, whatever part is looked at
        q_pos = k_pos[:, :1] + run.offset + torch.arange(rows.stop)
    q_pos, k_pos = q_pos[:, rows], k_pos[:, keys]
    if slopes is not None:
        slopes = slopes[None] if slopes.dim() == 1 else slopes[run.sequences]
        distance = (k_pos[:, None, :] - q_pos[:, :, None]).abs()
        alibi = slopes.float()[:, :, None, None] * -distance[:, None]
        bias = alibi if bias is None else bias + alibi
    if bias is None:
        bias = torch.zeros(1, 1, q_pos.shape[1], k_pos.shape[1], dtype=torch.float32)
    if hides:  # last: what is hidden may hold anything
        if run.offset is not None:
            lens = lens.clamp(min=k_pos.shape[1])
        seen = sees(run.mask, q_pos, k_pos, lens)
        bias = bias.masked_fill(~seen[:, None], float("-inf"))
    return bias


def _of_four_dims(attn_mask: Tensor) -> Tensor:
    """A view with a dim of 1 for each by which the mask is broadcast or expanded."""
    entries = attn_mask[(None,) * (4 - attn_mask.dim())]
    for dim in range(4):
        if entries.stride(dim) == 0:
            entries = entries.narrow(dim, 0, 1)
    return entries


def _bias_of_mask(entries: Tensor) -> Tensor:
    """An explicit mask's entries in float32, within what `scores.py` says of them."""
    if entries.dtype == torch.bool:
        zeros = torch.zeros(entries.shape, dtype=torch.float32)
        return zeros.masked_fill(~entries, float("-inf"))
    entries = entries.float()
    return entries.clamp(max=MASK_LIMIT).masked_fill(entries < -MASK_LIMIT, float("-inf"))


def _cut(entries: Tensor, *ranges: slice) -> Tensor:
    """A mask's entries of sequences, rows and keys; dims of size 1 stand for all."""
    for dim, own in zip((0, 2, 3), ranges, strict=True):
        if entries.shape[dim] > 1:
            entries = entries.narrow(dim, own.start, own.stop - own.start)
    return entries
