"""Hopper's kernels in Inductor's CUDA graphs, on an sm_90."""

import pytest
import torch

import torch_fdattn
from tests.ops.attention.test_hopper import normal
from torch_fdattn.launch import tile_counter
from torch_fdattn.ops.library import launches

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a CUDA device of sm_90",
)


def step(q, k, v):
    return torch_fdattn.attention(q, k, v, causal=True)[0] * 2


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_reduce_overhead(head_dim, ordered, monkeypatch):
    """They count every live block of their memory, when they are warmed up, too: no counter of tiles may lie there."""
    torch.cuda.synchronize()
    monkeypatch.setattr(tile_counter, "_counters", {})
    torch._dynamo.reset()
    compiled = torch.compile(step, mode="reduce-overhead")
    inputs = [normal(2, h, 400, head_dim).requires_grad_() for h in (4, 2, 2)]
    torch_fdattn.set_deterministic(ordered)
    try:
        for _ in range(4):
            with torch.no_grad():
                for x in inputs:
                    x.normal_()
            given = torch.randn_like(inputs[0])
            expected = torch.autograd.grad(step(*inputs), inputs, given)
            torch.compiler.cudagraph_mark_step_begin()
            launches.clear()
            found = torch.autograd.grad(compiled(*inputs), inputs, given)
            assert not [x for x in launches if x.endswith("/triton")]
            for ours, right in zip(found, expected, strict=True):
                assert (ours - right).float().norm() <= 1e-2 * right.float().norm()
    finally:
        torch_fdattn.set_deterministic(False)


def test_counters_are_of_no_pool(monkeypatch):
    """As Inductor warms up: in memory that takes what this thread allocates."""
    torch.cuda.synchronize()
    monkeypatch.setattr(tile_counter, "_counters", {})
    pool, stream = torch.cuda.MemPool(), torch.cuda.Stream()
    with torch.cuda.use_mem_pool(pool), torch.cuda.stream(stream):
        counter = tile_counter.tile_counter(torch.device("cuda", torch.cuda.current_device()))
        own = torch.zeros(1, device="cuda")
    blocks = [(x["address"], x["address"] + x["total_size"]) for x in pool.snapshot()]
    assert any(begin <= own.data_ptr() < end for begin, end in blocks)
    assert not any(begin <= counter.data_ptr() < end for begin, end in blocks)
