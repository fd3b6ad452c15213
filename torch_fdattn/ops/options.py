"""A call's options as one object, on their way from an op's schema or its Python entry to its launch.

Options are spelled out where a user sees them: in the schemas, whose parts stand here, and in the Python entries
(`entry.py` of each op). Each class knows its place in a raw op's positional arguments: `from_raw` reads it, `to_raw`
writes it.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops.attention.dropout import NO_DROPOUT, Dropout
from torch_fdattn.ops.positions import FAR, Mask
from torch_fdattn.ops.scores import NO_SCORES, Scores

#: Of every raw op, behind its tensors: the fields of `Mask`, then the scale.
MASK_SCHEMA = (
    "Tensor? kv_lens, Tensor? q_start, Tensor? kv_start, int window_left, int window_right, "
    "SymInt kv_block, SymInt kv_stride, float scale"
)
#: Of attention's ops, at the end: the fields of `Scores`, then of `Dropout`.
SCORES_SCHEMA = (
    "float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? attn_mask=None, "
    "float dropout_p=0.0, Tensor? dropout_seed=None"
)
#: Of decode's ops, at the end, over pages and over a contiguous cache.
PAGED_DECODE_SCHEMA = (
    "Tensor? k_scale=None, Tensor? v_scale=None, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, bool batch_invariant=False"
)
DECODE_SCHEMA = f"{PAGED_DECODE_SCHEMA}, Tensor? attn_mask=None"
#: Of every composite, in place of MASK_SCHEMA.
COMPOSITE_SCHEMA = (
    "Tensor? kv_lens=None, Tensor? q_start=None, Tensor? kv_start=None, *, {causal}, "
    "int window_left=-1, int window_right=-1, SymInt kv_block=0, SymInt kv_stride=0, "
    "float? scale=None"
)
#: Of every composite, at the end.
LAYOUT_SCHEMA = "str layout='bhsd'"
_MASK, _SCORES = len(Mask._fields), len(Scores._fields)
#: Where a raw op that has a dtype has it: behind the scale.
_DTYPE = _MASK + 1


class AttentionOptions(NamedTuple):
    """What `attention` and `varlen_attention` take besides queries, keys and values."""

    mask: Mask = Mask()
    scale: float = 1.0
    scores: Scores = NO_SCORES
    dropout: Dropout = NO_DROPOUT
    dtype: torch.dtype | None = None  # of the results; None: the inputs'

    @classmethod
    def from_raw(cls, tail: tuple, has_dtype: bool = True) -> AttentionOptions:
        """Of a raw op's last positional arguments. Defaults at their end do not come."""
        rest = tail[_DTYPE + has_dtype :]
        return cls(
            _mask_of(tail), tail[_MASK], Scores(*rest[:_SCORES]), Dropout(*rest[_SCORES:]),
            tail[_DTYPE] if has_dtype else None,
        )  # fmt: skip

    def to_raw(self, has_dtype: bool = True) -> tuple:
        dtype = (self.dtype,) if has_dtype else ()
        return *self.mask, self.scale, *dtype, *self.scores, *self.dropout


class DecodeOptions(NamedTuple):
    """What `decode` and `paged_decode` take besides queries, a cache and a page table."""

    mask: Mask = Mask()
    scale: float | None = None  # None: the default, which the call's checks put here
    scores: Scores = NO_SCORES
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    batch_invariant: bool = False
    dtype: torch.dtype | None = None  # of out; None: q's

    @classmethod
    def from_raw(cls, tail: tuple, has_dtype: bool = True) -> DecodeOptions:
        """Of a raw op's last positional arguments. Defaults at their end do not come."""
        rest, dtype = tail[_DTYPE:], None
        if has_dtype and rest:
            dtype, *rest = rest
        k_scale, v_scale, softcap, alibi_slopes, sinks, batch_invariant, attn_mask = (
            *rest, *_DECODE_DEFAULTS[len(rest) :],
        )  # fmt: skip
        scores = Scores(softcap, alibi_slopes, sinks, attn_mask)
        mask, scale = Mask(*tail[:_MASK]), tail[_MASK]
        return cls(mask, scale, scores, k_scale, v_scale, batch_invariant, dtype)

    def to_raw(self, has_dtype: bool = True, paged: bool = False) -> tuple:
        softcap, alibi_slopes, sinks, attn_mask = self.scores
        dtype = (self.dtype,) if has_dtype else ()
        of_rows = () if paged else (attn_mask,)
        return (
            *self.mask, self.scale, *dtype, self.k_scale, self.v_scale, softcap, alibi_slopes, sinks,
            self.batch_invariant, *of_rows,
        )  # fmt: skip


_DECODE_DEFAULTS = (None, None, 0.0, None, None, False, None)


def _mask_of(tail: tuple) -> Mask:
    """The mask at the beginning of `tail`, its windows within FAR."""
    kv_lens, q_start, kv_start, left, right, kv_block, kv_stride = tail[:_MASK]
    return Mask(kv_lens, q_start, kv_start, min(left, FAR), min(right, FAR), kv_block, kv_stride)


def with_dtype(tail: tuple, dtype: torch.dtype | None) -> tuple:
    """A raw op's last positional arguments, given those of one without a dtype."""
    return *tail[:_DTYPE], dtype, *tail[_DTYPE:]


def options_to_mask(
    kv_lens, q_start, kv_start, causal, window_left, window_right, kv_block, kv_stride
) -> Mask:  # fmt: skip
    """A composite's keywords as a mask; causal is a right window of 0."""
    checks.check_window(window_left, window_right)
    right = 0 if causal else window_right
    return Mask(kv_lens, q_start, kv_start, window_left, right, kv_block, kv_stride).clamped


def default_scale(q: Tensor, scale: float | None) -> float:
    if scale is not None:
        return scale
    checks.expect_tensor("q", q)
    # Where q has another rank than the op's, the raw op's checks say so.
    return q.shape[-1] ** -0.5 if q.dim() in (3, 4) and q.shape[-1] else 1.0


def window_bounds(window: tuple[int, int] | None) -> tuple[int, int]:
    """(left, right) of an entry's window, -1 where unbounded, within FAR."""
    if window is None:
        return -1, -1
    try:
        left, right = map(operator.index, window)
    except (TypeError, ValueError):
        raise TypeError(f"window must be two ints (left, right) or None, got {window!r}") from None
    checks.check_window(left, right)
    return min(left, FAR), min(right, FAR)
