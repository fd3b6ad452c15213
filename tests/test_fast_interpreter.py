"""The tests' interpreter (`fast_interpreter.py`) computes the bits of Triton's own."""

from __future__ import annotations

import pytest
import torch

import torch_fdattn
from tests import fast_interpreter
from tests.interpreting import needs_interpret


def results(device: str) -> list[torch.Tensor]:
    """Of kernels with device functions in device functions, pointers, integers, booleans and reductions."""
    torch.manual_seed(1)
    shapes = (1, 2, 9, 16), (1, 1, 21, 16), (1, 1, 21, 16), (9, 21)
    q, k, v, bias = (torch.randn(x, device=device, requires_grad=True) for x in shapes)
    out, lse = torch_fdattn.attention(
        q, k, v, attn_mask=bias, causal=True, window=(6, 0), softcap=2.0, dropout_p=0.3,
        dropout_seed=torch.tensor([3, 4], device=device),
    )  # fmt: skip
    found = torch.autograd.grad((out.sin().sum(), lse.sum()), (q, k, v, bias))
    pages = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device)
    caches = torch.randn(2, 3, 1, 8, 16, device=device).half()
    lens = torch.tensor([21], dtype=torch.int32, device=device)
    decoded = torch_fdattn.paged_decode(q.detach()[:, :, :2].half(), *caches, pages, lens)
    return [out.detach(), lse.detach(), *found, *decoded]


@pytest.mark.interpreter
@needs_interpret
def test_the_bits_are_tritons(monkeypatch):
    fast = results("cpu")
    assert [name for _, name, _ in fast_interpreter.ORIGINALS] == ["_patch_lang", "_get_np_dtype", "options"]  # fmt: skip
    for owner, name, value in fast_interpreter.ORIGINALS:
        monkeypatch.setattr(owner, name, value)
    for ours, tritons in zip(fast, results("cpu"), strict=True):
        assert torch.equal(ours, tritons)
