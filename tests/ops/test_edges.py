"""What drawn cases do not single out: degenerate rows, empty tensors, lengths out of range, repeatability."""

import sys

import pytest
import torch

import torch_fdattn
from torch_fdattn.testing import (
    assert_launched,
    attention_oracle,
    check_lse,
    expected_path,
    gradients,
    make_tensor,
)

pytestmark = pytest.mark.interpreter
BOTH = pytest.mark.parametrize("op", [torch_fdattn.attention, torch_fdattn.decode])
#: decode's backward is attention's.
BACKWARD = pytest.mark.parametrize(
    "op", [torch_fdattn.attention, pytest.param(torch_fdattn.decode, marks=pytest.mark.slow)]
)


def qkv(
    device, *, batch=2, heads=4, kv_heads=2, q_len=5, kv_len=37, head_dim=32, dtype=torch.float32
):
    shapes = (batch, heads, q_len, head_dim), *2 * ((batch, kv_heads, kv_len, head_dim),)
    return [make_tensor(shape, dtype=dtype, device=device).requires_grad_() for shape in shapes]


def int32(*values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "window": (0, -1)},
        {"window": (1, 0)},
        {"kv_lens": (1, 2)},
        {"scale": 0.5, "causal": True},
    ],
    ids=["diagonal", "two keys", "short", "peaked"],
)
def test_fp32_rows_dominated_by_one_key(options, device):
    """Their dS cancels to rounding, which the error rule cannot budget (`testing/cases.py`): bound 2e-5."""
    inputs = qkv(device, heads=2, kv_heads=1, q_len=21, head_dim=64)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(inputs[0].shape[:-1], device=device)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    exact_out, exact_lse = attention_oracle(*doubles, **options)
    exact = gradients((exact_out, exact_lse), doubles, (dout, dlse))
    if "kv_lens" in options:
        options = {"kv_lens": int32(*options["kv_lens"], device=device)}
    out, lse = torch_fdattn.attention(*inputs, **options)
    found = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    check_lse(lse.detach(), exact_lse.detach(), torch.float32)
    for a, b in zip((out, *found), (exact_out, *exact), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-5, atol=2e-5)


@BOTH
def test_lengths_out_of_range_are_clamped(op, device):
    q, k, v = qkv(device)
    given = op(q, k, v, int32(-5, 99, device=device))
    clamped = op(q, k, v, int32(0, 37, device=device))
    for a, b in zip(given, clamped, strict=True):
        assert torch.equal(a, b)
    assert (given[0][0] == 0).all()
    assert (given[1][0] == float("-inf")).all()


@BOTH
def test_int64_lengths(op, device):
    q, k, v = qkv(device)
    lens = int32(11, 30, device=device)
    for a, b in zip(op(q, k, v, lens), op(q, k, v, lens.long()), strict=True):
        assert torch.equal(a, b)


@BOTH
def test_lengths_are_read_at_the_call(op, device):
    """The tensor may change between calls, as in an engine's loop."""
    q, k, v = qkv(device)
    lens = int32(11, 30, device=device)
    op(q, k, v, lens)
    lens += 3
    for a, b in zip(op(q, k, v, lens), op(q, k, v, int32(14, 33, device=device)), strict=True):
        assert torch.equal(a, b)


@BOTH
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"kv_len": 0}], ids=str)
def test_empty(op, sizes, device):
    """No sequences, or no keys: defined results and zero gradients."""
    inputs = qkv(device, **sizes)
    out, lse = op(*inputs)
    assert out.shape == inputs[0].shape
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    for x, gradient in zip(inputs, torch.autograd.grad(out.sum() + lse.sum(), inputs), strict=True):
        assert gradient.shape == x.shape
        assert (gradient == 0).all()


def test_no_queries(device):
    inputs = qkv(device, q_len=0)
    out, lse = torch_fdattn.attention(*inputs)
    assert out.shape == (2, 4, 0, 32)
    assert lse.shape == (2, 4, 0)
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert (gradient == 0).all()


def test_merge_of_nothing(device):
    out, lse = torch_fdattn.merge_states(
        torch.empty(0, 1, 2, 3, 16, device=device), torch.empty(0, 1, 2, 3, device=device)
    )
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


@BOTH
def test_row_that_sees_nothing_gets_no_gradient(op, device):
    """q_start before the first key; lse's own gradient there is ignored, whatever it is."""
    q, k, v = qkv(device, batch=1)
    out, lse = op(q, k, v, causal=True, q_start=int32(-3, device=device))
    assert (lse[:, :, :3] == float("-inf")).all()
    assert torch.isfinite(lse[:, :, 3:]).all()
    dlse = torch.full_like(lse, 1.0)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.randn_like(out), dlse))
    assert (dq[:, :, :3] == 0).all()
    for gradient in (dq, dk, dv):
        assert torch.isfinite(gradient).all()


@BACKWARD
def test_same_bits_on_every_run(op, device):
    inputs = qkv(device, kv_len=90)
    runs = []
    for _ in range(2):
        out, lse = op(*inputs, causal=True)
        runs.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), inputs)))
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


def test_merge_same_bits_on_every_run(device):
    outs, lses = (
        torch.randn(40, 1, 2, 3, 32, device=device),
        torch.randn(40, 1, 2, 3, device=device),
    )
    runs = [torch_fdattn.merge_states(outs, lses) for _ in range(2)]
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a, b)


