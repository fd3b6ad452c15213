"""varlen_attention run after run, in graphs, on streams and devices, and over more than 2**31 elements."""

import pytest
import torch

import torch_fdattn
from torch_fdattn.testing import assert_launched, expected_path, make_tensor


def int32(*values, device="cuda"):
    return torch.tensor(values, dtype=torch.int32, device=device)


def qkv(device="cuda", *, tokens=500, head_dim=64, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (8, tokens, head_dim), (2, tokens, head_dim), (2, tokens, head_dim)
    return [
        make_tensor(x, "bshd", dtype=dtype, device=device, generator=generator).transpose(0, 1)
        for x in shapes
    ]


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def step(inputs, begins, **options):
    """(out, lse, gradients) of a causal call; tokens of no sequence have an lse of -inf and no part in the loss."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = torch_fdattn.varlen_attention(*leaves, begins, causal=True, **options)
    loss = out.float().square().sum() + lse.masked_fill(lse.isinf(), 0.0).sum()
    return out, lse, *torch.autograd.grad(loss, leaves)


@pytest.fixture
def asks_for_same_bits():
    torch_fdattn.set_deterministic(True)
    yield
    torch_fdattn.set_deterministic(False)


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.usefixtures("asks_for_same_bits")
def test_same_bits_on_every_run(device):
    gpu = device == "cuda"
    inputs = qkv(device, tokens=900 if gpu else 24, head_dim=64 if gpu else 16, dtype=torch.float16)
    begins = int32(*((0, 17, 17, 600, 880) if gpu else (0, 9, 9, 22)), device=device)
    first = step(inputs, begins)
    for _ in range(100 if gpu else 1):
        same(step(inputs, begins), first)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_integers_are_exact(dtype, device):
    """Equal scores over powers of two of keys: means and gradients that every dtype holds, in any order of sums."""
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("the interpreter has no bfloat16")
    lengths = 16, 64, 1, 32
    begins = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = int(begins[-1])
    values = []
    for mean, length in enumerate(lengths):  # of each sequence's values: its number
        half = torch.randint(-2, 3, (length // 2, 2, 16))
        values.append(mean + torch.cat([half, -half, half.new_zeros(length % 2, 2, 16)]))
    q = torch.zeros(tokens, 4, 16, dtype=dtype, device=device, requires_grad=True)
    k = torch.randint(-4, 5, (tokens, 2, 16)).to(device, dtype).requires_grad_()
    v = torch.cat(values).to(device, dtype).requires_grad_()
    paths = [expected_path(f"varlen_attention_{x}", device, dtype) for x in ("forward", "backward")]
    with assert_launched(*paths):
        out, lse = torch_fdattn.varlen_attention(q, k, v, begins.to(device), scale=1.0)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    for number, (begin, length) in enumerate(zip(begins.tolist(), lengths, strict=False)):
        own = slice(begin, begin + length)
        keys, values = (x.detach()[own].double().repeat_interleave(2, 1) for x in (k, v))
        assert (out[own] == number).all()
        torch.testing.assert_close(lse[:, own].exp(), torch.full_like(lse[:, own], length))
        assert (
            dv[own] == 2
        ).all()  # two query heads a KV head, each of `length` queries of weight 1 / length
        assert (dk[own] == 0).all()  # dS times q, which is zero
        ds = (values - number).sum(-1, keepdim=True) / length
        expected = (ds * keys).sum(0, keepdim=True).expand(length, -1, -1)
        assert torch.equal(dq[own], expected.to(dtype))


@pytest.mark.gpu
def test_cuda_graph_reads_new_beginnings():
    """A captured training step serves other lengths: the grids depend on tokens and sequences alone."""
    inputs, begins = qkv(), int32(0, 100, 350, 500)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(inputs, begins)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(inputs, begins)
    for values, seed in (((0, 1, 2, 3), 1), ((0, 500, 500, 500), 2), ((0, 0, 137, 499), 3)):
        begins.copy_(int32(*values))
        for x, y in zip(inputs, qkv(seed=seed), strict=True):
            x.copy_(y)
        graph.replay()
        again = step(inputs, begins)
        same((*captured[:2], *captured[3:]), (*again[:2], *again[3:]))
        torch.testing.assert_close(captured[2], again[2], rtol=2e-2, atol=1e-3)  # dQ, in any order


@pytest.mark.gpu
def test_cuda_graph_of_chunked_prefill():
    """Pages, lengths and tables that change under a captured call."""
    k, v = (torch.randn(40, 2, 16, 64, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    q, begins, lens = qkv(tokens=20)[0], int32(0, 5, 20), int32(300, 20)
    table = torch.randperm(40, device="cuda").int().view(2, 20)

    def call():
        return torch_fdattn.varlen_attention(
            q, k, v, begins, page_table=table, kv_lens=lens, causal=True
        )

    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for values, lengths in (((0, 20, 20), (320, 0)), ((0, 1, 18), (7, 100))):
        begins.copy_(int32(*values))
        lens.copy_(int32(*lengths))
        table.copy_(torch.randperm(40, device="cuda").int().view(2, 20))
        graph.replay()
        same(captured, call())


@pytest.mark.gpu
def test_no_synchronisation():
    inputs, begins = qkv(), int32(0, 100, 350, 499)
    slopes, sinks = torch.rand(8, device="cuda"), torch.randn(8, device="cuda")
    seed = torch.tensor([3, 4], device="cuda")

    def calls():
        leaves = [x.detach().requires_grad_() for x in (*inputs, slopes, sinks)]
        for dropout in ({}, dict(dropout_p=0.2, dropout_seed=seed)):
            out, _ = torch_fdattn.varlen_attention(
                *leaves[:3], begins, causal=True, alibi_slopes=leaves[3], sinks=leaves[4], **dropout
            )
            torch.autograd.grad(out, leaves, out.detach())

    calls()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_side_stream():
    """The launch goes to the current stream: it waits for the copies that the same stream still has to make."""
    inputs, begins = qkv(), int32(0, 100, 350, 500)
    expected = torch_fdattn.varlen_attention(*inputs, begins)
    late, late_begins = torch.zeros_like(inputs[0]), torch.zeros_like(begins)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        late.copy_(inputs[0])
        late_begins.copy_(begins)
        found = torch_fdattn.varlen_attention(late, *inputs[1:], late_begins)
    stream.synchronize()
    same(found, expected)


@pytest.mark.multigpu
@pytest.mark.gpu
def test_another_current_device():
    results = []
    for index in (0, 1):
        where = f"cuda:{index}"
        with torch.cuda.device(0):
            found = step(qkv(where), int32(0, 100, 350, 500, device=where))
            assert torch.cuda.current_device() == 0
        assert all(x.device.index == index for x in found)
        results.append([x.cpu() for x in found])
    same(*results)


@pytest.mark.gpu
def test_beyond_2_to_the_31_elements():
    """The last sequence begins behind 2**31 elements of q, k and v: it is as the same tokens alone."""
    heads, dim, last = 16, 128, 300
    tokens = 2**31 // (heads * dim) + 1000
    size = tokens * heads * dim * 2
    free, _ = torch.cuda.mem_get_info()
    needed = 10 * size  # q, k, v, out, dout and three gradients, and what else a backward has
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory, found {free >> 30}")
    shape = tokens, heads, dim
    q, k, v = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    for x in (q, k, v):
        x[:64].normal_()
        x[-last:].normal_()
    ends = [
        0,
        64,
        tokens - last,
        tokens,
    ]  # a short sequence at either end, and a long one of zeros between
    parts = [slice(0, 64), slice(tokens - last, tokens)]
    begins = int32(*ends)
    window = (63, 0)  # or the long one would take minutes
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = torch_fdattn.varlen_attention(*leaves, begins, window=window)
    dout = torch.zeros_like(out)
    for part in parts:
        dout[part].normal_()
    found = torch.autograd.grad(out, leaves, dout)
    for part in parts:
        own = [x.detach()[part].clone().requires_grad_() for x in leaves]
        count = part.stop - part.start
        alone, alone_lse = torch_fdattn.varlen_attention(*own, int32(0, count), window=window)
        grads = torch.autograd.grad(alone, own, dout[part].clone())
        assert alone.any()
        torch.testing.assert_close(out[part], alone, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(lse[:, part], alone_lse, rtol=1e-5, atol=1e-5)
        for x, y in zip(found, grads, strict=True):
            torch.testing.assert_close(x[part], y, rtol=2e-2, atol=2e-2)
    del q, k, v, leaves, out, lse, dout, found
    torch.cuda.empty_cache()
