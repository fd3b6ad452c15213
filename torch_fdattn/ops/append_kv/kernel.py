"""Writing new keys and values into a cache in Triton, one launch: rope, rounding, paging.

A program takes one head of K, of V or of q, and BLOCK_T of the new tokens of one sequence: a decode step has
a program a row, a prefill tiles of 2048 elements. Where many sequences have one token each, as a packed prefill's tokens
do, a tile's rows are of BLOCK_T sequences. Rows of padding are skipped before their page is looked up.

Shapes: k, v (B, H_kv, T, D and DV), q (B, H, T, D); caches (B, H_kv, capacity, D and DV), or pages (P, H_kv,
PAGE, D and DV) behind page_table (B, pages a sequence); scales (B or P, H_kv, capacity or PAGE); cos, sin
(positions, rotary_dim / 2); any strides. The grid depends on shapes only: lengths stay on the device.
Limit: memory-bound by design; elements that turn are read twice, the second time from the L1 cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_fdattn.launch.launches import Launch, run
from torch_fdattn.launch.pdl import await_previous, pdl_trigger
from torch_fdattn.ops.append_kv.arguments import Append
from torch_fdattn.ops.append_kv.rounding import encode
from torch_fdattn.ops.launch import cdiv, padded
from torch_fdattn.ops.library import INTERPRET, launches
from torch_fdattn.ops.pdl import pdl_option, uses_pdl
from torch_fdattn.ops.tiles import program_coordinates

#: Elements of a tile where there are many tokens: 16 a thread, which with the rotation's operands take at most
#: 72 registers on NVIDIA GPUs (more where strides are no multiples of 16 and nothing can be loaded at once).
TILE = 2048
#: Sequences of one token from which on a program takes several; fewer are sooner done with a program each.
MANY_SEQUENCES = 3 if INTERPRET else 1024

#: Names of formats that `rounding.encode` knows.
FORMATS = {
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e5m2: "e5m2",
    torch.int8: "int8",
}


@triton.jit(do_not_specialize=["tokens", "capacity", "page_count", "page_size", "table_positions"])
def _append_kernel(
    k_cache_ptr, v_cache_ptr, page_table_ptr, k_ptr, v_ptr, kv_lens_ptr, new_lens_ptr,
    k_scale_ptr, v_scale_ptr, q_ptr, cos_ptr, sin_ptr, positions_ptr,
    k_cache_strides, v_cache_strides, page_table_strides, k_strides, v_strides, kv_lens_strides,
    new_lens_strides, k_scale_strides, v_scale_strides, q_strides, cos_strides, sin_strides, positions_strides,
    tokens, capacity, page_count, page_size, table_positions, heads, kv_heads,
    k_dim: tl.constexpr, v_dim: tl.constexpr, rotary_dim: tl.constexpr, FORMAT: tl.constexpr, ACROSS: tl.constexpr,
    PDL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # ACROSS: of as many sequences as `tokens` says, one token each.
    await_previous(PDL)
    pdl_trigger(PDL)
    job, block, batch = program_coordinates(heads + 2 * kv_heads, tl.cdiv(tokens, BLOCK_T))
    index = block.to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = index < tokens
    if ACROSS:
        b, t = index, tl.zeros([BLOCK_T], tl.int64)
        if new_lens_ptr is not None:
            real = real & (tl.load(new_lens_ptr + b * new_lens_strides[0], mask=real, other=0) > 0)
        slot = tl.load(kv_lens_ptr + b * kv_lens_strides[0], mask=real, other=0).to(tl.int64)
    else:
        b, t = batch.to(tl.int64), index
        if new_lens_ptr is not None:
            real = real & (t < tl.load(new_lens_ptr + b * new_lens_strides[0]))
        slot = tl.load(kv_lens_ptr + b * kv_lens_strides[0]).to(tl.int64) + t

    # The angles of K's and q's rows.
    position = slot
    if positions_ptr is not None:
        position_ptrs = positions_ptr + b * positions_strides[0] + t * positions_strides[1]
        position = tl.load(position_ptrs, mask=real, other=0).to(tl.int64)
    position = tl.minimum(tl.maximum(position, 0), table_positions - 1)
    angles = (cos_ptr, sin_ptr, cos_strides, sin_strides, position)

    # Names of their own in each branch: Triton merges equal ones, and their shapes and dtypes may differ.
    if job < heads:
        if q_ptr is not None:
            q_rows = q_ptr + b * q_strides[0] + job.to(tl.int64) * q_strides[1] + t * q_strides[2]
            q = _load_rows(q_rows, q_strides[3], real, angles, k_dim, rotary_dim, BLOCK_K)
            # Every element is read by two threads: both must have read it before it is written.
            tl.debug_barrier()
            d = tl.arange(0, BLOCK_K).to(tl.int64)
            tl.store(
                q_rows[:, None] + d[None, :] * q_strides[3], q.to(q_ptr.dtype.element_ty),
                mask=real[:, None] & (d[None, :] < k_dim),
            )  # fmt: skip
    else:
        inside = real & (slot >= 0) & (slot < capacity)
        base = b
        if page_table_ptr is not None:
            page_ptrs = page_table_ptr + b * page_table_strides[0]
            page_ptrs += slot // page_size * page_table_strides[1]
            base = tl.load(page_ptrs, mask=inside, other=-1).to(tl.int64)
            inside = inside & (base >= 0) & (base < page_count)
            slot = slot % page_size
        if job < heads + kv_heads:
            k_head = (job - heads).to(tl.int64)
            k_rows = k_ptr + b * k_strides[0] + k_head * k_strides[1] + t * k_strides[2]
            keys = _load_rows(k_rows, k_strides[3], inside, angles, k_dim, rotary_dim, BLOCK_K)
            _store_rows(
                keys, k_cache_ptr, k_cache_strides, k_scale_ptr, k_scale_strides, base, k_head, slot, inside,
                k_dim, FORMAT, BLOCK_K,
            )  # fmt: skip
        else:
            v_head = (job - heads - kv_heads).to(tl.int64)
            v_rows = v_ptr + b * v_strides[0] + v_head * v_strides[1] + t * v_strides[2]
            values = _load_rows(v_rows, v_strides[3], inside, angles, v_dim, 0, BLOCK_V)
            _store_rows(
                values, v_cache_ptr, v_cache_strides, v_scale_ptr, v_scale_strides, base, v_head, slot, inside,
                v_dim, FORMAT, BLOCK_V,
            )  # fmt: skip


@triton.jit
def _load_rows(
    rows, stride, inside, angles, head_dim: tl.constexpr, rotary_dim: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Rows (BLOCK_T, BLOCK_D) in fp32, their first rotary_dim elements turned."""
    d = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (d < head_dim)[None, :]
    x = tl.load(rows[:, None] + d.to(tl.int64)[None, :] * stride, mask=mask, other=0.0)
    x = x.to(tl.float32)
    if rotary_dim > 0:
        cos_ptr, sin_ptr, cos_strides, sin_strides, position = angles
        half: tl.constexpr = rotary_dim // 2
        turning = inside[:, None] & (d < rotary_dim)[None, :]
        partner = tl.where(d < half, d + half, d - half).to(tl.int64)
        y = tl.load(rows[:, None] + partner[None, :] * stride, mask=turning, other=0.0)
        pair = (d % half).to(tl.int64)
        cos_ptrs = cos_ptr + position[:, None] * cos_strides[0] + pair[None, :] * cos_strides[1]
        sin_ptrs = sin_ptr + position[:, None] * sin_strides[0] + pair[None, :] * sin_strides[1]
        cos = tl.load(cos_ptrs, mask=turning, other=1.0)
        sin = tl.load(sin_ptrs, mask=turning, other=0.0)
        turned = x * cos + y.to(tl.float32) * tl.where((d < half)[None, :], -sin, sin)
        x = tl.where(turning, turned, x)
    return x


