"""What serving relies on: batch invariance, pages, strided tables, scales, sinks, sliding windows."""

import numpy as np
import pytest
import torch

import torch_fdattn
from tests.ops.decode.inputs import caches, in_pages, int32
from torch_fdattn.ops import library
from torch_fdattn.testing import attention_oracle


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "lens", [(1100, 40), pytest.param((3000, 40, 1500, 2999), marks=pytest.mark.slow)]
)
def test_batch_invariant_bits(lens, kernel_device):
    """A sequence alone, among others, and in a larger cache: the same bits; by default they differ."""
    q, k, v, kv_lens = caches(kernel_device, lens=lens, capacity=max(lens) + 72)
    q, k, v = q[:, :3], k[:, :1], v[:, :1]
    together = torch_fdattn.decode(q, k, v, kv_lens, batch_invariant=True)
    for b in range(len(lens)):
        one = (x[b : b + 1] for x in (q, k[:, :, : max(lens)], v[:, :, : max(lens)], kv_lens))
        alone = torch_fdattn.decode(*one, batch_invariant=True)
        assert all(torch.equal(x[b], y[0]) for x, y in zip(together, alone, strict=True))
    among = (
        [0] * 64 if kernel_device == "cuda" else [*range(len(lens))]
    )  # as many as one device cuts differently
    balanced = [
        torch_fdattn.decode(*(x[b] for x in (q, k, v, kv_lens)))[0][0] for b in ([0], among)
    ]
    assert not torch.equal(*balanced)


@pytest.mark.interpreter
def test_same_bits_on_every_run(kernel_device):
    q, k, v, lens = caches(kernel_device)
    first = torch_fdattn.decode(q, k, v, lens)
    for _ in range(10):
        again = torch_fdattn.decode(q, k, v, lens)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.interpreter
@pytest.mark.parametrize("wrong", [-1, 40, 2**31 - 1, -(2**31)])
def test_keys_on_pages_that_do_not_exist_are_masked(wrong, device):
    q, k, v, lens = caches(device)
    (k_pages, table), (v_pages, _) = in_pages(k, 16), in_pages(v, 16)
    assert k_pages.shape[0] == 40
    table[0, 2] = wrong
    out, lse = torch_fdattn.paged_decode(q, k_pages, v_pages, table, lens)
    keep = [j for j in range(130) if not 32 <= j < 48]
    exact, exact_lse = attention_oracle(
        *(x.double() for x in (q[:1], k[:1, :, keep], v[:1, :, keep]))
    )
    torch.testing.assert_close(out[:1].double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[:1].double(), exact_lse, rtol=1e-5, atol=1e-5)
    whole = torch_fdattn.decode(q, k, v, lens)[0]
    torch.testing.assert_close(out[1:], whole[1:])


@pytest.mark.interpreter
@pytest.mark.parametrize("page", [1, 16, 32])
def test_pages_of_a_contiguous_cache(page, device):
    """The same tiles, so the same bits."""
    q, k, v, lens = caches(device)
    (k_pages, table), (v_pages, _) = in_pages(k, page), in_pages(v, page)
    paged = torch_fdattn.paged_decode(q, k_pages, v_pages, table, lens)
    for x, y in zip(paged, torch_fdattn.decode(q, k, v, lens), strict=True):
        assert torch.equal(x, y)


@pytest.mark.interpreter
def test_no_pages_at_all(device):
    q, k, v, _ = caches(device)
    table = torch.zeros(4, 0, dtype=torch.int32, device=device)
    out, lse = torch_fdattn.paged_decode(q, k[:0], v[:0], table)
    assert not out.any()
    assert (lse == float("-inf")).all()


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "kind",
    ["every other", *(pytest.param(x, marks=pytest.mark.slow) for x in ("column", "expanded", "transposed"))],
)  # fmt: skip
def test_strided_tables_slopes_and_sinks(kind, device):
    q, k, v, lens = caches(device)
    (k, table), (v, _) = in_pages(k, 16), in_pages(v, 16)

    def laid_out(x):
        if kind == "expanded":
            return x.select(-1, 0).unsqueeze(-1).expand(x.shape)
        if kind == "transposed" and x.dim() == 2:
            return x.t().contiguous().t()
        step = 2 if kind == "every other" else 3
        wide = torch.full((*x.shape, step), -1, dtype=x.dtype, device=device)
        wide[..., 1] = x
        return wide[..., 1]

    for slopes in (torch.rand(6, device=device), torch.rand(4, 6, device=device)):
        strided = [laid_out(x) for x in (slopes, torch.rand(6, device=device))]
        here = table if kind == "expanded" else laid_out(table)
        call = (q, k, v), (strided[0], strided[1])
        out, lse = torch_fdattn.paged_decode(
            *call[0], here, lens, alibi_slopes=call[1][0], sinks=call[1][1]
        )
        dense = [x.contiguous() for x in call[1]]
        right = torch_fdattn.paged_decode(
            *call[0], table, lens, alibi_slopes=dense[0], sinks=dense[1]
        )
        for ours, dense_one in zip((out, lse), right, strict=True):
            if library.use_triton(q):
                assert torch.equal(ours, dense_one)
            else:  # torch's own loops over expanded tensors round differently on some processors
                torch.testing.assert_close(ours, dense_one)


