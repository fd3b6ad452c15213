"""`bert_padding`: there and back, gradients, and rows of several sequences."""

from __future__ import annotations

import pytest
import torch

from torch_fdattn.dropins.flash_attn import bert_padding as bp

MASK = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
def test_there_and_back(dtype: torch.dtype) -> None:
    x = torch.randn(3, 4, 2, 5, requires_grad=True)
    packed, indices, begins, longest, used = bp.unpad_input(x, MASK.to(dtype))
    assert torch.equal(packed, x[MASK.bool()])
    assert begins.dtype == used.dtype == torch.int32
    assert (begins.tolist(), longest, used.tolist()) == ([0, 3, 5, 6], 3, [3, 2, 1])
    back = bp.pad_input(packed, indices, 3, 4)
    assert torch.equal(back, x * MASK[..., None, None])
    direction = torch.randn_like(back)
    (gradient,) = torch.autograd.grad(back, x, direction)
    assert torch.equal(gradient, direction * MASK[..., None, None])


def test_unused_tokens_are_packed_too() -> None:
    x, unused = torch.randn(3, 4, 5), torch.tensor([[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    packed, _, begins, longest, used = bp.unpad_input(x, MASK, unused)
    assert torch.equal(packed, x[(MASK + unused).bool()])
    assert (begins.tolist(), longest, used.tolist()) == ([0, 4, 7, 8], 4, [3, 2, 1])


def test_rows_of_several_sequences() -> None:
    x, lengths = torch.randn(2, 6, 5), torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    packed, indices, begins, longest = bp.unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(packed, torch.cat((x[0, :5], x[1])))
    assert (indices.tolist(), begins.tolist(), longest) == ([0, 1, 2, 3, 4, *range(6, 12)], [0, 2, 5, 11], 6)  # fmt: skip


def test_residual_has_both_gradients() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    rows, residual = bp.index_first_axis_residual(x, torch.tensor([2, 0]))
    (2 * rows.sum() + residual.sum()).backward()
    assert torch.equal(x.grad, torch.tensor([3.0, 1.0, 3.0, 1.0])[:, None].expand(4, 3))


def test_indices_may_be_int32() -> None:
    """transformers' steps of one token give such."""
    rows = torch.randn(2, 3)
    assert torch.equal(bp.pad_input(rows, torch.arange(2, dtype=torch.int32), 2, 1)[:, 0], rows)


def test_errors_name_the_argument() -> None:
    x = torch.randn(2, 3, 4)
    with pytest.raises(RuntimeError, match=r"attention_mask must have shape \(2, 3\)"):
        bp.unpad_input(x, torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(RuntimeError, match=r"attention_mask must be boolean or of ints, got torch\.float32"):  # fmt: skip
        bp.unpad_input(x, torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="indices must have shape"):
        bp.pad_input(x[0], torch.tensor([0]), 2, 3)