@BACKWARD
def test_expanded_output_gradients(op, device):
    """sum().backward() hands over gradients with stride 0 everywhere."""
    inputs = qkv(device)
    out, lse = op(*inputs)
    found = torch.autograd.grad(out.sum() + lse.sum(), inputs)
    out, lse = op(*inputs)
    dense = torch.autograd.grad((out, lse), inputs, (torch.ones_like(out), torch.ones_like(lse)))
    # Not bit by bit: torch's CPU matmul sums in another order where a stride is 0.
    for a, b in zip(found, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@BACKWARD
def test_gradients_of_one_output_alone(op, device):
    inputs = qkv(device, batch=1, heads=2, kv_heads=1)

    def both(weight_out, weight_lse):
        out, lse = op(*inputs)
        return torch.autograd.grad(weight_out * out.sum() + weight_lse * lse.sum(), inputs)

    out, _ = op(*inputs)
    for a, b in zip(torch.autograd.grad(out.sum(), inputs), both(1, 0), strict=True):
        torch.testing.assert_close(a, b)
    _, lse = op(*inputs)
    found = torch.autograd.grad(lse.sum(), inputs, allow_unused=True)
    for a, b in zip(found, both(0, 1), strict=True):
        torch.testing.assert_close(a, b)


@BOTH
def test_shards_merge_into_the_whole(op, device):
    """Three round-robin shards of a cache, each attended to with its own positions, one of them empty."""
    q, k, v = qkv(device, q_len=3, kv_len=40)
    lens, block, ranks = int32(33, 5, device=device), 8, 3
    whole = op(q, k, v, lens, causal=True)
    q_start = lens - 3
    parts = []
    for rank in range(ranks):
        index = [j for j in range(40) if j // block % ranks == rank]
        local = int32(*(sum(j < n for j in index) for n in lens.tolist()), device=device)
        start = int32(*(2 * [rank * block]), device=device)
        shard = {
            "q_start": q_start,
            "kv_start": start,
            "kv_block": block,
            "kv_stride": block * ranks,
        }
        parts.append(op(q, k[:, :, index], v[:, :, index], local, causal=True, **shard))
    assert (parts[1][1][1] == float("-inf")).all()
    merged = torch_fdattn.merge_states(*(torch.stack(x) for x in zip(*parts, strict=True)))
    for a, b in zip(merged, whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_decode_reads_a_cache_in_place(device):
    """A strided slice of a large cache is neither copied nor read beyond kv_lens."""
    cache = torch.full(
        (2, 2, 3, 256, 2, 32), float("nan"), device=device
    )  # (k/v, layer, B, N, H, D)
    lens = int32(33, 1, 217, device=device)
    for b, n in enumerate(lens.tolist()):
        cache[:, 1, b, :n] = torch.randn(2, n, 2, 32, device=device)
    k, v = (cache[i, 1].transpose(1, 2) for i in (0, 1))
    q = torch.randn(3, 6, 1, 32, device=device)
    with assert_launched(*decode_paths(device)):
        out, lse = torch_fdattn.decode(q, k, v, lens)
    exact, exact_lse = attention_oracle(
        q.double(), k.double(), v.double(), lens.tolist(), causal=True
    )
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    check_lse(lse, exact_lse, torch.float32)


def decode_paths(device):
    return (expected_path("decode_forward", device, torch.float32),)


@BOTH
def test_strided_lengths_and_starts(op, device):
    """Columns of a metadata table and expanded scalars are read by their strides."""
    q, k, v = (make_tensor((2, 2, s, 16), device=device) for s in (3, 40, 40))
    table = torch.tensor([[11, 99, 30, 2], [30, 98, 35, 7]], dtype=torch.int32, device=device)
    lens, _, starts, kv_starts = table.unbind(1)
    strided = op(q, k, v, lens, q_start=starts, kv_start=kv_starts, causal=True)
    plain = (x.contiguous() for x in (lens, starts, kv_starts))
    lens, starts, kv_starts = plain
    expected = op(q, k, v, lens, q_start=starts, kv_start=kv_starts, causal=True)
    assert torch.equal(strided[0], expected[0])
    one = torch.tensor([7], dtype=torch.int32, device=device)
    assert torch.equal(op(q, k, v, one.expand(2))[0], op(q, k, v, one.repeat(2))[0])


@BOTH
def test_int64_lengths_are_clamped_before_they_are_narrowed(op, device):
    q, k, v = (make_tensor((3, 2, s, 16), device=device) for s in (3, 40, 40))
    wide = torch.tensor([2**32 + 5, 2**40, -(2**33) + 9], device=device)
    narrow = int32(40, 40, 0, device=device)
    for a, b in zip(op(q, k, v, wide), op(q, k, v, narrow), strict=True):
        assert torch.equal(a, b)


@BOTH
def test_whole_tiles_without_a_mask(op, device):
    """Attention compiles no border loop for them; with lengths that hide nothing it has one."""
    q, k, v = (make_tensor((2, 2, s, 64), device=device) for s in (13, 256, 256))
    masked = op(q, k, v, int32(256, 256, device=device), causal=False)
    for a, b in zip(op(q, k, v, causal=False), masked, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@BOTH
def test_far_positions_and_windows(op, device):
    q, k, v = (make_tensor((1, 2, s, 16), device=device) for s in (3, 40, 40))
    everything = op(q, k, v, causal=False)[0]
    far = torch.tensor([2**31 - 1], dtype=torch.int32, device=device)
    assert torch.equal(op(q, k, v, q_start=far, causal=True)[0], everything)
    assert torch.equal(op(q, k, v, causal=False, window=(sys.maxsize, sys.maxsize))[0], everything)


def test_torch_switches_for_tf32_are_read(kernel_device):
    """Both of torch's switches, in any order; the older getter raises once the newer one was used."""
    from torch_fdattn.ops.attention.configs import dot_precision

    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert dot_precision(torch.float32) == "tf32"
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert dot_precision(torch.float32) == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