@pytest.mark.interpreter
def test_slopes_and_sinks_far_apart(device):
    """The last head's lie more than 2**31 elements behind the first's."""
    q, k, v, lens = caches(device)
    step = 2**29
    # On a CPU memory that is not touched is not taken.
    buffer = torch.from_numpy(np.zeros(5 * step + 1, np.float16))
    if device == "cuda":
        if torch.cuda.mem_get_info()[0] < 6 << 30:
            pytest.skip(
                f"needs 6 GiB of free GPU memory, found {torch.cuda.mem_get_info()[0] >> 30}"
            )
        buffer = torch.zeros(5 * step + 1, dtype=torch.float16, device=device)
    far = buffer.as_strided((6,), (step,)).copy_(torch.rand(6))
    found = torch_fdattn.decode(q, k, v, lens, alibi_slopes=far, sinks=far)
    near = far.contiguous()
    expected = torch_fdattn.decode(q, k, v, lens, alibi_slopes=near, sinks=near)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.interpreter
def test_scales_of_heads_that_hold_nothing(device):
    """Zero where a head was never written; anything where a sequence is empty."""
    q, k, v, lens = caches(device)
    k, v = k.to(torch.int8), (v * 40).to(torch.int8)
    k_scale, v_scale = torch.rand(4, 2, 1, device=device), torch.rand(4, 2, 1, device=device)
    k_scale[:, 1] = 0
    v_scale[2] = float("nan")  # LENS[2] is 0
    out, lse = torch_fdattn.decode(q, k, v, lens, k_scale=k_scale, v_scale=v_scale)
    inputs = (x.cpu() for x in (q.double(), k, v, lens))
    exact, exact_lse = torch_fdattn.decode(
        *inputs, k_scale=k_scale.cpu(), v_scale=v_scale.nan_to_num(1.0).cpu()
    )
    torch.testing.assert_close(out.double().cpu(), exact, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(lse.double().cpu(), exact_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.interpreter
def test_small_scales_a_key_do_not_vanish(device):
    """Values of 1e-3 beside a key that takes most of the weight: float16 would round them away."""
    q, k, v, _ = caches(device, dtype=torch.float16, lens=(160,))
    v = (v * 40).to(torch.int8)
    v[:, :, 7] = 1
    k8 = (k * 30).to(torch.int8)
    k_scale, v_scale = torch.tensor(1 / 30, device=device), torch.full((160,), 1e-6, device=device)
    q[:] = 3 * k[:, :, 7].repeat_interleave(3, 1)[:, :, None]
    out, _ = torch_fdattn.decode(q, k8, v, k_scale=k_scale, v_scale=v_scale)
    inputs = (x.cpu() for x in (q.double(), k8, v))
    exact, _ = torch_fdattn.decode(*inputs, k_scale=k_scale.cpu(), v_scale=v_scale.cpu())
    error = (out.cpu().float() * 1e6 - exact.float() * 1e6).abs().max()
    assert (
        error <= 0.06 * 1e6 * exact.abs().max()
    )  # the output's own float16, which is subnormal here


def test_sinks_of_no_weight(device):
    q, k, v, lens = caches(device)
    nothing = torch.full((6,), float("-inf"), device=device)
    found = torch_fdattn.decode(q, k, v, lens, sinks=nothing)
    for x, y in zip(found, torch_fdattn.decode(q, k, v, lens), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.interpreter
@pytest.mark.parametrize("page", [0, 8])
def test_a_sliding_window_does_not_read_what_it_has_left(page, device):
    """Keys before the window hold NaN, and their pages may be freed."""
    q, k, v, _ = caches(device, lens=(100,))
    inputs = (q, k, v)
    expected = torch_fdattn.decode(q, k, v, int32(100, device=device), window=(10, 0))
    k[:, :, :89], v[:, :, :89] = float("nan"), float("nan")
    call = torch_fdattn.decode
    if page:
        (k, table), (v, _) = in_pages(k, page), in_pages(v, page)
        table[0, :11] = -1
        call, inputs = torch_fdattn.paged_decode, (q, k, v, table)
    found = call(*inputs, int32(100, device=device), window=(10, 0))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
