"""silu(gate) * up in one pass: PyTorch's result to a rounding, and PyTorch's own way where it must be."""

import pytest
import torch
import torch.nn.functional as F

from torch_fdattn.ops import swiglu_kernel
from torch_fdattn.ops.swiglu import is_better_by_tiles, is_better_in_product, silu_mul


@pytest.fixture
def kernel_calls(monkeypatch) -> list:
    calls, real = [], swiglu_kernel.launch
    monkeypatch.setattr(swiglu_kernel, "launch", lambda *a, **k: calls.append(a) or real(*a, **k))
    return calls


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(7,), (3, 16), (2, 3, 2100), (1, 1, 5)], ids=str)
def test_equals_torch(shape, dtype, kernel_device, kernel_calls) -> None:
    gate, up = (torch.randn(shape, device=kernel_device).to(dtype) * 4 for _ in range(2))
    halves = torch.cat([gate, up], -1).split(shape[-1], -1)  # as one product leaves them
    exact = F.silu(gate.double()) * up.double()
    bound = (
        2 * (F.silu(gate) * up - exact).abs().max() + 2 * torch.finfo(dtype).eps * exact.abs().max()
    )
    for pair in ((gate, up), halves, (gate, halves[1])):
        with torch.no_grad():
            found = silu_mul(*pair)
        assert found.dtype == dtype
        assert found.is_contiguous()
        assert (found - exact).abs().max() <= bound
    assert len(kernel_calls) == 3


@pytest.mark.interpreter
def test_far_and_special_values(kernel_device, kernel_calls) -> None:
    gate = torch.tensor([-1e4, -100.0, -20.0, 0.0, 20.0, 1e4, float("nan")], device=kernel_device)
    found = silu_mul(gate, torch.ones_like(gate))
    torch.testing.assert_close(found, F.silu(gate), equal_nan=True)
    assert len(kernel_calls) == 1


@pytest.mark.interpreter
def test_where_torch_does_it(kernel_device, kernel_calls) -> None:
    gate, up = (torch.randn(4, 6, device=kernel_device) for _ in range(2))
    pairs = {
        "gradients": (gate.clone().requires_grad_(), up),
        "columns apart": (gate.t().contiguous().t(), up),
        "rows apart": (torch.randn(2, 3, 6, device=kernel_device)[:, :2], torch.randn(2, 2, 6, device=kernel_device)),
        "a dimension of one between rows apart": (
            torch.randn(2, 1, 10, 6, device=kernel_device)[:, :, :3], torch.randn(2, 1, 3, 6, device=kernel_device),
        ),
        "nothing": (gate[:0], up[:0]),
        "broadcast": (gate, up[:1]),
        "dtypes": (gate, up.half()),
    }  # fmt: skip
    for name, (a, b) in pairs.items():
        torch.testing.assert_close(silu_mul(a, b), F.silu(a) * b, msg=name)
    with pytest.raises(RuntimeError):
        silu_mul(gate, up.to("meta"))
    assert not kernel_calls
    leaf = pairs["gradients"][0]
    silu_mul(leaf, up).sum().backward()
    assert leaf.grad is not None


def test_compiled(device) -> None:
    gate, up = (torch.randn(4, 6, device=device) for _ in range(2))
    compiled = torch.compile(silu_mul, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(gate, up), F.silu(gate) * up)


def test_where_one_launch_is_faster() -> None:
    """As measured: few rows by sizes, many by how full the last wave of tiles is."""
    faster = [(1, 3072, 1024), (64, 3072, 1024), (128, 5120, 4096), (4096, 12800, 5120), (2048, 14336, 8192), (1024, 14336, 4096)]  # fmt: skip
    slower = [(65, 12800, 5120), (128, 5119, 4096), (512, 12800, 5120), (2048, 12800, 5120), (384, 65536, 5120), (512, 3072, 4096), (4096, 2048, 5120), (4096, 12800, 512)]  # fmt: skip
    for sizes in faster:
        assert is_better_in_product(*sizes), sizes
    for sizes in slower:
        assert not is_better_in_product(*sizes), sizes


def test_where_launches_of_chunks_are_faster() -> None:
    """Each chunk has tiles of its own, which are to be full, and is to fill the device."""
    assert is_better_by_tiles((2048, 2048), 12800, 5120)
    assert not is_better_by_tiles((1040,), 14336, 5120)  # 9 tiles for 8.1
    for chunks, inner in (([136] * 8, 3584), ([180] * 4, 8192), ([520] * 2, 14336), ([128] * 8, 4224)):  # fmt: skip
        assert not is_better_by_tiles(chunks, inner, 5120), chunks
