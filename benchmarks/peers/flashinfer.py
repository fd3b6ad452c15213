"""FlashInfer's decode where it is installed: planned beforehand, on tensor cores, NHD memory.

Paged caches, and contiguous ones taken as pages in order, go through
`BatchDecodeWithPagedKVCacheWrapper`; the plan (host work for one set of lengths) is no part of what
is timed. For one contiguous sequence `single_decode_with_kv_cache` is tried as well and the faster of
the two is measured. It compiles each variant (dtype, head dim) with nvcc at its first call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..decode_inputs import DecodeInputs
from ..runner import DTYPES
from ..shapes import DecodeCase
from ..timing import RotatedGraph, Timer
from .base import DecodeCall, Implementation, missing

#: A run with head dim 96 (0.7.2, H100) ended in an illegal memory access while this peer was measured.
HEAD_DIMS = (64, 128, 256)
WORKSPACE_BYTES = 256 * 2**20  # twice what its documentation recommends: 128 × 64 heads need more


class FlashInfer(Implementation):
    name = "flashinfer"
    memory = "BSHD"
    differentiable = False

    def available(self, device: torch.device) -> str | None:
        return missing("flashinfer") or super().available(device)

    def decode(self, case: DecodeCase, copies: Sequence[DecodeInputs]) -> list[DecodeCall]:
        if case.cache != "fp8":
            self.refuse(case, cache=True)
        if copies[0].q.is_cuda and case.head_dim not in HEAD_DIMS:
            raise NotImplementedError(f"{self.name} has head dims {HEAD_DIMS}, not {case.head_dim}")
        paged = _paged(case, copies)
        if case.batch > 1 or case.page is not None or case.cache is not None:
            return paged
        single = _single(copies)
        return _faster(paged, single) if copies[0].q.is_cuda else single


def _paged(case: DecodeCase, copies: Sequence[DecodeInputs]) -> list[DecodeCall]:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    device = copies[0].q.device
    page = case.page or next(size for size in (64, 16, 1) if case.kv_len % size == 0)
    indptr, indices, last_page_len = page_lists(case, page, copies[0].page_table)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    dtype = DTYPES[case.dtype]
    wrapper.plan(
        indptr, indices.to(device), last_page_len, case.heads, case.kv_heads, case.head_dim, page,
        q_data_type=dtype, kv_data_type=copies[0].k.dtype,
    )  # fmt: skip
    calls: list[DecodeCall] = []
    for x in copies:
        cache = tuple(_pages(t, case, page) for t in (x.k, x.v))
        # Its scales are numbers, so that reading them here costs the calls nothing.
        scales = {
            name: float(scale[0, 0, 0])
            for name, scale in (("k_scale", x.k_scale), ("v_scale", x.v_scale))
            if scale is not None
        }
        calls.append(functools.partial(wrapper.run, x.q[:, :, 0], cache, **scales))
    return calls


def page_lists(case: DecodeCase, page: int, table: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr, indices, last_page_len), int32 on the CPU; without a table the pages lie in order."""
    needed = torch.tensor([-(-length // page) for length in case.kv_lens], dtype=torch.int32)
    if table is None:
        rows = torch.arange(case.batch * case.kv_len // page, dtype=torch.int32)
        rows = rows.view(case.batch, -1)
    else:
        rows = table.cpu()
    indptr = torch.zeros(case.batch + 1, dtype=torch.int32)
    indptr[1:] = needed.cumsum(0)
    indices = torch.cat([row[:count] for row, count in zip(rows, needed.tolist(), strict=True)])
    lengths = torch.tensor(case.kv_lens, dtype=torch.int32)
    return indptr, indices, lengths - (needed - 1) * page


def _pages(cache: Tensor, case: DecodeCase, page: int) -> Tensor:
    """(P, page, H_kv, D), contiguous, as a view of either form."""
    return cache.transpose(1, 2).view(-1, page, case.kv_heads, case.head_dim)


def _single(copies: Sequence[DecodeInputs]) -> list[DecodeCall]:
    from flashinfer import single_decode_with_kv_cache

    return [
        functools.partial(
            single_decode_with_kv_cache, x.q[0, :, 0], *(t[0].transpose(0, 1) for t in (x.k, x.v)),
            kv_layout="NHD", use_tensor_cores=True,
        )
        for x in copies
    ]  # fmt: skip


def _faster(one: list[DecodeCall], other: list[DecodeCall]) -> list[DecodeCall]:
    """The calls that take less time on the device: of one graph over all copies, so that the host's does not decide."""
    timer = Timer(torch.device("cuda", torch.cuda.current_device()))
    return min((one, other), key=lambda calls: RotatedGraph(timer, calls, rounds=1).sample(3))
