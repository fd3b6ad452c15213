"""What a quantised cache holds: every fp16 number, and fp32's closest to every tie, to the code."""

import bisect

import pytest
import torch

import torch_fdattn
from tests.ops.append_kv.cases import QUANTISED, grid, rounded
from torch_fdattn.testing import assert_launched, expected_path

DTYPES = pytest.mark.parametrize("cache_dtype", QUANTISED, ids=str)
pytestmark = pytest.mark.interpreter


def stored(values, cache_dtype, device, **scales):
    """What a cache holds after values (N,) went in as keys and values of 16 dims."""
    new = values.view(1, 1, -1, 16).to(device)
    caches = [torch.ones(new.shape, device=device).to(cache_dtype) for _ in range(2)]
    lens = torch.zeros(1, dtype=torch.int32, device=device)
    with assert_launched(expected_path("append_kv", device, new.dtype)):
        torch_fdattn.append_kv(*caches, new, new, lens, **scales)
    k, v = (x.cpu().flatten() for x in caches)
    assert torch.equal(k.view(torch.uint8), v.view(torch.uint8))
    return k


@DTYPES
def test_every_half_number(cache_dtype, device):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    found = stored(values, cache_dtype, device).double()
    expected = torch.tensor([rounded(x, cache_dtype) for x in values.tolist()], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    # Zero keeps its sign where the format has one.
    if cache_dtype != torch.int8:
        zeros = values == 0
        assert torch.equal(found[zeros].signbit(), values[zeros].signbit())


@DTYPES
def test_on_both_sides_of_every_tie(cache_dtype, device):
    """One unit of fp32's last place decides."""
    points = torch.tensor(grid(cache_dtype), dtype=torch.float64)
    ties = ((points[1:] + points[:-1]) / 2).float()
    inf = torch.tensor(float("inf"))
    values = torch.cat([points.float(), ties, ties.nextafter(inf), ties.nextafter(-inf)])
    values = torch.cat([values, -values])
    values = torch.cat([values, values.new_zeros(-len(values) % 16)])
    found = stored(values, cache_dtype, device).double()
    expected = torch.tensor([rounded(x, cache_dtype) for x in values.tolist()], dtype=torch.float64)
    assert torch.equal(found, expected)


@DTYPES
def test_the_quotient_is_rounded_right_before(cache_dtype, device):
    """x / scale as IEEE has it: an approximate division puts some of these on the wrong side of a tie."""
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor(1 / 3) / grid(cache_dtype)[-1]
    # Numerators whose quotients are the numbers closest to the ties.
    points = torch.tensor(grid(cache_dtype), dtype=torch.float64)
    ties = ((points[1:] + points[:-1]) / 2 * scale).float()
    near = torch.cat([ties, ties.nextafter(ties * 2), ties.nextafter(ties * 0)])
    x = torch.cat([x, near, near.new_zeros(-len(near) % 16)])
    found = stored(x, cache_dtype, device, k_scale=scale.to(device), v_scale=scale.to(device))
    quotients = (x / scale).tolist()
    expected = torch.tensor([rounded(q, cache_dtype) for q in quotients], dtype=torch.float64)
    assert torch.equal(found.double(), expected)


def test_the_oracle_knows_the_formats():
    """Its values are torch's, code by code; the rounding between them is its own."""
    for dtype in QUANTISED:
        values = grid(dtype)
        assert bisect.bisect(values, values[5]) == 6
        codes = torch.arange(len(values), dtype=torch.uint8).view(dtype)
        assert codes.double().tolist() == values


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_plain_cache_keeps_every_bit(dtype, device):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).to(dtype)
    found = stored(values, dtype, device)
    number = ~values.isnan()
    assert torch.equal(found.isnan(), values.isnan())
    assert torch.equal(found[number], values[number])
    assert torch.equal(found[number].signbit(), values[number].signbit())


def test_turned_keys_are_rounded_once(device):
    """Not to the keys' dtype and then to the cache's: fp16 keys in an fp32 cache keep fp32's angle."""
    k = torch.randn(1, 1, 64, 16, dtype=torch.float16)
    angles = torch.rand(64, 8)
    caches = [torch.zeros(1, 1, 64, 16, device=device) for _ in range(2)]
    lens = torch.zeros(1, dtype=torch.int32, device=device)
    tables = {"cos": angles.cos().to(device), "sin": angles.sin().to(device)}
    torch_fdattn.append_kv(*caches, k.to(device), k.to(device), lens, **tables)
    first, second = k.double().chunk(2, -1)
    cos, sin = angles.cos().double(), angles.sin().double()
    exact = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    torch.testing.assert_close(caches[0].cpu().double(), exact, rtol=1e-6, atol=1e-6)
    assert torch.equal(caches[1].cpu(), k.float())
