"""torch.compile: one graph that writes into the cache itself, with no copy of it."""

import re
from math import prod

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import torch_fdattn

BATCH, HEADS, KV_HEADS, CAPACITY, DIM = 2, 4, 2, 64, 16
CACHE = (BATCH, KV_HEADS, CAPACITY, DIM)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def projected(x, weight):
    """q, k and v as views of one projection, as models have them."""
    fused = (x @ weight).view(BATCH, -1, HEADS + 2 * KV_HEADS, DIM).transpose(1, 2)
    return fused.split((HEADS, KV_HEADS, KV_HEADS), 1)


def contiguous_step(x, weight, lens, cos, sin, k_cache, v_cache):
    q, k, v = projected(x, weight)
    torch_fdattn.append_kv(k_cache, v_cache, k, v, lens, q=q, cos=cos, sin=sin)
    return torch_fdattn.attention(q, k_cache, v_cache, lens + x.shape[1], causal=True)[0] * 2


def layers_step(x, weight, lens, cos, sin, k_caches, v_caches):
    """Slices of one buffer for all layers."""
    for k_cache, v_cache in zip(k_caches, v_caches, strict=True):
        q, k, v = projected(x, weight)
        torch_fdattn.append_kv(k_cache, v_cache, k, v, lens, q=q, cos=cos, sin=sin)
        out, _ = torch_fdattn.attention(q, k_cache, v_cache, lens + x.shape[1], causal=True)
        x = x + out.transpose(1, 2).flatten(2)
    return x


def paged_step(x, weight, lens, cos, sin, k_cache, v_cache):
    q, k, v = projected(x, weight)
    pages = CAPACITY // k_cache.shape[2]
    table = torch.arange(BATCH * pages, dtype=torch.int32, device=x.device).view(BATCH, pages)
    torch_fdattn.paged_append_kv(k_cache, v_cache, table, k, v, lens, q=q, cos=cos, sin=sin)
    return q * 2


def quantised_step(x, weight, lens, cos, sin, k_cache, v_cache):
    _, k, v = projected(x, weight)
    torch_fdattn.append_kv(k_cache, v_cache, k, v, lens, k_scale=cos[0, 0].abs())
    return k_cache[:, :, :4].float() + v_cache[:, :, :4].float()


STEPS = {
    "contiguous": (contiguous_step, CACHE, torch.float32),
    "layers of one buffer": (layers_step, (3, *CACHE), torch.float32),
    "paged": (paged_step, (BATCH * CAPACITY // 4, KV_HEADS, 4, DIM), torch.float32),
    "int8": (quantised_step, CACHE, torch.int8),
    "float8": (quantised_step, CACHE, torch.float8_e4m3fn),
}


def step_arguments(shape, dtype, device, tokens=1):
    angles = torch.rand(CAPACITY, DIM // 2, device=device)
    return [
        torch.randn(BATCH, tokens, HEADS * DIM, device=device),
        torch.randn(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM, device=device) / 8,
        torch.tensor([3, 40], dtype=torch.int32, device=device), angles.cos(), angles.sin(),
        torch.zeros(shape, device=device).to(dtype), torch.zeros(shape, device=device).to(dtype),
    ]  # fmt: skip


@pytest.mark.parametrize("name", STEPS)
def test_inductor_writes_into_the_cache_itself(name, device):
    step, shape, dtype = STEPS[name]
    args = step_arguments(shape, dtype, device)
    eager = [x.clone() for x in args]
    expected = step(*eager)
    places = [x.data_ptr() for x in args]
    found, codes = run_and_get_code(torch.compile(step, fullgraph=True), *args)
    assert [x.data_ptr() for x in args] == places
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for x, y in zip(args[5:], eager[5:], strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=1e-4, atol=1e-5)
        assert x.float().any()
    # What the generated code allocates is smaller than a cache of one layer: none is copied.
    code = "\n".join(codes)
    allocated = [
        prod(map(int, re.findall(r"\d+", sizes)))
        for sizes in re.findall(r"= empty_strided_\w+\(\(([\d, ]*)\)", code)
    ]
    assert allocated
    assert max(allocated) < prod(shape[-4:])
    assert len(
        re.findall(r"^\s*torch\.ops\.fdattn\.(?:paged_)?append_kv\.default\(", code, re.M)
    ) == (3 if len(shape) == 5 else 1)


def test_a_copy_of_the_cache_would_be_seen(device):
    """The check itself: a cache that is needed as it was before must be copied."""

    def step(*args):
        before = args[5] * 1
        return before, contiguous_step(*args)

    args = step_arguments(CACHE, torch.float32, device)
    _, codes = run_and_get_code(torch.compile(step, fullgraph=True), *args)
    assert f"empty_strided_{device}(({', '.join(map(str, CACHE))})" in "\n".join(codes)


def test_buffers_of_a_module(device):
    class Cache(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("k", torch.zeros(CACHE))
            self.register_buffer("v", torch.zeros(CACHE))
            self.register_buffer("lens", torch.tensor([3, 40], dtype=torch.int32))

        def forward(self, k, v):
            torch_fdattn.append_kv(self.k, self.v, k, v, self.lens)
            self.lens += 1
            return self.k.sum((1, 2, 3))

    cache, twin = Cache().to(device), Cache().to(device)
    compiled = torch.compile(cache, fullgraph=True)
    place = cache.k.data_ptr()
    for _ in range(3):
        k, v = (torch.randn(BATCH, KV_HEADS, 1, DIM, device=device) for _ in range(2))
        torch.testing.assert_close(compiled(k, v), twin(k, v))
    assert cache.k.data_ptr() == place
    assert torch.equal(cache.k, twin.k)
    assert torch.equal(cache.v, twin.v)


def test_autograd_sees_a_compiled_write(device):
    args = step_arguments(CACHE, torch.float32, device)
    versions = [x._version for x in args]
    torch.compile(contiguous_step, fullgraph=True)(*args)
    assert [x._version > y for x, y in zip(args, versions, strict=True)] == [False] * 5 + [True] * 2


def test_no_recompile_over_lengths_and_numbers_of_tokens(device):
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(contiguous_step, backend=counter, fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens, lens in ((5, (0, 3)), (2, (50, 62)), (33, (-1, 2**31 - 1))):
            args = step_arguments(CACHE, torch.float32, device, tokens)
            args[2] = torch.tensor(lens, dtype=torch.int32, device=device)
            torch._dynamo.mark_dynamic(args[0], 1)
            eager = [x.clone() for x in args]
            torch.testing.assert_close(
                compiled(*args), contiguous_step(*eager), rtol=1e-4, atol=1e-5
            )
            torch.testing.assert_close(args[5], eager[5], rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1


def test_export_keeps_the_op(device):
    class Step(torch.nn.Module):
        def forward(self, *args):
            return contiguous_step(*args)

    args = step_arguments(CACHE, torch.float32, device)
    program = torch.export.export(Step(), tuple(args))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert "fdattn.append_kv.default" in targets
    eager = [x.clone() for x in args]
    torch.testing.assert_close(program.module()(*args), contiguous_step(*eager))
    assert torch.equal(args[5], eager[5])
