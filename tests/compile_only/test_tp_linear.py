"""The kernels of the tensor-parallel matmuls, compiled for NVIDIA GPUs: no spills, wide loads and stores."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import types
from pathlib import Path
from unittest import mock

import pytest
import torch
import triton

from tests.compile_only.compiled import compile_launch, resources_of
from tests.compile_only.launches import recorded
from tests.compile_only.targets import ARCHS
from torch_fdattn.dist.symm import copies, lamport
from torch_fdattn.dist.symm.symmetric_memory import PeerMemory
from torch_fdattn.dist.tensor_parallel import (
    copy_engine,
    fused_gather,
    fused_scatter,
    gemm_all_reduce,
    lamport_exchange,
    lamport_two_shot,
    low_latency,
    row_norm,
    tiled_all_reduce,
)
from torch_fdattn.ops.gemm import (
    dequantise,
    small_m_gemm,
    small_m_linear,
    swiglu_gemm,
    tile_product,
)
from torch_fdattn.ops.library import INTERPRET

pytestmark = pytest.mark.skipif(
    INTERPRET, reason="compiles kernels, which the interpreter replaces"
)

WORLD = 4


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@contextlib.contextmanager
def ranks(early: bool = True, capability: tuple[int, int] = (9, 0)):
    """Modules that believe to be rank 1 of four, their channels on the meta device."""
    words, memory = meta(8, dtype=torch.int64), meta(1 << 28, dtype=torch.uint8)
    channel = types.SimpleNamespace(
        rank=1, world=WORLD, half_bytes=1 << 27, memory=PeerMemory(memory, words, None, (memory,) * WORLD),
        state=words, fault=types.SimpleNamespace(tensor=words), enter=lambda: None,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for module in (
            copies,
            copy_engine,
            fused_gather,
            fused_scatter,
            tile_product,
            gemm_all_reduce,
            lamport,
            lamport_two_shot,
            low_latency,
            tiled_all_reduce,
            lamport_exchange,
            row_norm,
        ):
            for name, value in (("channel", channel), ("rank_and_size", (1, WORLD))):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, return_value=value))
            if hasattr(module, "INTERPRET"):
                stack.enter_context(mock.patch.object(module, "INTERPRET", False))
        stack.enter_context(
            mock.patch.object(tile_product, "device_capability", return_value=capability)
        )
        for module in (fused_gather, fused_scatter):
            stack.enter_context(mock.patch.object(module, "programs", return_value=132))
        for module in (
            small_m_gemm,
            gemm_all_reduce,
            lamport_two_shot,
            low_latency,
            tiled_all_reduce,
            lamport_exchange,
            row_norm,
        ):
            stack.enter_context(mock.patch.object(module, "uses_pdl", return_value=early))
        yield


def check(launches, arch: str, spills: int = 0) -> None:
    """spills: bytes that ptxas of CUDA 12.9 puts on the stack where no store is wide."""
    assert launches
    for launch in launches:
        found = resources_of(launch, ARCHS[arch])
        assert found.spills <= spills, found
        assert not found.undefined, found
        assert found.shared <= ARCHS[arch].shared_limit, found


def text_of(launches, kernel: str, arch: str) -> str:
    (launch,) = (x for x in launches if kernel in x.kernel.__name__)
    return compile_launch(launch, ARCHS[arch]).asm["ptx"]


def serialised(text: str) -> bool:
    """Whether ptxas makes each wgmma wait for the one before (its note C7515)."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(text)
        command = [ptxas, "-v", "--gpu-name=sm_90a", source, "-o", Path(folder, "kernel.cubin")]
        return "C7515" in subprocess.run(command, capture_output=True, text=True, check=True).stderr


