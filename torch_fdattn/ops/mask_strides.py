"""Strides of explicit masks as kernels take them, so that few kernels serve all ways to broadcast and all lengths.

Triton compiles a kernel anew where a number is 1 or a multiple of 16, within tuples whatever `do_not_specialize` says.
A mask has six such numbers, which made hundreds of kernels of it, though the code gains by two things alone: loads of
whole vectors, 5 times as fast, which need every number to be a multiple of 16, and keys known to be contiguous. So
numbers come as they are where all are multiples, and else as what never is one (`opaque`). Imports no triton.
"""

from __future__ import annotations

from torch import Tensor


def opaque(number: int) -> int:
    """For a tuple of a kernel's arguments, where it is neither 1 nor a multiple of 16; `score_tiles.plain` is the way back."""
    return 2 * number + 3


def mask_strides(mask: Tensor, by_query: bool = False) -> tuple[int | None, ...]:
    """(batch, heads, queries, keys, columns, form) of a mask (B, H, S, S_kv), for `score_tiles.mask_stride`.

    Queries that share one row have None, unless by_query; so have contiguous keys, where that is of use: in
    vectors, or between rows. The form is None where numbers are as they are.
    """
    of_batch, of_heads, of_queries, of_keys = mask.stride()
    columns = mask.shape[3]
    of_keys = of_keys if columns > 1 else 1
    numbers = of_batch, of_heads, of_queries, columns, mask.data_ptr()
    vectors = of_keys == 1 and not any(x % 16 for x in numbers)
    shown = int if vectors else opaque
    shared = of_queries == 0 and not by_query
    contiguous = of_keys == 1 and (vectors or not shared)
    return (
        shown(of_batch), shown(of_heads), None if shared else shown(of_queries),
        None if contiguous else opaque(of_keys), shown(columns), None if vectors else 0,
    )  # fmt: skip


def of_vectors(strides: tuple[int | None, ...] | None) -> bool:
    """Whether a mask of such strides, if there is one, is read in whole vectors."""
    return strides is None or strides[5] is None
