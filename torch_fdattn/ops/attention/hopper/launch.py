"""The launch of Hopper's forward: what it takes, its descriptors, and the order of its tiles."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from torch_fdattn.launch.device import num_sms
from torch_fdattn.launch.launches import Launch
from torch_fdattn.ops.attention.hopper.kernel import attention_forward_kernel
from torch_fdattn.ops.attention.hopper.rows import ROWS
from torch_fdattn.ops.attention.hopper.slots import GROUPS
from torch_fdattn.ops.launch import cdiv
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.packed import Packed, key_capacity

#: That the kernel computes with (`padded`).
HEAD_DIMS = (64, 128, 192, 256)
#: A stride of whole 16 bytes.
_ANY_STRIDE = 128
_HALF = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_DTYPES = {**_HALF, torch.float8_e4m3fn: gl.float8e4nv, torch.float32: gl.float32}
#: Keys and values of a section of heads, which its tiles read repeatedly. An H100's L2 has 50 MB, of which each half of
#: the SMs has its own copies. 16 MB: 1 % faster than 32 in the middle of nine cases, 8 as fast, but 4 % slower at 4k causal.
_SECTION_BYTES = 16 << 20
#: Above it a capped score, cap − 2 · cap / (e^2x + 1), has an error of more than 2e-4.
_LARGEST_CAP = 1e3
#: Below it, hidden scores and capped ones would leave float32's range before they are scaled.
_LEAST_SCALE = 1e-30


def takes(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, packed: Packed | None = None
) -> bool:
    """Whether the kernel can read tensors that lie like these, and has what the options ask for."""
    return (
        q.dtype in _HALF
        and options.dtype in (None, q.dtype, torch.float32)
        and _has_what_is_asked(q, v, options)
        and all(map(is_describable, (q, k, v)))
        and (packed is None or packed.page_table is None or _takes_pages(*k.shape[2:]))
    )


def takes_fp8(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    """As `takes`, of float8_e4m3fn; values lie anyhow."""
    return _has_what_is_asked(q, v, options) and is_describable(q) and is_describable(k)


def _has_what_is_asked(q: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    return (
        q.shape[3] == v.shape[3]
        and 32 < q.shape[3] <= 256
        and q.shape[3] % 8
        == 0  # results are contiguous where inputs have gaps, their rows 16 bytes too
        and not options.mask.kv_block
        and _LEAST_SCALE < options.scale < float("inf")
        and (
            options.scores.softcap == 0.0
            or (
                options.scores.softcap <= _LARGEST_CAP
                and _LEAST_SCALE < options.scores.softcap / options.scale < float("inf")
            )
        )
    )


def _takes_pages(page: int, head_dim: int) -> bool:
    """Whether whole pages make a block of keys, of not too many copies, or whole blocks a page."""
    return page in (16, 32, 64) or page % keys_of_a_block(head_dim) == 0


def is_aligned(*tensors: Tensor) -> bool:
    """Whether tensors begin where a descriptor can."""
    return all(x.data_ptr() % 16 == 0 for x in tensors)


def padded(head_dim: int) -> int:
    """The head dim that the kernel computes with: a copy fills what is beyond the tensor's with zeros."""
    return next(dim for dim in HEAD_DIMS if head_dim <= dim)


