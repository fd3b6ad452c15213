"""torch's flash attention ops by our kernels: what `activate_flash_attention_impl("FDATTN")` does.

    aten::_scaled_dot_product_flash_attention, …_backward   what SDPA calls where it has chosen flash
    aten::_flash_attention_forward, …_backward              varlen_attn, nested tensors; dense tensors too
    aten::_flash_attention_forward_no_dropout_inplace       varlen_attn_out, where this torch has it

The CUDA kernels of these five are replaced until `torch.nn.attention.restore_flash_attention_impl()`. A call
that ours cannot answer exactly as torch's own would (`UNSUPPORTED_REASONS`) goes to torch's own kernel, captured before;
`fallbacks` counts those by reason. Which calls SDPA sends to flash is SDPA's to decide, as before: no explicit
mask, float16 or bfloat16, is_causal with as many queries as keys.

A forward by the one and a backward by the other fit: out and lse mean the same, and calls with dropout, whose
seeds would not, are torch's alone.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from torch_fdattn.ops.positions import FAR

_log = logging.getLogger(__name__)

#: Why a call goes to torch's own kernel. Codes are stable.
UNSUPPORTED_REASONS = {
    "alibi": "alibi_slopes are given",
    "causal-lengths": "is_causal with other numbers of queries and keys: SDPA and flash align them differently",
    "cu-seqlens": "cum_seq_q and cum_seq_k are not both int32, or one of them is missing",
    "debug-mask": "the debug mask is asked for",
    "device": "the tensors are not all on one device",
    "dropout": "dropout draws its seeds as torch does, and its backward reads them so",
    "dtype": "the tensors are not all float16, or all bfloat16",
    "empty": "a tensor without elements",
    "head-dim": "the head dims are not the same multiple of 8 from 16 to 256",
    "length": "2**29 queries or 2**30 keys",
    "lse": "logsumexp is not float32 of the queries' shape",
    "out": "out is not of query's dtype and device, and of the result's shape",
    "paged": "block_table without seqused_k, or not int32 with a row for each sequence",
    "rank": "not four dimensions, or three with cum_seq_q",
    "scale": "scale is not a positive finite number",
    "shape": "the sizes of query, key and value do not fit",
    "split": "a number of splits is asked for",
}
#: Calls that went to torch's own kernels since the process began, by the key of UNSUPPORTED_REASONS.
fallbacks: Counter[str] = Counter()

_HALF = (torch.float16, torch.bfloat16)


def _unsupported(
    query: Tensor, others: tuple[Tensor, ...], heads: int, scale: float | None
) -> str | None:
    """The code of a reason against ours, of any call; others: key, value, and in a backward what else is in their dtype.

    heads: the dimension of the heads. The last dimension is the head's, and key is like value but in that.
    """
    key, value = others[:2]
    if query.dtype not in _HALF or any(x.dtype != query.dtype for x in others):
        return "dtype"
    if any(x.device != query.device for x in others):
        return "device"
    if any(x.dim() != query.dim() for x in others):
        return "rank"
    if not query.numel() or not key.numel():
        return "empty"
    dim = query.shape[-1]
    if dim % 8 or not 16 <= dim <= 256 or key.shape[-1] != dim or value.shape[-1] != dim:
        return "head-dim"
    if key.shape != value.shape or query.shape[heads] % key.shape[heads]:
        return "shape"
    if scale is not None and not 0.0 < scale < math.inf:
        return "scale"
    return None


def _unsupported_dense(query, others, heads, is_causal, scale) -> str | None:
    """Of (B, H, S, D) with heads = 1, or (B, S, H, D) with heads = 2."""
    if query.dim() != 4:
        return "rank"
    if reason := _unsupported(query, others, heads, scale):
        return reason
    if query.shape[0] != others[0].shape[0]:
        return "shape"
    queries, keys = query.shape[3 - heads], others[0].shape[3 - heads]
    if queries >= FAR or keys >= 2 * FAR:
        return "length"
    return "causal-lengths" if is_causal and queries != keys else None


def _unsupported_varlen(query, others, cum_seq_q, cum_seq_k, scale) -> str | None:
    if query.dim() != 3:
        return "rank"
    if cum_seq_k is None or any(x.dtype != torch.int32 for x in (cum_seq_q, cum_seq_k)):
        return "cu-seqlens"
    if cum_seq_q.shape != cum_seq_k.shape or cum_seq_q.dim() != 1:
        return "cu-seqlens"
    if any(x.device != query.device for x in (cum_seq_q, cum_seq_k)):
        return "device"
    if reason := _unsupported(query, others, 1, scale):
        return reason
    return "length" if query.shape[0] >= FAR or others[0].shape[0] >= 2 * FAR else None


def _unsupported_paged(query, key, value, cum_seq_q, seqused_k, block_table, scale) -> str | None:
    """Of queries (T, H, D) and pages (P, page, H_kv, D)."""
    if query.dim() != 3 or key.dim() != 4 or value.dim() != 4:
        return "rank"
    if cum_seq_q is None or cum_seq_q.dtype != torch.int32 or cum_seq_q.dim() != 1:
        return "cu-seqlens"
    sequences = cum_seq_q.shape[0] - 1
    if seqused_k is None or seqused_k.shape != (sequences,) or block_table.dtype != torch.int32:
        return "paged"
    if block_table.dim() != 2 or block_table.shape[0] != sequences or not block_table.numel():
        return "paged"
    if any(x.device != query.device for x in (cum_seq_q, block_table)):
        return "device"
    if not key.numel() or not value.numel():
        return "empty"
    if reason := _unsupported(query, (key[:, 0], value[:, 0]), 1, scale):
        return reason
    if key.shape != value.shape:
        return "shape"
    keys = block_table.shape[1] * key.shape[1]
    return "length" if query.shape[0] >= FAR or keys >= 2 * FAR else None


def _tail(
    query: Tensor, is_causal: bool, scale: float | None, left: int | None = None,
    right: int | None = None, kv_lens: Tensor | None = None,
) -> tuple:  # fmt: skip
    """A raw op's arguments from kv_lens to out_dtype."""
    left, right = (-1 if x is None or x < 0 else min(x, FAR) for x in (left, right))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return kv_lens, None, None, left, 0 if is_causal else right, 0, 0, scale, None


