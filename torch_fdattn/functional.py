"""The Python entries of the ops: keywords with defaults, one frame above `torch.ops.fdattn`.

The defaults of softcap and dropout_p are the int 0: of a float, torch.compile(dynamic=True) makes an input of the
graph and traces the function twice.
"""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.launch import prepared
from torch_fdattn.ops import library
from torch_fdattn.ops.append_kv import op as append_op
from torch_fdattn.ops.attention import op as attention_op
from torch_fdattn.ops.attention.op import default_scale, options_to_mask
from torch_fdattn.ops.decode import op as decode_op
from torch_fdattn.ops.positions import FAR, Mask
from torch_fdattn.ops.scores import Scores


def attention(
    q: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor | None = None, *,
    causal: bool = False, window: tuple[int, int] | None = None, scale: float | None = None,
    q_start: Tensor | None = None, kv_start: Tensor | None = None,
    kv_block: int = 0, kv_stride: int = 0,
    softcap: float = 0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    attn_mask: Tensor | None = None, dropout_p: float = 0, dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax attention with its log-sum-exp: ``softmax(scale · q kᵀ + mask) v``.

    Args:
        q: queries (B, H, S, D), bfloat16, float16 or float32 (float64 on the CPU), any strides;
            D a multiple of 8 from 16 to 512 (right, but not fast, above 256).
        k, v: keys (B, H_kv, S_kv, D) and values (B, H_kv, S_kv, DV), H a multiple of H_kv (GQA, MQA), any
            strides; DV as D.
        kv_lens: int32 (B,) on q's device; how many keys of each sequence are valid, clamped to
            [0, S_kv]. None: all.
        causal: a query sees keys up to its own position.
        window: (left, right): a query at position p sees keys at p - left … p + right; -1 is unbounded, and
            beyond 2**29 is 2**29. torch.compile compiles anew for each left and right.
        scale: of the scores; default D ** -0.5. Positive; a 0-dim tensor is read, which waits for its device.
        q_start: int32 (B,), position of the first query, clamped to ±2**29. Default: the queries are the
            last of the keys (bottom-right alignment).
        kv_start: int32 (B,), position of the first key, clamped to ±2**29. Default 0.
        kv_block, kv_stride: key j stands at ``kv_start + (j // kv_block) · kv_stride + j % kv_block``,
            the position map of a cache sharded round-robin, below 2**29; 0: contiguous.
        softcap: scores become ``softcap · tanh(score / softcap)``; 0: none.
        alibi_slopes: (H,) or (B, H): scores lose ``slope · |q_pos - k_pos|``, after the cap.
        sinks: (H,): a logit that joins each row's softmax and adds nothing to its output. The lse
            returned includes it, so that ``exp(score - lse)`` are the weights.
        attn_mask: as torch's SDPA, of any shape broadcastable to (B, H, S, S_kv) and any strides, read where it
            is: boolean (True: visible), or of any float dtype, added to the scores after all else. It joins causal,
            window and kv_lens; key j is its column j, wherever that key stands. -inf hides a key, and so do entries
            below -1e38 (SDPA would weigh keys by them where a row has no others); +inf counts as 1e38, so that
            such keys share the row between them. Its gradient is summed over the dims by which it is broadcast,
            one program for each tile of the mask, which takes long for a mask of few elements.
            Derivatives take their weights from the float32 lse. Where every key that a row sees has an entry beyond
            1e5 in size, they lose digits (0.3 % there), and beyond 1e8 (padding by -1e9, several +inf) each such key
            counts as if it were alone: hide by -inf.
        dropout_p: each weight is dropped with this probability, rounded to a multiple of 2**-16, and the others
            are divided by 1 - p; lse is that without dropout. Which ones follows from seed, batch, head and
            positions alone, on every device the same (`ops/attention/dropout.py`).
        dropout_seed: int64 (2,) on q's device: seed and offset. Default: drawn on the device from torch's
            generator, or as `set_deterministic` says; within vmap by its `randomness`. Of DTensors it must be given.

    Returns:
        out (B, H, S, DV) in q's dtype and memory layout, and lse (B, H, S) float32 (float64 for float64 inputs), natural
        logarithm.
        A query that sees no key has out 0 and lse -inf (or its head's sink). Both are differentiable in q, k,
        v, alibi_slopes, sinks and a floating attn_mask, once: in reverse mode, in forward mode (torch.func.jvp,
        torch.autograd.forward_ad) and in torch.func's transforms. Tangents are computed by torch's own matmuls, in
        memory linear in the lengths; with dropout they wait for the device. Derivatives of derivatives raise.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.

    Source: FlashAttention-2, arXiv:2307.08691.

    Examples:
        >>> q = torch.randn(2, 8, 128, 64)
        >>> k, v = torch.randn(2, 2, 2, 128, 64)  # each KV head serves 4 query heads
        >>> out, lse = torch_fdattn.attention(q, k, v, causal=True, window=(32, 0))
        >>> out.shape, lse.shape
        (torch.Size([2, 8, 128, 64]), torch.Size([2, 8, 128]))

        Padding on the right costs nothing as lengths:

        >>> lens = torch.tensor([128, 40], dtype=torch.int32)
        >>> out, _ = torch_fdattn.attention(q, k, v, lens)
    """
    scale = checks.number("scale", scale)
    options = kv_lens, q_start, kv_start, alibi_slopes, sinks, attn_mask
    drops = dropout_seed is not None or type(dropout_p) not in (int, float) or dropout_p != 0
    unseen = not drops and library.runs_unseen(q, k, v, *options)
    key = None
    if unseen and (window is None or type(window) is tuple):
        numbers = causal, window, scale, kv_block, kv_stride, softcap
        key = attention_op.key_of("attention", q, k, v, *options, *numbers)
        found = attention_op.attend_prepared(prepared.checked(key), q, k, v, options)
        if found is not None:
            return found
    left, right = window_bounds(window)
    tensors = ("q", q), ("k", k), ("v", v)
    expect_types(
        tensors, (kv_lens, q_start, kv_start), scale, softcap, dropout_p, alibi_slopes=alibi_slopes,
        sinks=sinks, attn_mask=attn_mask, dropout_seed=dropout_seed,
    )  # fmt: skip
    checks.expect_int64(kv_block=kv_block, kv_stride=kv_stride)
    checks.expect_bool(causal=causal)
    if unseen:
        strided = checks.plain_int("kv_block", kv_block), checks.plain_int("kv_stride", kv_stride)
        mask = options_to_mask(kv_lens, q_start, kv_start, causal, left, right, *strided)
        scores = Scores(checks.plain_float("softcap", softcap), alibi_slopes, sinks, attn_mask)
        scale = checks.plain_float("scale", default_scale(q, scale))
        return attention_op.attend_directly(key, q, k, v, mask, scale, scores)
    return torch.ops.fdattn.attention(
        q, k, v, kv_lens, q_start, kv_start, causal=causal, window_left=left, window_right=right,
        kv_block=kv_block, kv_stride=kv_stride, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes,
        sinks=sinks, attn_mask=attn_mask, dropout_p=dropout_p, dropout_seed=dropout_seed,
    )  # fmt: skip


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None, *,
    page_table: Tensor | None = None, kv_lens: Tensor | None = None,
    causal: bool = False, window: tuple[int, int] | None = None, scale: float | None = None,
    q_start: Tensor | None = None, kv_start: Tensor | None = None,
    kv_block: int = 0, kv_stride: int = 0,
    softcap: float = 0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
    attn_mask: Tensor | None = None, dropout_p: float = 0, dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` of packed sequences: tokens one after the other, without padding, lengths on the device.

    Sequence b has the queries ``q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]]`` and sees its own keys alone. No longest
    length is asked for: grids follow from the number of tokens and of sequences.

    Args:
        q: queries (T, H, D) of all sequences, of `attention`'s dtypes and head dims, any strides.
        k, v: keys (T_k, H_kv, D) and values (T_k, H_kv, DV), packed as cu_seqlens_k says, any strides. With
            page_table: pages (P, H_kv, page, D) and (P, H_kv, page, DV), the caches of `paged_append_kv` and
            `paged_decode`.
        cu_seqlens_q: int32 (B + 1,) on q's device: where each sequence's queries begin, and where the last
            one's end. It grows from 0 to at most T; tokens behind its end belong to no sequence. Not checked
            (TORCH_FDATTN_CHECK=1 does), but whatever it holds, nothing outside of the tensors is touched.
        cu_seqlens_k: the same for keys and values. Default: as cu_seqlens_q.
        page_table: int32 (B, pages a sequence) on q's device: key j of sequence b is slot j % page of page
            page_table[b, j // page]. Entries beyond a sequence's keys, or before all that its window lets it
            see, may be anything; keys on a page outside [0, P) are masked. For chunked prefill: a backward raises.
        kv_lens: int32 (B,) on q's device; how many keys of each sequence are valid, clamped to what it has.
            Default: all (with page_table, all slots of its row).
        q_start, kv_start: int32 (B,), as in `attention`. Default: a sequence's queries are the last of its keys.
        alibi_slopes: (H,) or (B, H).
        attn_mask: as in `attention`, broadcastable to (B, H, M, N): query i and key j of sequence b, both counted
            from the sequence's own first, take the entry [b, h, i, j]. M and N are 1 or at least the longest
            sequence's queries and keys (with page_table, valid keys), which is checked where lengths lie on the
            host, or with TORCH_FDATTN_CHECK=1; beyond it nothing outside of the mask is read.
        dropout_p, dropout_seed: as in `attention`, of batch b for sequence b.

    The other arguments are those of `attention`, the errors too.

    Returns:
        out (T, H, DV) in q's dtype and memory layout, and lse (H, T) float32 (float64 for float64 inputs). A
        query that sees no key has out 0 and lse -inf (or its head's sink), and so has a token of no sequence
        (never a sink). Both are differentiable in q, k, v, alibi_slopes, sinks and an additive attn_mask, as
        `attention`'s are; tangents read the lengths on the host.

    Source: flash_attn_varlen_func of FlashAttention-2, arXiv:2307.08691; torch.nn.attention.varlen.

    Examples:
        >>> q = torch.randn(10, 8, 64)  # a sequence of 3 tokens and one of 7
        >>> k, v = torch.randn(2, 10, 2, 64)
        >>> begins = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> out, lse = torch_fdattn.varlen_attention(q, k, v, begins, causal=True)
        >>> out.shape, lse.shape
        (torch.Size([10, 8, 64]), torch.Size([8, 10]))
    """
    scale = checks.number("scale", scale)
    left, right = window_bounds(window)
    tensors = ("q", q), ("k", k), ("v", v), ("cu_seqlens_q", cu_seqlens_q)
    expect_types(
        tensors, (kv_lens, q_start, kv_start), scale, softcap, dropout_p, cu_seqlens_k=cu_seqlens_k,
        page_table=page_table, alibi_slopes=alibi_slopes, sinks=sinks, attn_mask=attn_mask, dropout_seed=dropout_seed,
    )  # fmt: skip
    checks.expect_int64(kv_block=kv_block, kv_stride=kv_stride)
    checks.expect_bool(causal=causal)
    return torch.ops.fdattn.varlen_attention(
        q, k, v, cu_seqlens_q, cu_seqlens_k, page_table, kv_lens, q_start, kv_start, causal=causal,
        window_left=left, window_right=right, kv_block=kv_block, kv_stride=kv_stride, scale=scale,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, attn_mask=attn_mask, dropout_p=dropout_p,
        dropout_seed=dropout_seed,
    )  # fmt: skip


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_lens: Tensor | None = None, *,
    causal: bool = True, window: tuple[int, int] | None = None, scale: float | None = None,
    q_start: Tensor | None = None, kv_start: Tensor | None = None,
    kv_block: int = 0, kv_stride: int = 0,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, softcap: float = 0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, batch_invariant: bool = False,
    attn_mask: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None, workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of 1 to 16 new tokens a sequence over its preallocated cache.

    Args:
        q: queries (B, H, T, D), 1 <= T <= 16: by default the last T of the valid keys.
        k_cache, v_cache: (B, H_kv, capacity, D) and (B, H_kv, capacity, DV), taken as they are: slices and
            permuted views of a larger buffer are not copied. In q's dtype, or quantised: float8_e4m3fn,
            float8_e5m2 or int8.
        kv_lens: int32 (B,) on q's device: valid keys of each sequence, the T new ones included. Not to be
            overwritten by another stream while the call runs: its programs share out the work by it.
        k_scale, v_scale: float32, broadcastable to (B, H_kv, capacity): a quantised key is
            k_cache · k_scale. Default 1.
        softcap: scores become ``softcap · tanh(score / softcap)``; 0: none.
        alibi_slopes: (H,) or (B, H): scores lose ``slope · |q_pos - k_pos|``, after the cap.
        sinks: (H,): a logit that joins each row's softmax and adds nothing to its output. The lse
            returned includes it, so that ``exp(score - lse)`` are the weights.
        batch_invariant: a sequence of n keys is cut into ⌈n / 1024⌉ pieces, so that its results are the same
            bits whatever else is in the batch (`docs/notes/decode.md`).
        attn_mask: as `attention`'s, broadcastable to (B, H, T, capacity): left padding, say. It is read where it
            lies; what it hides is not skipped.
        out: (out, lse) to write into, of the shapes and dtypes below, lse contiguous, out not expanded.
        workspace: `decode_workspace`'s, for callers who manage memory themselves.

    The other arguments, the results and the errors are those of `attention`; derivatives of both
    modes are defined for q, k_cache, v_cache, alibi_slopes, sinks and a floating attn_mask where the cache is
    not quantised.

    Source: Flash-Decoding (split KV), with GQA groups packed into one tile.

    Examples:
        >>> k_cache, v_cache = torch.randn(2, 2, 2, 4096, 64)  # (B, H_kv, capacity, D) each
        >>> lens = torch.tensor([100, 3000], dtype=torch.int32)  # the new token included
        >>> q = torch.randn(2, 8, 1, 64)
        >>> out, lse = torch_fdattn.decode(q, k_cache, v_cache, lens)
        >>> out.shape, lse.shape
        (torch.Size([2, 8, 1, 64]), torch.Size([2, 8, 1]))

        A cache in float8, with one scale:

        >>> k8, v8 = (x.to(torch.float8_e4m3fn) for x in (k_cache, v_cache))
        >>> one = torch.ones(())
        >>> out, _ = torch_fdattn.decode(q, k8, v8, lens, k_scale=one, v_scale=one)
    """
    scale = checks.number("scale", scale)
    left, right = (-1, -1) if window is None else window_bounds(window)
    extras = (k_scale, v_scale, softcap, alibi_slopes, sinks, batch_invariant, attn_mask)
    if out is None and workspace is None and library.runs_unseen(
        q, k_cache, v_cache, kv_lens, q_start, kv_start, k_scale, v_scale, alibi_slopes, sinks, attn_mask
    ):  # fmt: skip
        return decode_op.decode_eagerly(
            q, k_cache, v_cache, None, kv_lens, q_start, kv_start, left, 0 if causal else right, kv_block,
            kv_stride, scale, None, *extras,
        )  # fmt: skip
    tensors = ("q", q), ("k_cache", k_cache), ("v_cache", v_cache)
    expect_types(
        tensors, (kv_lens, q_start, kv_start), scale, softcap, k_scale=k_scale, v_scale=v_scale,
        alibi_slopes=alibi_slopes, sinks=sinks, attn_mask=attn_mask,
    )  # fmt: skip
    checks.expect_int64(kv_block=kv_block, kv_stride=kv_stride)
    checks.expect_bool(causal=causal)
    if out is not None or workspace is not None:
        mask = options_to_mask(kv_lens, q_start, kv_start, causal, left, right, kv_block, kv_stride)
        return _decode_out((q, k_cache, v_cache), mask, scale, extras, out, workspace)
    return torch.ops.fdattn.decode(
        q, k_cache, v_cache, kv_lens, q_start, kv_start, causal=causal, window_left=left,
        window_right=right, kv_block=kv_block, kv_stride=kv_stride, scale=scale, k_scale=k_scale,
        v_scale=v_scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        batch_invariant=batch_invariant, attn_mask=attn_mask,
    )  # fmt: skip


def paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, kv_lens: Tensor | None = None, *,
    causal: bool = True, window: tuple[int, int] | None = None, scale: float | None = None,
    q_start: Tensor | None = None, kv_start: Tensor | None = None,
    kv_block: int = 0, kv_stride: int = 0,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, softcap: float = 0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, batch_invariant: bool = False,
    out: tuple[Tensor, Tensor] | None = None, workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`decode` over a cache of pages, which sequences share as a table says.

    Args:
        k_cache, v_cache: pages (P, H_kv, page, D) and (P, H_kv, page, DV) of any size from one token up,
            any strides: memory in the order NHD is a transposed view.
        page_table: int32 (B, pages a sequence) on q's device: token j of sequence b is slot j % page of page
            page_table[b, j // page]. Entries beyond a sequence's length may be anything; keys on a page
            outside [0, P) are masked.
        k_scale, v_scale: broadcastable to (P, H_kv, page).

    All else is as with `decode`. Not differentiable: a backward raises.

    Source: PagedAttention, arXiv:2309.06180.

    Examples:
        >>> k_pages, v_pages = torch.randn(2, 8, 2, 16, 64)  # 8 pages of 16 tokens each
        >>> table = torch.tensor([[3, 1], [0, 7]], dtype=torch.int32)
        >>> lens = torch.tensor([20, 9], dtype=torch.int32)
        >>> q = torch.randn(2, 8, 1, 64)
        >>> out, lse = torch_fdattn.paged_decode(q, k_pages, v_pages, table, lens)
        >>> out.shape
        torch.Size([2, 8, 1, 64])
    """
    scale = checks.number("scale", scale)
    left, right = (-1, -1) if window is None else window_bounds(window)
    extras = (k_scale, v_scale, softcap, alibi_slopes, sinks, batch_invariant)
    given = page_table is not None and out is None and workspace is None
    if given and library.runs_unseen(
        q, k_cache, v_cache, page_table, kv_lens, q_start, kv_start, k_scale, v_scale, alibi_slopes, sinks
    ):  # fmt: skip
        return decode_op.decode_eagerly(
            q, k_cache, v_cache, page_table, kv_lens, q_start, kv_start, left, 0 if causal else right, kv_block,
            kv_stride, scale, None, *extras,
        )  # fmt: skip
    tensors = ("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("page_table", page_table)
    expect_types(
        tensors, (kv_lens, q_start, kv_start), scale, softcap, k_scale=k_scale, v_scale=v_scale,
        alibi_slopes=alibi_slopes, sinks=sinks,
    )  # fmt: skip
    checks.expect_int64(kv_block=kv_block, kv_stride=kv_stride)
    checks.expect_bool(causal=causal)
    if out is not None or workspace is not None:
        mask = options_to_mask(kv_lens, q_start, kv_start, causal, left, right, kv_block, kv_stride)
        return _decode_out((q, k_cache, v_cache, page_table), mask, scale, extras, out, workspace)
    return torch.ops.fdattn.paged_decode(
        q, k_cache, v_cache, page_table, kv_lens, q_start, kv_start, causal=causal, window_left=left,
        window_right=right, kv_block=kv_block, kv_stride=kv_stride, scale=scale, k_scale=k_scale,
        v_scale=v_scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        batch_invariant=batch_invariant,
    )  # fmt: skip


def expect_types(tensors, bounds, scale, softcap, dropout_p=0.0, **extras) -> None:
    given = (pair for pair in extras.items() if pair[1] is not None)
    checks.expect_types((*tensors, *given), bounds, scale)
    if type(softcap) is not float:
        checks.expect_convertible("softcap", softcap)
    if type(dropout_p) is not float:
        checks.expect_convertible("dropout_p", dropout_p)


def decode_workspace(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor | None = None, *,
    batch_invariant: bool = False,
) -> Tensor:  # fmt: skip
    """Scratch memory for `decode` or `paged_decode` calls of these shapes: int32, flat, of any contents.

    Calls that can run at the same time need one each, captured CUDA graphs included; without it the ops
    allocate for themselves.

    Examples:
        >>> q = torch.randn(1, 8, 1, 64)
        >>> k_cache, v_cache = torch.randn(2, 1, 2, 256, 64)
        >>> workspace = torch_fdattn.decode_workspace(q, k_cache, v_cache)
        >>> out, lse = torch_fdattn.decode(q, k_cache, v_cache, workspace=workspace)
    """
    decode_op.check_inputs_alone(q, k_cache, v_cache, page_table, batch_invariant)
    size = decode_op.workspace_size(q, k_cache, v_cache, page_table, batch_invariant)
    return torch.empty(size, dtype=torch.int32, device=q.device)


def _decode_out(inputs: tuple[Tensor, ...], mask: Mask, scale, extras, out, workspace):
    q, v_cache = inputs[0], inputs[2]
    if out is None:
        checks.expect_4d("q", q)
        checks.expect_4d("v_cache", v_cache)
        out = decode_op.empty_state(q, v_cache)
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"out must be a pair of tensors (out, lse), got {type(out).__name__}")
    op = torch.ops.fdattn.paged_decode_out if len(inputs) == 4 else torch.ops.fdattn.decode_out
    op(
        *inputs,
        *mask,
        default_scale(q, scale),
        *extras,
        out=out[0],
        lse=out[1],
        workspace=workspace,
    )
    return tuple(out)


def append_kv(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor,
    new_lens: Tensor | None = None, *,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    q: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None,
    positions: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes new keys and values into a preallocated cache, in place, in one launch.

    Token t of sequence b goes to position ``kv_lens[b] + t``; positions outside of the cache are dropped.

    Args:
        k_cache, v_cache: (B, H_kv, capacity, D) and (B, H_kv, capacity, D_v), any strides; bfloat16,
            float16, float32, or quantised: float8_e4m3fn, float8_e5m2, int8.
        k, v: (B, H_kv, T, D) and (B, H_kv, T, D_v), any float dtype and strides.
        kv_lens: int32 (B,), the lengths *before* the call. It stays as it is: add to it yourself.
        new_lens: int32 (B,), how many of each sequence's T tokens are real; the others are neither
            stored nor turned. Default: all.
        k_scale, v_scale: of quantised caches alone, float32, broadcastable to (B, H_kv, capacity): per
            tensor, head or position. Stored is x / scale, rounded to nearest, ties to even, saturated to
            ±448, ±57344 or ±127. NaN stays NaN in float8 and is 0 in int8. Default 1.
        cos, sin: float32 (positions, rotary_dim / 2): turns the first rotary_dim elements of k (half-split
            layout), in float32, before it is rounded, once.
        q: (B, H, T, D) like k, turned in place with it.
        positions: int32 or int64 (B, T), into cos and sin. Default: the cache's positions. Clamped to
            the table.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came.
        NotImplementedError: an argument requires gradients, and grad mode is on.

    Examples:
        >>> k_cache, v_cache = torch.zeros(2, 2, 2, 64, 16)
        >>> lens = torch.tensor([10, 0], dtype=torch.int32)
        >>> k, v = torch.randn(2, 2, 2, 1, 16)  # one new token a sequence
        >>> torch_fdattn.append_kv(k_cache, v_cache, k, v, lens)
        >>> torch.equal(k_cache[0, :, 10], k[0, :, 0])
        True
        >>> lens += 1
    """
    options = (new_lens, k_scale, v_scale, q, cos, sin, positions)
    given = k_cache, v_cache, k, v, kv_lens, *options
    if kv_lens is not None and library.runs_unseen(*given):
        return append_op.append_eagerly(k_cache, v_cache, None, k, v, kv_lens, *options)
    tensors = ("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v), ("kv_lens", kv_lens)
    _expect_append_types(tensors, options)
    torch.ops.fdattn.append_kv(k_cache, v_cache, k, v, kv_lens, *options)


def paged_append_kv(
    k_cache: Tensor, v_cache: Tensor, page_table: Tensor, k: Tensor, v: Tensor, kv_lens: Tensor,
    new_lens: Tensor | None = None, *,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    q: Tensor | None = None, cos: Tensor | None = None, sin: Tensor | None = None,
    positions: Tensor | None = None,
) -> None:  # fmt: skip
    """`append_kv` into a paged cache.

    Args:
        k_cache, v_cache: (P, H_kv, page, D) and (P, H_kv, page, D_v), any strides and page size.
        page_table: int32 (B, pages a sequence): position p of sequence b is slot ``p % page`` of page
            ``page_table[b, p // page]``. Entries that are not needed are not read; what would go to a page
            outside of [0, P) is dropped. A page that is written to must belong to one sequence alone.
        k_scale, v_scale: broadcastable to (P, H_kv, page).

    The other arguments and the errors are those of `append_kv`.

    Examples:
        >>> k_pages, v_pages = torch.zeros(2, 8, 2, 16, 64)
        >>> table = torch.tensor([[3, 1], [0, 7]], dtype=torch.int32)
        >>> lens = torch.tensor([20, 9], dtype=torch.int32)
        >>> k, v = torch.randn(2, 2, 2, 1, 64)
        >>> torch_fdattn.paged_append_kv(k_pages, v_pages, table, k, v, lens)
        >>> torch.equal(k_pages[1, :, 4], k[0, :, 0])  # position 20 is slot 4 of the second page
        True
    """
    options = (new_lens, k_scale, v_scale, q, cos, sin, positions)
    tensors = (
        ("k_cache", k_cache), ("v_cache", v_cache), ("page_table", page_table), ("k", k), ("v", v),
        ("kv_lens", kv_lens),
    )  # fmt: skip
    _expect_append_types(tensors, options)
    torch.ops.fdattn.paged_append_kv(k_cache, v_cache, page_table, k, v, kv_lens, *options)


def _expect_append_types(tensors: tuple, options: tuple) -> None:
    names = ("new_lens", "k_scale", "v_scale", "q", "cos", "sin", "positions")
    given = ((n, x) for n, x in zip(names, options, strict=True) if x is not None)
    checks.expect_types((*tensors, *given))


def merge_states(
    outs: Tensor, lses: Tensor, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over a union of disjoint key sets from the partial results.

    Args:
        outs: (N, B, H, S, D) partial outputs, each normalised over its own keys.
        lses: (N, B, H, S) float32 natural log-sum-exp of each part, -inf where a part saw no key (its
            outs are then ignored, whatever they hold).
        dtype: of the merged output; default outs' dtype.

    Returns:
        out (B, H, S, D) and lse (B, H, S) float32 (float64 like lses); 0 and -inf where no part saw a key. Differentiable
        once, in either mode.

    Source: arXiv:2501.01005, section 2.2.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 4, 32, 16)
        >>> halves = [torch_fdattn.attention(q, k[:, :, s], v[:, :, s]) for s in (slice(0, 16), slice(16, 32))]
        >>> out, lse = torch_fdattn.merge_states(*map(torch.stack, zip(*halves)))
        >>> torch.allclose(out, torch_fdattn.attention(q, k, v)[0], atol=1e-5)
        True
    """
    checks.expect_types((("outs", outs), ("lses", lses)))
    return torch.ops.fdattn.merge_states(outs, lses, dtype=dtype)


def window_bounds(window: tuple[int, int] | None) -> tuple[int, int]:
    if window is None:
        return -1, -1
    try:
        left, right = map(operator.index, window)
    except (TypeError, ValueError):
        raise TypeError(f"window must be two ints (left, right) or None, got {window!r}") from None
    checks.check_window(left, right)
    return min(left, FAR), min(right, FAR)
