"""The Python entries of decode: keywords with defaults, one frame above `torch.ops.fdattn`.

The default of softcap is the int 0: of a float, torch.compile(dynamic=True) makes an input of the graph and traces the
function twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops import library
from torch_fdattn.ops.attention.inputs import empty_state
from torch_fdattn.ops.decode import op
from torch_fdattn.ops.decode.inputs import checked_call
from torch_fdattn.ops.layout import Layout, from_bhsd, to_bhsd
from torch_fdattn.ops.options import DecodeOptions, default_scale, window_bounds
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.scores import Scores


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, kv_lens: Tensor | None = None, *,
    causal: bool = True, window: tuple[int, int] | None = None, scale: float | None = None,
    q_start: Tensor | None = None, kv_start: Tensor | None = None,
    kv_block: int = 0, kv_stride: int = 0,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, softcap: float = 0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, batch_invariant: bool = False,
    attn_mask: Tensor | None = None, layout: Layout = "bhsd",
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
        batch_invariant: a sequence of n keys is cut into ⌈n / 1024⌉ splits, so that its results are the same
            bits whatever else is in the batch (`docs/notes/decode.md`).
        attn_mask: as `attention`'s, broadcastable to (B, H, T, capacity): left padding, say. It is read where it
            lies; what it hides is not skipped.
        layout: "bshd": q, the caches and out are (B, T, H, D) and (B, capacity, H_kv, D), as flash-attn's; nothing is
            copied. The lse stays (B, H, T); masks and scales broadcast as above.
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
    if layout != "bhsd":
        q, k_cache, v_cache = to_bhsd(layout, q=q, k_cache=k_cache, v_cache=v_cache)
        given, out = out, out_to_bhsd(layout, out)
    if type(causal) is not bool or type(batch_invariant) is not bool:
        checks.expect_bool(causal=causal, batch_invariant=batch_invariant)
    if type(kv_block) is not int or type(kv_stride) is not int:
        checks.expect_int64(kv_block=kv_block, kv_stride=kv_stride)
    if scale is not None:
        scale = checks.number("scale", scale)
    left, right = (-1, -1) if window is None else window_bounds(window)
    mask = Mask(kv_lens, q_start, kv_start, left, 0 if causal else right, kv_block, kv_stride)
    scores = Scores(softcap, alibi_slopes, sinks, attn_mask)
    options = DecodeOptions(mask, scale, scores, k_scale, v_scale, batch_invariant)
    if out is None and workspace is None and library.can_bypass_dispatcher(
        q, k_cache, v_cache, kv_lens, q_start, kv_start, k_scale, v_scale, alibi_slopes, sinks, attn_mask
    ):  # fmt: skip
        state = op.decode_eagerly(q, k_cache, v_cache, None, options)
    else:
        state = call_op((q, k_cache, v_cache), options, out, workspace)
    if layout == "bhsd":
        return state
    return from_bhsd(state) if out is None else tuple(given)


def paged_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, kv_lens: Tensor | None = None, *,
    causal: bool = True, window: tuple[int, int] | None = None, scale: float | None = None,
    q_start: Tensor | None = None, kv_start: Tensor | None = None,
    kv_block: int = 0, kv_stride: int = 0,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, softcap: float = 0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, batch_invariant: bool = False,
    layout: Layout = "bhsd",
    out: tuple[Tensor, Tensor] | None = None, workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`decode` over a cache of pages, which sequences share as a table says.

    Args:
        k_cache, v_cache: pages (P, H_kv, page, D) and (P, H_kv, page, DV) of any size from one token up,
            any strides: memory in the order NHD is a transposed view, or layout="bshd", pages (P, page, H_kv, D).
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
    if layout != "bhsd":
        q, k_cache, v_cache = to_bhsd(layout, q=q, k_cache=k_cache, v_cache=v_cache)
        given, out = out, out_to_bhsd(layout, out)
    if type(causal) is not bool or type(batch_invariant) is not bool:
        checks.expect_bool(causal=causal, batch_invariant=batch_invariant)
    if type(kv_block) is not int or type(kv_stride) is not int:
        checks.expect_int64(kv_block=kv_block, kv_stride=kv_stride)
    if scale is not None:
        scale = checks.number("scale", scale)
    left, right = (-1, -1) if window is None else window_bounds(window)
    mask = Mask(kv_lens, q_start, kv_start, left, 0 if causal else right, kv_block, kv_stride)
    scores = Scores(softcap, alibi_slopes, sinks)
    options = DecodeOptions(mask, scale, scores, k_scale, v_scale, batch_invariant)
    if out is None and workspace is None and page_table is not None and library.can_bypass_dispatcher(
        q, k_cache, v_cache, page_table, kv_lens, q_start, kv_start, k_scale, v_scale, alibi_slopes, sinks
    ):  # fmt: skip
        state = op.decode_eagerly(q, k_cache, v_cache, page_table, options)
    else:
        state = call_op((q, k_cache, v_cache, page_table), options, out, workspace)
    if layout == "bhsd":
        return state
    return from_bhsd(state) if out is None else tuple(given)


def decode_workspace(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor | None = None, *,
    batch_invariant: bool = False, layout: Layout = "bhsd",
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
    if layout != "bhsd":
        q, k_cache, v_cache = to_bhsd(layout, q=q, k_cache=k_cache, v_cache=v_cache)
    checked_call(q, k_cache, v_cache, page_table, DecodeOptions(scale=1.0))
    size = op.workspace_size(q, k_cache, v_cache, page_table, batch_invariant)
    return torch.empty(size, dtype=torch.int32, device=q.device)


def call_op(
    inputs: tuple[Tensor, ...], options: DecodeOptions, out: tuple[Tensor, Tensor] | None,
    workspace: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op decode of (q, k_cache, v_cache), or paged_decode of these with a page_table, by an entry's options."""
    check_types(inputs, options)
    if out is not None or workspace is not None:
        return _decode_into(inputs, options, out, workspace)
    mask, scale, (softcap, alibi_slopes, sinks, attn_mask), k_scale, v_scale, invariant, _ = options
    kv_lens, q_start, kv_start, left, right, kv_block, kv_stride = mask
    keywords = dict(
        causal=right == 0, window_left=left, window_right=right, kv_block=kv_block, kv_stride=kv_stride,
        scale=scale, k_scale=k_scale, v_scale=v_scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        batch_invariant=invariant,
    )  # fmt: skip
    if len(inputs) == 4:
        return torch.ops.fdattn.paged_decode(*inputs, kv_lens, q_start, kv_start, **keywords)
    return torch.ops.fdattn.decode(
        *inputs, kv_lens, q_start, kv_start, **keywords, attn_mask=attn_mask
    )


