"""The fp64 answer that errors are measured against, held to the tests' own oracle."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import exact
from torch_fdattn.testing import attention_oracle


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(50, 50), (50, 70), (1, 9)])
def test_exact_attention(
    causal: bool, queries: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact, "_BLOCK_BYTES", 8 * keys * 7)  # seven rows at a time
    q, dout = (torch.randn(1, 3, queries, 16, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(1, 1, keys, 16, dtype=torch.float64) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out, _ = attention_oracle(*leaves, causal=causal)
    dq, dk, dv = torch.autograd.grad(out, leaves, dout)

    q, k, v, dout = q[0], k[0, 0], v[0, 0], dout[0]
    found = exact.exact_attention(q, k, v, dout, causal=causal)
    torch.testing.assert_close(found.out, out[0].detach())
    torch.testing.assert_close(found.dq, dq[0])
    torch.testing.assert_close(found.dk, dk[0, 0])
    torch.testing.assert_close(found.dv, dv[0, 0])
    alone = exact.exact_attention(q.float(), k.float(), v.float(), causal=causal)
    assert alone.dq is None
    assert exact.max_abs_err(alone.out.float(), out[0].detach()) < 1e-5


def test_head_slice_takes_the_last_head_and_its_queries() -> None:
    q = torch.arange(2 * 6).reshape(2, 6, 1, 1)
    k = torch.arange(2 * 2).reshape(2, 2, 1, 1)
    part = exact.HeadSlice(group=3)
    assert part.queries(q).flatten().tolist() == [9, 10, 11]
    assert part.keys(k).flatten().tolist() == [3]


def test_max_abs_err() -> None:
    exact_values = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert exact.max_abs_err(torch.tensor([1.0, 2.5]), exact_values) == 0.5
    assert math.isnan(exact.max_abs_err(torch.tensor([1.0, float("nan")]), exact_values))
