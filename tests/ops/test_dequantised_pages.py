"""Pages of one byte an element as numbers: by the kernel what torch's ops give, to the bit."""

import pytest
import torch

from torch_fdattn.ops import library
from torch_fdattn.ops.append_kv.arguments import QUANTISED
from torch_fdattn.ops.dequantised_pages import dequantised_pages

KERNEL = "dequantised_pages/triton"


def drawn(device, stored, page_size=4, heads=2, dims=16, pages=5):
    """Caches of every code, NaN among them, with scales of some orders of magnitude. V's lie in other memory than K's. Before
    the first page is what nobody may read: what is read of it is no number."""
    shape = pages + 1, page_size, heads, dims
    codes = torch.randint(256, (2, *shape), dtype=torch.uint8, device=device)
    codes[0, 1:].view(-1)[:256] = torch.arange(256, dtype=torch.uint8, device=device)
    scales = torch.logspace(-6, 3, 2 * (pages + 1) * heads * page_size, device=device)
    scales = scales.view(2, pages + 1, heads, page_size).clone()
    scales[:, 0] = torch.nan
    k_cache, v_cache = codes.view(stored)
    k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2).contiguous()
    k_scale, v_scale = scales[0], scales[1].mT.contiguous().mT
    return k_cache[1:], v_cache[1:], k_scale[1:], v_scale[1:]


def by_torch(k_cache, v_cache, k_scale, v_scale, pages, dtype):
    ids = pages.long()
    return [
        (x[ids].float() * scale[ids][..., None]).to(dtype)
        for x, scale in ((k_cache, k_scale), (v_cache, v_scale))
    ]


@pytest.mark.interpreter
@pytest.mark.parametrize("stored", QUANTISED)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    "sizes", [{}, dict(page_size=5, heads=3, dims=24), dict(page_size=1, heads=1, dims=256)]
)
@torch.no_grad()
def test_it_is_what_torch_gives(kernel_device, stored, dtype, sizes) -> None:
    cache = drawn(kernel_device, stored, **sizes)
    pages = torch.tensor([3, 0, 3, 4], dtype=torch.int32, device=kernel_device)
    before = library.launches[KERNEL]
    found = dequantised_pages(*cache, pages, dtype)
    assert library.launches[KERNEL] == before + 1
    for x, right in zip(found, by_torch(*cache, pages, dtype), strict=True):
        assert x.dtype == dtype
        torch.testing.assert_close(x, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.interpreter
@torch.no_grad()
def test_a_page_that_is_none(kernel_device) -> None:
    """Zeros by the kernel: nothing before the caches is read."""
    cache = drawn(kernel_device, torch.int8)
    pages = torch.tensor([-1, 2, -1], dtype=torch.int32, device=kernel_device)
    expected = by_torch(*cache, pages.clamp(min=0), torch.float32)
    for x, right in zip(dequantised_pages(*cache, pages, torch.float32), expected, strict=True):
        assert not x[::2].any()
        torch.testing.assert_close(x[1], right[1], rtol=0, atol=0)


@pytest.mark.interpreter
def test_where_torch_does_it(kernel_device) -> None:
    """Of elements that are not next to each other, of no page, with scales in float64, and where gradients are wanted."""
    k_cache, v_cache, k_scale, v_scale = drawn(kernel_device, torch.int8)
    apart = [x.repeat_interleave(2, -1)[..., ::2] for x in (k_cache, v_cache)]
    learned, wide = k_scale.clone().requires_grad_(), k_scale.double()
    before = library.launches[KERNEL]
    for caches, scale, ids in (
        (apart, k_scale, [1, 0]), ((k_cache, v_cache), k_scale, []), ((k_cache, v_cache), wide, [1]),
        ((k_cache, v_cache), learned, [1]),
    ):  # fmt: skip
        call = *caches, scale, v_scale, torch.tensor(ids, dtype=torch.int32, device=kernel_device)
        found = dequantised_pages(*call, torch.float32)
        for x, right in zip(found, by_torch(*call, torch.float32), strict=True):
            assert torch.equal(x, right)
    assert found[0].requires_grad
    assert library.launches[KERNEL] == before
