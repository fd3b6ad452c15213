"""Products of up to 16 rows: against torch's, in the interpreter and on GPUs; and where they stand for torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_fdattn.ops import inference_linear as module
from torch_fdattn.ops.inference_linear import inference_linear, is_better_at_small_m
from torch_fdattn.ops.library import INTERPRET, launches

pytestmark = pytest.mark.interpreter
COUNTER = "gemm/small_m_linear"


def drawn(*shape: int, device: str, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def dtypes() -> tuple[torch.dtype, ...]:
    return (torch.float16,) if INTERPRET else (torch.float16, torch.bfloat16)


def by_kernel(x: Tensor, weight: Tensor) -> Tensor:
    from torch_fdattn.ops.gemm.small_m_linear import fits, small_m_linear

    if not fits(x, weight):
        pytest.skip("needs a CUDA device of sm_90")  # for tensor descriptors
    return small_m_linear(x, weight)


def check(x: Tensor, weight: Tensor) -> None:
    """The error rule, against fp64 and torch."""
    exact, theirs = F.linear(x.double(), weight.double()), F.linear(x, weight)
    found = by_kernel(x, weight)
    assert found.dtype == x.dtype
    assert found.shape == exact.shape
    bound = 2 * (theirs.double() - exact).abs().max() + 2 * (exact.to(x.dtype) - exact).abs().max()
    assert (found.double() - exact).abs().max() <= bound
    assert torch.equal(found, by_kernel(x, weight))


@pytest.mark.parametrize("rows", range(1, 17))
def test_right(kernel_device, rows: int) -> None:
    """Rows, outputs and features that no block divides among them."""
    for outputs, features in ((16, 32), (1, 8), (40, 40), (72, 200), (67, 264)):
        for dtype in dtypes():
            x, weight = (drawn(n, features, device=kernel_device, dtype=dtype) for n in (rows, outputs))  # fmt: skip
            check(x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("outputs", "features"),
    [(6144, 4096), (4096, 4096), (4096, 12288), (4096, 1024), (1024, 2048), (4100, 1032)],
)
def test_right_at_sizes_of_models(outputs: int, features: int) -> None:
    for rows in (1, 5, 16):
        for dtype in dtypes():
            check(*(drawn(n, features, device="cuda", dtype=dtype) for n in (rows, outputs)))


def test_bits_of_a_row_depend_on_no_other(kernel_device) -> None:
    """Neither on the others, NaN among them, nor on how many there are, nor on its place: for the batch-invariant mode."""
    x, weight = (drawn(n, 72, device=kernel_device) for n in (16, 40))
    expected = by_kernel(x, weight)
    for rows in range(1, 16):
        assert torch.equal(by_kernel(x[:rows], weight), expected[:rows])
    assert torch.equal(by_kernel(x.flip(0), weight), expected.flip(0))
    x[1:] = float("nan")
    assert torch.equal(by_kernel(x, weight)[0], expected[0])


def test_what_is_beyond_is_not_looked_at(kernel_device) -> None:
    """The last program's columns reach beyond the weight, and blocks beyond the rows and the features."""
    x, weight = (torch.full((n, 64), float("nan"), device=kernel_device).half() for n in (16, 80))
    x[:4, :40], weight[:36, :40] = (drawn(n, 40, device=kernel_device) for n in (4, 36))
    check(x[:4, :40], weight[:36, :40])


def test_what_fits(kernel_device) -> None:
    from torch_fdattn.ops.gemm.small_m_linear import fits

    x, weight = (drawn(n, 32, device=kernel_device) for n in (16, 80))
    assert fits(x, weight) or not INTERPRET
    wide = x.double() if INTERPRET else x.float()
    for bad in (
        (wide, weight.to(wide.dtype)),
        (x, weight.float()),
        (x[:0], weight),
        (x.repeat(2, 1)[:17], weight),
        (x[:, :16].contiguous(), weight),  # other features
        (x[:1].expand(16, 32), weight),
        (drawn(32, 16, device=kernel_device).t(), weight),  # gaps between elements
        (x, drawn(80, 64, device=kernel_device)[:, ::2]),
        (x, drawn(80, 33, device=kernel_device)[:, 1:]),  # rows of no whole 16 bytes
    ):
        assert not fits(*bad)


