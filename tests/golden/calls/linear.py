"""Tensor-parallel matmuls by their strategies, as rank 1 of 4 (or 2), the products with SwiGLU, and those of few rows.

On the meta device: copies and BLAS's products happen nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tests.golden.calls.common import Call, new
from tests.golden.device import A100, RANK, WORLD
from torch_fdattn.dist.tensor_parallel import (
    copy_engine,
    fused_gather,
    fused_scatter,
    gemm_all_reduce,
    low_latency,
    row_norm,
    tiled_all_reduce,
)
from torch_fdattn.ops.gemm import dequantise, small_m_linear, swiglu_gemm

_FP32 = torch.float32
K, N = 5120, 12800


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return new(*shape, dtype=dtype, device="meta")


def calls() -> Iterator[Call]:
    yield from gathers()
    yield from scatters()
    yield from all_reduces()
    yield from norms()
    yield from products()


def gathers() -> Iterator[Call]:
    def one(name: str, module, rows: int, dtype=torch.bfloat16, n: int = N, **options) -> Call:
        x, weights = meta(rows, K, dtype=dtype), [meta(n, K, dtype=dtype)]
        given = dict(x=x, weights=weights, group_name="0", rows=[rows] * WORLD, keep=False)
        return Call(
            f"tensor_parallel/gather/{name}", module.all_gather_matmul, given, ("y",), **options
        )

    yield one("copy_engine", copy_engine, 1024)
    gated = one("copy_engine/gated", copy_engine, 1024, n=2 * N)
    gated.arguments["gated"] = True
    yield gated
    yield one("fused", fused_gather, 1024)
    yield one("fused/few", fused_gather, 16)
    yield one("fused/fp32", fused_gather, 1024, _FP32)
    yield one("fused/odd", fused_gather, 1024, n=1001)
    yield one("fused/a100", fused_gather, 1024, device=A100)
    kept = one("fused/kept", fused_gather, 256)
    kept.arguments |= dict(keep=True, weights=[meta(N, K), meta(K, N).t()[:, :K]])
    kept.results = ("y0", "y1", "gathered")
    yield kept
    yield one("low_latency", low_latency, 4)


def scatters() -> Iterator[Call]:
    def one(name: str, module, rows: int, biased: bool = False, weight: Tensor | None = None, **options) -> Call:  # fmt: skip
        x, weight = meta(WORLD * rows, 6400), meta(K, 6400) if weight is None else weight
        given = dict(
            x=x,
            weight=weight,
            group_name="0",
            rows=[rows] * WORLD,
            bias=meta(K) if biased else None,
        )
        return Call(
            f"tensor_parallel/scatter/{name}",
            module.matmul_reduce_scatter,
            given,
            ("y",),
            **options,
        )

    yield one("copy_engine", copy_engine, 1024)
    yield one("fused", fused_scatter, 1024)
    yield one("fused/bias", fused_scatter, 256, True)
    yield one("fused/columns", fused_scatter, 1024, weight=meta(6400, K).t())
    yield one("fused/a100", fused_scatter, 1024, device=A100)
    yield one("low_latency", low_latency, 4)


def all_reduces() -> Iterator[Call]:
    def one(name: str, module, rows: int, *, dtype=torch.bfloat16, **options) -> Call:
        given = dict(
            x=meta(rows, 6400, dtype=dtype), weight=meta(K, 6400, dtype=dtype), group_name="0"
        )
        return Call(
            f"tensor_parallel/all_reduce/{name}", module.matmul_all_reduce, given, ("y",), **options
        )

    for rows in (1, 16, 128):
        yield one(f"low_latency/{rows}", low_latency, rows)
        yield one(f"gemm_all_reduce/{rows}", gemm_all_reduce, rows)
    yield one("low_latency/512", low_latency, 512)
    yield one("low_latency/16/fp32", low_latency, 16, dtype=_FP32)
    yield one("low_latency/128/two_ranks", low_latency, 128, world=2)
    yield one("gemm_all_reduce/16/two_ranks", gemm_all_reduce, 16, world=2)
    yield one("gemm_all_reduce/16/a100", gemm_all_reduce, 16, device=A100)
    biased = one("gemm_all_reduce/16/bias", gemm_all_reduce, 16)
    biased.arguments["bias"] = meta(K)
    yield biased
    scaled = one("gemm_all_reduce/16/e4m3", gemm_all_reduce, 16)
    scaled.arguments |= dict(
        weight=meta(K, 6400, dtype=torch.float8_e4m3fn), bias=None, scale=meta(K, dtype=_FP32)
    )
    yield scaled
    for shots in (1, 2):
        x = meta(128, K)
        given = dict(x=x, y=meta(128, K), group_name="0", rank=RANK, world=WORLD, shots=shots)
        yield Call(f"tensor_parallel/all_reduce/tiles/{shots}", tiled_all_reduce.all_reduce, given)
    words = dict(x=meta(3, 8, dtype=_FP32), y=meta(3, 8, dtype=_FP32), group_name="0", world=WORLD)
    yield Call("tensor_parallel/all_reduce/ll_packets", low_latency.ll_all_reduce, words)


def norms() -> Iterator[Call]:
    def one(name: str, rows: int, group: str | None = "0", biased: bool = True) -> Call:
        given = dict(
            x=meta(rows, K),
            bias=meta(K) if biased else None,
            residual=meta(rows, K),
            weight=meta(K),
        )
        given |= dict(eps=1e-6, group_name=group)
        return Call(f"tensor_parallel/norm/{name}", row_norm.sum_norm, given, ("normed", "added"))

    yield one("16", 16)
    yield one("256", 256)
    yield one("alone", 16, None, False)


def products() -> Iterator[Call]:
    for rows in (16, 128, 4096):
        given = dict(x=meta(rows, K), weight=meta(2 * N, K))
        yield Call(f"swiglu_gemm/{rows}", swiglu_gemm.silu_mul_linear, given, ("y",))
    for rows in (1, 16):
        given = dict(x=meta(rows, 4096), weight=meta(6144, 4096))
        yield Call(f"small_m_linear/{rows}", small_m_linear.small_m_linear, given, ("y",))
    weight, scale = meta(K, 6400, dtype=torch.float8_e4m3fn), meta(K, dtype=_FP32)
    given = dict(weight=weight, scale=scale, out=meta(K, 6400))
    yield Call("dequantise/e4m3", dequantise.convert, given)