@pytest.mark.parametrize("rows", [4096, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("capability", [(9, 0), pytest.param((8, 0), marks=pytest.mark.slow)])
def test_all_gather(rows: int, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    x, weight = meta(rows // WORLD, 5120, dtype=dtype), meta(12800, 5120, dtype=dtype)
    for strategy in (copy_engine, fused_gather):
        with ranks(capability=capability), recorded() as launches:
            strategy.all_gather_matmul(x, [weight], "0", [rows // WORLD] * WORLD, False)
        check(launches, "sm_90")
    text = text_of(launches, "gather_gemm", "sm_90")
    described = capability >= (9, 0) and dtype == torch.bfloat16
    assert ("cp.async.bulk.tensor" in text) == described
    assert ("fence.proxy.async.global" in text) == described
    assert ("cp.async.cg.shared.global [" in text) != described
    assert "cp.async.ca" not in text
    assert not serialised(text)
    assert dtype != torch.bfloat16 or "wgmma" in text


@pytest.mark.parametrize(
    ("rows", "biased"),
    [
        pytest.param(4096, False, marks=pytest.mark.slow), (4096, True), pytest.param(128, False, marks=pytest.mark.slow),
        pytest.param(128, True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    ("capability", "by_rows"),
    [((9, 0), True), pytest.param((9, 0), False, marks=pytest.mark.slow), ((8, 0), True)],
)
def test_reduce_scatter(
    rows: int, biased: bool, capability: tuple[int, int], by_rows: bool
) -> None:
    x, weight, bias = meta(rows, 6400), meta(5120, 6400), meta(5120) if biased else None
    weight = weight if by_rows else weight.t().contiguous().t()
    for strategy in (copy_engine, fused_scatter):
        with ranks(capability=capability), recorded() as launches:
            strategy.matmul_reduce_scatter(x, weight, "0", [rows // WORLD] * WORLD, bias)
        check(launches, "sm_90")
    text = text_of(launches, "gemm_scatter", "sm_90")
    assert "st.global.v4" in text
    assert ("cp.async.bulk.tensor" in text) == (capability >= (9, 0))
    assert not serialised(text)


@pytest.mark.parametrize("columns", [1000, pytest.param(5000, marks=pytest.mark.slow)])
def test_columns_that_no_wide_store_divides(columns: int) -> None:
    x, weight = meta(WORLD * 1024, 4096), meta(columns, 4096)
    with ranks(), recorded() as launches:
        fused_gather.all_gather_matmul(x[:1024], [weight], "0", [1024] * WORLD, False)
        fused_scatter.matmul_reduce_scatter(x, weight, "0", [1024] * WORLD)
    check(launches, "sm_90", spills=8)


def test_operands() -> None:
    """Descriptors where the device takes them; the rest by pointers."""
    tile = tile_product.ProductTile(128, 128, 64, 4, 4)

    def layout(x, weight, capability=(9, 0)) -> str | None:
        with ranks(capability=capability):
            return tile_product.operands((x,), weight, tile).layout

    x, weight = meta(256, 64), meta(512, 64)
    assert layout(x, weight) == "rows"
    assert layout(x, weight.t().contiguous().t()) == "columns"
    assert layout(x, weight, (8, 9)) is None
    assert layout(x, weight, (0, 0)) is None
    assert layout(x.float(), weight.float()) is None
    assert layout(meta(256, 60), meta(512, 60)) is None  # rows of 120 bytes
    assert layout(x, meta(512, 128)[:, ::2]) is None
    assert layout(x[:0], weight) is None
    assert layout(meta(256, 72)[:, 4:68], weight) is None  # from byte 8 on
    assert layout(meta(1, 64).expand(256, 64), weight) is None


def test_one_number() -> None:
    """Triton makes constants of ones."""
    with ranks(), recorded() as launches:
        copy_engine.matmul_reduce_scatter(meta(WORLD, 8), meta(1, 8), "0", [1] * WORLD)
        fused_scatter.matmul_reduce_scatter(meta(WORLD, 1), meta(1, 1), "0", [1] * WORLD)
        low_latency.matmul_all_reduce(meta(1, 1), meta(1, 1), "0")
    check(launches, "sm_90", spills=8)


@pytest.mark.parametrize(
    "rows", [16, *(pytest.param(m, marks=pytest.mark.slow) for m in (1, 64, 128))]
)
def test_all_reduce(rows: int) -> None:
    x, weight = meta(rows, 6400), meta(5120, 6400)
    for method in (low_latency, gemm_all_reduce):
        with ranks(), recorded() as launches:
            method.matmul_all_reduce(x, weight, "0", meta(5120) if rows == 16 else None)
        check(launches, "sm_90")


@pytest.mark.parametrize("rows", [16, pytest.param(128, marks=pytest.mark.slow)])
def test_products_of_few_rows(rows: int) -> None:
    """By descriptors, wgmma one after another without waits between, words by wide stores and loads."""
    x, weight = meta(rows, 6400), meta(5120, 6400)
    with ranks(), recorded() as launches:
        gemm_all_reduce.matmul_all_reduce(x, weight, "0")
        swiglu_gemm.silu_mul_linear(x, weight)
    check(launches, "sm_90")
    for name in ("gemm_all_reduce", "swiglu_gemm"):
        text = text_of(launches, name, "sm_90")
        assert "cp.async.bulk.tensor" in text
        assert "wgmma" in text
        assert not serialised(text)
        assert "st.global.v4" in text
    assert "ld.volatile.global.v4" in text_of(launches, "gemm_all_reduce", "sm_90")


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])  # fmt: skip
def test_linear_of_few_rows(dtype: torch.dtype) -> None:
    """As those, and six blocks of weights on their way; what is asked for ahead is before the wait for the launch ahead."""
    x, weight = meta(16, 4096, dtype=dtype), meta(6144, 4096, dtype=dtype)
    with ranks(), recorded() as launches:
        small_m_linear.small_m_linear(x, weight)
    check(launches, "sm_90")
    found = resources_of(*launches, ARCHS["sm_90"])
    assert found.registers <= 64  # 34 by triton 3.7's ptxas
    assert found.shared >= 6 * 64 * 128 * 2
    text = text_of(launches, "small_m_linear", "sm_90")
    assert "wgmma.mma_async.sync.aligned.m64n16k16" in text
    assert "cp.async.bulk.tensor" in text
    assert not serialised(text)
    assert "st.global.v4" in text
    assert text.index("prefetch.global.L2") < text.index("griddepcontrol.wait")
    assert text.index("griddepcontrol.wait") < text.index("cp.async.bulk.tensor")
    assert text.rindex("wgmma.mma_async") < text.index("griddepcontrol.launch_dependents")


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])  # fmt: skip
def test_swiglu_in_tiles(dtype: torch.dtype) -> None:
    """Gate and up are one operand, which stays in shared memory."""
    x, weight = meta(4096, 5120, dtype=dtype), meta(25600, 5120, dtype=dtype)
    with ranks(), recorded() as launches:
        swiglu_gemm.silu_mul_linear(x, weight)
    check(launches, "sm_90")
    text = text_of(launches, "persistent_swiglu_gemm", "sm_90")
    assert "wgmma.mma_async.sync.aligned.m64n256k16" in text
    assert "cp.async.bulk.tensor.3d" in text
    assert "ld.shared" not in text
    assert not serialised(text)


@pytest.mark.slow
def test_products_of_few_rows_with_less_shared_memory() -> None:
    x, weight = meta(128, 6400), meta(5120, 6400)
    with ranks(capability=(12, 0)), recorded() as launches:
        gemm_all_reduce.matmul_all_reduce(x, weight, "0")
        swiglu_gemm.silu_mul_linear(x, weight)
    for launch in launches:
        assert resources_of(launch, ARCHS["sm_90"]).shared <= 99 * 1024


@pytest.mark.parametrize("rows", [16, pytest.param(128, marks=pytest.mark.slow)])
def test_float8_weights(rows: int) -> None:
    """Read as they are, by wide loads; where nothing converts them, as bytes."""
    x, weight = meta(rows, 6400), meta(5120, 6400, dtype=torch.float8_e4m3fn)
    scale, out = meta(5120, dtype=torch.float32), meta(5120, 6400)
    with ranks(), recorded() as launches:
        gemm_all_reduce.matmul_all_reduce(x, weight, "0", None, scale)
        dequantise.convert(weight, scale, out)
    check(launches, "sm_90")
    assert "cp.async.bulk.tensor" in text_of(launches, "gemm_all_reduce", "sm_90")
    assert "ld.global.v4" in text_of(launches, "dequantise", "sm_90")
    with recorded() as launches:
        dequantise.convert(weight.view(torch.uint8), scale, out)
    check(launches, "sm_80")


@pytest.mark.parametrize("shots", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_all_reduce_by_tiles(shots: int) -> None:
    x = meta(128, 5120)
    with ranks(), recorded() as launches:
        tiled_all_reduce.all_reduce(x, torch.empty_like(x), "0", 1, WORLD, shots=shots)
    check(launches, "sm_90")
    text = text_of(launches, "shot", "sm_90")
    assert "st.global.v4" in text
    assert "ld.volatile.global.v4" in text


@pytest.mark.parametrize(
    "op",
    [
        "all_reduce",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("reduce_scatter", "all_gather")),
    ],
)
def test_values(op: str) -> None:
    x = meta(128, 5120)
    y = {"all_reduce": x, "reduce_scatter": x[: 128 // WORLD], "all_gather": meta(512, 5120)}[op]
    with ranks(), recorded() as launches:
        getattr(lamport_exchange, op)(x, torch.empty_like(y), "0", 1, WORLD)
    check(launches, "sm_90")
    text = text_of(launches, "lamport_exchange", "sm_90")
    assert "st.global.v4" in text
    assert "ld.volatile.global.v4" in text
    assert "fence" not in text


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_values_in_two_trips(dtype: torch.dtype) -> None:
    x = meta(128, 5120, dtype=dtype)
    with ranks(), recorded() as launches:
        lamport_two_shot.all_reduce(x, torch.empty_like(x), "0", 1, WORLD)
    check(launches, "sm_90")
    text = text_of(launches, "two_shot", "sm_90")
    # Of its tensors, parts, sums and zeros no word travels alone.
    assert "st.global.v4" in text
    assert "st.global.b32" not in text
    assert "ld.volatile.global.v4" in text
    assert "ld.volatile.global.b32" not in text
    assert "fence" not in text


@pytest.mark.slow
@pytest.mark.parametrize("columns", [5120, 8192])
def test_all_reduce_and_norm(columns: int) -> None:
    x = meta(16, columns)
    with ranks(), recorded() as launches:
        row_norm.sum_norm(x, meta(columns), x, meta(columns), 1e-6, "0")
    check(launches, "sm_90")
    assert "ld.volatile.global.v4" in text_of(launches, "norm", "sm_90")


@pytest.mark.parametrize("columns", [5120, *(pytest.param(n, marks=pytest.mark.slow) for n in (2560, 8192))])  # fmt: skip
def test_all_reduce_and_norm_in_two_trips(columns: int) -> None:
    x = meta(256, columns)
    assert lamport_two_shot.shots(x.nbytes, WORLD) == 2
    with ranks(), recorded() as launches:
        row_norm.sum_norm(x, meta(columns), x, meta(columns), 1e-6, "0")
    check(launches, "sm_90")
    text = text_of(launches, "norm", "sm_90")
    assert "st.global.v4" in text
    assert "st.global.b32" not in text
    assert "ld.volatile.global.v4" in text
    assert "ld.volatile.global.b32" not in text


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
def test_other_targets(arch: str) -> None:
    x, weight = meta(1024, 5120), meta(2560, 5120)
    with ranks(arch != "sm_80", ARCHS[arch].capability), recorded() as launches:
        fused_gather.all_gather_matmul(x, [weight], "0", [1024] * WORLD, False)
        fused_scatter.matmul_reduce_scatter(x, weight, "0", [256] * WORLD)
        gemm_all_reduce.matmul_all_reduce(x[:16], weight, "0")
    check(launches, arch)