def test_where_it_is_faster(monkeypatch) -> None:
    """By rows, sizes and the device that were measured."""
    device = torch.device("cuda")
    monkeypatch.setattr(module, "device_capability", lambda _: (9, 0))
    sizes = ((6144, 4096), (4096, 4096), (4096, 12288), (4096, 1024), (1024, 2048), (8448, 4096))
    for rows in (1, 16):
        for outputs, features in sizes:
            assert is_better_at_small_m(rows, outputs, features, device)
    for outputs, features in ((1023, 2048), (4095, 1024), (1024, 3072), (4096, 1023), (8449, 4096)):
        assert not is_better_at_small_m(16, outputs, features, device)
    assert not is_better_at_small_m(17, 4096, 4096, device)
    for capability in ((0, 0), (8, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(module, "device_capability", lambda _, found=capability: found)
        assert not is_better_at_small_m(1, 4096, 4096, device)


@pytest.fixture
def always_better(monkeypatch) -> None:
    monkeypatch.setattr(module, "is_better_at_small_m", lambda *_: True)


@pytest.mark.parametrize("shape", [(32,), (1, 32), (2, 3, 32), (1, 16, 32)], ids=str)
def test_stands_for_torch(kernel_device, always_better, shape: tuple[int, ...]) -> None:
    x, weight = (drawn(*size, device=kernel_device) for size in (shape, (48, 32)))
    expected = by_kernel(x.view(-1, 32), weight)
    before = launches[COUNTER]
    found = inference_linear(x, weight)
    assert launches[COUNTER] == before + 1
    assert found.shape == (*shape[:-1], 48)
    assert torch.equal(found.view(-1, 48), expected)
    rows = drawn(4, 2, 64, device=kernel_device)[
        :, 1, :32
    ]  # apart, as a last column of tokens lies
    assert torch.equal(inference_linear(rows, weight), by_kernel(rows.contiguous(), weight))
    assert launches[COUNTER] == before + 3


def test_where_torch_does_it(kernel_device, always_better) -> None:
    x, weight = (drawn(n, 32, device=kernel_device) for n in (4, 48))
    bias = drawn(48, device=kernel_device)
    leaf, before = weight.clone().requires_grad_(), launches[COUNTER]
    cases = {
        "a bias": (x, weight, bias),
        "float32": (x.float(), weight.float()),
        "many rows": (x.repeat(5, 1), weight),
        "gaps between elements": (drawn(32, 4, device=kernel_device).t(), weight),
        "one row for all": (x[:1].expand(4, 32), weight),
        "no rows": (x[:0], weight),
        "gradients": (x, leaf),
    }
    for name, given in cases.items():
        assert torch.equal(inference_linear(*given), F.linear(*given)), name
    inference_linear(x, leaf).sum().backward()
    assert leaf.grad is not None
    with torch.autocast(kernel_device, torch.bfloat16):
        assert inference_linear(x, weight).dtype == torch.bfloat16
    compiled = torch.compile(inference_linear, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), F.linear(x, weight))
    with FakeTensorMode():
        fake = torch.empty(4, 4096, device="cuda"), torch.empty(4096, 4096, device="cuda")
        assert inference_linear(*fake).shape == (4, 4096)
    batched = torch.func.vmap(inference_linear, in_dims=(0, None))(x, weight)
    torch.testing.assert_close(batched, F.linear(x, weight))
    with pytest.raises(RuntimeError):
        inference_linear(x[:, :16], weight)
    assert launches[COUNTER] == before


@pytest.mark.gpu
def test_in_a_cuda_graph(always_better) -> None:
    """A replay reads what is in x and in the weights then, and each launch what the one ahead of it has written."""
    for rows in (1, 16):
        x = drawn(rows, 1024, device="cuda", dtype=torch.bfloat16)
        wide, back = (drawn(*shape, device="cuda", dtype=torch.bfloat16) / 32 for shape in ((4096, 1024), (1024, 4096)))  # fmt: skip

        def step(x: Tensor = x, wide: Tensor = wide, back: Tensor = back) -> Tensor:
            for _ in range(4):
                x = inference_linear(inference_linear(x, wide), back)
            return x

        by_kernel(x, wide)  # compiles, as `step` does: a capture may not
        step()
        graph, before = torch.cuda.CUDAGraph(), launches[COUNTER]
        with torch.cuda.graph(graph):
            captured = step()
        assert launches[COUNTER] == before + 8
        for _ in range(3):
            for y in (x, wide, back):
                y.copy_(y.flip(0))
            graph.replay()
            assert torch.equal(captured, step())
            theirs = x
            for _ in range(4):
                theirs = F.linear(F.linear(theirs, wide), back)
            atol = 0.05 * theirs.abs().max().item()
            torch.testing.assert_close(captured, theirs, rtol=0.05, atol=atol)
