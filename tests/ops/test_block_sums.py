"""Softmax's sums by blocks against their definition, in float64."""

from __future__ import annotations

import pytest
import torch

from torch_fdattn.ops.block_sums import BLOCK, block_sums

INF = float("inf")

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("columns", [1, 77, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_blocks_follow_the_definition(columns, dtype, kernel_device):
    torch.manual_seed(columns)
    x = (torch.randn(5, columns, device=kernel_device) * 3).to(dtype)
    x[1] = x[1].masked_fill(torch.rand(columns, device=kernel_device) < 0.5, -INF)
    x[2] = -INF
    x[3] = x[3].round()  # ties
    temperature = torch.tensor([1.0, 0.3, 1.0, 2.0, 1e-30], device=kernel_device)
    found = block_sums(x, temperature)
    for i in range(-(-columns // BLOCK)):
        block = x[:, i * BLOCK : (i + 1) * BLOCK].double()
        largest = block.amax(-1)
        assert torch.equal(found.largest[:, i].double(), largest)
        first = (block == largest[:, None]).int().argmax(-1)
        assert torch.equal(found.columns[:, i], i * BLOCK + first)
        weights = ((block - largest[:, None]) / temperature.double()[:, None]).exp()
        sums = weights.sum(-1).where(largest > -INF, 0)
        torch.testing.assert_close(found.sums[:, i].double(), sums, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_what_is_not_finite_shows(bad, kernel_device):
    x = torch.zeros(3, BLOCK + 9, device=kernel_device)
    x[0, 4] = bad
    x[1] = -INF
    x[1, BLOCK + 3] = bad
    sums = block_sums(x, torch.ones(3, device=kernel_device)).sums
    assert sums.isnan().tolist() == [[True, False], [False, True], [False, False]]