def check_types(inputs: tuple[Tensor, ...], options: DecodeOptions) -> None:
    """What the dispatcher would refuse with a whole schema in place of an argument's name."""
    mask, scores = options.mask, options.scores
    checks.expect_types(
        tuple(zip(("q", "k_cache", "v_cache", "page_table"), inputs, strict=False)), mask[:3], options.scale,
        scores.softcap, k_scale=options.k_scale, v_scale=options.v_scale, alibi_slopes=scores.alibi_slopes,
        sinks=scores.sinks, attn_mask=scores.attn_mask,
    )  # fmt: skip
    checks.expect_int64(kv_block=mask.kv_block, kv_stride=mask.kv_stride)


def out_to_bhsd(layout: Layout, out: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """(out, lse) to write into, given in this layout."""
    return None if out is None else (*to_bhsd(layout, out=pair_of_tensors(out)[0]), out[1])


def pair_of_tensors(out: object) -> tuple[Tensor, Tensor]:
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        raise TypeError(f"out must be a pair of tensors (out, lse), got {type(out).__name__}")
    for name, tensor in zip(("out", "lse"), out, strict=True):
        checks.expect_tensor(name, tensor)
    return out


def _decode_into(
    inputs: tuple[Tensor, ...], options: DecodeOptions, out, workspace
) -> tuple[Tensor, Tensor]:
    q, v_cache = inputs[0], inputs[2]
    if out is None:
        checks.expect_4d("q", q)
        checks.expect_4d("v_cache", v_cache)
        out = empty_state(q, v_cache)
    pair_of_tensors(out)
    if workspace is not None:
        checks.expect_tensor("workspace", workspace)
    paged = len(inputs) == 4
    raw = torch.ops.fdattn.paged_decode_out if paged else torch.ops.fdattn.decode_out
    options = DecodeOptions(options.mask, default_scale(q, options.scale), *options[2:])
    written = dict(out=out[0], lse=out[1], workspace=workspace)
    raw(*inputs, *options.to_raw(has_dtype=False, paged=paged), **written)
    return tuple(out)
