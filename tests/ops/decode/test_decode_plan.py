"""Decode calls that a caller holds: what they give, what they refuse, where they run as the op."""

import threading

import pytest
import torch

import torch_fdattn
from torch_fdattn import decode, decode_plan, paged_decode, plan_decode, plan_paged_decode
from torch_fdattn.launch import launches
from torch_fdattn.ops import library


def inputs(device, tokens=1, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(3, 8, tokens, 64, device=device, dtype=dtype)
    k, v = (torch.randn(3, 2, 300, 64, device=device, dtype=dtype) for _ in range(2))
    return q, k, v, torch.tensor([300, 17, 0], dtype=torch.int32, device=device)


def same(found, expected) -> None:
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)
        assert x.stride() == y.stride()


@pytest.mark.interpreter
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_cache_at_an_odd_address_runs_as_the_op(kernel_device, kv_dtype, monkeypatch) -> None:
    """What is planned may read two elements at a time."""
    q = torch.randn(2, 4, 1, 64, device=kernel_device, dtype=torch.float16)
    room = torch.randint(0, 100, (2 * 2 * 40 * 64 + 1,), dtype=torch.uint8, device=kernel_device)
    even, odd = (room[at:][: 2 * 2 * 40 * 64].view(kv_dtype).view(2, 2, 40, 64) for at in (0, 1))
    plan = plan_decode(q, even, even)
    same(plan(q, even, even), decode(q, even, even))
    assert plan._prepared.reads_pairs
    monkeypatch.setattr(plan._prepared, "run", None)
    same(plan(q, odd, odd), decode(q, odd, odd))


OPTIONS = {
    "plain": dict,
    "window": lambda device: dict(window=(40, 0), softcap=3.0, scale=0.2),
    "features": lambda device: dict(
        alibi_slopes=torch.rand(8, device=device), sinks=torch.randn(8, device=device),
        attn_mask=torch.rand(300, device=device) > 0.2,
    ),
    "starts": lambda device: dict(q_start=torch.tensor([9, 8, 7], dtype=torch.int32, device=device)),
    "invariant": lambda device: dict(batch_invariant=True),
}  # fmt: skip


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("plain", 1),
        pytest.param("plain", 5, marks=pytest.mark.slow),
        ("window", 5),
        ("features", 1),
        ("starts", 5),
        ("invariant", 1),
    ],
)
def test_as_decode(name, tokens, kernel_device):
    """The same bits, time after time, of other tensors."""
    options = OPTIONS[name](kernel_device) if name != "plain" else {}
    q, k, v, lens = inputs(kernel_device, tokens)
    plan = plan_decode(q, k, v, lens, **options)
    for seed in range(4 if kernel_device == "cuda" else 2):
        q, k, v, lens = inputs(kernel_device, tokens, seed=seed)
        lens = lens.roll(seed)
        same(plan(q, k, v, lens), decode(q, k, v, lens, **options))


@pytest.mark.interpreter
def test_quantised_pages(kernel_device):
    q, *_ = inputs(kernel_device)
    pages = torch.randint(-90, 90, (20, 2, 16, 64), device=kernel_device, dtype=torch.int8)
    table = torch.randperm(20, device=kernel_device)[:18].view(3, 6).int()
    lens = torch.tensor([90, 17, 0], dtype=torch.int32, device=kernel_device)
    scales = dict(k_scale=torch.full((1,), 0.02, device=kernel_device), v_scale=torch.full((1,), 0.01, device=kernel_device))  # fmt: skip
    plan = plan_paged_decode(q, pages, pages, table, lens, **scales)
    for _ in range(3):
        table = table.roll(1, 0)
        found = plan(q, pages, pages, lens, page_table=table)
        same(found, paged_decode(q, pages, pages, table, lens, **scales))


