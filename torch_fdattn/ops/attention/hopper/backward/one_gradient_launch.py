"""The launches of Hopper's backward for head dims above 128: one for each gradient (`one_gradient.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from torch_fdattn.launch.device import num_sms
from torch_fdattn.launch.launches import Launch
from torch_fdattn.ops.attention.hopper.backward.one_gradient import attention_gradient_kernel
from torch_fdattn.ops.attention.hopper.backward.terms import described_terms
from torch_fdattn.ops.attention.hopper.backward.tiles import GROUPS, QUERIES
from torch_fdattn.ops.attention.hopper.launch import described, section, strides_of
from torch_fdattn.ops.attention.hopper.rows import ROWS
from torch_fdattn.ops.launch import cdiv
from torch_fdattn.ops.options import AttentionOptions

WIDE_HEAD_DIM = 256


def wide_launches(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dq: Tensor, dk: Tensor, dv: Tensor,
    rows: tuple[Tensor, Tensor], counter: Tensor,
) -> Iterator[Launch]:  # fmt: skip
    """As `hopper_backward_launches`, behind the terms of rows: without sums, in one order."""
    made = options, rows, counter, q.shape[2], k.shape
    yield _launch("dv", (k, v), (q, dout), dv, *made)
    yield _launch("dk", (k, v), (q, dout), dk, *made)
    yield _launch("dq", (q, dout), (k, v), dq, *made)


def _launch(
    gradient: str, of_rows: tuple[Tensor, Tensor], of_columns: tuple[Tensor, Tensor], out: Tensor,
    options: AttentionOptions, rows: tuple[Tensor, Tensor], counter: Tensor, q_len: int, k_shape: tuple[int, ...],
) -> Launch:  # fmt: skip
    mask, scale, scores = options[:3]
    batch, heads, length, _ = out.shape
    kv_heads, capacity = k_shape[1:3]
    group = max(heads, of_columns[0].shape[1]) // kv_heads
    own = GROUPS.value * ROWS.value
    columns = of_columns[0].shape[2] * of_columns[0].shape[3] * of_columns[0].element_size()
    of_queries = gradient == "dq"
    # Heads of a section read the columns of one KV head, or each those of its group.
    sections = (batch * heads, group, 2 * columns) if of_queries else (batch * heads, 1, 2 * group * columns)  # fmt: skip
    block = [1, 1, ROWS.value, WIDE_HEAD_DIM]
    keys = QUERIES.value if of_queries else own
    return Launch(
        attention_gradient_kernel, min(cdiv(length, own) * batch * heads, num_sms(out.device)),
        *(described(x, block) for x in (*of_rows, *of_columns)), *map(described_terms, rows), *rows,
        described(out, block), out, counter, *mask[:3], q_len, capacity, batch, heads, group, section(*sections),
        mask.window_left, mask.window_right, scale, scores.softcap or None, scores.alibi_slopes,
        *strides_of(scores.alibi_slopes, batch), GRADIENT=gradient,
        HAS_LEFT=mask.window_left >= 0, HAS_RIGHT=mask.window_right >= 0,
        RAGGED=mask.kv_lens is not None or capacity % keys != 0, num_warps=4,
    )  # fmt: skip
