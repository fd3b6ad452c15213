"""The launch of Hopper's backward that makes one gradient (`one_gradient.py`)."""

from __future__ import annotations

from torch import Tensor

from torch_fdattn.launch.device import num_sms
from torch_fdattn.launch.launches import Launch
from torch_fdattn.ops.attention.hopper.backward.one_gradient import attention_gradient_kernel
from torch_fdattn.ops.attention.hopper.backward.terms import described_terms
from torch_fdattn.ops.attention.hopper.backward.tiles import GROUPS
from torch_fdattn.ops.attention.hopper.launch import described, section, strides_of
from torch_fdattn.ops.attention.hopper.rows import ROWS
from torch_fdattn.ops.launch import cdiv
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.packed import Packed


def gradient_launch(
    gradient: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, out: Tensor,
    rows: tuple[Tensor, Tensor], counter: Tensor, dim: int, packed: Packed | None = None,
    slope_sums: Tensor | None = None,
) -> Launch:  # fmt: skip
    """What writes dQ, dK or dV into out: "dq", "dk", "dv"; the rest as `hopper_backward_launches`.

    dim: the head dim that the kernel computes with.
    packed, slope_sums: of "dq".
    """
    of_queries = gradient == "dq"
    of_rows, of_columns = ((q, dout), (k, v)) if of_queries else ((k, v), (q, dout))
    mask, scale, scores = options[:3]
    batch, heads, length, _ = out.shape
    kv_heads, capacity = k.shape[1:3]
    group = q.shape[1] // kv_heads
    own = GROUPS.value * ROWS.value
    # Heads of a section read the columns of one KV head, or each those of its group.
    read = 2 * of_columns[0].shape[2] * of_columns[0].shape[3] * of_columns[0].element_size()
    sections = (batch * heads, group, read) if of_queries else (batch * heads, 1, group * read)
    blocks, sequences, begins = cdiv(length, own) * batch, batch, (None, None)
    if packed is not None:
        assert of_queries
        blocks, sequences = packed.blocks(length, own), packed.sequences
        begins = packed.cu_seqlens_q.contiguous(), packed.begins_of_keys.contiguous()
    # 128 columns of both products' results fill half of a thread's registers, which gradients of head dim 64 leave free.
    columns = 2 * ROWS.value if of_queries and dim <= 64 else ROWS.value
    keys = columns if of_queries else own
    row_block, column_block = [1, 1, ROWS.value, dim], [1, 1, columns, dim]
    return Launch(
        attention_gradient_kernel, min(blocks * heads, num_sms(out.device)),
        *(described(x, row_block) for x in of_rows), *(described(x, column_block) for x in of_columns),
        *map(described_terms, rows), *rows, described(out, row_block), out, counter, *mask[:3], *begins, q.shape[2], capacity,
        sequences, heads, group, section(*sections), mask.window_left, mask.window_right, scale, scores.softcap or None,
        scores.alibi_slopes, *strides_of(scores.alibi_slopes, sequences), slope_sums, GRADIENT=gradient,
        HAS_LEFT=mask.window_left >= 0, HAS_RIGHT=mask.window_right >= 0,
        RAGGED=packed is not None or mask.kv_lens is not None or capacity % keys != 0, num_warps=4,
    )  # fmt: skip