@pytest.mark.interpreter
def test_given_outputs_and_workspaces(kernel_device):
    q, k, v, lens = inputs(kernel_device)
    plan, expected = plan_decode(q, k, v, lens), decode(q, k, v, lens)
    workspace = torch_fdattn.decode_workspace(q, k, v)
    out = torch.empty_like(q), torch.empty(3, 8, 1, device=kernel_device)
    for _ in range(3):
        found = plan(q, k, v, lens, out=out, workspace=workspace)
        assert found[0] is out[0]
        same(found, expected)


def test_other_metadata_are_refused_by_name(device):
    q, k, v, lens = inputs(device)
    plan = plan_decode(q, k, v, lens)
    wrong = {
        "q": (q.repeat(2, 1, 1, 1), k, v, lens), "k_cache": (q, k[:, :, :200], v, lens),
        "v_cache": (q, k, v.half(), lens), "kv_lens": (q, k, v, None),
    }  # fmt: skip
    for name, given in wrong.items():
        with pytest.raises(
            ValueError, match=rf"^{name} must be as planned, torch\.\w+ of shape .*, got "
        ):
            plan(*given)
    with pytest.raises(ValueError, match="page_table must be as planned, None, got"):
        plan(q, k, v, lens, page_table=lens[:, None])
    with pytest.raises(ValueError, match="got list"):
        plan([1], k, v, lens)
    same(plan(q, k, v, lens), decode(q, k, v, lens))


def test_what_decode_refuses(device):
    q, k, v, lens = inputs(device)
    with pytest.raises(ValueError, match="k_cache"):
        plan_decode(q, k[:, :, :, :32], v, lens)
    with pytest.raises(TypeError, match="causal"):
        plan_decode(q, k, v, lens, causal="yes")
    with pytest.raises(TypeError, match="page_table"):
        plan_paged_decode(q, k, v, None)


def test_gradients_go_through_the_op(device):
    q, k, v, lens = inputs(device)
    plan = plan_decode(q, k, v, lens)
    grads = []
    for call in (plan, decode):
        x = q.clone().requires_grad_()
        call(x, k, v, lens)[0].sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.interpreter
def test_what_the_op_has_to_see(kernel_device, monkeypatch):
    """Gradients of what the plan holds or writes to, another precision, an out that is no pair."""
    q, k, v, lens = inputs(kernel_device)
    sinks = torch.randn(8, device=kernel_device, requires_grad=True)
    with torch.no_grad():
        plan, plain = plan_decode(q, k, v, lens, sinks=sinks), plan_decode(q, k, v, lens)
    plan(q, k, v, lens)[0].sum().backward()
    assert sinks.grad.abs().sum() > 0
    out = torch.empty_like(q, requires_grad=True), torch.empty(3, 8, 1, device=kernel_device)
    with pytest.raises(NotImplementedError, match="writes into its arguments"):
        plain(q, k, v, lens, out=out)
    with pytest.raises(TypeError, match="out must be a pair"):
        plain(q, k, v, lens, out=(out[0].detach(),))
    monkeypatch.setattr(decode_plan, "dot_precision", lambda dtype: "another")
    assert not plain._is_current()


def test_compiled_it_is_the_op(device):
    q, k, v, lens = inputs(device)
    plan = plan_decode(q, k, v, lens)
    graphs = []

    def backend(gm, _):
        graphs.append(gm.print_readable(print_output=False))
        return gm

    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: plan(*x), backend=backend, fullgraph=True)
    same(compiled(q, k, v, lens), decode(q, k, v, lens))
    assert "fdattn.decode" in graphs[0]


def test_compiled_it_refuses_the_same(device):
    """A page table, too, which the op of a plan without one would not be given."""
    q, k, v, lens = inputs(device)
    plan = plan_decode(q, k, v, lens)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x, **named: plan(*x, **named), backend="eager")
    same(compiled(q, k, v, lens), decode(q, k, v, lens))
    with pytest.raises(ValueError, match="k_cache must be as planned"):
        compiled(q, k[:, :, :200], v, lens)
    with pytest.raises(ValueError, match="kv_lens must be as planned"):
        compiled(q, k, v, None)
    with pytest.raises(ValueError, match="page_table must be as planned, None, got"):
        compiled(q, k, v, lens, page_table=lens[:, None])


