"""SwiGLU in the product of gate and up: against its parts, in the interpreter and on GPUs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_fdattn.ops.library import INTERPRET, launches

pytestmark = pytest.mark.interpreter


def drawn(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def dtypes() -> tuple[torch.dtype, ...]:
    return (torch.float16,) if INTERPRET else (torch.float16, torch.bfloat16)


def check(x: Tensor, weight: Tensor) -> None:
    """The error rule, against fp64 and PyTorch's own parts."""
    from torch_fdattn.ops.gemm.swiglu_gemm import silu_mul_linear

    def by_parts(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.silu(gate) * up

    exact, theirs = by_parts(x.double(), weight.double()), by_parts(x, weight)
    found = silu_mul_linear(x, weight)
    assert found.dtype == x.dtype
    assert found.shape == exact.shape
    bound = 2 * (theirs.double() - exact).abs().max() + 2 * (exact.to(x.dtype) - exact).abs().max()
    assert (found.double() - exact).abs().max() <= bound
    assert torch.equal(found, silu_mul_linear(x, weight))


@pytest.mark.parametrize(
    ("rows", "inner", "features"),
    [
        (1, 16, 32),
        (3, 40, 64),
        (17, 8, 40),
        (33, 72, 200),
        (65, 24, 16),
        (128, 16, 8),
        (129, 8, 8),
        (150, 40, 72),
        (300, 136, 40),
    ],
)
def test_right(kernel_device, rows: int, inner: int, features: int) -> None:
    """Rows, columns and features that no block divides among them."""
    from torch_fdattn.ops.gemm.swiglu_gemm import fits

    for dtype in dtypes():
        x, weight = (
            drawn(n, features, device=kernel_device, dtype=dtype) for n in (rows, 2 * inner)
        )
        if not fits(x, weight):
            pytest.skip("needs tensor descriptors")
        check(x, weight)


def test_what_is_beyond_the_weight_is_not_looked_at(kernel_device) -> None:
    """The last program's columns of gate reach into up's rows, and those of up beyond the weight."""
    from torch_fdattn.ops.gemm.swiglu_gemm import fits

    x, whole = (drawn(n, 32, device=kernel_device, dtype=torch.float16) for n in (4, 200))
    whole[80:] = float("nan")
    if not fits(x, whole[:80]):
        pytest.skip("needs tensor descriptors")
    check(x, whole[:80])


def test_what_fits(kernel_device) -> None:
    from torch_fdattn.ops.gemm.swiglu_gemm import fits

    x, weight = (drawn(n, 32, device=kernel_device, dtype=torch.float16) for n in (4, 80))
    fitting = fits(x, weight)
    assert fitting or not INTERPRET
    for bad in (
        (x.float(), weight.float()) if not INTERPRET else (x.double(), weight.double()),
        (x, weight.float()),
        (x[:0], weight),
        (x[:, :16].contiguous(), weight),  # other features
        (x, weight[:79]),
        (x.repeat(33, 1), weight[:72]),  # of many rows, whose results are rows of no whole 16 bytes
        (
            x,
            drawn(80, 33, device=kernel_device, dtype=torch.float16)[:, 1:],
        ),  # rows of no whole 16 bytes
        (x, drawn(32, 80, device=kernel_device, dtype=torch.float16).t()),
    ):
        assert not fits(*bad)


def test_where_it_is_faster(kernel_device) -> None:
    """By sizes that were measured, and where nobody watches."""
    from torch_fdattn.ops.gemm.swiglu_gemm import can_launch_directly, fits
    from torch_fdattn.ops.swiglu import is_better_in_product

    wide = drawn(1, 1, device=kernel_device, dtype=torch.float16).expand(2 * 64 * 80, 4096)
    x = drawn(128, 4096, device=kernel_device, dtype=torch.float16)
    wide = wide.contiguous()
    if not fits(x, wide):
        pytest.skip("needs tensor descriptors")
    cases = ((1, 80, True), (64, 48, True), (64, 47, False), (65, 80, False), (128, 80, True), (128, 79, False))  # fmt: skip
    for rows, programs, faster in cases:
        assert is_better_in_product(rows, 64 * programs, 4096) == faster
        assert can_launch_directly(x[:rows], wide[: 128 * programs])
    with torch.autocast(kernel_device, torch.bfloat16):
        assert not can_launch_directly(x[:1], wide)
    assert not can_launch_directly(x[:1], copy.copy(wide).requires_grad_())


def test_counts(kernel_device) -> None:
    from torch_fdattn.ops.gemm.swiglu_gemm import fits, silu_mul_linear

    x, weight = (drawn(n, 32, device=kernel_device, dtype=torch.float16) for n in (4, 80))
    if not fits(x, weight):
        pytest.skip("needs tensor descriptors")
    before = launches["gemm/swiglu"]
    silu_mul_linear(x, weight)
    assert launches["gemm/swiglu"] == before + 1
