"""`flash_attn.bert_padding`: padded tensors (batch, sequence, …) to packed ones and back, by torch's own indexing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fdattn import checks
from torch_fdattn.dropins.flash_attn.arguments import raises_runtime_errors

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


@raises_runtime_errors
def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of input (N, …) at these indices; gradients of a row taken twice add up.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn.bert_padding import index_first_axis
        >>> index_first_axis(torch.arange(6.0).view(3, 2), torch.tensor([2, 0])).tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    _check_rows("input", input, indices)
    return input[indices]


@raises_runtime_errors
def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of input at these indices, and input itself; its gradient is the sum of both.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn.bert_padding import index_first_axis_residual
        >>> rows, residual = index_first_axis_residual(torch.ones(3, 2), torch.tensor([1]))
        >>> rows.shape, residual.shape
        (torch.Size([1, 2]), torch.Size([3, 2]))
    """
    _check_rows("input", input, indices)
    return input[indices], input.view_as(input)


@raises_runtime_errors
def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, …): values (N, …) at these indices, zeros elsewhere.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn.bert_padding import index_put_first_axis
        >>> index_put_first_axis(torch.ones(1, 2), torch.tensor([1]), 2).tolist()
        [[0.0, 0.0], [1.0, 1.0]]
    """
    checks.expect_int64(first_axis_dim=first_axis_dim)
    _check_rows("values", values, indices, first_axis_dim)
    checks.expect_shape("indices", indices, values.shape[:1], "values")
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


@raises_runtime_errors
def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens that a mask shows, packed. It waits for the device: how many there are decides a shape.

    Args:
        hidden_states: (B, S, …).
        attention_mask: (B, S), bool or int: 1 where a token is real.
        unused_mask: (B, S): 1 where there is a token that is not used; it is packed too.

    Returns:
        (T, …); int64 (T,), where the tokens are in (B · S); int32 (B + 1,), cu_seqlens; the longest sequence;
        int32 (B,), how many tokens of each are used.

    Raises:
        ValueError, TypeError: naming the argument, what was expected and what came; RuntimeError too.

    Source: bert_padding.py of FlashAttention 2.8.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn.bert_padding import unpad_input
        >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> packed, indices, begins, longest, used = unpad_input(torch.randn(2, 3, 8), mask)
        >>> packed.shape, indices.tolist(), begins.tolist(), longest
        (torch.Size([3, 8]), [0, 1, 3], [0, 2, 3], 2)
    """
    used = _lengths("attention_mask", attention_mask, hidden_states)
    packed_mask = attention_mask
    if unused_mask is not None:
        _lengths("unused_mask", unused_mask, hidden_states)
        packed_mask = attention_mask + unused_mask
    lens = packed_mask.sum(-1, dtype=torch.int32)
    indices = packed_mask.flatten().nonzero().flatten()
    packed = hidden_states.flatten(0, 1)[indices]
    longest, low, high = _numbers(lens, packed_mask, packed_mask)
    if low < 0 or high > 1:
        raise ValueError(
            f"attention_mask, with unused_mask where that is given, must hold 0 and 1 alone, got values from {low} to {high}"
        )
    return packed, indices, _begins(lens), longest, used