@pytest.mark.gpu
def test_streams_threads_and_graphs():
    q, k, v, lens = inputs("cuda", dtype=torch.bfloat16)
    plan = plan_decode(q, k, v, lens)
    expected = decode(q, k, v, lens)
    results = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                results.append(plan(q, k, v, lens))
            torch.cuda.current_stream().synchronize()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = plan(q, k, v, lens)
    graph.replay()
    for found in (*results, captured):
        same(found, expected)


@pytest.mark.gpu
def test_the_third_call_goes_past_triton(monkeypatch):
    q, k, v, lens = inputs("cuda", dtype=torch.bfloat16)
    plan = plan_decode(q, k, v, lens)
    before = library.launches["decode_forward/triton"]
    expected = [plan(q, k, v, lens) for _ in range(2)][-1]
    monkeypatch.setattr(launches.Launch, "through_triton", None)
    same(plan(q, k, v, lens), expected)
    assert library.launches["decode_forward/triton"] == before + 3


def test_a_plan_is_the_same_by_the_op(device):
    """On a CPU, under autocast: the dtypes that were planned, and an out that is not as planned is refused."""
    q, k, v, lens = inputs(device)
    plan, expected = plan_decode(q, k, v, lens), decode(q, k, v, lens)
    with torch.autocast(q.device.type, torch.bfloat16):
        same(plan(q, k, v, lens), expected)
    out, lse = (torch.empty_like(x) for x in expected)
    same(plan(q, k, v, lens, out=(out, lse)), expected)
    with pytest.raises(
        ValueError, match=r"out must be as planned, torch.float32 .* got torch.bfloat16"
    ):
        plan(q, k, v, lens, out=(out.bfloat16(), lse))
    with pytest.raises(TypeError, match=r"lse must be a torch.Tensor, got int"):
        plan(q, k, v, lens, out=(out, 3))
    with pytest.raises(TypeError, match=r"workspace must be a torch.Tensor, got str"):
        plan(q, k, v, lens, workspace="a")


def test_a_plan_of_meta_tensors():
    """Whose device torch knows no autocast for."""
    given = inputs("meta")
    for found, expected in zip(plan_decode(*given)(*given), decode(*given), strict=True):
        assert found.is_meta
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


@pytest.mark.interpreter
def test_held_tensors_that_changed_since(kernel_device):
    """As a module's do by `parameter.data = …`: of other metadata refused, elsewhere in memory read where they are."""
    q, k, v, lens = inputs(kernel_device, dtype=torch.float16)
    sinks = torch.randn(8, device=kernel_device)
    plan = plan_decode(q, k, v, lens, sinks=sinks)
    sinks.data = torch.randn(8, device=kernel_device)
    same(plan(q, k, v, lens), decode(q, k, v, lens, sinks=sinks))
    sinks.data = sinks.data[:4].clone()
    with pytest.raises(ValueError, match=r"sinks must be as planned, .* of shape \(8,\)"):
        plan(q, k, v, lens)
    k8, v8 = (x.mul(20).to(torch.int8) for x in (k, v))
    scale = torch.full((1,), 0.05, device=kernel_device)
    plan = plan_decode(q, k8, v8, lens, k_scale=scale, v_scale=scale)
    for value in (0.05, 0.1):
        scale.data = torch.full((1,), value, device=kernel_device)
        same(plan(q, k8, v8, lens), decode(q, k8, v8, lens, k_scale=scale, v_scale=scale))


def test_compiled_with_what_it_holds(device):
    q, k, v, lens = inputs(device)
    sinks, starts = torch.randn(8, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    plan = plan_decode(q, k, v, lens, sinks=sinks, kv_start=starts, q_start=lens)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: plan(*x), backend="eager", fullgraph=True)
    for _ in range(2):
        same(compiled(q, k, v, lens), plan(q, k, v, lens))
        sinks.add_(1)
