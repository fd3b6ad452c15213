"""What only a GPU shows of decode: graphs, launches without Triton's binder, streams, caches above 2³¹."""

import pytest
import torch
from triton.runtime.jit import JITFunction

import torch_fdattn
from torch_fdattn.ops.decode.kernel import _decode_kernel
from torch_fdattn.testing import attention_oracle

pytestmark = pytest.mark.gpu
LENS = (1000, 1, 4096, 0, 2047, 333, 4095, 512)


def caches(dtype=torch.bfloat16, page=0, lens=LENS, capacity=4096):
    """(inputs of decode or paged_decode, lengths)."""
    q = torch.randn(len(lens), 8, 1, 128, device="cuda", dtype=dtype)
    k, v = (torch.randn(len(lens), 2, capacity, 128, device="cuda", dtype=dtype) for _ in range(2))
    kv_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    if not page:
        return (q, k, v), kv_lens
    pages = len(lens) * capacity // page
    table = torch.randperm(pages, device="cuda").int().view(len(lens), -1)
    k, v = (x.view(pages, page, 2, 128).transpose(1, 2) for x in (k, v))
    return (q, k, v, table), kv_lens


def run(inputs, kv_lens, **options):
    op = torch_fdattn.decode if len(inputs) == 3 else torch_fdattn.paged_decode
    return op(*inputs, kv_lens, **options)


def same(found, expected):
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("page", [0, 16, 1])
@pytest.mark.parametrize("invariant", [False, True])
def test_a_graph_replayed_with_other_lengths(page, invariant):
    """Two calls of different shapes share the graph; 20 replays, on another stream, next to eager calls."""
    inputs, kv_lens = caches(page=page)
    small, small_lens = caches(page=page, lens=LENS[:3])
    for each in ((inputs, kv_lens), (small, small_lens)):
        run(*each, batch_invariant=invariant)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [
            run(inputs, kv_lens, batch_invariant=invariant),
            run(small, small_lens, batch_invariant=invariant),
            run(inputs, kv_lens, batch_invariant=invariant),
        ]
    generator = torch.Generator().manual_seed(0)
    stream = torch.cuda.Stream()
    for _ in range(20):
        kv_lens.copy_(torch.randint(0, 4097, (len(LENS),), generator=generator))
        small_lens.copy_(torch.randint(0, 4097, (3,), generator=generator))
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
        beside = [run(inputs, kv_lens, batch_invariant=invariant) for _ in range(5)]
        torch.cuda.synchronize()
        expected = run(inputs, kv_lens, batch_invariant=invariant)
        assert all(same(x, expected) for x in (found[0], found[2], *beside))
        assert same(found[1], run(small, small_lens, batch_invariant=invariant))


def test_graphs_at_the_same_time():
    """Each has partial results of its own."""
    graphs, kept = [], []
    for seed in range(4):
        torch.manual_seed(seed)
        inputs, kv_lens = caches()
        kept.append((inputs, kv_lens))  # what a graph reads must outlive it
        expected = run(inputs, kv_lens)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [run(inputs, kv_lens) for _ in range(10)]
        graphs.append((graph, found, expected, torch.cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, *_, stream in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for _, found, expected, _ in graphs:
        assert all(same(x, expected) for x in found)


def test_streams_at_the_same_time():
    calls = []
    for seed in range(4):
        torch.manual_seed(seed)
        inputs, kv_lens = caches()
        calls.append((inputs, kv_lens, run(inputs, kv_lens), torch.cuda.Stream(), []))
    torch.cuda.synchronize()
    for _ in range(50):
        for inputs, kv_lens, _, stream, found in calls:
            with torch.cuda.stream(stream):
                found.append(run(inputs, kv_lens))
    torch.cuda.synchronize()
    assert all(same(x, expected) for *_, expected, _, found in calls for x in found)


def test_bits_over_100_runs():
    inputs, kv_lens = caches()
    first = run(inputs, kv_lens)
    assert all(same(run(inputs, kv_lens), first) for _ in range(100))


def test_random_lengths_compile_nothing(monkeypatch):
    inputs, kv_lens = caches()
    run(inputs, kv_lens)
    kernels = [len(cache[0]) for cache in _decode_kernel.device_caches.values()]
    for _ in range(1000):
        kv_lens.random_(0, 4097)
        run(inputs, kv_lens)
    assert kernels == [len(cache[0]) for cache in _decode_kernel.device_caches.values()]


def test_later_calls_bypass_tritons_binder(monkeypatch):
    inputs, kv_lens = caches()
    expected = run(inputs, kv_lens)
    bound = []
    original = JITFunction.run
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *a, **k: (bound.append(self), original(self, *a, **k))[1]
    )
    assert same(run(inputs, kv_lens), expected)
    assert not bound
    shifted = torch.empty(inputs[0].numel() + 1, dtype=inputs[0].dtype, device="cuda")[1:]
    shifted = shifted.view(inputs[0].shape).copy_(inputs[0])
    assert same(run((shifted, *inputs[1:]), kv_lens), expected)
    assert bound  # an address that the compiled kernel was not made for


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page", [0, 16])
def test_batch_invariant_bits_where_tiles_follow_the_batch(page, dtype):
    """512 work tiles take other tiles than two; the last sequence has more parts than a step of the merge."""
    lens = (*[700] * 255, 40_000)
    (q, k, v, *table), kv_lens = caches(page=page, lens=lens, capacity=40_960 if page else 40_000)
    q = torch.randn(256, 16, 1, 128, device="cuda", dtype=torch.bfloat16)
    inputs = (q, k.to(dtype), v.to(dtype), *table)
    together = run(inputs, kv_lens, batch_invariant=True)
    for b in (0, 255):
        one = [x[b : b + 1] for x in (q, *(() if page else inputs[1:3]), *table, kv_lens)]
        alone_inputs = (one[0], *inputs[1:3], one[1]) if page else tuple(one[:3])
        alone = run(alone_inputs, one[-1], batch_invariant=True)
        assert all(torch.equal(x[b], y[0]) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("kind", ["contiguous", "heads first", "paged"])
def test_caches_above_2_to_the_31_elements(kind, dtype):
    """One byte an element, read at both ends."""
    elements = 2**31 + 2**24
    if torch.cuda.mem_get_info()[0] < 3 * elements:
        pytest.skip(
            f"needs {3 * elements >> 30} GiB of free GPU memory, found {torch.cuda.mem_get_info()[0] >> 30}"
        )
    rows = elements // (2 * 128)
    k = torch.zeros(rows * 2 * 128, dtype=torch.int8, device="cuda").view(dtype)
    near = (torch.randn(2, 2, 256, 128, device="cuda") * 20).to(dtype)
    q = torch.randn(1, 8, 1, 128, device="cuda", dtype=torch.bfloat16)
    kv_lens = torch.tensor([rows], dtype=torch.int32, device="cuda")
    if kind == "heads first":
        cache = k.view(1, 2, rows, 128)
    else:
        cache = k.view(1, rows, 2, 128).transpose(1, 2)
    window = (300, 0)
    cache[0, :, -256:] = near[0]
    inputs = (q, cache, cache)
    if kind == "paged":
        pages = k.view(rows // 16, 16, 2, 128).transpose(1, 2)
        table = torch.arange(rows // 16, dtype=torch.int32, device="cuda")[None]
        inputs = (q, pages, pages, table)
    out, lse = run(inputs, kv_lens, window=window)
    dense = cache[:, :, -301:].double()
    exact, exact_lse = attention_oracle(q.double(), dense, dense)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-1)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-5, atol=1e-4)
