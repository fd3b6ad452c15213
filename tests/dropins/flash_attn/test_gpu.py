"""The interface on CUDA tensors: the error rule in bfloat16, our kernels alone, and a captured step over a cache."""

from __future__ import annotations

import pytest
import torch

from tests.dropins.flash_attn.formula import attend_batch
from tests.launched import launched
from torch_fdattn.dropins.flash_attn import flash_attn_func, flash_attn_with_kvcache
from torch_fdattn.ops.library import launches
from torch_fdattn.testing import check_close

pytestmark = pytest.mark.gpu


def made(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def check(name: str, value: torch.Tensor, *inputs: torch.Tensor, **options) -> None:
    """value (B, S, H, D) against the formula of the same inputs, by the error rule."""
    exact, at_dtype = (
        attend_batch(*(x.detach().cpu().to(dtype) for x in inputs), **options)[0].transpose(1, 2)
        for dtype in (torch.float64, torch.bfloat16)
    )
    value = value.detach().cpu().transpose(1, 2)
    check_close(name, value, exact, [at_dtype.double() - exact])


@pytest.mark.parametrize("dim", [59, 64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_forward_and_backward(dim: int, deterministic: bool) -> None:
    q, k, v = (made(2, n, h, dim).requires_grad_() for n, h in ((130, 8), (190, 2), (190, 2)))
    launches.clear()
    options = {"causal": True, "window_size": (100, 0), "deterministic": deterministic}
    out = flash_attn_func(q, k, v, **options)
    direction = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (q, k, v), direction, retain_graph=True)
    assert launched() == {"attention_forward": 1, "attention_backward": 1}
    check("out", out, q, k, v, causal=True, window=(100, 0))
    if deterministic:
        again = torch.autograd.grad(out, (q, k, v), direction)
        assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))


@pytest.mark.parametrize("paged", [False, True])
def test_a_captured_step(paged: bool) -> None:
    """The lengths of a replay are those that the device holds then."""
    q, new = made(2, 1, 8, 64), made(2, 1, 2, 64)
    cache, lens = made(2, 256, 2, 64), torch.tensor([3, 200], dtype=torch.int32, device="cuda")
    rows, given = cache.clone(), {}
    if paged:
        cache = cache.view(8, 64, 2, 64)
        given["block_table"] = torch.arange(8, dtype=torch.int32, device="cuda").view(2, 4)

    def step():
        return flash_attn_with_kvcache(
            q, cache, cache, new, new, cache_seqlens=lens, causal=True, **given
        )

    with torch.no_grad():
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
    lens += 5
    graph.replay()
    torch.cuda.synchronize()
    for b, n in enumerate((8, 205)):
        rows[b, n - 5], rows[b, n] = new[b, 0], new[b, 0]
        keys = rows[b : b + 1, : n + 1]
        check(f"out of sequence {b}", out[b : b + 1], q[b : b + 1], keys, keys, causal=True)
