"""Every byte of every quantised format through decode: what a single key's value gives, exactly, and its score."""

import pytest
import torch

import torch_fdattn
from torch_fdattn.testing import assert_launched, expected_path

DTYPES = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
DIM = 128


def all_bytes(dtype: torch.dtype, device: str, shift: int, gap: int) -> torch.Tensor:
    """(1, 2, 1, DIM): each byte once; `shift` bytes behind an aligned address, `gap` bytes between heads."""
    values = torch.arange(256, dtype=torch.uint8, device=device).view(2, DIM)
    room = torch.zeros(shift + 2 * (DIM + gap), dtype=torch.uint8, device=device)
    heads = room[shift:].view(2, DIM + gap)[:, :DIM]
    heads.copy_(values)
    return heads.view(dtype)[None, :, None]


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("shift", "gap"), [(0, 0), (16, 16), (2, 0), (1, 0), (0, 1)], ids=["plain", "slice", "even", "odd", "odd-rows"]
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("q_dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_byte(q_dtype, dtype, shift, gap, device):
    if q_dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter has no bfloat16")
    cache = all_bytes(dtype, device, shift, gap)
    exact = cache.float()
    with assert_launched(expected_path("decode_forward", device, q_dtype)):
        q = torch.zeros(1, 4, 1, DIM, dtype=q_dtype, device=device)
        out, lse = torch_fdattn.decode(q, torch.zeros_like(cache), cache)
        torch.testing.assert_close(
            out.float(), exact.repeat_interleave(2, 1), rtol=0, atol=0, equal_nan=True
        )
        assert (lse == 0).all()
        for at in (0, 1, 6, 77):  # dims of both halves of a pair
            q = torch.zeros(1, 4, 1, DIM, dtype=q_dtype, device=device)
            q[..., at] = 1
            lse = torch_fdattn.decode(q, cache, torch.zeros_like(cache), scale=1.0)[1]
            known = exact[:, :, :, at].repeat_interleave(2, 1)
            if exact.isfinite().all():
                torch.testing.assert_close(lse, known, rtol=1e-6, atol=0)
