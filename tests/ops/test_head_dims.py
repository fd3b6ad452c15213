"""Any head dim from 1 to 512 in every op, which pad inside their tiles: against formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_fdattn
from torch_fdattn.ops.library import INTERPRET

pytestmark = pytest.mark.interpreter
_ALL = (1, 3, 7, 20, 33, 100, 257, 511, 512)
DIMS = [
    pytest.param(x, marks=pytest.mark.slow if INTERPRET and x > 100 else ())
    for x in (_ALL if not INTERPRET else (1, 7, 33, 100, 257, 511))
]
EXACT = dict(atol=3e-5, rtol=3e-5)


def draw(*shape: int, device: str) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, device=device)


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal, the last query at the last key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[3] ** -0.5
    rows, keys = scores.shape[2:]
    seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, **EXACT)


@pytest.mark.parametrize("dim", DIMS)
def test_attention_and_its_gradients(device, dim) -> None:
    exact = [draw(1, h, n, dim, device=device).requires_grad_() for h, n in ((4, 21), (2, 37), (2, 37))]  # fmt: skip
    ours = [x.detach().float().requires_grad_() for x in exact]
    dout = draw(1, 4, 21, dim, device=device)
    out, _ = torch_fdattn.attention(*ours, causal=True)
    close(out, formula(*exact))
    found = torch.autograd.grad(out, ours, dout.float())
    expected = torch.autograd.grad(formula(*exact), exact, dout)
    for x, y in zip(found, expected, strict=True):
        close(x, y)


@pytest.mark.parametrize("dim", DIMS)
def test_packed_sequences(device, dim) -> None:
    begins = torch.tensor([0, 9, 25], dtype=torch.int32, device=device)
    exact = [draw(1, h, 25, dim, device=device).requires_grad_() for h in (2, 1, 1)]
    ours = [x.detach()[0].transpose(0, 1).float().requires_grad_() for x in exact]
    dout = draw(1, 2, 25, dim, device=device)
    parts = [formula(*(x[:, :, a:b] for x in exact)) for a, b in ((0, 9), (9, 25))]
    out, _ = torch_fdattn.varlen_attention(*ours, begins, causal=True)
    close(out.transpose(0, 1)[None], torch.cat(parts, 2))
    found = torch.autograd.grad(out, ours, dout[0].transpose(0, 1).float())
    expected = torch.autograd.grad(torch.cat(parts, 2), exact, dout)
    for x, y in zip(found, expected, strict=True):
        close(x.transpose(0, 1)[None], y)


@pytest.mark.parametrize("dim", DIMS)
def test_decode_of_appended_keys(device, dim) -> None:
    """Contiguous caches and pages of 5, values of another head dim, and quantised ones."""
    v_dim = min(dim + 3, 512)
    q, k = draw(1, 4, 2, dim, device=device), draw(1, 2, 20, dim, device=device)
    v = draw(1, 2, 20, v_dim, device=device)
    lens = torch.tensor([20], dtype=torch.int32, device=device)
    cache = [torch.zeros(1, 2, 24, x.shape[3], device=device) for x in (k, v)]
    none = torch.zeros(1, dtype=torch.int32, device=device)
    torch_fdattn.append_kv(*cache, k.float(), v.float(), none)
    close(torch_fdattn.decode(q.float(), *cache, lens)[0], formula(q, k, v))

    table = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32, device=device)
    pages = [torch.zeros(4, 2, 5, x.shape[3], device=device) for x in (k, v)]
    torch_fdattn.paged_append_kv(*pages, table, k.float(), v.float(), none)
    close(torch_fdattn.paged_decode(q.float(), *pages, table, lens)[0], formula(q, k, v))

    scales = [x.abs().amax((2, 3), keepdim=True)[..., 0].float() / 127 for x in (k, v)]
    stored = [(x / s[..., None]).round().to(torch.int8) for x, s in zip((k, v), scales, strict=True)]  # fmt: skip
    out, _ = torch_fdattn.decode(q.float(), *stored, lens, k_scale=scales[0], v_scale=scales[1])
    close(
        out, formula(q, *(x.double() * s[..., None] for x, s in zip(stored, scales, strict=True)))
    )
