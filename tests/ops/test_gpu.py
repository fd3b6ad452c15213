"""What only a GPU shows: graphs, streams, threads, devices, no hidden synchronisation, 64-bit offsets."""

import threading

import pytest
import torch

import torch_fdattn
from torch_fdattn.testing import attention_oracle, make_tensor

pytestmark = pytest.mark.gpu
OPS = pytest.mark.parametrize("op", [torch_fdattn.attention, torch_fdattn.decode])


def qkv(device="cuda", *, q_len=4, kv_len=2000, head_dim=64, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (2, 8, q_len, head_dim), (2, 2, kv_len, head_dim), (2, 2, kv_len, head_dim)
    return [
        make_tensor(shape, "bshd", dtype=dtype, device=device, generator=generator)
        for shape in shapes
    ]


def int32(*values, device="cuda"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@OPS
def test_cuda_graph_reads_new_lengths(op):
    """A captured call serves other lengths and inputs: both stay on the device, the grid depends on neither."""
    q, k, v = qkv()
    lens = int32(2000, 7)
    op(q, k, v, lens, causal=True)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(q, k, v, lens, causal=True)
    for n, seed in (((1, 2000), 1), ((0, 999), 2)):
        lens.copy_(int32(*n))
        q.copy_(qkv(seed=seed)[0])
        graph.replay()
        same(captured, op(q, k, v, lens, causal=True))


@OPS
@pytest.mark.parametrize("dims", [(16, 24), (24, 24), (32, 32), (96, 24), (128, 16), (256, 64)])
def test_keys_with_gaps_between_their_elements(op, dims):
    """Of few dims, or of more than values have: `tests/compile_only/test_uniform_registers.py`."""
    head_dim, v_dim = dims
    q = make_tensor((1, 5, 70, head_dim), dtype=torch.bfloat16, device="cuda")
    q = q[:, :, :13] if op is torch_fdattn.decode else q
    k = make_tensor((1, 1, 455, head_dim), "transposed", dtype=torch.bfloat16, device="cuda")
    v = make_tensor((1, 1, 455, v_dim + 1), dtype=torch.bfloat16, device="cuda")[..., :v_dim]
    exact, exact_lse = attention_oracle(q.double(), k.double(), v.double(), (170,))
    out, lse = op(q, k, v, int32(170), causal=False)
    torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-4)


def test_cuda_graph_of_a_training_step():
    inputs = [x.requires_grad_() for x in qkv(q_len=500, kv_len=500)]

    def step():
        out, lse = torch_fdattn.attention(*inputs, causal=True)
        return torch.autograd.grad(out.float().square().sum() + lse.sum(), inputs)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        inputs[0].copy_(qkv(q_len=500, kv_len=500, seed=3)[0])
    graph.replay()
    same(captured, step())


def test_no_synchronisation():
    q, k, v = qkv()
    lens = int32(2000, 7)
    outs, lses = torch.randn(3, 2, 8, 4, 64, device="cuda"), torch.randn(3, 2, 8, 4, device="cuda")
    x, y, z = (t.clone().requires_grad_() for t in qkv(q_len=100))

    def calls():
        torch_fdattn.decode(q, k, v, lens)
        torch_fdattn.merge_states(outs, lses)
        out, _ = torch_fdattn.attention(x, y, z, lens, causal=True)
        torch.autograd.grad(out, (x, y, z), out.detach())

    calls()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@OPS
def test_side_stream(op):
    """The launch goes to the current stream: it waits for the copy that the same stream still has to make."""
    q, k, v = qkv()
    expected = op(q, k, v)
    late = torch.zeros_like(q)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(q)
        found = op(late, k, v)
    stream.synchronize()
    same(found, expected)


def test_two_threads_compiling_and_running():
    """Two head dims that no other test uses, so that both threads compile at once."""
    inputs = {dim: qkv(head_dim=dim, q_len=16) for dim in (56, 104)}
    found, errors = {dim: [] for dim in inputs}, []

    def work(dim):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    found[dim].append(torch_fdattn.attention(*inputs[dim])[0])
                    found[dim].append(torch_fdattn.decode(*inputs[dim], causal=False)[0])
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            errors.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(dim,)) for dim in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
        assert not thread.is_alive()
    assert not errors, errors
    for dim, outs in found.items():
        exact, _ = attention_oracle(*(x.double() for x in inputs[dim]))
        for out in outs:
            torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


def test_a_thread_whose_first_cuda_call_is_ours():
    """Its plan is warm, its outputs come from the allocator's cache: nothing else makes a context for it."""
    q, k, v = qkv()
    lens = int32(2000, 7)
    expected = [torch_fdattn.decode(q, k, v, lens) for _ in range(3)][-1]
    torch.cuda.synchronize()
    found, errors = [], []

    def work():
        try:
            found.extend(torch_fdattn.decode(q, k, v, lens))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=60)
    torch.cuda.synchronize()
    assert not errors, errors
    same(found, expected)


