"""What every kernel launch needs: mask arguments in order, and sizes."""

from __future__ import annotations

from torch import Tensor

from torch_fdattn.ops.attention.dropout import Dropout
from torch_fdattn.ops.mask_strides import mask_strides, opaque
from torch_fdattn.ops.packed import Packed, key_capacity
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores

#: SMs of an H100 and an H200; a number of its own of each device would not be equal on all ranks.
NUM_SMS = 132


def contiguous_mask(mask: Mask) -> Mask:
    """The mask with contiguous per-sequence tensors, which kernels index by batch alone."""
    if all(x is None or x.is_contiguous() for x in mask[:3]):
        return mask
    return Mask(*(x if x is None else x.contiguous() for x in mask[:3]), *mask[3:])


def mask_numbers(mask: Mask) -> tuple[int, int, int, int]:
    """(window_left, window_right, kv_block, kv_stride)."""
    return mask[3:]


def mask_flags(mask: Mask) -> dict[str, bool]:
    """The compile-time switches that follow from a mask."""
    return {
        "HAS_LEFT": mask.window_left >= 0,
        "HAS_RIGHT": mask.window_right >= 0,
        "BLOCK_CYCLIC": mask.kv_block > 0,
    }


def kernel_options(
    scores: Scores, q: Tensor, k: Tensor, dropout: Dropout, packed: Packed | None = None
) -> tuple:
    """What attention's kernels take of `scores` and `dropout`, None for what is absent: that costs them nothing."""
    slopes, sinks, mask = scores.alibi_slopes, scores.sinks, broadcast_mask(scores, q, k, packed)
    has_rows = mask and scores.attn_mask.dim() > 1 and scores.attn_mask.shape[-2] > 1
    drops = dropout.threshold > 0
    batch = q.shape[0] if packed is None else packed.sequences
    return (
        scores.softcap or None,
        slopes, None if slopes is None else slopes.expand(batch, -1).stride(),
        sinks, None if sinks is None else sinks.stride(0),
        scores.attn_mask, mask_strides(*mask) if mask else None,
        dropout.seed.contiguous() if drops else None,
        dropout.threshold if drops else None, dropout.factor if drops else None,
        # Of packed sequences the longest may be longer than the mask, expanded ones included: the gradient is not.
        opaque(mask[0].shape[2]) if packed is not None and has_rows else None,
        # Whether the seed says which head is the first. Always a constant (None or 1) at the end: triton 3.6 forgets those
        # in the strides (a stride of 1) when it copies a tuple of which no later member is one (the stale type of
        # `set_iterable_path`).
        1 if drops and dropout.counts_heads_from_seed else None,
    )  # fmt: skip


def broadcast_mask(
    scores: Scores, q: Tensor, k: Tensor, packed: Packed | None = None
) -> list[Tensor]:
    """The explicit mask as a view (B, H, S, S_kv), where there is one.

    Of packed sequences rows and columns are the mask's own, and as many as there are tokens where it has but one.
    """
    mask = scores.attn_mask
    if mask is None:
        return []
    if packed is None:
        return [mask.expand(*q.shape[:3], k.shape[2])]
    mask = mask[(None,) * (4 - mask.dim())]
    rows, columns = (
        size if size > 1 else whole
        for size, whole in zip(mask.shape[2:], (q.shape[2], key_capacity(k, packed)), strict=True)
    )
    return [mask.expand(packed.sequences, q.shape[1], rows, columns)]


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up, in a tenth of triton.cdiv's time on the host."""
    return -(-a // b)


def power_of_two(size: int) -> int:
    """The next one, at least 1."""
    return 1 << (size - 1).bit_length()


def padded(size: int) -> int:
    """The next power of two, at least 16: the smallest side of a tensor-core tile."""
    return max(16, power_of_two(size))


#: Dims from which on the swizzle of a two-byte tile is the widest.
_SWIZZLED_DIMS = 64


def tile_dims(k: Tensor, v: Tensor) -> tuple[int, int]:
    """Head dims of the tiles of K and of V, with one swizzle for both.

    Tiles that pass through registers (of quantised caches, or with gaps between elements or rows) share memory, one
    after the other: with another swizzle for V than for K, ptxas (of triton 3.6 and 3.7) made V's descriptors
    from registers that it had never written. A swizzle follows from the dim that lies innermost, which is the keys'
    where a head's elements have gaps; of those there are 64 at least.
    """
    block_d, block_dv = padded(k.shape[-1]), padded(v.shape[-1])
    gaps = k.stride(-1) != 1 or v.stride(-1) != 1
    least = _SWIZZLED_DIMS if gaps else min(_SWIZZLED_DIMS, max(block_d, block_dv))
    return max(block_d, least), max(block_dv, least)


def wide_rows(*tensors: Tensor) -> bool:
    """Whether a tile of 128 rows of 256 elements, or 64 of 512, can span 2**31 elements of a (B, H, S, D) tensor."""
    return any(
        x.stride(2) >= 1 << 23 or x.stride(3) >= 1 << (22 if x.shape[3] <= 256 else 21)
        for x in tensors
    )
