"""What only a GPU shows of append_kv: graphs, no hidden synchronisation, bfloat16, races."""

import pytest
import torch

import torch_fdattn
from tests.ops.append_kv.calls import append, arguments

pytestmark = pytest.mark.gpu
PAGED = pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@PAGED
def test_cuda_graph_reads_new_lengths_and_pages(paged):
    given = arguments("cuda", paged=paged, dtype=torch.bfloat16, cache_dtype=torch.int8)
    append(given)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(given)
    for lens, new, seed in (((0, 4), (1, 3), 1), ((7, -1), (3, 0), 2)):
        torch.manual_seed(seed)
        for name in ("k", "v", "q"):
            given[name].normal_()
        given["kv_lens"].copy_(int32(*lens))
        given["new_lens"].copy_(int32(*new))
        if paged:
            given["page_table"].copy_(given["page_table"].flip(0))
        expected = {name: x.clone() for name, x in given.items()}
        append(expected)
        graph.replay()
        for name in ("k_cache", "v_cache", "q"):
            assert torch.equal(given[name], expected[name])


@PAGED
def test_no_synchronisation(paged):
    given = arguments("cuda", paged=paged, cache_dtype=torch.float8_e4m3fn)
    append(given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        append(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 3000])
def test_q_is_turned_in_place_as_in_new_memory(dtype, tokens):
    """Each element is read by two threads and written by one, over many tiles and repeats."""
    q = torch.randn(4, 32, tokens, 128, dtype=dtype, device="cuda")
    k = torch.randn(4, 2, tokens, 128, dtype=dtype, device="cuda")
    caches = [torch.zeros(4, 2, tokens, 128, dtype=dtype, device="cuda") for _ in range(2)]
    angles = torch.rand(tokens, 64, device="cuda")
    first, second = q.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    expected = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(dtype)
    lens = int32(0, 0, 0, 0)
    results = []
    for _ in range(5):
        turned = q.clone()
        torch_fdattn.append_kv(*caches, k, k, lens, q=turned, cos=cos, sin=sin)
        results.append(turned)
    torch.testing.assert_close(results[0], expected, rtol=1e-2, atol=1e-2)
    for x in results[1:]:
        assert torch.equal(x, results[0])


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_bfloat16_goes_into_quantised_caches_as_the_cpu_has_it(cache_dtype):
    """The interpreter has no bfloat16: every number of it, on both devices."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    new, results = values.view(1, 1, -1, 16), []
    for device in ("cpu", "cuda"):
        caches = [torch.zeros(new.shape, device=device).to(cache_dtype) for _ in range(2)]
        lens = torch.zeros(1, dtype=torch.int32, device=device)
        x = new.to(device)
        torch_fdattn.append_kv(*caches, x, x, lens)
        results.append(caches[0].cpu())
    numbers = ~new.isnan()
    assert torch.equal(results[0].view(torch.uint8)[numbers], results[1].view(torch.uint8)[numbers])
    if cache_dtype != torch.int8:
        assert results[1].float()[~numbers].isnan().all()


def test_float64_is_refused():
    with pytest.raises(NotImplementedError, match="float64 runs on the CPU reference only"):
        append(arguments("cuda", options=(), dtype=torch.float64, cache_dtype=torch.float64))
    with pytest.raises(NotImplementedError, match="float64 runs on the CPU reference only"):
        append(arguments("cuda", options=(), cache_dtype=torch.float64))