def test_reduce_overhead():
    """Inductor's CUDA graphs count every live block of their pool: a plan must hold none."""
    q, k, v = qkv(head_dim=72)  # of its own: the plan is made under the compiler
    lens = int32(2000, 7)
    step = torch.compile(
        lambda q, lens: torch_fdattn.decode(q, k, v, lens)[0] * 2, mode="reduce-overhead"
    )
    with torch.no_grad():
        for length in (2000, 100, 1500, 7):
            lens.fill_(length)
            torch.compiler.cudagraph_mark_step_begin()
            torch.testing.assert_close(step(q, lens), torch_fdattn.decode(q, k, v, lens)[0] * 2)


@pytest.mark.multigpu
@OPS
def test_another_current_device(op):
    """Tensors on cuda:1 while cuda:0 is current, and back."""
    here, there = ([x.requires_grad_() for x in qkv(f"cuda:{i}")] for i in (0, 1))
    results = []
    for inputs in (here, there):
        with torch.cuda.device(0):
            out, lse = op(*inputs, int32(2000, 7, device=inputs[0].device))
            found = torch.autograd.grad(out.sum() + lse.sum(), inputs)
            assert torch.cuda.current_device() == 0
        results.append([x.cpu() for x in (out, lse, *found)])
    same(*results)


@pytest.mark.multigpu
def test_mixed_devices_are_refused():
    q, k, v = qkv("cuda:0")
    with pytest.raises(ValueError, match="k must be on cuda:0 like q, got cuda:1"):
        torch_fdattn.attention(q, k.to("cuda:1"), v)
    with pytest.raises(ValueError, match="kv_lens must be on cuda:0 like q, got cuda:1"):
        torch_fdattn.attention(q, k, v, int32(1, 2, device="cuda:1"))


def test_float64_is_refused():
    with pytest.raises(NotImplementedError, match="float64 runs on the CPU reference only"):
        torch_fdattn.attention(*qkv(dtype=torch.float64))


def test_kernels_agree_with_the_cpu_reference():
    """The same call on both devices: the ops, not only the kernels, mean the same."""
    for x, y in zip(
        torch_fdattn.decode(*qkv("cuda", dtype=torch.float32), int32(1999, 0)),
        torch_fdattn.decode(*qkv("cpu", dtype=torch.float32), int32(1999, 0, device="cpu")),
        strict=True,
    ):
        torch.testing.assert_close(x.cpu(), y, rtol=1e-4, atol=1e-5)


@pytest.fixture
def far_apart():
    """Two regions of one buffer, more than 2**31 elements from each other."""
    elements = 2**31 + 2**22
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * elements * 2:
        pytest.skip(f"needs {3 * elements * 2 >> 30} GiB of free GPU memory, found {free >> 30}")
    buffers = [
        torch.full((elements,), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2)
    ]
    yield buffers
    del buffers[:]
    torch.cuda.empty_cache()


@pytest.mark.parametrize("strides", [(0, 2**31), (2**31, 64 * 128)], ids=["heads", "sequences"])
def test_heads_and_sequences_beyond_2_to_the_31(far_apart, strides):
    """A stride of 2**31 elements between heads, or sequences: forward, backward, decode."""
    batch = 2 if strides[0] else 1
    shape = (batch, 2, 64, 128)
    views = [x.as_strided(shape, (*strides, 128, 1)) for x in far_apart]
    for view in views:
        view.normal_()
    q = torch.randn(batch, 4, 5, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    near = [view.contiguous().requires_grad_() for view in views]
    far = [view.detach().requires_grad_() for view in views]
    for op in (torch_fdattn.attention, torch_fdattn.decode):
        results = []
        for k, v in (near, far):
            out, lse = op(q, k, v, causal=True)
            results.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))))
        same(*results)


def test_sequence_longer_than_2_to_the_31_elements(far_apart):
    """One head of 16.8 million keys: the last ones alone, and all of them."""
    head_dim, last = 128, 1000
    length = far_apart[0].numel() // head_dim
    k, v = (x[: length * head_dim].view(1, 1, length, head_dim) for x in far_apart)
    k.zero_()
    v.fill_(1.0)
    for x in (k, v):
        x[:, :, -last:].normal_()
    q = torch.randn(1, 4, 1, head_dim, dtype=torch.bfloat16, device="cuda")
    windowed = torch_fdattn.decode(q, k, v, window=(last - 1, -1))
    alone = torch_fdattn.decode(q, k[:, :, -last:], v[:, :, -last:])
    torch.testing.assert_close(windowed, alone, rtol=2e-2, atol=2e-2)
    # Scores of 0 for all keys but the last: lse and out follow from the part that was attended to alone.
    out, lse = torch_fdattn.decode(q, k, v)
    zeros = torch.full_like(lse, length - last).log()
    ones = torch.ones_like(out, dtype=torch.float32)
    expected = torch_fdattn.merge_states(
        torch.stack([ones, alone[0].float()]), torch.stack([zeros, alone[1]])
    )
    torch.testing.assert_close(lse, expected[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(out.float(), expected[0], rtol=2e-2, atol=2e-2)
