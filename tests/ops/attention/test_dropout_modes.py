"""Dropout's bits are a seed's alone, however a call is run: eager, compiled, recomputed, captured in a CUDA graph."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import torch_fdattn
from torch_fdattn.testing import make_tensor


def leaves(device, q_len=70):
    """Several tiles of keys and queries, bf16 where kernels are compiled for it."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 4, q_len, 32), (2, 2, 150, 32), (2, 2, 150, 32)
    return [
        make_tensor(x, dtype=dtype, device=device, generator=generator).requires_grad_()
        for x in shapes
    ]


def seed_of(device, *numbers):
    return torch.tensor(numbers or (1 << 40, 11), device=device)


def forward(q, k, v, seed=None):
    return torch_fdattn.attention(q, k, v, causal=True, dropout_p=0.3, dropout_seed=seed)[0]


def step(q, k, v, seed=None, run=forward):
    """(out, dq, dk, dv)"""
    out = run(q, k, v, seed)
    return (out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v)))


def recomputed(q, k, v, seed=None):
    return checkpoint(forward, q, k, v, seed, use_reentrant=False)


def captured(q, k, v, seed=None):
    """A graph of a whole step, and what its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles
        step(q, k, v, seed)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(q, k, v, seed)
    return graph, results


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_an_explicit_seed_compiled_and_recomputed(backend, device):
    torch._dynamo.reset()
    inputs = leaves(device)
    seeds = [seed_of(device), seed_of(device, 7, 8)]
    expected = [step(*inputs, seed) for seed in seeds]
    assert not same(*expected)
    compiled = torch.compile(forward, backend=backend, fullgraph=True)
    compiled_recomputed = torch.compile(recomputed, backend=backend, fullgraph=True)
    for run in (recomputed, compiled, compiled_recomputed):
        for seed, of_eager in zip(seeds, expected, strict=True):
            assert same(step(*inputs, seed, run=run), of_eager)


def test_an_implicit_seed_recomputed(device):
    inputs = leaves(device)
    torch.manual_seed(5)
    expected = [step(*inputs) for _ in range(2)]
    assert not same(*expected)
    torch.manual_seed(5)
    for of_eager in expected:
        assert same(step(*inputs, run=recomputed), of_eager)


@pytest.mark.gpu
def test_an_explicit_seed_in_a_graph():
    """The seed is read when the graph is replayed."""
    inputs = leaves("cuda")
    seed = seed_of("cuda")
    graph, found = captured(*inputs, seed)
    for numbers in ((1 << 40, 11), (7, 8), (1 << 40, 11)):
        seed.copy_(seed_of("cuda", *numbers))
        graph.replay()
        assert same(found, step(*inputs, seed_of("cuda", *numbers)))


@pytest.mark.gpu
def test_an_implicit_seed_in_a_graph():
    """Replay by replay what eager calls draw from the generator, one after the other."""
    inputs = leaves("cuda")
    torch.manual_seed(5)
    expected = [step(*inputs) for _ in range(3)]
    graph, found = captured(*inputs)
    torch.manual_seed(5)
    for of_eager in expected:
        graph.replay()
        assert same(found, of_eager)
    assert not same(expected[0], expected[1])


@pytest.mark.gpu
def test_graphs_of_torch_compile():
    """mode="reduce-overhead": warm-up, recording and replays with an explicit seed."""
    torch._dynamo.reset()
    inputs = leaves("cuda")
    run = torch.compile(forward, mode="reduce-overhead", fullgraph=True)
    for numbers in ((1, 2), (3, 4), (5, 6), (7, 8)):
        seed = seed_of("cuda", *numbers)
        torch.compiler.cudagraph_mark_step_begin()
        assert same(step(*inputs, seed, run=run), step(*inputs, seed))