@raises_runtime_errors
def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` of rows that hold several sequences each.

    Args:
        hidden_states: (B, S, …).
        attention_mask_in_length: int (B, S): a row's lengths, in its first entries; 0 elsewhere.

    Returns:
        (T, …); int64 (T,), where the tokens are in (B · S); int32 (sequences + 1,), cu_seqlens; the longest sequence.

    Source: bert_padding.py of FlashAttention 2.8.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn.bert_padding import unpad_input_for_concatenated_sequences
        >>> lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
        >>> packed, _, begins, longest = unpad_input_for_concatenated_sequences(torch.randn(2, 6, 8), lengths)
        >>> packed.shape, begins.tolist(), longest
        (torch.Size([11, 8]), [0, 2, 5, 11], 6)
    """
    total = _lengths("attention_mask_in_length", attention_mask_in_length, hidden_states)
    real = torch.arange(hidden_states.shape[1], device=total.device) < total[:, None]
    lens = attention_mask_in_length.flatten()
    lens = lens[lens != 0].to(torch.int32)
    longest, low, most = _numbers(lens, attention_mask_in_length, total)
    if low < 0 or most > hidden_states.shape[1]:
        raise ValueError(
            f"attention_mask_in_length must hold lengths of 0 or more, of at most {hidden_states.shape[1]} a row "
            f"together like hidden_states, got lengths from {low} on and up to {most} a row"
        )
    indices = real.flatten().nonzero().flatten()
    return hidden_states.flatten(0, 1)[indices], indices, _begins(lens), longest


@raises_runtime_errors
def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, …) of packed tokens (T, …), zeros where there is none; indices: those of `unpad_input`.

    Source: bert_padding.py of FlashAttention 2.8.

    Examples:
        >>> from torch_fdattn.dropins.flash_attn.bert_padding import pad_input
        >>> pad_input(torch.ones(3, 8), torch.tensor([0, 1, 3]), 2, 3)[..., 0].tolist()
        [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    """
    for name, size in (("batch", batch), ("seqlen", seqlen)):
        checks.expect_int64(**{name: size})
        if not torch.compiler.is_compiling() and not 0 <= size < 2**31:
            raise ValueError(f"{name} must be an int32 of 0 or more, got {size}")
    _check_rows("hidden_states", hidden_states, indices, batch * seqlen)
    checks.expect_shape("indices", indices, hidden_states.shape[:1], "hidden_states")
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))  # fmt: skip


def _check_rows(name: str, x: Tensor, indices: Tensor, rows: int | None = None) -> None:
    """Rows of x by number, of its own or of `rows` ones. Their values are looked at where that waits for no device."""
    checks.expect_tensor(name, x)
    checks.expect_tensor("indices", indices)
    if not x.dim():
        raise ValueError(f"{name} must have shape (rows, …), got ()")
    if indices.dtype not in (torch.int32, torch.int64) or indices.dim() != 1:
        raise TypeError(
            f"indices must be int64 or int32 of shape (rows,), got {indices.dtype} of shape {tuple(indices.shape)}"
        )
    checks.expect_device("indices", indices, x.device, name)
    if torch.compiler.is_compiling():
        return
    rows = x.shape[0] if rows is None else rows
    if rows < 0:
        raise ValueError(f"first_axis_dim must be at least 0, got {rows}")
    if not indices.numel() or not (
        (indices.is_cpu and type(indices) is Tensor) or checks.readable(indices)
    ):
        return
    low, high = (int(i) for i in torch.aminmax(indices))
    if low < 0 or high >= rows:
        raise ValueError(
            f"indices must lie in [0, {rows}), the rows that there are, got values from {low} to {high}"
        )


def _lengths(name: str, mask: Tensor, hidden_states: Tensor) -> Tensor:
    """int32 (B,), the sums of a mask (B, S)."""
    checks.expect_tensor("hidden_states", hidden_states)
    checks.expect_tensor(name, mask)
    if mask.is_floating_point() or mask.is_complex():
        raise TypeError(f"{name} must be boolean or of ints, got {mask.dtype}")
    if hidden_states.dim() < 2:
        raise ValueError(
            f"hidden_states must have shape (batch, sequence, …), got {tuple(hidden_states.shape)}"
        )
    checks.expect_shape(name, mask, hidden_states.shape[:2], "hidden_states")
    checks.expect_device(name, mask, hidden_states.device, "hidden_states")
    return mask.sum(-1, dtype=torch.int32)


def _numbers(lens: Tensor, mask: Tensor, counted: Tensor) -> list[int]:
    """The largest length, the smallest number of a mask, and the largest of `counted`: 0 of none. It waits once."""
    asked = ((lens, Tensor.amax), (mask, Tensor.amin), (counted, Tensor.amax))
    return torch.stack([f(x).long() if x.numel() else lens.new_zeros((), dtype=torch.long) for x, f in asked]).tolist()  # fmt: skip


def _begins(lens: Tensor) -> Tensor:
    return F.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