def keys_of_a_block(head_dim: int) -> int:
    """With 256, 128 keys and values twice do not fit beside the queries."""
    return 128 if head_dim <= 128 else 64


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, out: Tensor, lse: Tensor, counter: Tensor,
    packed: Packed | None = None, scales: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Launch:  # fmt: skip
    """What writes attention of q, k, v into out and lse (fp32, contiguous).

    Of packed sequences the tensors are (1, heads, tokens, D), and lse is (heads, tokens).
    scales: of fp8, what q's, k's and v's heads are multiplied by; v is transposed then, by `fp8.py`.
    counter: int32 (1,), 0, of no other launch that may run at the same time; it is 0 again afterwards.
    """
    batch, heads, q_len, head_dim = q.shape
    kv_heads, capacity = k.shape[1], key_capacity(k, packed)
    mask, scores = options.mask, options.scores
    parts = 3 if padded(head_dim) == 192 else 1
    dim, keys = padded(head_dim) // parts, keys_of_a_block(head_dim)
    tile_rows = GROUPS.value * ROWS.value
    ragged = (
        packed is not None
        or mask.kv_lens is not None
        or mask.q_start is not None
        or capacity % keys != 0
    )
    # Rows whose own diagonal ends within their first block of keys alone keep their queries in registers: with more
    # blocks to hide there is no room, and the compiler unpacks queries of 8 bits.
    aligned = not ragged and (capacity - q_len) % keys == 0 and q_len % tile_rows == 0
    in_registers = scales is None and (
        head_dim <= 64 or (head_dim <= 128 and mask.window_left < 0 and aligned)
    )
    # A distance is a difference there, and small for keys that count: tensor cores lose bits of what they add to a large
    # bias, which positions may give to all keys. A cap comes between product and bias.
    bias_first = (
        scores.alibi_slopes is not None
        and mask.window_right == 0
        and mask.q_start is None
        and not scores.softcap
        and scales is None
    )
    tiles = cdiv(q_len, tile_rows) * batch * heads
    sequences, begins = batch if packed is None else packed.sequences, (None, None)
    # Whether two heads may share a tile (`tiles.Call`). Such a tile takes longer, so only where tiles are more than SMs. Of
    # packed sequences the host knows no lengths: it counts a tile of each head for each sequence, or for each 128 tokens.
    pairs = heads // kv_heads % 2 == 0 and max(tiles, sequences * heads) > num_sms(q.device)
    if packed is not None:
        tiles = packed.blocks(q_len, tile_rows) * heads
        begins = packed.cu_seqlens_q.contiguous(), packed.begins_of_keys.contiguous()
    else:
        pairs = pairs and q_len <= ROWS.value
        tiles //= 1 + pairs
    block, pages = [1, 1, keys, dim], (None, None, None)
    if packed is not None and packed.page_table is not None:
        table = packed.page_table
        # In shared memory 64 columns of a block's rows lie together.
        block = [1, 1, min(k.shape[2], keys), 64]
        pages, begins = (table, *table.stride()), (begins[0], None)
    own, columns = [1, 1, ROWS.value, dim], [1, 1, dim, keys]
    return Launch(
        attention_forward_kernel, min(tiles, num_sms(q.device)),
        described(q, own), described(k, block), described(v, block if scales is None else columns), described(out, own),
        out, lse, counter, *mask[:3], *begins, q_len, capacity, sequences, heads, heads // kv_heads, int(pairs),
        section(batch * heads, heads // kv_heads, 2 * capacity * head_dim * q.element_size()),
        mask.window_left, mask.window_right,
        options.scale, *(scales or (None, None, None)), scores.softcap or None,
        scores.alibi_slopes, *strides_of(scores.alibi_slopes, sequences),
        scores.sinks, None if scores.sinks is None else scores.sinks.stride(0), *pages,
        KEYS=keys, PARTS=parts, HAS_LEFT=mask.window_left >= 0, HAS_RIGHT=mask.window_right >= 0, RAGGED=ragged,
        Q_IN_REGISTERS=in_registers, BIAS_FIRST=bias_first, num_warps=4,
    )  # fmt: skip


def strides_of(slopes: Tensor | None, batch: int) -> tuple[int | None, ...]:
    """Of ALiBi's slopes, (heads,) or (batch, heads)."""
    return (None, None) if slopes is None else slopes.expand(batch, -1).stride()


def section(heads: int, group: int, bytes_of_a_kv_head: int) -> int:
    """Heads of a section: sections of equal size, so that no small one is left at the end."""
    most = max(1, _SECTION_BYTES // max(1, bytes_of_a_kv_head)) * group
    return cdiv(heads, cdiv(heads, most))


def described(x: Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, _DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), _steps(x), block, layout)


def _steps(x: Tensor) -> list[int]:
    """Strides, where that of a dim of one entry, which says nothing, is one that a descriptor takes."""
    return [
        step if n > 1 else _ANY_STRIDE for n, step in zip(x.shape[:3], x.stride(), strict=False)
    ] + [x.stride(3)]


def is_describable(x: Tensor) -> bool:
    """Whether x lies as a descriptor needs it: 16-byte steps, the last dim contiguous, no dim expanded or empty."""
    return (
        x.stride(3) == 1
        and x.numel() > 0
        and all(step > 0 and step * x.element_size() % 16 == 0 for step in _steps(x)[:3])
    )
