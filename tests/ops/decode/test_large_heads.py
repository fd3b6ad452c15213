"""`decode` and `paged_decode` take the head dims that `attention` takes: multiples of 8 to 512 (Gemma 4's layers)."""

import itertools

import pytest
import torch

import torch_fdattn
from tests.ops.decode.inputs import in_pages, int32
from torch_fdattn.testing import attention_oracle, make_tensor

LENS = (75, 3, 0)
SIZES = [
    (512, 512), (264, 16),
    *(pytest.param(*x, marks=pytest.mark.slow) for x in ((16, 264), (320, 128))),
]  # fmt: skip


def inputs(dtype, head_dim, v_dim, device, tokens=2, heads=6):
    q = make_tensor((len(LENS), heads, tokens, head_dim), device=device, dtype=dtype)
    k, v = (
        make_tensor((len(LENS), 2, 80, d), device=device, dtype=dtype) for d in (head_dim, v_dim)
    )
    return q, k, v, int32(*LENS, device=device)


def agrees(found, q, k, v, dtype, **options):
    exact, exact_lse = attention_oracle(q.double(), k.double(), v.double(), LENS, **options)
    close = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(found[0].double(), exact, **close)
    torch.testing.assert_close(found[1].double(), exact_lse, **close)


@pytest.mark.interpreter
@pytest.mark.parametrize(("head_dim", "v_dim"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_head_dims_above_256(head_dim, v_dim, dtype, device):
    q, k, v, lens = inputs(dtype, head_dim, v_dim, device)
    options = {"causal": True, "window": (40, -1)}
    agrees(torch_fdattn.decode(q, k, v, lens, **options), q, k, v, dtype, **options)
    (k_pages, table), (v_pages, _) = in_pages(k, 16), in_pages(v, 16)
    paged = torch_fdattn.paged_decode(q, k_pages, v_pages, table, lens, batch_invariant=True)
    agrees(paged, q, k, v, dtype, causal=True)


@pytest.mark.interpreter
@pytest.mark.parametrize("heads", [6, 80])  # of one tile of rows, and of more than one
def test_quantised_caches(heads, device):
    q, k, v, lens = inputs(torch.float16, 512, 512, device, heads=heads)
    k8, v8 = ((x * 20).to(torch.int8) for x in (k, v))
    scale = torch.tensor(0.05, device=device)
    found = torch_fdattn.decode(q, k8, v8, lens, k_scale=scale, v_scale=scale)
    agrees(found, q, k8.double() * 0.05, v8.double() * 0.05, torch.float16, causal=True)


def test_what_attention_takes_decode_takes(device):
    """Head dim by head dim, of keys and of values: the same are refused, in the same words."""
    for head_dim, v_dim in itertools.product(
        (8, 12, 16, 200, 256, 264, 320, 512, 520), (16, 512, 516)
    ):
        q, k, v, lens = inputs(torch.float32, head_dim, v_dim, device)
        (k_pages, table), (v_pages, _) = in_pages(k, 16), in_pages(v, 16)
        said = []
        for call, arguments in (
            (torch_fdattn.attention, (q, k, v)),
            (torch_fdattn.decode, (q, k, v)),
            (torch_fdattn.paged_decode, (q, k_pages, v_pages, table)),
        ):
            try:
                call(*arguments, lens)
                said.append("taken")
            except ValueError as error:
                said.append(str(error).replace("v_cache", "v"))
        assert len(set(said)) == 1, (head_dim, v_dim, said)


def test_gradients(device):
    q, k, v, lens = inputs(torch.float32, 512, 264, device)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = torch_fdattn.decode(*leaves, lens)
    exact, exact_lse = attention_oracle(q.double(), k.double(), v.double(), LENS, causal=True)
    seen = torch.isfinite(lse)
    found = torch.autograd.grad(out.sum() + lse[seen].sum(), leaves)
    wanted = torch.autograd.grad(exact.sum() + exact_lse[seen].sum(), leaves)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