@triton.jit
def _store_rows(
    x, cache_ptr, strides, scale_ptr, scale_strides, base, head, slot, inside,
    head_dim: tl.constexpr, FORMAT: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rounds rows to the cache's dtype and writes them to their slots."""
    if scale_ptr is not None:
        scales = base * scale_strides[0] + head * scale_strides[1] + slot * scale_strides[2]
        scale = tl.load(scale_ptr + scales, mask=inside, other=1.0)
        # The division itself must be rounded right, or values between two codes go to the wrong one.
        x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    if FORMAT == "cast":
        value = x.to(cache_ptr.dtype.element_ty)
    else:
        value = encode(x, FORMAT)
    d = tl.arange(0, BLOCK_D).to(tl.int64)
    rows = cache_ptr + base * strides[0] + head * strides[1] + slot * strides[2]
    mask = inside[:, None] & (d[None, :] < head_dim)
    tl.store(rows[:, None] + d[None, :] * strides[3], value, mask=mask)


def launch_append(call: Append) -> None:
    """Makes `append_launches`."""
    run(append_launches(call))


def append_launches(call: Append) -> Iterator[Launch]:
    """What writes k and v to the caches, and turns q in place."""
    batch, kv_heads, tokens, k_dim = call.k.shape
    v_dim, heads = call.v.shape[3], 0 if call.q is None else call.q.shape[1]
    jobs = heads + 2 * kv_heads
    if batch * jobs * tokens == 0:
        return
    launches["append_kv/triton"] += 1
    block_k, block_v = padded(k_dim), padded(v_dim)
    across = tokens == 1 and batch >= MANY_SEQUENCES
    if across:
        tokens, batch = batch, 1
    block_t = 1 if tokens == 1 else TILE // max(block_k, block_v)
    views, pdl = _kernel_views(call), uses_pdl(call.k)
    yield Launch(
        _append_kernel, jobs * cdiv(tokens, block_t) * batch,
        *views, *(None if x is None else x.stride() for x in views),
        tokens, call.capacity, call.k_cache.shape[0], call.k_cache.shape[2],
        1 if call.cos is None else call.cos.shape[0], heads, kv_heads,
        k_dim, v_dim, call.rotary_dim, FORMAT=FORMATS.get(call.k_cache.dtype, "cast"), ACROSS=across,
        PDL=pdl, BLOCK_T=block_t, BLOCK_K=block_k, BLOCK_V=block_v, num_warps=1 if tokens == 1 else 4, **pdl_option(pdl),
    )  # fmt: skip


def _kernel_views(call: Append) -> tuple[Tensor | None, ...]:
    """The call's tensors as the kernel takes them: float8 as bits, scales with a stride for every slot."""
    k_scale, v_scale = call.k_scale, call.v_scale
    slots = call.k_cache.shape[:3]
    return call._replace(
        k_cache=as_bits(call.k_cache),
        v_cache=as_bits(call.v_cache),
        k_scale=k_scale if k_scale is None else k_scale.expand(slots),
        v_scale=v_scale if v_scale is None else v_scale.expand(slots),
    )


def as_bits(cache: Tensor) -> Tensor:
    """A float8 cache as the kernels take it."""
    is_float8 = cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    return cache.view(torch.uint8) if is_float8 else cache
