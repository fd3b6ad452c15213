"""The order in which programs begin, and what may begin before its predecessor has ended."""

import pytest
import torch
import triton
import triton.language as tl

import torch_fdattn
from torch_fdattn.launch import prepared
from torch_fdattn.launch.launches import Launch
from torch_fdattn.ops.attention import configs
from torch_fdattn.ops.positions import Mask
from torch_fdattn.ops.tiles import block_coordinates
from torch_fdattn.testing import make_tensor


@triton.jit
def _coordinates_kernel(out_ptr, blocks, heads, swizzle):
    block, head, batch = block_coordinates(blocks, heads, swizzle)
    out_ptr += 3 * tl.program_id(0)
    tl.store(out_ptr, block)
    tl.store(out_ptr + 1, head)
    tl.store(out_ptr + 2, batch)


def coordinates(device, blocks, heads, batch, swizzle):
    out = torch.full((blocks * heads * batch, 3), -1, dtype=torch.int32, device=device)
    _coordinates_kernel[(len(out),)](out, blocks, heads, swizzle)
    return [tuple(x) for x in out.tolist()]


@pytest.mark.interpreter
@pytest.mark.parametrize("swizzle", [1, 2, 3, 6, 100])
def test_every_block_of_every_head_once(kernel_device, swizzle):
    blocks, heads, batch = 5, 3, 2
    found = coordinates(kernel_device, blocks, heads, batch, swizzle)
    assert len(set(found)) == len(found)
    assert set(found) == {(i, h, b) for i in range(blocks) for h in range(heads) for b in range(batch)}  # fmt: skip
    in_order = [(line // swizzle, block, line) for block, head, b in found for line in [b * heads + head]]  # fmt: skip
    assert in_order == sorted(in_order)


def test_heads_per_swizzle():
    causal, mib = Mask(window_right=0), 1 << 20
    assert [configs.heads_per_swizzle(causal, 6, n, False) for n in (0, 2 * mib, 5 * mib, 90 * mib)] == [6, 4, 1, 1]  # fmt: skip
    assert configs.heads_per_swizzle(causal, 0, 0, False) == 1
    assert configs.heads_per_swizzle(Mask(), 6, mib, False) == configs.heads_per_swizzle(causal, 6, mib, True) == 1  # fmt: skip
    assert configs.heads_per_swizzle(Mask(window_left=9, window_right=0), 6, mib, False) == 1


@pytest.mark.interpreter
@pytest.mark.parametrize("queries", [0, 1])
def test_no_more_heads_per_swizzle_than_there_are(queries, kernel_device, monkeypatch):
    """Else blocks times heads passes int32: of 512 blocks it was 0, by which a program divided its number."""
    asked, through_triton = [], Launch.through_triton

    def noted(launch):
        names = launch.kernel.arg_names
        if "swizzle" in names:
            asked.append((launch.arguments[names.index("swizzle")], launch.grid[0]))
        return through_triton(launch)

    prepared.forget()
    monkeypatch.setattr(Launch, "through_triton", noted)
    q, k, v = (
        torch.randn(1, 2, n, 16, dtype=torch.float16, device=kernel_device, requires_grad=True)
        for n in (queries, 20, 20)
    )
    out, _ = torch_fdattn.attention(q, k, v, causal=True)
    torch.autograd.grad(out.sum(), (q, k, v))
    assert asked
    assert all(swizzle <= programs for swizzle, programs in asked)


@pytest.mark.interpreter
def test_the_order_changes_no_bit(kernel_device, monkeypatch):
    def run():
        torch.manual_seed(0)
        q, k, v = (
            make_tensor((1, h, 50, 16), dtype=torch.float16, device=kernel_device).requires_grad_()
            for h in (6, 3, 3)
        )
        out, lse = torch_fdattn.attention(q, k, v, causal=True)
        return out, lse, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    monkeypatch.setattr(configs, "_SWIZZLE_BYTES", 0)
    one_by_one = run()
    monkeypatch.setattr(
        configs, "_SWIZZLE_BYTES", 2 * 50 * 32 * 2
    )  # two heads of KV, in sections of four and two
    for a, b in zip(run(), one_by_one, strict=True):
        assert torch.equal(a, b)


@pytest.mark.interpreter
def test_nothing_comes_between_the_sweeps(kernel_device, monkeypatch):
    """dQ may start before the kernel ahead of it has ended, and waits for nothing that it writes over."""
    order, through_triton, zero = [], Launch.through_triton, torch.Tensor.zero_

    def launched(launch):
        order.append(launch.kernel.fn.__name__)
        return through_triton(launch)

    def zeroed(x):
        order.append("zero_")
        return zero(x)

    prepared.forget()
    monkeypatch.setattr(Launch, "through_triton", launched)
    q, mask = (
        torch.randn(shape, device=kernel_device, requires_grad=True)
        for shape in ((9, 2, 16), (2, 2, 6, 6))
    )
    begins = torch.tensor([0, 5, 9], dtype=torch.int32, device=kernel_device)
    out, _ = torch_fdattn.varlen_attention(q, q, q, begins, begins, attn_mask=mask)
    monkeypatch.setattr(torch.Tensor, "zero_", zeroed)
    torch.autograd.grad(out.sum(), (q, mask))
    assert "zero_" in order
    assert order[-2:] == ["_dkdv_kernel", "_dq_kernel"]


@pytest.mark.gpu
def test_what_follows_the_backward_waits_for_both_sweeps():
    """One program of dQ, which needs nothing of the many of dK and dV before it. float32: the portable kernels'."""
    q, dout = (torch.randn(1, 1, 16, 128, device="cuda") for _ in range(2))
    k, v = (torch.randn(1, 1, 1 << 20, 128, device="cuda") for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, _ = torch_fdattn.attention(*leaves)
    expected = [x.clone() for x in torch.autograd.grad(out, leaves, dout, retain_graph=True)]
    for _ in range(20):
        poison = torch.full_like(k, float("nan")), torch.full_like(v, float("nan"))
        torch.cuda.synchronize()
        del poison  # the gradients' memory
        found = [x.clone() for x in torch.autograd.grad(out, leaves, dout, retain_graph=True)]
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
