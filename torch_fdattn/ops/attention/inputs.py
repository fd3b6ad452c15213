"""What attention asks of its inputs, metadata only, and its results unwritten: the same for real and fake tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.ops.layout import warn_of_exchanged_dims
from torch_fdattn.ops.options import AttentionOptions
from torch_fdattn.ops.positions import FAR

NAMES = ("q", "k", "v")


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, names: tuple[str, str, str] = NAMES,
    float8: bool = False,
) -> None:  # fmt: skip
    """float8: whether the caller has checked the dtypes of q, k and v, which are none of attention's."""
    mask, scores, dropout = options.mask, options.scores, options.dropout
    checks.check_qkv(q, k, v, names, float8)
    for name, tensor, what, most in (
        (names[0], q, "queries", FAR), (names[1], k, "keys", 2 * FAR),
    ):  # fmt: skip
        # Symbolic lengths are checked when the compiled op runs.
        if isinstance(tensor.shape[2], int) and tensor.shape[2] >= most:
            raise ValueError(
                f"{name} must hold fewer than 2**{most.bit_length() - 1} {what} a sequence, got "
                f"{tensor.shape[2]}"
            )
    checks.check_lengths("kv_lens", mask.kv_lens, q, bound=k.shape[2])
    checks.check_window(mask.window_left, mask.window_right)
    positions = mask.window_left >= 0 or mask.window_right >= 0 or scores.alibi_slopes is not None
    masked = positions or dropout.p > 0
    checks.check_positions(
        mask.q_start, mask.kv_start, mask.kv_block, mask.kv_stride, q, k.shape[2], masked
    )
    if mask.window_right == 0 and all(x is None for x in mask[:3]):
        warn_of_exchanged_dims(q, k)
    checks.check_scale(options.scale)
    checks.check_scores(scores.softcap, scores.alibi_slopes, scores.sinks, q)
    checks.check_attn_mask(scores.attn_mask, q, (*q.shape[:3], k.shape[2]))
    checks.check_dropout(dropout.p, dropout.seed, q)


def check_state(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, v: Tensor, lse_shape: Sequence[int]
) -> None:  # fmt: skip
    """What a backward asks of a forward's results and of their gradients; lse_shape: also dlse's."""
    for name, tensor in (("dout", dout), ("out", out)):
        checks.expect_shape(name, tensor, (*q.shape[:-1], v.shape[-1]), "q and v")
        checks.expect_device(name, tensor, q.device, "q")
    checks.expect_dtype("dout", dout, q.dtype, "q")
    for name, tensor in (("lse", lse), ("dlse", dlse)):
        if tensor is not None:
            checks.expect_shape(name, tensor, lse_shape, "q")
            checks.expect_dtype(name, tensor, lse_dtype(q), "every lse of such inputs")
            checks.expect_device(name, tensor, q.device, "q")


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def empty_state(
    q: Tensor,
    v: Tensor,
    out_dtype: torch.dtype | None = None,
    lse_shape: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Unwritten (out, lse): out in q's order of memory, lse contiguous; for kernels and fakes alike."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty(q.shape[:-1] if lse_shape is None else lse_shape, dtype=dtype)
    v_dim, last = v.shape[-1], q.dim() - 1
    if v_dim == q.shape[-1]:
        return torch.empty_like(q, dtype=out_dtype or q.dtype), lse
    order = sorted(range(last), key=lambda dim: -q.stride(dim))
    out = torch.empty_permuted(
        (*q.shape[:-1], v_dim), (*order, last), dtype=out_dtype or q.dtype, device=q.device
    )
    return out, lse


def empty_gradients(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype | None):
    """Unwritten (dq, dk, dv), in the inputs' dtypes or this one."""
    return tuple(torch.empty_like(x, dtype=dtype or x.dtype) for x in (q, k, v))


def copy_state(out: Tensor, lse: Tensor, state: tuple[Tensor, Tensor]) -> None:
    out.copy_(state[0])
    lse.copy_(state[1])
