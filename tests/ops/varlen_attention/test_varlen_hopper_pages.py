"""Entries of page tables that are no pages of the sequence: what `varlen_attention` says of them, of Hopper's kernel on an sm_90."""

import pytest
import torch

import torch_fdattn
from tests.ops.decode.inputs import int32
from torch_fdattn.testing import assert_launched, attention_oracle

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of sm_90",
)
PATH = "varlen_attention_forward/hopper"


def normal(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def check(found, q, k, v, rows, kept, **options):
    """Of a sequence's rows, and its keys in order (heads, keys, D)."""
    own = (x[None, :, kept].double() for x in (k, v))
    exact, exact_lse = attention_oracle(q[rows].transpose(0, 1)[None].double(), *own, **options)
    out, lse = found[0][rows].transpose(0, 1), found[1][:, rows]
    torch.testing.assert_close(lse.double(), exact_lse[0], rtol=1e-3, atol=1e-3)
    assert (out.double() - exact[0]).norm() <= 4e-3 * exact.norm()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("entry", [-1, 0, 40, 2**31 - 1])
def test_pages_that_a_window_has_left_behind_may_be_anything(entry, head_dim):
    """Page 0 too, which holds NaN. The first key that a query sees is in the third page of a block."""
    pages = [normal(40, 2, 16, head_dim) for _ in "kv"]
    for x in pages:
        x[0] = torch.nan
    table = torch.arange(1, 33, dtype=torch.int32, device="cuda")[None]
    k, v = (x[1:33].transpose(0, 1).flatten(1, 2) for x in pages)
    q, window = normal(20, 4, head_dim), (440, 0)
    table[0, :2] = entry
    with assert_launched(PATH):
        found = torch_fdattn.varlen_attention(
            q, *pages, int32(0, 20, device="cuda"), page_table=table, kv_lens=int32(500, device="cuda"), window=window,
        )  # fmt: skip
    check(found, q, k, v, slice(20), slice(500), window=window)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_keys_on_pages_outside_the_cache_are_masked(head_dim):
    q, pages = normal(5, 2, head_dim), [normal(3, 1, 16, head_dim) for _ in "kv"]
    table, begins = int32(2, 3, 1, -7, 0, 99, device="cuda").view(2, 3), int32(0, 3, 5, device="cuda")  # fmt: skip
    with assert_launched(PATH):
        found = torch_fdattn.varlen_attention(
            q, *pages, begins, page_table=table, kv_lens=int32(40, 30, device="cuda")
        )
    for rows, held, last in ((slice(3), (2, 1), 24), (slice(3, 5), (0,), 14)):
        k, v = (torch.cat([x[page] for page in held], 1) for x in pages)
        check(found, q, k, v, rows, slice(last))