def _unused_results(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and debug_attn_mask, which a call without dropout leaves unwritten."""
    rng_state = torch.empty(2, dtype=torch.uint64, device=query.device)
    return rng_state, torch.empty((), dtype=torch.uint64, device=query.device), query.new_empty(0)


# A function for each op: the code of a reason against ours, or else our call, to be made. First those of SDPA, on
# (B, H, S, D).


def _sdpa_forward(
    query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None
) -> str | Callable[[], tuple]:
    if dropout_p or return_debug_mask:
        return "dropout" if dropout_p else "debug-mask"
    if reason := _unsupported_dense(query, (key, value), 1, is_causal, scale):
        return reason

    def run():
        tail = _tail(query, is_causal, scale)
        out, lse = torch.ops.fdattn.attention_forward(query, key, value, *tail)
        return out, lse, None, None, query.shape[2], key.shape[2], *_unused_results(query)

    return run


def _sdpa_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, philox_seed, philox_offset, *, scale=None,
) -> str | Callable[[], tuple]:  # fmt: skip
    if dropout_p:
        return "dropout"
    if logsumexp.dtype != torch.float32 or logsumexp.shape != query.shape[:-1]:
        return "lse"
    if reason := _unsupported_dense(query, (key, value, grad_out, out), 1, is_causal, scale):
        return reason
    state = grad_out, None, query, key, value, out, logsumexp
    return lambda: torch.ops.fdattn.attention_backward(*state, *_tail(query, is_causal, scale))


# Packed, (T, H, D) with cum_seq_q; or dense, (B, S, H, D).


def _flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
    block_table=None, num_splits=None,
) -> str | Callable[[], tuple]:  # fmt: skip
    given = (
        ("dropout", dropout_p), ("debug-mask", return_debug_mask), ("alibi", alibi_slopes is not None),
        ("split", (num_splits or 0) > 1),
    )  # fmt: skip
    if reason := next((code for code, there in given if there), None):
        return reason
    paged = block_table is not None
    dense = cum_seq_q is None and not paged
    if dense and (cum_seq_k is not None or seqused_k is not None):
        return "cu-seqlens"
    if seqused_k is not None and seqused_k.dtype != torch.int32:
        return "cu-seqlens"
    if seqused_k is not None and seqused_k.device != query.device:
        return "device"
    if dense:
        reason = _unsupported_dense(query, (key, value), 2, is_causal, scale)
    elif paged:
        where = cum_seq_q, seqused_k, block_table
        reason = _unsupported_paged(query, key, value, *where, scale)
    else:
        reason = _unsupported_varlen(query, (key, value), cum_seq_q, cum_seq_k, scale)
    if reason:
        return reason

    def run():
        tail = _tail(query, is_causal, scale, window_size_left, window_size_right, seqused_k)
        if dense:
            qkv = (x.transpose(1, 2) for x in (query, key, value))
            out, lse = torch.ops.fdattn.attention_forward(*qkv, *tail)
            return out.transpose(1, 2), _as_flash(lse), *_unused_results(query)
        if paged:  # seqused_k counts the keys, whatever cum_seq_k says
            packed = query, key.transpose(1, 2), value.transpose(1, 2), cum_seq_q, None, block_table
        else:
            packed = query, key, value, cum_seq_q, cum_seq_k, None
        out, lse = torch.ops.fdattn.varlen_attention_forward(*packed, *tail)
        if cum_seq_q is not cum_seq_k or seqused_k is not None:
            lse = _as_flash(lse)
        return out, lse, *_unused_results(query)

    return run


def _flash_forward_into(out, query, *args, **options) -> str | Callable[[], Tensor]:
    """The same with a given out, which is copied into: our kernels write to memory of their own."""
    run = _flash_forward(query, *args, **options)
    if isinstance(run, str):
        return run
    if (out.shape, out.dtype, out.device) != (query.shape, query.dtype, query.device):
        return "out"

    def write():
        result, lse, *_ = run()
        out.copy_(result)
        return lse

    return write


def _as_flash(lse: Tensor) -> Tensor:
    """Rows without keys: flash writes +inf, and its backward, should it come to that, needs it."""
    return torch.where(lse == -math.inf, math.inf, lse)


def _flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
) -> str | Callable[[], tuple]:  # fmt: skip
    if dropout_p:
        return "dropout"
    dense, others = cum_seq_q is None, (key, value, grad_out, out)
    if dense:
        reason = _unsupported_dense(query, others, 2, is_causal, scale)
    else:
        reason = _unsupported_varlen(query, others, cum_seq_q, cum_seq_k, scale)
    if reason:
        return reason
    rows = query.transpose(1, 2).shape[:3] if dense else query.shape[1::-1]
    if logsumexp.dtype != torch.float32 or logsumexp.shape != rows:
        return "lse"

    def run():
        tail = _tail(query, is_causal, scale, window_size_left, window_size_right)
        if dense:
            q, k, v, o, do = (x.transpose(1, 2) for x in (query, key, value, out, grad_out))
            grads = torch.ops.fdattn.attention_backward(do, None, q, k, v, o, logsumexp, *tail)
            return tuple(x.transpose(1, 2) for x in grads)
        state = grad_out, None, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k
        return torch.ops.fdattn.varlen_attention_backward(*state, *tail)

    return run


#: By the op that they replace; `activate` leaves out what this torch does not have.
_KERNELS = {
    "_scaled_dot_product_flash_attention": _sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": _sdpa_backward,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_into,
    "_flash_attention_backward": _flash_backward,
}


def _override(name: str, dispatch_key: str) -> Callable:
    """Ours where there is no reason against it, and else the kernel that the op has now."""
    original = None  # a torch built without CUDA has none
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", dispatch_key):
        original = torch.library.get_kernel(f"aten::{name}", dispatch_key)

    def kernel(keys, *args, **kwargs):
        code = _KERNELS[name](*args, **kwargs)
        if callable(code):
            return code()
        fallbacks[code] += 1
        reason = UNSUPPORTED_REASONS[code]
        _log.debug("aten::%s by torch's own kernel, %s: %s", name, code, reason)
        if original is None:
            raise NotImplementedError(
                f"aten::{name}: torch_fdattn leaves this call to torch ({code}: {reason}), and this "
                f"torch has no {dispatch_key} kernel for it"
            )
        return original.call_boxed(keys, *args, **kwargs)

    return kernel


class Handle:
    """What torch keeps while FDATTN is active."""

    def __init__(self, library: torch.library.Library) -> None:
        self._library = library

    def remove(self) -> None:
        """Gives the ops back the kernels that they had before."""
        self._library._destroy()


def activate(dispatch_key: str = "CUDA") -> Handle:
    """Puts our kernels in the place of torch's; `activate_flash_attention_impl("FDATTN")` calls it.

    dispatch_key: "CUDA". Tests put the kernels on "CPU", where these ops have none.

    Examples:
        >>> handle = torch_fdattn.dropins.flash_impl.activate()  # as activate_flash_attention_impl("FDATTN")
        >>> handle.remove()
    """
    if torch.version.hip:
        raise NotImplementedError(
            "FDATTN needs a CUDA build of torch, got one for HIP, whose flash ops return other seeds"
        )
    # Captured before the first is replaced: one of torch's kernels calls another through the dispatcher.
    kernels = {
        name: _override(name, dispatch_key) for name in _KERNELS if hasattr(torch.ops.aten, name)
    }
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # That kernels are overridden is what was asked for.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, kernel in kernels.items():
            library.impl(name, kernel, dispatch_key, with_keyset=True, allow_override=True)
    return Handle(library)
